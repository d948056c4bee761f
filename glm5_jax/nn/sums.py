"""Sums over a short axis that is not the last."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sum_unrolled(terms: Float[Array, "*b n X"], axis: int = -2) -> Float[Array, "*b X"]:
    """The sum over few terms, one after the other in their order.

    XLA's CPU reduction over a middle axis is slow, by a factor of a hundred for a batch of one.
    """
    return functools.reduce(
        jnp.add,
        (jax.lax.index_in_dim(terms, i, axis, keepdims=False) for i in range(terms.shape[axis])),
    )
