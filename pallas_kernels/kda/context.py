"""KDA over rows whose tokens are cut over devices: each has a stretch, and the state is passed on.

What a stretch does to a state is affine, and so is what its outputs make of it:

    S_out = M S_in + U        o = o₀ + R S_in

U and o₀ are the operation itself on a state of zeros; M and R are the operation without values on
the identity. So each device goes twice through its own tokens, at the same time as all others, and
no token is seen by another. What is passed on are M and U. They compose, and the composition is
associative, so that log₂ n rounds do for n devices: in round i each device sends what its last 2^i
stretches do to the device 2^i behind. With keys of length one M never grows, as decay and delta
rule shrink or keep every direction: nothing is lost in a product of many of them.

Per row and head a device sends K (K + V) numbers in a round but the last, K V in that and once more
for the state before its own stretch: with n = 8, K = V = 128 and 64 heads, 24 MiB a row. Gathering
every M and U on every device would be one round of 56 MiB; a chain, where each waits for the state
of the one before it, n − 1 rounds of 4 MiB, one behind the other. The final state, which all
devices need to decode, is one sum of K V numbers.

Source: Kimi Linear (arXiv:2510.26692), the recurrence; Hillis and Steele, "Data parallel
algorithms" (1986), the rounds.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose
from pallas_kernels.kda import base
from pallas_kernels.kda.api import IMPLEMENTATIONS


def context_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    axes: str | tuple[str, ...],
    scale: float | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    lengths: Int[Array, " B"] | None = None,
    use_qk_l2norm: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """`chunk_kda` inside of `jax.shard_map`, of rows whose tokens are cut along `axes` of the mesh.

    q, k, v, g, beta and the returned o are those of the device's own T tokens; `initial_state`,
    `lengths` and the returned state are of whole rows, and the same on all devices along `axes`.
    Otherwise arguments, dtypes and errors are those of `chunk_kda`. In bfloat16 a kernel rounds o₀
    and R to it, where `chunk_kda` rounds o alone.
    """
    base.check_inputs(q, k, v, g, beta, initial_state)
    here, parts = lax.axis_index(axes), lax.axis_size(axes)
    (B, T, H, K), V = q.shape, v.shape[-1]
    given = () if initial_state is None else (initial_state,)
    dtype = base.compute_dtype(q, k, v, g, beta, *given)
    if lengths is not None:
        base.check_integers("lengths", lengths, (B,))
        lengths = jnp.clip(lengths - here * T, 0, T)
    zeros = jnp.zeros((B, H, K, V), dtype)
    run = choose("KDA", IMPLEMENTATIONS, implementation, q, k, v, g, beta, zeros)

    def through(v: Array, state: Array) -> tuple[Array, Array]:
        options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
        return run(q, k, v, g, beta, state, None, lengths, **options)

    identity = jnp.broadcast_to(jnp.eye(K, dtype=dtype), (B, H, K, K))
    o, U = through(v, zeros)
    R, M = through(jnp.zeros((B, T, H, K), v.dtype), identity)

    def passed_on(x: Array, distance: int) -> Array:
        """Zeros come to those who have nobody so far before them: a row begins with zeros."""
        return lax.ppermute(x, axes, [(i, i + distance) for i in range(parts - distance)])

    if initial_state is not None:
        U = U + jnp.where(here == 0, _matmul(M, initial_state.astype(dtype)), 0)
    distance = 1
    while distance < parts:
        before = passed_on(U, distance)
        U = U + _matmul(M, before)
        M = _matmul(M, passed_on(M, distance))
        distance *= 2

    state = passed_on(U, 1)
    if initial_state is not None:
        state = jnp.where(here == 0, initial_state.astype(dtype), state)
    o = o.astype(dtype) + jnp.einsum(
        "bthk,bhkv->bthv", R.astype(dtype), state, precision=lax.Precision.HIGHEST
    )
    if not output_final_state:
        return o.astype(v.dtype), None
    return o.astype(v.dtype), lax.psum(jnp.where(here == parts - 1, U, 0), axes)


def _matmul(M: Float[Array, "B H K K"], S: Float[Array, "B H K _"]) -> Float[Array, "B H K _"]:
    return jnp.matmul(M, S, precision=lax.Precision.HIGHEST)
