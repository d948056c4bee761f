import math

import ml_dtypes
import numpy as np
import pytest

from glm5_jax.checkpoint.bind import bind, passthrough, read_into, read_leaf
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.errors import CheckpointError
from glm5_jax.specs import leaves

PREFIX = "model.language_model."
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}


def random_values(tensors, seed=0):
    """{name: array in its stored dtype}"""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
        for name, (dtype, shape) in tensors.items()
    }


def headers(values):
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {name: (names[value.dtype], value.shape) for name, value in values.items()}


def fused(values):
    """The same weights as transformers holds them in its modules, written out by hand."""
    native, experts = {}, {}
    for name, value in values.items():
        for mark in ("A_log", "dt_bias", "f_a_proj", "f_b_proj"):
            name = name.replace(f"self_attn.{mark}", f"self_attn.forget_gate.{mark}")
        for site in ("attn", "ffn"):
            name = name.replace(f"hc_{site}_", f"{site}_hc.")
        if ".mlp.experts." in name:
            head, _, tail = name.partition(".mlp.experts.")
            expert, matrix, _ = tail.split(".")
            experts.setdefault(head, {})[int(expert), matrix] = value
        elif "q_conv1d" in name:
            parts = [values[name.replace("q_conv1d", f"{x}_conv1d")] for x in "qkv"]
            native[name.replace("q_conv1d", "conv1d")] = np.concatenate(parts)
        elif "_conv1d" not in name:
            native[name] = value
    for head, members in experts.items():
        count = len(members) // 3
        native[f"{head}.mlp.experts.gate_up_proj"] = np.stack(
            [np.concatenate([members[e, "gate_proj"], members[e, "up_proj"]]) for e in range(count)]
        )
        native[f"{head}.mlp.experts.down_proj"] = np.stack(
            [members[e, "down_proj"] for e in range(count)]
        )
    return native


@pytest.fixture(scope="module")
def place(write, config_file, tmp_path_factory):
    """Write arrays as a checkpoint and open it."""

    def make(values, config=None, **kwargs):
        directory = tmp_path_factory.mktemp("bind")
        data = {name: value.tobytes() for name, value in values.items()}
        config = config or config_file("tiny")
        return open_checkpoint(write(directory, headers(values), config, data=data, **kwargs))

    return make


@pytest.fixture(scope="module")
def values(small):
    return random_values(small())


@pytest.fixture(scope="module")
def tree(place, values):
    return read_all(place(values, shards=3))


def read_all(checkpoint, **options):
    bound = bind(checkpoint, checkpoint.config, **options)
    return {path: read_leaf(checkpoint, leaf) for path, leaf in bound.items()}


def assert_same(tree, other):
    assert tree.keys() == other.keys()
    for path, value in tree.items():
        assert value.dtype == other[path].dtype, path
        assert value.tobytes() == other[path].tobytes(), path


def test_tree_is_the_spec_tables_tree(place, values, tree):
    checkpoint = place(values)
    expected = leaves(checkpoint.config)
    assert list(tree) == list(expected)
    for path, leaf in expected.items():
        assert tree[path].shape == leaf.shape, path
        assert tree[path].dtype == DTYPES[leaf.dtype], path


def test_an_untransformed_leaf_is_its_source_bit_for_bit(values, tree):
    for path, name in {
        "embed_tokens": PREFIX + "embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "layers.3.attn.kv_b_proj": PREFIX + "layers.3.self_attn.kv_b_proj.weight",
        "layers.0.attn.A_log": PREFIX + "layers.0.self_attn.A_log",
        "layers.4.ffn_hc.base": PREFIX + "layers.4.hc_ffn_base",
        "layers.1.ffn.router.bias": PREFIX + "layers.1.mlp.gate.e_score_correction_bias",
        "mtp.layer.attn.indexer.ape": PREFIX
        + "layers.5.self_attn.indexer.index_kpool_compress_ape",
        "mtp.shared_head_norm": PREFIX + "layers.5.shared_head.norm.weight",
    }.items():
        assert tree[path].tobytes() == values[name].tobytes(), path


def test_convolutions_are_joined_in_the_order_q_k_v(values, tree):
    for layer in (0, 1, 2, 4):
        parts = [values[f"{PREFIX}layers.{layer}.self_attn.{x}_conv1d.weight"] for x in "qkv"]
        expected = np.concatenate([part[:, 0, :] for part in parts])
        np.testing.assert_array_equal(tree[f"layers.{layer}.attn.conv"], expected)


def test_experts_are_stacked_in_their_own_order(values, tree):
    # As text, expert 10 would come before expert 2.
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        stack = tree[f"layers.2.ffn.experts.{matrix}"]
        assert len(stack) == 16
        for expert, value in enumerate(stack):
            name = f"{PREFIX}layers.2.mlp.experts.{expert}.{matrix}.weight"
            np.testing.assert_array_equal(value, values[name])


def test_every_layer_gets_its_own_tensors(place, small):
    filled = {
        name: np.full(shape, int(name.split("layers.")[1].split(".")[0]), DTYPES[dtype])
        if "layers." in name and "visual" not in name
        else np.full(shape, 77, DTYPES[dtype])
        for name, (dtype, shape) in small().items()
    }
    for path, value in read_all(place(filled)).items():
        layer = path.split(".")[1] if path.startswith("layers.") else "77"
        layer = "5" if path.startswith("mtp.") else layer
        assert (value == float(layer)).all(), path


def test_released_and_native_names_give_one_tree(place, values, tree):
    native = fused(values)
    assert len(native) < len(values)
    assert_same(tree, read_all(place(native, shards=2)))


@pytest.mark.parametrize("naming", ["released", "native"])
def test_both_text_prefixes_give_one_tree(place, values, tree, naming):
    stored = values if naming == "released" else fused(values)
    short = {name.replace(PREFIX, "model.", 1): value for name, value in stored.items()}
    assert_same(tree, read_all(place(short)))


def test_mtp_side_file_gives_the_same_tree(place, values, tree, write_shard):
    trunk = {name: value for name, value in values.items() if ".layers.5." not in name}
    side = {name: value for name, value in values.items() if name not in trunk}
    checkpoint = place(trunk)
    data = {name: value.tobytes() for name, value in side.items()}
    write_shard(checkpoint.directory / "mtp.safetensors", headers(side), data)
    assert_same(tree, read_all(open_checkpoint(checkpoint.directory)))


def test_declined_or_absent_mtp_layer_gives_the_trunk(place, values, tree):
    trunk = {path: value for path, value in tree.items() if not path.startswith("mtp.")}
    assert len(trunk) < len(tree)
    assert_same(trunk, read_all(place(values), mtp=False))
    without = {name: value for name, value in values.items() if ".layers.5." not in name}
    assert_same(trunk, read_all(place(without)))


def test_copies_in_the_mtp_layer_do_not_replace_the_main_embedding_and_head(place, values, tree):
    copies = {
        f"{PREFIX}layers.5.embed_tokens.weight": np.ones((224, 48), DTYPES["BF16"]),
        f"{PREFIX}layers.5.shared_head.head.weight": np.ones((224, 48), DTYPES["BF16"]),
    }
    checkpoint = place(values | copies)
    assert_same(tree, read_all(checkpoint))
    assert copies.keys() <= passthrough(checkpoint, checkpoint.config).keys()
    assert not copies.keys() & passthrough(checkpoint, checkpoint.config, mtp=False).keys()


def test_chosen_layers_come_with_what_lies_outside_the_layers(place, values, tree):
    kept = ("layers.3.", "mtp.", "embed_tokens", "norm", "lm_head")
    assert_same(
        {path: value for path, value in tree.items() if path.startswith(kept)},
        read_all(place(values), layers="3,5"),
    )


@pytest.mark.parametrize(
    "name",
    [
        PREFIX + "layers.2.mlp.experts.3.up_proj.weight",
        PREFIX + "layers.0.hc_ffn_base",
        PREFIX + "layers.3.self_attn.indexer.k_norm.bias",
        PREFIX + "layers.5.self_attn.indexer.index_kpool_compress_ape",
        PREFIX + "layers.1.self_attn.k_conv1d.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_an_error_and_never_a_fill(place, values, name):
    checkpoint = place({n: value for n, value in values.items() if n != name})
    with pytest.raises(CheckpointError, match=f"{name}: missing") as caught:
        bind(checkpoint, checkpoint.config)
    assert str(checkpoint.directory) in str(caught.value) and "\n" not in str(caught.value)


def test_many_faults_are_one_line_that_counts_the_rest(place, values):
    checkpoint = place({n: value for n, value in values.items() if ".experts." not in n})
    with pytest.raises(CheckpointError, match=r"and \d+ more.*glm5-jax audit"):
        bind(checkpoint, checkpoint.config)


def test_float32_sources_stay_float32_and_one_narrow_expert_is_widened_exactly(place, values):
    wide = {name: value.astype(np.float32) for name, value in values.items()}
    odd = f"{PREFIX}layers.2.mlp.experts.7.up_proj.weight"
    wide[odd] = values[odd]
    tree = read_all(place(wide))
    assert {value.dtype for value in tree.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        tree["layers.2.ffn.experts.up_proj"][7], values[odd].astype(np.float32)
    )
    np.testing.assert_array_equal(
        tree["layers.2.ffn.experts.up_proj"][8], wide[odd.replace(".7.", ".8.")]
    )


def test_rounded_decay_is_bound_only_when_allowed_and_as_stored(place, values):
    name = PREFIX + "layers.0.self_attn.A_log"
    checkpoint = place(values | {name: values[name].astype(ml_dtypes.bfloat16)})
    with pytest.raises(CheckpointError, match=r"A_log: expected F32.*--allow-bf16"):
        bind(checkpoint, checkpoint.config)
    tree = read_all(checkpoint, allow_bf16=True)
    assert tree["layers.0.attn.A_log"].dtype == ml_dtypes.bfloat16


def test_what_is_known_and_unbound_passes_through_verbatim(place, values):
    scale = f"{PREFIX}layers.3.self_attn.q_a_proj.input_scale"
    checkpoint = place(values | {scale: np.float32(7)})
    carried = passthrough(checkpoint, checkpoint.config)
    assert carried.keys() == {scale} | {n for n in values if n.startswith("model.visual.")}
    assert all(checkpoint.tensors[name] is tensor for name, tensor in carried.items())
    assert scale not in passthrough(checkpoint, checkpoint.config, layers={0})
    bound = {source.tensor.name for leaf in bind(checkpoint, checkpoint.config).values()
             for source in leaf.sources}  # fmt: skip
    assert bound | carried.keys() == checkpoint.tensors.keys()
    assert not bound & carried.keys()


def test_activation_scale_changes_no_weight(place, values, tree):
    scales = {
        f"{PREFIX}layers.3.self_attn.q_a_proj.input_scale": np.float32(7),
        f"{PREFIX}layers.3.self_attn.kv_b_proj.k_scale": np.float32(7),
    }
    assert_same(tree, read_all(place(values | scales)))


def test_leaf_reads_only_into_an_array_that_fits_it(place, values):
    checkpoint = place(values)
    leaf = bind(checkpoint, checkpoint.config)["layers.2.ffn.experts.gate_proj"]
    (bound,) = leaf.arrays
    assert leaf.nbytes == bound.nbytes == math.prod(bound.shape) * 2
    out = np.zeros(bound.shape, bound.dtype)
    read_into(checkpoint, bound, out)
    np.testing.assert_array_equal(out, read_leaf(checkpoint, leaf))
    for wrong in (
        out.astype(np.float32),
        out[1:],
        np.zeros((16, 48, 40), bound.dtype).swapaxes(1, 2),
    ):
        with pytest.raises(ValueError, match="out must be contiguous bfloat16"):
            read_into(checkpoint, bound, wrong)
