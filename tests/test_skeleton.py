"""The topology as data: layers, residual plans, state plan."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.config import load_config, parse_config
from glm5_jax.errors import ConfigError
from glm5_jax.skeleton import Skeleton, SkeletonLayer, StateEntry

CONFIGS = Path(__file__).parents[1] / "configs"
RELEASE = CONFIGS / "glm5_3_flash.json"


def skeleton(name="glm5_3_flash"):
    return Skeleton.from_config(load_config(CONFIGS / f"{name}.json"))


def test_release_has_kda_everywhere_but_at_every_fourth_layer():
    layers = skeleton().layers
    assert [layer.index for layer in layers] == list(range(45))
    assert Counter(layer.mixer for layer in layers) == {"kda": 34, "dsa": 11}
    assert all((layer.mixer == "kda") == (layer.index % 4 != 3) for layer in layers)
    assert layers[44].mixer == "kda"  # outside the cycles of four


def test_topology_follows_the_files_own_list_and_no_arithmetic():
    raw = json.loads(RELEASE.read_text())
    types = raw["text_config"]["layer_types"]
    types[7], types[8] = types[8], types[7]
    layers = Skeleton.from_config(parse_config(raw)).layers
    assert (layers[7].mixer, layers[8].mixer) == ("kda", "dsa")


def test_release_has_three_dense_layers_then_experts():
    layers = skeleton().layers
    assert [layer.index for layer in layers if layer.mlp == "dense"] == [0, 1, 2]
    assert sum(layer.mlp == "moe" for layer in layers) == 42


def test_mtp_layer_is_held_apart_from_the_text_stack():
    plan = skeleton()
    assert plan.mtp == SkeletonLayer(45, "dsa", "moe", False, True, "full")
    assert not any(layer.is_mtp for layer in plan.layers)
    assert all(layer.hyper_connection for layer in plan.layers)
    assert skeleton("bench").mtp is None


def test_every_state_of_the_release_is_planned():
    plan = skeleton()
    entries = plan.state_plan()
    assert len(entries) == 46 and [entry.layer for entry in entries] == list(range(46))
    assert Counter(entry.kind for entry in entries) == {"recurrent": 34, "sparse_kv": 12}
    assert entries[-1] == StateEntry(45, "sparse_kv", is_mtp=True)
    assert plan.kv_cache_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 45)
    assert plan.kda_state_layers == tuple(i for i in range(45) if i not in plan.kv_cache_layers)


def test_hyper_connected_layer_collapses_and_expands_the_streams_at_both_sites():
    plan = skeleton()
    kda_dense, dsa_moe = plan.layers[0], plan.layers[3]
    assert plan.residual_plan(kda_dense) == (
        "attn.collapse",
        "attn.norm",
        "attn.kda",
        "attn.expand",
        "ffn.collapse",
        "ffn.norm",
        "ffn.dense",
        "ffn.expand",
    )
    assert plan.residual_plan(dsa_moe)[2::4] == ("attn.dsa", "ffn.moe")


def test_mtp_layer_is_a_plain_pre_norm_residual():
    plan = skeleton()
    assert plan.residual_plan(plan.mtp) == (
        "attn.norm",
        "attn.dsa",
        "attn.add",
        "ffn.norm",
        "ffn.moe",
        "ffn.add",
    )


def test_text_ends_with_mean_norm_and_head():
    assert skeleton().final_plan() == ("final.mean", "final.norm", "final.head")


def test_indexer_of_a_layer_is_known_where_there_is_one():
    raw = json.loads(RELEASE.read_text())
    raw["text_config"]["indexer_types"][7] = "shared"
    plan = Skeleton.from_config(parse_config(raw))
    assert [plan.layers[i].indexer for i in (3, 6, 7, 11)] == ["full", None, "shared", "full"]
    assert plan.mtp.indexer == "full"


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer": "mamba"},
        {"mlp": "sparse"},
        {"mixer": "kda"},  # with an indexer
        {"indexer": None},
        {"hyper_connection": False},
        {"is_mtp": True},
        {"is_mtp": True, "hyper_connection": False, "mlp": "dense"},
        {"is_mtp": True, "hyper_connection": False, "indexer": "shared"},
        {"is_mtp": True, "hyper_connection": False, "mixer": "kda", "indexer": None},
    ],
)
def test_layer_that_the_family_does_not_have_is_refused(changes):
    with pytest.raises(ConfigError, match="layer 3"):
        dataclasses.replace(skeleton().layers[3], **changes)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["linear_attention", "full_attention"]),
            st.sampled_from(["dense", "sparse"]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 1),
)
def test_any_stack_is_laid_out_as_its_lists_say(kinds, mtp):
    raw = json.loads((CONFIGS / "tiny.json").read_text())
    raw["text_config"] |= {
        "num_hidden_layers": len(kinds),
        "layer_types": [mixer for mixer, _ in kinds],
        "mlp_layer_types": [mlp for _, mlp in kinds],
        "indexer_types": ["full"] * len(kinds),
        "num_nextn_predict_layers": mtp,
    }
    plan = Skeleton.from_config(parse_config(raw))
    names = {"linear_attention": "kda", "full_attention": "dsa", "dense": "dense", "sparse": "moe"}
    assert [(layer.mixer, layer.mlp) for layer in plan.layers] == [
        (names[mixer], names[mlp]) for mixer, mlp in kinds
    ]
    assert len(plan.state_plan()) == len(kinds) + mtp
    kda, kv = plan.kda_state_layers, plan.kv_cache_layers
    assert sorted(kda + kv) == list(range(len(kinds) + mtp))
    assert all(f"attn.{layer.mixer}" in plan.residual_plan(layer) for layer in plan.layers)
