"""A decoder layer: a mixer and a feed-forward layer, each inside its own hyper-connection.

Outside `jax.jit` a layer runs in compiled pieces that all layers of a kind share: the mixer's
site, and the dense feed-forward site or what stands before, in and behind the routed experts. A
layer whose experts are read from disk in between, see `streaming`, runs in the same pieces.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from glm5_jax.cache import DSACache, KDAState, LayerState
from glm5_jax.compiled import compiled
from glm5_jax.config import ModelConfig
from glm5_jax.nn.dsa import DSA
from glm5_jax.nn.ffn import Experts, MoE, Router, Routing, SwiGLU, add_shared, weigh
from glm5_jax.nn.kda import KDA
from glm5_jax.nn.mhc import Coefficients, HyperConnection, collapse, expand
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.padding import Stretch
from glm5_jax.nn.params import Params
from glm5_jax.nn.record import Record, note, scoped
from glm5_jax.nn.types import (
    Activations,
    Implementation,
    Mask,
    Selection,
    Streams,
)
from glm5_jax.skeleton import SkeletonLayer

RunExperts: TypeAlias = Callable[[Float[Array, "B T X"], Routing], Float[Array, "B T X"]]
"""From a routed layer's input and its routing to the weighted sum of each token's experts."""


class DecoderLayer(nnx.Module):
    """A mixer and a feed-forward layer, each inside its own hyper-connection."""

    def __init__(self, layer: SkeletonLayer, config: ModelConfig, params: Params):
        self.eps = config.rms_norm_eps
        self.attn_hc = HyperConnection(config, params.at("attn_hc"))
        self.attn_norm = params("attn_norm")
        self.attn = _mixer(layer, config, params.at("attn"))
        self.ffn_hc = HyperConnection(config, params.at("ffn_hc"))
        self.ffn_norm = params("ffn_norm")
        self.ffn = _feed_forward(layer, config, params.at("ffn"))

    def __call__(
        self,
        streams: Streams,
        mask: Mask,
        selection: Selection | None = None,
        record: Record | None = None,
        run_experts: RunExperts | None = None,
        implementation: Implementation = None,
    ) -> tuple[Streams, Selection | None]:
        """The streams after this layer, and the selection of a DSA layer (None from KDA).

        `selection` is the one to share, for a DSA layer without an indexer of its own.
        `run_experts` stands in for the layer's own routed experts, which need not be filled then.
        `implementation` is that of KDA's recurrence and of DSA's attention.
        """
        note(record, "in", streams)
        streams, chosen = _mix(
            *(self.attn_hc, self.attn_norm, self.attn, streams, mask, selection),
            eps=self.eps,
            implementation=implementation,
            record=scoped(record, "attn"),
        )
        return self._around_ffn(streams, record, run_experts), chosen

    def advance(
        self,
        streams: Streams,
        stretch: Stretch,
        state: LayerState,
        selection: Selection | None = None,
        record: Record | None = None,
        implementation: Implementation = None,
        donate: bool = False,
    ) -> tuple[Streams, Selection | None, LayerState]:
        """As a call, for the tokens of `stretch` after those that `state` remembers.

        With `donate` the new state takes the place of the given one in memory.
        """
        mix = _mix_in_place if donate else _mix_on
        streams, (chosen, after) = mix(
            *(self.attn_hc, self.attn_norm, self.attn, streams, stretch, state, selection),
            eps=self.eps,
            implementation=implementation,
            record=scoped(record, "attn"),
        )
        return self._around_ffn(streams, record), chosen, after

    def _around_ffn(
        self, streams: Streams, record: Record | None, run_experts: RunExperts | None = None
    ) -> Streams:
        trace = scoped(record, "ffn")
        at = (self.ffn_hc, self.ffn_norm)
        if isinstance(self.ffn, SwiGLU):
            return _feed_forward_dense(*at, self.ffn, streams, eps=self.eps, record=trace)
        x, site, routing = _route(*at, self.ffn.router, streams, eps=self.eps, record=trace)
        if run_experts is None:
            routed = _run_own(self.ffn.experts, x, routing)
        else:
            routed = run_experts(x, routing)
        return _gather(self.ffn.shared, streams, x, site, routed, record=trace)


# The compiled pieces of a layer. They take the modules that they need and no other, so that two
# kinds of layer share what they have in common.


@compiled("eps", "implementation")
def _mix(
    hc: HyperConnection,
    norm: nnx.Param,
    attn: KDA | DSA,
    streams: Streams,
    mask: Mask,
    selection: Selection | None,
    *,
    eps: float,
    implementation: Implementation,
    record: Record | None,
) -> tuple[Streams, Selection | None]:
    x, site = enter_site(hc, norm, eps, streams, record)
    if isinstance(attn, KDA):
        return _leave("kda", attn(x, mask, record, implementation), streams, site, record), None
    y, chosen = attn(x, mask, selection, record, implementation)
    return _leave("dsa", y, streams, site, record), chosen


def _advance_mixer(
    hc: HyperConnection,
    norm: nnx.Param,
    attn: KDA | DSA,
    streams: Streams,
    stretch: Stretch,
    state: LayerState,
    selection: Selection | None,
    *,
    eps: float,
    implementation: Implementation,
    record: Record | None,
) -> tuple[Streams, tuple[Selection | None, LayerState]]:
    after: LayerState
    chosen = None
    x, site = enter_site(hc, norm, eps, streams, record)
    if isinstance(attn, KDA):
        assert isinstance(state, KDAState)
        y, after = attn.advance(x, stretch, state, implementation)
    else:
        assert isinstance(state, DSACache)
        y, chosen, after = attn.advance(x, stretch, state, selection, record, implementation)
    name = "kda" if isinstance(attn, KDA) else "dsa"
    return _leave(name, y, streams, site, record), (chosen, after)


_mix_on = compiled("eps", "implementation")(_advance_mixer)
_mix_in_place = compiled("eps", "implementation", donated=(5,))(_advance_mixer)  # its `state`


@compiled("eps")
def _feed_forward_dense(
    hc: HyperConnection,
    norm: nnx.Param,
    ffn: SwiGLU,
    streams: Streams,
    *,
    eps: float,
    record: Record | None,
) -> Streams:
    x, site = enter_site(hc, norm, eps, streams, record)
    return _leave("dense", ffn(x, record), streams, site, record)


@compiled("eps")
def _route(
    hc: HyperConnection,
    norm: nnx.Param,
    router: Router,
    streams: Streams,
    *,
    eps: float,
    record: Record | None,
) -> tuple[Activations, Coefficients, Routing]:
    x, site = enter_site(hc, norm, eps, streams, record)
    return x, site, router(x, scoped(record, "router"))


def _run_own(experts: Experts, x: Activations, routing: Routing) -> Activations:
    if experts.spread is not None:
        return _run_spread(experts, x, routing)
    return weigh_outputs(expert_outputs(experts, x, routing.experts), routing.weights)


@jax.jit
def _run_spread(experts: Experts, x: Activations, routing: Routing) -> Activations:
    return experts(x, routing)


@jax.jit
def expert_outputs(
    experts: Experts, x: Activations, chosen: Int[Array, "B T k"]
) -> Float[Array, "B T k X"]:
    """`experts.outputs(x, chosen)`, compiled."""
    return experts.outputs(x, chosen)


@jax.jit
def weigh_outputs(outputs: Float[Array, "B T k X"], weights: Float[Array, "B T k"]) -> Activations:
    """The weighted sum of those, cast once. Apart from them, so that it has the same bits
    whether they came all at once or, as when they are streamed, in groups.
    """
    return weigh(outputs, weights).astype(outputs.dtype)


@compiled()
def _gather(
    shared: SwiGLU,
    streams: Streams,
    x: Activations,
    site: Coefficients,
    routed: Activations,
    *,
    record: Record | None,
) -> Streams:
    y = add_shared(shared, x, routed, record)
    return _leave("moe", y, streams, site, record)


def enter_site(
    hc: HyperConnection, norm: nnx.Param, eps: float, streams: Streams, record: Record | None
) -> tuple[Activations, Coefficients]:
    """The input of a site's sublayer, and the coefficients with which its output is spread."""
    site = hc(streams, record)
    x = collapse(streams, site.pre)
    note(record, "collapse", x)
    x = rms_norm(x, norm[...], eps)
    note(record, "norm", x)
    return x, site


def _leave(
    name: str, y: Activations, streams: Streams, site: Coefficients, record: Record | None
) -> Streams:
    """The streams after a site, from the output `y` of its sublayer."""
    note(record, name, y)
    streams = expand(y, streams, site.post, site.comb)
    note(record, "expand", streams)
    return streams


def _mixer(layer: SkeletonLayer, config: ModelConfig, params: Params) -> KDA | DSA:
    if layer.mixer == "kda":
        return KDA(config, params)
    return DSA(config, params, owns_indexer=layer.indexer == "full")


def _feed_forward(layer: SkeletonLayer, config: ModelConfig, params: Params) -> MoE | SwiGLU:
    return MoE(config, params) if layer.mlp == "moe" else SwiGLU(config, params)
