"""A model saved by eight devices, by other eight and by one; run by test_save.py, prints JSON."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import NamedSharding

import glm5_jax as glm
from glm5_jax.checkpoint import restore
from glm5_jax.checkpoint.restore import LeafReader, open_leaves
from glm5_jax.sharding import PRESETS, read_sharded

restore.PIECE_BYTES = 2**13  # a stack of experts is read in several


def mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))


def read(path, only=None):
    """What a process reads that has all devices, or one of them only.

    [bytes read, bytes of the largest array made, of the largest of experts].
    """
    made = []
    read_box = LeafReader.read_box

    def watched(*arguments):
        made.append(read_box(*arguments))
        return made[-1]

    def local(sharding, shape):
        devices = sharding.devices_indices_map(shape)
        return devices if only is None else {only: devices[only]}

    with (
        patch.object(LeafReader, "read_box", watched),
        patch.object(NamedSharding, "addressable_devices_indices_map", local),
        patch.object(jax, "make_array_from_single_device_arrays"),
    ):
        reader = open_leaves(path)
        read_sharded(reader, mesh(tensor=8), PRESETS["tp"])
    largest = (max(array.nbytes for array in made if array.ndim >= n) for n in (0, 3))
    return reader.bytes_read, *largest


def main(path: Path, out: Path) -> dict:
    """What one process, and each of eight, would read of safetensors and of Orbax directories."""
    many = glm.save(glm.load(path, mesh=mesh(tensor=4, expert=2)), out / "4x2")
    other = glm.save(glm.load(many, mesh=mesh(tensor=8, expert=1), rules="tp"), out / "8x1")
    one = glm.save(glm.load(other), out / "1")
    model, again = (glm.load(source, mesh=mesh(tensor=4, expert=2)) for source in (path, one))
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        assert old.sharding == new.sharding
        for a, b in zip(old.addressable_shards, new.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))
    return {
        source.name: [read(source), *(read(source, device) for device in jax.devices())]
        for source in (path, many, one)
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
