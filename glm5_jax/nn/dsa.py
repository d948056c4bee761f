"""DSA: multi-head latent attention (MLA, without positions) over the tokens an indexer selects."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from glm5_jax.config import ModelConfig
from glm5_jax.nn.indexer import Indexer
from glm5_jax.nn.linear import full_precision, linear
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.padding import mask_padding
from glm5_jax.nn.params import Params
from glm5_jax.nn.types import Activations, Mask, Record, Selection, wide

# Queries whose scores are in memory at once; on a CPU a block of this size stays in its cache.
QUERY_BLOCK = 128


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
    scores = jnp.where(mask[:, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    # A finite maximum for empty rows, so that exp sees −inf − 0 and not −inf + inf.
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(v.dtype)
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
    T = q.shape[1]
    block = min(QUERY_BLOCK, T)

    def blocks_first(x, fill):
        pad = [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend(block_input):
        q, selection = block_input
        return masked_attention(q, k, v, selection_mask(selection, k.shape[1]))

    o = jax.lax.map(attend, (blocks_first(q, 0), blocks_first(selection, -1)))
    return jnp.moveaxis(o, 0, 1).reshape(q.shape[0], -1, *o.shape[3:])[:, :T]


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

        Sites `latent`, those of the indexer, `selection`, `o` (before the output projection).
        """
        # A padded position may hold anything; its key is masked, but 0 · NaN would not be.
        x = mask_padding(x, mask)
        qr = rms_norm(linear(x, self.q_a_proj[...]), self.q_a_norm[...], self.eps)
        q = linear(qr, self.q_b_proj[...]).reshape(*x.shape[:2], self.heads, -1)
        latent = rms_norm(linear(x, self.kv_a_proj[...]), self.kv_a_norm[...], self.eps)
        if self.indexer is not None:
            selection = self.indexer(x, qr, mask, record)
        if selection is None:
            raise ValueError("a DSA layer that shares its selection was given none to share")

        k, v = expand_latent(latent, self.kv_b_proj[...], self.heads, self.nope)
        o = selected_attention(q, k, v, selection)
        if record is not None:
            record("latent", latent)
            record("selection", selection)
            record("o", o)
        return linear(o.reshape(*x.shape[:2], -1), self.o_proj[...]), selection
