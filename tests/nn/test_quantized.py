"""QuantizedWeight: the bits of the codecs, decoded by JAX in integers where a weight is used."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from glm5_jax.checkpoint.codecs import decode, encode_fp8, encode_nvfp4
from glm5_jax.nn.params import Params
from glm5_jax.nn.quantized import QuantizedWeight, Stored
from glm5_jax.specs import Leaf

BYTES = np.arange(256, dtype=np.uint8)
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
DTYPES = ("bfloat16", "float32")

whole = jax.jit(lambda weight: weight[...])
one = jax.jit(lambda weight, index: weight[index])


def quantized(arrays, block=None, dtype="bfloat16"):
    return QuantizedWeight({k: jnp.asarray(v) for k, v in arrays.items()}, block, dtype)


def assert_same(got, expected):
    got = np.asarray(got)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def assert_decodes(arrays, block=None, dtypes=DTYPES):
    for dtype in dtypes:
        assert_same(whole(quantized(arrays, block, dtype)), decode(arrays, block, np.dtype(dtype)))


def every_magnitude(rng, count, dtype=np.float32):
    """Finite numbers of any exponent, denormal ones and 0 among them."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    values = rng.integers(0, 2 ** (8 * bits.itemsize), count, np.uint64).astype(bits).view(dtype)
    values[: count // 8] = (
        rng.integers(0, 2 ** (8 * bits.itemsize - 10), count // 8).astype(bits).view(dtype)
    )
    values[0] = 0
    return np.where(np.isfinite(values.astype(np.float32)), values, np.ones((), dtype))


def test_every_code_by_every_e8m0_byte():
    # Byte 0 is denormal and so are most products with it: a backend that flushes them to 0
    # (XLA does on a CPU) gives the same bits as one that does not.
    codes = np.tile(BYTES, (256, 1)).view(E4M3)
    for scale in (BYTES[:, None], BYTES[:, None].view(E8M0)):
        assert_decodes({"codes": codes, "scale": scale})
    one_times_least = whole(quantized({"codes": codes, "scale": BYTES}, None, "float32"))[0, 0x38]
    assert np.asarray(one_times_least).view(np.uint32) == 1 << 22


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_code_by_scales_of_any_magnitude(dtype):
    scale = every_magnitude(np.random.default_rng(1), 2048, dtype)
    assert_decodes({"codes": np.tile(BYTES, (2048, 1)).view(E4M3), "scale": scale})


@pytest.mark.parametrize("key", ["scale_2", "global_scale"])
def test_every_pair_of_scale_and_code_by_second_scales_of_any_magnitude(key):
    second = every_magnitude(np.random.default_rng(2), 64)
    if key == "global_scale":
        second[0] = 3.0
    codes = np.tile(np.uint8([low | (low + 1) << 4 for low in range(0, 16, 2)]), (64, 256, 1))
    scale = np.tile(BYTES[:, None].view(E4M3), (64, 1, 1))
    assert_decodes({"codes": codes, "scale": scale, key: second})


def test_bfloat16_is_the_float32_value_rounded():
    scale = np.float32([(2**26 + 2**18 + 2) // 5 * 2.0**-24])
    arrays = {"codes": np.array([[0x3A]], np.uint8).view(E4M3), "scale": scale}
    assert 1.25 * np.float64(scale[0]) > 1 + 2.0**-8  # above the tie, which float32 rounds to
    assert whole(quantized(arrays, None, "bfloat16"))[0, 0] == 1
    assert_decodes(arrays)


@pytest.mark.parametrize("shape", [(40, 50), (1, 33), (32, 16)])
def test_blocks_that_are_partial_at_the_edges(shape):
    arrays = encode_fp8(np.random.default_rng(4).standard_normal(shape), "block", (16, 24))
    assert_decodes(arrays, (16, 24), ("float32",))


def test_scalars_and_rows():
    weight = np.random.default_rng(5).standard_normal((24, 40))
    for kind in ("channel", "tensor"):
        arrays = encode_fp8(weight, kind)
        assert_decodes(arrays, None, ("float32",))
        arrays["scale"] = arrays["scale"].reshape(-1)
        assert_decodes(arrays, None, ("float32",))


def test_a_weight_that_jit_knows_as_a_constant_has_the_same_bits():
    # XLA folds constants, and a float32 divided by a scalar it multiplies by the reciprocal.
    weight = np.random.default_rng(6).standard_normal((16, 64))
    for arrays in (encode_nvfp4(weight, "global_scale"), encode_fp8(weight, "block", (8, 8))):
        module = quantized(arrays, (8, 8), "float32")
        assert_same(
            jax.jit(lambda module=module: module[...])(), decode(arrays, (8, 8), np.float32)
        )


def test_without_64_bit_types_the_bits_are_the_same():
    arrays = encode_nvfp4(np.random.default_rng(7).standard_normal((16, 64)), "global_scale")
    jax.config.update("jax_enable_x64", False)
    try:
        assert_decodes(arrays)
    finally:
        jax.config.update("jax_enable_x64", True)


def stack_of(encode, experts=3):
    rng = np.random.default_rng(8)
    parts = [encode(rng.standard_normal((32, 48))) for _ in range(experts)]
    return {key: np.stack([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize(
    "encode",
    [
        lambda w: encode_fp8(w, "block", (16, 16)),
        lambda w: encode_fp8(w, "channel"),
        lambda w: encode_fp8(w, "tensor"),
        encode_nvfp4,
        lambda w: encode_nvfp4(w, "global_scale"),
    ],
    ids=["block", "channel", "tensor", "scale_2", "global_scale"],
)
def test_an_expert_is_decoded_alone(encode):
    arrays = stack_of(encode)
    module = quantized(arrays, (16, 16))
    expected = decode(arrays, (16, 16), ml_dtypes.bfloat16)
    assert module.shape == expected.shape == (3, 32, 48)
    for index in range(3):
        assert_same(one(module, index), expected[index])
    assert_same(one(module, jnp.array([2, 0])), expected[[2, 0]])
    decoded = jax.make_jaxpr(lambda module, index: module[index])(module, 1)
    shapes = {var.aval.shape for eqn in decoded.eqns for var in eqn.outvars}
    assert not [shape for shape in shapes if len(shape) == 3 and shape[0] == 3]


def test_a_matrix_has_no_experts():
    module = quantized(encode_nvfp4(np.ones((4, 16))))
    assert module.shape == (4, 16)
    with pytest.raises(IndexError, match="decoded whole"):
        module[0]


def test_only_bfloat16_and_float32_are_decoded_to():
    with pytest.raises(ValueError, match="bfloat16 or float32, not to float64"):
        quantized(encode_nvfp4(np.ones((4, 16))), None, "float64")


def test_codes_are_no_parameters_that_a_gradient_is_taken_by():
    module = quantized(encode_nvfp4(np.ones((4, 16))))
    assert not nnx.state(module, nnx.Param)
    assert len(jax.tree.leaves(nnx.state(module, Stored))) == 3


def test_params_declare_what_the_arrays_say():
    leaf = Leaf("w", (4, 16), "BF16", "dense_ffn", (None, None), (), "copy", False)
    arrays = {f"w.{key}": array for key, array in encode_nvfp4(np.ones((4, 16))).items()}
    assert isinstance(Params({"w": leaf})("w"), nnx.Param)
    module = Params({"w": leaf}, arrays, dtype="float32")("w")
    assert (module.shape, module.dtype) == ((4, 16), jnp.float32)
    assert module.codes.dtype == jnp.uint8
    with pytest.raises(ValueError, match=r"w\.codes: expected codes of a weight \(4, 32\)"):
        Params({"w": leaf._replace(shape=(4, 32))}, arrays)("w")
