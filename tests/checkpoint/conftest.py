"""Checkpoints for tests: true headers of any size, sparse data or given bytes."""

import json
import math
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "I64": 64, "I32": 32}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U8": 8, "I8": 8, "BOOL": 8, "F4": 4}


def nbytes(dtype, shape):
    return math.prod(shape) * BITS[dtype] // 8


def write_file(path, tensors, data=None):
    """One safetensors file: {name: (dtype, shape)}; bytes from `data`, or a hole that reads 0."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for name in tensors:
            stream.write((data or {}).get(name, b""))
        stream.truncate(8 + len(raw) + offset)


def write_checkpoint(directory, tensors, config=None, *, shards=1, index=True, data=None):
    """A checkpoint directory; `config` is the decoded config.json. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    size = -(-len(names) // shards) or 1
    weight_map = {}
    for number in range(shards):
        chosen = names[number * size : (number + 1) * size]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_file(directory / file, {name: tensors[name] for name in chosen}, data)
        weight_map |= dict.fromkeys(chosen, file)
    if index:
        total = sum(nbytes(*tensors[name]) for name in names)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


class Facts:
    """Tensor patterns of six layouts, as their files' headers have them."""

    def __init__(self):
        self.golden = json.loads((ROOT / "tests/golden/tensors.json").read_text())
        self.layouts = list(self.golden["totals"])

    def totals(self, layout, part="total"):
        """(tensors, bytes)"""
        return tuple(self.golden["totals"][layout][part])

    def _indices(self, spec):
        for part in filter(None, self.golden.get(spec, spec).split(",")):
            low, _, high = part.partition("-")
            yield from range(int(low), int(high or low) + 1)

    def tensors(self, layout):
        """{name: (dtype, shape)}"""
        found = {}
        for group in self.golden["patterns"]:
            if layout not in group["layouts"]:
                continue
            for template, dtype, shape, indices in group["tensors"]:
                for index in self._indices(indices) if indices else [None]:
                    name = template.replace("{layer}", str(index)).replace("{block}", str(index))
                    if "{expert}" in name:
                        head, tail = name.split("{expert}")
                        for expert in range(self.golden["experts"]):
                            found[f"{head}{expert}{tail}"] = (dtype, tuple(shape))
                    else:
                        found[name] = (dtype, tuple(shape))
        return found


def read_config(name):
    return json.loads((ROOT / "configs" / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def facts():
    return Facts()


@pytest.fixture(scope="session")
def config_file():
    """Decoded configs/NAME.json."""
    return read_config


@pytest.fixture(scope="session")
def write():
    return write_checkpoint


@pytest.fixture(scope="session")
def write_shard():
    return write_file


@pytest.fixture(scope="session")
def full_size(facts, tmp_path_factory):
    """Layout → directory of the real geometry: true headers, data that are holes."""
    made = {}
    quantization = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "nvfp4_modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }

    def make(layout):
        if layout not in made:
            config = read_config("glm5_3_flash")
            if layout in quantization:
                config["quantization_config"] = quantization[layout]
            # One file is the harder case for memory: its whole header is decoded at once.
            shards = 62 if layout in ("bf16", "fp8") else 1
            directory = tmp_path_factory.mktemp("full") / layout
            made[layout] = write_checkpoint(directory, facts.tensors(layout), config, shards=shards)
        return made[layout]

    return make


@pytest.fixture(scope="session")
def small(config_file):
    """Naming → {name: (dtype, shape)} of the tiny model, dtypes as released."""
    from glm5_jax.config import parse_config
    from glm5_jax.specs import stored_tensors

    def make(naming="released", config=None, **parts):
        parsed = parse_config(config or config_file("tiny"))
        return {
            spec.name: (spec.dtype, spec.shape) for spec in stored_tensors(parsed, naming, **parts)
        }

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Arguments of make_tiny → a directory that it made, made once; to be read only."""
    from glm5_jax.checkpoint.tiny import make_tiny

    made = {}

    def make(**arguments):
        key = json.dumps(arguments, sort_keys=True)
        if key not in made:
            made[key] = make_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", **arguments)
        return made[key]

    return make


@pytest.fixture(scope="session")
def converted(tiny, tmp_path_factory):
    """(source, arguments of convert) → an Orbax directory, converted once; to be read only."""
    from glm5_jax.checkpoint.convert import convert

    made = {}

    def make(source=None, **arguments):
        source = source or tiny()
        key = f"{source} {json.dumps(arguments, sort_keys=True)}"
        if key not in made:
            directory = tmp_path_factory.mktemp("orbax") / "converted"
            convert(source, directory, **arguments)
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def stored():
    """Directory of safetensors → {name: array}, read by the safetensors package."""
    from safetensors import safe_open

    def read(directory):
        found = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "numpy") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found

    return read


def fp8_of(tensors, config):
    """Matrices that the FP8 release quantises, quantised; blocks of 16 × 16."""
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    kinds = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "shared_experts", "experts", "mlp.up")
    changed = {}
    for name, (dtype, shape) in tensors.items():
        if (
            name.startswith("model.language_model.")
            and len(shape) == 2
            and any(kind in name for kind in kinds)
        ):
            changed[name] = ("F8_E4M3", shape)
            grid = tuple(-(-n // 16) for n in shape)
            changed[name.removesuffix("weight") + "weight_scale_inv"] = ("F32", grid)
        else:
            changed[name] = (dtype, shape)
    return changed


def nvfp4_of(tensors, codes, second):
    changed = {}
    for name, (dtype, shape) in tensors.items():
        if ".mlp.experts." in name:
            stem = name.removesuffix("weight")
            changed[stem + codes] = ("U8", (shape[0], shape[1] // 2))
            changed[stem + "weight_scale"] = ("F8_E4M3", (shape[0], shape[1] // 16))
            changed[stem + second] = ("F32", ())
        else:
            changed[name] = (dtype, shape)
    return changed


@pytest.fixture(scope="session")
def small_layout(small):
    """Layout → ({name: (dtype, shape)}, config.json) of a small model stored in it."""

    def make(layout):
        config = read_config("tiny")
        config["text_config"]["moe_intermediate_size"] = 48  # a multiple of NVFP4's group
        tensors = small("native" if layout == "native" else "released", config)
        if layout == "fp8":
            tensors = fp8_of(tensors, config)
        elif layout == "nvfp4_modelopt":
            tensors = nvfp4_of(tensors, "weight", "weight_scale_2")
        elif layout == "nvfp4_compressed_tensors":
            tensors = nvfp4_of(tensors, "weight_packed", "weight_global_scale")
        return tensors, config

    return make


DTYPE_CODES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "int32": "I32",
    "uint8": "U8",
}


@pytest.fixture(scope="session")
def arrays():
    """Directory → {name: array in its stored dtype}; the safetensors package can't read FP8."""
    from glm5_jax.checkpoint.reader import open_checkpoint

    def read(directory):
        checkpoint = open_checkpoint(directory)
        return {name: checkpoint.read(name).copy() for name in checkpoint.tensors}

    return read


@pytest.fixture(scope="session")
def place_arrays(write, tmp_path_factory):
    """Write {name: array} and a config as a checkpoint; returns the directory."""

    def make(values, config):
        tensors = {
            name: (DTYPE_CODES[value.dtype.name], value.shape) for name, value in values.items()
        }
        data = {name: value.tobytes() for name, value in values.items()}
        return write(tmp_path_factory.mktemp("placed"), tensors, config, data=data)

    return make


# None of the FP8 layout's shapes [out, in] is a multiple of it.
FP8_BLOCK = (16, 32)


@pytest.fixture(scope="session")
def quantizable(config_file):
    """A tiny config all of whose experts have an NVFP4 form, with blocks for FP8; with changes."""

    def make(**text):
        config = config_file("tiny")
        config["text_config"] |= {"moe_intermediate_size": 48} | text
        quantization = {"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK)}
        return config | {"quantization_config": quantization}

    return make


@pytest.fixture(scope="session")
def quantized(tiny, quantizable):
    """Layout → a directory of that model in it."""
    return lambda layout: tiny(config=quantizable(), quantization=layout)
