from __future__ import annotations

import pytest

from tqclient.errors import LeaseExpired, Unavailable
from tqclient.transport.sessions import WriteSessions


class Recorder:
    """WriteSessions whose hooks write down what they were told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sessions = WriteSessions(
            take=lambda session: self.events.append(f"take {session}"),
            drop=lambda session: self.events.append(f"drop {session}"),
            end=lambda: self.events.append("end"),
        )


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_session_is_taken_once_and_dropped_once(recorder: Recorder) -> None:
    for _ in range(2):
        recorder.sessions.open_session(1)
    with recorder.sessions.writing(1):
        pass
    for _ in range(2):
        recorder.sessions.close_session(1)
    assert recorder.events == ["take 1", "drop 1"]


def test_a_closed_session_is_dropped_when_its_last_write_ends(recorder: Recorder) -> None:
    def fail() -> None:
        with recorder.sessions.writing(1):
            recorder.sessions.close_session(1)
            raise RuntimeError("broken")

    recorder.sessions.open_session(1)
    with recorder.sessions.writing(1):
        with pytest.raises(RuntimeError, match="broken"):
            fail()
        assert recorder.events == ["take 1"]
    assert recorder.events == ["take 1", "drop 1"]


def test_no_write_starts_in_a_closed_or_unknown_session(recorder: Recorder) -> None:
    recorder.sessions.open_session(1)
    with recorder.sessions.writing(1):
        recorder.sessions.close_session(1)
        with pytest.raises(LeaseExpired, match="session 1 is not open"), recorder.sessions.writing(1):
            pass
        with pytest.raises(LeaseExpired, match="session 1 was closed"):
            recorder.sessions.open_session(1)
    with pytest.raises(LeaseExpired, match="session 2 is not open"), recorder.sessions.writing(2):
        pass


def test_the_end_comes_after_the_last_write(recorder: Recorder) -> None:
    recorder.sessions.open_session(1)
    recorder.sessions.open_session(2)
    with recorder.sessions.writing(2):
        recorder.sessions.close()
        recorder.sessions.close()
        assert recorder.events == ["take 1", "take 2", "drop 1"]
    assert recorder.events == ["take 1", "take 2", "drop 1", "drop 2", "end"]
    recorder.sessions.close()
    assert recorder.events[-2:] == ["drop 2", "end"]
    with pytest.raises(Unavailable, match="closed"):
        recorder.sessions.open_session(3)


def test_what_cannot_be_taken_is_not_open() -> None:
    def refuse(session: int) -> None:
        raise Unavailable("no lock")

    sessions = WriteSessions(take=refuse, drop=refuse, end=lambda: None)
    with pytest.raises(Unavailable, match="no lock"):
        sessions.open_session(1)
    with pytest.raises(LeaseExpired), sessions.writing(1):
        pass
    sessions.close()
