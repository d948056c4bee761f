"""How tokens reach experts on other devices: the ways there are, timed and their bytes counted.

With arrays of fixed sizes an exchange of all with all (all-to-all) must keep room for every token
on every device, or drop some. It then moves as much as gathering all tokens and scattering the
sums, which is what `nn.spread` does. Sending each token to its own experts alone takes an exchange
of ragged parts, which XLA has for GPUs and not for CPUs.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax.bench import Timing, alternate
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import load_config
from glm5_jax.nn.ffn import Experts, Routing
from glm5_jax.nn.params import Params, fill
from glm5_jax.nn.placement import Placement
from glm5_jax.nn.spread import Spread
from glm5_jax.sharding import PRESETS, ShardingRules, array_pieces, named_sharding
from glm5_jax.specs import leaves

DEVICES = 8
BATCH, TOKENS = 8, 128
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def time_dispatch(repeats: int) -> list[Timing]:
    """A layer's experts of configs/bench.json over eight simulated devices, float32.

    In a process of its own, which begins with so many.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(repeats)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Timing(**timing) for timing in json.loads(done.stdout.splitlines()[-1])]


def collectives(compiled: jax.stages.Compiled) -> Counter[tuple[str, str]]:
    """What devices send each other in a call: kind and shape of what each receives, how often.

    What stands in a loop counts once.
    """
    kinds = "|".join(COLLECTIVES)
    found: Counter[tuple[str, str]] = Counter()
    for result, kind, start in re.findall(
        rf"= (.*?) ({kinds})(-start)?\(", compiled.as_text() or ""
    ):
        # What XLA sends in one message has the shape of all of it: `(f64[8,1,48], f64[8,1,3,48])`.
        shapes = re.findall(r"\w+\[[\d,]*\]", result)
        # Of one that need not be waited for: what is sent, then what comes.
        found.update((kind, shape) for shape in shapes[len(shapes) // 2 if start else 0 :])
    return found


def bytes_received(compiled: jax.stages.Compiled, devices: int) -> float:
    """Bytes that each device must get from the others in a call, all of which take part."""
    share = {"all-reduce": 2, "collective-permute": devices / (devices - 1)}
    share["reduce-scatter"] = devices  # whose result is one part of what is summed
    total = 0.0
    for (kind, shape), n in collectives(compiled).items():
        dtype, sizes = shape.rstrip("]").split("[")
        size = np.prod([int(s) for s in sizes.split(",") if s], dtype=int)
        total += n * size * _bytes_of(dtype) * share.get(kind, 1) * (devices - 1) / devices
    return total


def _bytes_of(dtype: str) -> float:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    assert bits is not None
    return int(bits[0]) / 8


def _exchanged(
    experts: Experts, spread: Spread, x: Array, chosen: Array, weights: Array
) -> Float[Array, "B T X"]:
    """By all-to-all: each device is sent the tokens it has experts for, zeros for the others."""
    axis, n = "expert", DEVICES
    held = experts.num_experts // n

    def own(experts: Experts, x: Array, chosen: Array, weights: Array) -> Array:
        needed = jnp.any(chosen[None] // held == jnp.arange(n)[:, None, None, None], axis=-1)
        sent = jnp.where(needed[..., None], x, 0)  # [n, B, T, X]
        exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
        rows = exchange(sent).reshape(-1, *x.shape[1:])
        pairs = [jnp.broadcast_to(h, (n, *h.shape)) for h in (chosen, weights)]
        chosen, weights = (exchange(h).reshape(-1, *h.shape[2:]) for h in pairs)
        first = held * jax.lax.axis_index(axis)
        here = (chosen >= first) & (chosen < first + held)
        y = experts.own_sum(rows, jnp.where(here, chosen - first, held), weights)
        return jnp.sum(exchange(y.reshape(n, *x.shape)), axis=0)

    specs = jax.tree.unflatten(jax.tree.structure(experts), spread.specs)
    rows = PartitionSpec(axis)
    return spread.placement.over(own, (specs, rows, rows, rows), rows)(experts, x, chosen, weights)


def _experts(rules: ShardingRules, mesh: Mesh) -> tuple[Experts, Spread]:
    config = load_config(packaged_config("bench"))
    at = "layers.1.ffn.experts"
    rng = np.random.default_rng(0)
    experts, arrays = Experts(config, Params(leaves(config)).at(at)), {}
    for path, leaf in leaves(config).items():
        if path.startswith(f"{at}."):
            pieces = array_pieces(rules, leaf, leaf.shape, dict(mesh.shape))
            array = 0.02 * rng.standard_normal(leaf.shape, np.float32)
            arrays[path] = jax.device_put(array, named_sharding(pieces, mesh))
    fill(experts, arrays, f"{at}.")
    spread = Spread.of(experts, Placement(mesh, rules))
    assert spread is not None
    return experts, spread


def _main(repeats: int) -> None:
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    experts, spread = _experts(PRESETS["ep"], mesh)
    config = load_config(packaged_config("bench"))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, TOKENS, config.hidden_size), np.float32)
    scores = rng.random((BATCH, TOKENS, config.n_routed_experts))
    chosen = np.argsort(scores)[..., : config.num_experts_per_tok].astype(np.int32)
    weights = rng.random(chosen.shape, np.float32)

    def call(run: Callable[..., Any], cut: bool) -> tuple[Callable[[], Any], str]:
        spec = PartitionSpec("expert") if cut else PartitionSpec()
        inputs = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, chosen, weights)]
        compiled = jax.jit(run).lower(experts, *inputs).compile()
        return partial(compiled, experts, *inputs), (
            f"{bytes_received(compiled, DEVICES) / 1e6:.1f} MB to each device"
        )

    def exchanged(experts: Experts, *inputs: Array) -> Array:
        return _exchanged(experts, spread, *inputs)

    def by(spread: Spread | None) -> Callable[..., Any]:
        def run(experts: Experts, x: Array, chosen: Int[Array, "B T k"], weights: Array) -> Array:
            experts.spread = spread
            return experts(x, Routing(chosen, weights))

        return run

    whole = Spread(Placement(mesh, ShardingRules(experts="expert", batch=())), spread.specs)
    ours, moved = call(by(spread), True)
    peers = {
        "all-to-all": call(exchanged, True),
        "all rows on all devices, all-reduce": call(by(whole), False),
        "XLA alone": call(by(None), True),
    }
    truth, timings = np.asarray(ours()), []
    for name, (peer, theirs) in peers.items():
        error = np.abs(np.asarray(peer()) - truth).max() / np.abs(truth).max()
        if not error < 1e-5:
            raise RuntimeError(f"{name} gives something else: {error:.1e} of the scale")
        mine, other = alternate(ours, peer, repeats)
        what = f"experts on {DEVICES} simulated devices, {BATCH}×{TOKENS} tokens, {moved}"
        timings.append(Timing(what, mine, other, f"{name}, {theirs}"))
    print(json.dumps([asdict(timing) for timing in timings]))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
