"""What XLA allocates on one of eight devices; run by test_device_budget.py, prints JSON.

A process of its own: how many devices a CPU stands for is settled when JAX begins. Nothing is
computed and no weight is read: models and caches are shapes.
"""

import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from glm5_jax.checkpoint.restore import open_leaves
from glm5_jax.model import TextModel, abstract_model
from glm5_jax.nn.padding import Stretch
from glm5_jax.nn.placement import Placement
from glm5_jax.sharding import array_pieces, find_rules, named_sharding


def model_of(path, mesh, rules):
    """The model of a directory over the devices of a mesh, without its arrays."""
    devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh))
    on = Placement(Mesh(devices.devices, devices.axis_names), find_rules(rules))
    reader = open_leaves(path)
    arrays = {
        name: jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=named_sharding(array_pieces(on.rules, leaf, array.shape, mesh), on.mesh),
        )
        for leaf_path, leaf in reader.leaves.items()
        for name, array in reader.arrays(leaf_path).items()
    }
    return abstract_model(reader.config, arrays, on)


def cache_of(model, batch, context):
    """Its cache, shapes with the shardings that `init_cache` gives."""
    make = jax.jit(lambda model: model.init_cache(batch, context))
    shardings = make.lower(model).compile().output_shardings
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(make, model),
        shardings,
    )


def step(model, cache):
    """Of a step of decoding: the bytes of its arguments, and of what it needs besides."""
    token = jax.ShapeDtypeStruct((cache.batch,), jnp.int32)
    run = jax.jit(TextModel.decode, donate_argnames="cache")
    memory = run.lower(model, token, cache=cache).compile().memory_analysis()
    return [memory.argument_size_in_bytes - 4 * cache.batch, memory.temp_size_in_bytes]


def layer(model, cache, index, tokens):
    """Of a layer's call with `tokens` a row: what it needs besides weights and state."""
    on, config, dtype = model.placement, model.config, model.embed_tokens.dtype
    shape = (cache.batch, tokens, config.hc_mult, config.hidden_size)
    rows = NamedSharding(on.mesh, on.spec(shape, ("batch", None, None, None)))
    streams = jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    @functools.partial(jax.jit, donate_argnames="state")
    def advance(layer, streams, stretch, state):
        streams, _, state = layer.advance(streams, stretch, state)
        return streams, state.place(on)

    counts = Stretch(cache.lengths, cache.lengths)
    run = advance.lower(model.layers[index], streams, counts, state=cache.layers[index])
    memory = run.compile().memory_analysis()
    made = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    before = math.prod(rows.shard_shape(shape)) * dtype.itemsize
    return before + made


def main(cases):
    """By case what `step` and `layer` say."""
    found = []
    for case in cases:
        model = model_of(case["path"], case["mesh"], case["rules"])
        cache = cache_of(model, case["batch"], case["context"])
        calls = [layer(model, cache, i, case["tokens"]) for i in range(len(model.layers))]
        found.append({"step": step(model, cache), "call": max(calls)})
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
