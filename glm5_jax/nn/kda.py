"""Kimi Delta Attention: a gated delta rule with one decay per head and channel."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm5_jax.config import ModelConfig
from glm5_jax.nn.linear import linear
from glm5_jax.nn.norms import gated_rms_norm
from glm5_jax.nn.padding import mask_padding
from glm5_jax.nn.params import Params
from glm5_jax.nn.types import Activations, Mask, Record, wide
from pallas_kernels.kda import chunk_kda, kda_gate


def split_conv(weight: Float[Array, "C3 K"]) -> list[Float[Array, "C K"]]:
    """The taps of q, k and v: the rows of the stored convolution, in this order.

    All three have one shape, so another order would pass every check but the numbers.
    """
    return jnp.split(weight, 3)


def causal_conv(x: Float[Array, "B T C"], weight: Float[Array, "C K"]) -> Float[Array, "B T C"]:
    """SiLU of the causal depthwise convolution, in float32, cast back to x's dtype.

    `weight[:, K-1]` multiplies the current token. Before the first token there are zeros.
    """
    T, K = x.shape[1], weight.shape[1]
    h = x.astype(wide(x.dtype))
    h = jnp.pad(h, ((0, 0), (K - 1, 0), (0, 0)))
    weight = weight.astype(h.dtype)
    out = sum(weight[:, tap] * h[:, tap : tap + T] for tap in range(K))
    return jax.nn.silu(out).astype(x.dtype)


def input_gate(logits: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """The write strength beta of each head: a sigmoid, float32 from the projection's output on."""
    return jax.nn.sigmoid(logits.astype(wide(logits.dtype)))


class KDA(nnx.Module):
    """The KDA mixer: projections, short convolution, gates, the recurrence, gated output norm."""

    def __init__(self, config: ModelConfig, params: Params):
        self.heads = config.linear_num_heads
        self.lower_bound = config.linear_lower_bound
        self.eps = config.rms_norm_eps
        self.q_proj = params("q_proj")
        self.k_proj = params("k_proj")
        self.v_proj = params("v_proj")
        self.conv = params("conv")
        self.f_a_proj = params("f_a_proj")
        self.f_b_proj = params("f_b_proj")
        self.A_log = params("A_log")
        self.dt_bias = params("dt_bias")
        self.b_proj = params("b_proj")
        self.g_a_proj = params("g_a_proj")
        self.g_b_proj = params("g_b_proj")
        self.o_norm = params("o_norm")
        self.o_proj = params("o_proj")

    def __call__(self, x: Activations, mask: Mask, record: Record | None = None) -> Activations:
        """Mix `x` over time. Tokens where `mask` is False enter neither conv nor state.

        Sites `q k v` (after the convolution), `g` (log-decay), `beta`, `state` (after the last
        token), `o` (of the recurrence).
        """
        x = mask_padding(x, mask)

        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            self._by_head(causal_conv(linear(x, projection[...]), conv))
            for projection, conv in zip(projections, split_conv(self.conv[...]), strict=True)
        )

        f = self._by_head(linear(linear(x, self.f_a_proj[...]), self.f_b_proj[...]))
        g = kda_gate(f, self.A_log[...], self.dt_bias[...], self.lower_bound)
        beta = input_gate(linear(x, self.b_proj[...]))
        o, state = chunk_kda(q, k, v, g, beta, output_final_state=record is not None)

        gate = self._by_head(linear(linear(x, self.g_a_proj[...]), self.g_b_proj[...]))
        y = gated_rms_norm(o, gate, self.o_norm[...], self.eps)
        if record is not None and state is not None:
            for name, value in dict(q=q, k=k, v=v, g=g, beta=beta, state=state, o=o).items():
                record(name, value)
        return linear(y.reshape(*x.shape[:2], -1), self.o_proj[...])

    def _by_head(self, h: Float[Array, "B T HD"]) -> Float[Array, "B T H D"]:
        return h.reshape(*h.shape[:2], self.heads, -1)
