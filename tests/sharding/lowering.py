"""The released geometry on eight devices that hold nothing; run by test_lowering.py, prints JSON.

`h200`: eight H200s that are not at hand, which a compiler for them stands for (needs the extra
`aot`). `simulated`: eight devices of a CPU, for every JAX. The model and its cache are shapes, so
nothing is computed.
"""

import json
import math
import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh

import glm5_jax as glm
from glm5_jax.bench_dispatch import collectives
from glm5_jax.cache import empty_cache
from glm5_jax.config import QuantizationConfig
from glm5_jax.mesh_budget import planned_arrays
from glm5_jax.model import TextModel, abstract_model
from glm5_jax.nn.placement import Placement
from glm5_jax.sharding import PRESETS, array_pieces, named_sharding
from glm5_jax.specs import leaves
from pallas_kernels.aot import TARGETS

ROWS, CAPACITY, PROMPT = 8, 4096, 1024
CUTS = {
    "tp": ({"tensor": 8}, PRESETS["tp"]),
    "tp_ep": ({"tensor": 4, "expert": 2}, PRESETS["tp_ep"]),
    "context": ({"context": 2, "tensor": 4}, replace(PRESETS["tp"], sequence="context")),
}


def mesh_of(shape, where):
    devices = jax.devices()
    if where != "simulated":
        config = TARGETS[where].read_text()
        topology = get_topology_desc(platform="cuda", target_config=config, topology="1x1x8")
        devices = topology.devices
    return Mesh(np.reshape(devices, tuple(shape.values())), tuple(shape))


def arguments(config, on):
    """The model and its cache, as shapes with shardings."""
    mesh, table = on.mesh, leaves(config, mtp=False)
    arrays = {}
    for path, planned in planned_arrays(config, "stored", mtp=False).items():
        for name, array in planned.items():
            pieces = array_pieces(on.rules, table[path], array.shape, mesh.shape)
            sharding = named_sharding(pieces, mesh)
            arrays[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    cache = jax.eval_shape(
        lambda: empty_cache(config, ROWS, CAPACITY, 0, jnp.bfloat16, mtp=False)
    ).place(on)
    return abstract_model(config, arrays, on), cache


def lower(config, cut, where, prompt=None):
    """A step of decoding, or the prefill of a prompt; and the bytes that a device is given."""
    shape, rules = CUTS[cut]
    mesh = mesh_of(shape, where)
    on = Placement(mesh, rules)
    shape = (ROWS,) if prompt is None else (ROWS, prompt)
    tokens = on.place(jax.ShapeDtypeStruct(shape, jnp.int32), *[None] * len(shape))
    model, cache = arguments(config, on)
    step = TextModel.decode if prompt is None else TextModel.prefill
    step = jax.jit(step, donate_argnums=2)
    # What a kernel asks for the kind of device.
    simulated = where == "simulated"
    kind = nullcontext() if simulated else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with kind:
        lowered = step.lower(model, tokens, cache)
    given = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((model, tokens, cache))
    )
    return lowered, sum(given)


def described(lowered):
    """Of the lowered text: its arguments [shape, cut, how often], and its kernels.

    A kernel is [shapes in, shapes out, how often]: layers of a kind are one function, so that many
    times as that is called.
    """
    text = lowered.as_text()
    head = re.search(r"func\.func public @main\((.*?)\) -> ", text, re.S)[1]
    cut = re.findall(r"tensor<(\w+)> \{[^%]*?<@mesh, (\[.*?\])>", head)
    kernels = []
    for name, body in re.findall(r"func\.func \w+ @(\w+)\((.*?)\n  \}", text, re.S):
        calls = len(re.findall(rf"call @{name}\(", text))
        for line in re.findall(r"custom_call @mosaic_gpu\w*\(.*", body):
            shapes = line.rsplit(" : ", 1)[1].split(" -> ")
            kernels.append([*(re.findall(r"<(\w+)>", side) for side in shapes), calls])
    return {"arguments": [[*x, n] for x, n in Counter(cut).items()], "kernels": kernels}


def compiled(lowered, given):
    """Of the compiled program: what devices send, and the bytes of one of them."""
    program = lowered.compile()
    memory = program.memory_analysis()
    return {
        "sent": [[kind, shape, n] for (kind, shape), n in collectives(program).items()],
        "given": [memory.argument_size_in_bytes, given],
        "kept": [memory.alias_size_in_bytes, memory.output_size_in_bytes],
        "temporary": memory.temp_size_in_bytes,
    }


def main(where, config, few):
    """Calls of all layers by what they are and how they are cut; and one of `few`, compiled."""
    config = glm.load_config(config)
    fp8 = replace(config, quantization=QuantizationConfig("fp8", (128, 128)))
    calls = {f"decode {cut}": lower(config, cut, where) for cut in ("tp", "tp_ep")}
    calls["decode tp fp8"] = lower(fp8, "tp", where)
    for cut in ("tp_ep", "context"):
        calls[f"prefill {cut}"] = lower(config, cut, where, prompt=PROMPT)
    found = {name: described(lowered) for name, (lowered, _) in calls.items()}
    if few:
        found["compiled"] = compiled(*lower(glm.load_config(few), "tp_ep", where))
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:3], *sys.argv[3:] or [None])))
