"""Documents packed into one row, and rows that end before the array does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from pallas_kernels.kda import chunk_kda

T = 130
TOKENS = ("q", "k", "v", "g", "beta")

run = jax.jit(
    functools.partial(chunk_kda, output_final_state=True), static_argnames="implementation"
)
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


@both
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_documents_and_ends_anywhere(
    kda_arguments, cast, exact_kda, assert_same, implementation, data
):
    arguments = kda_arguments(T, seed=data.draw(st.integers(0, 2**32 - 1)))
    # Ids may come back, and change past the end as well: only a change among real tokens counts.
    few = st.lists(st.integers(0, T - 1), max_size=8)
    ids = np.zeros((2, T), np.int32)
    for row in ids:
        row[data.draw(few)] = 7
        row[data.draw(few)] -= 3
    lengths = np.array(data.draw(st.tuples(*[st.integers(0, T)] * 2)), np.int32)
    truth = exact_kda(**arguments, segment_ids=ids, lengths=lengths)
    for name in TOKENS:
        for row, length in zip(arguments[name], lengths, strict=True):
            row[length:] = np.nan
    with jax.enable_x64(True):
        arguments = cast(arguments | {"segment_ids": ids, "lengths": lengths}, jnp.float64)
        assert_same(run(**arguments, implementation=implementation), truth, 1e-12)


@pytest.mark.parametrize("boundary", [1, 15, 16, 17, 64, 129])
def test_two_documents_packed_are_the_two_apart(
    float64, kda_arguments, cast, assert_same, boundary
):
    arguments = cast(kda_arguments(T), jnp.float64)

    def alone(start, end, state):
        # One document, at the beginning of a row that ends with it.
        rolled = {name: jnp.roll(arguments[name], -start, axis=1) for name in TOKENS}
        whole = jnp.zeros((2, T), jnp.int32)
        lengths = jnp.full(2, end - start, jnp.int32)
        o, state = run(**rolled, initial_state=state, segment_ids=whole, lengths=lengths)
        return o[:, : end - start], state

    state = arguments["initial_state"]
    first, _ = alone(0, boundary, state)
    second, last = alone(boundary, T, jnp.zeros_like(state))

    ids = jnp.broadcast_to(jnp.arange(T) >= boundary, (2, T)).astype(jnp.int32)
    packed = run(**arguments, segment_ids=ids, lengths=jnp.full(2, T, jnp.int32))
    assert_same(packed, (jnp.concatenate([first, second], axis=1), last), 1e-12)


@both
def test_what_stands_past_the_end_changes_no_bit(float32, kda_arguments, cast, implementation):
    arguments = cast(kda_arguments(T), jnp.float32)
    lengths = jnp.array([77, 0], jnp.int32)
    real = jnp.arange(T) < lengths[:, None]
    outputs = []
    for filling in (0.0, 1e30, -jnp.inf, jnp.nan):
        filled = {
            name: jnp.where(real.reshape(2, T, *[1] * (arguments[name].ndim - 2)), x, filling)
            for name, x in arguments.items()
            if name in TOKENS
        }
        state = arguments["initial_state"]
        outputs.append(
            run(**filled, initial_state=state, lengths=lengths, implementation=implementation)
        )
    for other in outputs[1:]:
        assert_array_equal(other[0], outputs[0][0])
        assert_array_equal(other[1], outputs[0][1])
    o, final = outputs[0]
    assert_array_equal(o[~real], 0)
    assert_array_equal(final[1], state[1])
