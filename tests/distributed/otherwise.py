"""A command with other tokens in each process; run by test_processes.py."""

import sys

from glm5_jax.cli import main

index = sys.argv[-1].partition("/")[0]
sys.argv[1:] = [
    "forward",
    sys.argv[1],
    "--tokens",
    f"1,{index}",
    "--mesh",
    "expert=2",
    *sys.argv[2:],
]
main()
