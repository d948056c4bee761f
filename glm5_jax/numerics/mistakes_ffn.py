"""Mistakes in the clamped SwiGLU, the router and the mixture of experts."""

import jax
import jax.numpy as jnp

from glm5_jax.nn.ffn import (
    Routing,
    candidate_scores,
    clamped_swiglu,
    route,
    router_logits,
    split_gate_up,
    weigh,
)
from glm5_jax.numerics.mistakes_planting import instead_of


@instead_of(clamped_swiglu)
def clamp_missing(gate, up, limit):
    """A plain SwiGLU."""
    return jax.nn.silu(gate) * up


@instead_of(clamped_swiglu)
def gate_clamped_on_both_sides(gate, up, limit):
    """The gate is clamped below as well."""
    return clamped_swiglu(jnp.maximum(gate, -limit), up, limit)


@instead_of(clamped_swiglu)
def clamp_after_silu(gate, up, limit):
    """The gate is clamped after its SiLU."""
    return jnp.minimum(jax.nn.silu(gate), limit) * jnp.clip(up, -limit, limit)


@instead_of(route)
def correction_bias_in_the_weights(logits, bias, *, normalize, scaling, **choice):
    """Experts are weighed by the biased scores that chose them."""
    scores = jax.nn.sigmoid(logits) + bias
    experts = route(logits, bias, normalize=normalize, scaling=scaling, **choice).experts
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * scaling)


@instead_of(route)
def correction_bias_ignored(logits, bias, **kwargs):
    """Experts are chosen by their own scores."""
    return route(logits, jnp.zeros_like(bias), **kwargs)


@instead_of(route)
def expert_weights_not_scaled(*args, scaling, **kwargs):
    """`routed_scaling_factor` is not applied."""
    return route(*args, scaling=1.0, **kwargs)


@instead_of(route)
def expert_weights_not_normalised(*args, normalize, **kwargs):
    """The weights of a token do not sum to the scaling factor."""
    return route(*args, normalize=False, **kwargs)


@instead_of(route)
def router_softmax(logits, bias, **kwargs):
    """Experts are scored by a softmax over all of them."""
    p = jax.nn.softmax(logits, axis=-1)
    return route(jnp.log(p) - jnp.log1p(-p), bias, **kwargs)


@instead_of(candidate_scores)
def expert_groups_ignored(biased, groups, top_groups):
    """Experts are chosen from all groups."""
    return biased


@instead_of(candidate_scores)
def groups_ranked_by_their_best_expert(biased, groups, top_groups):
    """A group is scored by one expert and not by two."""
    grouped = biased.reshape(*biased.shape[:-1], groups, -1)
    kept = jax.lax.top_k(jnp.max(grouped, axis=-1), top_groups)[1]
    is_kept = jnp.any(kept[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(biased.shape)


@instead_of(router_logits)
def router_in_bfloat16(x, weight):
    """The router is a product of bfloat16 numbers, rounded to bfloat16, like any other."""
    logits = router_logits(*(h.astype(jnp.bfloat16) for h in (x, weight)))
    return logits.astype(jnp.bfloat16).astype(router_logits(x, weight).dtype)


@instead_of(route)
def correction_bias_in_bfloat16(logits, bias, **kwargs):
    """The correction bias is rounded to bfloat16: of some 7, nothing below 0.03 is left."""
    return route(logits, bias.astype(jnp.bfloat16).astype(bias.dtype), **kwargs)


@instead_of(split_gate_up)
def experts_gate_and_up_swapped(h):
    """The halves of the routed experts' stacks are taken in the order up, gate."""
    gate, up = split_gate_up(h)
    return [up, gate]


@instead_of(weigh)
def routed_layer_taken_for_dense(outputs, weights):
    """The layer counts as one of the first dense ones (`first_k_dense_replace`).

    Of its experts the shared one alone is run.
    """
    return jnp.zeros_like(weigh(outputs, weights))
