"""When the Mosaic GPU kernel of sparse MLA runs, and that it computes what it says."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper
from pallas_kernels.sparse_mla import mosaic_gpu, sparse_mla_decode

KERNELS = Path(__file__).with_name("mla_kernels.py")


def inputs(dtype=jnp.bfloat16, A=8, R=512, T=1):
    return (
        jnp.zeros((1, T, A, R), dtype),
        jnp.zeros((1, 5, R), dtype),
        jnp.zeros((1, T, 3), jnp.int32),
    )


def run_kernel_tests(**environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(KERNELS)],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if jax.__version_info__[:2] == (0, 11):
    from pallas_kernels.sparse_mla import mosaic_gather

    def test_kernel_interpreted_on_a_cpu():
        """Correct, free of races and differentiable: the tests in `mla_kernels.py`."""
        run_kernel_tests(JAX_PLATFORMS="cpu", NPROC="8")

    @pytest.mark.gpu
    def test_kernel_on_a_gpu():
        """The same, compiled."""
        run_kernel_tests()

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"dtype": jnp.float32}, "needs bfloat16 q and kv; q is float32, kv is float32"),
            ({"R": 128}, "needs latents of 512 numbers, got 128"),
            ({"A": 65}, "needs at most 64 heads, got 65"),
            ({"T": 0}, "needs at least one token"),
            ({}, "needs a Hopper GPU, JAX runs on cpu"),
        ],
        ids=str,
    )
    def test_kernel_says_what_it_cannot_run(changed, reason):
        assert mosaic_gpu.supports(*inputs(**changed)).startswith(reason)

    def test_kernel_runs_where_it_can():
        with hopper.interpreted():
            for A in (1, 64):
                assert mosaic_gpu.supports(*inputs(A=A)) is None

    def test_every_piece_of_a_tile_goes_where_the_tensor_cores_look_for_it(tile_places):
        copied = np.zeros((64, 64), int)
        for thread in range(128):
            row, source, target = mosaic_gather.first_piece(thread)
            for i in range(mosaic_gather.PASSES):
                for band in range(mosaic_gather.BANDS):
                    rows, in_row, in_tile = mosaic_gather.further_piece(i, band)
                    at = row + rows, (source + in_row) // mosaic_gather.PIECE
                    assert target + in_tile == tile_places[at]
                    copied[at] += 1
        assert (copied == 1).all()


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0)])
def test_kernel_needs_a_jax_that_can_run_it(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    q, kv, indices = inputs()
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: needs JAX 0\.11, this is 0\.1[02]"):
        sparse_mla_decode(q, kv, indices, scale=1.0, implementation="mosaic_gpu")
    with hopper.interpreted():
        out = sparse_mla_decode(q, kv, indices, scale=1.0)  # falls back
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("tokens", "tiles", "parts", "each"),
    [
        (1, 1, 1, 1),
        (1, 33, 33, 1),  # the model's selection: the whole card for one token
        (8, 33, 11, 3),
        (64, 33, 2, 17),
        (128, 33, 1, 33),
        (512, 33, 1, 33),
        (132, 100, 3, 34),  # more indices than a block holds
    ],
)
def test_small_batches_fill_the_card(tokens, tiles, parts, each):
    assert mosaic_gpu.split(tokens, tiles) == (parts, each)


def test_parts_hold_every_tile_once():
    for tokens in (1, 2, 7, 30, 100, 133, 1000):
        for tiles in range(1, 150):
            parts, each = mosaic_gpu.split(tokens, tiles)
            assert each <= mosaic_gpu.MOST_TILES
            assert (parts - 1) * each < tiles <= parts * each


def test_parts_are_merged_by_the_sums_of_their_exponentials():
    rng = np.random.default_rng(0)
    scores, rows = 9 * rng.standard_normal((4, 15)), rng.standard_normal((15, 3))
    cuts = [(0, 5), (5, 5), (5, 14), (14, 15)]  # the second is empty

    def attend(start, end):
        weights = np.exp(scores[:, start:end])
        total = weights.sum(1, keepdims=True)
        out = np.divide(weights @ rows[start:end], total, out=np.zeros((4, 3)), where=total > 0)
        with np.errstate(divide="ignore"):
            return out, np.log(total[:, 0])

    out, lse = (np.stack(x)[None] for x in zip(*(attend(*cut) for cut in cuts), strict=True))
    for ours, truth in zip(mosaic_gpu.merge(out, lse), attend(0, 15), strict=True):
        np.testing.assert_allclose(ours[0], truth, rtol=1e-12)
    out, lse = mosaic_gpu.merge(np.zeros((1, 2, 4, 3)), np.full((1, 2, 4), -np.inf))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
