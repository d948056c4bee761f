"""The k-pool indexer of DSA: which tokens each query attends to.

Tokens are grouped into pools of P, counted from the first real token of each row. A pool has one
key; a query scores the pools that it can see whole, keeps the best, and adds the tokens of the
pool that is not complete yet (the tail). Selections are integers, so no gradient reaches the
indexer's parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glm5_jax.config import ModelConfig
from glm5_jax.nn.linear import linear
from glm5_jax.nn.norms import layer_norm
from glm5_jax.nn.params import Params
from glm5_jax.nn.types import Activations, Mask, Record, Selection, wide


class Span(NamedTuple):
    """Where the real tokens of each row lie: `first`, and how many (`length`)."""

    first: Int[Array, " B"]
    length: Int[Array, " B"]

    @classmethod
    def of(cls, mask: Mask) -> "Span":
        """The span of a contiguous mask; an empty row has length 0."""
        return cls(jnp.argmax(mask, axis=1), jnp.sum(mask, axis=1, dtype=jnp.int32))


def pool_keys(
    keys: Float[Array, "B T DI"],
    gate: Float[Array, "B T DI"],
    ape: Float[Array, "P DI"],
    span: Span,
) -> Float[Array, "B NP DI"]:
    """One key per pool: the tokens' keys, weighted per channel by `softmax(gate + ape)`.

    The softmax is float32 and runs over the P slots of a pool, separately in each channel. Pool p
    holds the real tokens `P·p … P·p + P − 1`, so left padding shifts nothing. A pool that a row
    does not fill has a finite key that means nothing.
    """
    T, P = keys.shape[1], ape.shape[0]
    pools = T // P
    token = jnp.minimum(span.first[:, None] + jnp.arange(pools * P), T - 1)
    is_real = jnp.arange(pools * P) < span.length[:, None]

    def in_pools(h):
        h = jnp.take_along_axis(h, token[..., None], axis=1)
        # Whatever a padded position holds (NaN, say) must not reach a pool.
        return jnp.where(is_real[..., None], h, 0).reshape(h.shape[0], pools, P, h.shape[-1])

    logits = in_pools(gate).astype(wide(gate.dtype)) + ape.astype(wide(gate.dtype))
    weights = jax.nn.softmax(logits, axis=2).astype(keys.dtype)
    return jnp.sum(weights * in_pools(keys), axis=2)


def index_scores(
    queries: Float[Array, "B T HI DI"],
    keys: Float[Array, "B NP DI"],
    weights: Float[Array, "B T HI"],
) -> Float[Array, "B T NP"]:
    """`Σ_h w[h] · relu(DI^-0.5 · q[h]·k)`, float32 with full-precision products.

    `weights` are signed: a pool whose dots are all negative scores 0 and outranks one with a
    negative score.
    """
    dtype = wide(queries.dtype)
    dots = jnp.einsum(
        "bthd,bpd->bthp",
        queries.astype(dtype),
        keys.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
    dots = jax.nn.relu(dots * queries.shape[-1] ** -0.5)
    return jnp.einsum("bth,bthp->btp", weights, dots, precision=jax.lax.Precision.HIGHEST)


def head_weights(logits: Float[Array, "B T HI"]) -> Float[Array, "B T HI"]:
    """The index heads' signed weights, float32: `logits · HI^-0.5`, no softmax."""
    return logits.astype(wide(logits.dtype)) * logits.shape[-1] ** -0.5


def visible_pools(mask: Mask, span: Span, pool: int) -> Bool[Array, "B T NP"]:
    """Pools whose last token each query can see; none for a padded query."""
    T = mask.shape[1]
    visible = jnp.arange(T) - span.first[:, None] + 1
    last = pool * (jnp.arange(T // pool) + 1)
    return (last <= visible[..., None]) & mask[..., None]


def select_pools(
    scores: Float[Array, "B T NP"], visible: Bool[Array, "B T NP"], count: int
) -> Int[Array, "B T C"]:
    """The `count` best visible pools of each query, best first, −1 where there are fewer.

    Ties go to the lower pool, and +0 and −0 tie. A score that is not visible is never read, NaN
    included. C is `min(count, NP)`.
    """
    scores = jnp.where(scores == 0, 0, scores)  # top_k ranks +0 above −0
    scores = jnp.where(visible, scores, -jnp.inf)
    pools = jax.lax.top_k(scores, min(count, scores.shape[-1]))[1]
    return jnp.where(jnp.take_along_axis(visible, pools, axis=-1), pools, -1)


def select_tokens(
    pools: Int[Array, "B T C"], mask: Mask, span: Span, pool: int, top_k: int, tail: bool
) -> Selection:
    """Token positions of the chosen pools, then of the visible tail; −1 in unused slots.

    W is `top_k + pool − 1`, or `top_k` without the tail, however few pools there are. A query
    whose own pool is complete has no tail, and attends to itself only if that pool was chosen.
    """
    B, T, C = pools.shape
    first = span.first[:, None, None]
    tokens = first[..., None] + pools[..., None] * pool + jnp.arange(pool)
    tokens = jnp.where(pools[..., None] >= 0, tokens, -1).reshape(B, T, C * pool)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, top_k - C * pool)), constant_values=-1)
    if not tail:
        return tokens.astype(jnp.int32)
    position = jnp.arange(T)[None, :, None]
    visible = position - first + 1
    slots = jnp.arange(pool - 1)
    in_tail = (slots < visible % pool) & mask[..., None]
    tail_tokens = jnp.where(in_tail, position + 1 - visible % pool + slots, -1)
    return jnp.concatenate([tokens, tail_tokens], axis=-1).astype(jnp.int32)


class Indexer(nnx.Module):
    """Chooses, for every query, `index_topk` tokens in whole pools, and the tail."""

    def __init__(self, config: ModelConfig, params: Params):
        self.heads = config.index_n_heads
        self.top_k = config.index_topk
        self.tail = config.index_kpool_always_select_tail
        self.wq_b = params("wq_b")
        self.wk = params("wk")
        self.k_norm_weight = params("k_norm_weight")
        self.k_norm_bias = params("k_norm_bias")
        self.weights_proj = params("weights_proj")
        self.compress_gate = params("compress_gate")
        self.ape = params("ape")

    def __call__(
        self, x: Activations, qr: Float[Array, "B T Rq"], mask: Mask, record: Record | None = None
    ) -> Selection:
        """The selection of each query; sites `index_keys`, `pool_keys`, `index_scores`, `pools`."""
        span = Span.of(mask)
        ape = self.ape[...]
        P = ape.shape[0]
        queries = linear(qr, self.wq_b[...]).reshape(*qr.shape[:2], self.heads, -1)
        keys = layer_norm(linear(x, self.wk[...]), self.k_norm_weight[...], self.k_norm_bias[...])
        pooled = pool_keys(keys, linear(x, self.compress_gate[...]), ape, span)
        weights = head_weights(linear(x, self.weights_proj[...]))
        scores = index_scores(queries, pooled, weights)
        pools = select_pools(scores, visible_pools(mask, span, P), self.top_k // P)
        if record is not None:
            record("index_keys", keys)
            record("pool_keys", pooled)
            record("index_scores", scores)
            record("pools", pools)
        return select_tokens(pools, mask, span, P, self.top_k, self.tail)
