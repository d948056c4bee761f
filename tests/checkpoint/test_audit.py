import json

import pytest

from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.match import parse_layers
from glm5_jax.errors import CheckpointError, ConfigError
from glm5_jax.specs import ROLES

PREFIX = "model.language_model."
L3 = PREFIX + "layers.3."


def test_fault_lines_name_tensor_expected_came_and_file(tmp_path, write, small, config_file):
    tensors = small() | {PREFIX + "norm.weight": ("BF16", (47,))}
    (line,) = audit(write(tmp_path, tensors, config_file("tiny"))).problems()
    assert line == (
        "model.language_model.norm.weight: expected BF16 or F32 [48], got BF16 [47] "
        "(in model-00001-of-00001.safetensors)"
    )


def test_foreign_tensor_is_unexpected(tmp_path, write, small, config_file):
    stranger = L3 + "self_attn.rotary_emb.inv_freq"
    report = audit(write(tmp_path, small() | {stranger: ("F32", (4,))}, config_file("tiny")))
    assert report.unexpected == [stranger] and not report.complete


# Dtypes.


def test_float32_throughout_is_widened_and_listed(tmp_path, write, small, config_file):
    tensors = {name: ("F32", shape) for name, (_, shape) in small().items()}
    report = audit(write(tmp_path, tensors, config_file("tiny")))
    assert report.complete
    assert set(report.widened) == {name for name, (dtype, _) in small().items() if dtype == "BF16"}


def test_bfloat16_throughout_is_refused_unless_allowed_and_then_reported(
    tmp_path, write, small, config_file
):
    rounded = {name for name, (dtype, _) in small().items() if dtype == "F32"}
    tensors = {name: ("BF16", shape) for name, (_, shape) in small().items()}
    write(tmp_path, tensors, config_file("tiny"))
    refused = audit(tmp_path)
    assert {wrong.name for wrong in refused.wrong} == rounded and not refused.complete
    assert all("--allow-bf16" in wrong.expected for wrong in refused.wrong)
    allowed = audit(tmp_path, allow_bf16=True)
    assert allowed.complete and set(allowed.accepted_bf16) == rounded


# Quantised storage, decided from what is stored.


def test_bf16_matrices_beside_nvfp4_experts_and_an_fp8_one_are_taken_as_stored(
    tmp_path, write, small_layout
):
    tensors, config = small_layout("nvfp4_modelopt")
    assert audit(write(tmp_path / "a", tensors, config)).quantization == "nvfp4_modelopt"
    # A matrix that the config's ignore list exempts, stored FP8 all the same.
    config["quantization_config"] = {"quant_method": "modelopt", "weight_block_size": [16, 16]}
    name = PREFIX + "layers.0.self_attn.q_proj.weight"
    tensors[name] = ("F8_E4M3", tensors[name][1])
    tensors[name.replace("weight", "weight_scale")] = ("F32", ())
    report = audit(write(tmp_path / "b", tensors, config))
    assert report.complete and report.quantization == "mixed"


def test_fp8_with_no_recognised_scale_is_not_taken(tmp_path, write, small_layout):
    tensors, config = small_layout("fp8")
    scale = L3 + "self_attn.q_a_proj.weight_scale_inv"
    tensors[scale.replace("weight_scale_inv", "scale")] = tensors.pop(scale)
    report = audit(write(tmp_path, tensors, config))
    assert report.missing == [scale]
    assert report.unexpected == [scale.replace("weight_scale_inv", "scale")]


def test_scale_without_its_weight_is_unexpected(tmp_path, write, small_layout):
    tensors, config = small_layout("fp8")
    weight = L3 + "self_attn.q_a_proj.weight"
    del tensors[weight]
    report = audit(write(tmp_path, tensors, config))
    assert report.missing == [weight]
    assert report.unexpected == [weight + "_scale_inv"]


def test_scale_beside_a_plain_weight_is_unexpected_and_names_the_weight(
    tmp_path, write, small, config_file
):
    weight = L3 + "self_attn.q_a_proj.weight"
    tensors = small() | {weight + "_scale_inv": ("F32", (1, 1))}
    report = audit(write(tmp_path, tensors, config_file("tiny")))
    assert report.unexpected == [weight + "_scale_inv"]
    assert [wrong.name for wrong in report.wrong] == [weight]


def test_activation_scales_are_ignored_with_their_reason(tmp_path, write, small_layout):
    tensors, config = small_layout("nvfp4_modelopt")
    extra = [
        L3 + "mlp.experts.0.up_proj.input_scale",
        L3 + "mlp.experts.0.up_proj.input_global_scale",
        L3 + "self_attn.kv_b_proj.k_scale",
        L3 + "self_attn.v_scale",
    ]
    tensors |= dict.fromkeys(extra, ("F32", ()))
    report = audit(write(tmp_path / "a", tensors, config))
    assert report.complete
    assert report.ignored["activation scale: never touches a weight"] == extra
    nowhere = L3 + "self_attn.rotary.input_scale"
    report = audit(write(tmp_path / "b", tensors | {nowhere: ("F32", ())}, config))
    assert report.unexpected == [nowhere]


def test_quantised_router_norm_and_embedding_are_refused(tmp_path, write, small, config_file):
    config = config_file("tiny")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    for number, name in enumerate((PREFIX + "embed_tokens.weight", L3 + "mlp.gate.weight")):
        tensors = small()
        shape = tensors[name][1]
        tensors[name] = ("F8_E4M3", shape)
        tensors[name + "_scale"] = ("F32", ())
        report = audit(write(tmp_path / str(number), tensors, config))
        assert name in [wrong.name for wrong in report.wrong]


# Names.


@pytest.mark.parametrize("naming", ["released", "native"])
def test_short_text_prefix_gives_the_same_account(tmp_path, write, small, config_file, naming):
    full = small(naming)
    short = {name.replace(PREFIX, "model.", 1): tensor for name, tensor in full.items()}
    first = audit(write(tmp_path / "full", full, config_file("tiny")))
    second = audit(write(tmp_path / "short", short, config_file("tiny")))
    assert first.complete and second.complete
    assert first.by_role == second.by_role and first.naming == second.naming == naming
    del short["model.norm.weight"]
    report = audit(write(tmp_path / "lacking", short, config_file("tiny")))
    assert report.missing == ["model.norm.weight"]


def test_one_tensor_under_both_prefixes_is_a_contradiction(tmp_path, write, small, config_file):
    tensors = small() | {"model.norm.weight": ("BF16", (48,))}
    report = audit(write(tmp_path, tensors, config_file("tiny")))
    assert not report.complete
    assert "model.norm.weight" in report.contradictions[0]


def test_vision_tensors_never_land_in_text_roles(tmp_path, write, small, config_file):
    config = config_file("tiny")
    both = audit(write(tmp_path / "both", small(), config))
    text = audit(write(tmp_path / "text", small(vision=False), config))
    assert text.complete and "the vision tower is not in the checkpoint" in text.notices
    vision = both.by_role.pop("vision")
    assert both.by_role == text.by_role
    assert vision == len(small()) - len(small(vision=False))
    del config["vision_config"]
    unchecked = audit(write(tmp_path / "unchecked", small(), config))
    assert unchecked.complete and unchecked.by_role["vision"] == vision
    assert "vision tensors are unchecked: config.json has no vision_config" in unchecked.notices


def test_native_names_in_a_released_checkpoint_are_unexpected(tmp_path, write, small, config_file):
    tensors = small()
    released, native = L3 + "hc_attn_fn", L3 + "attn_hc.fn"
    tensors[native] = tensors.pop(released)
    report = audit(write(tmp_path, tensors, config_file("tiny")))
    assert (report.missing, report.unexpected) == ([released], [native])


# The MTP layer.


def test_promised_mtp_layer_that_is_absent_is_a_notice(tmp_path, write, small, config_file):
    report = audit(write(tmp_path, small(mtp=False), config_file("tiny")))
    assert report.complete and not report.mtp
    assert any("MTP layer 5 is not in the checkpoint" in notice for notice in report.notices)


def test_mtp_layer_is_found_by_its_names_when_the_config_is_silent(
    tmp_path, write, small, config_file
):
    config, tensors = config_file("tiny"), small()
    config["text_config"]["num_nextn_predict_layers"] = 0
    report = audit(write(tmp_path, tensors, config))
    assert report.complete and report.mtp
    assert any("MTP layer 5 is in the checkpoint" in notice for notice in report.notices)


def test_mtp_layer_without_any_of_its_own_tensors_lacks_them(tmp_path, write, small, config_file):
    own = {f"{PREFIX}layers.5.{n}.weight" for n in ("eh_proj", "enorm", "hnorm")}
    own |= {f"{PREFIX}layers.5.shared_head.norm.weight"}
    tensors = {name: tensor for name, tensor in small().items() if name not in own}
    report = audit(write(tmp_path, tensors, config_file("tiny")))
    assert set(report.missing) == own


def test_mtp_side_file_under_released_names_beside_a_native_trunk(
    tmp_path, write, write_shard, small, config_file
):
    write(tmp_path, small("native", mtp=False), config_file("tiny"))
    side = {name: t for name, t in small().items() if ".layers.5." in name}
    write_shard(tmp_path / "mtp.safetensors", side)
    report = audit(tmp_path)
    assert report.complete and report.mtp and report.naming == "native"
    assert any("mtp.safetensors is not in the index" in notice for notice in report.notices)


def test_copies_of_embedding_and_head_in_the_mtp_layer_are_known(
    tmp_path, write, small, config_file
):
    copies = {
        f"{PREFIX}layers.5.embed_tokens.weight": ("BF16", (224, 48)),
        f"{PREFIX}layers.5.shared_head.head.weight": ("BF16", (224, 48)),
    }
    report = audit(write(tmp_path, small() | copies, config_file("tiny")))
    assert report.complete
    (reason,) = (reason for reason in report.ignored if reason.startswith("copy"))
    assert report.ignored[reason] == list(copies)
    assert (report.by_role["embedding"], report.by_role["lm_head"]) == (2, 2)


# Config against names.


@pytest.mark.parametrize(
    "layer, kind, naming, says",
    [
        (3, "linear_attention", "released", "layer 3: config.json (layer_types) says kda"),
        (2, "deepseek_sparse_attention", "released", "layer 2: config.json (layer_types) says dsa"),
        (2, "deepseek_sparse_attention", "native", "layer 2: config.json (layer_types) says dsa"),
    ],
)
def test_layer_kind_that_the_names_deny_is_refused(
    tmp_path, write, small, config_file, layer, kind, naming, says
):
    config = config_file("tiny")
    config["text_config"]["layer_types"][layer] = kind
    report = audit(write(tmp_path, small(naming), config))
    assert not report.complete
    assert report.contradictions[0].startswith(says)


@pytest.mark.parametrize("naming", ["released", "native"])
@pytest.mark.parametrize("layer, kind, said", [(0, "sparse", "moe"), (1, "dense", "dense")])
def test_dense_layers_are_checked_against_which_layers_own_experts(
    tmp_path, write, small, config_file, naming, layer, kind, said
):
    config = config_file("tiny")
    config["text_config"]["mlp_layer_types"][layer] = kind
    report = audit(write(tmp_path, small(naming), config))
    assert f"layer {layer}: config.json (mlp_layer_types) says {said}" in report.contradictions[0]
    # With neither list nor count the first three are dense, which the experts deny.
    del config["text_config"]["mlp_layer_types"], config["text_config"]["first_k_dense_replace"]
    report = audit(write(tmp_path, small(naming), config))
    assert [line.partition(":")[0] for line in report.contradictions] == ["layer 1", "layer 2"]


@pytest.mark.parametrize("layers, says", [(4, "layer 4 holds"), (6, "layer 5 holds the MTP")])
def test_wrong_number_of_layers_is_refused(tmp_path, write, small, config_file, layers, says):
    config = config_file("tiny")
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    for key, value in (("layer_types", "linear_attention"), ("mlp_layer_types", "sparse")):
        text[key] = (text[key] + [value])[:layers]
    text["indexer_types"] = ["full"] * layers
    report = audit(write(tmp_path, small(), config))
    assert not report.complete
    assert any(line.startswith(says) for line in report.contradictions)


def test_pool_size_that_disagrees_with_ape_is_a_shape_error(tmp_path, write, small, config_file):
    config = config_file("tiny")
    config["text_config"]["index_kpool"] = 2
    report = audit(write(tmp_path, small(), config))
    apes = [wrong for wrong in report.wrong if wrong.name.endswith("compress_ape")]
    assert len(apes) == len(report.wrong) == 2
    assert "[2, 22]" in apes[0].expected and "[4, 22]" in apes[0].came


def shared_indexer(config_file):
    config = config_file("tiny")
    config["text_config"]["layer_types"][4] = "deepseek_sparse_attention"
    config["text_config"]["indexer_types"] = ["full"] * 4 + ["shared"]
    return config


def test_layer_that_shares_an_indexer_needs_none_and_leftovers_are_ignored(
    tmp_path, write, small, config_file
):
    config = shared_indexer(config_file)
    tensors = small(config=config)
    assert not any(".layers.4.self_attn.indexer." in name for name in tensors)
    clean = audit(write(tmp_path / "clean", tensors, config))
    assert clean.complete and list(clean.ignored) == ["vision tower: carried, not bound"]
    leftover = {
        name.replace(".layers.3.", ".layers.4."): tensor
        for name, tensor in tensors.items()
        if ".layers.3.self_attn.indexer." in name
    }
    report = audit(write(tmp_path / "leftover", tensors | leftover, config))
    assert report.complete and report.by_role == clean.by_role
    (reason,) = (reason for reason in report.ignored if "indexer" in reason)
    assert set(report.ignored[reason]) == set(leftover)


def test_checkpoint_without_config_says_so(tmp_path, write, small):
    with pytest.raises(ConfigError, match=r"config\.json"):
        audit(write(tmp_path, small()))


# Some layers only.


@pytest.mark.parametrize("layers", ["3,5", {3, 5}, [5, 3]])
def test_only_the_layers_asked_for_are_required(tmp_path, write, small, config_file, layers):
    gone = tuple(f"{PREFIX}layers.{i}." for i in (0, 1, 2, 4))
    tensors = {name: t for name, t in small().items() if not name.startswith(gone)}
    write(tmp_path / "part", tensors, config_file("tiny"))
    assert not audit(tmp_path / "part").complete
    assert audit(tmp_path / "part", layers=layers).complete
    lost = L3 + "self_attn.o_proj.weight"
    del tensors[lost]
    write(tmp_path / "lacking", tensors, config_file("tiny"))
    assert audit(tmp_path / "lacking", layers=layers).missing == [lost]


def test_mtp_layer_asked_for_by_index_must_be_there(tmp_path, write, small, config_file):
    write(tmp_path, small(mtp=False), config_file("tiny"))
    assert audit(tmp_path, layers={0, 1}).complete
    missing = audit(tmp_path, layers={0, 5}).missing
    assert PREFIX + "layers.5.eh_proj.weight" in missing
    assert all(".layers.5." in name for name in missing)


def test_layer_lists_are_read_strictly(tmp_path, write, small, config_file):
    assert parse_layers("0-3, 45") == {0, 1, 2, 3, 45}
    for text in ("", "3-", "-3", "1,,2", "a", "3-1", "0-99999999999", "1.5"):
        with pytest.raises(CheckpointError, match="layers"):
            parse_layers(text)
    write(tmp_path, small(), config_file("tiny"))
    with pytest.raises(CheckpointError, match="6 is not a layer; text layers are 0-4, MTP is 5"):
        audit(tmp_path, layers="3,6")


# The report.


def test_report_as_json_has_every_name_and_as_text_the_verdict(tmp_path, write, small, config_file):
    tensors = {name: t for name, t in small().items() if ".experts.3." not in name}
    report = audit(write(tmp_path, tensors, config_file("tiny")))
    decoded = json.loads(report.to_json())
    assert decoded["missing"] == report.missing and len(report.missing) == 15
    assert decoded["by_role"] == report.by_role
    text = report.to_text()
    assert text.endswith("INCOMPLETE") and "and 5 more" in text
    assert set(report.by_role) <= set(ROLES)
    assert all(role in text for role in report.by_role)
