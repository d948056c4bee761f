"""Parameters of the modules, declared by the spec table and nowhere else."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from glm5_jax.checkpoint.codecs import KEYS
from glm5_jax.nn.quantized import QuantizedWeight, Weight
from glm5_jax.specs import Leaf

_DTYPES = {"BF16": "bfloat16", "F32": "float32"}


class Params:
    """The leaves below one point of the parameter tree, as abstract `nnx.Param`s.

    `params("attn.q_proj")` declares the leaf of that path relative to this point;
    `params.at("attn")` is the same table one step down. Nothing is allocated: a module is built
    from shapes and filled from a checkpoint.

    arrays: those that will fill it, by path. A leaf that is quantised there, as `<path>.codes` and
    scales, is declared as a `QuantizedWeight` of those arrays' shapes; `block` is the config's
    `weight_block_size`, and `dtype` what it decodes to, the model's activation dtype.
    """

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        arrays: Mapping[str, jax.Array | np.ndarray] | None = None,
        block: tuple[int, int] | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        prefix: str = "",
    ):
        self._leaves = leaves
        self._arrays = arrays or {}
        self._block = block
        self._dtype = dtype
        self._prefix = prefix

    def __call__(self, name: str) -> Weight:
        """The parameter `name`, not filled yet.

        KeyError for a leaf that the table lacks, ValueError for codes of another shape than its.
        """
        path = self._prefix + name
        leaf = self._leaves[path]
        stored = {key: self._arrays.get(f"{path}.{key}") for key in KEYS}
        if stored["codes"] is None:
            return nnx.Param(jax.ShapeDtypeStruct(leaf.shape, _DTYPES[leaf.dtype]))
        shapes = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for key, array in stored.items()
            if array is not None
        }
        weight = QuantizedWeight(shapes, self._block, self._dtype)
        if weight.shape != leaf.shape:
            raise ValueError(
                f"{path}.codes: expected codes of a weight {leaf.shape}, got {weight.shape}"
            )
        return weight

    def at(self, name: str) -> "Params":
        """The table below `name`."""
        prefix = f"{self._prefix}{name}."
        return Params(self._leaves, self._arrays, self._block, self._dtype, prefix)


def fill(module: nnx.Module, arrays: Mapping[str, jax.Array | np.ndarray], at: str = "") -> None:
    """Give a module's variables the arrays of their paths below `at`; the rest stays abstract.

    NumPy arrays on a boundary of 64 bytes are used where they are: they must not change.
    """
    for path, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            array = arrays.get(at + ".".join(map(str, path)))
            if array is not None:
                variable.set_value(jax.device_put(array))
