"""What tests break things with: a fault proxy, a supervisor of processes, a ledger, and counters of what is left over.

proxy.py       FaultProxy: stands between two ends of a TCP connection; delays, holds, cuts, dribbles, drops replies
disk.py        SmallDisk: a file system with little room
supervisor.py  Supervisor: starts child processes, kills, stops and continues them by pid, ends them all with the test
ledger.py      Ledger: what every process did, in files that survive its death; compared with the state at the end
stdout.py      keeps what a library prints out of what a program says to its test
leaks.py       what a process holds: descriptors, threads, children, shared memory (the fixture is `no_leaks`)
"""

from tests.harness.disk import SmallDisk
from tests.harness.ledger import Ledger, LedgerWriter, Outcome, violations
from tests.harness.proxy import FaultProxy
from tests.harness.supervisor import Child, Supervisor, wait_until

__all__ = [
    "Child",
    "FaultProxy",
    "Ledger",
    "LedgerWriter",
    "Outcome",
    "SmallDisk",
    "Supervisor",
    "violations",
    "wait_until",
]
