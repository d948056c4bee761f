"""Codecs of quantised weights, judged by decoders written out here in float64."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.checkpoint.codecs import decode, encode_fp8, encode_nvfp4, scale_problem

VECTOR = json.loads(
    (Path(__file__).resolve().parents[1] / "golden" / "nvfp4_vector.json").read_text()
)
BF16, F32, F64 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
DTYPES = (BF16, F32, F64)
EDGES = [(576, 256), (32, 128), (1, 129), (1000, 200)]
BYTES = np.arange(256, dtype=np.uint8)
SECONDS = ("scale_2", "global_scale")


def e4m3(byte):
    """float8_e4m3fn by its definition: no infinity, one NaN of either sign."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


E4M3_TABLE = np.array([e4m3(int(byte)) for byte in BYTES])
E2M1_TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scale_table(scale):
    if scale.dtype in (E8M0, np.uint8):
        return np.where(scale.view(np.uint8) == 255, np.nan, 2.0 ** (scale.view(np.uint8) - 127.0))
    return scale.astype(np.float64)


def decoded_fp8(codes, scale, block):
    """Element by element of the scale's grid: nothing in common with the package's lookups."""
    out, into = codes.shape
    scale = scale_table(scale)
    if scale.ndim == 2 and scale.shape == (-(-out // block[0]), -(-into // block[1])):
        rows, columns = np.arange(out) // block[0], np.arange(into) // block[1]
        scale = scale[rows[:, None], columns[None, :]]
    elif scale.size > 1:
        scale = scale.reshape(out, 1)
    return E4M3_TABLE[codes.view(np.uint8)] * scale


def decoded_nvfp4(codes, scale, second, key):
    low, high = E2M1_TABLE[codes & 15], E2M1_TABLE[codes >> 4]
    values = np.stack([low, high], axis=-1).reshape(codes.shape[0], -1)
    group = E4M3_TABLE[scale.view(np.uint8)]
    second = np.float64(second.reshape(()))
    group = group * second if key == "scale_2" else group / second
    return values * np.repeat(group, 16, axis=1)


def assert_bits(got, expected, dtype):
    """Equal bit for bit after rounding as NumPy rounds; any NaN is a NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        expected = expected.astype(dtype)
    assert got.dtype == dtype and got.shape == expected.shape
    nan = np.isnan(expected.astype(np.float64))
    bits = np.dtype(f"u{dtype.itemsize}")
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def assert_fp8(codes, scale, block=(128, 128)):
    for dtype in DTYPES:
        got = decode({"codes": codes, "scale": scale}, block, dtype)
        assert_bits(got, decoded_fp8(codes, scale, block), dtype)


def random_codes(rng, shape):
    return rng.integers(0, 256, shape, np.uint8).view(E4M3)


# FP8.


def test_every_code_is_e4m3fn_and_never_fnuz():
    codes = BYTES.reshape(16, 16).view(E4M3)
    assert_fp8(codes, np.float32([1.0]))
    values = decode({"codes": codes, "scale": np.float32([1.0])}, None, F32).reshape(-1)
    assert values[0x7E] == 448 and np.isnan(values[[0x7F, 0xFF]]).all()
    assert (values[0x01], values[0x80 | 0x08]) == (2.0**-9, -(2.0**-6))


@pytest.mark.parametrize("dtype", [E8M0, np.dtype(np.uint8)])
def test_every_e8m0_byte_is_its_power_of_two_down_to_denormals_and_255_is_nan(dtype):
    codes = np.tile(BYTES, (256, 1)).view(E4M3)
    assert_fp8(codes, BYTES.view(dtype)[:, None])
    values = decode({"codes": codes, "scale": BYTES.view(dtype)[:, None]}, None, F32)
    one = np.flatnonzero(BYTES == 0x38)[0]
    assert values[0, one] == np.float32(2.0**-127) > 0
    assert np.isnan(values[255]).all()


@pytest.mark.parametrize("shape", EDGES)
@pytest.mark.parametrize("scale", [F32, BF16, E8M0, np.dtype(np.uint8)])
def test_edge_blocks_rows_and_scalars_decode_as_in_float64(shape, scale):
    rng = np.random.default_rng(shape[0])
    codes = random_codes(rng, shape)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    for form in (grid, (shape[0],), (shape[0], 1), (), (1,)):
        if scale.itemsize == 1:
            values = rng.integers(97, 127, form, np.uint8).view(scale)
        else:
            values = np.asarray(np.exp(rng.uniform(-12, -4, form)), np.float32).astype(scale)
        assert_fp8(codes, values)


def test_blocks_are_those_of_the_config_and_need_not_be_square():
    rng = np.random.default_rng(0)
    codes = random_codes(rng, (50, 70))
    for block in ((16, 16), (1, 128), (128, 1), (24, 7), (1, 1)):
        grid = (-(-50 // block[0]), -(-70 // block[1]))
        assert_fp8(codes, rng.uniform(1e-4, 1e-2, grid).astype(np.float32), block)


def test_bfloat16_is_the_float32_value_rounded():
    # As NumPy, torch and engines that dequantise in float32 round: twice, which 1 value in 100,000
    # can be told by. 1.25 · scale is just above the tie between 1 and 1 + 2^-7.
    scale = np.float32((2**26 + 2**18 + 2) // 5 * 2.0**-24)
    assert 1.25 * np.float64(scale) == 1 + 2.0**-8 + 2.0**-25
    arrays = {"codes": np.array([[0x3A]], np.uint8).view(E4M3), "scale": scale[None]}
    assert decode(arrays, None, F32)[0, 0] == 1 + 2.0**-8
    assert decode(arrays, None, BF16)[0, 0] == 1.0


def test_a_scale_that_fits_no_way_is_refused():
    codes = np.zeros((576, 256), E4M3)
    for scale, block in (
        ((4, 2), (128, 128)),
        ((2, 5), (128, 128)),
        ((5, 2), None),
        ((256,), None),
    ):
        with pytest.raises(ValueError, match=r"does not fit a weight \[576, 256\]"):
            decode({"codes": codes, "scale": np.ones(scale, np.float32)}, block, F32)
    with pytest.raises(ValueError, match="FP8 codes must be float8_e4m3fn, got float8_e5m2"):
        wrong = codes.astype(ml_dtypes.float8_e5m2)
        decode({"codes": wrong, "scale": np.ones((), np.float32)}, None, F32)


# NVFP4.


def nvfp4(codes, scale, key="scale_2", second=1.0):
    scale = np.asarray(scale, np.float32).astype(E4M3)
    return {"codes": np.array(codes, np.uint8), "scale": scale, key: np.float32([second])}


def test_the_low_nibble_is_the_even_column_and_bit_3_the_sign():
    codes = [[0x21, 0xF0] + [0] * 6]
    first = decode(nvfp4(codes, [[1]]), None, F64)[0, :4]
    assert first.tolist() == [0.5, 1.0, 0.0, -6.0]
    every = decode(nvfp4([[low | (low + 1) << 4 for low in range(0, 16, 2)]], [[1]]), None, F64)
    np.testing.assert_array_equal(every[0], E2M1_TABLE)
    assert np.signbit(every[0, 8])


def test_a_scale_is_of_sixteen_columns_and_the_second_multiplies_or_divides():
    codes = [[0x22] * 16]
    for key, second, values in (("scale_2", 4.0, (4, 8)), ("global_scale", 4.0, (0.25, 0.5))):
        got = decode(nvfp4(codes, [[1, 2]], key, second), None, F64)[0]
        assert (got[:16] == values[0]).all() and (got[16:] == values[1]).all()


@pytest.mark.parametrize("key", SECONDS)
def test_every_pair_of_scale_and_code_decodes_as_in_float64(key):
    codes = np.tile(np.uint8([low | (low + 1) << 4 for low in range(0, 16, 2)]), (256, 1))
    scale = BYTES[:, None].view(E4M3)
    for second in (1.0, 0.0012687882, 7e-44, 3e38, -2.5, 1e-30):
        arrays = {"codes": codes, "scale": scale, key: np.float32([second])}
        for dtype in DTYPES:
            expected = decoded_nvfp4(codes, scale, np.float32(second), key)
            assert_bits(decode(arrays, None, dtype), expected, dtype)


def test_the_worked_vector():
    codes = np.array(VECTOR["weight_u8"], np.uint8)
    scale = np.array(VECTOR["weight_scale_u8"], np.uint8).view(E4M3)
    second = np.float32(VECTOR["weight_scale_2"])
    arrays = {"codes": codes, "scale": scale, "scale_2": second}
    for dtype in DTYPES:
        assert_bits(
            decode(arrays, None, dtype), decoded_nvfp4(codes, scale, second, "scale_2"), dtype
        )
    # It was written in float32 with `scale * scale_2` rounded in between: one unit off at most
    # there, and nowhere in bfloat16.
    written = np.array(VECTOR["dequant"], np.float32)
    np.testing.assert_array_max_ulp(decode(arrays, None, F32), written, maxulp=1)
    np.testing.assert_array_equal(decode(arrays, None, BF16), written.astype(BF16))


def test_the_worked_vector_is_what_its_source_is_encoded_to():
    arrays = encode_nvfp4(np.array(VECTOR["source"]))
    np.testing.assert_array_equal(arrays["codes"], np.array(VECTOR["weight_u8"], np.uint8))
    scale = np.array(VECTOR["weight_scale_u8"], np.uint8)
    np.testing.assert_array_equal(arrays["scale"].view(np.uint8), scale)
    assert arrays["scale_2"] == np.float32(VECTOR["weight_scale_2"])


def test_nvfp4_arrays_that_do_not_belong_together_are_refused():
    good = nvfp4(np.zeros((4, 16)), np.ones((4, 2)))
    for change, told in (
        ({"scale": good["scale"][:, :1]}, "does not fit codes"),
        ({"scale": good["scale"].astype(np.float32)}, "got uint8 .* and float32"),
        ({"codes": good["codes"].view(np.int8)}, "NVFP4 is uint8 codes"),
        ({"codes": np.zeros((4, 20), np.uint8)}, "in a multiple of 16"),
        ({"global_scale": np.float32([1])}, "either scale_2 or global_scale"),
    ):
        with pytest.raises(ValueError, match=told):
            decode(good | change, None, F32)


# Stacks, and what is not a scale.


def test_a_stack_is_its_experts_and_may_go_into_a_given_array():
    rng = np.random.default_rng(3)
    experts = [encode_fp8(rng.standard_normal((40, 48)), "block", (16, 16)) for _ in range(3)]
    stack = {key: np.stack([expert[key] for expert in experts]) for key in experts[0]}
    out = np.full((3, 40, 48), np.nan, BF16)
    assert decode(stack, (16, 16), BF16, out) is out
    for got, expert in zip(out, experts, strict=True):
        np.testing.assert_array_equal(got, decode(expert, (16, 16), BF16))
    with pytest.raises(ValueError, match=r"out must be bfloat16 \[3, 40, 48\]"):
        decode(stack, (16, 16), BF16, out[:2])
    with pytest.raises(ValueError, match="not to float16"):
        decode(stack, (16, 16), np.float16)


def test_a_scale_is_finite_and_a_divisor_is_not_0():
    assert scale_problem("scale", np.float32([0, 1, -3])) is None
    assert scale_problem("codes", np.array([0x7F], np.uint8)) is None
    for key, array, told in (
        ("scale", np.float32([[1, 2], [np.nan, 4]]), "finite, got nan"),
        ("scale", np.uint8([3, 255]), "finite, got nan"),
        ("scale", np.uint8([0, 0xFF]).view(E4M3), "finite, got nan"),
        ("scale_2", np.float32(np.inf), "finite, got inf"),
        ("global_scale", np.float32([0]), r"finite and not 0, got 0.0"),
    ):
        assert re.search(told, scale_problem(key, array)), key


# Encoders.


def nearest(values, table):
    """Distance of each value to the nearest entry."""
    return np.abs(values[..., None] - table[np.isfinite(table)]).min(axis=-1)


@pytest.mark.parametrize("scale", ["block", "channel", "tensor"])
@pytest.mark.parametrize("dtype", [F32, BF16, E8M0])
@pytest.mark.parametrize("shape", [(40, 48), (1, 129)])
def test_fp8_codes_are_the_nearest_and_the_largest_of_a_block_is_not_cut_off(shape, scale, dtype):
    weight = np.random.default_rng(5).standard_normal(shape)
    weight[0, :16] *= 1e-3
    arrays = encode_fp8(weight, scale, (16, 16), dtype)
    assert arrays["codes"].dtype == E4M3 and arrays["scale"].dtype == dtype
    assert_fp8(arrays["codes"], arrays["scale"], (16, 16))
    spread = decoded_fp8(np.full(shape, 1, E4M3), arrays["scale"], (16, 16))
    # Rounding a bfloat16 scale down by 2^-9 leaves the largest value as much above 448.
    scaled = np.clip(weight / spread, -448 * (1 + 2**-8), 448 * (1 + 2**-8))
    np.testing.assert_array_equal(scaled, weight / spread)
    got = np.abs(E4M3_TABLE[arrays["codes"].view(np.uint8)] - scaled)
    np.testing.assert_allclose(got, nearest(scaled, E4M3_TABLE), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("key", SECONDS)
def test_nvfp4_codes_are_the_nearest_and_a_group_uses_its_range(key):
    weight = np.random.default_rng(6).standard_normal((32, 96))
    weight[:, 16:32] *= 1e-2
    arrays = encode_nvfp4(weight, key)
    second = np.float64(arrays[key].reshape(()))
    unit = second if key == "scale_2" else 1 / second
    step = np.repeat(E4M3_TABLE[arrays["scale"].view(np.uint8)] * unit, 16, axis=1)
    got = decode(arrays, None, F64) / step
    np.testing.assert_allclose(
        np.abs(got - weight / step), nearest(weight / step, E2M1_TABLE), rtol=1e-9, atol=1e-12
    )
    assert (np.abs(got).reshape(32, 6, 16).max(axis=-1) >= 4).all()


def test_ties_between_two_codes_go_to_the_even_one():
    middles = (E2M1_TABLE[1:8] + E2M1_TABLE[:7]) / 2
    # The largest of all makes scale_2 1, the 6 makes that of the second group 1.
    weight = np.concatenate([[6.0 * 448], [0.0] * 15, [6.0], middles, -middles, [0.0]])[None]
    got = decode(encode_nvfp4(weight), None, F64)[0]
    even = np.array([0.0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(got[17:31], np.concatenate([even, -even]))


def test_zeros_and_their_signs_survive():
    weight = np.zeros((16, 32))
    weight[3] = -0.0
    for arrays in (
        encode_fp8(weight, "block", (16, 16)),
        *(encode_nvfp4(weight, key) for key in SECONDS),
    ):
        got = decode(arrays, (16, 16), F64)
        assert (got == 0).all() and (np.signbit(got) == np.signbit(weight)).all()
        assert all(scale_problem(key, array) is None for key, array in arrays.items())


def test_what_has_no_such_form_is_refused():
    for bad in (np.inf, np.nan):
        for encode in (encode_fp8, encode_nvfp4):
            with pytest.raises(ValueError, match="finite"):
                encode(np.full((4, 16), bad))
    with pytest.raises(ValueError, match=r"16 columns a group; got 4×40"):
        encode_nvfp4(np.zeros((4, 40)))


# Anything at all.


@st.composite
def fp8_weights(draw):
    out, into = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    block = (draw(st.integers(1, 48)), draw(st.integers(1, 48)))
    grid = (-(-out // block[0]), -(-into // block[1]))
    form = draw(st.sampled_from([grid, (out,), (out, 1), (), (1,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = np.asarray(rng.integers(0, 2**32, form, np.uint32))
    kind = draw(st.sampled_from([F32, BF16, E8M0, np.dtype(np.uint8)]))
    shift = 8 * (4 - kind.itemsize)
    scale = np.asarray(bits >> shift, np.dtype(f"u{kind.itemsize}")).view(kind)
    return random_codes(rng, (out, into)), scale, block


@settings(max_examples=80, deadline=None)
@given(fp8_weights())
def test_any_codes_and_any_scales_decode_as_in_float64(drawn):
    with np.errstate(invalid="ignore", over="ignore"):
        assert_fp8(*drawn)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 4), st.floats(1e-30, 1e30))
def test_encoding_what_was_decoded_gives_it_back(seed, rows, groups, size):
    weight = np.random.default_rng(seed).standard_normal((rows, 16 * groups)) * size
    for encode, block in (
        (lambda w: encode_fp8(w, "block", (4, 24)), (4, 24)),
        (lambda w: encode_fp8(w, "channel"), None),
    ):
        once = decode(encode(weight), block, F64)
        np.testing.assert_array_equal(decode(encode(once), block, F64), once)
    for key in SECONDS:
        once = decode(encode_nvfp4(weight, key), None, F64)
        assert np.abs(once - weight).max() <= np.abs(weight).max() / 6 * 1.1
