"""Traces of our own model: what is kept, what is not computed, and that streaming gives the bits.

One model of two layers, with every kind of site; it is compiled once per way of tracing.
"""

import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import glm5_jax
from glm5_jax import Trace, TraceError
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.cli import main
from glm5_jax.nn import kda
from glm5_jax.numerics.sites import sites_of
from glm5_jax.numerics.tracing import traced

T = 19


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = json.loads(packaged_config("tiny").read_text())
    config["text_config"] |= {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
    }
    del config["text_config"]["linear_attn_config"]["kda_layers"]
    del config["text_config"]["linear_attn_config"]["full_attn_layers"]
    return make_tiny(tmp_path_factory.mktemp("model") / "two", config, dtype="float32")


@pytest.fixture(scope="module")
def model(directory):
    return glm5_jax.load(directory)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 200, (3, T))


@pytest.fixture(scope="module")
def mask():
    """No padding, five tokens on the left, one on the left and two on the right."""
    position = np.arange(T)
    return np.stack([position >= 0, position >= 5, (position >= 1) & (position < T - 2)])


@pytest.fixture(scope="module")
def full(model, tokens, mask):
    return glm5_jax.trace(model, tokens, mask)


@pytest.fixture(scope="module")
def stats(model, tokens, mask):
    return glm5_jax.trace(model, tokens, mask, reduce="stats")


def shapes(model, tokens, mask=None, **options):
    """What `traced` gives, in order, without compiling anything."""
    order = []

    def run(model):
        sites = traced(model, tokens, mask, **options)
        order.extend(sites)
        return sites

    found = jax.eval_shape(run, model)
    return {name: found[name] for name in order}


def assert_same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_every_site_is_there_in_order_and_as_declared(full, model, tokens, mask):
    assert full.sites == tuple(full) == tuple(sites_of(model.skeleton))
    assert tuple(shapes(model, tokens, mask)) == full.sites  # as one jitted call, too
    assert (full.meta["engine"], full.meta["dtype"]) == ("glm5-jax", "float32")
    np.testing.assert_array_equal(full.tokens, tokens)
    np.testing.assert_array_equal(full.mask, mask)


def test_the_trace_ends_in_the_models_own_logits(full, model, tokens, mask):
    logits = np.asarray(model(tokens, mask))
    error = np.abs(full["final.head"][mask] - logits[mask]).max()
    assert error <= 1e-5 * np.abs(logits[mask]).max()
    assert not full["final.head"][~mask].any()


def test_one_jitted_call_traces_what_layer_by_layer_does(full, model, tokens, mask):
    sites = jax.jit(traced)(model, tokens, mask)
    assert sites.keys() == full.keys()
    for name, value in sites.items():
        if full.site(name).choice:
            np.testing.assert_array_equal(value, full[name], err_msg=name)
        else:
            scale = np.abs(full[name][np.isfinite(full[name])]).max()
            np.testing.assert_allclose(value, full[name], atol=2e-5 * scale, err_msg=name)


def test_padding_moves_sites_and_changes_none(full, model, tokens, mask):
    # Padded on the right instead of on the left: the same compilation.
    moved, right = np.roll(tokens, -5, axis=1), np.roll(mask, -5, axis=1)
    moved[[0, 2]], right[[0, 2]] = tokens[[0, 2]], mask[[0, 2]]
    other = glm5_jax.trace(model, moved, right)
    for name, site in ((name, full.site(name)) for name in full):
        x, y = full[name][1], other[name][1]
        if site.axes.startswith("B T"):
            x, y = x[5:], y[: T - 5]
        if name.endswith("selection"):
            x = np.where(x < 0, x, x - 5)
        np.testing.assert_allclose(x, y, atol=1e-4, err_msg=name)


def test_the_state_is_that_after_the_last_real_token(full, model, tokens):
    row = np.concatenate([tokens[2:, 1 : T - 2], tokens[2:, :3]], axis=1)
    alone = glm5_jax.trace(
        *(model, np.repeat(row, 3, axis=0), np.repeat(np.arange(T) < T - 3, 3).reshape(T, 3).T)
    )
    state = full["layers.0.attn.state"]
    np.testing.assert_allclose(state[2], alone["layers.0.attn.state"][0], atol=1e-5)
    assert np.abs(state[2] - state[0]).max() > 1e-2


# ---- stats


def test_stats_are_those_of_the_full_trace(full, stats):
    assert (stats.sites, stats.reduce) == (full.sites, "stats")
    for name in full.sites:
        expected = np.array(full.stats(name))
        scale = max(1e-6, full.stats(name).absmax)
        np.testing.assert_allclose(stats.stats(name)[:3], expected[:3], atol=3e-6 * scale)
        np.testing.assert_allclose(stats.stats(name).l2, expected[3], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            stats.sample(name), full.sample(name), atol=1e-5 * scale, err_msg=name
        )


def test_what_leaves_a_compiled_step_is_reduced_already(model, tokens):
    found = shapes(model, tokens, reduce="stats")
    assert max(value.size for value in found.values()) == 64
    assert len(found) == 2 * len(sites_of(model.skeleton))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_the_stats(directory, tokens, mask, stats, bad):
    model = glm5_jax.load(directory)
    weight = model.layers[0].attn.o_proj
    weight[...] = weight[...].at[0, 0].set(bad)
    spoilt = glm5_jax.trace(model, tokens, mask, reduce="stats")
    assert spoilt.stats("layers.0.attn.o") == stats.stats("layers.0.attn.o")
    assert not np.isfinite(spoilt.stats("layers.0.attn.kda").l2)


# ---- kept


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (
            "layers.1.attn.po*",
            ["layers.1.attn.post", "layers.1.attn.pool_keys", "layers.1.attn.pools"],
        ),
        (("*.state", "final.mean"), ["layers.0.attn.state", "final.mean"]),
        ("*.router.?????s", ["layers.1.ffn.router.logits", "layers.1.ffn.router.scores"]),
    ],
)
def test_only_what_is_asked_for_is_kept(model, tokens, keep, expected):
    assert list(shapes(model, tokens, keep=keep)) == expected


def test_a_state_that_is_not_kept_is_not_asked_for(model, tokens, monkeypatch):
    asked = []

    def watched(*args, output_final_state, **options):
        asked.append((output_final_state, options["implementation"]))
        return chunk_kda(*args, output_final_state=output_final_state, **options)

    chunk_kda = kda.chunk_kda
    monkeypatch.setattr(kda, "chunk_kda", watched)
    # Together these are kept nowhere else: what was traced before is not traced again.
    shapes(model, tokens, keep="*.[gbo]", implementation="reference")
    shapes(model, tokens, keep=("*.state", "*.[vg]"))
    assert asked == [(False, "reference"), (True, None)]


def test_a_site_keeps_the_dtype_it_is_computed_in(directory, tokens):
    found = shapes(glm5_jax.load(directory, dtype="bfloat16"), tokens)
    wide = ("pre", "post", "comb", "g", "beta", "state", "index_scores")
    for name, value in found.items():
        last = name.rpartition(".")[2]
        if last in ("pools", "selection") or name.endswith("router.experts"):
            assert value.dtype == jnp.int32
        elif last in wide or "router" in name or name == "final.head":
            assert value.dtype == jnp.float32, name
        else:
            assert value.dtype == ml_dtypes.bfloat16, name


def test_what_cannot_be_kept_is_refused(model, tokens):
    with pytest.raises(TraceError, match=r"no site of this model matches 'layers\.2\.\*'"):
        glm5_jax.trace(model, tokens, keep=["*.o", "layers.2.*"])
    with pytest.raises(ValueError, match="reduce: expected one of full, stats, got 'mean'"):
        glm5_jax.trace(model, tokens, reduce="mean")


# ---- streamed


@pytest.mark.parametrize("reduce", ["full", "stats"])
def test_a_streamed_model_gives_the_same_bits(request, directory, tokens, mask, reduce):
    stream = glm5_jax.stream_layers(directory, expert_group=16)
    assert_same(
        glm5_jax.trace(stream, tokens, mask, reduce=reduce), request.getfixturevalue(reduce)
    )


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_the_command_writes_the_trace(full, directory, tmp_path, monkeypatch, tokens, mask, stream):
    rows = (" ".join(map(str, row[real])) for row, real in zip(tokens[:2], mask[:2], strict=True))
    (tmp_path / "ids").write_text("\n".join([*rows, " ".join(map(str, tokens[2]))]))
    out = tmp_path / "t.safetensors"
    options = ["--tokens-file", tmp_path / "ids", "--out", out, "--keep", "layers.0.*", *stream]
    monkeypatch.setattr(sys, "argv", ["glm5-jax", "trace", *map(str, (directory, *options))])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    trace = Trace.load(out)
    assert trace.sites == tuple(name for name in full.sites if name.startswith("layers.0."))
    np.testing.assert_array_equal(trace.tokens[0], tokens[0])
    for name in trace:
        np.testing.assert_allclose(trace[name][:2], full[name][:2], atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (["--keep", "layer.*"], "keep: no site of this model matches 'layer.*'"),
        (["--reduce", "mean"], "reduce: expected one of full, stats, got 'mean'"),
        (["--implementation", "cuda"], "implementation must be None or from"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    directory, tmp_path, monkeypatch, capsys, option, line
):
    options = ["--tokens", "1,2,3", "--out", tmp_path / "t.safetensors", *option]
    monkeypatch.setattr(sys, "argv", ["glm5-jax", "trace", *map(str, (directory, *options))])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    found = capsys.readouterr().err
    assert found.startswith(f"error: {line}")
    assert found.count("\n") == 1
    assert not list(tmp_path.iterdir())
