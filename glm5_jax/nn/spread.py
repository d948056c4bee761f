"""Experts that lie on several devices: each computes what its own experts say, and one sum follows.

Left to itself, XLA moves the weights of the chosen experts to every device. Here tokens are on all
devices that share them, each runs the experts, or the parts of their width, that it holds, zeros
for all others, and the outputs are summed over the devices: one all-reduce a layer, of activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax.nn.types import wide
from glm5_jax.sharding import Axes, ShardingRules, parts_of

if TYPE_CHECKING:
    from glm5_jax.nn.ffn import Experts


@dataclass(frozen=True)
class Spread:
    """Where a layer's experts lie. `specs` are those of its arrays, in the order of its tree."""

    mesh: Mesh
    rules: ShardingRules
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, experts: Experts, mesh: Mesh, rules: ShardingRules) -> Spread | None:
        """That of experts whose arrays are sharded; None where the rules cut none of them."""
        specs = tuple(array.sharding.spec for array in jax.tree.leaves(experts))
        spread = cls(mesh, rules, specs)
        return spread if spread._cuts("experts") + spread._cuts("expert_mlp") else None

    def outputs(
        self, experts: Experts, x: Float[Array, "B T X"], chosen: Int[Array, "B T k"]
    ) -> Float[Array, "B T k X"]:
        """`experts.outputs` of all devices together; summed in float32, cast once."""
        by_expert, rows = self._cuts("experts"), self._cuts("batch")
        held = experts.num_experts // parts_of(by_expert, self.mesh.shape)
        batch = PartitionSpec(rows if x.shape[0] % parts_of(rows, self.mesh.shape) == 0 else None)

        def own(experts: Experts, x: Array, chosen: Array) -> Array:
            first = held * jax.lax.axis_index(by_expert) if by_expert else 0
            here = (chosen >= first) & (chosen < first + held)
            outputs = experts.own_outputs(x, jnp.where(here, chosen - first, held))
            summed = jax.lax.psum(
                outputs.astype(wide(x.dtype)), by_expert + self._cuts("expert_mlp")
            )
            return summed.astype(x.dtype)

        specs = jax.tree.unflatten(jax.tree.structure(experts), self.specs)
        run = jax.shard_map(
            own,
            mesh=self.mesh,
            in_specs=(specs, batch, batch),
            out_specs=batch,
            check_vma=False,
        )
        return run(experts, x, chosen)

    def _cuts(self, logical: str) -> Axes:
        return self.rules.cuts(logical, self.mesh.shape)
