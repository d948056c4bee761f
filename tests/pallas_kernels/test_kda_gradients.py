"""Gradients: against finite differences, the recurrence's own, and where a gate saturates."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels.kda import chunk_kda, kda_gate
from pallas_kernels.kda.xla import CHUNK, SEGMENT

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def loss(x, rest, implementation):
    """A number on which every output has another weight."""
    outputs = chunk_kda(**x, **rest, output_final_state=True, implementation=implementation)
    return sum(jnp.vdot(x, jnp.cos(jnp.arange(x.size))) for x in map(jnp.ravel, outputs))


gradients = jax.jit(jax.grad(loss), static_argnames="implementation")


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_equal_finite_differences(float64, kda_arguments, cast, implementation):
    # Two chunks; documents that end within one and at its end; a row that ends within one.
    ids = np.array([[0] * 7 + [1] * 9 + [2] * 3, [0] * 19], np.int32)
    rest = {"segment_ids": jnp.asarray(ids), "lengths": jnp.array([19, 11], jnp.int32)}
    x = cast(kda_arguments(19, H=1, K=3, V=2), jnp.float64)
    flat, unravel = jax.flatten_util.ravel_pytree(x)
    step = 1e-5

    @jax.jit
    @jax.vmap
    def difference(direction):
        up, down = (
            loss(unravel(flat + s * direction), rest, implementation) for s in (step, -step)
        )
        return (up - down) / (2 * step)

    ours = gradients(x, rest, implementation)
    differences = unravel(difference(jnp.eye(flat.size)))
    for name in NAMES:
        assert_allclose(ours[name], differences[name], rtol=0, atol=1e-8, err_msg=name)

    poisoned = x | {name: x[name].at[1, 11:].set(jnp.nan) for name in NAMES[:5]}
    for name, gradient in gradients(poisoned, rest, implementation).items():
        assert_array_equal(gradient, ours[name])
        if name != "initial_state":
            assert_array_equal(gradient[1, 11:], 0)


@pytest.mark.parametrize(
    "replaced",
    [{}, {"g": -5.0}, {"g": 0.0, "beta": 1.0}, {"g": -200.0}, {"g": -1e30}, {"q": 0.0, "k": 0.0}],
    ids=str,
)
def test_gradients_equal_those_of_the_recurrence(float64, kda_arguments, cast, replaced):
    x = cast(kda_arguments(130, **replaced), jnp.float64)
    ours, truth = gradients(x, {}, "xla"), gradients(x, {}, "reference")
    scale = max(np.abs(x).max() for x in truth.values())
    for name in NAMES:
        assert np.isfinite(ours[name]).all(), name
        assert_allclose(ours[name], truth[name], rtol=0, atol=1e-9 * min(scale, 1), err_msg=name)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients_are_finite_where_the_gate_saturates(float32, kda_arguments, cast, lower_bound):
    x = cast(kda_arguments(17, K=8), jnp.float32)
    # Rates from nothing to overflow, on either side: g at its bound, at 0, and at −1e38.
    f = jnp.asarray(np.random.default_rng(0).choice([-1e4, -200, 0, 200, 1e4], x["g"].shape))
    A_log = jnp.array([100.0, -3.0])

    @jax.jit
    @jax.grad
    def gradient(gate):
        g = kda_gate(*gate, lower_bound)
        return loss(x | {"g": g}, {}, "xla")

    gate = (f.astype(jnp.float32), A_log, jnp.zeros(16))
    assert all(np.isfinite(x).all() for x in gradient(gate))


def test_forward_mode_agrees_with_reverse_mode(float64, kda_arguments, cast):
    x = cast(kda_arguments(17), jnp.float64)
    tangent = cast(kda_arguments(17, seed=1), jnp.float64)
    _, forward = jax.jit(lambda *x: jax.jvp(lambda x: loss(x, {}, "xla"), *x))((x,), (tangent,))
    gradient = gradients(x, {}, "xla")
    assert_allclose(
        forward, sum(jnp.vdot(gradient[name], tangent[name]) for name in NAMES), rtol=1e-10
    )


def test_backward_keeps_the_inputs_and_one_state_per_segment(float32, kda_arguments, cast):
    def kept(tokens):
        arguments = cast(kda_arguments(tokens), jnp.float32)
        residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: chunk_kda(**x)[0], x)[1], arguments)
        return sum(x.size for x in jax.tree.leaves(residuals))

    segment = CHUNK * SEGMENT
    tokens, state = segment * 2 * 2 * (8 + 8 + 12 + 8 + 1), 2 * 2 * 8 * 12
    assert kept(6 * segment) - kept(5 * segment) == tokens + state
