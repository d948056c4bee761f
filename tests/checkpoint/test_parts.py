"""Parts of arrays: the bytes of the whole array's part, and no other byte is read."""

import numpy as np
import pytest

from glm5_jax.checkpoint.bind import bind, read_array, read_box
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.tiny import make_tiny

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
