"""Matrix products with weights kept in the checkpoint's own `[out, in]` orientation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax.nn.types import wide


def full_precision(dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32 and float64 operands: a GPU's default float32 product is TF32."""
    return None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


def linear(x: Float[Array, "*b i"], weight: Float[Array, "o i"]) -> Float[Array, "*b o"]:
    """`x @ weight.T` in the activation dtype, whatever dtype the weight is stored in."""
    weight = weight.astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, weight, precision=full_precision(x.dtype))


def linear_wide(x: Float[Array, "*b i"], weight: Float[Array, "o i"]) -> Float[Array, "*b o"]:
    """`x @ weight.T` with both operands widened to float32: router and hyper-connection."""
    dtype = wide(x.dtype)
    return linear(x.astype(dtype), weight)
