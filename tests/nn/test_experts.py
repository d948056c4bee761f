"""Running the chosen experts only: every pair once, whatever the sizes of the groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.nn.experts import apply_experts


@functools.partial(jax.jit, static_argnums=2)
def apply_linear(weights, tokens, num_experts, chosen):
    return apply_experts(lambda e, rows: rows @ weights[e].T, tokens, chosen, num_experts)


def chosen_with_counts(counts, experts_per_token, seed=0):
    """`[t, k]` choices, in random order, where expert e occurs `counts[e]` times."""
    flat = np.repeat(np.arange(len(counts)), counts)
    flat = np.random.default_rng(seed).permutation(flat)
    return flat.reshape(-1, experts_per_token)


def check(counts, experts_per_token, width=5):
    rng = np.random.default_rng(1)
    chosen = chosen_with_counts(counts, experts_per_token)
    tokens = rng.standard_normal((len(chosen), width))
    weights = rng.standard_normal((len(counts), width, width))
    pairs = zip(tokens, chosen, strict=True)
    expected = np.stack([[weights[e] @ x for e in row] for x, row in pairs])
    got = apply_linear(weights, tokens, len(counts), jnp.asarray(chosen))
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize(
    "counts",
    [
        (0, 257, 255, 0),  # empty groups at both ends, one row more and one less than whole blocks
        (512, 0, 0, 0),
        (0, 0, 0, 512),
        (128, 128, 128, 128),
        (1, 509, 1, 1),
    ],
)
def test_groups_of_any_size_equal_a_loop_over_pairs(counts):
    check(counts, 2)


@pytest.mark.parametrize("width", [128, 160, 192])
def test_any_width_equals_a_loop_over_pairs(width):
    check((0, 65, 63, 2), 2, width)


@pytest.mark.parametrize("counts", [(1, 0, 0), (0, 1, 1), (1, 1, 1)])
def test_single_tokens_equal_a_loop_over_pairs(counts):
    check(counts, sum(counts))


def test_more_experts_than_pairs():
    counts = np.zeros(64, int)
    counts[[3, 17, 63]] = 1
    check(counts, 3)


def test_a_token_that_chooses_one_expert_twice_gets_it_twice():
    weights, tokens = jnp.ones((2, 1, 1)) * jnp.array([3.0, 5.0])[:, None, None], jnp.ones((1, 1))
    out = apply_linear(weights, tokens, 2, jnp.asarray([[1, 1]]))
    np.testing.assert_array_equal(out, [[[5.0], [5.0]]])


def test_block_of_rows_is_computed_only_if_an_expert_has_pairs():
    computed = []

    def expert(index, rows):
        n = len(rows)
        jax.debug.callback(lambda e: computed.append((int(e), n)), index)
        return rows

    chosen = jnp.asarray(chosen_with_counts((0, 40, 0, 8, 0, 0, 0, 0), 2))
    jax.block_until_ready(apply_experts(expert, jnp.ones((24, 3)), chosen, 8))
    jax.effects_barrier()
    assert {e for e, _ in computed} == {1, 3}
    # Blocks of 8 rows, the power of two above a mean of 6: five for expert 1, one for expert 3.
    assert sorted(computed) == [(1, 8)] * 5 + [(3, 8)]


@pytest.mark.codegen
@pytest.mark.parametrize("counts", [(5, 300, 0, 131, 12, 64), (1, 1, 1, 1, 1, 1)])
def test_a_part_of_the_experts_gives_the_bits_that_all_give(counts):
    def outputs(weights, tokens, chosen):
        expert = lambda e, rows: jnp.tanh(rows @ weights[e].T)  # noqa: E731
        return apply_experts(expert, tokens, chosen, len(counts), len(weights))

    rng = np.random.default_rng(3)
    chosen = chosen_with_counts(counts, 2)
    tokens = rng.standard_normal((len(chosen), 24), np.float32)
    weights = rng.standard_normal((len(counts), 24, 24), np.float32)
    run = jax.jit(outputs)
    whole = np.asarray(run(weights, tokens, chosen))
    for at_hand in ([0, 3], [4, 1], [5, 2]):
        place = np.full(len(counts), 2)
        place[at_hand] = [0, 1]
        part = np.asarray(run(weights[at_hand], tokens, place[chosen]))
        here = np.isin(chosen, at_hand)
        np.testing.assert_array_equal(part[here], whole[here])
        assert not part[~here].any()


def test_gradient_reaches_chosen_experts_only():
    weights, tokens = jnp.ones((4, 2, 2)), jnp.ones((3, 2))
    chosen = jnp.asarray([[0, 2], [2, 0], [0, 2]])
    gradient = jax.grad(lambda w: apply_linear(w, tokens, 4, chosen).sum())(weights)
    np.testing.assert_array_equal(gradient[:, 0, 0], [3, 0, 3, 0])
