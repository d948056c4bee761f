"""The text model: padding, batches, traces, compilation, dtypes, gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import layer as layer_file
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import load_config
from glm5_jax.inputs import checked_inputs
from glm5_jax.model import TextModel, read_out
from glm5_jax.nn.kda import KDA
from glm5_jax.nn.params import Params
from glm5_jax.specs import leaves


def traced(model, tokens, mask):
    """Logits and the trace, in the order in which it was recorded."""
    sites = {}

    def record(name, value):
        assert name not in sites, f"{name} is recorded twice"
        sites[name] = value

    return model(tokens, mask, record=record), sites


# Every kind of parameter in as few layers as there can be.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
}


@pytest.fixture(scope="module")
def logits():
    run = jax.jit(lambda model, tokens, mask: model(tokens, mask))

    def call(model, tokens, mask=None):
        mask = np.ones(tokens.shape, bool) if mask is None else mask
        return np.asarray(run(model, tokens, mask))

    return call


@pytest.fixture(scope="module")
def two_layers(build):
    return build(**TWO_LAYERS)


# ---- padding and batches


@pytest.fixture(scope="module")
def plain(logits, small, tokens):
    """Logits of the three rows, without padding."""
    return logits(small.model, tokens)


@pytest.mark.parametrize("padding", [1, 2, 3, 4, 5])
def test_left_padding_in_a_mixed_batch_changes_no_logits(logits, small, tokens, plain, padding):
    batch, mask = tokens.copy(), np.ones(tokens.shape, bool)
    batch[1], mask[1, :padding] = np.roll(tokens[1], padding), False
    out = logits(small.model, batch, mask)
    np.testing.assert_allclose(out[1, padding:], plain[1, : 23 - padding], atol=1e-12)
    np.testing.assert_allclose(out[[0, 2]], plain[[0, 2]], atol=1e-12)


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 4, 5, 64])
def test_left_padding_of_a_batch_of_one_changes_no_logits(logits, two_layers, tokens, padding):
    # What is not padding on the left is padding on the right: one compilation for all.
    row, mask = np.full((1, 87), 7), np.zeros((1, 87), bool)
    row[:, padding : padding + 23], mask[:, padding : padding + 23] = tokens[0], True
    out = logits(two_layers.model, row, mask)[0, padding : padding + 23]
    np.testing.assert_allclose(out, logits(two_layers.model, tokens)[0], atol=1e-12)


def test_order_is_known_without_positions(logits, small, tokens, plain):
    swapped = tokens.copy()
    swapped[0, [2, 9]] = tokens[0, [9, 2]]
    out = logits(small.model, swapped)
    np.testing.assert_allclose(out[0, :2], plain[0, :2], atol=1e-12)
    assert np.abs(out[0, 10:] - plain[0, 10:]).max() > 1e-3


def test_row_without_real_tokens_is_finite_and_changes_no_other_row(logits, small, tokens, mask):
    expected = logits(small.model, tokens, mask)
    empty = mask.copy()
    empty[1] = False
    out = logits(small.model, tokens, empty)
    assert np.all(np.isfinite(out))
    np.testing.assert_array_equal(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("empty_row", [False, True])
def test_nan_in_the_embedding_of_a_padded_token_reaches_no_real_one(
    logits, small, tokens, mask, empty_row
):
    mask = mask.copy()
    mask[1] &= not empty_row
    embedding = small.arrays["embed_tokens"].copy()
    used = np.unique(tokens[mask])
    unused = np.setdiff1d(np.arange(67), used)[0]
    embedding[unused] = np.nan
    batch = np.where(mask, tokens, unused)
    expected = logits(small.model, batch, mask)
    out = logits(small.with_arrays({"embed_tokens": embedding}), batch, mask)
    np.testing.assert_array_equal(out[mask], expected[mask])
    assert np.all(np.isfinite(out[mask]))


@pytest.fixture(scope="module")
def eight(build, tokens):
    """float32 logits of one row eight times."""
    model = build("float32", **TWO_LAYERS).model
    return np.asarray(jax.jit(lambda m, t: m(t))(model, np.repeat(tokens[:1], 8, axis=0)))


@pytest.mark.codegen
def test_eight_equal_rows_are_bitwise_equal(eight):
    np.testing.assert_array_equal(eight, np.repeat(eight[:1], 8, axis=0))


@pytest.mark.codegen
def test_row_of_a_batch_equals_a_batch_of_one(logits, build, tokens, eight):
    one = logits(build("float32", **TWO_LAYERS).model, tokens[:1])
    np.testing.assert_allclose(eight[:1], one, atol=2e-5 * np.abs(one).max())


def test_tokens_do_not_see_the_future(logits, small, tokens):
    changed = tokens.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 67
    before, after = logits(small.model, tokens), logits(small.model, changed)
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert np.all(np.any(before[:, 12:] != after[:, 12:], axis=-1))


def test_single_token_gives_the_first_logits_of_a_sequence(logits, two_layers, tokens):
    model = two_layers.model
    expected = logits(model, tokens)[:, :1]
    np.testing.assert_allclose(logits(model, tokens[:, :1]), expected, atol=1e-12)


# ---- tracing


class LayerByLayer(NamedTuple):
    """A call outside jit: its logits and trace, and what of the layers it compiled, twice."""

    logits: np.ndarray
    sites: dict[str, np.ndarray]
    compiled: tuple[dict[str, int], dict[str, int]]


PIECES = {
    "mix": layer_file._mix.jitted,
    "dense": layer_file._feed_forward_dense.jitted,
    "route": layer_file._route.jitted,
    "experts": layer_file.expert_outputs,
    "weigh": layer_file.weigh_outputs,
    "gather": layer_file._gather.jitted,
}


@pytest.fixture(scope="module")
def outside_jit(small, tokens, mask):
    for piece in PIECES.values():
        piece.clear_cache()
    out, sites = traced(small.model, tokens, mask)
    first = {name: piece._cache_size() for name, piece in PIECES.items()}
    traced(small.model, tokens[::-1], mask[::-1])
    second = {name: piece._cache_size() for name, piece in PIECES.items()}
    sites = {name: np.asarray(value) for name, value in sites.items()}
    return LayerByLayer(np.asarray(out), sites, (first, second))


def names_outside_jit(request):
    return list(request.getfixturevalue("outside_jit").sites)


def names_under_jit(request):
    names = []
    small, tokens, mask = map(request.getfixturevalue, ("small", "tokens", "mask"))
    jax.eval_shape(lambda m: names.extend(traced(m, tokens, mask)[1]), small.model)
    return names


@pytest.mark.parametrize("names_of", [names_outside_jit, names_under_jit])
def test_trace_sites_follow_the_residual_plan(small, request, names_of):
    names, skeleton = names_of(request), small.model.skeleton
    for layer in skeleton.layers:
        prefix, plan = f"layers.{layer.index}.", skeleton.residual_plan(layer)
        inside = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
        assert tuple(n for n in inside if n in plan) == plan
        sublayers = {"attn.kda", "attn.dsa", "ffn.dense", "ffn.moe"}
        assert sublayers.intersection(inside) == sublayers.intersection(plan)
    of_layers = [int(n.split(".")[1]) for n in names if n.startswith("layers.")]
    assert of_layers == sorted(of_layers)
    assert names[0] == "embedding"
    assert tuple(names[-3:]) == skeleton.final_plan()


@pytest.fixture(scope="module")
def trace(outside_jit):
    return outside_jit.sites


def test_one_jit_gives_the_logits_of_layer_by_layer_with_a_trace(
    logits, small, tokens, mask, outside_jit
):
    plain = logits(small.model, tokens, mask)
    np.testing.assert_allclose(outside_jit.logits[mask], plain[mask], atol=1e-12)
    np.testing.assert_array_equal(outside_jit.logits, outside_jit.sites["final.head"])


def test_streams_are_averaged_without_weights_before_the_last_norm(trace):
    streams = trace["layers.4.ffn.expand"]
    np.testing.assert_allclose(trace["final.mean"], streams.mean(axis=2), atol=1e-13)


def test_mean_of_four_streams_by_hand():
    streams = jnp.asarray([1.0, 2.0, 3.0, 6.0]).reshape(1, 1, 4, 1)
    sites = {}
    read_out(streams, jnp.ones(1), jnp.ones((1, 1)), eps=0.0, record=sites.__setitem__)
    np.testing.assert_array_equal(sites["final.mean"], [[[3.0]]])


def test_sublayer_sees_the_normalised_collapse_of_the_streams(small, trace):
    streams = trace["layers.1.ffn.expand"]
    x = (trace["layers.2.attn.pre"][..., None] * streams).sum(2)
    np.testing.assert_allclose(trace["layers.2.attn.collapse"], x, atol=1e-13)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + small.config.rms_norm_eps)
    expected = x * small.arrays["layers.2.attn_norm"]
    np.testing.assert_allclose(trace["layers.2.attn.norm"], expected, atol=1e-12)


def test_streams_start_as_copies_of_the_embedding(small, tokens, trace):
    embedded = small.arrays["embed_tokens"][tokens]
    np.testing.assert_array_equal(trace["embedding"], embedded)
    collapsed = trace["layers.0.attn.pre"].sum(-1, keepdims=True) * embedded
    np.testing.assert_allclose(trace["layers.0.attn.collapse"], collapsed, atol=1e-13)


def test_selection_is_shared_across_kda_layers(trace):
    np.testing.assert_array_equal(
        trace["layers.3.attn.selection"], trace["layers.1.attn.selection"]
    )
    assert "layers.1.attn.pools" in trace
    assert "layers.3.attn.pools" not in trace


def test_shared_layer_takes_the_last_full_choice(build, tokens):
    small = build(
        num_hidden_layers=3,
        layer_types=["deepseek_sparse_attention"] * 3,
        mlp_layer_types=["dense"] * 3,
        indexer_types=["full", "full", "shared"],
    )
    _, sites = traced(small.model, tokens, None)
    chosen = [np.asarray(sites[f"layers.{i}.attn.selection"]) for i in range(3)]
    np.testing.assert_array_equal(chosen[2], chosen[1])
    assert np.any(chosen[1] != chosen[0])


# ---- compilation


def test_pieces_of_one_kind_are_compiled_once(outside_jit):
    # Mixers: KDA, DSA, DSA that shares. Of the rest one each, and nothing for other tokens.
    first, second = outside_jit.compiled
    assert first == {"mix": 3, "dense": 1, "route": 1, "experts": 1, "weigh": 1, "gather": 1}
    assert second == first


# ---- refusals


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 1]])
def test_mask_with_a_hole_is_refused(small, row):
    mask = np.array([[1, 1, 1, 1], row])
    with pytest.raises(ValueError, match="row 1 are not contiguous"):
        small.model(np.zeros((2, 4), int), mask)


@pytest.mark.parametrize(("token", "shown"), [(67, "67"), (-1, "-1")])
def test_token_outside_the_vocabulary_is_refused(small, token, shown):
    with pytest.raises(ValueError, match=rf"ids from 0 to 66, got {shown}$"):
        small.model(np.array([[0, token, 66]]))


def test_mask_of_another_shape_is_refused(small):
    with pytest.raises(ValueError, match=r"shape \(1, 3\), got \(1, 4\)"):
        small.model(np.zeros((1, 3), int), np.ones((1, 4), bool))


@pytest.mark.parametrize(
    ("tokens", "came"),
    [
        ([1, 2, 3], r"int64 \(3,\)"),
        (np.zeros((1, 0), int), r"int64 \(1, 0\)"),
        (np.zeros((0, 3), int), r"int64 \(0, 3\)"),
        ([[1.0, 2.0]], r"float64 \(1, 2\)"),
        ([[True, False]], r"bool \(1, 2\)"),
    ],
)
def test_what_is_no_batch_of_tokens_is_refused(small, tokens, came):
    with pytest.raises(ValueError, match=rf"integers \[B, T\], at least one, got {came}"):
        small.model(tokens)


def test_mask_of_other_values_than_0_and_1_is_refused(small):
    with pytest.raises(ValueError, match="1 for real tokens and 0 for padding"):
        small.model(np.zeros((1, 3), int), np.array([[0.5, 1, 1]]))


def test_checking_inputs_of_a_new_length_compiles_nothing():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    )
    try:
        for length, given in ((1201, None), (1202, np.ones((2, 1202), int))):
            _, mask = checked_inputs(np.zeros((2, length), int), given, 5)
            assert mask.dtype == bool and mask.shape == (2, length) and mask.all()
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


def test_token_outside_the_vocabulary_is_nan_under_jit_where_it_cannot_be_refused(small):
    logits = jax.jit(TextModel.__call__)(small.model, np.array([[67, 1, 2], [3, 1, 2]]))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


def test_parameters_that_do_not_fit_are_named(small):
    def fill(changed, removed=()):
        arrays = {k: v for k, v in {**small.arrays, **changed}.items() if k not in removed}
        TextModel.from_leaves(small.config, arrays)

    name = "layers.1.attn.indexer.ape"
    with pytest.raises(ValueError, match=rf"^{name}: .*\(4, 5\), got none"):
        fill({}, removed=(name,))
    with pytest.raises(ValueError, match=rf"^{name}: .*\(4, 5\), got \(5, 4\)"):
        fill({name: np.zeros((5, 4))})
    with pytest.raises(ValueError, match=r"called layers\.3\.attn\.indexer\.ape$"):
        fill({"layers.3.attn.indexer.ape": np.zeros((4, 5))})


# ---- dtypes


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_logits_are_float32_or_float64(build, tokens, dtype):
    model = build(dtype).model
    out, sites = jax.eval_shape(traced, model, tokens, np.ones(tokens.shape, bool))
    wide = jnp.promote_types(dtype, jnp.float32)
    assert out.dtype == wide
    # The streams and everything that flows through them keep the dtype of the model; the islands
    # are float32, or float64 in a float64 model, and nothing is float32 there.
    islands = ["pre", "post", "comb", "g", "beta", "state"]
    islands += ["logits", "scores", "weights", "index_scores"]
    for name, site in sites.items():
        if jnp.issubdtype(site.dtype, jnp.floating):
            is_wide = name.split(".")[-1] in (*islands, "head")
            assert site.dtype == (wide if is_wide else dtype), name


def test_float32_logits_are_near_the_float64_ones(logits, two_layers, tokens, eight):
    expected = logits(two_layers.model, tokens)[0]
    assert np.abs(eight[0] - expected).max() < 1e-4 * np.abs(expected).max()


def test_bfloat16_logits_are_like_the_float64_ones(logits, build, two_layers, tokens, mask):
    expected = logits(two_layers.model, tokens, mask)[mask]
    out = logits(build("bfloat16", **TWO_LAYERS).model, tokens, mask)[mask]
    # A few tokens fall to other experts and pools; most do not.
    assert np.median(np.abs(out - expected)) < 0.05 * expected.std()


# ---- gradients


@pytest.fixture(scope="module")
def gradients(two_layers, tokens, mask):
    def loss(arrays):
        out = TextModel.from_leaves(two_layers.config, arrays)(tokens, mask)
        return -jnp.mean(jax.nn.log_softmax(out)[..., 5], where=mask)

    return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(two_layers.arrays))


def test_gradients_are_finite_and_reach_every_parameter_but_the_indexers(gradients):
    for name, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)), name
        # No gradient goes through the choice of tokens, nor through the choice of experts.
        has_none = ".indexer." in name or name.endswith("router.bias")
        assert np.any(gradient) != has_none, name


@pytest.mark.parametrize(
    "name",
    ["embed_tokens", "layers.0.attn.dt_bias", "layers.1.attn.kv_b_proj", "layers.1.attn_hc.base"],
)
def test_gradients_are_the_slope_of_the_loss(logits, two_layers, tokens, mask, gradients, name):
    direction = np.random.default_rng(0).standard_normal(two_layers.arrays[name].shape)

    def loss(step):
        model = two_layers.with_arrays({name: two_layers.arrays[name] + step * direction})
        out = logits(model, tokens, mask)
        return -np.asarray(jax.nn.log_softmax(out))[..., 5][mask].mean()

    # Small enough to flip no choice, which would be a jump.
    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    np.testing.assert_allclose(np.sum(direction * gradients[name]), slope, rtol=1e-5, atol=1e-9)


# ---- the released geometry


@pytest.fixture(scope="module")
def release():
    config = load_config(packaged_config("glm5_3_flash"))
    return TextModel(config, Params(leaves(config, mtp=False)))


def test_release_has_its_layers_in_order(release):
    for i, (plan, layer) in enumerate(zip(release.skeleton.layers, release.layers, strict=True)):
        assert plan.index == i
        assert isinstance(layer.attn, KDA) == (i % 4 != 3)
        assert hasattr(layer.ffn, "router") == (i >= 3)
    assert len(release.layers) == 45
    assert isinstance(release.layers[44].attn, KDA)


def test_every_layer_gets_its_own_parameters(small):
    config = small.config
    filled = {}
    for path, leaf in leaves(config).items():
        layer = int(path.split(".")[1]) if path.startswith("layers.") else -1
        filled[path] = np.full(leaf.shape, layer, np.float32)
    model = TextModel.from_leaves(config, filled)
    for i, layer in enumerate(model.layers):
        parameters = jax.tree.leaves(layer)
        assert parameters and all(np.all(np.asarray(p) == i) for p in parameters)


def test_release_maps_tokens_to_logits(release):
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    out = jax.eval_shape(lambda model, t: model(t), release, tokens)
    assert (out.shape, out.dtype) == ((2, 9, release.config.vocab_size), jnp.float32)


# ---- which implementation runs the recurrence


def test_implementation_of_a_call_wins_over_the_models_own(build, tokens):
    model = build(**TWO_LAYERS).model
    chosen = model(tokens, implementation="reference")
    np.testing.assert_allclose(chosen, model(tokens), atol=1e-11)
    try:
        model.implementation = "nonesuch"
        with pytest.raises(ValueError, match=r"implementation must be .* 'nonesuch'"):
            model(tokens)
        with pytest.raises(ValueError, match=r"implementation must be .* 'nonesuch'"):
            model.decode(tokens[:, 0], model.init_cache(len(tokens), 4))
        np.testing.assert_array_equal(model(tokens, implementation="reference"), chosen)
    finally:
        model.implementation = None


def test_first_implementation_that_can_run_does(two_layers, tokens):
    # The GPU kernel takes no float64, on any machine.
    model, cache = two_layers.model, two_layers.model.init_cache(len(tokens), 4, rewind=1)
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        model.prefill(tokens[:, :2], cache, implementation="mosaic_gpu")
    fallback, _ = model.prefill(tokens[:, :2], cache, implementation=("mosaic_gpu", "reference"))
    expected, _ = model.prefill(tokens[:, :2], cache)
    np.testing.assert_allclose(fallback, expected, atol=1e-11)
