"""Checkpoints with and without the MTP layer, loaded as users load them."""

import json

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glm5_jax as glm

LAYER = "model.language_model.layers.5."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory of the packaged `tiny`, one file; its MTP layer is layer 5."""
    return glm.make_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")


def rewritten(tiny, directory, change, **text):
    """A copy of `tiny` with the tensors that `change` makes of its own, and config fields."""
    directory.mkdir()
    tensors = change(load_file(tiny / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny / "config.json").read_bytes())
    config["text_config"] |= text
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without_layer(tensors):
    return {name: array for name, array in tensors.items() if not name.startswith(LAYER)}


def parameters(module):
    """Path → array of a module."""
    found = nnx.iter_graph(module)
    return {path: np.asarray(v[...]) for path, v in found if isinstance(v, nnx.Variable)}


def assert_same(one, other):
    one, other = parameters(one), parameters(other)
    assert one.keys() == other.keys() and one
    for path in one:
        assert one[path].dtype == other[path].dtype, path
        assert one[path].tobytes() == other[path].tobytes(), path


def test_head_is_loaded_when_asked_for_from_both_kinds_of_directory(tiny, tmp_path):
    glm.convert(tiny, tmp_path / "orbax")
    for directory in (tiny, tmp_path / "orbax"):
        assert glm.load(directory).mtp is None
    assert_same(glm.load(tiny, mtp=True), glm.load(tmp_path / "orbax", mtp=True))


def test_head_uses_the_trunks_embedding_and_lm_head_with_and_without_copies(tiny, tmp_path):
    def with_copies(tensors):
        copies = {
            "embed_tokens.weight": "model.language_model.embed_tokens.weight",
            "shared_head.head.weight": "lm_head.weight",
        }
        return tensors | {LAYER + name: tensors[main] * 2 for name, main in copies.items()}

    copied = rewritten(tiny, tmp_path / "copied", with_copies)
    assert_same(glm.load(copied, mtp=True), glm.load(tiny, mtp=True))


def test_head_of_a_side_file_that_is_in_no_index(tiny, tmp_path):
    side = rewritten(tiny, tmp_path / "side", without_layer)
    tensors = load_file(tiny / "model.safetensors")
    layer = {name: array for name, array in tensors.items() if name.startswith(LAYER)}
    save_file(layer, side / "mtp.safetensors", metadata={"format": "pt"})
    names = sorted(tensors.keys() - layer.keys())
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (side / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(glm.load(side, mtp=True), glm.load(tiny, mtp=True))

    index["weight_map"] |= dict.fromkeys(layer, "mtp.safetensors")
    (side / "model.safetensors.index.json").write_text(json.dumps(index))
    (side / "mtp.safetensors").unlink()
    with pytest.raises(glm.CheckpointError, match=r"mtp\.safetensors"):
        glm.load(side)


@pytest.mark.parametrize("promised", [0, 1])
def test_checkpoint_without_the_layer_loads_and_says_so_when_asked_for_it(tiny, tmp_path, promised):
    trunk = rewritten(tiny, tmp_path / "trunk", without_layer, num_nextn_predict_layers=promised)
    glm.convert(trunk, tmp_path / "orbax")
    for directory in (trunk, tmp_path / "orbax"):
        assert_same(glm.load(directory), glm.load(tiny))
        with pytest.raises(glm.CheckpointError, match=r"MTP layer .* not in this") as e:
            glm.load(directory, mtp=True)
        assert "\n" not in str(e.value)


def test_head_that_the_config_does_not_mention_is_carried_through_conversion(tiny, tmp_path):
    silent = rewritten(
        tiny, tmp_path / "silent", lambda tensors: tensors, num_nextn_predict_layers=0
    )
    glm.convert(silent, tmp_path / "orbax")
    for directory in (silent, tmp_path / "orbax"):
        model = glm.load(directory, mtp=True)
        assert_same(model.mtp, glm.load(tiny, mtp=True).mtp)
        assert model.config.num_nextn_predict_layers == 1
        assert model.skeleton.mtp is not None
