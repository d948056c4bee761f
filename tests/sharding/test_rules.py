"""Which part of every leaf a device has: presets, refusals, and the sizes that JAX gives."""

import math
from collections import Counter
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from glm5_jax.budget import parameter_budget
from glm5_jax.config import load_config
from glm5_jax.errors import ConfigError
from glm5_jax.model import load
from glm5_jax.sharding import (
    PRESETS,
    ShardingRules,
    array_pieces,
    check_rules,
    find_rules,
    named_sharding,
    parse_mesh,
    part_of,
)
from glm5_jax.specs import leaves

RELEASE = load_config(Path(__file__).parents[2] / "configs" / "glm5_3_flash.json")
LEAVES = leaves(RELEASE)
BYTES = {"BF16": 2, "F32": 4}
MESHES = {
    "tp": {"tensor": 8},
    "ep": {"expert": 8},
    "tp_ep": {"tensor": 8, "expert": 2},
    "fsdp": {"data": 8},
}


def parts(rules, mesh):
    return {
        path: part_of(leaf.shape, array_pieces(rules, leaf, leaf.shape, mesh), mesh)
        for path, leaf in LEAVES.items()
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_parts_of_the_release_are_those_that_jax_would_make(preset):
    rules, mesh = PRESETS[preset], MESHES[preset]
    check_rules(rules, RELEASE, mesh)
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    for path, part in parts(rules, mesh).items():
        leaf = LEAVES[path]
        pieces = array_pieces(rules, leaf, leaf.shape, mesh)
        assert named_sharding(pieces, abstract).shard_shape(leaf.shape) == part


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_cut_is_on_one_device_and_the_rest_on_all(preset):
    """By role, in bytes: the whole of a role over the devices, or once on each of them."""
    rules, mesh = PRESETS[preset], MESHES[preset]
    cut, whole = Counter(), Counter()
    for path, part in parts(rules, mesh).items():
        leaf = LEAVES[path]
        devices = math.prod(leaf.shape) // math.prod(part)
        (cut if devices > 1 else whole)[leaf.role] += math.prod(leaf.shape) * BYTES[leaf.dtype]
    for role, count in parameter_budget(RELEASE).by_role().items():
        if role != "vision":
            assert cut[role] + whole[role] == count.bytes
    tensor = {"embedding", "lm_head", "dense_ffn", "moe_shared", "moe_expert", "kda_decay"}
    everywhere = {"indexer", "indexer_norm", "hyper_connection", "kda_conv", "kda_norm"}
    if preset == "ep":
        assert set(cut) == {"moe_expert"}
    elif preset == "fsdp":
        assert tensor - {"kda_decay"} < set(cut) - set(whole)
    else:
        assert tensor == set(cut) - set(whole)
        assert everywhere == set(whole) - set(cut) - {
            *("moe_router", "layer_norm", "final_norm", "mla_norm", "mtp_norm", "mtp_projection")
        }


def test_a_device_of_sixteen_holds_a_sixteenth_of_the_experts():
    shapes = parts(PRESETS["tp_ep"], {"tensor": 8, "expert": 2})
    assert shapes["layers.3.ffn.experts.gate_proj"] == (144, 256, 4096)
    assert shapes["layers.3.ffn.experts.down_proj"] == (144, 4096, 256)
    assert shapes["layers.0.attn.o_proj"] == (4096, 1024)
    assert shapes["layers.3.attn.kv_b_proj"] == (4096, 512)
    assert shapes["layers.3.attn.kv_a_proj"] == (512, 4096)
    assert shapes["embed_tokens"] == (19360, 4096)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((288, 2048, 4096), (144, 256, 4096)),  # FP8 codes
        ((288, 16, 32), (144, 2, 32)),  # a scale for each block of 128 × 128
        ((288, 2048, 1), (144, 256, 1)),  # one for each row
        ((288, 2048), (144, 256)),
        ((288, 2048, 256), (144, 256, 256)),  # for each 16 columns
        ((288, 1), (144, 1)),  # for each expert
        ((288,), (144,)),
    ],
)
def test_codes_and_scales_go_where_their_weights_go(shape, part):
    rules, mesh = PRESETS["tp_ep"], {"tensor": 8, "expert": 2}
    leaf = LEAVES["layers.3.ffn.experts.gate_proj"]
    assert part_of(shape, array_pieces(rules, leaf, shape, mesh), mesh) == part


def test_a_cut_through_the_block_of_a_scale_is_refused():
    rules, mesh = PRESETS["tp"], {"tensor": 32}
    leaf = LEAVES["layers.3.ffn.experts.gate_proj"]
    with pytest.raises(ConfigError, match=r"2048 in blocks of 128 .* tensor = 32 devices"):
        array_pieces(rules, leaf, (288, 16, 32), mesh)


@pytest.mark.parametrize(
    ("rules", "mesh", "message"),
    [
        ("tp", {"tensor": 6}, r"vocab: 154880 \(Vo\) cannot be divided over tensor = 6"),
        ("tp", {"tensor": 128}, r"heads: 64 \(A\) cannot be divided over tensor = 128"),
        ("ep", {"expert": 5}, r"experts: 288 \(E\) cannot be divided over expert = 5"),
        ("tp", {"expert": 2}, "mesh axis expert: no rule"),
        (ShardingRules(experts=("expert", "tensor")), {"tensor": 8, "expert": 8}, "= 64 devices"),
        (
            ShardingRules(experts="tensor", expert_mlp="tensor"),
            {"tensor": 8},
            "experts and expert_mlp are both cut along tensor",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, mesh, message):
    with pytest.raises(ConfigError, match=message):
        check_rules(find_rules(rules), RELEASE, mesh)


@pytest.mark.parametrize("given", [3, ("tensor", "tensor"), ["tensor"], ("tensor", None)])
def test_a_rule_names_mesh_axes(given):
    with pytest.raises(ConfigError, match="heads: expected the name of a mesh axis"):
        ShardingRules(heads=given)


def test_what_divides_evenly_is_said():
    with pytest.raises(ConfigError, match=r"can be over 1, 2, 4, 8, 16, 32, 64$"):
        check_rules(find_rules("tp"), RELEASE, {"tensor": 6})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rules": "tp"}, "rules 'tp': expected a mesh"),
        ({"mesh": "tensor=2"}, "mesh: expected a jax.sharding.Mesh"),
        ({"mesh": AbstractMesh((1,), ("tensor",))}, "mesh: expected a jax.sharding.Mesh"),
        ({"mesh": {"tensor": 2}, "rules": {"heads": "data"}}, "mesh: expected"),
    ],
)
def test_loading_over_what_is_no_mesh_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, **options)


def test_rules_by_name():
    with pytest.raises(ConfigError, match="rules: expected"):
        find_rules({"heads": "data"})
    assert find_rules(None) is find_rules("tp_ep") is PRESETS["tp_ep"]
    with pytest.raises(ConfigError, match="tp, ep, tp_ep, fsdp, got 'pp'"):
        find_rules("pp")


def test_a_mesh_as_it_is_typed():
    assert parse_mesh("tensor=8") == {"tensor": 8}
    assert list(parse_mesh("data=2, tensor=4,expert=1").items()) == [
        *(("data", 2), ("tensor", 4), ("expert", 1))
    ]


@pytest.mark.parametrize(
    "text",
    ["", "tensor", "tensor=", "=8", "tensor=0", "tensor=-8", "tensor=8,", "8", "a=²", "a=1,a=2"],
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ConfigError, match=r"^mesh: expected NAME=N,\.\.\. .* got '.*'$"):
        parse_mesh(text)
