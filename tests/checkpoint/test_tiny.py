"""make_tiny: one set of random weights per seed, whatever the layout."""

import json

import numpy as np
import pytest

from glm5_jax import CheckpointError, ConfigError
from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("naming", ["released", "native"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_layout_is_complete_and_nothing_in_it_is_unknown(tiny, naming, dtype):
    report = audit(tiny(naming=naming, dtype=dtype))
    assert report.complete
    assert report.naming == naming
    assert report.mtp
    assert report.counts["vision"] == 39
    assert bool(report.widened) == (dtype == "float32")


def test_one_seed_means_the_same_weights_in_every_layout(tiny):
    _, leaves = load_leaves(tiny(), dtype="float32", mtp=True)
    for arguments in ({"naming": "native"}, {"shards": 4}, {"dtype": "float32"}):
        _, other = load_leaves(tiny(**arguments), dtype="float32", mtp=True)
        assert same(leaves, other), arguments


def test_another_seed_changes_every_leaf(tiny):
    _, leaves = load_leaves(tiny(), mtp=True)
    _, other = load_leaves(tiny(seed=1), mtp=True)
    assert not [path for path in leaves if np.array_equal(leaves[path], other[path])]


def test_every_parameter_is_random_also_those_that_start_at_zero_or_one(tiny):
    _, leaves = load_leaves(tiny(), dtype="float32", mtp=True)
    for path, leaf in leaves.items():
        assert len(np.unique(leaf)) > 0.5 * min(leaf.size, 64), path
        assert 0.01 < leaf.std() < 3, path


def test_what_must_be_float32_is_float32_in_a_bfloat16_directory(tiny, stored):
    tensors = stored(tiny())
    endings = ("A_log", "dt_bias", "e_score_correction_bias", "_base", "_scale")
    for name, array in tensors.items():
        assert array.dtype.name == ("float32" if name.endswith(endings) else "bfloat16"), name


def test_shards_are_those_of_the_index_and_none_is_empty(tiny, stored):
    directory = tiny(shards=4)
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    assert sorted(set(index["weight_map"].values())) == files
    tensors = stored(directory)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    sizes = [(directory / file).stat().st_size for file in files]
    assert max(sizes) < 1.2 * min(sizes)


def test_as_many_shards_as_tensors_leaves_one_tensor_in_each(tmp_path, config_file):
    config = config_file("tiny")
    config["vision_config"] = None
    config["text_config"] |= {
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "mlp_layer_types": ["dense"],
        "indexer_types": ["full"],
        "num_nextn_predict_layers": 0,
    }
    count = audit(make_tiny(tmp_path / "one", config)).total
    make_tiny(tmp_path / "many", config, shards=count)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == count
    with pytest.raises(CheckpointError, match=f"shards: expected 1 to {count}"):
        make_tiny(tmp_path / "more", config, shards=count + 1)


def test_config_may_be_a_file_a_directory_or_its_content(tmp_path, config_file, tiny):
    file = packaged_config("tiny")
    for number, config in enumerate((file, str(file), tiny(), config_file("tiny"))):
        made = make_tiny(tmp_path / str(number), config)
        for name in ("model.safetensors", "config.json"):
            assert (made / name).read_bytes() == (tiny() / name).read_bytes()


def test_config_says_the_dtype_written_and_no_quantisation(tmp_path, config_file):
    config = config_file("tiny") | {"quantization_config": {"quant_method": "fp8"}}
    made = make_tiny(tmp_path / "made", config, dtype="float32")
    written = json.loads((made / "config.json").read_bytes())
    assert written["dtype"] == "float32"
    assert "quantization_config" not in written


def test_nothing_is_overwritten(tmp_path, tiny):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    for taken in (tmp_path / "kept", tmp_path / "kept" / "file"):
        with pytest.raises(CheckpointError, match="exists already"):
            make_tiny(taken)
    (tmp_path / "empty").mkdir()
    assert audit(make_tiny(tmp_path / "empty")).complete


def test_a_refused_config_leaves_nothing_behind(tmp_path, config_file):
    with pytest.raises(ConfigError):
        make_tiny(tmp_path / "out", config_file("tiny") | {"model_type": "other"})
    with pytest.raises(CheckpointError, match=r"nowhere\.json"):
        make_tiny(tmp_path / "out", tmp_path / "nowhere.json")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_logits_spread_over_a_few_units_and_have_no_ties(tiny):
    from glm5_jax import load

    tokens = np.random.default_rng(0).integers(0, 224, (1, 12))
    logits = np.asarray(load(tiny(), dtype="float32")(tokens))
    assert 1 < logits.std() < 5
    best = np.sort(logits, axis=-1)[..., -2:]
    assert (best[..., 1] > best[..., 0]).all()
