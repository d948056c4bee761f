"""Bytes on each device: weights and state to the byte, calls beside what XLA allocates."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from glm5_jax.cache import empty_cache
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import QuantizationConfig, load_config
from glm5_jax.mesh_budget import device_budget, planned_arrays
from glm5_jax.model import abstract_model
from glm5_jax.nn.placement import Placement
from glm5_jax.sharding import array_pieces, find_rules, named_sharding
from glm5_jax.specs import leaves

RELEASE = load_config(packaged_config("glm5_3_flash"))
MESHES = {
    "tp": {"tensor": 8},
    "ep": {"expert": 8},
    "tp_ep": {"tensor": 8, "expert": 2},
    "fsdp": {"data": 8},
}
TOTALS = json.loads((Path(__file__).parents[1] / "golden" / "tensors.json").read_text())["totals"]


def abstract(mesh):
    return AbstractMesh(tuple(mesh.values()), tuple(mesh))


@pytest.mark.parametrize("preset", MESHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_weights_of_the_release_are_the_parts_that_jax_would_make(preset, dtype):
    config, rules, mesh = RELEASE, find_rules(preset), MESHES[preset]
    if dtype == "fp8":
        config = dataclasses.replace(config, quantization=QuantizationConfig("fp8", (128, 128)))
    on = Placement(abstract(mesh), rules)
    tree, found = leaves(config, mtp=False), planned_arrays(config, dtype, mtp=False)
    arrays = {
        name: jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=named_sharding(array_pieces(rules, tree[path], array.shape, mesh), on.mesh),
        )
        for path in tree
        for name, array in found[path].items()
    }
    model = abstract_model(config, arrays, on)
    size = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(model)
    )
    assert device_budget(config, mesh, preset, dtype).weights == size


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("stored", "bf16"), ("bfloat16", "bf16"), *((d, d) for d in TOTALS if d[:2] in ("fp", "nv"))],
)
def test_on_one_device_the_weights_are_those_of_the_release(dtype, layout):
    text, mtp = (TOTALS[layout][part][1] for part in ("text", "mtp"))
    assert device_budget(RELEASE, {}, dtype=dtype).weights == text
    # What a release repeats of embedding and head in its MTP layer is no weight of the model.
    assert device_budget(RELEASE, {}, dtype=dtype, mtp=True).weights == text + mtp


class Recording(Placement):
    """Counts what would lie on one device."""

    def place(self, x, *axes):
        part = NamedSharding(self.mesh, self.spec(x.shape, axes)).shard_shape(x.shape)
        sizes.append(math.prod(part) * x.dtype.itemsize)
        return x


sizes = []


@pytest.mark.parametrize("preset", MESHES)
@pytest.mark.parametrize(
    ("batch", "context", "rewind", "mtp"), [(16, 131_072, 0, False), (3, 1030, 5, True)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_state_is_what_a_cache_of_the_model_holds(preset, batch, context, rewind, mtp, dtype):
    mesh = MESHES[preset] | ({"data": 2} if preset == "tp" else {})
    sizes.clear()
    on = Recording(abstract(mesh), find_rules(preset))
    jax.eval_shape(lambda: empty_cache(RELEASE, batch, context, rewind, dtype, mtp, on))
    budget = device_budget(RELEASE, mesh, preset, dtype, context, batch, rewind, mtp)
    assert budget.state == sum(sizes)
    assert sum(sizes) > 0
