"""The text model: padding, batches, traces, compilation, dtypes, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import model as model_file
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import load_config
from glm5_jax.model import TextModel
from glm5_jax.nn.kda import KDA
from glm5_jax.nn.params import Params
from glm5_jax.specs import leaves

run = jax.jit(lambda model, tokens, mask: model(tokens, mask))


def logits(model, tokens, mask=None):
    mask = np.ones(tokens.shape, bool) if mask is None else mask
    return np.asarray(run(model, tokens, mask))


@functools.partial(jax.jit, static_argnames="names")
def traced(model, tokens, mask, names=None):
    """Logits and the trace; `names` collects the order, which a dictionary loses under jit."""
    sites = {}

    def record(name, value):
        assert name not in sites, f"{name} is recorded twice"
        sites[name] = value

    out = model(tokens, mask, record=record)
    if names is not None:
        names.extend(sites)
    return out, sites


class Names(list):
    """A list that jit takes as a static argument."""

    __hash__ = object.__hash__


def padded_left(tokens, padding, length=None):
    """[1, length] tokens and mask: the row behind `padding` padded positions."""
    length = len(tokens) + padding if length is None else length
    out = np.full((1, length), 7)
    out[0, padding : padding + len(tokens)] = tokens
    position = np.arange(length)
    return out, ((position >= padding) & (position < padding + len(tokens)))[None]


# ---- padding and batches


@pytest.fixture(scope="module")
def alone(small, tokens):
    """Logits of the first 17 tokens of a row, without padding (and six real tokens after them)."""
    return logits(small.model, tokens)[0, :17]


@pytest.mark.parametrize("padding", [1, 2, 3, 4, 5])
def test_left_padding_changes_no_logits(small, tokens, alone, padding):
    # Always [3, 23], of which one row is this one: one compilation for every padding.
    batch, mask = tokens.copy(), np.ones(tokens.shape, bool)
    row, row_mask = padded_left(tokens[0, : 23 - padding], padding)
    batch[1], mask[1] = row[0], row_mask[0]
    out = logits(small.model, batch, mask)
    np.testing.assert_allclose(out[1, padding : padding + 17], alone, atol=1e-12)
    np.testing.assert_allclose(out[0, :17], alone, atol=1e-12)


def test_left_padding_of_64_in_a_batch_of_one_changes_no_logits(small, tokens, alone):
    row, mask = padded_left(tokens[0, :17], 64)
    np.testing.assert_allclose(logits(small.model, row, mask)[0, 64:], alone, atol=1e-12)


def test_left_padding_of_a_batch_of_one_changes_no_logits(small, tokens, alone):
    outs = [logits(small.model, *padded_left(tokens[0, :17], p, 23)) for p in (0, 3, 6)]
    for padding, out in zip((0, 3, 6), outs, strict=True):
        np.testing.assert_allclose(out[0, padding : padding + 17], alone, atol=1e-12)


def test_order_is_known_without_positions(small, tokens, alone):
    # Shifting by padding shifts every trace and changes none; swapping two tokens does.
    swapped = tokens.copy()
    swapped[0, [2, 9]] = tokens[0, [9, 2]]
    out = logits(small.model, swapped)[0, :17]
    np.testing.assert_allclose(out[:2], alone[:2], atol=1e-12)
    assert np.abs(out[10:] - alone[10:]).max() > 1e-3


def test_padding_on_the_right_changes_no_logits(small, tokens, alone):
    mask = np.broadcast_to(np.arange(23) < 17, tokens.shape)
    np.testing.assert_allclose(logits(small.model, tokens, mask)[0, :17], alone, atol=1e-12)


def test_row_without_real_tokens_is_finite_and_changes_no_other_row(small, tokens, mask):
    expected = logits(small.model, tokens, mask)
    empty = mask.copy()
    empty[1] = False
    out = logits(small.model, tokens, empty)
    assert np.all(np.isfinite(out))
    np.testing.assert_array_equal(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("empty_row", [False, True])
def test_nan_in_the_embedding_of_a_padded_token_reaches_no_real_one(
    small, tokens, mask, empty_row
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


def test_eight_equal_rows_are_bitwise_equal_and_equal_to_a_batch_of_one(build, tokens):
    model = build("float32").model
    eight = logits(model, np.repeat(tokens[:1], 8, axis=0))
    np.testing.assert_array_equal(eight, np.repeat(eight[:1], 8, axis=0))
    one = logits(model, tokens[:1])
    np.testing.assert_allclose(eight[:1], one, atol=2e-5 * np.abs(one).max())


def test_tokens_do_not_see_the_future(small, tokens):
    changed = tokens.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 67
    before, after = logits(small.model, tokens), logits(small.model, changed)
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert np.all(np.any(before[:, 12:] != after[:, 12:], axis=-1))


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_sequences_are_the_beginning_of_long_ones(small, tokens, length):
    expected = logits(small.model, tokens)[:, :length]
    np.testing.assert_allclose(logits(small.model, tokens[:, :length]), expected, atol=1e-12)


# ---- tracing


@pytest.mark.parametrize("jitted", [False, True])
def test_trace_sites_follow_the_residual_plan(small, tokens, mask, jitted):
    names = Names()
    if jitted:
        traced(small.model, tokens, mask, names)
    else:
        small.model(tokens, mask, record=lambda name, _: names.append(name))
    skeleton = small.model.skeleton
    for layer in skeleton.layers:
        prefix, plan = f"layers.{layer.index}.", skeleton.residual_plan(layer)
        inside = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
        assert tuple(n for n in inside if n in plan) == plan
        others = {f"{site}.{m}" for site in ("attn", "ffn") for m in ("kda", "dsa", "dense", "moe")}
        assert not others.difference(plan).intersection(inside)
    of_layers = [n.split(".")[1] for n in names if n.startswith("layers.")]
    assert of_layers == sorted(of_layers, key=int)
    assert names[0] == "embedding"
    assert tuple(names[-3:]) == skeleton.final_plan()


@pytest.fixture(scope="module")
def trace(small, tokens, mask):
    out, sites = traced(small.model, tokens, mask)
    return jax.tree.map(np.asarray, {**sites, "logits": out})


def test_tracing_changes_no_logits(small, tokens, mask, trace):
    np.testing.assert_allclose(trace["logits"], logits(small.model, tokens, mask), atol=1e-12)
    np.testing.assert_array_equal(trace["logits"], trace["final.head"])


def test_layer_by_layer_gives_the_trace_of_one_jit(small, tokens, mask, trace):
    sites = {}
    out = small.model(tokens, mask, record=sites.__setitem__)
    assert sites.keys() == trace.keys() - {"logits"}
    np.testing.assert_allclose(out, trace["logits"], atol=1e-12)
    for name, value in sites.items():
        real = mask if value.shape[:2] == mask.shape else slice(None)
        np.testing.assert_allclose(np.asarray(value)[real], trace[name][real], atol=1e-11)


def test_streams_are_averaged_without_weights_before_the_last_norm(trace):
    streams = trace["layers.4.ffn.expand"]
    np.testing.assert_allclose(trace["final.mean"], streams.mean(axis=2), atol=1e-13)


def test_mean_of_four_streams_by_hand():
    streams = jnp.asarray([1.0, 2.0, 3.0, 6.0]).reshape(1, 1, 4, 1)
    _, sites = model_file._read_out(streams, jnp.ones(1), jnp.ones((1, 1)), 0.0, True)
    np.testing.assert_array_equal(sites["final.mean"], [[[3.0]]])


def test_sublayer_sees_the_normalised_collapse_of_the_streams(small, trace, mask):
    x = trace["layers.2.attn.collapse"]
    eps = small.config.rms_norm_eps
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    expected = expected * small.arrays["layers.2.attn_norm"]
    np.testing.assert_allclose(trace["layers.2.attn.norm"], expected, atol=1e-13)
    streams = trace["layers.1.ffn.expand"]
    collapsed = (trace["layers.2.attn.pre"][..., None] * streams).sum(2)
    np.testing.assert_allclose(x, collapsed, atol=1e-13)


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
    kinds = ["full", "full", "full", "shared", "shared"]
    mixers = ["deepseek_sparse_attention"] * 3 + ["linear_attention", "deepseek_sparse_attention"]
    small = build(indexer_types=kinds, layer_types=mixers, mlp_layer_types=["dense"] * 5)
    sites = {}
    small.model(tokens, record=sites.__setitem__)
    chosen = [np.asarray(sites[f"layers.{i}.attn.selection"]) for i in (0, 1, 2, 4)]
    np.testing.assert_array_equal(chosen[3], chosen[2])
    assert np.any(chosen[2] != chosen[1])


# ---- compilation


def test_layers_of_one_kind_are_compiled_once(small, tokens):
    before = model_file._run_layer._cache_size()
    small.model(tokens[:, :9])
    # KDA+dense, DSA+MoE, KDA+MoE (twice), shared DSA+MoE.
    assert model_file._run_layer._cache_size() - before == 4
    small.model(tokens[:, :9] + 1 - tokens[:, :9] // 66, np.ones((3, 9), bool))
    assert model_file._run_layer._cache_size() - before == 4


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


def test_tokens_without_a_batch_are_refused(small):
    with pytest.raises(ValueError, match=r"shape \[B, T\], got \(3,\)"):
        small.model(np.zeros(3, int))


def test_parameters_that_do_not_fit_are_named(small):
    def fill(changed, removed=()):
        arrays = {k: v for k, v in {**small.arrays, **changed}.items() if k not in removed}
        TextModel.from_leaves(small.config, arrays)

    name = "layers.1.attn.indexer.ape"
    with pytest.raises(ValueError, match=rf"^{name}: .*\(4, 5\), got none"):
        fill({}, removed=(name,))
    with pytest.raises(ValueError, match=rf"^{name}: .*\(4, 5\), got \(5, 4\)"):
        fill({name: np.zeros((5, 4))})
    with pytest.raises(ValueError, match="called layers.3.attn.indexer.ape"):
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
    islands = ("pre", "post", "comb", "g", "beta", "state", "logits", "weights", "index_scores")
    for name, site in sites.items():
        if jnp.issubdtype(site.dtype, jnp.floating):
            is_wide = name.split(".")[-1] in (*islands, "head")
            assert site.dtype == (wide if is_wide else dtype), name


def test_float32_logits_are_near_the_float64_ones(build, small, tokens, mask):
    expected = logits(small.model, tokens, mask)
    out = logits(build("float32").model, tokens, mask)
    assert np.abs(out - expected)[mask].max() < 1e-4 * np.abs(expected).max()


def test_bfloat16_logits_are_finite_and_like_the_float64_ones(build, small, tokens, mask):
    expected = logits(small.model, tokens, mask)[mask]
    out = logits(build("bfloat16").model, tokens, mask)[mask]
    # A few tokens fall to other experts and pools; most do not.
    assert np.median(np.abs(out - expected)) < 0.05 * expected.std()


# ---- gradients


@pytest.fixture(scope="module")
def gradients(small, tokens, mask):
    def loss(arrays):
        out = TextModel.from_leaves(small.config, arrays)(tokens, mask)
        return -jnp.mean(jax.nn.log_softmax(out)[..., 5], where=mask)

    return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(small.arrays))


def test_gradients_are_finite_and_reach_every_parameter_but_the_indexers(gradients):
    for name, gradient in gradients.items():
        assert np.all(np.isfinite(gradient)), name
        # No gradient goes through the choice of tokens, nor through the choice of experts.
        has_none = ".indexer." in name or name.endswith("router.bias")
        assert np.any(gradient) != has_none, name


@pytest.mark.parametrize(
    "name",
    ["embed_tokens", "layers.0.attn.dt_bias", "layers.1.attn.kv_b_proj", "layers.2.attn_hc.base"],
)
def test_gradients_are_the_slope_of_the_loss(small, tokens, mask, gradients, name):
    direction = np.random.default_rng(0).standard_normal(small.arrays[name].shape)

    def loss(step):
        model = small.with_arrays({name: small.arrays[name] + step * direction})
        out = logits(model, tokens, mask)
        top = out - np.log(np.exp(out).sum(-1, keepdims=True))
        return -top[..., 5][mask].mean()

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
