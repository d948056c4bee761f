"""Experts that lie on several devices: tokens go to all that hold experts, and a sum comes back.

Left to itself, XLA moves the weights of the chosen experts to every device. Here each device runs
the experts, or the parts of their width, that it holds, for every token of the devices it shares
them with, weighs what they say, and the sums are added up over the devices: of activations alone,
one all-reduce a layer. Where the rows of a batch are cut over the very devices that hold different
experts, tokens are gathered first, and each device gets the sum of its own rows back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax.nn.placement import Placement

if TYPE_CHECKING:
    from glm5_jax.nn.ffn import Experts


@dataclass(frozen=True)
class Spread:
    """Where a layer's experts lie. `specs` are those of its arrays, in the order of its tree."""

    placement: Placement
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, experts: Experts, placement: Placement) -> Spread | None:
        """That of experts whose arrays are sharded; None where the rules cut none of them."""
        if placement.parts("experts") * placement.parts("expert_mlp") == 1:
            return None
        return cls(placement, tuple(array.sharding.spec for array in jax.tree.leaves(experts)))

    def run(
        self,
        experts: Experts,
        x: Float[Array, "B T X"],
        chosen: Int[Array, "B T k"],
        weights: Float[Array, "B T k"],
    ) -> Float[Array, "B T X"]:
        """The weighted sum of each token's experts; over devices in float32, cast once."""
        by_expert, by_width = (self.placement.cuts(axis) for axis in ("experts", "expert_mlp"))
        rows = self.placement.spec(x.shape, ("batch", None, None))
        cuts = by_expert + by_width
        shared = tuple(axis for axis in self.placement.cut(len(x), "batch") if axis in cuts)
        held = experts.num_experts // self.placement.parts("experts")

        def own(experts: Experts, x: Array, chosen: Array, weights: Array) -> Array:
            dtype = x.dtype
            if shared:
                x, chosen, weights = jax.lax.all_gather(
                    (x, chosen, weights), shared, axis=0, tiled=True
                )
            first = held * jax.lax.axis_index(by_expert) if by_expert else 0
            here = (chosen >= first) & (chosen < first + held)
            y = experts.own_sum(x, jnp.where(here, chosen - first, held), weights)
            if shared:
                y = jax.lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)
            others = tuple(axis for axis in cuts if axis not in shared)
            return (jax.lax.psum(y, others) if others else y).astype(dtype)

        specs = jax.tree.unflatten(jax.tree.structure(experts), self.specs)
        run = self.placement.over(own, (specs, rows, rows, rows), rows)
        return run(experts, x, chosen, weights)
