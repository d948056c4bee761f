"""The MTP head: from the trunk's output at a token and the token after it, the one after that.

Pair t is (h_t, token_{t+1}): h_t is the trunk's output after the final norm, or the head's own
output where a draft goes on from a draft. Embedding and `lm_head` are the trunk's.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from glm5_jax.cache import DSACache
from glm5_jax.config import ModelConfig
from glm5_jax.nn.dsa import DSA
from glm5_jax.nn.ffn import MoE
from glm5_jax.nn.linear import linear
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.padding import Stretch
from glm5_jax.nn.params import Params
from glm5_jax.nn.record import Record, note, scoped
from glm5_jax.nn.types import Activations, Implementation, Mask, Selection


class PlainLayer(nnx.Module):
    """DSA and MoE with the ordinary residual, `x + sublayer(rms_norm(x))`: one stream.

    The config's `hc_mult` is the trunk's; this layer has no hyper-connection.
    """

    def __init__(self, config: ModelConfig, params: Params):
        self.eps = config.rms_norm_eps
        self.attn_norm = params("attn_norm")
        self.attn = DSA(config, params.at("attn"), owns_indexer=True)
        self.ffn_norm = params("ffn_norm")
        self.ffn = MoE(config, params.at("ffn"))

    def __call__(self, x: Activations, mask: Mask, record: Record | None = None) -> Activations:
        """`[B, T, X]` to `[B, T, X]`; sites are those of `skeleton.residual_plan`."""
        trace = scoped(record, "attn")
        h = rms_norm(x, self.attn_norm[...], self.eps)
        note(trace, "norm", h)
        y, _ = self.attn(h, mask, None, trace)
        note(trace, "dsa", y)
        x = x + y
        note(trace, "add", x)
        return self._feed_forward(x, scoped(record, "ffn"))

    def advance(
        self,
        x: Activations,
        stretch: Stretch,
        cache: DSACache,
        selection: Selection | None = None,
        implementation: Implementation = None,
    ) -> tuple[Activations, Selection, DSACache]:
        """As a call, for the pairs of `stretch` after those in `cache`: see `DSA.advance`."""
        h = rms_norm(x, self.attn_norm[...], self.eps)
        y, selection, cache = self.attn.advance(
            h, stretch, cache, selection, implementation=implementation
        )
        return self._feed_forward(x + y, None), selection, cache

    def _feed_forward(self, x: Activations, trace: Record | None) -> Activations:
        h = rms_norm(x, self.ffn_norm[...], self.eps)
        note(trace, "norm", h)
        y = self.ffn(h, trace)
        note(trace, "moe", y)
        x = x + y
        note(trace, "add", x)
        return x


class MTPHead(nnx.Module):
    """Two norms and a projection that join a pair, one plain layer, and a norm of its own.

    Implementations differ in pair 0, that of a row's first real token: with
    `zero_first_embedding` set, which it is not by default, its embedding is zeroed.
    """

    def __init__(self, config: ModelConfig, params: Params):
        self.eps = config.rms_norm_eps
        self.zero_first_embedding = False
        self.enorm = params("enorm")
        self.hnorm = params("hnorm")
        self.eh_proj = params("eh_proj")
        self.layer = PlainLayer(config, params.at("layer"))
        self.shared_head_norm = params("shared_head_norm")

    def __call__(
        self, hidden: Activations, embedded: Activations, mask: Mask, record: Record | None = None
    ) -> Activations:
        """The head's outputs h' for whole rows of pairs, `[B, T, X]`.

        `hidden` are the h_t, `embedded` the embeddings of the tokens after them. `lm_head` of h'
        are the logits of the tokens after those; h' itself stands for h_{t+1} in a draft's pair.
        """
        x = self.join(hidden, embedded, jnp.cumsum(mask, axis=1) - 1)
        note(record, "pair", x)
        x = rms_norm(self.layer(x, mask, record), self.shared_head_norm[...], self.eps)
        note(record, "norm", x)
        return x

    def advance(
        self,
        hidden: Activations,
        embedded: Activations,
        stretch: Stretch,
        cache: DSACache,
        selection: Selection | None = None,
        implementation: Implementation = None,
    ) -> tuple[Activations, Selection, DSACache]:
        """h' of the pairs of `stretch` after those in `cache`, what they selected, and the cache.

        With a `selection` `[B, T, W]` of slots they attend to that, and the indexer does not run.
        `implementation` is that of the attention.
        """
        slots = stretch.start[:, None] + jnp.arange(hidden.shape[1])
        x = self.join(hidden, embedded, slots)
        x, selection, cache = self.layer.advance(x, stretch, cache, selection, implementation)
        return rms_norm(x, self.shared_head_norm[...], self.eps), selection, cache

    def join(
        self, hidden: Activations, embedded: Activations, slots: Int[Array, "B T"]
    ) -> Activations:
        """`eh_proj [enorm(embedding), hnorm(h)]`: the embedding's half comes first."""
        if self.zero_first_embedding:
            embedded = jnp.where(slots[..., None] == 0, 0, embedded)
        embedded = rms_norm(embedded, self.enorm[...], self.eps)
        hidden = rms_norm(hidden, self.hnorm[...], self.eps)
        return linear(jnp.concatenate([embedded, hidden], axis=-1), self.eh_proj[...])
