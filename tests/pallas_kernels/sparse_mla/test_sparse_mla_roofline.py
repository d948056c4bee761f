"""What `bench sparse-mla --compile-for` counts from a shape."""

from pallas_kernels.roofline import H200
from pallas_kernels.sparse_mla import roofline


def test_floor_is_each_input_and_output_once():
    # 2048 rows, 64 queries and 64 outputs of 512 bfloat16 numbers, and the indices.
    floor = roofline.floor(128, 1, 64, 2048, 512)
    assert floor.bytes == 128 * (2 * 512 * (2048 + 64 + 64) + 4 * 2048)
    assert floor.flops == 128 * 64 * 2048 * 512 * 2 * 2
    seconds, why = floor.bound(H200)
    assert why == "memory"
    assert 59e-6 < seconds < 61e-6


def test_a_batch_that_fills_the_card_by_hand():
    (attend,) = roofline.stages(B=128, T=1, W=70)
    # Two tiles of indices; 64 queries, 70 rows and 64 outputs of 512 in bfloat16; 64 float32 sums.
    assert attend.bytes == 128 * (4 * 128 + 2 * 512 * (64 + 70 + 64) + 4 * 64)
    assert attend.flops == 128 * 2 * 2 * 64 * 128 * 512


def test_one_token_in_two_parts_by_hand():
    attend, merge = roofline.stages(B=1, T=1, W=70 + 2 * 64 * 3)
    parts, tiles = 8, 1
    found = parts * 64 * (4 * 512 + 4)  # in float32
    assert attend.bytes == 4 * parts * tiles * 64 + 2 * 512 * (64 + 454) + found
    assert attend.flops == 2 * 2 * 64 * parts * tiles * 64 * 512
    assert merge.bytes == found + 64 * (2 * 512 + 4)
