"""Feed-forward layers: the clamped SwiGLU, the router, and the mixture of experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm5_jax.config import ModelConfig
from glm5_jax.nn.experts import apply_experts
from glm5_jax.nn.largest import largest
from glm5_jax.nn.linear import linear, linear_wide
from glm5_jax.nn.params import Params
from glm5_jax.nn.record import Record, note, scoped
from glm5_jax.nn.spread import Spread
from glm5_jax.nn.sums import sum_unrolled
from glm5_jax.nn.types import Activations, wide


def clamped_swiglu(
    gate: Float[Array, "*b I"], up: Float[Array, "*b I"], limit: float
) -> Float[Array, "*b I"]:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)`: the gate is clamped above only."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def split_gate_up(h: Float[Array, "*b 2*I"]) -> list[Float[Array, "*b I"]]:
    """Gate and up of a product with both, the gate first.

    Both have one shape, so the other order would pass every check but the numbers.
    """
    return jnp.split(h, 2, axis=-1)


class SwiGLU(nnx.Module):
    """The dense MLP, also the shared expert: `down(clamped_swiglu(gate x, up x))`."""

    def __init__(self, config: ModelConfig, params: Params):
        self.limit = config.swiglu_limit
        self.gate_proj = params("gate_proj")
        self.up_proj = params("up_proj")
        self.down_proj = params("down_proj")

    def __call__(self, x: Activations, record: Record | None = None) -> Activations:
        """`[B, T, X]` to `[B, T, X]`; no trace sites inside."""
        gate, up = linear(x, self.gate_proj[...]), linear(x, self.up_proj[...])
        return linear(clamped_swiglu(gate, up, self.limit), self.down_proj[...])


class Routing(NamedTuple):
    """The experts of each token and their weights, in the order of their biased scores."""

    experts: Int[Array, "B T k"]
    weights: Float[Array, "B T k"]


def candidate_scores(
    biased: Float[Array, "*b E"], groups: int, top_groups: int
) -> Float[Array, "*b E"]:
    """The biased scores of the experts in the `top_groups` best of `groups` equal groups.

    A group scores the sum of its two best experts. −inf for the experts of the other groups.
    """
    if groups == 1:
        return biased
    grouped = biased.reshape(*biased.shape[:-1], groups, -1)
    group_scores = jnp.sum(largest(grouped, 2)[0], axis=-1)
    kept = largest(group_scores, top_groups)[1]
    is_kept = jnp.any(kept[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(biased.shape)


def route(
    logits: Float[Array, "*b E"],
    bias: Float[Array, " E"],
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    normalize: bool,
    scaling: float,
    record: Record | None = None,
) -> Routing:
    """Choose by `sigmoid(logits) + bias`, weigh by `sigmoid(logits)` alone, in float32.

    The bias decides and never weighs. The `top_k` best candidates are chosen, ties going to the
    lower index. With `normalize`, the weights of a token are divided by their sum (+ 1e-20); then
    all are multiplied by `scaling`. Site `scores`: those that decide.
    """
    scores = jax.nn.sigmoid(logits)
    candidates = candidate_scores(scores + bias.astype(scores.dtype), groups, top_groups)
    note(record, "scores", candidates)
    experts = largest(candidates, top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * scaling)


def router_logits(x: Float[Array, "*b X"], weight: Float[Array, "E X"]) -> Float[Array, "*b E"]:
    """The logits of the experts, float32 in every model dtype: choices hang on their last bits."""
    return linear_wide(x, weight)


class Router(nnx.Module):
    """The router: float32 logits in every model dtype, and a float32 correction bias."""

    def __init__(self, config: ModelConfig, params: Params):
        self.top_k = config.num_experts_per_tok
        self.groups = config.n_group
        self.top_groups = config.topk_group
        self.normalize = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        self.weight = params("weight")
        self.bias = params("bias")

    def __call__(self, x: Activations, record: Record | None = None) -> Routing:
        """Experts and weights of each token; sites `logits`, `scores`, `experts`, `weights`."""
        logits = router_logits(x, self.weight[...])
        note(record, "logits", logits)
        routing = route(
            logits,
            self.bias[...],
            top_k=self.top_k,
            groups=self.groups,
            top_groups=self.top_groups,
            normalize=self.normalize,
            scaling=self.scaling,
            record=record,
        )
        note(record, "experts", routing.experts)
        note(record, "weights", routing.weights)
        return routing


class Experts(nnx.Module):
    """Stacked expert weights: gate and up `[E, I, X]`, down `[E, X, I]`.

    The stacks may hold fewer than the model's experts; then `outputs` are those of the ones held.
    `spread` says how they lie on several devices, None on one.
    """

    def __init__(self, config: ModelConfig, params: Params):
        self.num_experts = config.n_routed_experts
        self.limit = config.swiglu_limit
        self.gate_proj = params("gate_proj")
        self.up_proj = params("up_proj")
        self.down_proj = params("down_proj")
        self.spread: Spread | None = None

    def __call__(self, x: Activations, routing: Routing) -> Activations:
        """The weighted sum of each token's experts; only chosen experts are computed."""
        if self.spread is not None:
            return self.spread.run(self, x, routing.experts, routing.weights)
        return self.own_sum(x, routing.experts, routing.weights).astype(x.dtype)

    def own_sum(
        self, x: Activations, chosen: Int[Array, "B T k"], weights: Float[Array, "B T k"]
    ) -> Float[Array, "B T X"]:
        """The weighted sum, float32, of `outputs`."""
        return weigh(self.outputs(x, chosen), weights)

    def outputs(self, x: Activations, chosen: Int[Array, "B T k"]) -> Float[Array, "B T k X"]:
        """What each token's experts make of it, not weighed yet.

        `chosen` are indices into the stacks at hand; zeros for those past the end.
        """

        def expert(index: Int[Array, ""], rows: Float[Array, "n X"]) -> Float[Array, "n X"]:
            # The slices are copies anyway: side by side they make one product of twice the size.
            both = jnp.concatenate([self.gate_proj[index], self.up_proj[index]])
            gate, up = split_gate_up(linear(rows, both))
            return linear(clamped_swiglu(gate, up, self.limit), self.down_proj[index])

        tokens = x.reshape(-1, x.shape[-1])
        pairs = chosen.reshape(tokens.shape[0], -1)
        outputs = apply_experts(expert, tokens, pairs, self.num_experts, self.gate_proj.shape[0])
        return outputs.reshape(*chosen.shape, -1)


def weigh(
    outputs: Float[Array, "B T k X"], weights: Float[Array, "B T k"]
) -> Float[Array, "B T X"]:
    """The weighted sum over a token's experts: float32, in the order of the routing.

    So a token's result depends on nothing else, and not on the order of the experts' computation.
    """
    return sum_unrolled(outputs.astype(wide(outputs.dtype)) * weights[..., None], axis=-2)


class MoE(nnx.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, config: ModelConfig, params: Params):
        self.router = Router(config, params.at("router"))
        self.experts = Experts(config, params.at("experts"))
        self.shared = SwiGLU(config, params.at("shared"))

    def __call__(self, x: Activations, record: Record | None = None) -> Activations:
        """`[B, T, X]` to `[B, T, X]`; sites `router.*`, `experts`, `shared`."""
        routing = self.router(x, scoped(record, "router"))
        return add_shared(self.shared, x, self.experts(x, routing), record)


def add_shared(
    shared: SwiGLU, x: Activations, routed: Activations, record: Record | None = None
) -> Activations:
    """What the routed experts say and what the shared one does; sites `experts`, `shared`."""
    of_shared = shared(x)
    note(record, "experts", routed)
    note(record, "shared", of_shared)
    return routed + of_shared
