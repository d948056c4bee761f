"""The dtypes that a checkpoint can be asked for in."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm5_jax import CheckpointError
from glm5_jax.checkpoint.dtypes import dtype_word


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("stored", "stored"),
        ("float64", "float64"),
        (jnp.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (jnp.zeros(1, jnp.float32).dtype, "float32"),
    ],
)
def test_a_dtype_is_its_name_or_the_dtype_itself(given, word):
    assert dtype_word(given) == word


@pytest.mark.parametrize("given", [None, "float16", jnp.float16, np.int32, "", [], object(), 4])
def test_another_dtype_is_refused_with_those_that_there_are(given):
    with pytest.raises(CheckpointError, match="expected one of stored, bfloat16, float32, float64"):
        dtype_word(given)
