"""What a model is given, checked where its values are known, which is outside `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.nn.types import GivenMask, Mask, Tokens
from glm5_jax.processes import on_host


def checked_inputs(tokens: Tokens, mask: GivenMask | None, vocab_size: int) -> tuple[Tokens, Mask]:
    """Tokens [B, T] and their mask, all true where none is given.

    A mask that is not an array of JAX's stays NumPy's: JAX would compile one for every length.

    Raises ValueError for another shape or type, a token outside the vocabulary, and a mask of other
    values than 0 and 1 or with a hole in a row.
    """
    if not isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens: expected integers [B, T], at least one, got {tokens.dtype} {tokens.shape}"
        )
    if not isinstance(tokens, jax.core.Tracer):
        low, high = int(np.min(tokens)), int(np.max(tokens))
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"tokens: expected ids from 0 to {vocab_size - 1}, got {low if low < 0 else high}"
            )
    if mask is None:
        return tokens, np.ones(tokens.shape, bool)
    if not isinstance(mask, jax.Array):
        mask = np.asarray(mask)
    if mask.shape != tokens.shape:
        raise ValueError(f"mask: expected the tokens' shape {tokens.shape}, got {mask.shape}")
    if not isinstance(mask, jax.core.Tracer):
        known = on_host(mask)
        if not np.isin(known, (0, 1)).all():
            raise ValueError("mask: expected 1 for real tokens and 0 for padding, got other values")
        starts = np.diff(known.astype(np.int8), axis=1, prepend=0) == 1
        holes = np.flatnonzero(starts.sum(axis=1) > 1)
        if holes.size:
            raise ValueError(f"mask: the real tokens of row {holes[0]} are not contiguous")
    return tokens, mask.astype(bool)
