"""A model on eight devices beside the same model on one; run by test_runs.py, prints JSON.

A process of its own: how many devices a CPU stands for is settled when JAX begins.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import glm5_jax as glm
from glm5_jax import generation
from glm5_jax.bench_dispatch import collectives

PRESETS = {
    "tp": {"tensor": 8},
    "ep": {"expert": 8},
    "tp_ep": {"tensor": 4, "expert": 2},
    "fsdp": {"data": 8},
}
# Weights that are gathered where they are used, and experts that are not.
OWN = {"data": 2, "expert": 4}, glm.ShardingRules(embed="data", experts="expert")
LENGTH = 21


def whole(model, tokens):
    """The logits of one pass, and the choices in it."""
    sites = {}
    logits = model(tokens, record=sites.__setitem__)
    return logits, {k: v for k, v in sites.items() if k.endswith(("selection", "router.experts"))}


def cached(model, tokens):
    """The same logits from a prefill and a decode of the last token."""
    cache = model.init_cache(len(tokens), LENGTH)
    first, cache = model.prefill(tokens[:, :-1], cache)
    last, cache = model.decode(tokens[:, -1], cache)
    return jnp.concatenate([first, last[:, None]], axis=1)


def moved(model, tokens):
    """What devices send each other in one step of decoding: [kind, shape, how often]."""
    cache = jax.jit(lambda model: model.init_cache(len(tokens), LENGTH))(model)
    step = jax.jit(glm.TextModel.decode).lower(model, tokens[:, 0], cache).compile()
    return [[kind, shape, n] for (kind, shape), n in collectives(step).items()]


def meshes(presets):
    """A mesh for each of the presets."""
    for preset in presets:
        shape = PRESETS[preset]
        yield preset, jax.make_mesh(tuple(shape.values()), tuple(shape))


def continued(model, tokens):
    """What `generate` adds to prompts of several lengths, drafting; two steps at least."""
    prompts = [row[: 3 + 2 * n].tolist() for n, row in enumerate(tokens)]
    return glm.generate(model, prompts, max_new_tokens=4, draft_tokens=1).tokens.tolist()


def steps_compiled():
    """How many steps of generation have been compiled so far."""
    return generation._step._cache_size()


def differing(ours, theirs):
    """The sites of one trace that the other lacks, or has otherwise."""

    def same(one, other):
        if one.dtype.kind != "f":
            return (one == other).all()
        scale = np.abs(np.nan_to_num(one, neginf=0)).max()  # −inf: nothing to choose there
        return np.allclose(one, other, rtol=0, atol=1e-11 * scale)

    return [
        name
        for name in sorted({*ours, *theirs})
        if name not in ours or name not in theirs or not same(ours[name], theirs[name])
    ]


def narrow(path, tokens):
    """In float32, of weights that stay in their codes: distance in parts of the scale."""
    _, mesh = next(meshes(["ep"]))
    one, other = (
        np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
        for model in (glm.load(path), glm.load(path, mesh=mesh, rules="ep"))
    )
    return float(np.abs(one - other).max() / np.abs(one).max())


def main(path: Path, quantized: Path) -> dict:
    """By preset, how far the logits are from those of one device, and what a device holds."""
    tokens = np.random.default_rng().integers(0, 224, (8, LENGTH))
    mask = np.arange(LENGTH) >= np.arange(8)[:, None]
    alone = glm.load(path, dtype="float64", mtp=True)
    logits, choices = jax.jit(whole)(alone, tokens)
    added, trace = continued(alone, tokens), glm.trace(alone, tokens, mask)
    found = {}
    for preset, mesh in meshes(PRESETS):
        model = glm.load(path, dtype="float64", mtp=True, mesh=mesh, rules=preset)
        got, chosen = jax.jit(whole)(model, tokens)
        found[preset] = {
            "errors": [float(jnp.abs(got - logits).max())],
            "choices": all((chosen[k] == v).all().item() for k, v in choices.items()),
            "parts": {
                name: leaf.sharding.shard_shape(leaf.shape)
                for name, leaf in (
                    ("experts", model.layers[1].ffn.experts.gate_proj[...]),
                    ("heads", model.layers[1].attn.o_proj[...]),
                    ("vocab", model.lm_head[...]),
                )
            },
        }
        if preset != "fsdp":
            found[preset]["moved"] = moved(model, tokens)
        before = steps_compiled()
        found[preset]["generated"] = continued(model, tokens) == added
        found[preset]["steps compiled"] = steps_compiled() - before
        if preset == "tp_ep":
            again = jax.jit(cached)(model, tokens)
            found[preset]["errors"].append(float(jnp.abs(again - logits).max()))
            found[preset]["traced"] = differing(trace, glm.trace(model, tokens, mask))
    shape, rules = OWN
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape))
    model = glm.load(path, dtype="float64", mesh=mesh, rules=rules)
    own = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    return {
        "own": float(jnp.abs(own - logits).max()),
        "scale": float(jnp.abs(logits).max()),
        "narrow": narrow(quantized, tokens),
        "presets": found,
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
