"""Results that hang on the code XLA generates, with the code that users run.

All other tests run code that is generated in a hurry, see conftest.py.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_what_is_marked_codegen_holds_with_all_optimisations():
    marked = {file for file in TESTS.rglob("test_*.py") if "mark.codegen" in file.read_text()}
    command = [sys.executable, "-m", "pytest", "-m", "codegen", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *sorted(map(str, marked - {Path(__file__)}))],
        env=os.environ | {"XLA_FLAGS": ""},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
