"""MLA in the latent's own space: no keys and values are made of what is cached.

`q·(W_k c) = (W_kᵀ q)·c`, and `Σ w (W_v c) = W_v Σ w c`: each head asks with W_kᵀ q, and W_v comes
after the sum. Both halves of head h stand in rows h of `kv_b` `[A, N+V, R]`, keys before values.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax.nn.linear import full_precision
from glm5_jax.nn.types import wide


def split_kv_b(
    kv_b: Float[Array, "_ R"], heads: int, nope: int
) -> tuple[Float[Array, "A N R"], Float[Array, "A V R"]]:
    """W_k and W_v of every head: `kv_b` holds, per head, N key rows and then V value rows."""
    by_head = kv_b.reshape(heads, -1, kv_b.shape[1])
    return by_head[:, :nope], by_head[:, nope:]


def absorb_q(q_b: Float[Array, "_ Rq"], w_k: Float[Array, "A N R"]) -> Float[Array, "A R Rq"]:
    """`W_kᵀ q_b` per head: what takes the query latent straight to the latent's space.

    Scores keep their scale `N^-0.5`, though R numbers are summed.
    """
    A, N, _ = w_k.shape
    q_b = q_b.reshape(A, N, -1)
    return jnp.einsum("anr,anq->arq", w_k, q_b, precision=full_precision(w_k.dtype))


def absorb_o(o_proj: Float[Array, "X _"], w_v: Float[Array, "A V R"]) -> Float[Array, "X A R"]:
    """`o_proj W_v` per head: what takes the heads' sums of latents straight to the output."""
    A, V, _ = w_v.shape
    o_proj = o_proj.reshape(-1, A, V)
    return jnp.einsum("xav,avr->xar", o_proj, w_v, precision=full_precision(w_v.dtype))


def fold_index_scale(weights_proj: Float[Array, "HI X"], index_dim: int) -> Float[Array, "HI X"]:
    """The indexer's head projection with both of its scales, `DI^-0.5` and `HI^-0.5`, in it.

    A positive factor passes through relu, so `Σ_h (fold·x)[h] relu(q[h]·k)` are the index scores.
    """
    dtype = wide(weights_proj.dtype)
    return weights_proj.astype(dtype) * (index_dim * weights_proj.shape[0]) ** -0.5


def widen_ape(ape: Float[Array, "P DI"], pools: int) -> Float[Array, "S DI"]:
    """The bias of every slot of `pools` pools, float32: what is added to the gates of S tokens."""
    return jnp.tile(ape.astype(wide(ape.dtype)), (pools, 1))
