"""KDA token by token: the definition that every faster form is held against.

Source: Kimi Linear (arXiv:2510.26692), the recurrent form of KDA.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.kda import base

# HIGHEST: a GPU's default float32 product is TF32.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def recurrence(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    *,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """One token after another, in the dtype of `state`."""
    (q, k, v, g, beta), starts = base.without_padding((q, k, v, g, beta), starts, lengths)
    q, k, v, g, beta = (x.astype(state.dtype) for x in (q, k, v, g, beta))
    q, k = base.prepare(q, k, scale=scale, use_qk_l2norm=use_qk_l2norm)
    decay = jnp.exp(g)
    if starts is not None:
        decay = jnp.where(starts[..., None, None], 0, decay)

    def token(S, inputs):
        q, k, v, decay, beta = inputs
        S = decay[..., None] * S  # decay first: the key reads the decayed state
        u = beta[..., None] * (v - _dot("bhkv,bhk->bhv", S, k))
        S = S + k[..., None] * u[..., None, :]
        return S, _dot("bhkv,bhk->bhv", S, q)

    tokens_first = (jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta))
    state, o = jax.lax.scan(token, state, tuple(tokens_first))
    return jnp.moveaxis(o, 0, 1), state
