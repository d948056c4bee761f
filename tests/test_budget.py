"""Bytes of the parameters and of a sequence's state, to the byte."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.budget import (
    ParameterCount,
    budget_dict,
    budget_text,
    parameter_budget,
    state_budget,
)
from glm5_jax.config import load_config
from glm5_jax.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
RELEASE = load_config(CONFIGS / "glm5_3_flash.json")
TINY = load_config(CONFIGS / "tiny.json")


@pytest.fixture(scope="module")
def parameters():
    return parameter_budget(RELEASE)


def test_parameters_of_the_release(parameters):
    assert parameters.total == ParameterCount(38_770, 321_323_031_390, 642_646_653_816)
    assert parameters.by_part() == {
        "text": ParameterCount(37_534, 313_326_811_966, 626_654_214_392),
        "mtp": ParameterCount(889, 7_432_592_416, 14_865_185_408),
        "vision": ParameterCount(347, 563_627_008, 1_127_254_016),
    }


def test_tensors_of_the_release_by_role(parameters):
    tensors = {role: count.tensors for role, count in parameters.by_role().items()}
    kda = ("kda_projection", "kda_conv", "kda_decay", "kda_norm")
    assert [tensors[role] for role in kda] == [306, 102, 68, 34]
    dsa = ("mla_projection", "mla_norm", "indexer", "indexer_norm")
    assert [tensors[role] for role in dsa] == [60, 24, 60, 24]
    assert (tensors["hyper_connection"], tensors["layer_norm"]) == (270, 92)
    assert tensors["moe_expert"] == 43 * 288 * 3


def test_what_must_be_float32_weighs_four_bytes(parameters):
    decay = parameters.by_role()["kda_decay"]
    assert decay.bytes == 4 * decay.parameters == 4 * 34 * (64 + 64 * 128)
    router = parameters.by_role()["moe_router"]
    assert router.bytes - 2 * router.parameters == 2 * 43 * 288  # the correction bias


def test_roles_and_parts_are_two_views_of_the_same_tensors(parameters):
    for view in (parameters.by_role(), parameters.by_part()):
        assert sum(view.values(), ParameterCount()) == parameters.total


def test_part_that_the_config_lacks_weighs_nothing():
    bare = dataclasses.replace(RELEASE, num_nextn_predict_layers=0, vision=None)
    parts = parameter_budget(bare).by_part()
    assert parts["mtp"] == parts["vision"] == ParameterCount(0, 0, 0)
    assert parts["text"] == parameter_budget(RELEASE).by_part()["text"]


def test_state_of_the_release():
    state = state_budget(RELEASE)
    assert state.kda_recurrent == 142_606_336
    assert state.kda_conv == 5_013_504
    assert state.kda_replay == 0
    assert state.dsa_kv_per_token == 11_264
    assert state.dsa_indexer_per_token == 5_643
    assert state.streams_per_token == 65_536
    assert state.routing_per_token == 1_216
    assert state.fixed() == 142_606_336 + 5_013_504
    assert state.per_token() == 11_264 + 5_643 + 65_536 + 1_216
    assert state.for_sequence(1000) == state.fixed() + 1000 * state.per_token()
    assert state.for_sequence(0) == state.fixed()


def test_cache_of_the_mtp_layer_is_counted_apart():
    with_mtp = state_budget(RELEASE)
    without = state_budget(dataclasses.replace(RELEASE, num_nextn_predict_layers=0))
    assert with_mtp.mtp_per_token == 512 * 2 + 2 * 128 * 2 + 1 == (11_264 + 5_643) // 11
    assert (with_mtp.mtp_bytes_per_pool, with_mtp.mtp_counters) == (128 * 2, 4)
    assert without == dataclasses.replace(
        with_mtp, mtp_per_token=0, mtp_bytes_per_pool=0, mtp_counters=0
    )
    assert with_mtp.per_token() == without.per_token()


def test_pool_keys_and_counters_are_counted_apart():
    state = state_budget(RELEASE)
    assert (state.dsa_bytes_per_pool, state.counters) == (11 * 128 * 2, 8)
    bare = dataclasses.replace(state, dsa_bytes_per_pool=0, counters=0)
    assert (bare.fixed(), bare.per_token()) == (state.fixed(), state.per_token())


def test_layer_that_shares_a_selection_keeps_no_index():
    shared = dataclasses.replace(RELEASE, indexer_types=("full",) * 7 + ("shared",) * 38)
    full, state = state_budget(RELEASE), state_budget(shared)
    assert state.dsa_indexer_per_token == 2 * 128 * 2 + 11  # layer 3's, and validity
    assert state.dsa_bytes_per_pool == 128 * 2
    assert state.dsa_kv_per_token == full.dsa_kv_per_token


def test_one_rank_holds_its_heads_state_and_the_whole_latent():
    whole, rank = state_budget(RELEASE, rewind=4), state_budget(RELEASE, rewind=4).per_rank(8)
    assert rank.kda_recurrent * 8 == whole.kda_recurrent
    assert rank.kda_conv * 8 == whole.kda_conv
    assert rank.kda_replay * 8 == whole.kda_replay > 0
    assert rank.per_token() == whole.per_token() and rank.mtp_per_token == whole.mtp_per_token
    assert whole.per_rank(1) == whole
    assert whole.per_rank(2).per_rank(4) == rank


@pytest.mark.parametrize("ranks", [0, -1, 3, 128])
def test_ranks_must_divide_the_heads(ranks):
    with pytest.raises(ConfigError, match=f"64 KDA heads cannot be divided over {ranks} ranks"):
        state_budget(RELEASE).per_rank(ranks)


def test_float32_state_stays_float32_and_the_rest_doubles():
    narrow, wide = state_budget(RELEASE, "bfloat16"), state_budget(RELEASE, "float32")
    assert wide.kda_recurrent == narrow.kda_recurrent
    assert wide.streams_per_token == narrow.streams_per_token
    assert wide.routing_per_token == narrow.routing_per_token
    assert wide.kda_conv == 2 * narrow.kda_conv
    assert wide.dsa_kv_per_token == 2 * narrow.dsa_kv_per_token
    assert wide.dsa_indexer_per_token == 2 * narrow.dsa_indexer_per_token - 11  # validity


def test_float64_widens_every_float32_island():
    single, double = state_budget(RELEASE, "float32", 3), state_budget(RELEASE, "float64", 3)
    for name in (
        "kda_recurrent",
        "kda_conv",
        "kda_replay",
        "dsa_kv_per_token",
        "streams_per_token",
    ):
        assert getattr(double, name) == 2 * getattr(single, name)
    assert double.routing_per_token == 2 * single.routing_per_token - 8 * 4  # ids stay int32


def test_stored_means_what_the_config_names():
    assert state_budget(RELEASE, "stored") == state_budget(RELEASE, "bfloat16")
    named = dataclasses.replace(RELEASE, dtype="float32")
    assert state_budget(named, "stored") == state_budget(named, "float32")
    unnamed = dataclasses.replace(RELEASE, dtype=None)
    assert state_budget(unnamed, "stored") == state_budget(unnamed, "bfloat16")


def test_going_back_costs_conv_columns_and_what_replays_the_recurrence():
    # 5 heads of 14, 4 KDA layers: per token 3·70 columns; k, v in bfloat16, g and beta in float32.
    still, back = state_budget(TINY), state_budget(TINY, rewind=1)
    assert back.kda_conv - still.kda_conv == 4 * 3 * 70 * 2
    assert back.kda_replay == 4 * (2 * 70 * 2 + 70 * 4 + 5 * 4)
    assert back.per_token() == still.per_token() and back.kda_recurrent == still.kda_recurrent


@settings(deadline=None)
@given(st.integers(0, 64), st.integers(0, 64), st.sampled_from(["bfloat16", "float32", "float64"]))
def test_depth_of_rewind_costs_linearly(a, b, dtype):
    def cost(rewind):
        return state_budget(TINY, dtype, rewind).fixed() - state_budget(TINY, dtype).fixed()

    assert cost(a) + cost(b) == cost(a + b)


def test_stack_without_experts_routes_nothing():
    dense = dataclasses.replace(TINY, mlp_layer_types=("dense",) * 5)
    assert state_budget(dense).routing_per_token == 0
    assert state_budget(TINY).routing_per_token == 16 * 4 + 3 * 8


def test_wrong_dtype_depth_and_length_are_refused():
    with pytest.raises(ConfigError, match="dtype must be one of bfloat16, float32, float64"):
        state_budget(TINY, "int8")
    with pytest.raises(ConfigError, match="rewind must be 0"):
        state_budget(TINY, rewind=-1)
    with pytest.raises(ConfigError, match="0 tokens or more"):
        state_budget(TINY).for_sequence(-1)


def test_printed_budget_says_every_figure_once():
    def by_name(text):
        return {line.split()[0]: line for line in text.splitlines() if line}

    roles, state = map(by_name, budget_text(RELEASE, tokens=1000).split("state of one sequence"))
    for role, count in parameter_budget(RELEASE).by_role().items():
        assert f"{count.tensors:,}" in roles[role] and f"{count.bytes:,}" in roles[role]
    assert "321,323,031,390" in roles["total"]
    for name, size in dataclasses.asdict(state_budget(RELEASE)).items():
        assert name == "kda_heads" or f"{size:,} B" in state[name]
    assert f"{state_budget(RELEASE).for_sequence(1000):,} B" in state["1,000"]


def test_json_budget_survives_json():
    numbers = budget_dict(RELEASE, "float32", 2, 10)
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["parameters"]["total"]["parameters"] == 321_323_031_390
    state = state_budget(RELEASE, "float32", 2)
    assert numbers["state"]["for_sequence"] == state.for_sequence(10)
    assert numbers["state"]["kda_replay"] == state.kda_replay
