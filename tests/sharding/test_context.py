"""Rows whose tokens are cut over devices: the numbers of one device, and what is sent for them."""

from dataclasses import replace

import pytest

from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.config import load_config
from glm5_jax.errors import ConfigError
from glm5_jax.sharding import PRESETS, check_rules


@pytest.fixture(scope="module")
def runs(eight_heads, run_apart, tmp_path_factory):
    path = make_tiny(tmp_path_factory.mktemp("model") / "m", eight_heads(1), dtype="float32")
    return run_apart("contexts.py", path, x64=True)


@pytest.mark.parametrize(
    "gates",
    [
        "drawn",
        "no decay",
        "total decay",
        "total decay of some",
        "nothing written",
        "all written",
        "one key",
    ],
)
def test_outputs_and_the_last_state_are_those_of_one_device(runs, gates):
    found = runs["recurrences"][gates]
    assert max(found["float64"]) <= 1e-14
    for ours, theirs in zip(found["float32"], found["unsharded"], strict=True):
        assert ours <= 1.5 * theirs + 1e-7


def test_a_row_may_begin_without_a_state(runs):
    assert max(runs["recurrences"]["alone"]) <= 1e-14


@pytest.mark.parametrize("cut", ["context", "context, tensor", "expert, tensor"])
def test_logits_choices_states_and_caches_are_those_of_one_device(runs, cut):
    found = runs["models"][cut]
    assert found["pass"] <= 1e-12
    assert found["choices"] == 0
    assert found.get("continued", 0) <= 1e-12


def exchanged(parts, heads, hops):
    """By the one KDA layer and the one DSA layer, of 2 rows of 16 tokens in so many parts."""
    rounds = {2: 1, 4: 2, 8: 3}[parts]
    return {
        # Three columns before a device's own, of q, k and v; from so many neighbours.
        ("collective-permute", f"f64[2,3,{14 * heads}]"): 3 * hops,
        # U in every round, M in all but the last, and the state before each device's own tokens.
        ("collective-permute", f"f64[2,{heads},14,14]"): 2 * rounds,
        ("all-reduce", f"f64[2,{heads},14,14]"): 1,  # the site `state`
        ("all-gather", "f64[2,16,26]"): 1,  # latents
        ("all-gather", "f64[2,16,22]"): 2,  # index keys, and the gates of pools
    }


# The embedding, two mixers, a dense MLP and a shared expert; and one layer of routed ones.
WITHIN_TENSOR = ("all-reduce", "f64[2,4,48]")


@pytest.mark.parametrize(
    ("cut", "part", "moved"),
    [
        ("context", [2, 2, 224], exchanged(8, 8, hops=2)),
        ("context, tensor", [2, 4, 112], exchanged(4, 4, hops=1) | {WITHIN_TENSOR: 6}),
        (
            "expert, tensor",
            [2, 4, 112],
            exchanged(4, 4, hops=1)
            | {
                WITHIN_TENSOR: 6,
                ("all-gather", "f64[2,16,48]"): 1,
                ("all-gather", "s32[2,16,3]"): 1,
                ("all-gather", "f64[2,16,3]"): 1,
                ("reduce-scatter", "f64[2,4,48]"): 1,
            },
        ),
    ],
)
def test_a_pass_sends_states_and_latents_and_gathers_no_columns(runs, cut, part, moved):
    found = runs["models"][cut]
    assert found["part"] == part  # the logits stay where their tokens are
    assert {(kind, shape): n for kind, shape, n in found["sent"]} == moved


@pytest.mark.parametrize(("axis", "other"), [("data", "batch"), ("tensor", "vocab")])
def test_tokens_need_an_axis_of_their_own_or_that_of_the_experts(axis, other):
    config = load_config(packaged_config("glm5_3_flash"))
    check_rules(replace(PRESETS["tp_ep"], batch="data", sequence="expert"), config, {"expert": 2})
    with pytest.raises(ConfigError, match=f"sequence and {other} are both cut along {axis}"):
        check_rules(replace(PRESETS["tp"], sequence=axis), config, {axis: 2})
