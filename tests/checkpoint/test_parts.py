"""Parts of arrays: the bytes of the whole array's part, and no other byte is read."""

import json

import numpy as np
import pytest

from glm5_jax.checkpoint.bind import bind, read_array, read_box
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.restore import open_leaves
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config

LAYOUTS = [
    ("released", "none"),
    ("native", "none"),
    ("released", "fp8"),
    ("released", "nvfp4_modelopt"),
    ("released", "nvfp4_compressed_tensors"),
]


@pytest.mark.parametrize(("naming", "quantization"), LAYOUTS)
def test_part_is_that_of_the_whole(tmp_path, naming, quantization, monkeypatch):
    rng = np.random.default_rng()
    path = make_tiny(tmp_path / "m", naming=naming, quantization=quantization)
    checkpoint = open_checkpoint(path)
    arrays = [a for leaf in bind(checkpoint, checkpoint.config).values() for a in leaf.arrays]
    assert {a.transform for a in arrays} >= (
        {"copy"} if naming == "native" else {"stack", "concat"}
    )
    read = []
    runs = type(checkpoint)._read_runs

    def counted(self, tensor, dtype, out, starts, once):
        read.append(out.nbytes)
        runs(self, tensor, dtype, out, starts, once)

    monkeypatch.setattr(type(checkpoint), "_read_runs", counted)
    for array in arrays:
        whole = read_array(checkpoint, array)
        for _ in range(3):
            ends = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in array.shape]
            box = tuple(
                (0, n) if rng.random() < 0.3 else (int(a), int(b))
                for n, (a, b) in zip(array.shape, ends, strict=True)
            )
            out = np.empty([b - a for a, b in box], array.dtype)
            read.clear()
            read_box(checkpoint, array, out, box)
            expected = whole[tuple(slice(a, b) for a, b in box)]
            assert out.tobytes() == expected.tobytes(), (array.path, box)
            assert sum(read) == out.nbytes


def test_part_of_another_shape_is_refused(tmp_path):
    checkpoint = open_checkpoint(make_tiny(tmp_path / "m"))
    with pytest.raises(ValueError, match="out must be the part"):
        checkpoint.read_box("lm_head.weight", np.empty((2, 2), "bfloat16"), ((0, 2), (0, 3)))


@pytest.fixture(
    scope="module", params=["none", "fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors"]
)
def directories(request, tmp_path_factory):
    """One model as safetensors and as Orbax, with blocks that halves of its experts consist of."""
    config = json.loads(packaged_config("tiny").read_text())
    config["text_config"] |= {"moe_intermediate_size": 32, "hidden_size": 64}
    config["vision_config"]["out_hidden_size"] = 64
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    at = tmp_path_factory.mktemp("parts")
    source = make_tiny(at / "m", config, quantization=request.param)
    convert(source, at / "orbax")
    return source, at / "orbax"


@pytest.mark.parametrize("dtype", ["stored", "bfloat16", "float32"])
def test_part_of_a_leaf_is_that_of_the_leaf(directories, dtype):
    for path in directories:
        reader = open_leaves(path, dtype)
        for leaf in ("layers.3.ffn.experts.up_proj", "layers.3.ffn.experts.down_proj", "lm_head"):
            for name, whole in reader.read(leaf).items():
                assert (whole.shape, whole.dtype) == reader.arrays(leaf)[name]
                box = [(0, n) if n == 1 else (n // 2, n) for n in whole.shape]
                before = reader.bytes_read
                part = reader.read_box(leaf, name, tuple(box))
                read = reader.bytes_read - before
                assert part.tobytes() == whole[tuple(slice(a, b) for a, b in box)].tobytes()
                assert part.dtype == whole.dtype
                stored = sum(
                    a.dtype.itemsize * np.prod(a.shape) for a in reader._stored(leaf).values()
                )
                assert read <= stored / 4 + 64
