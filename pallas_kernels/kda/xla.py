"""KDA in chunks: the recurrence as matrix products, in plain JAX.

Over a chunk of C tokens that starts from the state S₀, with D(i, j) = exp(g_{j+1} + … + g_i) per
key channel, the recurrence unrolls to

    (I + L) u = β (v − (k · D(i, start)) S₀)      L[i, j] = β_i Σ_c k_ic k_jc D(i, j)_c,  j < i
    o         = (q · D(i, start)) S₀ + A u        A[i, j] =     Σ_c q_ic k_jc D(i, j)_c,  j ≤ i
    S         = D(end, start) S₀ + (k · D(end, j))ᵀ u

D(i, j) does not split into exp(b_i) exp(−b_j): with g = −5 the second factor overflows within 18
tokens, and an unbounded gate overflows it within one. It does split at any token between j and i,
into two factors that are at most 1. So the chunk is halved again and again: at each level the rows
of a block's second half meet the columns of its first half, split at the middle between the two.
Every pair j < i meets at exactly one level. Each exponent is a sum over an interval, never a
difference of running sums, so a huge decay beside a small one costs no digits. Without any bound
on g these are the numbers of the recurrence, up to rounding.

(I + L)⁻¹ is built along the same halving from the inverses of the two halves, which is forward
substitution by blocks. Its intermediates stay of the size of the result, also for parallel keys
with β near 1, where the powers of L that repeated squaring sums grow like binomials.

Source: Kimi Linear (arXiv:2510.26692), the chunkwise form of KDA, split differently.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.kda import base

# Measured on a CPU: 64 costs half as much again; 16 saves a third, for twice the steps and twice
# the states that the backward pass keeps.
CHUNK = 32

# exp is exactly 0 from here down, in float64 too: a floor that changes no decay, and keeps sums of
# unbounded gates finite.
LOG_ZERO = -2000.0

# HIGHEST: a GPU's default float32 product is TF32.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    *,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Chunk after chunk, in the dtype of `state`, for any T.

    The backward pass keeps the inputs and one state per chunk, and recomputes the rest.
    """
    T = q.shape[1]
    # Fewer tokens than a chunk are one chunk of the next power of two: decoding pays for one row.
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())

    def chunks_first(x):
        # Zero rows at the end: no key, no β and no decay, so the state passes through them as is.
        x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), 1, 0)

    # Everything of a chunk happens inside the scan, so that it stays in cache on a CPU, and memory
    # does not grow with the intermediates of T tokens.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(S, inputs):
        q, k, v, g, beta = (jnp.swapaxes(x, 1, 2).astype(S.dtype) for x in inputs)
        q, k = base.prepare(q, k, scale=scale, use_qk_l2norm=use_qk_l2norm)
        o, S = _chunk(q, k, v, jnp.maximum(g, LOG_ZERO), beta, S)
        return S, jnp.swapaxes(o, 1, 2)

    state, o = jax.lax.scan(chunk, state, tuple(chunks_first(x) for x in (q, k, v, g, beta)))
    o = jnp.moveaxis(o, 0, 1)
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :T], state


def _chunk(
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    v: Float[Array, "*B C V"],
    g: Float[Array, "*B C K"],
    beta: Float[Array, "*B C"],
    S: Float[Array, "*B K V"],
) -> tuple[Float[Array, "*B C V"], Float[Array, "*B K V"]]:
    """The three lines at the top of this file."""
    C = g.shape[-2]
    from_start = jnp.exp(_interval_sums(np.tri(C), g))
    to_end = jnp.exp(_interval_sums(np.tri(C, k=-1).T, g))
    A, inverse = _attention_and_inverse(q, k, g, beta)

    q_S, k_S = _both_times(q * from_start, k * from_start, S)
    u = _matmul(inverse, beta[..., None] * (v - k_S))
    o = q_S + _matmul(A, u)
    S = from_start[..., -1, :, None] * S + _matmul(jnp.swapaxes(k * to_end, -1, -2), u)
    return o, S


def _attention_and_inverse(
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    g: Float[Array, "*B C K"],
    beta: Float[Array, "*B C"],
) -> tuple[Float[Array, "*B C C"], Float[Array, "*B C C"]]:
    """A and (I + L)⁻¹ of the module docstring."""
    C = g.shape[-2]
    eye = jnp.eye(C, dtype=g.dtype)
    A = jnp.sum(q * k, axis=-1, keepdims=True) * eye
    inverse = jnp.broadcast_to(eye, A.shape)  # of the diagonal blocks, here of single tokens
    for n in (1 << level for level in range(C.bit_length() - 1)):
        intervals, crossing = _halving(C, n)
        to_middle = jnp.exp(_interval_sums(intervals, g))
        k_n = k * to_middle
        # Off the crossing pairs the products mean nothing, but they are finite.
        products = _both_times(q * to_middle, k_n, jnp.swapaxes(k_n, -1, -2))
        A_n, L_n = (x * crossing.astype(g.dtype) for x in products)
        L_n = beta[..., None] * L_n
        A = A + A_n
        # The inverse of [[X, 0], [L, Y]] is [[X⁻¹, 0], [−Y⁻¹ L X⁻¹, Y⁻¹]].
        inverse = inverse - _matmul(inverse, _matmul(L_n, inverse))
    return A, inverse


def _halving(C: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """One level: blocks of 2n tokens, each split in its middle. Two [C, C] boolean arrays.

    First, per row the tokens whose decay lies between that row and the middle of its block: from
    the middle up to and including a row after it; after a row before it, up to the middle.
    Second, the pairs (row after the middle, column before it) of one block.
    """
    row, column = np.arange(C)[:, None], np.arange(C)
    same_block = row // (2 * n) == column // (2 * n)
    after, column_after = row // n % 2 == 1, column // n % 2 == 1
    to_middle = np.where(after, column_after & (column <= row), ~column_after & (column > row))
    return same_block & to_middle, same_block & after & ~column_after


def _interval_sums(intervals: np.ndarray, g: Float[Array, "*B C K"]) -> Float[Array, "*B C K"]:
    # A batched product by a constant: on a CPU several times faster than a cumulative sum.
    batched = jnp.broadcast_to(intervals.astype(g.dtype), (*g.shape[:-2], *intervals.shape))
    return _matmul(batched, g)


def _both_times(
    q: Float[Array, "*B C K"], k: Float[Array, "*B C K"], x: Float[Array, "*B K X"]
) -> tuple[Float[Array, "*B C X"], Float[Array, "*B C X"]]:
    """`q @ x` and `k @ x` as one product."""
    both = _matmul(jnp.concatenate([q, k], axis=-2), x)
    return both[..., : q.shape[-2], :], both[..., q.shape[-2] :, :]
