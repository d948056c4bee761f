"""Several processes that run one model: how they find each other, and what they tell each other.

The engine is JAX's own (`jax.distributed`). Whoever runs a model in several processes calls the
same functions with the same arguments in each of them; every process gets the same results.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from .errors import CheckpointError, ConfigError, TraceError

HEARTBEAT_SECONDS = 30
"""Time without a sign of life of a process after which the others end."""
_LINE_BYTES = 1024


def join(coordinator: str, process: int | None = None, processes: int | None = None) -> None:
    """Make this process number `process` of so many; returns when all of them are there.

    `coordinator` is HOST:PORT, where process 0 can be reached, or `auto`: JAX finds out all three
    under Slurm, Open MPI and the like. If a process dies, JAX ends the others, with its message and
    a status that is not 0, about `HEARTBEAT_SECONDS` later at most.

    Raises:
        ConfigError: one line, where it is not known who belongs together. Where that is known and
            one does not come, JAX ends the others after five minutes.
    """
    found = re.fullmatch(r"\S+:([0-9]+)", coordinator)
    if coordinator != "auto" and not (found and 0 < int(found[1]) < 2**16):
        raise ConfigError(f"coordinator: expected HOST:PORT or auto, got {coordinator!r}")
    if processes is not None:
        waits = f"process {process}/{processes} waits for the others at {coordinator}"
        print(f"{waits}, five minutes at most", file=sys.stderr, flush=True)
    try:
        jax.distributed.initialize(
            None if coordinator == "auto" else coordinator,
            processes,
            process,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        hint = "; give HOST:PORT, and each process its number" if coordinator == "auto" else ""
        problem = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"coordinator {coordinator}: {problem}{hint}") from error


def check_alike(words: Sequence[str]) -> None:
    """Raise ConfigError, in every process, unless all were given the same words."""
    own = np.frombuffer(hashlib.sha256(json.dumps(words).encode()).digest(), np.uint8)
    all_of_them = process_allgather(own)
    if differs := np.flatnonzero((all_of_them != all_of_them[0]).any(axis=1)).tolist():
        raise ConfigError(
            f"process {differs[0]} was started with other arguments than process 0; start all of "
            f"them alike but for --process"
        )


def on_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """All of an array in every process, also of one that is cut over the devices of several."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return process_allgather(x, tiled=True)


def is_first() -> bool:
    """Whether this process is the one that prints and writes for all."""
    return jax.process_index() == 0


def first_alone(step: Callable[[], object]) -> None:
    """Let process 0 do what is done once for all, while the others wait for it.

    Raises:
        CheckpointError: one line, in every process, where the step raises one of ours, or OSError.
    """
    problem = ""
    if is_first():
        try:
            step()
        except (CheckpointError, ConfigError, TraceError) as error:
            problem = str(error)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            problem = f"{where}{error.strerror or error}"
    _raise_together(problem)


def _raise_together(problem: str) -> None:
    """Raise CheckpointError in all processes if one of them has a problem, which "" is not."""
    if jax.process_count() > 1:
        line = np.zeros(_LINE_BYTES, np.uint8)
        raw = np.frombuffer(problem.encode()[:_LINE_BYTES], np.uint8)
        line[: raw.size] = raw
        lines = (bytes(line).rstrip(b"\0") for line in process_allgather(line))
        problem = next((line.decode(errors="ignore") for line in lines if line), "")
    if problem:
        raise CheckpointError(problem)
