"""Generates the Python stubs of `proto/tq/v1` into `tqclient/wire/v1`.

python proto/generate.py            writes them
python proto/generate.py --check    exits 1, naming the files, when the committed ones are stale
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent
STUBS = PROTO_ROOT.parent / "tqclient" / "wire" / "v1"
# protoc names Python modules after the proto's path; ours live in a package of their own.
IMPORT = re.compile(r"^from tq\.v1 import ", re.MULTILINE)


def generate() -> dict[str, str]:
    """Returns the stubs as file name → text."""
    sources = sorted(str(path) for path in PROTO_ROOT.glob("tq/v1/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        includes = [f"-I{PROTO_ROOT}", f"-I{resources.files('grpc_tools') / '_proto'}"]
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", *includes, *outputs, *sources]) != 0:
            raise SystemExit("protoc failed; its messages are above")
        files = sorted(Path(scratch).glob("tq/v1/*.py*"))
        stubs = {file.name: IMPORT.sub("from tqclient.wire.v1 import ", file.read_text()) for file in files}
    # A proto file without a service still gets an empty grpc module.
    return {name: text for name, text in stubs.items() if not name.endswith("_grpc.py") or "class " in text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when the committed stubs are stale"
    )
    arguments = parser.parse_args()
    fresh = generate()
    committed = {file.name: file.read_text() for file in STUBS.glob("*_pb2*")}
    if arguments.check:
        stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
        if stale:
            print(f"stale stubs in {STUBS.name}: {', '.join(stale)}; run 'make proto'", file=sys.stderr)
        return 1 if stale else 0
    STUBS.mkdir(parents=True, exist_ok=True)
    for name in committed.keys() - fresh.keys():
        (STUBS / name).unlink()
    for name, text in fresh.items():
        (STUBS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
