"""DSA: multi-head latent attention (MLA, without positions) over the tokens an indexer selects."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from glm5_jax.config import ModelConfig
from glm5_jax.nn.indexer import Indexer
from glm5_jax.nn.linear import full_precision, linear
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.params import Params
from glm5_jax.nn.types import Activations, Mask, Record, Selection, wide


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
    scores = jnp.einsum("btan,bsan->bats", q, k, precision=precision, preferred_element_type=dtype)
    mask = mask[:, None]
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, -jnp.inf)
    # A finite maximum for empty rows, so that exp sees −inf − 0 and not −inf + inf.
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(v.dtype)
    return jnp.einsum("bats,bsav->btav", weights, v, precision=precision)


class DSA(nnx.Module):
    """The DSA mixer. With `indexer` "shared" it owns no indexer and is given a selection."""

    def __init__(self, config: ModelConfig, params: Params, indexer: str):
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
        self.indexer = Indexer(config, params.at("indexer")) if indexer == "full" else None

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
        x = jnp.where(mask[..., None], x, 0)
        qr = rms_norm(linear(x, self.q_a_proj[...]), self.q_a_norm[...], self.eps)
        q = linear(qr, self.q_b_proj[...]).reshape(*x.shape[:2], self.heads, -1)
        latent = rms_norm(linear(x, self.kv_a_proj[...]), self.kv_a_norm[...], self.eps)
        if self.indexer is not None:
            selection = self.indexer(x, qr, mask, record)
        if selection is None:
            raise ValueError("a DSA layer that shares its selection was given none to share")

        k, v = expand_latent(latent, self.kv_b_proj[...], self.heads, self.nope)
        o = masked_attention(q, k, v, selection_mask(selection, x.shape[1]))
        if record is not None:
            record("latent", latent)
            record("selection", selection)
            record("o", o)
        return linear(o.reshape(*x.shape[:2], -1), self.o_proj[...]), selection
