"""Manifold-constrained hyper-connections: M residual streams around every sublayer.

Each site computes, from the streams themselves, how to collapse them into the sublayer's input
(`pre`), how to spread its output over them (`post`), and how to mix them (`comb`, projected onto
the doubly stochastic matrices by Sinkhorn's iteration). Coefficients are float32 in every model
dtype.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm5_jax.config import ModelConfig
from glm5_jax.nn.linear import linear_wide
from glm5_jax.nn.norms import inverse_rms
from glm5_jax.nn.params import Params
from glm5_jax.nn.record import Record
from glm5_jax.nn.sums import sum_unrolled
from glm5_jax.nn.types import Activations, Streams, wide


class Coefficients(NamedTuple):
    """What one hyper-connection site decides for each token, float32."""

    pre: Float[Array, "B T M"]
    post: Float[Array, "B T M"]
    comb: Float[Array, "B T M M"]


def sinkhorn(logits: Float[Array, "*b M M"], iterations: int, eps: float) -> Float[Array, "*b M M"]:
    """Rows and columns of `softmax(logits)` scaled towards sums of one.

    Softmax over the columns of a row and `+ eps`, one column normalisation, then `iterations - 1`
    times rows, columns; every divisor has `+ eps`. So with one iteration only columns are scaled,
    and the last scaling is always that of the columns.
    """
    # Tokens last: loops over M×M numbers are short, loops over tokens are long and vectorise.
    comb = jnp.moveaxis(logits, (-2, -1), (0, 1))
    comb = jax.nn.softmax(comb, axis=1) + eps

    def columns(comb):
        return comb / (jnp.sum(comb, axis=0, keepdims=True) + eps)

    def rows_then_columns(comb, _):
        return columns(comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)), None

    comb = jax.lax.scan(rows_then_columns, columns(comb), length=iterations - 1)[0]
    return jnp.moveaxis(comb, (0, 1), (-2, -1))


def coefficients(
    streams: Streams,
    fn: Float[Array, "_ MX"],
    base: Float[Array, " _"],
    scale: Float[Array, " 3"],
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> Coefficients:
    """The three sets of coefficients of one site.

    The flattened streams (stream-major) are divided by their root mean square with `norm_eps`
    (the model's `rms_norm_eps`; `hc_eps` belongs to the floor of `pre` and to Sinkhorn), then
    projected to M + M + M·M logits, each part with its own element of `scale`.
    """
    M = streams.shape[-2]
    flat = streams.reshape(*streams.shape[:-2], -1)
    # Divided behind the projection, where a token has a few numbers and not M·X.
    logits = linear_wide(flat, fn) * inverse_rms(flat, norm_eps)
    base, scale = base.astype(logits.dtype), scale.astype(logits.dtype)
    pre, post, comb = jnp.split(logits, [M, 2 * M], axis=-1)
    pre_base, post_base, comb_base = jnp.split(base, [M, 2 * M])
    comb = (comb * scale[2] + comb_base).reshape(*comb.shape[:-1], M, M)
    return Coefficients(
        pre=jax.nn.sigmoid(pre * scale[0] + pre_base) + hc_eps,
        post=2 * jax.nn.sigmoid(post * scale[1] + post_base),
        comb=sinkhorn(comb, iterations, hc_eps),
    )


def collapse(streams: Streams, pre: Float[Array, "B T M"]) -> Activations:
    """`Σ_m pre[m] · streams[m]`, summed in float32 and cast once: the sublayer's input."""
    return sum_unrolled(pre[..., None] * streams).astype(streams.dtype)


def mean_streams(streams: Streams) -> Activations:
    """The plain mean of the streams, in float32 and cast once: what the final norm sees."""
    total = sum_unrolled(streams.astype(wide(streams.dtype)))
    return (total / streams.shape[-2]).astype(streams.dtype)


def expand(
    y: Activations,
    streams: Streams,
    post: Float[Array, "B T M"],
    comb: Float[Array, "B T M M"],
) -> Streams:
    """`streams[j] ← post[j] · y + Σ_i comb[i, j] · streams[i]`: comb is applied transposed.

    `post` and `comb` are cast to the streams' dtype first; the sum over i is float32.
    """
    dtype, M = streams.dtype, streams.shape[-2]
    post, comb = post.astype(dtype), comb.astype(dtype).astype(wide(dtype))
    # Term by term: of one product [M, M, X] XLA would keep all of it, in memory.
    terms = (comb[..., i, :, None] * streams[..., i, None, :] for i in range(M))
    mixed = functools.reduce(jnp.add, terms)
    return post[..., None] * y[..., None, :] + mixed.astype(dtype)


class HyperConnection(nnx.Module):
    """One site's parameters: `fn` [(2+M)·M, M·X], and float32 `base` [(2+M)·M] and `scale` [3]."""

    def __init__(self, config: ModelConfig, params: Params):
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps
        self.iterations = config.hc_sinkhorn_iters
        self.fn = params("fn")
        self.base = params("base")
        self.scale = params("scale")

    def __call__(self, streams: Streams, record: Record | None = None) -> Coefficients:
        """Coefficients for `streams`; sites `pre`, `post`, `comb`."""
        site = coefficients(
            streams,
            self.fn[...],
            self.base[...],
            self.scale[...],
            norm_eps=self.norm_eps,
            hc_eps=self.hc_eps,
            iterations=self.iterations,
        )
        if record is not None:
            for name, value in site._asdict().items():
                record(name, value)
        return site
