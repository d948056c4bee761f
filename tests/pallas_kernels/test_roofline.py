"""What `bench kda --compile-for` counts from a shape, and how it refuses."""

import pytest

from pallas_kernels import aot
from pallas_kernels.aot_calls import KDAShape
from pallas_kernels.kda import roofline
from pallas_kernels.roofline import Card, Stage


def test_floor_is_each_input_and_output_once():
    # q, k, g, v and o: 8192 · 64 rows of 128 in bfloat16 each; β is one number a row.
    assert roofline.floor(1, 8192, 64, 128, 128).bytes == 8192 * 64 * (5 * 128 + 1) * 2


def test_stages_of_one_chunk_by_hand():
    prepare, scan = roofline.stages(B=1, T=40, H=1, V=64)
    # bfloat16 q and k, float32 g and β; out: three tiles [64, 128], two [64, 64], the decay.
    tiles = 2 * (3 * 64 * 128 + 2 * 64 * 64)
    assert prepare.bytes == 2 * 64 * 128 * 2 + 4 * 64 * 128 + 4 * 64 + tiles + 4 * 128
    # 4 strips of 64 × 16 by 128 for q and for k; 6 products and 3 by a block, 64 × 16 by 16.
    assert prepare.flops == 2 * (8 * 64 * 16 * 128 + 9 * 64 * 16 * 16)
    # v and o [64, 64] and the state [128, 64], in and out.
    assert scan.bytes == tiles + 4 * 128 + 2 * 2 * 64 * 64 + 2 * 4 * 128 * 64
    assert scan.flops == 2 * (3 * 64 * 64 * 128 + 2 * 64 * 64 * 64)


def test_bound_names_what_takes_longer():
    card = Card("card", bytes_per_second=10, flops_per_second=100)
    assert Stage("a", bytes=20, flops=100).bound(card) == (2, "memory")
    assert Stage("b", bytes=20, flops=500).bound(card) == (5, "arithmetic")


def test_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(aot.CannotCompile, match="'b300'; there are h200"):
        aot.compile_kernels("b300", [KDAShape()])


def test_every_target_has_its_description():
    for path in aot.TARGETS.values():
        assert "cuda_compute_capability { major: 9 minor: 0 }" in path.read_text()
