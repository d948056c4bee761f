"""Feed-forward layers: where the clamps bite, how experts are chosen and weighed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.nn import ffn
from glm5_jax.nn.ffn import candidate_scores, clamped_swiglu

route = jax.jit(
    ffn.route, static_argnames=("top_k", "groups", "top_groups", "normalize", "scaling")
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def routing(logits, bias=0.0, **changes):
    logits = jnp.asarray(logits)
    options = dict(top_k=2, groups=1, top_groups=1, normalize=True, scaling=2.5)
    bias = jnp.zeros(logits.shape[-1], jnp.float32) + jnp.asarray(bias, jnp.float32)
    return route(logits, bias, **(options | changes))


def reference_swiglu(p, x, limit):
    gate, up = x @ p["gate_proj"].T, x @ p["up_proj"].T
    gate = np.minimum(gate, limit)
    return (gate * sigmoid(gate) * np.clip(up, -limit, limit)) @ p["down_proj"].T


def reference_moe(small, prefix, x):
    c = small.config
    router, experts = (small.below(f"{prefix}.{n}") for n in ("router", "experts"))
    out = reference_swiglu(small.below(f"{prefix}.shared"), x, c.swiglu_limit)
    for at in np.ndindex(x.shape[:-1]):
        scores = sigmoid(router["weight"] @ x[at])
        chosen = np.argsort(-(scores + router["bias"]))[: c.num_experts_per_tok]
        weights = scores[chosen] / (scores[chosen].sum() + 1e-20) * c.routed_scaling_factor
        for e, weight in zip(chosen, weights, strict=True):
            one = {name: w[e] for name, w in experts.items()}
            out[at] += weight * reference_swiglu(one, x[at], c.swiglu_limit)
    return out


# ---- SwiGLU


def test_gate_is_clamped_above_only_and_before_silu():
    gate = jnp.asarray([-50.0, -1.0, 9.0, 50.0])
    out = clamped_swiglu(gate, jnp.ones(4), 10.0)
    # silu(-50), not silu(-10) = -4.5e-4; silu(10), not min(silu(50), 10).
    clamped = np.array([-50.0, -1.0, 9.0, 10.0])
    np.testing.assert_allclose(out, clamped * sigmoid(clamped), rtol=1e-13)
    assert abs(out[0]) < 1e-19


def test_up_is_clamped_on_both_sides():
    up = jnp.asarray([-50.0, -9.0, 9.0, 50.0])
    out = clamped_swiglu(jnp.full(4, 2.0), up, 10.0)
    expected = 2 * sigmoid(2.0) * np.array([-10, -9, 9, 10])
    np.testing.assert_allclose(out, expected, rtol=1e-14)


def test_dense_layer_equals_the_reference(small, call, hidden):
    x = 3 * hidden
    p = small.below("layers.0.ffn")
    limit = small.config.swiglu_limit
    assert np.any(x @ p["gate_proj"].T > limit)
    assert np.any(x @ p["up_proj"].T < -limit)
    expected = reference_swiglu(p, x, limit)
    np.testing.assert_allclose(call(small.model.layers[0].ffn, x), expected, atol=1e-12)


# ---- the router


def test_equal_experts_share_the_scaling_factor():
    experts, weights = routing(np.zeros((1, 8)), top_k=8)
    np.testing.assert_array_equal(experts, [np.arange(8)])
    np.testing.assert_allclose(weights, 0.3125, rtol=1e-15)


def test_without_normalisation_weights_are_scaled_sigmoids():
    experts, weights = routing([[0.0, 2.0, -1.0]], normalize=False)
    np.testing.assert_array_equal(experts, [[1, 0]])
    np.testing.assert_allclose(weights, [[2.5 * sigmoid(2.0), 1.25]], rtol=1e-14)


def test_weights_are_divided_by_their_own_sum():
    _, weights = routing([[0.0, 2.0, -1.0]])
    s = sigmoid(np.array([2.0, 0.0]))
    np.testing.assert_allclose(weights, [s / s.sum() * 2.5], rtol=1e-14)


def test_correction_bias_decides_and_does_not_weigh():
    experts, weights = routing([[0.0, 2.0, -1.0]], [0.0, 0.0, 5.0])
    np.testing.assert_array_equal(experts, [[2, 1]])
    s = sigmoid(np.array([-1.0, 2.0]))
    np.testing.assert_allclose(weights, [s / s.sum() * 2.5], rtol=1e-14)


def test_bias_is_added_to_the_sigmoid_and_not_to_the_logit():
    # Logits 4 and 6 differ by 0.016 as sigmoids: a bias of 0.1 turns them.
    experts, _ = routing([[6.0, 4.0]], [0.0, 0.1], top_k=1)
    np.testing.assert_array_equal(experts, [[1]])


def test_biases_around_seven_are_told_apart():
    # In bfloat16 all 238 would round to 8 values.
    bias = np.random.default_rng(0).permutation(np.linspace(6.817, 7.063, 238))
    experts, _ = routing(np.zeros((1, 238), np.float32), bias, top_k=8)
    np.testing.assert_array_equal(experts, [np.argsort(-bias)[:8]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_stays_float32_in_every_model(build, dtype):
    assert build(dtype).model.layers[1].ffn.router.bias.dtype == np.float32


def test_router_tells_logits_apart_that_bfloat16_cannot(build, call):
    small = build("bfloat16")
    # Logits 0.5, and 1e-4 more for the last expert: bfloat16 steps by 2^-8 there.
    weight = np.full((9, 24), 0.5 / 24, np.float32)
    weight[-1] += 1e-4 / 24
    model = small.with_arrays(
        {"layers.1.ffn.router.weight": weight, "layers.1.ffn.router.bias": np.zeros(9, np.float32)}
    )
    experts, weights = call(model.layers[1].ffn.router, np.ones((3, 23, 24), jnp.bfloat16))
    assert weights.dtype == np.float32
    assert np.all(experts[..., 0] == 8)


def test_ties_between_experts_go_to_the_lower_index():
    experts, _ = routing([[1.0, 1.0, 2.0, 1.0]], top_k=3)
    np.testing.assert_array_equal(experts, [[2, 0, 1]])


# ---- groups


def test_groups_are_ranked_by_the_sum_of_their_best_two():
    # Group 0 has the best expert, group 1 the best pair, group 2 the largest total.
    biased = jnp.asarray([[0.9, 0.1, 0.1, 0.6, 0.7, 0.1, 0.5, 0.5, 0.5]])
    group = [[-np.inf] * 3 + [0.6, 0.7, 0.1] + [-np.inf] * 3]
    np.testing.assert_array_equal(candidate_scores(biased, 3, 1), group)


def test_only_experts_of_the_best_groups_are_chosen():
    bias = [0.9, 0.1, 0.8, 0.7, 0.6, 0.65]
    chosen = [
        routing([[0.0] * 6], bias, top_k=3, groups=groups, top_groups=kept).experts
        for groups, kept in ((3, 2), (1, 1))
    ]
    np.testing.assert_array_equal(chosen, [[[2, 3, 5]], [[0, 2, 3]]])


def test_negative_scores_of_a_best_group_outrank_other_groups():
    # Experts outside are −inf, not 0, which would beat a negative score.
    # −0.6 and −0.7 after the sigmoid's half, group 1 has −1.4 and −1.3.
    experts, _ = routing([[0.0] * 4], [-1.1, -1.2, -1.9, -1.8], groups=2, top_groups=1)
    np.testing.assert_array_equal(experts, [[0, 1]])


# ---- the mixture


def test_mixture_equals_the_reference(small, call, hidden):
    x = 3 * hidden
    limit = small.config.swiglu_limit
    for part in ("experts", "shared"):
        p = small.below(f"layers.1.ffn.{part}")
        assert np.any(np.einsum("btx,...ix->bt...i", x, p["gate_proj"]) > limit)
    expected = reference_moe(small, "layers.1.ffn", x)
    np.testing.assert_allclose(call(small.model.layers[1].ffn, x), expected, atol=1e-12)


@pytest.mark.codegen
def test_a_token_does_not_depend_on_the_tokens_beside_it(small, call, hidden):
    together = call(small.model.layers[1].ffn, hidden)
    changed = hidden.copy()
    changed[1:], changed[0, 5:] = -changed[1:], 7.0
    np.testing.assert_array_equal(call(small.model.layers[1].ffn, changed)[0, :5], together[0, :5])


def test_nan_of_one_token_stays_with_it(small, call, hidden):
    expected = call(small.model.layers[1].ffn, hidden)
    poisoned = hidden.copy()
    poisoned[0, 0] = np.nan
    out = call(small.model.layers[1].ffn, poisoned)
    np.testing.assert_array_equal(out.reshape(-1, 24)[1:], expected.reshape(-1, 24)[1:])
