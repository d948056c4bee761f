"""The three norms of the model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax.nn.types import wide


def inverse_rms(x: Float[Array, "*b n"], eps: float) -> Float[Array, "*b 1"]:
    """`1 / sqrt(mean(x²) + eps)` in float32."""
    x = x.astype(wide(x.dtype))
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def normalize(x: Float[Array, "*b n"], eps: float) -> Float[Array, "*b n"]:
    """`x / sqrt(mean(x²) + eps)` in float32: the RMSNorm without its weight."""
    return x.astype(wide(x.dtype)) * inverse_rms(x, eps)


def rms_norm(
    x: Float[Array, "*b n"], weight: Float[Array, " n"], eps: float
) -> Float[Array, "*b n"]:
    """RMSNorm: float32 inside, cast to x's dtype before the weight multiplies."""
    return normalize(x, eps).astype(x.dtype) * weight.astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*b n"], gate: Float[Array, "*b n"], weight: Float[Array, " n"], eps: float
) -> Float[Array, "*b n"]:
    """KDA's output norm: `rms_norm(x) * weight * sigmoid(gate)`, float32 with one cast at the end.

    The gate is a sigmoid; Gated DeltaNet, which KDA descends from, has SiLU here.
    """
    dtype = wide(x.dtype)
    gate = jax.nn.sigmoid(gate.astype(dtype))
    return (normalize(x, eps) * weight.astype(dtype) * gate).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*b n"],
    weight: Float[Array, " n"],
    bias: Float[Array, " n"],
    eps: float = 1e-6,
) -> Float[Array, "*b n"]:
    """LayerNorm with bias, float32 with one cast at the end.

    The indexer's key norm: the only biased norm of the model, and the only one whose eps is not
    `rms_norm_eps`.
    """
    dtype = wide(x.dtype)
    h = x.astype(dtype)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = normalize(h, eps)
    return (h * weight.astype(dtype) + bias.astype(dtype)).astype(x.dtype)
