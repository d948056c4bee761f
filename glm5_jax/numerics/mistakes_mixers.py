"""Mistakes in the two mixers, KDA and DSA with its indexer."""

import jax
import jax.numpy as jnp

from glm5_jax.nn.dsa import expand_latent
from glm5_jax.nn.indexer import (
    Span,
    head_weights,
    index_scores,
    pool_keys,
    real_span,
    select_tokens,
    visible_pools,
)
from glm5_jax.nn.kda import causal_conv, input_gate, split_conv
from glm5_jax.nn.norms import normalize
from glm5_jax.nn.padding import mask_padding
from glm5_jax.numerics.mistakes_planting import instead_of
from pallas_kernels.kda import chunk_kda, kda_gate, l2_normalize
from pallas_kernels.kda.base import prepare


@instead_of(mask_padding)
def padding_not_zeroed(x, mask):
    """Padded tokens enter the convolution and the state."""
    return x


@instead_of(split_conv)
def query_and_key_taps_swapped(weight):
    """The stored convolution's taps are taken in the order k, q, v."""
    q, k, v = split_conv(weight)
    return [k, q, v]


@instead_of(split_conv)
def query_and_value_taps_swapped(weight):
    """The stored convolution's taps are taken in the order v, k, q."""
    q, k, v = split_conv(weight)
    return [v, k, q]


@instead_of(split_conv)
def key_and_value_taps_swapped(weight):
    """The stored convolution's taps are taken in the order q, v, k."""
    q, k, v = split_conv(weight)
    return [q, v, k]


@instead_of(causal_conv)
def taps_reversed(x, weight, *before):
    """Tap 0 touches the current token."""
    return causal_conv(x, weight[:, ::-1], *before)


@instead_of(kda_gate)
def decay_without_sigmoid(f, A_log, dt_bias, lower_bound):
    """The lower bound clamps the unbounded gate, where it should scale a sigmoid."""
    return jnp.maximum(kda_gate(f, A_log, dt_bias, None), lower_bound)


@instead_of(kda_gate)
def rate_outside_the_sigmoid(f, A_log, dt_bias, lower_bound):
    """`exp(A_log)` multiplies the sigmoid and not its argument."""
    g = kda_gate(f, jnp.zeros_like(A_log), dt_bias, lower_bound)
    return jnp.exp(A_log)[:, None] * g


@instead_of(kda_gate)
def dt_bias_ignored(f, A_log, dt_bias, lower_bound):
    """The gate has no bias."""
    return kda_gate(f, A_log, jnp.zeros_like(dt_bias), lower_bound)


@instead_of(kda_gate)
def dt_bias_transposed(f, A_log, dt_bias, lower_bound):
    """The flat bias is read as if the heads of one channel lay side by side."""
    return kda_gate(f, A_log, dt_bias.reshape(f.shape[-1], f.shape[-2]).T, lower_bound)


@instead_of(input_gate)
def write_strength_of_one(logits):
    """Every key replaces all that it finds: beta is not applied."""
    return jnp.ones_like(input_gate(logits))


@instead_of(chunk_kda)
def decay_after_the_read(q, k, v, g, beta, **kwargs):
    """The state decays after it is written and read: each token meets the last one's decay."""
    return chunk_kda(q, k, v, jnp.roll(g, 1, axis=1).at[:, 0].set(0), beta, **kwargs)


@instead_of(l2_normalize)
def l2_eps_as_a_floor(x):
    """`x / max(|x|, eps)`, as torch's `normalize`."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


@instead_of(l2_normalize)
def l2_eps_of_a_mean(x):
    """The eps is added to the mean of squares, as in an RMSNorm."""
    return normalize(x, 1e-6) * x.shape[-1] ** -0.5


@instead_of(prepare)
def query_scaled_twice(q, k, **kwargs):
    """The query gets `D^-0.5` twice: the output norm hides all of it but its eps."""
    q, k = prepare(q, k, **kwargs)
    return q * q.shape[-1] ** -0.5, k


# ---- DSA


@instead_of(expand_latent)
def attention_scaled_by_the_latent(latent, kv_b, heads, nope):
    """Scores are scaled by `R^-0.5`, the width that an absorbed query has."""
    k, v = expand_latent(latent, kv_b, heads, nope)
    return k * (nope / latent.shape[-1]) ** 0.5, v


@instead_of(expand_latent)
def kv_b_values_first(latent, kv_b, heads, nope):
    """The halves of a head are swapped: V value rows, then N key rows."""
    v, k = expand_latent(latent, kv_b, heads, len(kv_b) // heads - nope)
    return k, v


@instead_of(expand_latent)
def kv_b_keys_of_all_heads_first(latent, kv_b, heads, nope):
    """The key rows of all heads are taken to stand before the value rows of all heads."""
    k, v = jnp.split(kv_b, [heads * nope])
    by_head = [w.reshape(heads, -1, kv_b.shape[1]) for w in (k, v)]
    return expand_latent(latent, jnp.concatenate(by_head, axis=1).reshape(kv_b.shape), heads, nope)


@instead_of(real_span)
def pools_from_index_zero(mask):
    """Pools are counted from the first position, padded or not, and padding is chosen too."""
    B, T = mask.shape
    return Span(jnp.zeros(B, jnp.int32), jnp.full(B, T, jnp.int32))


@instead_of(pool_keys)
def ape_ignored(keys, gate, ape, span):
    """The slots of a pool have no bias of their own."""
    return pool_keys(keys, gate, jnp.zeros_like(ape), span)


@instead_of(pool_keys)
def pool_gate_ignored(keys, gate, ape, span):
    """A pool's weights are those of its slots alone, whatever the tokens."""
    return pool_keys(keys, jnp.zeros_like(gate), ape, span)


@instead_of(pool_keys)
def pool_weights_shared_by_channels(keys, gate, ape, span):
    """One softmax for all channels, of their mean."""
    gate, ape = (jnp.broadcast_to(h.mean(-1, keepdims=True), h.shape) for h in (gate, ape))
    return pool_keys(keys, gate, ape, span)


@instead_of(head_weights)
def index_weights_absolute(logits):
    """No index head can lower a pool."""
    return jnp.abs(head_weights(logits))


@instead_of(head_weights)
def index_weights_softmax(logits):
    """The index heads are weighed by a softmax."""
    return jax.nn.softmax(head_weights(logits), axis=-1)


@instead_of(index_scores)
def index_relu_dropped(queries, keys, weights):
    """Negative dots count."""
    # q·k = relu(q·k) − relu(−q·k)
    return index_scores(queries, keys, weights) - index_scores(-queries, keys, weights)


@instead_of(index_scores)
def index_relu_after_the_sum(queries, keys, weights):
    """The sum over the heads is rectified, not each head."""
    return jax.nn.relu(index_relu_dropped(queries, keys, weights))


@instead_of(visible_pools)
def pool_visible_from_its_first_token(seen, pools, pool):
    """A query may choose the pool that it stands in, the future tokens of it included."""
    first = pool * jnp.arange(pools) + 1
    return first <= seen[..., None]


@instead_of(select_tokens)
def tail_dropped(pools, seen, first, pool, top_k, tail):
    """The tokens of the incomplete pool are not selected."""
    return select_tokens(pools, seen, first, pool, top_k, False)


@instead_of(select_tokens)
def every_query_sees_itself(pools, seen, first, pool, top_k, tail):
    """A query's own token is selected even where its pool is complete and was not chosen."""
    selection = select_tokens(pools, seen, first, pool, top_k, tail)
    itself = jnp.where(seen > 0, first[:, None] + seen - 1, -1)[..., None]
    return jnp.concatenate([selection, itself.astype(selection.dtype)], axis=-1)
