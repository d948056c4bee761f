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
from glm5_jax.nn.placement import Placement, gather_tokens
from glm5_jax.nn.record import Record, note
from glm5_jax.nn.types import Activations, Implementation, Mask, Selection, wide
from pallas_kernels.sparse_mla import sparse_mla_decode

# Queries whose scores are in memory at once; on a CPU a block of this size stays in its cache.
QUERY_BLOCK = 128
# Up to so many times the tokens of a selection, all scores are computed and masked: that is less
# work than gathering a selection for every query, whose rows are wider than keys and values.
MASKED_UP_TO = 4


def selection_mask(selection: Selection, length: int) -> Bool[Array, "B T S"]:
    """True where a query selected a token; −1 selects nothing."""
    # A negative index would count from the end; one past the end is dropped.
    target = jnp.where(selection < 0, length, selection)

    def of_query(target):
        return jnp.zeros(length, bool).at[target].set(True, mode="drop")

    return jax.vmap(jax.vmap(of_query))(target)


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
        self.placement: Placement | None = None

    def __call__(
        self,
        x: Activations,
        mask: Mask,
        selection: Selection | None = None,
        record: Record | None = None,
        implementation: Implementation = None,
    ) -> tuple[Activations, Selection]:
        """Attend, and return the selection that was used, for the layers that share it.

        A sequence not much longer than a selection is attended to as a whole, and masked; so is any
        with the `implementation` "reference". Longer ones are as in `advance`, by
        `sparse_mla_decode`. With a `selection` the indexer does not run. Sites `latent`, those of
        the indexer, `selection`, `o` (before the output projection).
        """
        # A padded position may hold anything; its key is masked, but 0 · NaN would not be.
        x = mask_padding(x, mask)
        qr, latent = self._latents(x)
        note(record, "latent", latent)
        if selection is None and self.indexer is not None:
            selection = self.indexer(x, qr, mask, record)
        if selection is None:
            raise ValueError("a DSA layer that shares its selection was given none to share")
        note(record, "selection", selection)

        if implementation == "reference" or x.shape[1] <= MASKED_UP_TO * selection.shape[-1]:
            k, v = expand_latent(latent, self.kv_b_proj[...], self.heads, self.nope)
            q, own = self._queries(qr, self.q_b_proj[...]), selected_attention
            if self.placement is not None:
                spec = self.placement.spec
                queries = spec(q.shape, ("batch", "sequence", "heads", None))
                keys = spec(k.shape, ("batch", None, "heads", None))
                chosen = spec(selection.shape, ("batch", "sequence", None))
                own = self.placement.over(own, (queries, keys, keys, chosen), queries)
            o = own(q, k, v, selection)
        else:
            o = self._attend_selected(qr, latent, selection, implementation)
        note(record, "o", o)
        return linear(o.reshape(*x.shape[:2], -1), self.o_proj[...]), selection

    def advance(
        self,
        x: Activations,
        stretch: Stretch,
        cache: DSACache,
        selection: Selection | None = None,
        record: Record | None = None,
        implementation: Implementation = None,
    ) -> tuple[Activations, Selection, DSACache]:
        """Attend from the tokens of `stretch` to what is cached and to themselves.

        In the latent's space: queries through W_kᵀ, the sums of latents through W_v. With a
        `selection`, of slots, the indexer does not run and its cache stays; slots that are not
        valid are left out of it, whatever they hold. Returns also the selection that was used, and
        the cache with the new tokens. Site `selection`. `implementation` is that of
        `sparse_mla_decode`.
        """
        x = mask_padding(x, stretch.mask(x.shape[1]))
        qr, latent = self._latents(x)
        cache = replace(
            cache,
            latent=stretch.write(cache.latent, latent),
            valid=stretch.write(cache.valid, jnp.ones(x.shape[:2], bool)),
        )
        if selection is not None:
            selection = _valid_slots(selection, cache.valid)
        elif self.indexer is not None:
            selection, cache = self.indexer.advance(x, qr, stretch, cache)
        else:
            raise ValueError("a DSA layer that shares its selection was given none to share")
        note(record, "selection", selection)

        o = self._attend_selected(qr, cache.latent, selection, implementation)
        return linear(o.reshape(*x.shape[:2], -1), self.o_proj[...]), selection, cache

    def _latents(self, x: Activations) -> tuple[Float[Array, "B T Rq"], Float[Array, "B T R"]]:
        """The latent that queries come from, and that of keys and values, of all tokens."""
        qr = rms_norm(linear(x, self.q_a_proj[...]), self.q_a_norm[...], self.eps)
        latent = rms_norm(linear(x, self.kv_a_proj[...]), self.kv_a_norm[...], self.eps)
        return qr, gather_tokens(self.placement, latent)

    def _queries(
        self, qr: Float[Array, "B T Rq"], q_b: Float[Array, "_ Rq"]
    ) -> Float[Array, "B T A N"]:
        return linear(qr, q_b).reshape(*qr.shape[:2], -1, self.nope)

    def _attend_selected(
        self,
        qr: Float[Array, "B T Rq"],
        latent: Float[Array, "B S R"],
        selection: Selection,
        implementation: Implementation,
    ) -> Float[Array, "B T A V"]:
        """Each query over its own selection, a block of queries after the other.

        Nothing is in memory for all queries and heads but the result, and nothing for all queries
        and all selected tokens. The backward pass computes each block again. On a mesh each device
        has its rows and heads: a head needs no other, and XLA could not cut a kernel.
        """
        # Decoded once, where they are stored quantised, and not in every block.
        q_b, kv_b = self.q_b_proj[...], self.kv_b_proj[...].astype(qr.dtype)
        precision = full_precision(qr.dtype)

        def own(qr, latent, selection, q_b, kv_b):
            w_k, w_v = split_kv_b(kv_b, len(q_b) // self.nope, self.nope)

            @functools.partial(jax.checkpoint, prevent_cse=False)
            def attend(qr, selection):
                q = jnp.einsum("btan,anr->btar", self._queries(qr, q_b), w_k, precision=precision)
                o = sparse_mla_decode(
                    q, latent, selection, scale=self.nope**-0.5, implementation=implementation
                )
                return jnp.einsum("btar,avr->btav", o, w_v, precision=precision)

            return map_queries(attend, QUERY_BLOCK, qr, selection)

        if self.placement is not None:
            spec, (B, T) = self.placement.spec, qr.shape[:2]
            row, token = (spec((B, T), ("batch", tokens)) for tokens in (None, "sequence"))
            head = spec((self.heads,), ("heads",))
            o = spec((B, T, self.heads), ("batch", "sequence", "heads"))
            own = self.placement.over(own, (token, row, token, head, head), o)
        return own(qr, latent, selection, q_b, kv_b)


def _valid_slots(selection: Selection, valid: Bool[Array, "B S"]) -> Selection:
    """−1 in the place of slots that are not valid."""
    # A negative index would count from the end; one past the end reads as the fill value.
    slot = jnp.where(selection < 0, valid.shape[1], selection)
    there = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=False))(valid, slot)
    return jnp.where(there, selection, -1)
