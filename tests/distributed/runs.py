"""What several processes do with one model, or one alone; run by test_processes.py.

It begins with the command `trace`, which joins the processes, and goes on in them. Each process
writes what it got into a file of its own.
"""

import sys
from pathlib import Path

import jax
import numpy as np

import glm5_jax as glm
from glm5_jax.checkpoint.restore import open_leaves
from glm5_jax.cli import app
from glm5_jax.sharding import PRESETS, read_sharded

PROMPTS = [[5, 17, 200, 3, 41, 9, 88, 120, 7, 64, 12], [150, 2, 31]]
MESH = {"tensor": 4, "expert": 2}


def mesh(sizes):
    """A mesh of all devices, None for one alone."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes)) if jax.device_count() > 1 else None


def own_parts(model):
    """What this process has of every array."""
    for leaf in jax.tree.leaves(model):
        for shard in leaf.addressable_shards:
            yield shard.index, np.asarray(shard.data)


def bytes_read(path):
    """What this process reads when all load the model with the rules `tp`."""
    reader = open_leaves(path, mtp=True)
    read_sharded(reader, mesh({"tensor": jax.device_count()}), PRESETS["tp"])
    return reader.bytes_read


def main(path: Path, out: Path, *join: str) -> None:
    """Trace, generate, save, and load what was saved."""
    prompts = out / "prompts.txt"
    prompts.write_text("\n".join(",".join(map(str, row)) for row in PROMPTS))
    if join:
        join = (*join, "--mesh", ",".join(f"{axis}={size}" for axis, size in MESH.items()))
    traced = (out / "trace.safetensors").as_posix()
    options = ["--dtype", "float64", "--tokens-file", prompts.as_posix(), "--out", traced]
    app(["trace", path.as_posix(), *options, *join], standalone_mode=False)

    model = glm.load(path, dtype="float64", mtp=True, mesh=mesh(MESH))
    seen = []
    generation = glm.generate(
        model,
        PROMPTS,
        max_new_tokens=4,
        draft_tokens=1,
        eos=[],
        on_token=lambda row, token: seen.append((row, token)),
    )
    found = {"generated": generation.tokens, "seen": np.array(seen)}
    if join:
        saved = glm.save(model, out / "saved")
        again = glm.load(saved, dtype="float64", mtp=True, mesh=mesh(MESH))
        for (box, old), (box_again, new) in zip(own_parts(model), own_parts(again), strict=True):
            assert box == box_again
            np.testing.assert_array_equal(old, new)
        found["bytes"] = np.array([bytes_read(path), bytes_read(saved)])
    np.savez(out / f"process-{jax.process_index()}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
