"""Our config files in transformers, and transformers' config files here."""

import json
from pathlib import Path

import pytest

from glm5_jax.config import load_config, parse_config

configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")

TESTS = Path(__file__).parents[1]
CONFIGS = TESTS.parent / "configs"
SAME_NAMES = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rms_norm_eps",
    "swiglu_limit",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_kpool",
    "index_kpool_always_select_tail",
    "linear_num_heads",
    "linear_head_dim",
    "linear_conv_kernel_dim",
    "linear_lower_bound",
    "hc_mult",
    "hc_eps",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
]
KINDS = {"linear_attention": "kda", "indexed_attention": "dsa", "dense": "dense", "sparse": "moe"}


def assert_read_alike(raw):
    """Our reading of a decoded config.json is that of transformers."""
    ours, theirs = parse_config(raw), configuration.Glm5NextConfig.from_dict(raw).text_config
    for name in SAME_NAMES:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.layer_types) == [KINDS[kind] for kind in theirs.layer_types]
    assert list(ours.mlp_layer_types) == [KINDS[kind] for kind in theirs.mlp_layer_types]
    assert list(ours.indexer_types) == list(theirs.indexer_types)[: ours.num_hidden_layers]


@pytest.mark.parametrize("name", ["glm5_3_flash", "tiny", "bench"])
def test_transformers_reads_our_configs_as_we_do(name):
    assert_read_alike(json.loads((CONFIGS / f"{name}.json").read_text()))


def test_defaults_are_those_of_transformers():
    assert_read_alike({"model_type": "glm5_next", "text_config": {}})


@pytest.mark.parametrize(
    "text",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 4},
        {"index_topk_freq": 2, "index_skip_topk_offset": 4},
        {"index_topk_pattern": "FSSF" * 11 + "F", "index_topk_freq": 4},
        {"linear_attn_config": {"gate_lower_bound": None}},
        {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}},
        {"linear_attn_config": {"safe_gate": False}},
        {"linear_attn_config": {"head_dim": 32}, "linear_head_dim": 64, "linear_num_heads": 8},
        {"linear_lower_bound": None},
        {"num_hidden_layers": 2},
        {"layer_types": ["full_attention", "deepseek_sparse_attention", "linear_attention"] * 15},
        {"num_local_experts": 64},
    ],
)
def test_traps_are_read_as_transformers_reads_them(text):
    assert_read_alike({"model_type": "glm5_next", "text_config": text})


@pytest.mark.parametrize("text_only", [False, True])
def test_file_that_transformers_saves_by_default_is_read(tmp_path, text_only):
    kind = configuration.Glm5NextTextConfig if text_only else configuration.Glm5NextConfig
    kind().save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.overridden == ()
    absent = {"num_nextn_predict_layers", "index_share_for_mtp_iteration", "eos_token_id"}
    assert set(config.defaulted) == absent
    assert (config.vision is None) == text_only


@pytest.mark.parametrize("generic", [{"output_hidden_states": True}, {"num_labels": 3}])
def test_generic_fields_of_transformers_do_not_disturb(tmp_path, generic):
    configuration.Glm5NextTextConfig(**generic).save_pretrained(tmp_path / "a")
    configuration.Glm5NextTextConfig().save_pretrained(tmp_path / "b")
    assert load_config(tmp_path / "a") == load_config(tmp_path / "b")


def test_golden_saved_config_is_what_transformers_writes(tmp_path):
    raw = json.loads((CONFIGS / "tiny.json").read_text())
    configuration.Glm5NextConfig.from_dict(raw).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    golden = json.loads((TESTS / "golden" / "transformers_saved_config.json").read_text())
    # A model that is saved also writes its class and the dtype it was in.
    for saved in (written, golden):
        saved.pop("dtype")
        saved.pop("architectures", None)
    assert written == golden
