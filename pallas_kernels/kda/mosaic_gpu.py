"""KDA as two Mosaic GPU kernels for Hopper (sm_90a): bfloat16 products, float32 state.

`mosaic_prep.py` computes what each chunk of 64 tokens needs, for all chunks at once;
`mosaic_scan.py` carries the state through them. Their docstrings hold the arithmetic and what they
round. The gradient is that of `xla.py`.

Expected time on an H200 at B 1, T 8192, H 64, K = V = 128: computed, not yet measured on hardware.
Bounds are those of `kda/roofline.py`, at the card's 4.8 TB/s and 790 TFLOP/s.

    prepare   reads q, k (268 MB) and float32 g (268 MB); writes three tiles [64, 128] and two
              [64, 64] per chunk in bfloat16 (537 MB), the decay (4 MB)     1.08 GB, 0.225 ms
              wgmma, counting the halves that are masked                    20 GFLOP, 0.025 ms
              about 4000 instructions a warp, 62 blocks an SM               0.14 ms if none stalls
    scan      reads the tiles once for each half of V: from memory the first time and, as both
              blocks of a head run abreast, from L2 the second; v and o (134 MB each); the state
              (4 MB each way)                                               0.82 GB, 0.170 ms
              through L2, at about 5.5 TB/s                                 1.36 GB, 0.25 ms
              wgmma                                                         69 GFLOP, 0.087 ms
              128 chunks, each four dependent products and two barriers     0.13 to 0.2 ms

Both are bound by memory. At 70 to 90 % of these bounds `prepare` takes 0.25 to 0.32 ms and `scan`
0.2 to 0.3 ms, 0.45 to 0.62 ms together; the goal is under 0.6. The floor, each input read and each
output written once and g in bfloat16, is 672 MB and 0.14 ms. Two blocks of `prepare` fit an SM, and
one of `scan`, whose 128 leave 4 of 132 SMs idle.

Source: Kimi Linear (arXiv:2510.26692), the chunkwise form of KDA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import hopper
from pallas_kernels.kda import base, xla
from pallas_kernels.kda.base import CHUNK, KEYS

WIDTHS = (64, 128)


def supports(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> str | None:
    """Why the kernels cannot take inputs of these shapes and dtypes here; None where they can."""
    if reason := hopper.reason_against_jax():
        return reason
    narrow = {"q": q, "k": k, "v": v}
    if wrong := [f"{name} is {x.dtype}" for name, x in narrow.items() if x.dtype != jnp.bfloat16]:
        return "needs bfloat16 q, k and v; " + ", ".join(wrong)
    if state.dtype != jnp.float32:
        return f"computes in float32, not in {state.dtype}"
    K, V = q.shape[-1], v.shape[-1]
    if K not in WIDTHS or V not in WIDTHS:
        return f"needs 64 or 128 key and value channels, got {K} and {V}"
    if 0 in q.shape:
        return f"needs at least one token, got q {q.shape}"
    return hopper.reason_against_device()


def chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """bfloat16 q, k and v; g and beta in any float dtype; o in bfloat16, the state in float32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    static = (float(scale), use_qk_l2norm, hopper.interpret())
    return _differentiable(static, (q, k, v, g, beta, state), starts, lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(static: tuple, inputs: tuple, starts: Any, lengths: Any) -> tuple[Array, Array]:
    return _forward(static, inputs, starts, lengths)


def _forward(static: tuple, inputs: tuple, starts: Any, lengths: Any) -> tuple[Array, Array]:
    # Only here: importing Pallas takes seconds, which users of other implementations need not pay.
    from pallas_kernels.kda.mosaic_prep import prepare_chunks
    from pallas_kernels.kda.mosaic_scan import scan_chunks

    scale, use_qk_l2norm, interpret = static
    *tokens, state = inputs
    (q, k, v, g, beta), starts = base.without_padding(tuple(tokens), starts, lengths)
    T, K = q.shape[1], q.shape[-1]
    # Tokens without key, β and decay leave the state as it is, and so do channels without keys.
    # Where the widths are the model's this is nothing, and elsewhere part of what computes q.
    rows, channels = -T % CHUNK, KEYS - K
    q, k, g = (jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, channels))) for x in (q, k, g))
    v = jnp.pad(v, ((0, 0), (0, rows), (0, 0), (0, 0)))
    beta = jnp.pad(jnp.swapaxes(beta, 1, 2).astype(jnp.float32), ((0, 0), (0, 0), (0, rows)))
    if starts is not None:
        starts = jnp.pad(starts, ((0, 0), (0, rows))).reshape(starts.shape[0], -1, CHUNK)
        starts = jnp.cumsum(starts, axis=2, dtype=jnp.int32)
    prepared = prepare_chunks(
        q, k, g, beta, starts, scale=scale, use_qk_l2norm=use_qk_l2norm, interpret=interpret
    )
    state = jnp.pad(state, ((0, 0), (0, 0), (0, channels), (0, 0)))
    o, state = scan_chunks(v, *prepared, state, interpret=interpret)
    return o[:, :T], state[:, :, :K]


def _forward_for_gradient(static: tuple, inputs: tuple, starts: Any, lengths: Any) -> tuple:
    return _forward(static, inputs, starts, lengths), (inputs, starts, lengths)


def _gradient(static: tuple, kept: tuple, cotangents: tuple[Array, Array]) -> tuple:
    scale, use_qk_l2norm, _ = static
    inputs, starts, lengths = kept

    def run(*inputs: Any) -> tuple[Array, Array]:
        q, k, v, g, beta, state = inputs
        return xla.chunked(
            q, k, v, g, beta, state, starts, lengths, scale=scale, use_qk_l2norm=use_qk_l2norm
        )

    _, pull_back = jax.vjp(run, *inputs)
    o, state = cotangents
    integers = (None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in kept[1:])
    return pull_back((o.astype(jnp.float32), state)), *integers


_differentiable.defvjp(_forward_for_gradient, _gradient)
