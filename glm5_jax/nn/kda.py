"""Kimi Delta Attention: a gated delta rule with one decay per head and channel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm5_jax.cache import KDAState, Replay
from glm5_jax.config import ModelConfig
from glm5_jax.nn.context import columns_before, last_columns
from glm5_jax.nn.linear import linear
from glm5_jax.nn.norms import gated_rms_norm
from glm5_jax.nn.padding import Stretch, end_of_rows, mask_padding, shift_tokens
from glm5_jax.nn.params import Params
from glm5_jax.nn.placement import Placement, place
from glm5_jax.nn.record import Record, note, wants
from glm5_jax.nn.types import Activations, Implementation, Mask, wide
from glm5_jax.sharding import Axes
from pallas_kernels.kda import chunk_kda, kda_gate, recurrent_kda
from pallas_kernels.kda.context import context_kda


def split_conv(weight: Float[Array, "C3 K"]) -> list[Float[Array, "C K"]]:
    """The taps of q, k and v: the rows of the stored convolution, in this order.

    All three have one shape, so another order would pass every check but the numbers.
    """
    # Not `split`: over several devices that would cut the rows of all three as one axis.
    return list(weight.reshape(3, -1, weight.shape[1]))


def causal_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C K"],
    before: Float[Array, "B K-1 C"] | None = None,
) -> Float[Array, "B T C"]:
    """SiLU of the causal depthwise convolution, in float32, cast back to x's dtype.

    `weight[:, K-1]` multiplies the current token. `before` are the columns before the first token,
    zeros where there are none.
    """
    (B, T, C), K = x.shape, weight.shape[1]
    if before is None:
        before = jnp.zeros((B, K - 1, C), x.dtype)
    h = jnp.concatenate([before, x], axis=1).astype(wide(x.dtype))
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
        self.placement: Placement | None = None

    def __call__(
        self,
        x: Activations,
        mask: Mask,
        record: Record | None = None,
        implementation: Implementation = None,
    ) -> Activations:
        """Mix `x` over time. Tokens where `mask` is False enter neither conv nor state.

        Sites `q k v` (after the convolution), `g` (log-decay), `beta`, `state` (after the last
        real token), `o` (of the recurrence, which `implementation` runs).
        """
        x = mask_padding(x, mask)
        columns = self._columns(x)
        B, _, C = columns[0].shape
        q, k, v = self._convolved(columns, jnp.zeros((B, self.conv.shape[1] - 1, 3, C), x.dtype))
        g, beta = self._gates(x)
        traced = wants(record, "state")
        lengths = end_of_rows(mask) if traced else None
        o, state = self._chunks((q, k, v, g, beta), None, lengths, traced, implementation)
        for name, value in dict(q=q, k=k, v=v, g=g, beta=beta, state=state, o=o).items():
            if value is not None:
                note(record, name, value)
        return self._output(x, o)

    def advance(
        self,
        x: Activations,
        stretch: Stretch,
        state: KDAState,
        implementation: Implementation = None,
    ) -> tuple[Activations, KDAState]:
        """Mix the tokens of `stretch` into what `state` remembers, and the state after them."""
        T, K = x.shape[1], self.conv.shape[1]
        depth = state.conv.shape[1] - (K - 1)
        x = mask_padding(x, stretch.mask(T))
        columns = self._columns(x)
        q, k, v = self._convolved(columns, state.conv[:, depth:])
        g, beta = self._gates(x)
        if depth == 0:
            if T == 1 and implementation is None:
                implementation = "xla"  # as in `recurrent_kda`: a kernel computes whole chunks
            inputs = (q, k, v, g, beta), state.recurrent, stretch.count
            o, recurrent = self._chunks(*inputs, True, implementation)
            replay = state.replay
        else:
            replayed = self._replayed_along if self._cut(x) else self._replayed
            new = Replay(k, v, g, beta)
            o, recurrent, replay = replayed(q, new, stretch, state, implementation)
        conv = self._last(jnp.stack(columns, axis=2), state.conv, stretch.count, None, "kda_heads")
        return self._output(x, o), KDAState(recurrent, conv, replay)

    def _replayed(
        self,
        q: Float[Array, "B T H D"],
        new: Replay,
        stretch: Stretch,
        state: KDAState,
        implementation: Implementation,
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B H D D"], Replay]:
        """The recurrence where the last n tokens stay outside of the state.

        Replayed and new tokens together are n + T rows: the first T of them go into the state for
        good, the last n only for their outputs.
        """
        (B, T, H, D), n = q.shape, state.replay.k.shape[1]

        def joined(old, new):
            # A row that brings less than T tokens has its zeros in front, where they do nothing.
            return shift_tokens(jnp.concatenate([old, new], axis=1), T - stretch.count)

        q = joined(jnp.zeros((B, n, H, D), q.dtype), q)
        rows = jax.tree.map(joined, state.replay, new)
        first = jax.tree.map(lambda h: h[:, :T], rows)
        last = jax.tree.map(lambda h: h[:, T:], rows)

        o_first, recurrent = self._rows(q[:, :T], first, state.recurrent, implementation)
        o_last, _ = self._rows(q[:, T:], last, recurrent, implementation)
        o = jnp.concatenate([o_first, o_last], axis=1)[:, n:]
        return shift_tokens(o, stretch.count - T), recurrent, last

    def _replayed_along(
        self,
        q: Float[Array, "B T H D"],
        new: Replay,
        stretch: Stretch,
        state: KDAState,
        implementation: Implementation,
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B H D D"], Replay]:
        """The same where tokens are cut over devices: none is moved, but for the last n.

        What goes in for good are the first `count` of replayed and new tokens. The last n come from
        wherever they are, and their outputs go there.
        """
        old, count = state.replay, stretch.count
        n = old.k.shape[1]
        nothing = jnp.zeros((len(q), n, *q.shape[2:]), q.dtype)
        goes_in = jnp.arange(n) < count[:, None]
        first = jax.tree.map(
            lambda h: jnp.where(goes_in.reshape(*goes_in.shape, *[1] * (h.ndim - 2)), h, 0), old
        )
        _, recurrent = self._rows(nothing, first, state.recurrent, implementation)
        inputs = (q, new.k, new.v, new.g, new.beta), recurrent, jnp.maximum(count - n, 0)
        o, recurrent = self._chunks(*inputs, True, implementation)

        q_last, last = jax.tree.map(
            lambda old, new: self._last(new, old, count, "kda_heads", *[None] * (new.ndim - 3)),
            (nothing, old),
            (q, new),
        )
        o_last, _ = self._rows(q_last, last, recurrent, implementation)
        at = jnp.arange(q.shape[1]) - count[:, None] + n
        o_last = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(o_last, at)
        is_last = (at >= 0) & (at < n)
        return jnp.where(is_last[..., None, None], o_last, o), recurrent, last

    def _rows(
        self,
        q: Float[Array, "B n H D"],
        rows: Replay,
        state: Float[Array, "B H D D"],
        implementation: Implementation,
    ) -> tuple[Array, Array]:
        """`recurrent_kda`, of a few rows."""

        def run(q, k, v, g, beta, initial_state, lengths):
            return recurrent_kda(q, k, v, g, beta, initial_state, implementation=implementation)

        return self._recur(run, (q, rows.k, rows.v, rows.g, rows.beta), state, None)

    def _chunks(
        self,
        tokens: tuple[Float[Array, "B T H ..."], ...],
        state: Float[Array, "B H D D"] | None,
        lengths: Int[Array, " B"] | None,
        final: bool,
        implementation: Implementation,
    ) -> tuple[Float[Array, "B T H D"], Any]:
        """`chunk_kda`, with its state where `final`; on a mesh also cut by tokens."""
        axes = self._cut(tokens[0])
        operation = functools.partial(context_kda, axes=axes) if axes else chunk_kda
        run = functools.partial(operation, output_final_state=final, implementation=implementation)
        return self._recur(run, tokens, state, lengths, "sequence")

    def _recur(
        self,
        run: Callable[..., tuple[Array, Any]],
        tokens: tuple[Float[Array, "B T H ..."], ...],
        state: Float[Array, "B H D D"] | None,
        lengths: Int[Array, " B"] | None,
        along: str | None = None,
    ) -> tuple[Float[Array, "B T H D"], Any]:
        """`run(*tokens, initial_state=…, lengths=…)`: on a mesh each device its rows and heads.

        A head needs no other, and XLA could not cut a kernel. `along` cuts the tokens.
        """

        def own(tokens, state, lengths):
            return run(*tokens, initial_state=state, lengths=lengths)

        if self.placement is None:
            return own(tokens, state, lengths)
        spec, (B, T) = self.placement.spec, tokens[0].shape[:2]
        token = spec((B, T, self.heads), ("batch", along, "kda_heads"))
        head, row = spec((B, self.heads), ("batch", "kda_heads")), spec((B,), ("batch",))
        return self.placement.over(own, (token, head, row), (token, head))(tokens, state, lengths)

    def _columns(self, x: Activations) -> list[Float[Array, "B T HD"]]:
        """Those of q, k and v, before the convolution."""
        return [linear(x, weight[...]) for weight in (self.q_proj, self.k_proj, self.v_proj)]

    def _convolved(
        self, columns: list[Float[Array, "B T HD"]], before: Float[Array, "B K-1 3 HD"]
    ) -> list[Float[Array, "B T H D"]]:
        """q, k and v by head, of their columns and of those before them."""
        # Whole, as they lie: XLA would cut the rows of all three as one axis, and then move them.
        taps = [place(self.placement, taps, None, None) for taps in split_conv(self.conv[...])]
        convolve = causal_conv
        if self.placement is not None and (axes := self._cut(columns[0])):
            spec = self.placement.spec

            def own(x, taps, before):
                return causal_conv(x, taps, columns_before(x, before, axes))

            token = spec(columns[0].shape, ("batch", "sequence", "kda_heads"))
            ends = spec(before[:, :, 0].shape, ("batch", None, "kda_heads"))
            weight = spec(taps[0].shape, ("kda_heads", None))
            convolve = self.placement.over(own, (token, weight, ends), token)
        inputs = zip(columns, taps, jnp.moveaxis(before, 2, 0), strict=True)
        return [self._by_head(convolve(*of)) for of in inputs]

    def _last(
        self,
        x: Float[Array, "B T *C"],
        before: Float[Array, "B n *C"],
        count: Int[Array, " B"],
        *axes: str | None,
    ) -> Float[Array, "B n *C"]:
        """The last n of `before` and of each row's first `count` of `x`. `axes` are those of C."""
        if self.placement is not None and (cut := self._cut(x)):
            spec = self.placement.spec
            token = spec(x.shape, ("batch", "sequence", *axes))
            ends = spec(before.shape, ("batch", None, *axes))
            own = functools.partial(last_columns, axes=cut)
            specs = token, ends, spec(count.shape, ("batch",))
            return self.placement.over(own, specs, ends)(x, before, count)
        T = x.shape[1]
        return shift_tokens(jnp.concatenate([before, x], axis=1), T - count)[:, T:]

    def _cut(self, x: Float[Array, "B T ..."]) -> Axes:
        """The axes of the mesh that cut the tokens of `x`, none on one device."""
        return () if self.placement is None else self.placement.cut(x.shape[1], "sequence")

    def _gates(self, x: Activations) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
        """Log-decay and write strength."""
        f = self._by_head(linear(linear(x, self.f_a_proj[...]), self.f_b_proj[...]))
        g = kda_gate(f, self.A_log[...], self.dt_bias[...], self.lower_bound)
        return g, input_gate(linear(x, self.b_proj[...]))

    def _output(self, x: Activations, o: Float[Array, "B T H D"]) -> Activations:
        gate = self._by_head(linear(linear(x, self.g_a_proj[...]), self.g_b_proj[...]))
        y = gated_rms_norm(o, gate, self.o_norm[...], self.eps)
        return linear(y.reshape(*x.shape[:2], -1), self.o_proj[...])

    def _by_head(self, h: Float[Array, "B T HD"]) -> Float[Array, "B T H D"]:
        return h.reshape(*h.shape[:2], self.heads, -1)
