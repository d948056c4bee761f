"""Array types of the model, in the dimension letters used throughout.

B batch, T query tokens, S cached tokens, X hidden, H and D KDA heads and their dim, K conv taps,
A attention heads, N nope (query/key) dim, V value dim, R latent (kv_lora) rank, Rq query rank,
HI and DI index heads and their dim, P tokens a pool, W selected tokens, M streams, E experts,
I expert width.
"""

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

Activations: TypeAlias = Float[Array, "B T X"]
Streams: TypeAlias = Float[Array, "B T M X"]
Mask: TypeAlias = Bool[Array | np.ndarray, "B T"]
Tokens: TypeAlias = Int[Array | np.ndarray, "B T"]
GivenMask: TypeAlias = Shaped[Array | np.ndarray, "B T"]
"""What users pass: of booleans or of 0 and 1."""
Selection: TypeAlias = Int[Array, "B T W"]
Logits: TypeAlias = Float[Array, "B T Vo"]

Implementation: TypeAlias = str | tuple[str, ...] | None
"""Which implementation of an operation runs, by name; of several the first that can. None chooses.

For KDA and for DSA: see `pallas_kernels.kda.chunk_kda` and `pallas_kernels.sparse_mla`.
"""


def wide(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of the float32 islands: float32, and float64 for a float64 model."""
    return jnp.promote_types(jnp.float32, dtype)
