"""Large arrays on their way, piece by piece: read ahead by workers, hashed, passed on in order.

What is held at once is bounded in bytes, whatever the arrays' sizes are. Reading, hashing and
writing let go of Python's lock, so the stages run beside each other, and a machine with many cores
reads, decodes and hashes many pieces at a time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

WORKERS = max(2, min(8, os.cpu_count() or 1))
PIECE_BYTES = 32 * 2**20
IN_FLIGHT = 8 * PIECE_BYTES  # of pieces that are being read, hashed and written


class Promise(Protocol):
    """What waits for its result: a Future of Python's or of TensorStore's."""

    def done(self) -> bool:
        """Whether the result is there."""

    def result(self) -> Any:
        """The result once it is there, or the exception raised on the way to it."""


class Digest:
    """A SHA-256 that is fed in order, on a thread of its own or one shared with others."""

    def __init__(self, hashers: Hashers):
        self._hashers = hashers
        self._hash = hashlib.sha256()
        self._thread: int | None = None
        self._last: Future | None = None

    def update(self, array: np.ndarray) -> Future:
        """Hash an array's bytes in C order after all that came before; done with it when done."""
        if self._thread is None:
            self._thread = self._hashers.idlest()
        self._last = self._hashers.submit(self._thread, self._hash, array)
        return self._last

    def hexdigest(self) -> str:
        """The hash of everything so far."""
        if self._last is not None:
            self._last.result()
        return self._hash.hexdigest()


class Hashers:
    """Threads for `Digest`s: one digest stays on one thread, on that with the least to do."""

    def __init__(self, threads: int = WORKERS):
        self._threads = [ThreadPoolExecutor(1) for _ in range(threads)]
        self._queued = [0] * threads
        self._lock = threading.Lock()

    def idlest(self) -> int:
        """The thread that has the fewest bytes to hash."""
        with self._lock:
            return self._queued.index(min(self._queued))

    def submit(self, thread: int, hash: Any, array: np.ndarray) -> Future:
        """Have an array hashed on a thread, after what it was given before."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with self._lock:
            self._queued[thread] += data.nbytes

        def work() -> None:
            hash.update(data)
            with self._lock:
                self._queued[thread] -= data.nbytes

        return self._threads[thread].submit(work)

    def close(self) -> None:
        """End the threads, dropping what is not begun."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)


@dataclass
class Job:
    """A piece on its way.

    `read` runs on a worker, several at a time. `use` takes its result, job after job in order, and
    returns what must be over before the piece can be let go; `done` runs then, in order too.
    `nbytes` is what the piece holds of memory meanwhile.
    """

    nbytes: int
    read: Callable[[], Any]
    use: Callable[[Any], Sequence[Promise]]
    done: Callable[[], None] = lambda: None


def convey(jobs: Iterable[Job], limit: int = IN_FLIGHT) -> None:
    """Run jobs with at most `limit` bytes of them held at once, one larger job alone.

    Jobs are drawn from the iterable when there is room for the next. The first exception of any
    stage is raised, and what is not begun is dropped.
    """
    reading: deque[tuple[Job, Future]] = deque()
    leaving: deque[tuple[Job, Sequence[Promise]]] = deque()
    held = 0

    def pass_on() -> None:
        job, piece = reading.popleft()
        leaving.append((job, job.use(piece.result())))

    def let_go() -> None:
        nonlocal held
        job, promises = leaving[0]
        for promise in promises:
            promise.result()
        leaving.popleft()
        held -= job.nbytes
        job.done()

    pool = ThreadPoolExecutor(WORKERS)
    try:
        for job in jobs:
            while held and held + job.nbytes > limit:
                while reading and (reading[0][1].done() or not leaving):
                    pass_on()
                let_go()
            reading.append((job, pool.submit(job.read)))
            held += job.nbytes
            while reading and reading[0][1].done():
                pass_on()
            while leaving and all(promise.done() for promise in leaving[0][1]):
                let_go()
        while reading:
            pass_on()
        while leaving:
            let_go()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        # When something failed: nothing goes on behind the caller's back, who may try again.
        for _, promises in leaving:
            for promise in promises:
                with suppress(Exception):
                    promise.result()
