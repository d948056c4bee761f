"""The trace file: what `FORMAT.md` says, what is refused, what a loaded one answers."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import glm5_jax
from glm5_jax import Trace, TraceError
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config_json import config_json
from glm5_jax.numerics import trace as trace_file
from glm5_jax.numerics.sites import site_dims, sites_of
from glm5_jax.numerics.trace import complete_meta, make_trace, sample_indices

PAGE = (Path(trace_file.__file__).parent / "FORMAT.md").read_text()
CONFIG = glm5_jax.load_config(packaged_config("tiny"))
SITES = sites_of(glm5_jax.Skeleton.from_config(CONFIG))
META = {
    "engine": "a test",
    "versions": "{}",
    "config": json.dumps(config_json(CONFIG)),
    "dtype": "float32",
}
B, T = 2, 13


def drawn(names=tuple(SITES), dtype=np.float32):
    rng, dims = np.random.default_rng(0), site_dims(CONFIG, B, T)
    arrays = {}
    for name in names:
        shape = [dims[letter] for letter in SITES[name].axes.split()]
        if SITES[name].choice:
            arrays[name] = rng.integers(-1, 3, shape, np.int32)
        else:
            arrays[name] = rng.standard_normal(shape).astype(dtype)
    return arrays


def batch():
    tokens = np.random.default_rng(1).integers(0, 200, (B, T), np.int32)
    return tokens, np.arange(T) >= np.array([[0], [4]])


def made(dtype=np.float32, reduce="full", **changes):
    return make_trace(drawn(dtype=dtype) | changes, *batch(), META, reduce)


# ---- the page


def code_on_the_page():
    return re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]


def test_the_page_lists_every_site_with_its_axes():
    listed = set()
    for row in re.findall(r"^\| (.*`.*) \| ((?:[A-Z][A-Za-z]* ?|k ?)+) \|", PAGE, re.MULTILINE):
        listed |= {(name, row[1].strip()) for name in re.findall(r"`([a-z_.N]+)`", row[0])}
    connection = ("pre", "post", "comb", "collapse", "norm")
    listed |= {
        (name.replace("attn", "ffn"), axes)
        for name, axes in listed
        if name.startswith("layers.N.attn.") and name.endswith(connection)
    }
    table = {(re.sub(r"layers\.\d+", "layers.N", name), site.axes) for name, site in SITES.items()}
    assert listed == table


def test_the_minimal_writer_of_the_page_writes_a_trace(tmp_path):
    writer: dict = {}
    exec(code_on_the_page(), writer)
    arrays = drawn(["layers.3.attn.pools", "embedding"])
    path = tmp_path / "t.safetensors"
    writer["write_trace"](path, META["config"], *batch(), arrays, "an engine")
    trace = Trace.load(path)
    assert (trace.meta["engine"], trace.config) == ("an engine", made().config)
    assert trace.sites == ("embedding", "layers.3.attn.pools")  # in order, whatever the file's is
    for name, array in arrays.items():
        np.testing.assert_array_equal(trace[name], array)


# ---- saved and loaded


@pytest.mark.parametrize("reduce", ["full", "stats"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_what_is_loaded_is_what_was_saved(tmp_path, dtype, reduce):
    trace = made(dtype, reduce)
    again = Trace.load(trace.save(tmp_path / "t.safetensors"))
    assert list(again) == list(trace)
    assert (again.meta, again.reduce, again.sites) == (trace.meta, reduce, tuple(SITES))
    for name in trace:
        assert again[name].dtype == trace[name].dtype
        np.testing.assert_array_equal(again[name], trace[name])
    for name, array in zip(("tokens", "mask"), batch(), strict=True):
        np.testing.assert_array_equal(getattr(again, name), array)


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = made().save(tmp_path / "t.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(TraceError, match=r"t\.safetensors: cannot be written: disk full"):
        made(np.float64).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_padding_is_zero():
    trace, (_, mask) = made(), batch()
    for name, site in SITES.items():
        if site.axes.startswith("B T"):
            assert not trace[name][~mask].any(), name
            assert trace[name][mask].any(), name
    # Nine real tokens fill two pools of four, thirteen three.
    assert trace["layers.3.attn.pool_keys"].any(axis=-1).tolist() == [
        [True] * 3,
        [True, True, False],
    ]


def test_stats_are_of_real_positions_and_leave_out_minus_infinity():
    scores = drawn()["layers.3.attn.index_scores"]
    scores[0, :, 1] = -np.inf
    values = np.concatenate([scores[0][:, [0, 2]].ravel(), scores[1, 4:].ravel()])
    values = values.astype(np.float64)
    expected = values.mean(), values.std(), np.abs(values).max(), np.linalg.norm(values)
    full = made(**{"layers.3.attn.index_scores": scores})
    np.testing.assert_allclose(full.stats("layers.3.attn.index_scores"), expected, rtol=1e-12)
    reduced = full.reduced()
    np.testing.assert_allclose(reduced.stats("layers.3.attn.index_scores"), expected, rtol=1e-6)
    for name in SITES:
        np.testing.assert_array_equal(reduced.sample(name), full.sample(name))


def test_sample_is_all_of_a_small_array_and_spread_over_a_large_one():
    assert sample_indices(64).tolist() == list(range(64))
    large = np.sort(sample_indices(2**30))
    assert large[0] >= 0
    assert large[-1] < 2**30
    assert np.diff(large).max() < 3 * 2**30 / 64
    assert len(np.unique(large % 512)) > 48  # channels of a power of two are not met in step


# ---- refused


def stored(**tensors):
    tokens, mask = batch()
    return {"tokens": tokens, "mask": mask, **drawn(["embedding"]), **tensors}


REFUSED = {
    "metadata format": (stored(), {"format": "pt"}),
    "metadata: engine is missing": (stored(), {"engine": None}),
    "metadata reduce: expected full or stats, got 'mean'": (stored(), {"reduce": "mean"}),
    "metadata dtype: expected one of bfloat16, .* got 'fp32'": (stored(), {"dtype": "fp32"}),
    "metadata versions: expected a JSON object": (stored(), {"versions": "torch 2"}),
    "metadata config_sha256: not the SHA-256": (stored(), {"config_sha256": "0" * 64}),
    r"tokens: expected int32 \[B, T\], got int64": (stored(tokens=batch()[0].astype(int)), {}),
    r"mask: expected bool \[B, T\], got bool \[2, 12\]": (stored(mask=batch()[1][:, 1:]), {}),
    "layers.0.attn.latent: expected a site of this model": (
        {**stored(), "layers.0.attn.latent": np.zeros((B, T, 26), np.float32)},
        {},
    ),
    r"embedding: expected shape \[B T X\] = \[2, 13, 48\], got \[2, 13, 49\]": (
        stored(embedding=np.zeros((B, T, 49), np.float32)),
        {},
    ),
    "embedding: expected BF16 or F16 or F32 or F64, got int32": (
        stored(embedding=np.zeros((B, T, 48), np.int32)),
        {},
    ),
    "layers.3.attn.pools: expected I32, got float32": (
        {**stored(), "layers.3.attn.pools": np.zeros((B, T, 2), np.float32)},
        {},
    ),
    "embedding: expected #stats and #sample of a site": (stored(), {"reduce": "stats"}),
    "its stats and its sample belong together": (
        {
            **{name: array for name, array in stored().items() if name != "embedding"},
            "embedding#stats": np.zeros(4, np.float32),
        },
        {"reduce": "stats"},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_as_the_page_says_is_refused_in_one_line(tmp_path, message):
    tensors, changes = REFUSED[message]
    meta = {**complete_meta(META, "full"), **changes}
    path = tmp_path / "t.safetensors"
    metadata = {key: value for key, value in meta.items() if value is not None}
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(TraceError, match=rf"t\.safetensors: .*{message}") as error:
        Trace.load(path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_cut_off_or_no_trace_is_refused(tmp_path):
    path = made().save(tmp_path / "t.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceError, match=r"t\.safetensors: truncated"):
        Trace.load(path)
    save_file({"tokens": batch()[0]}, path)
    with pytest.raises(TraceError, match="no tensor 'mask'; this is no trace"):
        Trace.load(path)
    with pytest.raises(TraceError, match=r"none\.safetensors: cannot be read: No such file"):
        Trace.load(tmp_path / "none.safetensors")


def test_a_config_survives_its_json():
    for name in ("tiny", "bench", "glm5_3_flash"):
        config = glm5_jax.load_config(packaged_config(name))
        trace = make_trace({}, *batch(), META | {"config": json.dumps(config_json(config))}, "full")
        assert trace.skeleton.layers == glm5_jax.Skeleton.from_config(config).layers
        given = make_trace(
            {}, *batch(), META | {"config": packaged_config(name).read_text()}, "full"
        )
        assert trace.config == given.config


def test_safetensors_reads_what_we_write(tmp_path):
    path = made().save(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(load_file(path)["final.head"], made()["final.head"])
