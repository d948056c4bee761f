"""The kernel of sparse MLA against float64; `test_sparse_mla_mosaic.py` starts this file.

On a Hopper GPU it runs as it is. Elsewhere it is interpreted, step by step, with the race detector
on: exact float32 products of what the kernel rounds to bfloat16, so that rounding shows. That takes
a process of its own, as it does for KDA (`kda_kernels.py`).
"""

import contextlib
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import hopper, mosaic_common
from pallas_kernels.sparse_mla import mosaic_gpu, sparse_mla_decode

ON_GPU = jax.default_backend() == "gpu"
kernel = contextlib.nullcontext if ON_GPU else hopper.interpreted
assert ON_GPU or int(os.environ["NPROC"]) >= 8, "JAX's pool needs threads to spare; see the top"

FUZZ = "GLM5_JAX_FUZZ" in os.environ
TILE = 64
AUTOMATIC = {"unsafe_no_auto_barriers": False}


def rounded(x):
    return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)


def emulated_mla(q, kv, indices, scale):
    """What the kernel's docstring says, roundings included and in float64 otherwise, by loops."""
    q = np.asarray(q, np.float64)
    B, T = q.shape[:2]
    _, tiles = mosaic_gpu.split(B * T, -(-indices.shape[2] // TILE))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t in np.ndindex(B, T):
        cache = kv if kv.ndim == 2 else kv[b]
        found = []
        for start in range(0, indices.shape[2], tiles * TILE):
            part = indices[b, t, start : start + tiles * TILE]
            found.append(emulated_part(q[b, t], cache, part, scale))
        outs, lses = (np.stack(x) for x in zip(*found, strict=True))
        if not np.isfinite(lses).any():
            continue
        top = lses.max(0)
        weights = np.exp(lses - top)
        lse[b, t] = top + np.log(weights.sum(0))
        whole = (weights[..., None] * outs).sum(0) / weights.sum(0)[:, None]
        out[b, t] = rounded(whole)
    return out, lse


def emulated_part(q, cache, indices, scale):
    top, total, out = np.full(len(q), -1e30), np.zeros(len(q)), np.zeros(q.shape)
    for start in range(0, len(indices), TILE):
        rows = [cache[i] for i in indices[start : start + TILE] if 0 <= i < len(cache)]
        if not rows:
            continue
        rows = np.asarray(rows, np.float64)
        s = scale * np.log2(np.e) * q @ rows.T
        new = np.maximum(top, s.max(1))
        p, shrink = np.exp2(s - new[:, None]), np.exp2(top - new)
        total = total * shrink + p.sum(1)
        out = out * shrink[:, None] + rounded(p) @ rows
        top = new
    with np.errstate(divide="ignore"):
        return out / np.where(total > 0, total, 1)[:, None], top * np.log(2) + np.log(total)


def narrow(arguments):
    """The floats as bfloat16, whose values they are."""
    return arguments | {n: np.asarray(arguments[n], ml_dtypes.bfloat16) for n in ("q", "kv")}


def run(q, kv, indices, scale):
    """A compilation of its own: what is patched into the kernel's module counts."""
    decode = functools.partial(
        sparse_mla_decode, scale=scale, return_lse=True, implementation="mosaic_gpu"
    )
    with kernel():
        out, lse = jax.jit(lambda *arrays: decode(*arrays))(q, kv, indices)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert ON_GPU or not gpu_callbacks.get_races().races_found
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


@pytest.fixture
def judge(exact_mla):
    """The kernel's error against that of the emulation; what selects nothing is exact."""

    def compare(arguments):
        with jax.enable_x64(False):
            out, lse = run(**narrow(arguments))
        truth, true_lse = exact_mla(**arguments)
        emulation, _ = emulated_mla(**arguments)
        none = np.isneginf(true_lse)
        np.testing.assert_array_equal(np.isneginf(lse), none)
        np.testing.assert_array_equal(out[none], 0)
        np.testing.assert_allclose(lse[~none], true_lse[~none], rtol=2e-6, atol=2e-6)
        error, granted = (np.linalg.norm(x - truth) for x in (out, emulation))
        print(f"{error:.2e} of {granted:.2e}", end="  ")
        assert error <= 1.5 * granted

    return compare


def test_kernel_rounds_as_it_says(mla_case, judge, monkeypatch):
    """Split into parts as on a card, and whole as for a batch that fills it."""
    if mla_case.B * mla_case.T * mla_case.W > 5000 and not (FUZZ or ON_GPU):
        pytest.skip("interpreted under make fuzz")
    arguments = dataclasses.replace(mla_case, R=512).arguments()
    judge(arguments)
    if mla_case.W > TILE:
        monkeypatch.setattr(mosaic_gpu, "MULTIPROCESSORS", 1)
        judge(arguments)


@pytest.mark.parametrize("W", [17, 63, 65, 129])
def test_widths_between_tiles(judge, mla_arguments, W):
    judge(mla_arguments(W=W, A=3, R=512, B=1))


def test_rows_past_the_end_are_none(judge, mla_arguments):
    arguments = mla_arguments(W=65, T=2, A=3, R=512, B=1)
    S = arguments["kv"].shape[1]
    arguments["indices"][0, 0, :40] = S, 2**31 - 1, -(2**31), *range(S + 1, S + 38)
    judge(arguments)


def test_all_ones(judge):
    q, kv = np.ones((1, 1, 64, 512)), np.ones((1, 200, 512))
    judge({"q": q, "kv": kv, "indices": np.arange(200, dtype=np.int32)[None, None], "scale": 1.0})


def test_gradients_are_those_of_the_form_in_blocks():
    rng = np.random.default_rng(0)
    q, kv = (rng.standard_normal(shape) for shape in ((1, 2, 3, 512), (1, 90, 512)))
    indices = np.stack([rng.permutation(90)[:67] for _ in range(2)])[None]

    def loss(q, kv, implementation):
        out, lse = sparse_mla_decode(
            q, kv, indices, scale=0.05, return_lse=True, implementation=implementation
        )
        return jnp.sum(jnp.cos(jnp.arange(out.size)) * out.ravel()) + jnp.sum(lse[0, 1])

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    with jax.enable_x64(False), kernel():
        inputs = jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16)
        ours, theirs = (gradient(*inputs, name) for name in ("mosaic_gpu", "xla"))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(b).max() > 0
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def full_card():
    """As many tokens as the card has multiprocessors, the model's selection, some of it holes."""
    rng = np.random.default_rng(0)
    indices = np.stack([rng.permutation(4096)[:2051] for _ in range(132)])[:, None]
    indices[rng.random(indices.shape) < 0.1] = -1
    q, kv = (rng.standard_normal(shape) for shape in ((132, 1, 64, 512), (132, 4096, 512)))
    return narrow({"q": q, "kv": kv, "indices": indices.astype(np.int32), "scale": 0.05})


@pytest.mark.skipif(
    not ON_GPU, reason="needs a GPU: the interpreter takes a warpgroup for one thread"
)
@pytest.mark.parametrize(
    ("name", "careful"),
    [
        # A barrier around every access.
        ("CompilerParams", lambda plain, **options: plain(**options | AUTOMATIC)),
        # No tile is asked for before the one before it has arrived.
        ("barrier_test", lambda plain, barrier: False),
    ],
    ids=["barriers", "loads"],
)
def test_order_changes_nothing(full_card, monkeypatch, name, careful):
    """Bit for bit what a more careful form of the same kernel gives, each time."""
    with jax.enable_x64(False):
        ours = [run(**full_card) for _ in range(20)]
        plain = getattr(mosaic_common.plgpu, name)
        monkeypatch.setattr(mosaic_common.plgpu, name, functools.partial(careful, plain))
        jax.clear_caches()
        truth = run(**full_card)
        jax.clear_caches()
    for found in ours:
        for a, b in zip(found, truth, strict=True):
            np.testing.assert_array_equal(a, b)
