"""The second of two processes is killed in the middle; run by test_killed.py."""

import os
import signal
import sys
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

import glm5_jax as glm
from glm5_jax import processes

processes.HEARTBEAT_SECONDS = 5
ARRAYS = 20  # that Orbax has begun to write by then


def die(after):
    """The function that kills the second process when it is called so often."""
    left = [after]

    def called(*_, **__):
        left[0] -= 1
        if not left[0] and not processes.is_first():
            os.kill(os.getpid(), signal.SIGKILL)

    return called


def running(path: Path, out: Path) -> None:
    """All wait for each other, again and again."""
    called = die(after=10)
    while True:
        processes.first_alone(called)
        called()


def saving(path: Path, out: Path) -> None:
    """All write."""
    called = die(after=ARRAYS)
    storage = ocp.options.ArrayOptions.Saving.StorageOptions

    def made(**options):
        called()
        return storage(**options)

    ocp.options.ArrayOptions.Saving.StorageOptions = made
    mesh = jax.make_mesh((8,), ("tensor",))
    glm.save(glm.load(path, mesh=mesh, rules="tp"), out)


if __name__ == "__main__":
    moment, path, out, _, coordinator, _, process = sys.argv[1:]
    index, count = map(int, process.split("/"))
    processes.join(coordinator, index, count)
    {"running": running, "saving": saving}[moment](Path(path), Path(out))
