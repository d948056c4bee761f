"""The conveyor: in order, no more held than may be, and nothing lost when something fails."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from glm5_jax.checkpoint.conveyor import Digest, Hashers, Job, convey


class Flow:
    """Jobs that take random times, and what is held of them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.lock = threading.Lock()
        self.held = self.most = 0
        self.used, self.done = [], []
        self.pool = ThreadPoolExecutor(3)

    def job(self, number, nbytes, fails=None):
        def read():
            with self.lock:
                self.held += nbytes
                self.most = max(self.most, self.held)
            time.sleep(self.rng.random() / 500)
            if fails == "read":
                raise ValueError(f"{number} failed")
            return number

        def use(piece):
            self.used.append(piece)
            return [self.pool.submit(write) for _ in range(2)]

        def write():
            time.sleep(self.rng.random() / 500)
            if fails == "write":
                raise ValueError(f"{number} failed")

        def done():
            with self.lock:
                self.held -= nbytes
            self.done.append(number)

        return Job(nbytes, read, use, done)


def test_jobs_are_used_and_done_in_order_and_the_limit_holds():
    flow = Flow(0)
    sizes = flow.rng.integers(0, 30, 100)
    convey((flow.job(number, int(size)) for number, size in enumerate(sizes)), limit=64)
    assert flow.used == flow.done == list(range(100))
    assert 30 < flow.most <= 64


def test_a_job_beyond_the_limit_runs_alone():
    flow = Flow(1)
    convey((flow.job(number, size) for number, size in enumerate([10, 100, 10, 200])), limit=50)
    assert flow.done == [0, 1, 2, 3]
    assert flow.most == 200


@pytest.mark.parametrize("stage", ["read", "write"])
def test_what_fails_is_raised_and_nothing_after_it_is_done(stage):
    flow = Flow(2)
    jobs = [flow.job(number, 10, stage if number == 7 else None) for number in range(50)]
    with pytest.raises(ValueError, match="7 failed"):
        convey(iter(jobs), limit=40)
    assert flow.done == list(range(len(flow.done))) and len(flow.done) <= 7
    assert flow.used == list(range(len(flow.used)))
    assert len(flow.used) == 7 if stage == "read" else 7 < len(flow.used) <= 11


def test_digests_of_many_streams_are_each_in_order():
    rng = np.random.default_rng(3)
    streams = [[rng.bytes(int(n)) for n in rng.integers(0, 2000, 30)] for _ in range(9)]
    hashers = Hashers(3)
    digests = [Digest(hashers) for _ in streams]
    for part in range(30):
        for digest, stream in zip(digests, streams, strict=True):
            digest.update(np.frombuffer(stream[part], np.uint8))
    found = [digest.hexdigest() for digest in digests]
    hashers.close()
    assert found == [hashlib.sha256(b"".join(stream)).hexdigest() for stream in streams]
    assert Digest(hashers).hexdigest() == hashlib.sha256().hexdigest()


def test_an_array_that_lies_otherwise_is_hashed_in_c_order():
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T
    hashers = Hashers(1)
    digest = Digest(hashers)
    digest.update(array)
    assert digest.hexdigest() == hashlib.sha256(array.tobytes()).hexdigest()
    hashers.close()
