"""What the implementations share: their dtype, the gather in plain JAX, the GPU kernel's sizes.

Dimensions: B batch, T query tokens, A heads, R latent width, S rows of the cache, W selected rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Of the GPU kernel.
HEADS = 64  # of a block, the rows of one wgmma; where there are fewer, zeros
TILE = 64  # rows of the cache at a time
WIDTH = 512  # of a row


def compute_dtype(*arrays: Array) -> jnp.dtype:
    """float32, or float64 as soon as one array is: narrower inputs are widened, never followed."""
    return jnp.result_type(jnp.float32, *arrays)


def gather_rows(
    kv: Float[Array, "B S R"] | Float[Array, "S R"], indices: Int[Array, "B T W"]
) -> tuple[Float[Array, "B T W R"], Bool[Array, "B T W"]]:
    """The rows, zeros for an index that is none, and which indices are some."""
    S = kv.shape[-2]
    # A negative index would count from the end; one past the end reads as the fill value.
    row = jnp.where(indices < 0, S, indices)

    def gather(kv, row):
        return kv.at[row].get(mode="fill", fill_value=0)

    # By `vmap`: a batch that is cut over devices stays cut, which an index of the row would undo.
    return (gather if kv.ndim == 2 else jax.vmap(gather))(kv, row), row < S
