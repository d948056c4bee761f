"""Work whose memory grows with the number of queries, done a block of queries after the other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def map_queries(f: Callable[..., jax.Array], block: int, *arrays: jax.Array) -> jax.Array:
    """`f(*arrays)` for arrays `[B, T, …]` and a result `[B, T, …]`, `block` of the T at a time.

    The last block is filled up with zeros, whose results are dropped.
    """
    B, T = arrays[0].shape[:2]
    if block >= T:
        return f(*arrays)

    def blocks_first(x):
        x = jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)

    out = jax.lax.map(lambda inputs: f(*inputs), tuple(map(blocks_first, arrays)))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, *out.shape[3:])[:, :T]
