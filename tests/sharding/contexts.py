"""Rows whose tokens are cut over eight devices beside the same on one; prints JSON.

Run by test_context.py, in a process of its own as runs.py.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import glm5_jax as glm
from glm5_jax.bench_dispatch import collectives
from glm5_jax.sharding import PRESETS, ShardingRules
from pallas_kernels.kda import chunk_kda
from pallas_kernels.kda.context import context_kda

CUTS = {
    "context": ({"context": 8}, ShardingRules(sequence="context")),
    "context, tensor": (
        {"context": 4, "tensor": 2},
        replace(PRESETS["tp"], sequence="context"),
    ),
    "expert, tensor": (
        {"expert": 4, "tensor": 2},
        replace(PRESETS["tp_ep"], batch="data", sequence="expert"),
    ),
}
TOKENS = 16  # two on each of eight devices, where the convolution looks back at three


def mesh_of(shape):
    return Mesh(np.reshape(jax.devices(), tuple(shape.values())), tuple(shape))


def recurrences():
    """By gates, how far float64 and float32 are from chunk_kda, and its own float32 is."""
    rng = np.random.default_rng()
    B, T, H, K, V = 2, 8 * 11, 3, 8, 12
    q, k, g = rng.normal(size=(3, B, T, H, K))
    v, beta, state = (rng.normal(size=(B, T, H, *end)) for end in ((V,), (), (V,)))
    g, beta, state = -5 / (1 + np.exp(-2 * g)), 1 / (1 + np.exp(-beta)), state[:, :K].swapaxes(1, 2)
    lengths = np.array([T - 5, 37])  # of the second row some devices have nothing
    strong = rng.random(g.shape) < 0.3
    similar = k[:, :1] + 1e-3 * k
    cases = {
        "drawn": (q, k, v, g, beta),
        "no decay": (q, k, v, 0 * g, beta),
        "total decay": (q, k, v, 0 * g - 1e30, beta),
        "total decay of some": (q, k, v, np.where(strong, -200.0, -1e-3), beta),
        # Of what is only decayed the error is that of exp(Σg), which grows with Σg.
        "nothing written": (q, k, v, 0.01 * g, 0 * beta),
        "all written": (q, k, v, 0 * g, 0 * beta + 1),
        "one key": (q, similar, v, 0 * g - 1e-3, 0 * beta + 0.9999),
    }
    cut, whole = PartitionSpec(None, "context"), PartitionSpec()

    def own(tokens, state, lengths):
        options = dict(initial_state=state, lengths=lengths, output_final_state=True)
        return context_kda(*tokens, axes="context", **options)

    specs = dict(in_specs=(cut, whole, whole), out_specs=(cut, whole))
    mesh = mesh_of({"context": 8})
    ours = jax.jit(jax.shard_map(own, mesh=mesh, check_vma=False, **specs))

    @jax.jit
    def theirs(tokens, state, lengths):
        options = dict(initial_state=state, lengths=lengths, output_final_state=True)
        return chunk_kda(*tokens, **options)

    def distances(found, truth):
        return [
            float(np.linalg.norm(np.subtract(x, y)) / max(np.linalg.norm(y), 1e-30))
            for x, y in zip(found, truth, strict=True)
        ]

    found = {}
    for name, tokens in cases.items():
        truth = theirs(tokens, state, lengths)
        narrow = jax.tree.map(lambda x: x.astype(np.float32), (tokens, state))
        found[name] = {
            "float64": distances(ours(tokens, state, lengths), truth),
            "float32": distances(ours(*narrow, lengths), truth),
            "unsharded": distances(theirs(*narrow, lengths), truth),
        }
    # Without a state before, for all tokens, and without the state after.
    tokens = cases["drawn"]
    ours = jax.shard_map(
        lambda *tokens: context_kda(*tokens, axes="context")[0],
        mesh=mesh,
        in_specs=cut,
        out_specs=cut,
        check_vma=False,
    )
    found["alone"] = distances([jax.jit(ours)(*tokens)], [chunk_kda(*tokens)[0]])
    return found


def whole(model, tokens, mask):
    """The logits of one pass, the choices and states in it."""
    sites = {}
    logits = model(tokens, mask, record=sites.__setitem__)
    chosen = ("selection", "router.experts")
    return (
        logits,
        {k: v for k, v in sites.items() if k.endswith(chosen)},
        {k: v for k, v in sites.items() if k.endswith("state")},
    )


@partial(jax.jit, static_argnums=3)
def continued(model, tokens, mask, rewind):
    """Logits and cache of a prefill and of one more call: of more tokens, or of one."""
    cache, found = model.init_cache(len(tokens), 64, rewind), []
    for n in (TOKENS, TOKENS // 2 if rewind else 1):
        # Of the second row one token comes, with which not all that is replayed goes in; or none.
        logits, cache = model.prefill(tokens[:, -n:], cache, mask[:, -n:])
        found.append(jnp.where(mask[:, -n:, None], logits, 0))
    return found, cache


def sent(program):
    """What the devices send: [kind, shape, how often]."""
    return [[kind, shape, n] for (kind, shape), n in collectives(program).items()]


def furthest(ours, theirs):
    """The greatest difference of any number, in parts of its array's scale."""

    def apart(x, y):
        x, y = np.asarray(x, float), np.asarray(y, float)
        return np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-30)

    return float(max(jax.tree.leaves(jax.tree.map(apart, ours, theirs))))


def main(path):
    rng = np.random.default_rng()
    tokens, mask = rng.integers(0, 224, (2, TOKENS)), np.ones((2, TOKENS), int)
    mask[0, :3] = mask[1, 9:] = 0
    alone = glm.load(path, dtype="float64")
    passed = jax.jit(whole)(alone, tokens, mask)
    caches = {rewind: continued(alone, tokens, mask, rewind) for rewind in (0, 2)}
    found = {}
    for name, rewind in (("context", 0), ("context, tensor", 2), ("expert, tensor", None)):
        shape, rules = CUTS[name]
        model = glm.load(path, dtype="float64", mesh=mesh_of(shape), rules=rules)
        program = jax.jit(whole).lower(model, tokens, mask).compile()
        logits, chosen, states = program(model, tokens, mask)
        real = mask[..., None] * np.asarray(logits), states
        found[name] = {
            "pass": furthest(real, (mask[..., None] * np.asarray(passed[0]), passed[2])),
            "choices": furthest(chosen, passed[1]),
            "part": logits.sharding.shard_shape(logits.shape),
            "sent": sent(program),
        }
        if rewind is not None:
            ours = continued(model, tokens, mask, rewind)
            found[name]["continued"] = furthest(ours, caches[rewind])
    return {"recurrences": recurrences(), "models": found}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
