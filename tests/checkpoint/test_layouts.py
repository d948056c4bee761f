import pytest

from glm5_jax.checkpoint.layouts import (
    combine_schemes,
    detect_naming,
    read_quantized,
    released_prefix,
)
from glm5_jax.checkpoint.reader import StoredTensor
from glm5_jax.config import parse_config
from glm5_jax.specs import EXPERTS, StoredSpec, stored_tensors

NAME = "model.language_model.layers.3.mlp.experts.0.up_proj.weight"
STEM = NAME.removesuffix("weight")


def weight(shape):
    return StoredSpec(NAME, shape, "BF16", "text", 3, 0, (EXPERTS[1],))


def stored(**tensors):
    """Tensors by the last word of their name."""
    return {
        STEM + kind: StoredTensor(STEM + kind, dtype, shape, "f", 0, 0)
        for kind, (dtype, shape) in tensors.items()
    }


def read(shape, block=(128, 128), **tensors):
    return read_quantized(weight(shape), stored(**tensors), block)


@pytest.mark.parametrize(
    "name, full",
    [
        ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("model.visual.blocks.0.mlp.gate_proj.weight",) * 2,
        ("lm_head.weight",) * 2,
    ],
)
def test_both_text_prefixes_are_one_and_vision_keeps_its_own(name, full):
    assert released_prefix(name) == full


@pytest.mark.parametrize("naming", ["released", "native"])
def test_naming_is_told_by_the_names_that_differ_whatever_one_of_them_does(config_file, naming):
    config = parse_config(config_file("tiny"))
    lists = {kind: list(stored_tensors(config, kind)) for kind in ("released", "native")}
    names = {spec.name for spec in lists[naming]}
    other = ({"released", "native"} - {naming}).pop()
    stranger = next(spec.name for spec in lists[other] if spec.name not in names)
    for kept in (names, names | {stranger}, names - {next(iter(sorted(names)))}):
        assert detect_naming(kept, lists["released"], lists["native"]) == naming


def test_checkpoint_in_two_schemes_is_mixed():
    assert combine_schemes([]) == "none"
    assert combine_schemes(["fp8", "fp8"]) == "fp8"
    assert combine_schemes(["fp8", "nvfp4_modelopt"]) == "mixed"


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_plain_weight_is_plain_whatever_lies_beside_it(dtype):
    assert read((256, 256), weight=(dtype, (256, 256)), weight_scale=("F32", ())) is None


@pytest.mark.parametrize(
    "shape, grid", [((576, 256), (5, 2)), ((32, 128), (1, 1)), ((1, 129), (1, 2))]
)
def test_partial_edge_blocks_are_normal(shape, grid):
    found = read(shape, weight=("F8_E4M3", shape), weight_scale_inv=("F32", grid))
    assert found.scheme == "fp8"
    assert found.wrong == found.missing == ()


def test_floor_grid_for_a_partial_block_is_wrong():
    found = read((576, 256), weight=("F8_E4M3", (576, 256)), weight_scale_inv=("F32", (4, 2)))
    (wrong,) = found.wrong
    assert wrong.name == STEM + "weight_scale_inv"
    assert "[5, 2]" in wrong.expected and "[4, 2]" in wrong.came


@pytest.mark.parametrize("shape", [(2, 2), (256,), (256, 1), (), (1,)])
@pytest.mark.parametrize("dtype", ["F32", "F8_E8M0", "U8"])
def test_weight_scale_may_be_a_grid_or_per_channel_or_scalar_in_three_dtypes(shape, dtype):
    found = read((256, 256), weight=("F8_E4M3", (256, 256)), weight_scale=(dtype, shape))
    assert found.wrong == found.missing == ()
    assert len(found.scales) == 1


def test_block_size_comes_from_the_config_and_is_never_inferred():
    tensors = {"weight": ("F8_E4M3", (256, 256)), "weight_scale_inv": ("F32", (2, 2))}
    assert read((256, 256), block=(128, 128), **tensors).wrong == ()
    assert "[4, 4]" in read((256, 256), block=(64, 64), **tensors).wrong[0].expected
    assert "weight_block_size" in read((256, 256), block=None, **tensors).wrong[0].expected


def test_scale_with_an_unknown_suffix_does_not_count_as_one():
    found = read((256, 256), weight=("F8_E4M3", (256, 256)), scale=("F32", (2, 2)))
    assert found.missing == (STEM + "weight_scale_inv",)
    assert found.scales == ()


@pytest.mark.parametrize("second", [(), (1,)])
def test_nvfp4_scalar_scale_has_rank_0_or_1(second):
    codes, groups = (8, 16), (8, 2)
    found = read(
        (8, 32),
        weight=("U8", codes),
        weight_scale=("F8_E4M3", groups),
        weight_scale_2=("F32", second),
    )
    assert (found.scheme, found.wrong, found.missing) == ("nvfp4_modelopt", (), ())
    found = read(
        (8, 32),
        weight_packed=("U8", codes),
        weight_scale=("F8_E4M3", groups),
        weight_global_scale=("F32", second),
    )
    assert (found.scheme, found.wrong, found.missing) == ("nvfp4_compressed_tensors", (), ())


@pytest.mark.parametrize(
    "fault, named",
    [
        ({"weight": ("U8", (8, 32))}, "weight"),
        ({"weight": ("I8", (8, 16))}, "weight"),
        ({"weight_scale": ("F8_E4M3", (8, 1))}, "weight_scale"),
        ({"weight_scale": ("F32", (8, 2))}, "weight_scale"),
        ({"weight_scale_2": ("F32", (2,))}, "weight_scale_2"),
        ({"weight_scale_2": ("BF16", ())}, "weight_scale_2"),
    ],
)
def test_nvfp4_part_that_does_not_fit_is_named(fault, named):
    good = {
        "weight": ("U8", (8, 16)),
        "weight_scale": ("F8_E4M3", (8, 2)),
        "weight_scale_2": ("F32", ()),
    }
    (wrong,) = read((8, 32), **(good | fault)).wrong
    assert wrong.name == STEM + named


def test_nvfp4_width_that_is_no_multiple_of_the_group_is_refused():
    found = read(
        (8, 40),
        weight=("U8", (8, 20)),
        weight_scale=("F8_E4M3", (8, 2)),
        weight_scale_2=("F32", ()),
    )
    assert "40 is not a multiple of 16" in found.wrong[0].expected
