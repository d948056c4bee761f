"""The catalogue of planted mistakes: what goes wrong in ports of this model, one step each.

A comparison is worth what it can catch. Each mistake replaces one step function of `nn` or
`pallas_kernels` by a version that is wrong in one way, has every shape right, and runs:

    with planted("comb_not_transposed"):
        logits = model(tokens)

Nothing in `nn` knows of them. The docstring of a replacement says what it does wrong.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import glm5_jax.model  # noqa: F401  every module whose steps can be replaced
from glm5_jax.nn.dsa import expand_latent
from glm5_jax.nn.ffn import Routing, candidate_scores, clamped_swiglu, route
from glm5_jax.nn.indexer import (
    Span,
    head_weights,
    index_scores,
    pool_keys,
    select_tokens,
    visible_pools,
)
from glm5_jax.nn.kda import causal_conv, input_gate, split_conv
from glm5_jax.nn.mhc import coefficients, expand, mean_streams, sinkhorn
from glm5_jax.nn.norms import gated_rms_norm, layer_norm, normalize, rms_norm
from glm5_jax.nn.padding import mask_padding
from pallas_kernels.kda import chunk_kda, kda_gate, l2_normalize
from pallas_kernels.kda.base import prepare


@dataclass(frozen=True)
class Mistake:
    """A wrong version, `replacement`, of the step `attribute` that `module` defines."""

    name: str
    description: str
    module: str
    attribute: str
    replacement: Callable[..., Any]


MISTAKES: dict[str, Mistake] = {}


@contextmanager
def planted(name: str) -> Iterator[Mistake]:
    """Make the mistake of that name wherever its step is called, while the context lasts.

    JAX's caches are cleared before and after, so that no function compiled without the mistake is
    called with it, or the other way round. Raises KeyError for a name that `MISTAKES` lacks.
    """
    mistake = MISTAKES[name]
    right = getattr(sys.modules[mistake.module], mistake.attribute)
    bindings = list(_bindings(right))
    _bind(bindings, mistake.replacement)
    try:
        yield mistake
    finally:
        _bind(bindings, right)


def _bindings(step: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every global name of our modules that means `step`: `from … import` makes copies."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("glm5_jax.", "pallas_kernels.")) and name != __name__:
            yield from ((module, key) for key, value in vars(module).items() if value is step)


def _bind(bindings: list[tuple[ModuleType, str]], step: Any) -> None:
    for module, name in bindings:
        setattr(module, name, step)
    jax.clear_caches()


def _instead_of(step: Any) -> Callable[[Any], Any]:
    """Register what follows as a mistake in `step`, under its own name and docstring."""

    def register(replacement: Any) -> Any:
        name = replacement.__name__
        description = replacement.__doc__.strip()
        MISTAKES[name] = Mistake(name, description, step.__module__, step.__name__, replacement)
        return replacement

    return register


# ---- hyper-connections


@_instead_of(expand)
def comb_not_transposed(y, streams, post, comb):
    """Stream j gathers by comb[j, i], not by comb[i, j]."""
    return expand(y, streams, post, jnp.swapaxes(comb, -1, -2))


@_instead_of(coefficients)
def post_without_factor_two(*args, **kwargs):
    """`post` is a plain sigmoid."""
    site = coefficients(*args, **kwargs)
    return site._replace(post=site.post / 2)


@_instead_of(coefficients)
def pre_without_eps(*args, hc_eps, **kwargs):
    """`pre` lacks its floor of `hc_eps`."""
    site = coefficients(*args, hc_eps=hc_eps, **kwargs)
    return site._replace(pre=site.pre - hc_eps)


@_instead_of(coefficients)
def hc_eps_in_the_norm(*args, norm_eps, hc_eps, **kwargs):
    """The streams are normalised with `hc_eps` instead of `rms_norm_eps`."""
    return coefficients(*args, norm_eps=hc_eps, hc_eps=hc_eps, **kwargs)


@_instead_of(coefficients)
def streams_flattened_channel_major(streams, fn, *args, **kwargs):
    """`fn` is read as if the streams of one channel lay side by side."""
    by_channel = fn.reshape(len(fn), streams.shape[-1], streams.shape[-2])
    return coefficients(streams, jnp.swapaxes(by_channel, 1, 2).reshape(fn.shape), *args, **kwargs)


@_instead_of(coefficients)
def pre_and_post_swapped(streams, fn, base, scale, **kwargs):
    """The first rows of `fn` are taken for `post`, the second for `pre`."""
    M = streams.shape[-2]
    rows = jnp.concatenate([jnp.arange(M, 2 * M), jnp.arange(M), jnp.arange(2 * M, len(fn))])
    return coefficients(streams, fn[rows], base[rows], scale[jnp.array([1, 0, 2])], **kwargs)


@_instead_of(sinkhorn)
def sinkhorn_rows_first(logits, iterations, eps):
    """Every iteration scales rows, then columns, also the first.

    The softmax has made the rows equal already: all that shows is `hc_eps`.
    """
    comb = jax.nn.softmax(logits, axis=-1) + eps
    for _ in range(iterations):
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
        comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)
    return comb


@_instead_of(sinkhorn)
def sinkhorn_rows_last(logits, iterations, eps):
    """Every iteration scales columns, then rows."""
    comb = jax.nn.softmax(logits, axis=-1) + eps
    for _ in range(iterations):
        comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
    return comb


@_instead_of(sinkhorn)
def sinkhorn_one_iteration_fewer(logits, iterations, eps):
    """One iteration is lost."""
    return sinkhorn(logits, iterations - 1, eps)


@_instead_of(mean_streams)
def streams_summed_at_the_end(streams):
    """A sum and no mean: the final norm hides all of it but its eps."""
    return mean_streams(streams) * streams.shape[-2]


# ---- norms


@_instead_of(rms_norm)
def norm_weight_plus_one(x, weight, eps):
    """The weight is taken for a deviation from one."""
    return rms_norm(x, 1 + weight, eps)


@_instead_of(normalize)
def eps_outside_the_root(x, eps):
    """`x / (sqrt(mean(x²)) + eps)`."""
    return x / (jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True)) + eps)


@_instead_of(layer_norm)
def layer_norm_bias_dropped(x, weight, bias):
    """The indexer's key norm has no bias."""
    return layer_norm(x, weight, jnp.zeros_like(bias))


@_instead_of(layer_norm)
def layer_norm_eps_of_torch(x, weight, bias):
    """The indexer's key norm has torch's default eps, 1e-5."""
    return layer_norm(x, weight, bias, eps=1e-5)


@_instead_of(gated_rms_norm)
def output_gate_silu(x, gate, weight, eps):
    """KDA's output gate is a SiLU, as in Gated DeltaNet."""
    return gated_rms_norm(x, gate, weight, eps) * gate


# ---- KDA


@_instead_of(mask_padding)
def padding_not_zeroed(x, mask):
    """Padded tokens enter the convolution and the state."""
    return x


@_instead_of(split_conv)
def query_and_key_taps_swapped(weight):
    """The stored convolution's taps are taken in the order k, q, v."""
    q, k, v = split_conv(weight)
    return [k, q, v]


@_instead_of(causal_conv)
def taps_reversed(x, weight, *before):
    """Tap 0 touches the current token."""
    return causal_conv(x, weight[:, ::-1], *before)


@_instead_of(kda_gate)
def decay_without_sigmoid(f, A_log, dt_bias, lower_bound):
    """The lower bound clamps the unbounded gate, where it should scale a sigmoid."""
    return jnp.maximum(kda_gate(f, A_log, dt_bias, None), lower_bound)


@_instead_of(kda_gate)
def rate_outside_the_sigmoid(f, A_log, dt_bias, lower_bound):
    """`exp(A_log)` multiplies the sigmoid and not its argument."""
    g = kda_gate(f, jnp.zeros_like(A_log), dt_bias, lower_bound)
    return jnp.exp(A_log)[:, None] * g


@_instead_of(kda_gate)
def dt_bias_ignored(f, A_log, dt_bias, lower_bound):
    """The gate has no bias."""
    return kda_gate(f, A_log, jnp.zeros_like(dt_bias), lower_bound)


@_instead_of(input_gate)
def write_strength_of_one(logits):
    """Every key replaces all that it finds: beta is not applied."""
    return jnp.ones_like(input_gate(logits))


@_instead_of(chunk_kda)
def decay_after_the_read(q, k, v, g, beta, **kwargs):
    """The state decays after it is written and read: each token meets the last one's decay."""
    return chunk_kda(q, k, v, jnp.roll(g, 1, axis=1).at[:, 0].set(0), beta, **kwargs)


@_instead_of(l2_normalize)
def l2_eps_as_a_floor(x):
    """`x / max(|x|, eps)`, as torch's `normalize`."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


@_instead_of(l2_normalize)
def l2_eps_of_a_mean(x):
    """The eps is added to the mean of squares, as in an RMSNorm."""
    return normalize(x, 1e-6) * x.shape[-1] ** -0.5


@_instead_of(prepare)
def query_scaled_twice(q, k, **kwargs):
    """The query gets `D^-0.5` twice: the output norm hides all of it but its eps."""
    q, k = prepare(q, k, **kwargs)
    return q * q.shape[-1] ** -0.5, k


# ---- DSA


@_instead_of(expand_latent)
def attention_scaled_by_the_latent(latent, kv_b, heads, nope):
    """Scores are scaled by `R^-0.5`, the width that an absorbed query has."""
    k, v = expand_latent(latent, kv_b, heads, nope)
    return k * (nope / latent.shape[-1]) ** 0.5, v


@_instead_of(expand_latent)
def kv_b_values_first(latent, kv_b, heads, nope):
    """The halves of a head are swapped: V value rows, then N key rows."""
    v, k = expand_latent(latent, kv_b, heads, len(kv_b) // heads - nope)
    return k, v


@_instead_of(expand_latent)
def kv_b_keys_of_all_heads_first(latent, kv_b, heads, nope):
    """The key rows of all heads are taken to stand before the value rows of all heads."""
    k, v = jnp.split(kv_b, [heads * nope])
    by_head = [w.reshape(heads, -1, kv_b.shape[1]) for w in (k, v)]
    return expand_latent(latent, jnp.concatenate(by_head, axis=1).reshape(kv_b.shape), heads, nope)


@_instead_of(Span)
class pools_from_index_zero(Span):
    """Pools are counted from the first position, padded or not."""

    @classmethod
    def of(cls, mask):
        """The whole row."""
        B, T = mask.shape
        return Span(jnp.zeros(B, jnp.int32), jnp.full(B, T, jnp.int32))


@_instead_of(pool_keys)
def ape_ignored(keys, gate, ape, span):
    """The slots of a pool have no bias of their own."""
    return pool_keys(keys, gate, jnp.zeros_like(ape), span)


@_instead_of(pool_keys)
def pool_gate_ignored(keys, gate, ape, span):
    """A pool's weights are those of its slots alone, whatever the tokens."""
    return pool_keys(keys, jnp.zeros_like(gate), ape, span)


@_instead_of(pool_keys)
def pool_weights_shared_by_channels(keys, gate, ape, span):
    """One softmax for all channels, of their mean."""
    gate, ape = (jnp.broadcast_to(h.mean(-1, keepdims=True), h.shape) for h in (gate, ape))
    return pool_keys(keys, gate, ape, span)


@_instead_of(head_weights)
def index_weights_absolute(logits):
    """No index head can lower a pool."""
    return jnp.abs(head_weights(logits))


@_instead_of(head_weights)
def index_weights_softmax(logits):
    """The index heads are weighed by a softmax."""
    return jax.nn.softmax(head_weights(logits), axis=-1)


@_instead_of(index_scores)
def index_relu_dropped(queries, keys, weights):
    """Negative dots count."""
    # q·k = relu(q·k) − relu(−q·k)
    return index_scores(queries, keys, weights) - index_scores(-queries, keys, weights)


@_instead_of(index_scores)
def index_relu_after_the_sum(queries, keys, weights):
    """The sum over the heads is rectified, not each head."""
    return jax.nn.relu(index_relu_dropped(queries, keys, weights))


@_instead_of(visible_pools)
def pool_visible_from_its_first_token(seen, pools, pool):
    """A query may choose the pool that it stands in, the future tokens of it included."""
    first = pool * jnp.arange(pools) + 1
    return first <= seen[..., None]


@_instead_of(select_tokens)
def tail_dropped(pools, seen, first, pool, top_k, tail):
    """The tokens of the incomplete pool are not selected."""
    return select_tokens(pools, seen, first, pool, top_k, False)


@_instead_of(select_tokens)
def every_query_sees_itself(pools, seen, first, pool, top_k, tail):
    """A query's own token is selected even where its pool is complete and was not chosen."""
    selection = select_tokens(pools, seen, first, pool, top_k, tail)
    itself = jnp.where(seen > 0, first[:, None] + seen - 1, -1)[..., None]
    return jnp.concatenate([selection, itself.astype(selection.dtype)], axis=-1)


# ---- feed-forward


@_instead_of(clamped_swiglu)
def clamp_missing(gate, up, limit):
    """A plain SwiGLU."""
    return jax.nn.silu(gate) * up


@_instead_of(clamped_swiglu)
def gate_clamped_on_both_sides(gate, up, limit):
    """The gate is clamped below as well."""
    return clamped_swiglu(jnp.maximum(gate, -limit), up, limit)


@_instead_of(clamped_swiglu)
def clamp_after_silu(gate, up, limit):
    """The gate is clamped after its SiLU."""
    return jnp.minimum(jax.nn.silu(gate), limit) * jnp.clip(up, -limit, limit)


@_instead_of(route)
def correction_bias_in_the_weights(logits, bias, *, normalize, scaling, **choice):
    """Experts are weighed by the biased scores that chose them."""
    scores = jax.nn.sigmoid(logits) + bias
    experts = route(logits, bias, normalize=normalize, scaling=scaling, **choice).experts
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * scaling)


@_instead_of(route)
def correction_bias_ignored(logits, bias, **kwargs):
    """Experts are chosen by their own scores."""
    return route(logits, jnp.zeros_like(bias), **kwargs)


@_instead_of(route)
def expert_weights_not_scaled(*args, scaling, **kwargs):
    """`routed_scaling_factor` is not applied."""
    return route(*args, scaling=1.0, **kwargs)


@_instead_of(route)
def expert_weights_not_normalised(*args, normalize, **kwargs):
    """The weights of a token do not sum to the scaling factor."""
    return route(*args, normalize=False, **kwargs)


@_instead_of(route)
def router_softmax(logits, bias, **kwargs):
    """Experts are scored by a softmax over all of them."""
    p = jax.nn.softmax(logits, axis=-1)
    return route(jnp.log(p) - jnp.log1p(-p), bias, **kwargs)


@_instead_of(candidate_scores)
def expert_groups_ignored(biased, groups, top_groups):
    """Experts are chosen from all groups."""
    return biased


@_instead_of(candidate_scores)
def groups_ranked_by_their_best_expert(biased, groups, top_groups):
    """A group is scored by one expert and not by two."""
    grouped = biased.reshape(*biased.shape[:-1], groups, -1)
    kept = jax.lax.top_k(jnp.max(grouped, axis=-1), top_groups)[1]
    is_kept = jnp.any(kept[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(biased.shape)
