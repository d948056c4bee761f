"""The public operation: its checks, and the choice of an implementation."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.sparse_mla import mosaic_gpu, reference, xla

# In order of preference: None takes the first that can run.
#
# `run(q, kv, indices, *, scale)` returns out, and the log-sum-exp in float32 or wider. The inputs
# are checked; kv is [B, S, R] or [slots, R]. `supports(q, kv, indices)` sees the same arrays.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "mosaic_gpu": Implementation(mosaic_gpu.attend, mosaic_gpu.supports),
    "xla": Implementation(xla.attend),
    "reference": Implementation(reference.attend),
}


def sparse_mla_decode(
    q: Float[Array, "B T A R"],
    kv: Float[Array, "B S R"] | Float[Array, "S R"],
    indices: Int[Array, "B T W"],
    *,
    scale: float,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T A R"] | tuple[Float[Array, "B T A R"], Float[Array, "B T A"]]:
    """Attention of absorbed queries over the rows of the latent cache that each token selected.

    A row is key and value of all heads at once. Per token and head:

        s_w = scale * q·kv[indices[w]]
        out = Σ_w softmax(s)_w kv[indices[w]]
        lse = log Σ_w exp(s_w)

    The softmax is float32, or float64 as soon as q or kv is. Rows that no token selected are not
    read, whatever they hold.

    Args:
      q: queries through W_kᵀ, so of the latent's width R.
      kv: the latents, of each sequence by itself, or of all of them in one pool of pages `[S, R]`.
      indices: the rows of each token, without repetition; of its own sequence, or of the pool. A
        negative one is none, and so is one past the last row; such holes may stand anywhere. A
        token without any row gets exact zeros and the log-sum-exp −inf.
      scale: the factor on the scores; that of the heads before absorption, not `R ** -0.5`.
      return_lse: whether to return the log-sum-exp too, by which parts of a cache are merged.
      implementation: None takes the first of `IMPLEMENTATIONS` that can run; a name forces that
        one; a sequence of names takes the first of them that can run.

    Returns:
      out in q's dtype and, where asked for, the natural log-sum-exp in float32 (or float64).

    Raises:
      TypeError: a dtype that does not fit.
      ValueError: shapes that do not fit, or an unknown implementation.
      NotImplementedError: none of the named implementations can run; the message says why.
    """
    q, kv, indices = (jnp.asarray(x) for x in (q, kv, indices))
    _check_inputs(q, kv, indices)
    run = choose("sparse MLA", IMPLEMENTATIONS, implementation, q, kv, indices)
    out, lse = run(q, kv, indices.astype(jnp.int32), scale=scale)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _check_inputs(q: Array, kv: Array, indices: Array) -> None:
    for name, x in (("q", q), ("kv", kv)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"sparse MLA expects floating-point q and kv; {name} is {x.dtype}")
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        raise TypeError(f"sparse MLA expects signed integer indices, got {indices.dtype}")
    if q.ndim != 4:
        raise ValueError(f"sparse MLA expects q [B, T, A, R], got {q.shape}")
    B, T, _, R = q.shape
    if kv.ndim not in (2, 3) or kv.shape[-1] != R or kv.shape[:-2] not in ((), (B,)):
        raise ValueError(
            f"sparse MLA expects kv [{B}, S, {R}] or [S, {R}] for q {q.shape}, got {kv.shape}"
        )
    if indices.ndim != 3 or indices.shape[:2] != (B, T):
        raise ValueError(
            f"sparse MLA expects indices [{B}, {T}, W] for q {q.shape}, got {indices.shape}"
        )
    if 0 in kv.shape or 0 in indices.shape:
        raise ValueError(
            f"sparse MLA expects a row of kv and an index at least, got kv {kv.shape} and "
            f"indices {indices.shape}"
        )
