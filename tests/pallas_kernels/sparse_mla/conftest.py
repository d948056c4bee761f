"""What the tests of all sparse MLA implementations share: their inputs, their judge, their cases.

A test that takes `mla_case` runs once for each of `CASES`; what a case is stands there as data.
"""

from dataclasses import dataclass

import numpy as np
import pytest


@dataclass(frozen=True)
class MLACase:
    """Inputs of `sparse_mla_decode`: what each token selects, and how much of it is no row."""

    name: str
    W: int
    T: int = 1
    A: int = 8
    R: int = 128
    B: int = 2
    S: int = 0  # rows of a sequence's cache, a third more than W by default
    holes: float = 0.0  # the share of −1, anywhere
    empty: tuple[int, ...] = ()  # tokens of each row that select nothing
    paged: bool = False
    scores: float = 1.0  # by how much larger than those of unit normal vectors

    def arguments(self):
        """NumPy arguments, the floats of bfloat16 values, so that every dtype sees the same.

        What no token selects is NaN: rows between the others, and the cache's tail.
        """
        rng = np.random.default_rng(self.W + 7 * self.T + self.A)
        S = self.S or self.W + self.W // 3 + 2
        kv = np.full((self.B, S, self.R), np.nan, np.float32)
        indices = np.stack(
            [
                [rng.choice(S - 1, self.W, replace=False) for _ in range(self.T)]
                for _ in range(self.B)
            ]
        ).astype(np.int32)
        indices[rng.random(indices.shape) < self.holes] = -1
        for token in self.empty:
            indices[:, token] = -1
        for row, chosen in zip(kv, indices, strict=True):
            used = np.unique(chosen[chosen >= 0])
            row[used] = rounded(rng.standard_normal((len(used), self.R)))
        q = rounded(self.scores * rng.standard_normal((self.B, self.T, self.A, self.R)))
        if self.paged:
            # Sequences interleaved: row s of sequence b stands in slot s * B + b.
            kv = np.swapaxes(kv, 0, 1).reshape(-1, self.R)
            slots = indices * self.B + np.arange(self.B)[:, None, None]
            indices = np.where(indices < 0, -1, slots).astype(np.int32)
        # Not R ** -0.5, so that nobody can take the one for the other.
        return {"q": q, "kv": kv, "indices": indices, "scale": 0.7 * self.R**-0.5}


def rounded(x):
    """float32 numbers of bfloat16 precision (towards zero)."""
    return (np.float32(x).view(np.uint32) & 0xFFFF0000).view(np.float32)


CASES = [
    MLACase("one row, one head", W=1, A=1),
    MLACase("three rows of which some are holes, one token empty", W=3, T=4, holes=0.4, empty=(1,)),
    MLACase("a tile", W=64, T=2, R=512),
    MLACase("a tile and the tail, paged, with holes", W=67, T=3, A=64, paged=True, holes=0.3),
    MLACase("one head, sharp, with an empty token", W=67, T=2, A=1, scores=20.0, empty=(0,)),
    MLACase("nearly all are holes", W=333, T=1, A=8, holes=0.99),
    MLACase("the model's selection", W=2051, T=1, A=64, R=512, B=1, holes=0.1),
    MLACase("the model's selection, a draft, paged", W=2051, T=4, A=8, R=128, paged=True),
    MLACase("nobody selects anything", W=67, T=2, A=8, empty=(0, 1)),
]


@pytest.fixture(scope="session")
def mla_arguments():
    """Arguments of sizes of a test's own."""
    return lambda **sizes: MLACase("of its own", **sizes).arguments()


@pytest.fixture(scope="session")
def exact_mla():
    """The judge: the definition in NumPy, float64, by loops; shares no line with ours."""

    def attend(q, kv, indices, scale):
        q = np.asarray(q, np.float64)
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        for b, t in np.ndindex(q.shape[:2]):
            cache = kv if kv.ndim == 2 else kv[b]
            rows = np.array([cache[i] for i in indices[b, t] if 0 <= i < len(cache)], np.float64)
            for a in range(q.shape[2] if len(rows) else 0):
                scores = scale * rows @ q[b, t, a]
                weights = np.exp(scores - scores.max())
                out[b, t, a] = weights @ rows / weights.sum()
                lse[b, t, a] = scores.max() + np.log(weights.sum())
        return out, lse

    return attend


def pytest_generate_tests(metafunc):
    if "mla_case" in metafunc.fixturenames:
        metafunc.parametrize("mla_case", CASES, ids=lambda case: case.name)
