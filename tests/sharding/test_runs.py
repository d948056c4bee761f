"""Cut over eight devices in every way, the model computes what it computes on one."""

import pytest

from glm5_jax.checkpoint.tiny import make_tiny

PARTS = {
    "tp": {"experts": [16, 5, 48], "heads": [48, 14], "vocab": [28, 48]},
    "ep": {"experts": [2, 40, 48], "heads": [48, 112], "vocab": [224, 48]},
    "tp_ep": {"experts": [8, 10, 48], "heads": [48, 28], "vocab": [56, 48]},
    "fsdp": {"experts": [16, 40, 6], "heads": [6, 112], "vocab": [224, 6]},
}


@pytest.fixture(scope="module")
def runs(eight_heads, run_apart, tmp_path_factory):
    config, at = eight_heads(2), tmp_path_factory.mktemp("model")
    path = make_tiny(at / "m", config, dtype="float32")
    quantized = make_tiny(at / "fp8", config, dtype="float32", quantization="fp8")
    return run_apart("runs.py", path, quantized, x64=True)


@pytest.mark.parametrize("preset", PARTS)
def test_logits_and_choices_are_those_of_one_device(runs, preset):
    found = runs["presets"][preset]
    assert found["parts"] == PARTS[preset]
    assert found["choices"]
    assert found["generated"]
    assert found["steps compiled"] == 1
    assert max(found["errors"]) <= 1e-12 * runs["scale"]


def test_rules_of_ones_own_compute_the_same(runs):
    assert runs["own"] <= 1e-12 * runs["scale"]


def test_a_trace_is_that_of_one_device(runs):
    assert runs["presets"]["tp_ep"]["traced"] == []


def test_quantised_experts_in_float32_are_as_close_as_rounding(runs):
    assert 0 < runs["narrow"] <= 1e-5


# The embedding, three mixers, a dense MLP, two shared experts, two layers of routed ones.
WITHIN_TENSOR = 9
# A layer whose tokens come to the experts, with their choices and weights, and whose sums go back.
AROUND_EXPERTS = {
    ("all-gather", "f64[8,1,48]"): 2,
    ("all-gather", "s32[8,1,3]"): 2,
    ("all-gather", "f64[8,1,3]"): 2,
}


@pytest.mark.parametrize(
    ("preset", "moved"),
    [
        ("tp", {("all-reduce", "f64[8,1,48]"): WITHIN_TENSOR}),
        ("ep", AROUND_EXPERTS | {("reduce-scatter", "f64[1,1,48]"): 2}),
        (
            "tp_ep",
            AROUND_EXPERTS
            | {
                ("reduce-scatter", "f64[4,1,48]"): 2,
                ("all-reduce", "f64[4,1,48]"): WITHIN_TENSOR,
            },
        ),
    ],
)
def test_a_step_of_decoding_moves_activations_and_nothing_else(runs, preset, moved):
    found = runs["presets"][preset]["moved"]
    assert {(kind, shape): n for kind, shape, n in found} == moved
