"""Matrix products with weights kept in the checkpoint's own `[out, in]` orientation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax.nn.types import wide

# Numbers of a weight from which a second thread is worth waking.
_LARGE = 2**18


def full_precision(dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32 and float64 operands: a GPU's default float32 product is TF32."""
    return None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


def linear(x: Float[Array, "*b i"], weight: Float[Array, "o i"]) -> Float[Array, "*b o"]:
    """`x @ weight.T` in the activation dtype, whatever dtype the weight is stored in."""
    weight, precision = weight.astype(x.dtype), full_precision(x.dtype)
    if x.size == x.shape[-1] and weight.size >= _LARGE and weight.shape[0] % 2 == 0:
        # XLA's CPU product of a single row, which reading the weight takes, runs on one thread; the
        # products of a batch are spread over all. So decoding computes the halves of y as a batch.
        halves = weight.reshape(2, -1, weight.shape[1])
        x_twice = jnp.broadcast_to(x.reshape(1, -1), (2, 1, x.size))
        y = jnp.einsum("hbi,hoi->hbo", x_twice, halves, precision=precision)
        return y.reshape(*x.shape[:-1], -1)
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision)


def linear_wide(x: Float[Array, "*b i"], weight: Float[Array, "o i"]) -> Float[Array, "*b o"]:
    """`x @ weight.T` with both operands widened to float32: router and hyper-connection."""
    dtype = wide(x.dtype)
    return linear(x.astype(dtype), weight)
