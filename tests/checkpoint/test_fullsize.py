"""The real geometry in six layouts, planned in full: what is written, and what comes back.

Headers are true, data are holes and stay unread. `glm5-jax bench rehearsal` writes and converts
layers of this size.
"""

import json

import pytest

from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.bind import bind, passthrough
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.conveyor import PIECE_BYTES
from glm5_jax.checkpoint.export_plan import plan_export
from glm5_jax.checkpoint.groups import GROUP_BYTES, group_items
from glm5_jax.checkpoint.items import bound_items, carried_items
from glm5_jax.checkpoint.ledger import FORMAT, LedgerHeader, LedgerLine, LedgerSource
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.rehearsal import LAYOUTS, rehearsal_tensors, write_rehearsal
from glm5_jax.checkpoint.verify import verify

STACK = (288, 2048, 4096)


def plan(checkpoint, dtype):
    bound = bind(checkpoint, checkpoint.config)
    items = [item for leaf in bound.values() for item in bound_items(leaf, dtype)]
    return [*items, *carried_items(passthrough(checkpoint, checkpoint.config).values())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_the_real_model_has_its_place_there_and_back(full_size, facts, layout):
    checkpoint = open_checkpoint(full_size(layout))
    items = plan(checkpoint, "stored")
    count, nbytes = facts.totals(layout)
    assert sum(item.nbytes for item in items) == nbytes
    named = [tensor.name for item in items for tensor, _ in item.origins]
    assert set(named) == set(checkpoint.tensors)
    if layout != "hf_native":  # which fuses two leaves into one tensor
        assert len(named) == count

    groups = group_items(items)
    assert [item for members in groups.values() for item in members] == items
    for members in groups.values():
        assert len(members) == 1 or sum(item.nbytes for item in members) <= GROUP_BYTES
    for item in items:
        sizes = [item.piece_bytes(index) for index in item.pieces]
        assert sum(sizes) == item.nbytes and max(sizes) <= PIECE_BYTES
        if len(item.shape) == 3 and ".experts." in item.path and item.nbytes > PIECE_BYTES:
            assert len(sizes) == 288, "an expert can be read without the others"

    naming = "native" if layout == "hf_native" else "released"
    begun = header(naming, items)
    back = plan_export(checkpoint.config, begun, ledger(items), naming, "stored")
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors.values()}
    assert {name: tuple(declared) for name, declared in back.tensors.items()} == tensors


def header(naming, items):
    mtp = any(item.path.startswith("mtp.") for item in items)
    return LedgerHeader(FORMAT, naming, "none", "stored", None, mtp, len(items), {})


def ledger(items):
    return {
        item.path: LedgerLine(
            item.path,
            item.dtype.name,
            item.shape,
            item.transform,
            "",
            tuple(
                LedgerSource(tensor.name, tensor.file, tensor.dtype, tensor.shape, "", rows)
                for tensor, rows in item.origins
            ),
        )
        for item in items
    }


@pytest.mark.parametrize("layout", ["fp8", "nvfp4_modelopt"])
def test_decoded_a_release_is_as_large_as_the_bf16_one(full_size, facts, layout):
    items = plan(open_checkpoint(full_size(layout)), "bfloat16")
    assert sum(item.nbytes for item in items) == facts.totals("bf16")[1]
    stacks = [item for item in items if item.shape == STACK]
    assert {item.piece_bytes(item.pieces[0]) for item in stacks} == {2048 * 4096 * 2}
    assert max(item.held_bytes(index) for item in items for index in item.pieces[:1]) < 2**28


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rehearsal_has_the_tensors_of_its_layout(facts, config_file, layout):
    found = rehearsal_tensors(config_file("glm5_3_flash"), LAYOUTS[layout])
    expected = {k: v for k, v in facts.tensors(layout).items() if ".visual." not in k}
    assert {name: tuple(declared) for name, declared in found.items()} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rehearsal_writes_is_converted(tmp_path, config_file, quantizable, layout):
    config = quantizable() if LAYOUTS[layout].quantization != "none" else config_file("tiny")
    source = write_rehearsal(tmp_path / "source", config, LAYOUTS[layout], "1,3", 200_000)
    report = audit(source, layers="1,3")
    assert report.complete and report.quantization == LAYOUTS[layout].quantization
    assert report.files > 1
    convert(source, tmp_path / "orbax", layers="1,3")
    assert verify(tmp_path / "orbax").ok
    assert json.loads((source / "config.json").read_bytes())["vision_config"] is None
