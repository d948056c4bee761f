"""Parameters of the modules, declared by the spec table and nowhere else."""

from collections.abc import Mapping

import jax
from flax import nnx

from glm5_jax.specs import Leaf

_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


class Params:
    """The leaves below one point of the parameter tree, as abstract `nnx.Param`s.

    `params("attn.q_proj")` declares the leaf of that path relative to this point;
    `params.at("attn")` is the same table one step down. Nothing is allocated: a module is built
    from shapes and filled from a checkpoint.
    """

    def __init__(self, leaves: Mapping[str, Leaf], prefix: str = ""):
        self._leaves = leaves
        self._prefix = prefix

    def __call__(self, name: str) -> nnx.Param:
        """The parameter `name`, not filled yet; KeyError for a leaf that the table lacks."""
        leaf = self._leaves[self._prefix + name]
        return nnx.Param(jax.ShapeDtypeStruct(leaf.shape, _DTYPES[leaf.dtype]))

    def at(self, name: str) -> "Params":
        """The table below `name`."""
        return Params(self._leaves, f"{self._prefix}{name}.")
