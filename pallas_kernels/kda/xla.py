"""KDA in chunks: the recurrence as matrix products, in plain JAX.

Over a chunk of C tokens that starts from the state S₀, with D(i, j) = exp(g_{j+1} + … + g_i) per
key channel, the recurrence unrolls to

    (I + L) u = β (v − (k · D(i, start)) S₀)      L[i, j] = β_i Σ_c k_ic k_jc D(i, j)_c,  j < i
    o         = (q · D(i, start)) S₀ + A u        A[i, j] =     Σ_c q_ic k_jc D(i, j)_c,  j ≤ i
    S         = D(end, start) S₀ + (k · D(end, j))ᵀ u

D(i, j) does not split into exp(b_i) exp(−b_j): with g = −5 the second factor overflows within 18
tokens, and an unbounded gate overflows it within one. It does split at any token between j and i,
into two factors that are at most 1. So the chunk is halved again and again: at each level the rows
of a block's second half meet the columns of its first half, split at the boundary between the two.
Every pair j < i meets at exactly one level. Each exponent is a sum over an interval, never a
difference of running sums, so a huge decay beside a small one costs no digits. No clamp, no bound
on g: the same numbers as the recurrence, up to rounding.

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

CHUNK = 64

# exp is exactly 0 from here down, in float64 too: a floor that changes no decay, and keeps sums of
# unbounded gates finite.
LOG_ZERO = -2000.0

# HIGHEST: a GPU's default float32 product is TF32.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
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

    u = _matmul(inverse, beta[..., None] * (v - _matmul(k * from_start, S)))
    o = _matmul(q * from_start, S) + _matmul(A, u)
    S = from_start[..., -1, :, None] * S + _dot("...ck,...cv->...kv", k * to_end, u)
    return o, S


def _attention_and_inverse(
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    g: Float[Array, "*B C K"],
    beta: Float[Array, "*B C"],
) -> tuple[Float[Array, "*B C C"], Float[Array, "*B C C"]]:
    """A and (I + L)⁻¹: for single tokens, then for blocks of twice the size until one is left."""
    A = _dot("...ck,...ck->...c", q, k)[..., None]
    inverse = jnp.ones_like(A)
    while A.shape[-1] < A.shape[-2]:
        A, inverse = _double(A, inverse, q, k, g, beta)
    return A, inverse


def _double(
    A: Float[Array, "*B C n"],
    inverse: Float[Array, "*B C n"],
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    g: Float[Array, "*B C K"],
    beta: Float[Array, "*B C"],
) -> tuple[Float[Array, "*B C 2*n"], Float[Array, "*B C 2*n"]]:
    """From the diagonal blocks of n tokens to those of 2n: the pairs across each middle.

    Row i of A and of the inverse holds that row of its diagonal block.
    """
    *batch, C, n = A.shape

    def blocks(x):
        """[*B, C, X] → [*B, C / 2n, 2n, X]."""
        return x.reshape(*batch, C // (2 * n), 2 * n, x.shape[-1])

    def halves(x):
        """[*B, C, X] → the rows before and after each middle, [*B, C / 2n, n, X] twice."""
        return blocks(x)[..., :n, :], blocks(x)[..., n:, :]

    to_middle = jnp.exp(_interval_sums(_intervals_to_middle(n), blocks(g)))
    before, after = to_middle[..., :n, :], to_middle[..., n:, :]
    (k_1, k_2), (_, q_2), (_, beta_2) = halves(k), halves(q), halves(beta[..., None])
    k_1, k_2, q_2 = k_1 * before, k_2 * after, q_2 * after
    A_21 = _dot("...ik,...jk->...ij", q_2, k_1)
    L_21 = beta_2 * _dot("...ik,...jk->...ij", k_2, k_1)

    A_11, A_22 = halves(A)
    inverse_11, inverse_22 = halves(inverse)
    inverse_21 = -_matmul(inverse_22, _matmul(L_21, inverse_11))

    def assembled(x_11, x_21, x_22):
        upper = jnp.concatenate([x_11, jnp.zeros_like(x_21)], axis=-1)
        lower = jnp.concatenate([x_21, x_22], axis=-1)
        return jnp.concatenate([upper, lower], axis=-2).reshape(*batch, C, 2 * n)

    return assembled(A_11, A_21, A_22), assembled(inverse_11, inverse_21, inverse_22)


def _intervals_to_middle(n: int) -> np.ndarray:
    """[2n, 2n] of 0 and 1: the tokens whose decay lies between row i and the middle of the block.

    From the middle up to and including a row after it; after a row before it, up to the middle.
    """
    row, token = np.arange(2 * n)[:, None], np.arange(2 * n)
    return np.where(row < n, (row < token) & (token < n), (n <= token) & (token <= row))


def _interval_sums(intervals: np.ndarray, g: Float[Array, "*B C K"]) -> Float[Array, "*B C K"]:
    # A batched product by a constant: on a CPU several times faster than a cumulative sum.
    intervals = jnp.broadcast_to(intervals.astype(g.dtype), (*g.shape[:-2], *intervals.shape))
    return _matmul(intervals, g)
