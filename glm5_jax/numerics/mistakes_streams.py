"""Mistakes in hyper-connections, in norms, and in what stands behind the layers."""

import jax
import jax.numpy as jnp

from glm5_jax.nn.mhc import coefficients, expand, mean_streams, sinkhorn
from glm5_jax.nn.norms import gated_rms_norm, inverse_rms, layer_norm, rms_norm
from glm5_jax.numerics.mistakes_planting import instead_of


@instead_of(expand)
def comb_not_transposed(y, streams, post, comb):
    """Stream j gathers by comb[j, i], not by comb[i, j]."""
    return expand(y, streams, post, jnp.swapaxes(comb, -1, -2))


@instead_of(coefficients)
def post_without_factor_two(*args, **kwargs):
    """`post` is a plain sigmoid."""
    site = coefficients(*args, **kwargs)
    return site._replace(post=site.post / 2)


@instead_of(coefficients)
def pre_without_eps(*args, hc_eps, **kwargs):
    """`pre` lacks its floor of `hc_eps`."""
    site = coefficients(*args, hc_eps=hc_eps, **kwargs)
    return site._replace(pre=site.pre - hc_eps)


@instead_of(coefficients)
def hc_eps_in_the_norm(*args, norm_eps, hc_eps, **kwargs):
    """The streams are normalised with `hc_eps` instead of `rms_norm_eps`."""
    return coefficients(*args, norm_eps=hc_eps, hc_eps=hc_eps, **kwargs)


@instead_of(coefficients)
def streams_flattened_channel_major(streams, fn, *args, **kwargs):
    """`fn` is read as if the streams of one channel lay side by side."""
    by_channel = fn.reshape(len(fn), streams.shape[-1], streams.shape[-2])
    return coefficients(streams, jnp.swapaxes(by_channel, 1, 2).reshape(fn.shape), *args, **kwargs)


@instead_of(coefficients)
def pre_and_post_swapped(streams, fn, base, scale, **kwargs):
    """The first rows of `fn` are taken for `post`, the second for `pre`."""
    M = streams.shape[-2]
    rows = jnp.concatenate([jnp.arange(M, 2 * M), jnp.arange(M), jnp.arange(2 * M, len(fn))])
    return coefficients(streams, fn[rows], base[rows], scale[jnp.array([1, 0, 2])], **kwargs)


@instead_of(sinkhorn)
def sinkhorn_rows_first(logits, iterations, eps):
    """Every iteration scales rows, then columns, also the first.

    The softmax has made the rows equal already: all that shows is `hc_eps`.
    """
    comb = jax.nn.softmax(logits, axis=-1) + eps
    for _ in range(iterations):
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
        comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)
    return comb


@instead_of(sinkhorn)
def sinkhorn_rows_last(logits, iterations, eps):
    """Every iteration scales columns, then rows."""
    comb = jax.nn.softmax(logits, axis=-1) + eps
    for _ in range(iterations):
        comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
    return comb


@instead_of(sinkhorn)
def sinkhorn_one_iteration_fewer(logits, iterations, eps):
    """One iteration is lost."""
    return sinkhorn(logits, iterations - 1, eps)


@instead_of(sinkhorn)
def comb_transposed_where_made(*args):
    """`comb` leaves Sinkhorn's iteration transposed, and is transposed once more where applied."""
    return jnp.swapaxes(sinkhorn(*args), -1, -2)


@instead_of(sinkhorn)
def comb_logits_transposed(logits, *args):
    """The logits of `comb` are read column by column."""
    return sinkhorn(jnp.swapaxes(logits, -1, -2), *args)


@instead_of(mean_streams)
def streams_summed_at_the_end(streams):
    """A sum and no mean: the final norm hides all of it but its eps."""
    return mean_streams(streams) * streams.shape[-2]


@instead_of(rms_norm)
def norm_weight_plus_one(x, weight, eps):
    """The weight is taken for a deviation from one."""
    return rms_norm(x, 1 + weight, eps)


@instead_of(inverse_rms)
def eps_outside_the_root(x, eps):
    """`x / (sqrt(mean(x²)) + eps)`."""
    return 1 / (jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True)) + eps)


@instead_of(layer_norm)
def layer_norm_bias_dropped(x, weight, bias):
    """The indexer's key norm has no bias."""
    return layer_norm(x, weight, jnp.zeros_like(bias))


@instead_of(layer_norm)
def layer_norm_eps_of_torch(x, weight, bias):
    """The indexer's key norm has torch's default eps, 1e-5."""
    return layer_norm(x, weight, bias, eps=1e-5)


@instead_of(gated_rms_norm)
def output_gate_silu(x, gate, weight, eps):
    """KDA's output gate is a SiLU, as in Gated DeltaNet."""
    return gated_rms_norm(x, gate, weight, eps) * gate
