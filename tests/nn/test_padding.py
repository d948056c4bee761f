"""Where tokens stand: moved within their rows, and written into the slots of a cache."""

import jax.numpy as jnp
import numpy as np

from glm5_jax.nn.padding import Stretch, roll_tokens, shift_tokens

ROWS = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])


def test_shifted_rows_let_zeros_in():
    out = shift_tokens(ROWS, jnp.asarray([0, 2, -1]))
    np.testing.assert_array_equal(out, [[1, 2, 3, 4], [0, 0, 5, 6], [10, 11, 12, 0]])


def test_rows_shifted_by_all_they_have_are_zeros():
    out = shift_tokens(ROWS, jnp.asarray([4, -4, 9]))
    np.testing.assert_array_equal(out, np.zeros((3, 4)))


def test_nan_that_is_shifted_out_is_gone():
    x = jnp.asarray([[[1.0], [jnp.nan]]])
    np.testing.assert_array_equal(shift_tokens(x, jnp.asarray([1]))[0], [[0.0], [1.0]])


def test_rolled_rows_come_back():
    distance = jnp.asarray([0, 3, -1])
    out = roll_tokens(ROWS, distance)
    np.testing.assert_array_equal(out, [[1, 2, 3, 4], [6, 7, 8, 5], [10, 11, 12, 9]])
    np.testing.assert_array_equal(roll_tokens(out, -distance), ROWS)


def test_real_tokens_are_written_into_their_slots_and_nothing_else():
    stretch = Stretch(start=jnp.asarray([1, 0, 2]), count=jnp.asarray([2, 0, 3]))
    out = stretch.write(-ROWS, 100 + ROWS[:, :3])
    expected = [[-1, 101, 102, -4], [-5, -6, -7, -8], [-9, -10, 109, 110]]
    np.testing.assert_array_equal(out, expected)  # the last row's third token has no slot
    np.testing.assert_array_equal(stretch.mask(3), [[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(stretch.seen(3), [[2, 3, 0], [0, 0, 0], [3, 4, 5]])
