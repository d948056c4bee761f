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

from pallas_kernels import hopper
from pallas_kernels.sparse_mla import mosaic_gpu, sparse_mla_decode

ON_GPU = jax.default_backend() == "gpu"
kernel = contextlib.nullcontext if ON_GPU else hopper.interpreted
assert ON_GPU or int(os.environ["NPROC"]) >= 8, "JAX's pool needs threads to spare; see the top"

TILE = 64


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


def test_kernel_rounds_as_it_says(mla_case, judge):
    judge(dataclasses.replace(mla_case, R=512).arguments())
