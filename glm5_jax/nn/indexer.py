"""The k-pool indexer of DSA: which tokens each query attends to.

Tokens are grouped into pools of P, counted from the first real token of each row. A pool has one
key; a query scores the pools that it can see whole, keeps the best, and adds the tokens of the
pool that is not complete yet (the tail). Selections are integers, so no gradient reaches the
indexer's parameters.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glm5_jax.cache import DSACache
from glm5_jax.config import ModelConfig
from glm5_jax.nn.blocks import map_queries
from glm5_jax.nn.largest import largest
from glm5_jax.nn.linear import linear
from glm5_jax.nn.norms import layer_norm
from glm5_jax.nn.padding import Stretch, write_rows
from glm5_jax.nn.params import Params
from glm5_jax.nn.placement import Placement, gather_tokens
from glm5_jax.nn.record import Record, note, wants
from glm5_jax.nn.types import Activations, Mask, Selection, wide

# Pools are scored for so many queries, and so many pools, at a time: on a CPU that stays in cache.
QUERY_BLOCK = 128
POOL_TILE = 512
# So many scores of a query are in memory at once, before the best are kept.
POOL_WINDOW = 4096


class Span(NamedTuple):
    """Where the real tokens of each row lie: `first`, and how many (`length`)."""

    first: Int[Array, " B"]
    length: Int[Array, " B"]

    def seen(self, mask: Mask) -> Int[Array, "B T"]:
        """How many real tokens each token sees, itself included; 0 for padding."""
        return jnp.where(mask, jnp.arange(mask.shape[1]) - self.first[:, None] + 1, 0)


def real_span(mask: Mask) -> Span:
    """The span of a contiguous mask; an empty row has length 0."""
    return Span(jnp.argmax(mask, axis=1), jnp.sum(mask, axis=1, dtype=jnp.int32))


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


def complete_pools(
    pooled: Float[Array, "B NP DI"],
    keys: Float[Array, "B S DI"],
    gates: Float[Array, "B S DI"],
    ape: Float[Array, "P DI"],
    stretch: Stretch,
    tokens: int,
) -> Float[Array, "B NP DI"]:
    """`pooled` with the keys of the pools whose last token `stretch` brought.

    Their tokens are read from the cached `keys` and `gates`, so a pool may have come in many calls.
    `tokens` is how many a row can bring at most.
    """
    P = ape.shape[0]
    first = stretch.start // P
    pools = (tokens + P - 1) // P
    slot = first[:, None] * P + jnp.arange(pools * P)
    keys, gates = (jax.vmap(lambda row, at: row[at])(h, slot) for h in (keys, gates))
    there = Span(jnp.zeros_like(first), stretch.start + stretch.count - first * P)
    new = pool_keys(keys, gates, ape, there)
    pool = first[:, None] + jnp.arange(pools)
    pool = jnp.where(jnp.arange(pools) < there.length[:, None] // P, pool, pooled.shape[1])
    return write_rows(pooled, pool, new)


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


def score_pools(
    queries: Float[Array, "B T HI DI"],
    keys: Float[Array, "B NP DI"],
    weights: Float[Array, "B T HI"],
    pools: Int[Array, ""],
) -> Float[Array, "B T NP"]:
    """`index_scores` of the first `pools` keys at least, in tiles of keys of one width.

    What no tile reached scores −inf. `pools` may be more than there are keys.
    """
    (B, T), NP = queries.shape[:2], keys.shape[1]
    width = min(POOL_TILE, NP)
    if width == NP:
        return index_scores(queries, keys, weights)

    def score_tile(tile, scores):
        # Both slices begin earlier where the last tile would go past the end.
        at = tile * width
        part = index_scores(queries, jax.lax.dynamic_slice_in_dim(keys, at, width, 1), weights)
        return jax.lax.dynamic_update_slice_in_dim(scores, part, at, 2)

    scores = jnp.full((B, T, NP), -jnp.inf, wide(queries.dtype))
    return jax.lax.fori_loop(0, -(-jnp.minimum(pools, NP) // width), score_tile, scores)


def head_weights(logits: Float[Array, "B T HI"]) -> Float[Array, "B T HI"]:
    """The index heads' signed weights, float32: `logits · HI^-0.5`, no softmax."""
    return logits.astype(wide(logits.dtype)) * logits.shape[-1] ** -0.5


def visible_pools(seen: Int[Array, "B T"], pools: int, pool: int) -> Bool[Array, "B T NP"]:
    """Pools whose last token each query can see; none for a padded query, which has `seen` 0."""
    last = pool * (jnp.arange(pools) + 1)
    return last <= seen[..., None]


def select_pools(
    scores: Float[Array, "B T NP"], visible: Bool[Array, "B T NP"], count: int
) -> Int[Array, "B T C"]:
    """The `count` best visible pools of each query, best first, −1 where there are fewer.

    Ties go to the lower pool, and +0 and −0 tie. A score that is not visible is never read, NaN
    included. C is `min(count, NP)`.
    """
    pools = jnp.where(visible, jnp.arange(scores.shape[-1], dtype=jnp.int32), -1)
    return _keep_best(scores, pools, min(count, scores.shape[-1]))[1]


def best_pools(
    queries: Float[Array, "B T HI DI"],
    keys: Float[Array, "B NP DI"],
    weights: Float[Array, "B T HI"],
    seen: Int[Array, "B T"],
    pool: int,
    count: int,
) -> Int[Array, "B T C"]:
    """`select_pools` of the `index_scores`, which are never in memory for all pools at once.

    A window of pools after the other is scored, its pools come behind the best of those before, and
    the best of both are kept: ties go to the lower pool as in one pass. Only windows and tiles with
    a pool that some query sees are scored. `seen` is how many tokens a query sees. No gradient.
    """
    queries, keys, weights = jax.lax.stop_gradient((queries, keys, weights))
    NP = keys.shape[1]
    width, count = min(POOL_WINDOW, NP), min(count, NP)
    there = jnp.max(seen) // pool

    def score_window(keys, start):
        """The scores of the pools from `start` on, and which of them each query sees."""
        scores = score_pools(queries, keys, weights, there - start)
        return scores, visible_pools(seen - start * pool, keys.shape[1], pool)

    if width == NP:
        scores, visible = score_window(keys, 0)
        return select_pools(scores, visible, count)

    def merge_window(window, best):
        # The last window begins earlier where it would go past the end: the pools that it has in
        # common with the window before are none of its own.
        start = jnp.minimum(window * width, NP - width)
        scores, visible = score_window(jax.lax.dynamic_slice_in_dim(keys, start, width, 1), start)
        pools = start + jnp.arange(width, dtype=jnp.int32)
        pools = jnp.where(visible & (pools >= window * width), pools, -1)
        scores = jnp.concatenate([best[0], scores], axis=-1)
        return _keep_best(scores, jnp.concatenate([best[1], pools], axis=-1), count)

    chosen = (*seen.shape, count)
    none = jnp.full(chosen, -jnp.inf, wide(queries.dtype)), jnp.full(chosen, -1, jnp.int32)
    return jax.lax.fori_loop(0, -(-there // width), merge_window, none)[1]


def _keep_best(
    scores: Float[Array, "B T N"], pools: Int[Array, "B T N"], count: int
) -> tuple[Float[Array, "B T C"], Int[Array, "B T C"]]:
    """The `count` best, best first, of equal ones those that come first; a pool of −1 is none."""
    scores = jnp.where(scores == 0, 0, scores)  # top_k ranks +0 above −0
    # A score that overflows to −inf is that of a pool, and comes before none.
    scores = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
    scores = jnp.where(pools < 0, -jnp.inf, scores)
    scores, at = largest(scores, count)
    return scores, jnp.take_along_axis(pools, at, axis=-1)


def select_tokens(
    pools: Int[Array, "B T C"],
    seen: Int[Array, "B T"],
    first: Int[Array, " B"],
    pool: int,
    top_k: int,
    tail: bool,
) -> Selection:
    """Token positions of the chosen pools, then of the visible tail; −1 in unused slots.

    `first` is the position of a row's first real token, and `seen` how many a query sees. W is
    `top_k + pool − 1`, or `top_k` without the tail, however few pools there are. A query whose own
    pool is complete has no tail, and attends to itself only if that pool was chosen.
    """
    B, T, C = pools.shape
    first = first[:, None, None]
    tokens = first[..., None] + pools[..., None] * pool + jnp.arange(pool)
    tokens = jnp.where(pools[..., None] >= 0, tokens, -1).reshape(B, T, C * pool)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, top_k - C * pool)), constant_values=-1)
    if not tail:
        return tokens.astype(jnp.int32)
    in_pools = (seen // pool * pool)[..., None]
    slots = jnp.arange(pool - 1)
    tail_tokens = jnp.where(slots < seen[..., None] - in_pools, first + in_pools + slots, -1)
    return jnp.concatenate([tokens, tail_tokens], axis=-1).astype(jnp.int32)


def _visible_scores(
    pooled: Float[Array, "B NP DI"],
    pool: int,
    queries: Float[Array, "B T HI DI"],
    weights: Float[Array, "B T HI"],
    seen: Int[Array, "B T"],
) -> Float[Array, "B T NP"]:
    """The `index_scores`, −inf for the pools that a query cannot see."""
    visible = visible_pools(seen, pooled.shape[1], pool)
    return jnp.where(visible, index_scores(queries, pooled, weights), -jnp.inf)


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
        self.placement: Placement | None = None

    def __call__(
        self, x: Activations, qr: Float[Array, "B T Rq"], mask: Mask, record: Record | None = None
    ) -> Selection:
        """The selection of each query; sites `index_keys`, `pool_keys`, `index_scores`, `pools`.

        The site `index_scores` has −inf for pools that a query cannot see.
        """
        span, ape = real_span(mask), self.ape[...]
        P = ape.shape[0]
        seen = span.seen(mask)
        queries, weights = self._queries(x, qr)
        keys, gates = self._keys(x)
        pooled = pool_keys(keys, gates, ape, span)
        pools = self._choose(queries, pooled, weights, seen)
        note(record, "index_keys", keys)
        note(record, "pool_keys", pooled)
        if wants(record, "index_scores"):
            score = functools.partial(_visible_scores, pooled, P)
            note(record, "index_scores", map_queries(score, QUERY_BLOCK, queries, weights, seen))
        note(record, "pools", pools)
        return select_tokens(pools, seen, span.first, P, self.top_k, self.tail)

    def advance(
        self, x: Activations, qr: Float[Array, "B T Rq"], stretch: Stretch, cache: DSACache
    ) -> tuple[Selection, DSACache]:
        """The slots that each query of `stretch` selects, and the cache with their index keys.

        The work for a token is that of scoring the pools that the longest row has, whatever the
        capacity.
        """
        assert cache.index_keys is not None and cache.gates is not None
        assert cache.pool_keys is not None
        ape = self.ape[...]
        P, T = ape.shape[0], x.shape[1]
        keys, gates = (
            stretch.write(*written)
            for written in zip((cache.index_keys, cache.gates), self._keys(x), strict=True)
        )
        pooled = complete_pools(cache.pool_keys, keys, gates, ape, stretch, T)

        seen = stretch.seen(T)
        queries, weights = self._queries(x, qr)
        pools = self._choose(queries, pooled, weights, seen)
        selection = select_tokens(
            pools, seen, jnp.zeros_like(stretch.start), P, self.top_k, self.tail
        )
        return selection, replace(cache, index_keys=keys, gates=gates, pool_keys=pooled)

    def _choose(
        self,
        queries: Float[Array, "B T HI DI"],
        pooled: Float[Array, "B NP DI"],
        weights: Float[Array, "B T HI"],
        seen: Int[Array, "B T"],
    ) -> Int[Array, "B T C"]:
        """The pools of each query, a block of queries after the other; of each device its own."""
        P = self.ape.shape[0]

        def own(pooled, queries, weights, seen):
            def choose(queries, weights, seen):
                return best_pools(queries, pooled, weights, seen, P, self.top_k // P)

            return map_queries(choose, QUERY_BLOCK, queries, weights, seen)

        if self.placement is not None:
            row, token = (
                self.placement.spec(seen.shape, ("batch", tokens)) for tokens in (None, "sequence")
            )
            own = self.placement.over(own, (row, token, token, token), token)
        return own(pooled, queries, weights, seen)

    def _queries(
        self, x: Activations, qr: Float[Array, "B T Rq"]
    ) -> tuple[Float[Array, "B T HI DI"], Float[Array, "B T HI"]]:
        """Queries and head weights."""
        queries = linear(qr, self.wq_b[...]).reshape(*qr.shape[:2], self.heads, -1)
        return queries, head_weights(linear(x, self.weights_proj[...]))

    def _keys(self, x: Activations) -> tuple[Float[Array, "B T DI"], Float[Array, "B T DI"]]:
        """Keys and pool gates, of all tokens: a pool is wherever a query looks for it."""
        keys = layer_norm(linear(x, self.wk[...]), self.k_norm_weight[...], self.k_norm_bias[...])
        gates = linear(x, self.compress_gate[...])
        return gather_tokens(self.placement, keys), gather_tokens(self.placement, gates)
