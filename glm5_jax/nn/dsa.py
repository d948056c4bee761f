"""DSA: multi-head latent attention (MLA, without positions) over the tokens an indexer selects."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from glm5_jax.cache import DSACache
from glm5_jax.config import ModelConfig
from glm5_jax.nn.absorbed import split_kv_b
from glm5_jax.nn.blocks import map_queries
from glm5_jax.nn.indexer import Indexer
from glm5_jax.nn.linear import full_precision, linear
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.padding import Stretch, mask_padding
from glm5_jax.nn.params import Params
from glm5_jax.nn.record import Record, note
from glm5_jax.nn.types import Activations, Mask, Selection, wide

# Queries whose scores are in memory at once; on a CPU a block of this size stays in its cache.
QUERY_BLOCK = 128
# Numbers of the latents that are gathered at once.
GATHERED = 2**20


def selection_mask(selection: Selection, length: int) -> Bool[Array, "B T S"]:
    """True where a query selected a token; −1 selects nothing."""
    B, T, _ = selection.shape
    batch, query = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    # A negative index would count from the end; one past the end is dropped.
    target = jnp.where(selection < 0, length, selection)
    return jnp.zeros((B, T, length), bool).at[batch, query, target].set(True, mode="drop")


def expand_latent(
    latent: Float[Array, "B S R"], kv_b: Float[Array, "_ R"], heads: int, nope: int
) -> tuple[Float[Array, "B S A N"], Float[Array, "B S A V"]]:
    """Keys and values of every head: `kv_b` holds, per head, N key rows and then V value rows."""
    kv = linear(latent, kv_b).reshape(*latent.shape[:2], heads, -1)
    return kv[..., :nope], kv[..., nope:]


def masked_softmax(scores: Float[Array, "*B S"], mask: Bool[Array, "*B S"]) -> Float[Array, "*B S"]:
    """Softmax over the last axis where `mask` is True, and zeros where it is nowhere."""
    scores = jnp.where(mask, scores, -jnp.inf)
    # A finite maximum for empty rows, so that exp sees −inf − 0 and not −inf + inf.
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def masked_attention(
    q: Float[Array, "B T A N"],
    k: Float[Array, "B S A N"],
    v: Float[Array, "B S A V"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T A V"]:
    """Softmax attention over the tokens of `mask`, with scale `N^-0.5`; the softmax is float32.

    The plain form: it computes every score and masks. A query with nothing to attend to gets zero.
    """
    dtype, precision = wide(q.dtype), full_precision(q.dtype)
    # Heads before tokens: XLA's CPU product is several times slower over a head axis in between.
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))
    scores = jnp.einsum("batn,basn->bats", q, k, precision=precision, preferred_element_type=dtype)
    weights = masked_softmax(scores * q.shape[-1] ** -0.5, mask[:, None]).astype(v.dtype)
    return jnp.moveaxis(jnp.einsum("bats,basv->batv", weights, v, precision=precision), 1, 2)


def selected_attention(
    q: Float[Array, "B T A N"],
    k: Float[Array, "B S A N"],
    v: Float[Array, "B S A V"],
    selection: Selection,
) -> Float[Array, "B T A V"]:
    """`masked_attention` over each query's selection, a block of queries after the other.

    Scores of all queries at once would be A·T·S floats. The backward pass computes those of a
    block again.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend(q, selection):
        return masked_attention(q, k, v, selection_mask(selection, k.shape[1]))

    return map_queries(attend, QUERY_BLOCK, q, selection)


def latent_attention(
    q: Float[Array, "B T A R"],
    latent: Float[Array, "B T W R"],
    mask: Bool[Array, "B T W"],
    scale: float,
) -> Float[Array, "B T A R"]:
    """Each query over its own W latents, which are key and value of all heads at once.

    The softmax is float32. What `mask` leaves out must be finite and has no effect; a query with
    nothing to attend to gets zero.
    """
    precision = full_precision(q.dtype)
    scores = jnp.einsum(
        "btar,btwr->btaw", q, latent, precision=precision, preferred_element_type=wide(q.dtype)
    )
    weights = masked_softmax(scores * scale, mask[:, :, None]).astype(latent.dtype)
    return jnp.einsum("btaw,btwr->btar", weights, latent, precision=precision)


def cached_attention(
    q: Float[Array, "B T A R"], cache: DSACache, selection: Selection, scale: float
) -> Float[Array, "B T A R"]:
    """`latent_attention` over the slots that each query selected; nothing else is read.

    Slots that are not valid are left out, whatever they hold. The latents of a block of queries are
    in memory at once.
    """
    B, S, R = cache.latent.shape
    batch = jnp.arange(B)[:, None, None]

    def attend(q, selection):
        # A negative index would count from the end; one past the end reads as the fill value.
        slot = jnp.where(selection < 0, S, selection)
        valid = cache.valid.at[batch, slot].get(mode="fill", fill_value=False)
        slot = jnp.where(valid, slot, S)
        latent = cache.latent.at[batch, slot].get(mode="fill", fill_value=0)
        return latent_attention(q, latent, valid, scale)

    block = max(1, GATHERED // (B * R * selection.shape[-1]))
    return map_queries(attend, block, q, selection)


class DSA(nnx.Module):
    """The DSA mixer. Without an indexer of its own it is given another layer's selection."""

    def __init__(self, config: ModelConfig, params: Params, owns_indexer: bool):
        self.heads = config.num_attention_heads
        self.nope = config.qk_nope_head_dim
        self.eps = config.rms_norm_eps
        self.q_a_proj = params("q_a_proj")
        self.q_a_norm = params("q_a_norm")
        self.q_b_proj = params("q_b_proj")
        self.kv_a_proj = params("kv_a_proj")
        self.kv_a_norm = params("kv_a_norm")
        self.kv_b_proj = params("kv_b_proj")
        self.o_proj = params("o_proj")
        self.indexer = Indexer(config, params.at("indexer")) if owns_indexer else None

    def __call__(
        self,
        x: Activations,
        mask: Mask,
        selection: Selection | None = None,
        record: Record | None = None,
    ) -> tuple[Activations, Selection]:
        """Attend, and return the selection that was used, for the layers that share it.

        With a `selection` the indexer does not run. Sites `latent`, those of the indexer,
        `selection`, `o` (before the output projection).
        """
        # A padded position may hold anything; its key is masked, but 0 · NaN would not be.
        x = mask_padding(x, mask)
        q, qr, latent = self._project(x)
        note(record, "latent", latent)
        if selection is None and self.indexer is not None:
            selection = self.indexer(x, qr, mask, record)
        if selection is None:
            raise ValueError("a DSA layer that shares its selection was given none to share")

        k, v = expand_latent(latent, self.kv_b_proj[...], self.heads, self.nope)
        o = selected_attention(q, k, v, selection)
        note(record, "selection", selection)
        note(record, "o", o)
        return linear(o.reshape(*x.shape[:2], -1), self.o_proj[...]), selection

    def advance(
        self,
        x: Activations,
        stretch: Stretch,
        cache: DSACache,
        selection: Selection | None = None,
        record: Record | None = None,
    ) -> tuple[Activations, Selection, DSACache]:
        """Attend from the tokens of `stretch` to what is cached and to themselves.

        In the latent's space: queries through W_kᵀ, the sums of latents through W_v. With a
        `selection`, of slots, the indexer does not run and its cache stays. Returns also the
        selection that was used, and the cache with the new tokens. Site `selection`.
        """
        x = mask_padding(x, stretch.mask(x.shape[1]))
        q, qr, latent = self._project(x)
        cache = replace(
            cache,
            latent=stretch.write(cache.latent, latent),
            valid=stretch.write(cache.valid, jnp.ones(x.shape[:2], bool)),
        )
        if selection is None and self.indexer is not None:
            selection, cache = self.indexer.advance(x, qr, stretch, cache)
        if selection is None:
            raise ValueError("a DSA layer that shares its selection was given none to share")
        note(record, "selection", selection)

        precision = full_precision(x.dtype)
        w_k, w_v = split_kv_b(self.kv_b_proj[...].astype(x.dtype), self.heads, self.nope)
        q = jnp.einsum("btan,anr->btar", q, w_k, precision=precision)
        o = cached_attention(q, cache, selection, self.nope**-0.5)
        o = jnp.einsum("btar,avr->btav", o, w_v, precision=precision)
        return linear(o.reshape(*x.shape[:2], -1), self.o_proj[...]), selection, cache

    def _project(
        self, x: Activations
    ) -> tuple[Float[Array, "B T A N"], Float[Array, "B T Rq"], Float[Array, "B T R"]]:
        """Queries, the latent that they come from, and the latent of keys and values."""
        qr = rms_norm(linear(x, self.q_a_proj[...]), self.q_a_norm[...], self.eps)
        q = linear(qr, self.q_b_proj[...]).reshape(*x.shape[:2], self.heads, -1)
        return q, qr, rms_norm(linear(x, self.kv_a_proj[...]), self.kv_a_norm[...], self.eps)
