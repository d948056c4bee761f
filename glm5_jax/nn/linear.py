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
    weight = weight.astype(x.dtype)
    if x.size == x.shape[-1]:
        return _of_one_row(x.reshape(-1), weight).reshape(*x.shape[:-1], -1)
    return jnp.einsum("...i,oi->...o", x, weight, precision=full_precision(x.dtype))


def _of_one_row(x: Float[Array, " i"], weight: Float[Array, "o i"]) -> Float[Array, " o"]:
    """Decoding's product, which takes as long as it takes to read the weight."""
    if x.dtype == jnp.bfloat16:
        # XLA's CPU product widens the weight first, number by number on one thread; a sum widens
        # what it reads, on all threads, and takes a seventh of the time.
        return jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=-1).astype(x.dtype)
    # A product of one row runs on one thread, those of a batch are spread over all.
    parts = 2 if weight.size >= _LARGE and weight.shape[0] % 2 == 0 else 1
    halves = weight.reshape(parts, -1, weight.shape[1])
    rows = jnp.broadcast_to(x, (parts, x.size))
    y = jnp.einsum("hi,hoi->ho", rows, halves, precision=full_precision(x.dtype))
    return y.reshape(-1)


def linear_wide(x: Float[Array, "*b i"], weight: Float[Array, "o i"]) -> Float[Array, "*b o"]:
    """`x @ weight.T` with both operands widened to float32: router and hyper-connection."""
    dtype = wide(x.dtype)
    return linear(x.astype(dtype), weight)
