"""What the tests of all KDA implementations share: their inputs, their judge, their cases.

A test that takes `kda_case` runs once for each of `CASES`; what a case is stands there as data.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def float32():
    with jax.enable_x64(False):
        yield


@pytest.fixture(scope="session")
def tile_places():
    """Where each row's 16-byte pieces lie in a bfloat16 tile [64, 512] of the tensor cores.

    Groups of 8 rows; in a group, bands of 64 columns; in a band, rows of eight pieces, whose number
    is mixed with that of the row.
    """
    places = np.zeros((64, 64), int)
    for row, piece in np.ndindex(64, 64):
        band, in_band = divmod(piece, 8)
        place = row // 8, band, row % 8, in_band ^ (row % 8)
        places[row, piece] = 16 * np.ravel_multi_index(place, (8, 8, 8, 8))
    return places


@pytest.fixture(scope="session")
def kda_arguments():
    """Draws the arguments of `chunk_kda`, in NumPy float64; K ≠ V, so that no swap stays hidden."""

    def draw(T, B=2, H=2, K=8, V=12, seed=0, **replaced):
        rng = np.random.default_rng(seed)
        arguments = {
            "q": rng.normal(size=(B, T, H, K)),
            "k": rng.normal(size=(B, T, H, K)),
            "v": rng.normal(size=(B, T, H, V)),
            "g": -5 / (1 + np.exp(-2 * rng.normal(size=(B, T, H, K)))),
            "beta": 1 / (1 + np.exp(-2 * rng.normal(size=(B, T, H)))),
            "initial_state": rng.normal(size=(B, H, K, V)),
        }
        for name, x in replaced.items():
            arguments[name] = np.broadcast_to(x, arguments[name].shape)
        return arguments

    return draw


@pytest.fixture(scope="session")
def cast():
    """NumPy arguments as JAX arrays, the floating-point ones of one dtype."""

    def as_dtype(arguments, dtype):
        return {
            name: jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for name, x in arguments.items()
        }

    return as_dtype


@pytest.fixture(scope="session")
def exact_kda():
    """The judge: the recurrence in NumPy, float64, by loops; shares no line with ours."""

    def recurrence(
        q, k, v, g, beta, initial_state=None, segment_ids=None, lengths=None, use_qk_l2norm=True
    ):
        q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
        B, T, H, K = q.shape
        o = np.zeros(v.shape)
        states = np.zeros((B, H, K, v.shape[-1]))
        if initial_state is not None:
            states += np.asarray(initial_state, np.float64)
        for b in range(B):
            S = states[b]
            for t in range(T if lengths is None else min(T, lengths[b])):
                if segment_ids is not None and t and segment_ids[b, t] != segment_ids[b, t - 1]:
                    S = np.zeros_like(S)
                qt, kt = q[b, t], k[b, t]
                if use_qk_l2norm:
                    qt, kt = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (qt, kt))
                S = np.exp(g[b, t])[:, :, None] * S
                u = beta[b, t][:, None] * (v[b, t] - np.einsum("hkv,hk->hv", S, kt))
                S = S + kt[:, :, None] * u[:, None, :]
                o[b, t] = np.einsum("hkv,hk->hv", S, qt * K**-0.5)
            states[b] = S
        return o, states

    return recurrence


@pytest.fixture(scope="session")
def assert_same():
    """Every output within `tolerance` of its own largest magnitude, and finite."""

    def compare(ours, truth, tolerance):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
            assert np.isfinite(a).all()
            assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-300))

    return compare


@pytest.fixture(scope="session")
def relative_l2():
    """The errors of o and of the state, each by the magnitude of the truth."""

    def errors(ours, truth):
        assert all(np.isfinite(x).all() for x in ours)
        return [
            np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-300)
            for a, b in zip(ours, truth, strict=True)
        ]

    return errors


def uniform(rng, shape):
    return -5 * rng.random(shape)


def mixed_channels(rng, shape):
    """Channels at −5 beside channels at 0."""
    return np.broadcast_to(np.where(np.arange(shape[-1]) % 2, -5.0, 0.0), shape)


def dead(rng, shape):
    """Three of ten gates at −5, the rest open."""
    return np.where(rng.random(shape) < 0.3, -5.0, -1e-3)


@dataclass(frozen=True)
class KDACase:
    """Inputs of `chunk_kda`, up to the sizes of a key and a value."""

    name: str
    T: int
    B: int = 1
    H: int = 1
    g: object = uniform  # a function of a generator and a shape, or a number
    replaced: dict = field(default_factory=dict)  # q, k, v or beta
    repeated_key: bool = False
    initial_state: bool = True
    starts: tuple[tuple[int, ...], ...] | None = None  # of each row's later documents
    lengths: tuple[int, ...] | None = None  # past them, all inputs are NaN

    def arguments(self, draw, K, V):
        """NumPy arguments; the floats are of float32 values, so that every dtype sees the same."""
        rng = np.random.default_rng(len(self.name))
        arguments = draw(self.T, self.B, self.H, K, V, seed=self.T, **self.replaced)
        shape = arguments["g"].shape
        arguments["g"] = self.g(rng, shape) if callable(self.g) else np.full(shape, self.g)
        if self.repeated_key:
            arguments["k"] = np.broadcast_to(arguments["k"][:, :1], shape)
        if not self.initial_state:
            del arguments["initial_state"]
        arguments = {name: np.array(x, np.float32) for name, x in arguments.items()}
        if self.starts is not None:
            segment_ids = np.zeros((self.B, self.T), np.int32)
            for row, starts in zip(segment_ids, self.starts, strict=True):
                for start in starts:
                    row[start:] += 1
            arguments["segment_ids"] = segment_ids
        if self.lengths is not None:
            for name in ("q", "k", "v", "g", "beta"):
                for row, length in zip(arguments[name], self.lengths, strict=True):
                    row[length:] = np.nan
            arguments["lengths"] = np.array(self.lengths, np.int32)
        return arguments


CASES = [
    KDACase("one token", 1, B=2, H=3),
    KDACase("one token less than a strip", 15),
    KDACase("a strip, all gates at -5", 16, g=-5.0),
    KDACase("a token more than a strip", 17, H=2),
    KDACase("a token less than a chunk, no initial state", 63, initial_state=False),
    KDACase("a chunk, packed, a document of one token", 64, B=2, starts=((1, 2, 16), (63,))),
    KDACase("a token more than a chunk", 65, H=3, starts=((64,),)),
    KDACase("short of two chunks, ragged", 127, B=3, lengths=(127, 64, 1)),
    KDACase("two chunks and a bit, all gates at -5", 130, g=-5.0),
    KDACase("all gates at 0", 130, g=0.0),
    KDACase("channels at -5 beside channels at 0", 130, g=mixed_channels),
    KDACase("three of ten gates dead", 130, g=dead),
    KDACase(
        "one key, written again and again",
        130,
        g=-1e-4,
        replaced={"beta": 0.9999},
        repeated_key=True,
    ),
    KDACase("one key, nothing decays", 130, g=0.0, replaced={"beta": 0.9999}, repeated_key=True),
    KDACase("zero keys", 130, g=-0.01, replaced={"k": 0.0}),
    KDACase(
        "packed and ragged", 130, B=2, H=2, starts=((5, 64, 100), (13, 14, 90)), lengths=(130, 77)
    ),
    KDACase("no tokens in one row", 130, B=2, H=2, starts=((3,), (3,)), lengths=(128, 0)),
    KDACase("a thousand tokens, packed", 1000, H=2, starts=((7, 448, 901),)),
]


def pytest_generate_tests(metafunc):
    if "kda_case" in metafunc.fixturenames:
        metafunc.parametrize("kda_case", CASES, ids=lambda case: case.name)
