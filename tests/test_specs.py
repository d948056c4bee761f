import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from glm5_jax import specs
from glm5_jax.config import load_config, parse_config
from glm5_jax.skeleton import Skeleton

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((ROOT / "tests/golden/tensors.json").read_text())


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "configs/glm5_3_flash.json")


def tiny_with(**text):
    raw = json.loads((ROOT / "configs/tiny.json").read_text())
    raw["text_config"] |= text
    return parse_config(raw)


def indices(spec):
    found = set()
    for part in filter(None, GOLDEN.get(spec, spec).split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def patterns(layout):
    """{(template, shape): (dtype, layers or blocks)}, one template's text and MTP lines joined."""
    found = {}
    for group in GOLDEN["patterns"]:
        if layout in group["layouts"]:
            for template, dtype, shape, where in group["tensors"]:
                add(found, template, dtype, tuple(shape), indices(where))
    return found


def add(found, template, dtype, shape, where):
    # The shape is part of the key: KDA's and MLA's output projections share a template.
    seen = found.setdefault((template, shape), (dtype, set()))
    assert seen[0] == dtype
    seen[1].update(where)


def table_patterns(config, naming, mtp):
    """The same out of the spec table: templates with the layers that own them."""
    skeleton = Skeleton.from_config(config)
    found = {}
    for row in specs.OUTSIDE + specs.VISION:
        add(found, row.name, row.dtype, specs.evaluate_shape(row.shape, config.dims), ())
    for row in specs.VISION_BLOCK:
        shape = specs.evaluate_shape(row.shape, config.dims)
        add(found, row.name, row.dtype, shape, range(config.vision.depth))
    for layer in (*skeleton.layers, *([skeleton.mtp] if mtp else [])):
        for row in specs.layer_tensors(layer):
            if naming == "native" and row.native is not None:
                shape = specs.native_shape(row, config.dims)
                add(found, row.native, row.dtype, shape, [layer.index])
            else:
                shape = specs.evaluate_shape(row.shape, config.dims)
                add(found, row.name, row.dtype, shape, [layer.index])
    return found


def test_table_is_the_bf16_release_pattern_by_pattern(config):
    assert table_patterns(config, "released", mtp=True) == patterns("bf16")


@pytest.mark.parametrize("layout, naming", [("hf_saved", "released"), ("hf_native", "native")])
def test_table_is_what_transformers_saves_but_for_its_float32_router_and_conv(
    config, layout, naming
):
    saved, table = patterns(layout), table_patterns(config, naming, mtp=False)
    assert saved.keys() == table.keys()
    kept_in_float32 = set()
    for key, (dtype, where) in saved.items():
        assert table[key][1] == where, key
        if table[key][0] != dtype:
            assert (table[key][0], dtype) == ("BF16", "F32")
            kept_in_float32.add(key[0].rpartition("}.")[2])
    assert kept_in_float32 == {"mlp.gate.weight"} | (
        {"self_attn.conv1d.weight"}
        if naming == "native"
        else {f"self_attn.{letter}_conv1d.weight" for letter in "qkv"}
    )


@pytest.mark.parametrize("layout", ["fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors"])
def test_whatever_a_release_quantises_the_table_lets_it_quantise(config, layout):
    stored, table = patterns(layout), table_patterns(config, "released", mtp=True)
    rows = {row.name: row for row in (*specs.KDA, *specs.DSA, *specs.DENSE, *specs.MOE)}
    modules = {}
    for (name, shape), (_, where) in table.items():
        modules.setdefault(name.rpartition(".")[0], {})[shape] = where
    for (template, shape), (dtype, where) in stored.items():
        if table.get((template, shape)) == (dtype, where):
            continue
        module = template.rpartition(".")[0]
        assert rows[f"{module}.weight"].quantizable, template
        assert where in modules[module].values(), template
    # A weight in no quantised form must be there plain.
    kinds = {template.rpartition(".")[0] for template, _ in stored}
    assert all(key in stored or key[0].rpartition(".")[0] in kinds for key in table)


def test_kda_has_15_attention_tensors_and_dsa_14():
    assert len(specs.KDA) == 15
    assert len(specs.DSA) == 14


def test_structural_tensors_are_23_22_20_and_3_outside(config):
    skeleton = Skeleton.from_config(config)
    counts = Counter(
        (layer.mixer, layer.is_mtp, len(specs.structural_tensors(layer)))
        for layer in (*skeleton.layers, skeleton.mtp)
    )
    assert counts == {("kda", False, 23): 34, ("dsa", False, 22): 11, ("dsa", True, 20): 1}
    assert len(specs.OUTSIDE) == 3
    structural = sum(number * each for (_, _, number), each in counts.items())
    assert structural + len(specs.OUTSIDE) == 1047


def test_layer_that_shares_an_indexer_owns_none_of_its_tensors():
    kinds = ["linear_attention"] * 3 + ["deepseek_sparse_attention"] * 2
    config = tiny_with(layer_types=kinds, indexer_types=["full"] * 4 + ["shared"])
    layer = Skeleton.from_config(config).layers[4]
    assert specs.structural_tensors(layer) == (
        *specs.LAYER_NORMS,
        *specs.HYPER_CONNECTION,
        *specs.MLA,
    )
    assert not any(".indexer." in path for path in specs.layer_leaves(layer, config))


def test_no_tensor_is_in_the_table_twice():
    layered = specs.LAYER_NORMS + specs.HYPER_CONNECTION + specs.KDA + specs.DSA + specs.DENSE
    layered += specs.MOE + specs.MTP + specs.MTP_COPIES + specs.OUTSIDE
    layered += specs.VISION + specs.VISION_BLOCK
    repeated = [name for name, n in Counter(row.name for row in layered).items() if n > 1]
    # KDA and MLA both end in an output projection, in layers of different kinds.
    assert repeated == [specs.LAYER_PREFIX + "self_attn.o_proj.weight"]


def test_parameters_are_the_released_ones(config):
    elements = Counter()
    for spec in specs.stored_tensors(config):
        elements[spec.part] += math.prod(spec.shape)
    assert elements == {"text": 313_326_811_966, "mtp": 7_432_592_416, "vision": 563_627_008}
    assert sum(elements.values()) == 321_323_031_390


def test_role_counts_of_the_bf16_release(config):
    assert Counter(spec.role for spec in specs.stored_tensors(config)) == {
        **{"embedding": 1, "lm_head": 1, "final_norm": 1},
        **{"kda_projection": 306, "kda_conv": 102, "kda_decay": 68, "kda_norm": 34},
        **{"mla_projection": 60, "mla_norm": 24, "indexer": 60, "indexer_norm": 24},
        **{"moe_router": 86, "moe_expert": 3 * 288 * 43, "moe_shared": 129, "dense_ffn": 9},
        **{"layer_norm": 92, "hyper_connection": 270, "mtp_projection": 1, "mtp_norm": 3},
        "vision": 347,
    }


def test_norm_named_tensors_and_norm_roles_are_the_same_set(config):
    for spec in specs.stored_tensors(config, vision=False):
        assert ("norm" in spec.name) == spec.role.endswith("norm"), spec.name


def test_vision_tensors_are_all_in_the_vision_role_and_nothing_else_is(config):
    for spec in specs.stored_tensors(config):
        assert spec.name.startswith("model.visual.") == (spec.role == "vision")


def test_float32_is_required_of_decay_correction_bias_and_hyper_connection_base_and_scale(config):
    required = {
        spec.name.rpartition(".")[2] for spec in specs.stored_tensors(config) if spec.dtype == "F32"
    }
    assert required == {
        *("A_log", "dt_bias", "e_score_correction_bias"),
        *("hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale"),
    }


@pytest.mark.parametrize("name", ["tiny", "glm5_3_flash"])
def test_every_text_tensor_feeds_exactly_one_leaf_of_its_size(name):
    config = load_config(ROOT / f"configs/{name}.json")
    stored = {spec.name: spec for spec in specs.stored_tensors(config, vision=False)}
    tree = specs.leaves(config)
    sources = Counter(source for leaf in tree.values() for source in leaf.sources)
    assert sources == dict.fromkeys(stored, 1)
    for path, leaf in tree.items():
        assert path == leaf.path
        elements = sum(math.prod(stored[source].shape) for source in leaf.sources)
        assert math.prod(leaf.shape) == elements
        assert {(stored[s].dtype, stored[s].role) for s in leaf.sources} == {
            (leaf.dtype, leaf.role)
        }
        assert len(leaf.axes) == len(leaf.shape)


def test_leaves_have_the_shapes_the_modules_are_built_with():
    config = tiny_with()
    dims, tree = config.dims, specs.leaves(config)
    assert tree["layers.0.attn.conv"].shape == (3 * dims["H"] * dims["D"], dims["K"])
    assert [name.rpartition("self_attn.")[2] for name in tree["layers.0.attn.conv"].sources] == [
        "q_conv1d.weight",
        "k_conv1d.weight",
        "v_conv1d.weight",
    ]
    assert tree["layers.1.ffn.experts.down_proj"].shape == (dims["E"], dims["X"], dims["I"])
    assert tree["mtp.layer.ffn.experts.gate_proj"].shape == (dims["E"], dims["I"], dims["X"])
    assert tree["layers.3.attn.kv_b_proj"].shape == (
        dims["A"] * (dims["N"] + dims["V"]),
        dims["R"],
    )
    assert tree["mtp.eh_proj"].shape == (dims["X"], 2 * dims["X"])
    assert {path for path, leaf in tree.items() if leaf.keep_stored} == {
        *(f"layers.{i}.attn.conv" for i in (0, 1, 2, 4)),
        *(f"layers.{i}.ffn.router.weight" for i in (1, 2, 3, 4)),
        "mtp.layer.ffn.router.weight",
    }


def test_a_convolution_of_width_one_keeps_its_axis():
    config = tiny_with(
        linear_attn_config={"num_heads": 5, "head_dim": 14, "short_conv_kernel_size": 1}
    )
    assert specs.leaves(config)["layers.0.attn.conv"].shape == (210, 1)


def test_tree_without_mtp_has_no_mtp_path_and_a_config_without_it_neither():
    assert any(path.startswith("mtp.") for path in specs.leaves(tiny_with()))
    assert not any(path.startswith("mtp.") for path in specs.leaves(tiny_with(), mtp=False))
    without = tiny_with(num_nextn_predict_layers=0)
    assert not any(path.startswith("mtp.") for path in specs.leaves(without))


def test_shape_in_an_unknown_letter_names_it():
    with pytest.raises(KeyError, match="Q"):
        specs.evaluate_shape(("2*Q",), tiny_with().dims)


def test_accounting_imports_no_jax():
    modules = "glm5_jax.specs, glm5_jax.checkpoint.audit, glm5_jax.checkpoint.bind"
    code = f"import sys, {modules}; print(*(m for m in ('jax', 'flax') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == []
