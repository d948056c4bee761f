"""KDA in chunks: the recurrence as matrix products, in plain JAX.

Over a chunk of C tokens that starts from the state S₀, with D(i, j) = exp(g_{j+1} + … + g_i) per
key channel, the recurrence unrolls to

    (I + L) u = β v − (β k · D(i, start)) S₀      L[i, j] = β_i Σ_c k_ic k_jc D(i, j)_c,  j < i
    o         = (q · D(i, start)) S₀ + A u        A[i, j] =     Σ_c q_ic k_jc D(i, j)_c,  j ≤ i
    S         = D(end, start) S₀ + (k · D(end, j))ᵀ u

D(i, j) does not split into exp(b_i) exp(−b_j): with g = −5 the second factor overflows within 18
tokens, and an unbounded gate overflows it within one. It does split at any token between j and i,
into two factors that are at most 1. So a chunk grows from single tokens, two neighbouring blocks
becoming one again and again: the rows of the second meet the columns of the first, split at the
boundary between the two, and the factors of a pair are products of those of its blocks. There is
no difference of running sums, so a huge decay beside a small one costs no digits, no clamp, and no
bound on g: the same numbers as the recurrence, up to rounding. Where a token starts from zeros, its
own decay is zero, and with it every D(i, j) across that token.

(I + L)⁻¹ of a pair comes from the inverses of its blocks, which is forward substitution by blocks.
Its intermediates stay of the size of the result, also for parallel keys with β near 1, where the
powers of L that repeated squaring sums grow like binomials.

Source: Kimi Linear (arXiv:2510.26692), the chunkwise form of KDA, split differently.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.kda import base

# Measured on a CPU: with 8 the passes over the state cost more, with 32 the products of the chunk.
CHUNK = 16
# The backward pass keeps one state for this many chunks and recomputes those in between.
SEGMENT = 4

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
    prepare = functools.partial(base.prepare, scale=scale, use_qk_l2norm=use_qk_l2norm)
    row = functools.partial(_row, prepare)
    if q.shape[0] != 1 or q.shape[1] <= CHUNK:
        return jax.vmap(row)(tokens, starts, state)
    # XLA transposes an axis of one as well: under vmap it would copy a single row twice. (Few
    # tokens are nothing beside the state, and with its batch axis that is updated in place.)
    o, state = row(*jax.tree.map(lambda x: x[0], (tokens, starts, state)))
    return o[None], state[None]


def _row(
    prepare: Callable[..., tuple[Array, Array]],
    tokens: tuple[Float[Array, "T H ..."], ...],
    starts: Bool[Array, " T"] | None,
    state: Float[Array, "H K V"],
) -> tuple[Float[Array, "T H V"], Float[Array, "H K V"]]:
    T = len(tokens[0])
    # Fewer tokens than a chunk are one chunk of the next power of two: decoding pays for one row.
    C = min(CHUNK, 1 << max(T - 1, 0).bit_length())
    chunks = -(-T // C)
    segments = max(1, -(-chunks // SEGMENT))
    per_segment = -(-chunks // segments)

    def in_segments(x):
        # Zero rows at the end: no key, no β and no decay, so the state passes through them as is.
        x = jnp.pad(x, [(0, segments * per_segment * C - T)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(segments, per_segment, C, *x.shape[1:])

    # Everything of a chunk happens inside the scan, so that it stays in cache on a CPU, and memory
    # does not grow with the intermediates of T tokens.
    def chunk(S, inputs):
        tokens, starts = inputs
        q, k, v, g, beta = (jnp.swapaxes(x, 0, 1).astype(S.dtype) for x in tokens)
        o, S = _chunk(*prepare(q, k), v, g, beta[..., None], starts, S)
        return S, jnp.swapaxes(o, 0, 1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def segment(S, inputs):
        return jax.lax.scan(chunk, S, inputs)

    state, o = jax.lax.scan(segment, state, jax.tree.map(in_segments, (tokens, starts)))
    return o.reshape(-1, *o.shape[3:])[:T], state


def _chunk(
    q: Float[Array, "H C K"],
    k: Float[Array, "H C K"],
    v: Float[Array, "H C V"],
    g: Float[Array, "H C K"],
    beta: Float[Array, "H C 1"],
    starts: Bool[Array, " C"] | None,
    S: Float[Array, "H K V"],
) -> tuple[Float[Array, "H C V"], Float[Array, "H K V"]]:
    """The three lines at the top of this file."""
    decay = jnp.exp(g)
    # One rounding a chunk, not one a token: this factor alone adds up over the whole sequence.
    whole = jnp.exp(jnp.sum(g, axis=1))
    if starts is not None:
        decay = jnp.where(starts[:, None], 0, decay)
        whole = jnp.where(jnp.any(starts), 0, whole)
    rows, columns, A, inverse = _within_chunk(q, k, decay, beta)
    q_S, k_S = jnp.split(_matmul(rows, S), 2, axis=1)
    u = _matmul(inverse, beta * v - k_S)
    o = q_S + _matmul(A, u)
    S = whole[..., None] * S + _matmul(jnp.swapaxes(columns, 1, 2), u)
    return o, S


class _Blocks(NamedTuple):
    """m neighbouring blocks of n tokens, `start` and `end` meaning those of the token's block."""

    rows: Float[Array, "H m 2 n K"]  # q · D(i, start), and β k · D(i, start)
    columns: Float[Array, "H m n K"]  # k · D(end, j)
    decay: Float[Array, "H m 1 K"]  # D(end, start)
    A: Float[Array, "H m n n"]
    inverse: Float[Array, "H m n n"]  # (I + L)⁻¹


def _within_chunk(
    q: Float[Array, "H C K"],
    k: Float[Array, "H C K"],
    decay: Float[Array, "H C K"],
    beta: Float[Array, "H C 1"],
) -> tuple[
    Float[Array, "H 2C K"], Float[Array, "H C K"], Float[Array, "H C C"], Float[Array, "H C C"]
]:
    """The chunk as one block: its rows (those of q, then those of k), columns, A and inverse."""
    A = jnp.sum(q * k, axis=-1)[..., None, None]
    rows = jnp.stack([q * decay, beta * k * decay], axis=2)[:, :, :, None]
    k, decay = k[:, :, None], decay[:, :, None]
    blocks = _Blocks(rows, k, decay, A, jnp.ones_like(A))
    while blocks.A.shape[1] > 1:
        blocks = _pair(blocks)
    rows, columns, _, A, inverse = (x[:, 0] for x in blocks)
    return rows.reshape(len(rows), -1, rows.shape[-1]), columns, A, inverse


def _pair(blocks: _Blocks) -> _Blocks:
    """Each two neighbouring blocks as one."""
    first, second = (_Blocks(*(x[:, i::2] for x in blocks)) for i in range(2))
    H, m, _, n, K = second.rows.shape
    crossing = _matmul(second.rows.reshape(H, m, 2 * n, K), jnp.swapaxes(first.columns, 2, 3))
    A, L = jnp.split(crossing, 2, axis=2)
    # The inverse of [[X, 0], [L, Y]] is [[X⁻¹, 0], [−Y⁻¹ L X⁻¹, Y⁻¹]].
    L = _matmul(second.inverse, _matmul(L, first.inverse))
    rows = jnp.concatenate([first.rows, second.rows * first.decay[:, :, None]], axis=3)
    columns = jnp.concatenate([first.columns * second.decay, second.columns], axis=2)
    return _Blocks(
        rows=rows,
        columns=columns,
        decay=first.decay * second.decay,
        A=_triangle(first.A, A, second.A),
        inverse=_triangle(first.inverse, -L, second.inverse),
    )


def _triangle(
    first: Float[Array, "H m n n"],
    crossing: Float[Array, "H m n n"],
    second: Float[Array, "H m n n"],
) -> Float[Array, "H m 2n 2n"]:
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=3)
    return jnp.concatenate([upper, jnp.concatenate([crossing, second], axis=3)], axis=2)
