"""How one model lies on disk: whose names, under which prefix, quantised in which way.

Everything is decided from what is stored, tensor by tensor, whatever the config claims; only FP8
block sizes come from the config, because shapes can't tell them. No JAX here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from ..specs import TEXT_PREFIX, VISION_PREFIX, Naming, StoredSpec
from .header import DTYPES, StoredTensor

Scheme = Literal["fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors"]
Quantization = Literal["none", "fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors", "mixed"]

PLAIN = ("BF16", "F32")
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale")
# The last word of a tensor's name in a release, by the key of the array of a leaf that it becomes.
RELEASED_WORDS: Mapping[Scheme, Mapping[str, str]] = {
    "fp8": {"codes": "weight", "scale": "weight_scale_inv"},
    "nvfp4_modelopt": {
        "codes": "weight",
        "scale": "weight_scale",
        "scale_2": "weight_scale_2",
    },
    "nvfp4_compressed_tensors": {
        "codes": "weight_packed",
        "scale": "weight_scale",
        "global_scale": "weight_global_scale",
    },
}
ARRAY_KEYS = {word: key for words in RELEASED_WORDS.values() for key, word in words.items()}
# Scales of activations and of the KV cache: they never touch a weight.
ACTIVATION_SCALES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale")
NVFP4_GROUP = 16

Shape = tuple[int, ...]


class WrongTensor(NamedTuple):
    """A tensor that is known by its name and is not what it must be."""

    name: str
    expected: str
    came: str
    file: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, got {self.came} (in {self.file})"


class QuantizedWeight(NamedTuple):
    """A weight stored quantised: its codes, the scales beside it, and what is not right."""

    scheme: Scheme
    codes: StoredTensor
    scales: tuple[StoredTensor, ...]
    missing: tuple[str, ...]
    wrong: tuple[WrongTensor, ...]


def released_prefix(name: str) -> str:
    """The name under the released prefix: `model.x` is the same as `model.language_model.x`."""
    if name.startswith((TEXT_PREFIX, VISION_PREFIX)) or not name.startswith("model."):
        return name
    return TEXT_PREFIX + name.removeprefix("model.")


def detect_naming(
    names: Collection[str], released: Iterable[StoredSpec], native: Iterable[StoredSpec]
) -> Naming:
    """Which of two lists of expected names is there, judged by the names that differ.

    The share found decides, so that one renamed tensor doesn't turn the verdict.
    """

    def share(specs: Iterable[StoredSpec]) -> float:
        own = [spec.name for spec in specs if spec.specs[0].native is not None]
        return sum(name in names or _packed(name) in names for name in own) / max(1, len(own))

    return "native" if share(native) > share(released) else "released"


def _packed(name: str) -> str:
    return name.removesuffix("weight") + "weight_packed"


def combine_schemes(schemes: Collection[str]) -> Quantization:
    """One word for a whole checkpoint out of the schemes of its weights."""
    if not schemes:
        return "none"
    found = sorted(set(schemes))
    return found[0] if len(found) == 1 else "mixed"  # type: ignore[return-value]


def read_quantized(
    spec: StoredSpec, tensors: Mapping[str, StoredTensor], block: tuple[int, int] | None
) -> QuantizedWeight | None:
    """The quantised form in which a weight is stored, or None if it is stored plain.

    `tensors` is keyed by released-prefix names. `block` is the config's `weight_block_size`.
    """
    stem = spec.name.removesuffix("weight")
    weight = tensors.get(spec.name)
    packed = tensors.get(stem + "weight_packed")
    if weight is not None and weight.dtype in PLAIN and weight.shape == spec.shape:
        return None
    siblings = {kind for kind in WEIGHT_SCALES if stem + kind in tensors}
    if weight is None and packed is not None:
        return _read_scheme(_compressed_tensors(spec.shape), stem, packed, tensors)
    if weight is None:
        return None
    if weight.dtype == "U8" or "weight_scale_2" in siblings:
        return _read_scheme(_modelopt(spec.shape), stem, weight, tensors)
    if weight.dtype == "F8_E4M3" or "weight_scale_inv" in siblings:
        scale = "weight_scale_inv" if "weight_scale_inv" in siblings else "weight_scale"
        if not siblings:
            scale = "weight_scale_inv"
        return _read_scheme(_fp8(spec.shape, scale, block), stem, weight, tensors)
    return None


def check_arrays(
    path: str,
    shape: Shape,
    arrays: Mapping[str, tuple[Shape, np.dtype]],
    block: tuple[int, int] | None,
    where: str,
) -> list[WrongTensor]:
    """What is not right with the arrays that a leaf is stored as; they are given by key.

    shape: of the leaf, [out, in] or with the experts in front, which each array has there too.
    """
    keys = frozenset(arrays)
    names = {np.dtype(dtype): name for name, (_, dtype) in DTYPES.items() if dtype is not None}
    stack, weight = shape[:-2], shape[-2:]
    if keys == {"codes", "scale"}:
        form = _fp8(weight, "weight_scale", block)
    elif keys == {"codes", "scale", "scale_2"}:
        form = _modelopt(weight)
    elif keys == {"codes", "scale", "global_scale"}:
        form = _compressed_tensors(weight)
    else:
        expected = "codes and scale, or with scale_2 or global_scale"
        return [WrongTensor(path, expected, " and ".join(sorted(keys)), where)]
    wrong = []
    for part in (form.codes, *form.scales):
        came, dtype = arrays[ARRAY_KEYS[part.kind]]
        name = f"{path}.{ARRAY_KEYS[part.kind]}"
        if came[: len(stack)] != stack:
            expected, found = f"{list(stack)} experts", f"{dtype} {list(came)}"
            wrong.append(WrongTensor(name, expected, found, where))
            continue
        one = StoredTensor(name, names.get(dtype, str(dtype)), came[len(stack) :], where, 0, 0)
        wrong += _check(one, part)
    return wrong


class _Part(NamedTuple):
    """What one tensor of a quantised weight must be; `fits` judges the shape."""

    kind: str
    dtypes: tuple[str, ...]
    shapes: str
    fits: Callable[[Shape], bool]


class _Form(NamedTuple):
    scheme: Scheme
    codes: _Part
    scales: tuple[_Part, ...]


def _exactly(*shapes: Shape) -> Callable[[Shape], bool]:
    return lambda shape: shape in shapes


@functools.lru_cache(maxsize=64)  # tens of thousands of weights have a few shapes
def _fp8(weight: Shape, scale: str, block: tuple[int, int] | None) -> _Form:
    out, into = weight
    grid = None if block is None else (-(-out // block[0]), -(-into // block[1]))
    legal: list[Shape] = [] if grid is None else [grid]
    if scale == "weight_scale":
        legal += [(out,), (out, 1), (), (1,)]
    words = " or ".join(str(list(shape)) for shape in legal)
    if block is None:
        unknown = "a block grid (weight_block_size is not in config.json)"
        words = f"{words}; {unknown}" if words else unknown
    dtypes = ("F32", "BF16", "F8_E8M0", "U8")
    return _Form(
        "fp8",
        _Part("weight", ("F8_E4M3",), str(list(weight)), _exactly(weight)),
        (_Part(scale, dtypes, words, _exactly(*legal)),),
    )


@functools.lru_cache(maxsize=64)
def _nvfp4(scheme: Scheme, second: str, weight: Shape) -> _Form:
    out, into = weight
    words = RELEASED_WORDS[scheme]
    packed, groups = (out, into // 2), (out, into // NVFP4_GROUP)
    whole = into % NVFP4_GROUP == 0
    note = "" if whole else f" (input width {into} is not a multiple of {NVFP4_GROUP})"
    return _Form(
        scheme,
        _Part(
            words["codes"],
            ("U8",),
            f"{list(packed)}{note}",
            lambda shape: whole and shape == packed,
        ),
        (
            _Part(words["scale"], ("F8_E4M3",), str(list(groups)), _exactly(groups)),
            _Part(words[second], ("F32",), "[] or [1]", _exactly((), (1,))),
        ),
    )


def _modelopt(weight: Shape) -> _Form:
    return _nvfp4("nvfp4_modelopt", "scale_2", weight)


def _compressed_tensors(weight: Shape) -> _Form:
    return _nvfp4("nvfp4_compressed_tensors", "global_scale", weight)


def _read_scheme(
    form: _Form, stem: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> QuantizedWeight:
    scales = []
    missing = []
    wrong = _check(codes, form.codes)
    for part in form.scales:
        scale = tensors.get(stem + part.kind)
        if scale is None:
            missing.append(stem + part.kind)
            continue
        scales.append(scale)
        wrong += _check(scale, part)
    return QuantizedWeight(form.scheme, codes, tuple(scales), tuple(missing), tuple(wrong))


def _check(tensor: StoredTensor, part: _Part) -> list[WrongTensor]:
    if tensor.dtype in part.dtypes and part.fits(tensor.shape):
        return []
    expected = f"{' or '.join(part.dtypes)} {part.shapes}"
    came = f"{tensor.dtype} {list(tensor.shape)}"
    return [WrongTensor(tensor.name, expected, came, tensor.file)]
