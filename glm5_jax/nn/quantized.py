"""Weights that stay quantised in memory and are decoded where they are used.

`weight[...]` is the decoded matrix and `weight[expert]` one expert of a stack, so that a layer
reads a quantised weight as it reads a plain one, and only one expert is decoded at a time.

Decoding is integer arithmetic down to the last bit: nothing that a backend may flush to zero,
contract, reorder or divide by way of a reciprocal. Each value is the exact product or quotient
rounded to float32, then to bfloat16 if that is the dtype: the bits of `checkpoint.codecs`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, UInt, UInt8, UInt32

from glm5_jax.checkpoint.codecs import scale_block

_NAN = 0x7FC00000
_INFINITY = 0x7F800000


class Stored(nnx.Variable):
    """An array of a quantised weight: no `nnx.Param`, since nothing has a gradient by a code."""


class QuantizedWeight(nnx.Module):
    """A matrix [out, in], or a stack of them [E, out, in], held as codes and scales.

    arrays: by key, as a checkpoint stores them (see `checkpoint.codecs`), abstract or not. block:
    the config's `weight_block_size`. dtype: bfloat16 or float32, what `[...]` and `[index]` give;
    it is the model's activation dtype. Scales are finite, which loading sees to; a scale that is
    not makes NaN. Raises ValueError for another dtype.
    """

    def __init__(
        self,
        arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
        block: tuple[int, int] | None,
        dtype: DTypeLike,
    ):
        self.block = block
        self.dtype = jnp.dtype(dtype)
        if self.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"quantised weights are decoded to bfloat16 or float32, not to {self.dtype}; "
                f"load the model with that dtype to have them decoded once"
            )
        self.keys = tuple(arrays)
        self.codes = Stored(arrays["codes"])
        for key in self.keys:
            if key != "codes":
                setattr(self, key, Stored(arrays[key]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        *leading, width = self.codes.shape
        return (*leading, 2 * width if self.codes.dtype == jnp.uint8 else width)

    def __getitem__(self, index) -> Float[Array, "..."]:
        """The whole (`[...]`), or of a stack the expert or experts at `index`."""
        arrays = {key: getattr(self, key)[...] for key in self.keys}
        if index is not Ellipsis:
            if self.codes.ndim != 3:
                raise IndexError("a quantised matrix is decoded whole: [...]")
            arrays = {key: array[index] for key, array in arrays.items()}
        decode = _decode
        for _ in range(arrays["codes"].ndim - 2):
            decode = jax.vmap(decode, in_axes=(0, None, None))
        return decode(arrays, self.block, self.dtype)


Weight = nnx.Param | QuantizedWeight


def _decode(
    arrays: Mapping[str, jax.Array], block: tuple[int, int] | None, dtype: jnp.dtype
) -> Float[Array, "out in"]:
    keys = arrays.keys()
    if keys == {"codes", "scale"}:
        bits = _fp8_bits(arrays["codes"], arrays["scale"], block)
    elif keys == {"codes", "scale", "scale_2"}:
        bits = _nvfp4_bits(arrays["codes"], _products(arrays["scale"], arrays["scale_2"]))
    elif keys == {"codes", "scale", "global_scale"}:
        bits = _nvfp4_bits(arrays["codes"], _quotients(arrays["scale"], arrays["global_scale"]))
    else:
        raise ValueError(f"no quantised weight has the arrays {', '.join(sorted(keys))}")
    if dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    # To nearest, ties to even. The only NaN has a low half of zeros.
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


class _Number(NamedTuple):
    """`mantissa * 2^exponent`; `sign` is bit 31, `bad` is true for NaN and infinity."""

    mantissa: UInt32[Array, "*b"]
    exponent: Int32[Array, "*b"]
    sign: UInt32[Array, "*b"]
    bad: Bool[Array, "*b"]

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "_Number":
        return _Number(*map(change, self))


def _small(code: UInt[Array, "*b"], exponents: int, mantissas: int, bias: int) -> _Number:
    """A float of `1 + exponents + mantissas` bits; `bad` where its magnitude is all ones."""
    code = code.astype(jnp.uint32)
    exponent = (code >> mantissas) & ((1 << exponents) - 1)
    mantissa = code & ((1 << mantissas) - 1)
    implicit = jnp.where(exponent > 0, jnp.uint32(1 << mantissas), jnp.uint32(0))
    magnitude = (1 << (exponents + mantissas)) - 1
    return _Number(
        mantissa | implicit,
        jnp.maximum(exponent, 1).astype(jnp.int32) - bias - mantissas,
        (code >> (exponents + mantissas)) << 31,
        (code & magnitude) == magnitude,
    )


def _e4m3(codes: Float[Array, "*b"]) -> _Number:
    return _small(jax.lax.bitcast_convert_type(codes, jnp.uint8), 4, 3, bias=7)


def _scale(scale: Array) -> _Number:
    """A float32, bfloat16 or E8M0 scale (also as bytes); a mantissa that is not 0 has 24 bits."""
    if scale.dtype in (jnp.uint8, jnp.float8_e8m0fnu):
        byte = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
        one = jnp.full(byte.shape, 1 << 23, jnp.uint32)
        return _Number(one, byte - 127 - 23, jnp.zeros_like(one), byte == 255)
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)
    if scale.dtype == jnp.bfloat16:  # by bits: a cast may flush what is denormal
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint16).astype(jnp.uint32) << 16
    number = _small(bits, 8, 23, bias=127)
    shift = jnp.minimum(jax.lax.clz(number.mantissa), 31) - 8
    return _Number(
        number.mantissa << shift,
        number.exponent - shift.astype(jnp.int32),
        number.sign,
        (bits & _INFINITY) == _INFINITY,
    )


def _fp8_bits(
    codes: Float[Array, "out in"], scale: Array, block: tuple[int, int] | None
) -> UInt32[Array, "out in"]:
    """float32 bits of `codes * scale`."""
    rows, columns = scale_block(codes.shape, scale.shape, block)
    out, into = codes.shape
    grid = scale.reshape(-(-out // rows), -(-into // columns))

    def spread(x):
        return jnp.repeat(jnp.repeat(x, rows, 0)[:out], columns, 1)[:, :into]

    code, by = _e4m3(codes), _scale(grid).map(spread)
    bits = _float32_bits(code.mantissa * by.mantissa, code.exponent + by.exponent)
    return jnp.where(code.bad | by.bad, jnp.uint32(_NAN), bits | (code.sign ^ by.sign))


class _Groups(NamedTuple):
    """What 1 and 3 times the scale of each group of 16 columns is."""

    single: UInt32[Array, "out groups"]
    triple: UInt32[Array, "out groups"]
    exponent: Int32[Array, "out groups"]
    sign: UInt32[Array, "out groups"]
    bad: Bool[Array, "out groups"]


def _products(scale: Float[Array, "out groups"], scale_2: Array) -> _Groups:
    """`scale * scale_2`, exact: 28 bits, and 30 for three times it."""
    group, whole = _e4m3(scale), _scale(scale_2.reshape(()))
    single = group.mantissa * whole.mantissa
    exponent, sign = group.exponent + whole.exponent, group.sign ^ whole.sign
    return _Groups(single, single * 3, exponent, sign, group.bad | whole.bad)


def _quotients(scale: Float[Array, "out groups"], global_scale: Array) -> _Groups:
    """`scale / global_scale`, 26 bits or more of it; the last bit says that more would follow."""
    group, whole = _e4m3(scale), _scale(global_scale.reshape(()))
    divisor = jnp.maximum(whole.mantissa, 1)
    # The dividend gets 24 bits, as the divisor has: the quotient is between 1/2 and 2.
    shift = jnp.minimum(jax.lax.clz(group.mantissa), 31) - 8
    rest = group.mantissa << shift
    quotient = jnp.zeros_like(rest)
    for bits in (0, 8, 8, 8, 2):  # long division; the rest has 24 bits
        rest = rest << bits
        quotient = (quotient << bits) | (rest // divisor)
        rest = rest % divisor
    single = (quotient << 1) | (rest > 0)
    rest = rest * 3
    triple = quotient * 3 + rest // divisor
    triple = (triple << 1) | (rest % divisor > 0)
    exponent = group.exponent - shift.astype(jnp.int32) - whole.exponent - 26 - 1
    bad = group.bad | whole.bad | (whole.mantissa == 0)
    return _Groups(single, triple, exponent, group.sign ^ whole.sign, bad)


def _nvfp4_bits(codes: UInt8[Array, "out half"], groups: _Groups) -> UInt32[Array, "out in"]:
    """float32 bits of `e2m1 * group`."""
    pairs = jnp.repeat(codes, 2, axis=1)
    column = jax.lax.broadcasted_iota(jnp.uint8, pairs.shape, 1) & 1
    code = _small((pairs >> (4 * column)) & 15, 2, 1, bias=1)
    groups = _Groups(*(jnp.repeat(x, 16, axis=1) for x in groups))
    # Mantissas are 0, 1, 2 and 3.
    mantissa = jnp.where(code.mantissa == 3, groups.triple, groups.single)
    mantissa = jnp.where(code.mantissa == 0, jnp.uint32(0), mantissa)
    exponent = code.exponent + groups.exponent + (code.mantissa == 2)
    bits = _float32_bits(mantissa, exponent)
    return jnp.where(groups.bad, jnp.uint32(_NAN), bits | (code.sign ^ groups.sign))


def _float32_bits(
    mantissa: UInt32[Array, "*b"], exponent: Int32[Array, "*b"]
) -> UInt32[Array, "*b"]:
    """The float32 nearest to `mantissa * 2^exponent`, ties to even, denormals as they should be.

    A mantissa is 0 or between 2^23 and 2^31.
    """
    # An integer becomes the float32 nearest to it, which is normal; the exponent is put there.
    nearest = jax.lax.bitcast_convert_type(
        mantissa.astype(jnp.int32).astype(jnp.float32), jnp.int32
    )
    biased = (nearest >> 23) + exponent
    normal = (nearest + (exponent << 23)).astype(jnp.uint32)
    drop = jnp.clip(-149 - exponent, 1, 31).astype(jnp.uint32)
    half = (jnp.uint32(1) << (drop - 1)) - 1 + ((mantissa >> drop) & 1)
    bits = jnp.where(biased >= 1, normal, (mantissa + half) >> drop)
    bits = jnp.where(biased >= 255, jnp.uint32(_INFINITY), bits)
    return jnp.where(mantissa == 0, jnp.uint32(0), bits)
