"""The definition that every faster form is held against: all selected rows at once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import base

# HIGHEST: a GPU's default float32 product is TF32.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def attend(
    q: Float[Array, "B T A R"],
    kv: Float[Array, "B S R"] | Float[Array, "S R"],
    indices: Int[Array, "B T W"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T A R"], Float[Array, "B T A"]]:
    """The three lines of `sparse_mla_decode`, in at least float32."""
    dtype = base.compute_dtype(q, kv)
    rows, there = base.gather_rows(kv, indices)
    rows = rows.astype(dtype)
    scores = scale * _dot("btar,btwr->btaw", q.astype(dtype), rows)
    scores = jnp.where(there[:, :, None], scores, -jnp.inf)
    # A finite maximum where there is no row, so that exp sees −inf − 0 and not −inf + inf.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    none = total == 0
    total = jnp.where(none, 1, total)
    out = _dot("btaw,btwr->btar", weights, rows) / total[..., None]
    return out, jnp.where(none, -jnp.inf, top + jnp.log(total))
