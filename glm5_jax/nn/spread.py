"""Experts that lie on several devices: each computes what its own experts say, and one sum follows.

Left to itself, XLA moves the weights of the chosen experts to every device. Here tokens are on all
devices that share them, each runs the experts, or the parts of their width, that it holds, zeros
for all others, and the outputs are summed over the devices: one all-reduce a layer, of activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax.nn.types import wide
from glm5_jax.sharding import ShardingRules

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
        return spread if spread._axes("experts") + spread._axes("expert_mlp") else None

    def outputs(
        self, experts: Experts, x: Float[Array, "B T X"], chosen: Int[Array, "B T k"]
    ) -> Float[Array, "B T k X"]:
        """`experts.outputs` of all devices together; summed in float32, cast once."""
        by_expert = self._axes("experts")
        held = experts.num_experts // self._size(by_expert)
        rows = self._axes("batch")
        batch = PartitionSpec(rows if x.shape[0] % self._size(rows) == 0 else None)

        def own(experts: Experts, x: Array, chosen: Array) -> Array:
            first = held * jax.lax.axis_index(by_expert) if by_expert else 0
            here = (chosen >= first) & (chosen < first + held)
            outputs = experts.own_outputs(x, jnp.where(here, chosen - first, held))
            summed = jax.lax.psum(
                outputs.astype(wide(x.dtype)), by_expert + self._axes("expert_mlp")
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

    def _axes(self, logical: str) -> tuple[str, ...]:
        return tuple(a for a in self.rules.axes(logical) if self.mesh.shape.get(a, 1) > 1)

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)
