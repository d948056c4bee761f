"""What only a GPU can show: which float32 products are TF32 there, and what becomes of denormals.

To run them: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu` on a machine with a GPU.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm5_jax.nn.indexer import best_pools, index_scores
from glm5_jax.nn.linear import linear, linear_wide
from glm5_jax.nn.mhc import coefficients
from glm5_jax.nn.quantized import QuantizedWeight
from pallas_kernels.kda import chunk_kda
from pallas_kernels.sparse_mla import sparse_mla_decode

pytestmark = pytest.mark.gpu
K = 16384  # where TF32 shows


@pytest.fixture(autouse=True)
def float32():
    with jax.enable_x64(False):
        yield


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def assert_within(ours, truth, tolerance):
    truth = np.asarray(truth, np.float64)
    assert np.abs(np.asarray(ours, np.float64) - truth).max() <= tolerance * np.abs(truth).max()


@pytest.mark.parametrize("product", [linear, linear_wide], ids=["float32 model", "router"])
def test_projections_are_no_tf32(product):
    x, weight = draw(64, K), draw(288, K)
    assert_within(jax.jit(product)(x, weight), x.astype(np.float64) @ weight.T, 1e-5)


def test_tf32_would_be_noticed():
    x, weight = draw(64, K), draw(288, K)
    narrow = jax.jit(lambda x, y: jnp.matmul(x, y.T, precision=jax.lax.Precision.DEFAULT))
    with pytest.raises(AssertionError):
        assert_within(narrow(x, weight), x.astype(np.float64) @ weight.T, 1e-5)


def on_cpu(function, *arguments):
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(function)(*(jax.device_put(x, cpu) for x in arguments))


def test_hyper_connection_coefficients_equal_the_cpu():
    def site(streams, fn):
        base, scale = jnp.zeros(24), jnp.ones(3)
        return coefficients(streams, fn, base, scale, norm_eps=1e-5, hc_eps=1e-6, iterations=20)

    inputs = draw(1, 32, 4, K // 4), draw(24, K) / K**0.5
    for ours, truth in zip(jax.jit(site)(*inputs), on_cpu(site, *inputs), strict=True):
        assert_within(ours, truth, 1e-5)


def test_index_scores_equal_the_cpu():
    inputs = draw(1, 64, 32, 128), draw(1, K, 128), draw(1, 64, 32)
    assert_within(jax.jit(index_scores)(*inputs), on_cpu(index_scores, *inputs), 1e-5)


def test_selections_equal_the_cpu_where_scores_are_apart():
    def choose(queries, keys, weights):
        seen = jnp.full((1, 64), 4 * 4096)
        pools = best_pools(queries, keys, weights, seen, 4, 512)
        return index_scores(queries, keys, weights), pools

    inputs = draw(1, 64, 32, 128), draw(1, 4096, 128), draw(1, 64, 32)
    scores, pools = on_cpu(choose, *inputs)
    _, ours = jax.jit(choose)(*inputs)
    ranked = np.sort(scores, axis=-1)
    apart = ranked[..., -512] - ranked[..., -513] > 1e-5 * np.abs(scores).max()
    assert apart.mean() > 0.5
    np.testing.assert_array_equal(np.sort(ours)[apart], np.sort(pools)[apart])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float32_sparse_mla_equals_the_cpu(implementation):
    indices = np.stack([np.random.default_rng(0).permutation(4096)[:2051] for _ in range(3)])[None]

    def decode(q, kv):
        return sparse_mla_decode(
            q, kv, indices, scale=1 / 16, return_lse=True, implementation=implementation
        )

    inputs = draw(1, 3, 64, 512), draw(1, 4096, 512)
    for ours, truth in zip(jax.jit(decode)(*inputs), on_cpu(decode, *inputs), strict=True):
        assert_within(ours, truth, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float32_kda_equals_the_cpu(implementation):
    def kda(q, k, v, g, beta):
        return chunk_kda(q, k, v, g, beta, output_final_state=True, implementation=implementation)

    sizes = (1, 300, 2, 128)
    g = -5 * np.random.default_rng(0).random(sizes, np.float32)
    inputs = draw(*sizes), draw(*sizes) + 3, draw(*sizes), g, np.full(sizes[:3], 0.99, np.float32)
    for ours, truth in zip(jax.jit(kda)(*inputs), on_cpu(kda, *inputs), strict=True):
        assert_within(ours, truth, 1e-5)


def test_every_scale_byte_decodes_as_on_a_cpu():
    # e8m0: byte 0 is 2⁻¹²⁷, a denormal float32, and 255 is NaN, which loading refuses.
    for scale in range(255):
        codes = np.arange(256, dtype=np.uint8)[None].repeat(2, 0).view(ml_dtypes.float8_e4m3fn)
        weight = {
            "codes": jnp.asarray(codes),
            "scale": jnp.asarray(np.full((1, 2), scale, np.uint8).view(ml_dtypes.float8_e8m0fnu)),
        }

        def decode(codes, scale):
            arrays = {"codes": codes, "scale": scale}
            whole = QuantizedWeight(arrays, (128, 128), jnp.float32)[...]
            return jax.lax.bitcast_convert_type(whole, jnp.uint32)

        ours = jax.jit(decode)(weight["codes"], weight["scale"])
        np.testing.assert_array_equal(ours, on_cpu(decode, weight["codes"], weight["scale"]))


def test_a_denormal_state_is_as_good_as_none():
    sizes = (1, 65, 1, 64)
    q, k, v = draw(*sizes), draw(*sizes), draw(*sizes)
    g, beta = np.zeros(sizes, np.float32), np.full(sizes[:3], 0.5, np.float32)

    def kda(initial_state):
        return chunk_kda(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)

    tiny, none = (jax.jit(kda)(jnp.full((1, 1, 64, 64), x, jnp.float32)) for x in (1e-40, 0.0))
    for a, b in zip(tiny, none, strict=True):
        assert_within(a, b, 1e-6)
