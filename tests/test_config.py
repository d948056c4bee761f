"""What a config.json may say, in which words, and what is refused."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glm5_jax
from glm5_jax.config import ModelConfig, QuantizationConfig, load_config, parse_config
from glm5_jax.config_fields import TEXT_FIELDS, TEXT_IGNORED, VISION_FIELDS
from glm5_jax.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
GOLDEN = Path(__file__).parent / "golden"
KDA, DSA = "linear_attention", "deepseek_sparse_attention"


def raw_config(name="tiny"):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def nested(**changes):
    """tiny.json with text fields changed; a value of `...` removes the field."""
    raw = raw_config()
    for key, value in changes.items():
        raw["text_config"].pop(key, None)
        if value is not ...:
            raw["text_config"][key] = value
    return raw


def flat(**changes):
    """The same, with the text fields at the top level."""
    raw = nested(**changes)
    text = raw.pop("text_config")
    return {**raw, **text, "model_type": "glm5_next_text"}


def all_dsa(layers, **changes):
    """A stack of DSA layers only, its indexer fields as given."""
    return nested(
        **{
            "num_hidden_layers": layers,
            "layer_types": [DSA] * layers,
            "mlp_layer_types": ["sparse"] * layers,
            "first_k_dense_replace": ...,
            "linear_attn_config": ...,
            "indexer_types": ...,
            **changes,
        }
    )


def linear(**changes):
    """linear_attn_config of tiny.json with some keys changed (`...` removes)."""
    values = {**raw_config()["text_config"]["linear_attn_config"], **changes}
    return {key: value for key, value in values.items() if value is not ...}


# ---- the three configs ----------------------------------------------------------------------


def test_release_config_is_the_published_geometry():
    config = load_config(CONFIGS / "glm5_3_flash.json")
    assert config.num_hidden_layers == 45 and config.num_nextn_predict_layers == 1
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (
        4096,
        154880,
        12288,
    )
    assert (config.linear_num_heads, config.linear_head_dim) == (64, 128)
    assert (config.linear_conv_kernel_dim, config.linear_lower_bound) == (4, -5.0)
    assert (config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank) == (64, 1536, 512)
    assert (config.qk_nope_head_dim, config.v_head_dim) == (256, 256)
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (32, 128, 2048)
    assert (config.index_kpool, config.index_kpool_always_select_tail) == (4, True)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (
        288,
        8,
        1,
    )
    assert (config.moe_intermediate_size, config.routed_scaling_factor) == (2048, 2.5)
    assert (config.hc_mult, config.hc_eps, config.hc_sinkhorn_iters) == (4, 1e-6, 20)
    assert (config.rms_norm_eps, config.swiglu_limit) == (1e-5, 10.0)
    assert config.layer_types.count("kda") == 34 and config.layer_types.count("dsa") == 11
    assert config.mlp_layer_types == ("dense",) * 3 + ("moe",) * 42
    assert config.eos_token_ids == (154820, 154827, 154829) and config.pad_token_id == 154820
    assert config.vision is not None and config.vision.depth == 24
    assert config.quantization is None
    assert config.overridden == () and config.defaulted == ()


def test_tiny_has_no_two_dims_that_a_transposition_could_exchange():
    config = load_config(CONFIGS / "tiny.json")
    assert config.layer_types == ("kda", "kda", "kda", "dsa", "kda")
    assert config.mlp_layer_types == ("dense", "moe", "moe", "moe", "moe")
    assert config.num_nextn_predict_layers == 1 and config.vision is not None
    assert config.index_n_heads >= 12
    d = config.dims
    letters = ("Vo", "X", "F", "I", "H", "D", "K", "A", "R", "Rq", "N", "V", "HI", "DI", "E")
    sizes = [d[letter] for letter in letters]
    sizes += [d["H"] * d["D"], 3 * d["H"] * d["D"], d["A"] * d["N"], d["A"] * d["V"]]
    sizes += [d["A"] * (d["N"] + d["V"]), d["HI"] * d["DI"], d["M"] * d["X"]]
    assert len(set(sizes)) == len(sizes)
    assert min(config.eos_token_ids) >= 0 and max(config.eos_token_ids) < config.vocab_size


def test_bench_is_eight_layers_of_width_512():
    config = load_config(CONFIGS / "bench.json")
    assert (config.num_hidden_layers, config.hidden_size) == (8, 512)
    assert (config.linear_num_heads, config.linear_head_dim) == (8, 128)
    assert config.layer_types == ("kda", "kda", "kda", "dsa") * 2


@pytest.mark.parametrize("name", ["glm5_3_flash", "tiny", "bench"])
def test_token_ids_of_our_configs_lie_inside_their_vocabulary(name):
    raw = raw_config(name)
    ids = [value for key, value in raw.items() if key.endswith("_token_id")]
    assert len(set(ids)) == 6
    assert max(ids) < raw["text_config"]["vocab_size"]
    assert raw["vision_config"]["out_hidden_size"] == raw["text_config"]["hidden_size"]


# ---- nested and flat ------------------------------------------------------------------------


def test_text_fields_may_stand_at_the_top_level():
    assert parse_config(flat()) == parse_config(nested())
    assert parse_config({**flat(), "model_type": "glm5_next"}) == parse_config(nested())


def test_nested_field_wins_over_the_same_field_at_the_top():
    config = parse_config({**nested(hidden_size=32), "hidden_size": 99})
    assert config.hidden_size == 32
    assert config.overridden == (
        "hidden_size: 99 at the top level lost to text_config.hidden_size=32",
    )


def test_top_level_fills_what_the_nested_object_lacks():
    config = parse_config({**nested(num_nextn_predict_layers=...), "num_nextn_predict_layers": 1})
    assert config.num_nextn_predict_layers == 1
    assert config.overridden == () and "num_nextn_predict_layers" not in config.defaulted


def test_equal_values_at_both_levels_override_nothing():
    assert parse_config({**nested(), "hidden_size": 48}).overridden == ()


def test_nested_weaker_form_wins_over_the_stronger_form_at_the_top():
    raw = nested(mlp_layer_types=..., first_k_dense_replace=2)
    config = parse_config({**raw, "mlp_layer_types": ["sparse"] * 5})
    assert config.mlp_layer_types == ("dense", "dense", "moe", "moe", "moe")
    assert any("mlp_layer_types" in line for line in config.overridden)


SAME_MEANING_VALUES = {
    name: st.integers(1, 64)
    for name in ("hidden_size", "kv_lora_rank", "v_head_dim", "index_head_dim", "hc_mult")
} | {
    "rms_norm_eps": st.floats(1e-8, 1.0),
    "norm_topk_prob": st.booleans(),
    "routed_scaling_factor": st.integers(1, 5),
    "eos_token_id": st.one_of(st.integers(0, 50), st.lists(st.integers(0, 50), max_size=3)),
    "linear_attn_config": st.fixed_dictionaries(
        {}, optional={"num_heads": st.integers(1, 9), "gate_lower_bound": st.floats(-9.0, -0.1)}
    ),
    "mlp_layer_types": st.lists(st.sampled_from(["dense", "sparse"]), min_size=5, max_size=5),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=SAME_MEANING_VALUES))
def test_flat_and_nested_files_are_one_config(changes):
    a, b = parse_config(nested(**changes)), parse_config(flat(**changes))
    assert a == b and hash(a) == hash(b)
    assert a.defaulted == b.defaulted


@settings(deadline=None)
@given(st.sampled_from(sorted(SAME_MEANING_VALUES)), st.data())
def test_whatever_stands_at_the_top_never_beats_the_nested_value(name, data):
    value = data.draw(SAME_MEANING_VALUES[name])
    raw = nested()
    config = parse_config({**raw, name: value})
    assert config == parse_config(raw)
    differs = name in raw["text_config"] and raw["text_config"][name] != value
    assert any(name in line for line in config.overridden) == differs


# ---- layer kinds ----------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [DSA, "full_attention", "indexed_attention"])
def test_three_spellings_of_a_sparse_layer_are_one_model(spelling):
    assert parse_config(nested(layer_types=[KDA, KDA, KDA, spelling, KDA])) == parse_config(
        nested()
    )


@pytest.mark.parametrize("unknown", ["sparse", "mla", "kda", "dsa", "mamba", "", None, 3, ["x"]])
def test_unknown_layer_type_is_named(unknown):
    with pytest.raises(ConfigError, match="layer_types") as caught:
        parse_config(nested(layer_types=[KDA, KDA, KDA, unknown, KDA]))
    assert repr(unknown) in str(caught.value)


def test_layer_types_win_over_kda_layers():
    config = parse_config(nested(linear_attn_config=linear(kda_layers=[2, 3, 4])))
    assert config.layer_types == ("kda", "kda", "kda", "dsa", "kda")
    assert [line for line in config.overridden if "kda_layers" in line]
    assert not [line for line in config.overridden if "full_attn_layers" in line]


def test_kda_layers_alone_that_repeat_the_default_pattern_are_harmless():
    config = parse_config(nested(layer_types=...))
    assert config.layer_types == ("kda", "kda", "kda", "dsa", "kda")
    assert "layer_types" in config.defaulted and config.overridden == ()


@pytest.mark.parametrize(
    "lists",
    [
        {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]},  # the same model counted from 1
        {"kda_layers": [2, 3, 4], "full_attn_layers": ...},
        {"kda_layers": ..., "full_attn_layers": [4]},
    ],
)
def test_kda_layers_alone_are_not_guessed_to_count_from_zero_or_one(lists):
    with pytest.raises(ConfigError, match="give layer_types"):
        parse_config(nested(layer_types=..., linear_attn_config=linear(**lists)))


def test_layer_types_default_to_a_sparse_layer_at_every_fourth():
    raw = nested(
        num_hidden_layers=9,
        layer_types=...,
        linear_attn_config=...,
        mlp_layer_types=...,
        indexer_types=...,
    )
    assert parse_config(raw).layer_types == ("kda", "kda", "kda", "dsa") * 2 + ("kda",)


@pytest.mark.parametrize(
    ("field", "entry"),
    [("layer_types", KDA), ("mlp_layer_types", "dense"), ("indexer_types", "full")],
)
@pytest.mark.parametrize("length", [0, 4, 7])
def test_list_of_another_length_than_the_layers_is_refused(field, entry, length):
    with pytest.raises(ConfigError, match=f"{field} has {length} entries.*num_hidden_layers is 5"):
        parse_config(nested(**{field: [entry] * length}))


@pytest.mark.parametrize("field", ["layer_types", "mlp_layer_types"])
def test_only_the_indexer_list_may_carry_the_mtp_entry(field):
    raw = nested()
    raw["text_config"][field].append(raw["text_config"][field][-1])
    with pytest.raises(ConfigError, match=field):
        parse_config(raw)


# ---- KDA numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lower", "expected"),
    [
        ({"gate_lower_bound": None, "safe_gate": True}, -5.0),
        ({"gate_lower_bound": None}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": False}, None),
        ({"gate_lower_bound": ..., "safe_gate": False}, -5.0),
        ({"gate_lower_bound": -3, "safe_gate": False}, -3.0),
    ],
)
def test_null_lower_bound_is_softplus_only_without_the_safe_gate(lower, expected):
    assert parse_config(nested(linear_attn_config=linear(**lower))).linear_lower_bound == expected


def test_kda_dims_without_any_linear_field_are_the_defaults():
    config = parse_config(nested(linear_attn_config=...))
    assert (config.linear_head_dim, config.linear_num_heads) == (128, 64)
    assert (config.linear_conv_kernel_dim, config.linear_lower_bound) == (4, -5.0)
    assert {"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"} < set(config.defaulted)


def test_flat_linear_fields_say_the_same_as_linear_attn_config():
    fields = {"linear_num_heads": 5, "linear_head_dim": 14, "linear_conv_kernel_dim": 4}
    raw = nested(linear_attn_config=..., linear_lower_bound=-5.0, **fields)
    assert parse_config(raw) == parse_config(nested())
    assert (
        parse_config(nested(linear_attn_config=..., linear_lower_bound=None)).linear_lower_bound
        is None
    )


def test_linear_attn_config_wins_over_flat_linear_fields():
    config = parse_config(nested(linear_num_heads=9, linear_lower_bound=-2.0))
    assert (config.linear_num_heads, config.linear_lower_bound) == (5, -5.0)
    assert len(config.overridden) == 2 and "linear_num_heads: 9 lost" in config.overridden[0]


# ---- feed-forward kinds ---------------------------------------------------------------------


def test_mlp_layer_types_win_over_first_k_dense_replace():
    config = parse_config(nested(first_k_dense_replace=3))
    assert config.mlp_layer_types == ("dense", "moe", "moe", "moe", "moe")
    assert config.overridden == ("first_k_dense_replace: 3 lost to mlp_layer_types",)


@pytest.mark.parametrize("first_k", [0, 1, 3, 5, 8])
def test_first_k_dense_replace_alone_makes_the_list(first_k):
    config = parse_config(nested(mlp_layer_types=..., first_k_dense_replace=first_k))
    assert config.mlp_layer_types == tuple("dense" if i < first_k else "moe" for i in range(5))
    assert "mlp_layer_types" not in config.defaulted


@pytest.mark.parametrize(("layers", "dense"), [(1, 1), (2, 2), (3, 3), (4, 3), (7, 3)])
def test_without_either_the_first_three_layers_are_dense(layers, dense):
    raw = all_dsa(layers, mlp_layer_types=...)
    config = parse_config(raw)
    assert config.mlp_layer_types == ("dense",) * dense + ("moe",) * (layers - dense)
    assert "mlp_layer_types" in config.defaulted


def test_unknown_mlp_type_is_named():
    with pytest.raises(ConfigError, match=r"mlp_layer_types\[2\] is 'moe'"):
        parse_config(nested(mlp_layer_types=["dense", "dense", "moe", "dense", "dense"]))


# ---- the indexer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, range(10)),
        ({"index_topk_freq": 4}, (0, 1, 5, 9)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6)),
        ({"index_topk_freq": 0}, range(10)),
        ({"index_topk_pattern": "FSFSFSFSFS"}, (0, 2, 4, 6, 8)),
        ({"index_topk_pattern": ["full", "shared"] * 5}, (0, 2, 4, 6, 8)),
        ({"index_topk_pattern": "F" + "S" * 9, "index_topk_freq": 4}, (0,)),
        ({"indexer_types": ["full"] * 10, "index_topk_pattern": "FS" * 5}, range(10)),
    ],
)
def test_indexer_types_come_from_list_pattern_or_frequency(fields, full):
    config = parse_config(all_dsa(10, **fields))
    assert [i for i, kind in enumerate(config.indexer_types) if kind == "full"] == list(full)
    assert ("indexer_types" in config.defaulted) == (not fields)
    assert bool(config.overridden) == (len(fields) == 2 and "index_skip_topk_offset" not in fields)


def test_indexer_list_may_carry_one_entry_for_the_mtp_layer():
    longer = parse_config(nested(indexer_types=["full"] * 6))
    assert longer == parse_config(nested()) and longer.overridden == ()


def test_mtp_layer_is_full_whatever_the_indexer_list_says():
    config = parse_config(nested(indexer_types=["full"] * 5 + ["shared"]))
    assert config == parse_config(nested())
    assert "indexer_types[5]" in config.overridden[0]


def test_release_accepts_46_indexer_entries():
    raw = raw_config("glm5_3_flash")
    raw["text_config"]["indexer_types"].append("full")
    assert parse_config(raw) == load_config(CONFIGS / "glm5_3_flash.json")


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["full", "full", "full", "shared", "full"]},
        {"indexer_types": ..., "index_topk_pattern": "FFFSF"},
        {"indexer_types": ..., "index_topk_freq": 4},
    ],
)
def test_shared_indexer_needs_an_earlier_full_sparse_layer(fields):
    with pytest.raises(ConfigError, match="layer 3 is the first DSA layer"):
        parse_config(nested(**fields))


def test_entries_of_kda_layers_do_not_matter():
    config = parse_config(nested(indexer_types=["shared", "shared", "shared", "full", "shared"]))
    assert config.indexer_types[3] == "full"


def test_pool_size_defaults_to_16_and_says_so():
    config = parse_config(nested(index_kpool=..., index_topk=32))
    assert config.index_kpool == 16 and config.dims["P"] == 16
    assert "index_kpool" in config.defaulted


# ---- MTP, quantisation, ids -----------------------------------------------------------------


def test_mtp_count_is_read_and_absent_means_none():
    assert parse_config(nested()).num_nextn_predict_layers == 1
    assert parse_config(nested(num_nextn_predict_layers=0)).num_nextn_predict_layers == 0
    absent = parse_config(nested(num_nextn_predict_layers=...))
    assert absent.num_nextn_predict_layers == 0
    assert "num_nextn_predict_layers" in absent.defaulted


@pytest.mark.parametrize("value", [None, {}, ...])
@pytest.mark.parametrize("inside", [False, True])
def test_absent_empty_and_null_quantisation_all_mean_unquantised(value, inside):
    raw = nested()
    if value is not ...:
        (raw["text_config"] if inside else raw)["quantization_config"] = value
    assert parse_config(raw).quantization is None


@pytest.mark.parametrize("inside", [False, True])
def test_fp8_block_size_is_read_at_either_level(inside):
    raw = nested()
    (raw["text_config"] if inside else raw)["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 64],
    }
    assert parse_config(raw).quantization == QuantizationConfig("fp8", (128, 64))


def test_quantisation_method_without_blocks():
    raw = {**nested(), "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    assert parse_config(raw).quantization == QuantizationConfig("modelopt", None)


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), ([], ()), (None, ())])
def test_eos_is_a_token_or_a_list(eos, ids):
    assert parse_config(nested(eos_token_id=eos)).eos_token_ids == ids


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_read_in_both_spellings(name):
    raw = nested(**{name: "float16"})
    del raw["dtype"]
    assert parse_config(raw).dtype == "float16"


def test_pad_token_outside_a_small_vocabulary_is_not_defaulted():
    assert parse_config(nested(pad_token_id=...)).pad_token_id is None
    assert parse_config(nested(pad_token_id=None)).pad_token_id is None


# ---- harmless fields ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 64},
        {"head_dim": ...},
        {"qk_head_dim": ...},
        {"qk_rope_head_dim": ...},
        {"num_key_value_heads": ...},
        {"num_key_value_heads": None},
        {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
        {"num_local_experts": 16},
        {"swiglu_limit": 10},  # an integer is a number
        {"auto_map": {"AutoConfig": "x.Y"}, "_name_or_path": "a/b", "bos_token_id": 3},
        {"layer_types": None, "indexer_types": None, "index_topk_pattern": None},
    ],
)
def test_harmless_field_changes_nothing(fields):
    config = parse_config(nested(**fields))
    assert config == parse_config(nested()) and config.overridden == ()


@pytest.mark.parametrize("name", sorted(TEXT_IGNORED))
def test_ignored_field_is_accepted_at_both_levels(name):
    assert parse_config(nested(**{name: None})) == parse_config(nested())
    assert parse_config({**nested(), name: None}) == parse_config(nested())


def test_files_that_transformers_writes_are_read():
    raw = json.loads((GOLDEN / "transformers_saved_config.json").read_text())
    # tiny.json through transformers' save_pretrained: it keeps even the fields it does not know.
    config = parse_config(raw)
    assert raw["text_config"]["layer_types"][3] == "indexed_attention"
    assert config == dataclasses.replace(parse_config(nested()), dtype="float32")
    assert config.overridden == config.defaulted == ()


def test_vision_is_optional_and_takes_its_own_defaults():
    raw = nested()
    raw["vision_config"] = {}
    config = parse_config(raw)
    assert config.vision is not None
    assert (config.vision.depth, config.vision.hidden_size, config.vision.num_heads) == (
        24,
        1024,
        16,
    )
    assert {f"vision_config.{name}" for name in VISION_FIELDS} <= set(config.defaulted)
    for absent in (None, ...):
        raw = nested()
        raw["vision_config"] = absent
        if absent is ...:
            del raw["vision_config"]
        config = parse_config(raw)
        assert config.vision is None and "vX" not in config.dims


def test_vision_patch_may_be_written_per_axis():
    raw = nested()
    raw["vision_config"]["patch_size"] = [7, 7]
    assert parse_config(raw) == parse_config(nested())
    raw["vision_config"]["patch_size"] = [7, 8]
    with pytest.raises(ConfigError, match=r"vision_config\.patch_size"):
        parse_config(raw)


# ---- refusals -------------------------------------------------------------------------------

REFUSED = [
    ("qk_rope_head_dim", 64),
    ("attention_bias", True),
    ("index_topk", 10),
    ("swiglu_limit", None),
    ("num_key_value_heads", 3),
    ("hidden_act", "gelu"),
    ("scoring_func", "softmax"),
    ("topk_method", "greedy"),
    ("moe_router_dtype", "bfloat16"),
    ("mhc", False),
    ("mla_use_nope", False),
    ("index_kpool_compress", False),
    ("tie_word_embeddings", True),
    ("is_encoder_decoder", True),
    ("moe_layer_freq", 2),
    ("n_group", 3),
    ("n_group", 16),
    ("topk_group", 2),
    ("num_experts_per_tok", 17),
    ("num_nextn_predict_layers", 2),
    ("num_nextn_predict_layers", -1),
    ("qk_head_dim", 24),
    ("head_dim", "64"),
    ("q_lora_rank", None),
    ("n_shared_experts", 0),
    ("linear_lower_bound", 0.0),
    ("linear_lower_bound", 1.0),
    ("first_k_dense_replace", -1),
    ("first_k_dense_replace", True),
    ("index_topk_freq", 1.5),
    ("index_skip_topk_offset", "2"),
    ("index_topk_pattern", "FXFFF"),
    ("index_topk_pattern", 4),
    ("layer_types", "linear_attention"),
    ("pad_token_id", 224),
    ("pad_token_id", -1),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [1, None]),
    ("dtype", 16),
    ("quantization_config", "fp8"),
    ("quantization_config", {"weight_block_size": [128, 128]}),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128]}),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": 128}),
    ("linear_attn_config", [1]),
    ("linear_attn_config", {"head_dim": 0}),
    ("linear_attn_config", {"safe_gate": 1}),
    ("linear_attn_config", {"use_beta": True}),
    ("linear_attn_config", {"kda_layers": "0-2"}),
    ("num_local_experts", 8),
    ("sliding_window", 4096),
    ("logit_softcap", 30.0),
]


@pytest.mark.parametrize("build", [nested, flat])
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_the_family_does_not_have_is_refused_by_name(build, name, value):
    changes = {name: value}
    if name == "linear_lower_bound":
        changes["linear_attn_config"] = ...
    if name.startswith("index_topk_") or name == "index_skip_topk_offset":
        changes["indexer_types"] = ...
    with pytest.raises(ConfigError) as caught:
        parse_config(build(**changes), source="some/config.json")
    message = str(caught.value)
    named = "linear_attn_config.head_dim" if value == {"head_dim": 0} else name
    assert message.startswith("some/config.json: ") and named in message
    assert "\n" not in message


def test_experts_must_fit_the_chosen_groups():
    fits = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 8}
    assert parse_config(nested(**fits)).topk_group == 2
    with pytest.raises(ConfigError, match="num_experts_per_tok=9 exceeds the 8 experts"):
        parse_config(nested(**{**fits, "num_experts_per_tok": 9}))


@pytest.mark.parametrize("name", [n for n, f in TEXT_FIELDS.items() if "positive" in f.kind])
@pytest.mark.parametrize("value", [0, -1, "8", True, None, math.nan, math.inf, [8], 10**400])
def test_every_dimension_and_number_is_checked(name, value):
    if value == 10**400 and "integer" in TEXT_FIELDS[name].kind:
        value = 8.0  # a whole number with a point is not an integer
    changes = {"linear_attn_config": ...} if name.startswith("linear_") else {}
    with pytest.raises(ConfigError, match=name):
        parse_config(nested(**changes, **{name: value}))


@pytest.mark.parametrize("name", [n for n, f in TEXT_FIELDS.items() if f.kind == "true or false"])
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_every_flag_is_a_flag(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be true or false"):
        parse_config(nested(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("depth", 0),
        ("hidden_size", 33),
        ("attention_bias", False),
        ("model_type", "siglip"),
        ("window_size", 7),
        ("patch_size", []),
        ("num_attention_heads", 4),
    ],
)
def test_vision_geometry_is_checked(name, value):
    raw = nested()
    raw["vision_config"][name] = value
    with pytest.raises(ConfigError, match=name):
        parse_config(raw)


@pytest.mark.parametrize("model_type", ["glm4", "glm_moe_dsa", None, ..., 5])
def test_other_model_types_are_refused(model_type):
    raw = nested()
    raw.pop("model_type")
    if model_type is not ...:
        raw["model_type"] = model_type
    with pytest.raises(ConfigError, match="model_type must be glm5_next or glm5_next_text"):
        parse_config(raw)
    with pytest.raises(ConfigError, match=r"text_config\.model_type"):
        parse_config(nested(model_type="qwen4"))


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.sampled_from(["full", KDA, "dense", 1, None]), max_size=6),
    st.dictionaries(st.sampled_from(["head_dim", "kda_layers", "x"]), st.integers(), max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*raw_config()["text_config"], "x", *TEXT_FIELDS]), JSON_VALUES, max_size=3
    )
)
def test_any_file_is_either_a_config_or_one_clear_line(changes):
    try:
        config = parse_config(nested(**changes))
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).startswith("config.json: ")
    else:
        assert isinstance(hash(config), int)
        assert config.index_topk % config.index_kpool == 0
        assert len(config.layer_types) == len(config.indexer_types) == config.num_hidden_layers


# ---- files ----------------------------------------------------------------------------------


def test_a_directory_stands_for_its_config_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    assert (
        load_config(tmp_path) == load_config(tmp_path / "config.json") == parse_config(raw_config())
    )
    assert load_config(str(tmp_path)) == load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model_type": "glm5_next", "model_type": "glm5_next"}', "'model_type' occurs twice"),
        (b'{"text_config": {"hidden_size": 1, "hidden_size": 2}}', "'hidden_size' occurs twice"),
        (b'{"model_type": "glm5_next", "rms_norm_eps": NaN}', "rms_norm_eps must be a positive"),
    ],
)
def test_broken_file_is_one_line_with_its_path(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_config(tmp_path)


def test_parsing_leaves_the_decoded_json_alone():
    raw = nested(linear_attn_config=linear(gate_lower_bound=None), num_local_experts=16)
    before = copy.deepcopy(raw)
    parse_config(raw)
    assert raw == before


def test_config_is_frozen_and_hashable():
    config = parse_config(nested())
    assert hash(config) == hash(parse_config(nested()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    with pytest.raises(TypeError):
        config.dims["X"] = 1
    assert config != dataclasses.replace(config, hidden_size=64)
    assert dataclasses.replace(config, hidden_size=64).dims["X"] == 64


def test_shared_experts_are_one_mlp_of_their_summed_width():
    assert parse_config(nested(n_shared_experts=2)).dims["Is"] == 80


def test_every_model_field_comes_from_the_file():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert set(TEXT_FIELDS) < fields


# ---- the package ----------------------------------------------------------------------------


def test_config_skeleton_specs_budget_and_audit_import_no_jax():
    code = (
        "import sys, glm5_jax, glm5_jax.config, glm5_jax.skeleton, glm5_jax.specs\n"
        "import glm5_jax.budget, glm5_jax.checkpoint.audit\n"
        "glm5_jax.load_config, glm5_jax.Skeleton, glm5_jax.audit, glm5_jax.state_budget\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'torch', 'transformers', 'orbax'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed_and_unknown_ones_refused():
    assert set(glm5_jax.__all__) <= set(dir(glm5_jax))
    assert glm5_jax.load_config is load_config and glm5_jax.ConfigError is ConfigError
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        glm5_jax.lood  # noqa: B018


@pytest.mark.parametrize("name", glm5_jax.__all__)
def test_every_public_name_resolves(name):
    assert getattr(glm5_jax, name) is not None
