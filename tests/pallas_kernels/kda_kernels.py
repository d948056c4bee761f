"""The Mosaic GPU kernels of KDA against the recurrence; `test_kda_mosaic.py` starts this file.

On a Hopper GPU they run as they are. Elsewhere they are interpreted, step by step, with the race
detector on: exact float32 products of what the kernels round to bfloat16, so that rounding shows.
That takes a process of its own: the interpreter blocks a thread of JAX's pool for each warpgroup
that waits, and hangs where the pool has one for each of two cores.
"""

import contextlib
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import hopper, mosaic_common
from pallas_kernels.kda import chunk_kda
from pallas_kernels.kda.mosaic_prep import LEAST

ON_GPU = jax.default_backend() == "gpu"
kernels = contextlib.nullcontext if ON_GPU else hopper.interpreted
assert ON_GPU or int(os.environ["NPROC"]) >= 8, "JAX's pool needs threads to spare; see the top"

FUZZ = "GLM5_JAX_FUZZ" in os.environ
SIZES = [(128, 128), (64, 64), (128, 64), (64, 128)]
C, STRIP = 64, 16


def rounded(x):
    return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)


def normalized(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def emulated_kda(q, k, v, g, beta, initial_state, segment_ids=None, lengths=None, l2norm=True):
    """What the kernels' docstrings say, roundings included and in float64 otherwise, by loops."""
    q, k, v, g, beta = (np.array(x, np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    starts = np.zeros((B, T), int)
    if segment_ids is not None:
        starts[:, 1:] = np.diff(segment_ids, axis=1) != 0
    for b, length in enumerate([] if lengths is None else lengths):
        for x in (q, k, v, g, beta, starts):
            x[b, length:] = 0
    if l2norm:
        q, k = normalized(q), normalized(k)
    q = q * K**-0.5
    padding = -T % C
    q, k, v, g, beta, starts = (
        np.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        for x in (q, k, v, g, beta, starts)
    )
    o, states = np.zeros(v.shape), np.array(initial_state, np.float64)
    for b in range(B):
        for h in range(H):
            for t in range(0, T, C):
                row = np.s_[b, t : t + C, h]
                o[row], states[b, h] = emulated_chunk(
                    q[row], k[row], v[row], g[row], beta[row], starts[b, t : t + C], states[b, h]
                )
    return o[:, :T], states


def emulated_chunk(q, k, v, g, beta, starts, S):
    b = np.cumsum(np.maximum(g, LEAST), axis=0)
    r = b[STRIP // 2 :: STRIP]
    own = np.arange(C) // STRIP
    blocks = [np.s_[i : i + STRIP] for i in range(0, C, STRIP)]
    restarts = np.cumsum(starts)[:, None]
    start_k, start_q = (rounded(x * np.exp(b) * (restarts == 0)) for x in (-k, q))
    end = rounded(k * np.exp(b[-1] - b) * (restarts == restarts[-1]))
    shrunk = np.exp(b - r[own])
    A, L = np.zeros((C, C)), np.zeros((C, C))
    for i, block in enumerate(blocks):
        moved = rounded(np.where(own[:, None] <= i, k * np.exp(np.minimum(r[i] - b, 300)), 0))
        A[block] = rounded((q * shrunk)[block]) @ moved.T
        L[block] = beta[block, None] * (rounded((k * shrunk)[block]) @ moved.T)
    same = restarts == restarts.T
    A, L = rounded(np.tril(A) * same), np.tril(L, -1) * same
    inverse = np.zeros((C, C))
    for i, block in enumerate(blocks):
        inverted = np.linalg.inv(np.eye(STRIP) + L[block, block])
        before = np.s_[: i * STRIP]
        total = rounded(-rounded(L[block, before]) @ rounded(inverse[before]))
        inverse[block] = rounded(inverted) @ total
        inverse[block, block] += inverted
    S_rounded = rounded(S)
    u = rounded(rounded(inverse * beta) @ rounded(v + start_k @ S_rounded))
    o = rounded(start_q @ S_rounded + A @ u)
    decay = np.exp(b[-1]) * (restarts[-1] == 0)
    return o, decay[:, None] * S + end.T @ u


run = jax.jit(chunk_kda, static_argnames=("output_final_state", "use_qk_l2norm", "implementation"))


@pytest.fixture
def judge(float32, exact_kda, relative_l2):
    """The kernels' errors against those of the emulation, float32's own of 1e-5 granted."""

    def compare(arguments, use_qk_l2norm=True, g_dtype=jnp.float32):
        arguments = dict(arguments)
        for name in ("q", "k", "v"):
            arguments[name] = np.asarray(arguments[name], ml_dtypes.bfloat16)
        if g_dtype == jnp.bfloat16:
            arguments["g"] = np.asarray(arguments["g"], ml_dtypes.bfloat16)
        with kernels():
            ours = run(
                **arguments,
                use_qk_l2norm=use_qk_l2norm,
                output_final_state=True,
                implementation="mosaic_gpu",
            )
        assert ours[0].dtype == jnp.bfloat16
        assert ours[1].dtype == jnp.float32
        assert ON_GPU or not gpu_callbacks.get_races().races_found
        truth = exact_kda(**arguments, use_qk_l2norm=use_qk_l2norm)
        B, _, H, K = arguments["q"].shape
        state = arguments.pop("initial_state", np.zeros((B, H, K, arguments["v"].shape[-1])))
        emulation = emulated_kda(**arguments, initial_state=state, l2norm=use_qk_l2norm)
        for error, granted in zip(
            relative_l2(ours, truth), relative_l2(emulation, truth), strict=True
        ):
            print(f"{error:.2e} of {granted:.2e}", end="  ")
            assert error <= 1.1 * granted + 1e-5

    return compare


@pytest.mark.parametrize("sizes", SIZES if FUZZ or ON_GPU else [None], ids=str)
def test_kernels_round_as_they_say(judge, kda_case, kda_arguments, sizes):
    if kda_case.T > 500 and not (FUZZ or ON_GPU):
        pytest.skip("interpreted under make fuzz")
    K, V = sizes or SIZES[len(kda_case.name) % len(SIZES)]
    judge(kda_case.arguments(kda_arguments, K, V))


@pytest.mark.parametrize("g", [-50.0, -200.0, -1e30, "-50 among 0", "-8 among 0"])
def test_gates_below_the_bound_count_as_the_bound(judge, kda_arguments, g):
    if isinstance(g, str):
        strong = np.random.default_rng(0).random((1, 130, 1, 128)) < 0.7
        g = np.where(strong, float(g.split()[0]), 0.0)
    judge(kda_arguments(130, B=1, H=1, K=128, V=128, g=g))


def test_queries_and_keys_as_they_are_and_narrow_gates(judge, kda_arguments):
    arguments = kda_arguments(70, B=1, H=2, K=64, V=64)
    arguments["q"], arguments["k"] = 3 * arguments["q"], 0.7 * normalized(arguments["k"])
    judge(arguments, use_qk_l2norm=False, g_dtype=jnp.bfloat16)


def test_all_ones(judge, kda_arguments):
    judge(kda_arguments(130, B=1, H=1, K=128, V=128, q=1.0, k=1.0, v=1.0, g=0.0, beta=1.0))


@pytest.mark.skipif(
    not ON_GPU, reason="needs a GPU: the interpreter takes a warpgroup for one thread"
)
def test_barriers_by_hand_are_enough(float32, kda_arguments, cast, monkeypatch):
    """Bit for bit what the same kernels give with a barrier around every access, each time."""
    arguments = kda_arguments(1000, B=2, H=64, K=128, V=128)
    narrow = cast({name: arguments.pop(name) for name in ("q", "k", "v")}, jnp.bfloat16)
    arguments = narrow | cast(arguments, jnp.float32)
    ours = [run(**arguments, implementation="mosaic_gpu")[0] for _ in range(20)]

    params = mosaic_common.plgpu.CompilerParams
    monkeypatch.setattr(
        mosaic_common.plgpu,
        "CompilerParams",
        lambda **options: params(**options | {"unsafe_no_auto_barriers": False}),
    )
    jax.clear_caches()
    careful, _ = run(**arguments, implementation="mosaic_gpu")
    jax.clear_caches()
    for o in ours:
        np.testing.assert_array_equal(o, careful)


def test_gradients_are_those_of_the_chunked_form(float32, kda_arguments, cast):
    arguments = kda_arguments(70, B=1, H=1, K=64, V=64)
    narrow = cast({name: arguments.pop(name) for name in ("q", "k", "v")}, jnp.bfloat16)
    arguments = narrow | cast(arguments, jnp.float32)
    whole = {"segment_ids": (jnp.arange(70) > 40)[None].astype(int), "lengths": jnp.array([66])}

    def loss(arguments, implementation):
        o, state = chunk_kda(
            **arguments, **whole, output_final_state=True, implementation=implementation
        )
        return jnp.sum(jnp.cos(jnp.arange(o.size)) * o.ravel()) + jnp.sum(state[0, 0, :, 5])

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    with kernels():
        ours = gradient(arguments, "mosaic_gpu")
    for name, x in gradient(arguments, "xla").items():
        assert ours[name].dtype == arguments[name].dtype
        assert np.abs(x).max() > 0
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
