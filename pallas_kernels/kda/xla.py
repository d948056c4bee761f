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
Every pair j < i meets at exactly one level, and the factors of a level are products of those of the
level below. There is no difference of running sums, so a huge decay beside a small one costs no
digits, no clamp, and no bound on g: the same numbers as the recurrence, up to rounding. Where a
token starts from zeros, its own decay is zero, and with it every D(i, j) across that token.

(I + L)⁻¹ is built along the same halving from the inverses of the two halves, which is forward
substitution by blocks. Its intermediates stay of the size of the result, also for parallel keys
with β near 1, where the powers of L that repeated squaring sums grow like binomials.

Source: Kimi Linear (arXiv:2510.26692), the chunkwise form of KDA, split differently.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.kda import base

# Measured on a CPU, where the small products of a chunk stay in cache: 16 costs a quarter more.
CHUNK = 8
# The backward pass keeps one state for this many chunks and recomputes those in between.
SEGMENT = 8

# HIGHEST: a GPU's default float32 product is TF32.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


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
    """Chunk after chunk, in the dtype of `state`, for any T.

    The backward pass keeps the inputs and one state per segment of chunks, and recomputes the rest.
    """
    tokens, starts = base.without_padding((q, k, v, g, beta), starts, lengths)
    T = q.shape[1]
    # Fewer tokens than a chunk are one chunk of the next power of two: decoding pays for one row.
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())
    chunks = -(-T // C)
    segments = max(1, -(-chunks // SEGMENT))
    per_segment = -(-chunks // segments)

    def segments_first(x):
        # Zero rows at the end: no key, no β and no decay, so the state passes through them as is.
        x = jnp.pad(x, [(0, 0), (0, segments * per_segment * C - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], segments, per_segment, C, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2)

    # Everything of a chunk happens inside the scan, so that it stays in cache on a CPU, and memory
    # does not grow with the intermediates of T tokens.
    def chunk(S, inputs):
        tokens, starts = inputs
        q, k, v, g, beta = (jnp.swapaxes(x, 1, 2).astype(S.dtype) for x in tokens)
        q, k = base.prepare(q, k, scale=scale, use_qk_l2norm=use_qk_l2norm)
        decay = jnp.exp(g)
        # One rounding a chunk, not one a token: this factor alone adds up over the whole sequence.
        whole = jnp.exp(jnp.sum(g, axis=-2))
        if starts is not None:
            decay = jnp.where(starts[:, None, :, None], 0, decay)
            whole = jnp.where(jnp.any(starts, axis=1)[:, None, None], 0, whole)
        o, S = _chunk(q, k, v, decay, whole, beta, S)
        return S, jnp.swapaxes(o, 1, 2)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def segment(S, inputs):
        return jax.lax.scan(chunk, S, inputs)

    state, o = jax.lax.scan(segment, state, jax.tree.map(segments_first, (tokens, starts)))
    o = jnp.moveaxis(o, 2, 0)
    return o.reshape(o.shape[0], -1, *o.shape[4:])[:, :T], state


def _chunk(
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    v: Float[Array, "*B C V"],
    decay: Float[Array, "*B C K"],
    whole: Float[Array, "*B K"],
    beta: Float[Array, "*B C"],
    S: Float[Array, "*B K V"],
) -> tuple[Float[Array, "*B C V"], Float[Array, "*B K V"]]:
    """The three lines at the top of this file; `whole` is D(end, start)."""
    A, inverse, from_start, to_end = _within_chunk(q, k, decay, beta)
    q_S, k_S = _both_times(q * from_start, k * from_start, S)
    u = _matmul(inverse, beta[..., None] * (v - k_S))
    o = q_S + _matmul(A, u)
    S = whole[..., None] * S + _matmul(jnp.swapaxes(k * to_end, -1, -2), u)
    return o, S


def _within_chunk(
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    decay: Float[Array, "*B C K"],
    beta: Float[Array, "*B C"],
) -> tuple[
    Float[Array, "*B C C"], Float[Array, "*B C C"], Float[Array, "*B C K"], Float[Array, "*B C K"]
]:
    """A, (I + L)⁻¹, D(i, start) and D(end, i) of the module docstring; `decay` is exp(g).

    Built from single tokens up, the size n of the diagonal blocks doubling. All of a level is
    computed for all pairs and masked: few larger products beat many exact ones.
    """
    C = decay.shape[-2]
    eye = jnp.eye(C, dtype=decay.dtype)
    A = jnp.sum(q * k, axis=-1, keepdims=True) * eye
    inverse = jnp.broadcast_to(eye, A.shape)
    from_start, to_end = decay, jnp.ones_like(decay)
    for n in (1 << level for level in range(C.bit_length() - 1)):
        from_start_1, from_start_2 = _halves(from_start, n)
        to_end_1, to_end_2 = _halves(to_end, n)
        to_middle = _joined(to_end_1, from_start_2)
        k_n = k * to_middle
        # Off the crossing pairs the products mean nothing, but they are finite.
        products = _both_times(q * to_middle, k_n, jnp.swapaxes(k_n, -1, -2))
        A_n, L_n = (x * _crossing(C, n).astype(x.dtype) for x in products)
        L_n = beta[..., None] * L_n
        A = A + A_n
        # The inverse of [[X, 0], [L, Y]] is [[X⁻¹, 0], [−Y⁻¹ L X⁻¹, Y⁻¹]].
        inverse = inverse - _matmul(inverse, _matmul(L_n, inverse))
        from_start = _joined(from_start_1, from_start_2 * from_start_1[..., -1:, :])
        to_end = _joined(to_end_1 * from_start_2[..., -1:, :], to_end_2)
    return A, inverse, from_start, to_end


def _crossing(C: int, n: int) -> np.ndarray:
    """[C, C]: the pairs of a row after the middle and a column before it, in blocks of 2n."""
    row, column = np.arange(C)[:, None], np.arange(C)
    return (row // (2 * n) == column // (2 * n)) & (row // n > column // n)


def _halves(
    x: Float[Array, "*B C K"], n: int
) -> tuple[Float[Array, "*B C/2n n K"], Float[Array, "*B C/2n n K"]]:
    """The rows before and after the middle of each block of 2n."""
    x = x.reshape(*x.shape[:-2], -1, 2, n, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _joined(
    before: Float[Array, "*B C/2n n K"], after: Float[Array, "*B C/2n n K"]
) -> Float[Array, "*B C K"]:
    """What `_halves` took apart."""
    x = jnp.stack([before, after], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _both_times(
    q: Float[Array, "*B C K"], k: Float[Array, "*B C K"], x: Float[Array, "*B K X"]
) -> tuple[Float[Array, "*B C X"], Float[Array, "*B C X"]]:
    """`q @ x` and `k @ x` as one product."""
    both = _matmul(jnp.concatenate([q, k], axis=-2), x)
    return both[..., : q.shape[-2], :], both[..., q.shape[-2] :, :]
