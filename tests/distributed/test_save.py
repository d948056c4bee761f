"""What `save` writes is the model again, wherever it is loaded, and appears whole or not at all."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import glm5_jax as glm
from glm5_jax.checkpoint.database import nested_tree, open_array
from glm5_jax.checkpoint.restore import load_leaves, open_leaves
from glm5_jax.sharding import PRESETS, array_pieces, part_of


@pytest.fixture(scope="module")
def topologies(quantized, run_together, tmp_path_factory):
    """Directories by the devices that wrote them, and what eight processes read of some."""
    out = tmp_path_factory.mktemp("topologies")
    (ended,) = run_together("topologies.py", quantized, out, devices=8)
    assert ended.status == 0, ended.err
    return out, json.loads(ended.out.splitlines()[-1])


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == array.dtype
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.mark.parametrize("devices", ["4x2", "8x1", "1"])
def test_what_any_devices_save_any_others_load(topologies, quantized, devices):
    assert_same(load_leaves(topologies[0] / devices)[1], load_leaves(quantized)[1])


@pytest.mark.parametrize("devices", ["4x2", "1"])
def test_plain_orbax_restores_it_on_one_device(topologies, quantized, devices):
    tree = ocp.load(topologies[0] / devices)
    expected = nested_tree(load_leaves(quantized)[1])
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_it_says_which_model_it_is(topologies, quantized):
    """All of the text model, whose vision tower was not loaded."""
    found, expected = (
        replace(glm.load_config(path), vision=None, overridden=(), defaulted=())
        for path in (topologies[0] / "4x2", quantized)
    )
    assert found == expected


def test_one_process_reads_all_once_and_one_of_eight_its_eighth(topologies, quantized):
    reader, mesh = open_leaves(quantized), {"tensor": 8}
    cut = whole = largest = largest_stack = stack = 0
    for path, leaf in reader.leaves.items():
        for array in reader.arrays(path).values():
            pieces = array_pieces(PRESETS["tp"], leaf, array.shape, mesh)
            nbytes = math.prod(array.shape) * array.dtype.itemsize
            part = math.prod(part_of(array.shape, pieces, mesh)) * array.dtype.itemsize
            assert part in (nbytes, nbytes // 8)
            cut, whole = (cut + nbytes, whole) if part < nbytes else (cut, whole + nbytes)
            largest = max(largest, part)
            if leaf.role == "moe_expert" and array.dtype.itemsize == 1:
                assert part == nbytes // 8
                stack, largest_stack = nbytes, max(largest_stack, part)
    assert cut > whole
    for source, (one, *eight) in topologies[1].items():
        assert eight == [[cut // 8 + whole, largest, largest_stack]] * 8, source
        assert one[0] == cut + whole, source
        assert one[2] <= 2**13 < stack // 2, source  # the PIECE_BYTES of topologies.py


@pytest.fixture(scope="module")
def model(plain):
    return glm.load(plain)


def test_an_expert_of_a_large_stack_is_read_alone(model, tmp_path, monkeypatch):
    monkeypatch.setattr("glm5_jax.checkpoint.save.CHUNK_BYTES", 2**14)
    path = glm.save(model, tmp_path / "saved")
    stack = open_array(path, "layers.0.ffn.experts.gate_proj").result()
    assert stack.shape == (16, 40, 48)
    assert stack.chunk_layout.read_chunk.shape == (1, 40, 48)
    table = open_array(path, "embed_tokens").result()
    assert 2**12 < 4 * math.prod(table.chunk_layout.read_chunk.shape) <= 2**14


def test_what_is_there_is_replaced_only_if_asked(model, plain, tmp_path):
    path = glm.save(model, tmp_path / "new" / "saved")
    with pytest.raises(glm.CheckpointError, match=r"saved: exists already; force=True replaces it"):
        glm.save(model, path)
    model.norm[...] *= 2
    try:
        glm.save(model, path, force=True)
    finally:
        model.norm[...] /= 2
    expected = load_leaves(plain)[1]
    assert_same(load_leaves(path)[1], expected | {"norm": expected["norm"] * 2})
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]


def test_no_other_directory_is_replaced(model, tmp_path):
    (tmp_path / "thesis.txt").write_text("of years")
    for force in (False, True):
        with pytest.raises(glm.CheckpointError, match="exists and is not an Orbax directory"):
            glm.save(model, tmp_path, force)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_that_cannot_be_is_one_line(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(glm.CheckpointError, match=r"^/\S*/file\S*: \w[\w ]+$"):
        glm.save(model, tmp_path / "file" / "saved")


def test_while_one_saves_another_does_not(model, tmp_path, monkeypatch):
    def meanwhile(*_):
        with pytest.raises(glm.CheckpointError, match="another save is writing it"):
            glm.save(model, tmp_path / "saved")
        raise KeyboardInterrupt

    monkeypatch.setattr("glm5_jax.checkpoint.save._write", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        glm.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    monkeypatch.undo()
    glm.save(model, tmp_path / "saved")


@pytest.mark.parametrize("read", [glm.verify, lambda path: glm.export(path, path / "out")])
def test_without_a_source_there_is_nothing_to_verify_or_to_trace_back(topologies, read):
    with pytest.raises(glm.CheckpointError, match="has no ledger"):
        read(topologies[0] / "1")
