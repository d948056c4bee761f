"""The tokens of a row cut over devices: what a convolution needs of those before its own.

Inside of `jax.shard_map`, along mesh axes that cut the tokens. `before` is what comes before the
first token of a row, and the same on all of these devices.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax.nn.padding import shift_tokens
from glm5_jax.sharding import Axes


def columns_before(
    x: Float[Array, "B T *C"], before: Float[Array, "B n *C"], axes: Axes
) -> Float[Array, "B n *C"]:
    """The n columns before a device's own `x`: the last ones of its neighbour.

    Where a device has fewer than n, they come from more than one, by way of those in between.
    """
    (_, T), n, parts = x.shape[:2], before.shape[1], lax.axis_size(axes)
    found = before
    for _ in range(-(-n // T)):
        last = jnp.concatenate([found, x], axis=1)[:, T:]
        last = lax.ppermute(last, axes, [(i, i + 1) for i in range(parts - 1)])
        found = jnp.where(lax.axis_index(axes) == 0, before, last)
    return found


def last_columns(
    x: Float[Array, "B T *C"],
    before: Float[Array, "B n *C"],
    count: Int[Array, " B"],
    axes: Axes,
) -> Float[Array, "B n *C"]:
    """The last n columns up to each row's token `count`, on all devices: they are summed up.

    Each of them comes from the one device that has it, so the sum rounds nothing.
    """
    T, n, here = x.shape[1], before.shape[1], lax.axis_index(axes)
    own = jnp.concatenate([jnp.where(here == 0, before, 0), x], axis=1)
    return lax.psum(shift_tokens(own, here * T - count)[:, :n], axes)
