"""One planted fault at a time, in a tensor of every kind: the audit names it."""

import pytest

from glm5_jax.checkpoint.audit import audit

LAYOUTS = ("released", "native", "fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors")


@pytest.fixture
def plant(tmp_path, write, small_layout):
    """Layout → one tensor of every kind, and a way to audit the model with some tensors changed.

    Kinds go by the words of the name, the MTP layer's apart: in released naming all of them,
    elsewhere those that aren't stored as there.
    """

    def make(layout):
        tensors, config = small_layout(layout)
        kinds = {}
        for name in tensors:
            words = (word for word in name.split(".") if not word.isdecimal())
            kinds[".layers.5." in name, *words] = name  # the last expert of the last such layer
        released = {} if layout == "released" else small_layout("released")[0]
        names = [name for name in kinds.values() if released.get(name) != tensors[name]]
        assert names

        def audited(changed):
            return audit(write(tmp_path, changed, config))

        return tensors, names, audited

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_without_a_fault_is_complete(plant, layout):
    tensors, _, audited = plant(layout)
    report = audited(tensors)
    assert report.complete and report.total == len(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_removed_tensor_is_missing(plant, layout):
    tensors, names, audited = plant(layout)
    for removed in names:
        report = audited({name: kept for name, kept in tensors.items() if name != removed})
        assert removed in report.missing and not report.complete


@pytest.mark.parametrize("layout", LAYOUTS)
def test_renamed_tensor_is_missing_and_unexpected(plant, layout):
    tensors, names, audited = plant(layout)
    for old in names:
        new = f"{old}_renamed"
        report = audited({new if name == old else name: kept for name, kept in tensors.items()})
        assert old in report.missing and new in report.unexpected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reshaped_tensor_is_wrong(plant, layout):
    tensors, names, audited = plant(layout)
    for name in names:
        dtype, shape = tensors[name]
        shapes = [(*shape, 2), (*shape[:-1], shape[-1] + 1) if shape else (3,)]
        if len(shape) == 2 and shape[0] != shape[1]:
            shapes[1] = (shape[1], shape[0])
        for wrong in shapes:
            report = audited(tensors | {name: (dtype, wrong)})
            assert name in [fault.name for fault in report.wrong], wrong
            assert not report.complete


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtype_that_the_design_does_not_allow_is_named(plant, layout):
    tensors, names, audited = plant(layout)
    for name in names:
        dtype, shape = tensors[name]
        legal = {dtype, "F32"} if dtype == "BF16" else {dtype}
        if name.endswith("weight_scale_inv"):
            legal |= {"BF16", "U8"}  # U8: the bytes of an E8M0 scale
        for other in {"F16", "U8", "F8_E4M3", "BF16"} - legal:
            report = audited(tensors | {name: (other, shape)})
            assert any(name in line for line in report.problems()), (name, other)
            assert not report.complete
