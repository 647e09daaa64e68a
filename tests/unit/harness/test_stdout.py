from __future__ import annotations

import subprocess
import sys

from tests.harness.supervisor import child_environ

PROGRAM = """
import os
from tests.harness.stdout import keep_to_python
keep_to_python()
os.write(1, b"noise")
print("said")
os.system("echo more noise")
print("said again")
os._exit(0)
"""


def test_what_a_library_prints_does_not_mix_with_what_the_program_says() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=child_environ(), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"said\nsaid again\n", b"noisemore noise\n")
