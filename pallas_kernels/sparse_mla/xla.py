"""Sparse MLA in plain JAX: gathered in blocks, with an online softmax.

What is in memory at once are the rows of a block of tokens, or of a part of one token's selection,
whatever the length of the cache. bfloat16 operands stay bfloat16 in both products, the weights of
the second rounded to it before they are divided by their sum; sums and softmax are float32.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import base

# Numbers gathered at once.
GATHERED = 2**20


def attend(
    q: Float[Array, "B T A R"],
    kv: Float[Array, "B S R"] | Float[Array, "S R"],
    indices: Int[Array, "B T W"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T A R"], Float[Array, "B T A"]]:
    """A block of tokens after the other; the backward pass gathers a block's rows again."""
    B, T, W = indices.shape
    dtype = jnp.result_type(q, kv)
    tokens = max(1, GATHERED // (B * W * q.shape[-1]))
    attend_block = jax.checkpoint(functools.partial(_attend, kv, scale), prevent_cse=False)
    q = q.astype(dtype)
    if tokens >= T:
        return attend_block(q, indices)

    def blocks_first(x):
        # Tokens without rows at the end.
        x = jnp.pad(x, [(0, 0), (0, -T % tokens), (0, 0), (0, 0)][: x.ndim], constant_values=-1)
        return jnp.moveaxis(x.reshape(B, -1, tokens, *x.shape[2:]), 1, 0)

    def tokens_first(x):
        return jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])[:, :T]

    blocks = blocks_first(q), blocks_first(indices)
    out, lse = jax.lax.map(lambda block: attend_block(*block), blocks)
    return tokens_first(out), tokens_first(lse)


def _attend(
    kv: Float[Array, "B S R"] | Float[Array, "S R"],
    scale: float,
    q: Float[Array, "B T A R"],
    indices: Int[Array, "B T W"],
) -> tuple[Float[Array, "B T A R"], Float[Array, "B T A"]]:
    """A part of each token's selection after the other."""
    (B, T, W), R = indices.shape, q.shape[-1]
    parts = min(W, -(-B * T * W * R // GATHERED))
    indices = jnp.pad(indices, ((0, 0), (0, 0), (0, -W % parts)), constant_values=-1)
    wide = base.compute_dtype(q)
    precision = None if q.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=wide)

    def part(carry, indices):
        top, total, out = carry
        rows, there = base.gather_rows(kv, indices)
        rows = rows.astype(q.dtype)
        scores = scale * dot("btar,btwr->btaw", q, rows)
        scores = jnp.where(there[:, :, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(scores, axis=-1)))
        # Finite where there is no row yet, so that exp sees −inf − 0 and not −inf + inf.
        shift = jnp.where(jnp.isfinite(new_top), new_top, 0)
        weights = jnp.exp(scores - shift[..., None])
        shrink = jnp.exp(top - shift)
        total = total * shrink + jnp.sum(weights, axis=-1)
        new = dot("btaw,btwr->btar", weights.astype(q.dtype), rows)
        return (new_top, total, out * shrink[..., None] + new), None

    heads = q.shape[:3]
    none = (jnp.full(heads, -jnp.inf, wide), jnp.zeros(heads, wide), jnp.zeros(q.shape, wide))
    split = jnp.moveaxis(indices.reshape(B, T, parts, -1), 2, 0)
    (top, total, out), _ = jax.lax.scan(part, none, split)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    return out / total[..., None], jnp.where(empty, -jnp.inf, top + jnp.log(total))
