import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def float32():
    with jax.enable_x64(False):
        yield


@pytest.fixture(scope="session")
def kda_arguments():
    """Draws the arguments of `chunk_kda`, in NumPy float64; K ≠ V, so that no swap stays hidden."""

    def draw(T, B=2, H=2, K=8, V=12, seed=0, **replaced):
        rng = np.random.default_rng(seed)
        arguments = {
            "q": rng.normal(size=(B, T, H, K)),
            "k": rng.normal(size=(B, T, H, K)),
            "v": rng.normal(size=(B, T, H, V)),
            "g": -5 / (1 + np.exp(-2 * rng.normal(size=(B, T, H, K)))),
            "beta": 1 / (1 + np.exp(-2 * rng.normal(size=(B, T, H)))),
            "initial_state": rng.normal(size=(B, H, K, V)),
        }
        for name, x in replaced.items():
            arguments[name] = np.broadcast_to(x, arguments[name].shape)
        return arguments

    return draw


@pytest.fixture(scope="session")
def cast():
    """NumPy arguments as JAX arrays of one dtype."""

    def as_dtype(arguments, dtype):
        return {name: jnp.asarray(x, dtype) for name, x in arguments.items()}

    return as_dtype
