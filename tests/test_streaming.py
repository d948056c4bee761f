"""The model run from its directory: the loaded model's bits in bounded memory, or one line."""

import itertools
import json
import shutil
import sys
import threading
import time
import weakref

import jax
import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax import CheckpointError, streaming
from glm5_jax import layer as layer_file
from glm5_jax.checkpoint import restore
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.reader import Checkpoint
from glm5_jax.checkpoint.restore import LeafReader, open_leaves
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.cli import main
from glm5_jax.skeleton import Skeleton
from glm5_jax.streaming import StreamedLayer, stream_layers

LAYOUTS = {
    "released": {},
    "float32": {"dtype": "float32"},  # as transformers saves it
    "native": {"naming": "native"},
    "fp8": {"quantization": "fp8"},
    "nvfp4_modelopt": {"quantization": "nvfp4_modelopt"},
    "nvfp4_compressed_tensors": {"quantization": "nvfp4_compressed_tensors"},
}
EXPERTS, CHOSEN, HIDDEN = 16, 3, 48  # of configs/tiny.json
SHORT = np.array([[5, 6]])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Layout → a directory of it, made once; with `orbax` what it is converted to."""
    made = {}
    # A width that NVFP4 can group by 16.
    config = json.loads(packaged_config("tiny").read_text())
    config["text_config"]["moe_intermediate_size"] = 48

    def make(layout, orbax=False):
        if (layout, orbax) not in made:
            out = tmp_path_factory.mktemp("streaming") / "checkpoint"
            if orbax:
                convert(make(layout), out)
            else:
                make_tiny(out, config, **LAYOUTS[layout])
            made[layout, orbax] = out
        return made[layout, orbax]

    return make


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 224, (2, 9))


@pytest.fixture(scope="module")
def mask():
    """The second row has padding on its left, the first on its right."""
    mask = np.ones((2, 9), bool)
    mask[1, :4] = mask[0, 8:] = False
    return mask


@pytest.fixture(scope="module")
def loaded(directory, tokens, mask):
    """(Layout, dtype) → logits of the loaded model."""
    found = {}

    def logits(layout, dtype="stored"):
        if (layout, dtype) not in found:
            model = glm.load(directory(layout), dtype=dtype)
            found[layout, dtype] = np.asarray(model(tokens, mask))
        return found[layout, dtype]

    return logits


def assert_same_bits(one, other):
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype and one.shape == other.shape
    assert one.tobytes() == other.tobytes()


# ---- the same numbers


@pytest.mark.parametrize(
    "layout", [pytest.param("released", marks=pytest.mark.codegen), *list(LAYOUTS)[1:]]
)
@pytest.mark.parametrize("orbax", [False, True], ids=["safetensors", "orbax"])
def test_streamed_logits_are_those_of_the_loaded_model(
    directory, loaded, tokens, mask, layout, orbax
):
    stream = stream_layers(directory(layout, orbax), expert_group=5)
    assert_same_bits(stream(tokens, mask), loaded(layout))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["released", "fp8"])
def test_a_dtype_asked_for_gives_the_loaded_models_bits(
    directory, loaded, tokens, mask, layout, dtype
):
    stream = stream_layers(directory(layout), dtype=dtype, expert_group=5)
    assert_same_bits(stream(tokens, mask), loaded(layout, dtype))


@pytest.mark.codegen
@pytest.mark.parametrize("group", [1, 3, 32])
def test_groups_of_any_size_give_the_same_bits(directory, loaded, tokens, mask, group):
    stream = stream_layers(directory("released"), expert_group=group)
    assert_same_bits(stream(tokens, mask), loaded("released"))


@pytest.mark.codegen
def test_bench_model_streams_to_the_same_bits(tmp_path):
    path = make_tiny(tmp_path / "bench", packaged_config("bench"))
    tokens = np.random.default_rng(1).integers(0, 4096, (1, 40))
    assert_same_bits(stream_layers(path, expert_group=7)(tokens), glm.load(path)(tokens))


def test_every_trace_site_is_the_loaded_models(directory, tokens, mask):
    ours, theirs = {}, {}
    glm.load(directory("released"))(tokens, mask, record=theirs.__setitem__)
    stream_layers(directory("released"))(tokens, mask, record=ours.__setitem__)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert_same_bits(value, theirs[name])


def test_a_selection_is_shared_across_streamed_layers(tmp_path, tokens, mask):
    config = json.loads(packaged_config("tiny").read_text())
    kinds = ["deepseek_sparse_attention", "linear_attention", "deepseek_sparse_attention"]
    config["text_config"] |= {
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 0,
        "layer_types": kinds,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "indexer_types": ["full", "full", "shared"],
    }
    del config["text_config"]["linear_attn_config"]["kda_layers"]
    del config["text_config"]["linear_attn_config"]["full_attn_layers"]
    config["text_config"]["moe_intermediate_size"] = 48
    path = make_tiny(tmp_path / "shared", config)
    assert_same_bits(stream_layers(path)(tokens, mask), glm.load(path)(tokens, mask))


def test_layers_can_be_run_one_by_one(directory, loaded, tokens, mask):
    stream = stream_layers(directory("released"))
    streams, plans = stream.embed(tokens), []
    for plan, layer in stream.layers():
        streams, _ = layer(streams, mask)
        plans.append(plan)
    assert tuple(plans) == Skeleton.from_config(stream.config).layers
    assert_same_bits(stream.read_out(streams), loaded("released"))


def test_a_streamed_layers_module_is_filled_but_for_its_experts(directory):
    model = glm.load(directory("released"))
    for plan, layer in stream_layers(directory("released")).layers():
        norm = model.layers[plan.index].attn_norm[...]
        assert_same_bits(layer.module.attn_norm[...], norm)
        if plan.mlp == "moe":
            abstract = layer.module.ffn.experts.gate_proj.get_value()
            assert isinstance(abstract, jax.ShapeDtypeStruct)


# ---- one compilation


PIECES = {
    "mix": layer_file._mix.jitted,
    "dense": layer_file._feed_forward_dense.jitted,
    "route": layer_file._route.jitted,
    "experts": layer_file.expert_outputs,
    "weigh": layer_file.weigh_outputs,
    "gather": layer_file._gather.jitted,
}


def test_kinds_of_layers_are_compiled_once_and_shared_with_the_loaded_model(directory):
    tokens = np.random.default_rng(3).integers(0, 224, (1, 11))
    before = {name: piece._cache_size() for name, piece in PIECES.items()}

    def compiled():
        return {name: piece._cache_size() - before[name] for name, piece in PIECES.items()}

    stream = stream_layers(directory("released"), expert_group=5)
    stream(tokens)
    once = {"mix": 2, "dense": 1, "route": 1, "experts": 1, "weigh": 1, "gather": 1}
    assert compiled() == once
    stream(tokens[:, ::-1])
    assert compiled() == once
    # Only the stack of experts has another height there.
    glm.load(directory("released"))(tokens)
    assert compiled() == once | {"experts": 2}


# ---- what is read and held


@pytest.fixture
def reads(monkeypatch):
    """Every call of `LeafReader.read` so far: (path, rows)."""
    made = []
    original = LeafReader.read

    def read(self, path, rows=None, room=None):
        made.append((path, rows))
        return original(self, path, rows, room)

    monkeypatch.setattr(LeafReader, "read", read)
    return made


def test_only_chosen_experts_are_read_and_each_once(directory, reads, monkeypatch):
    chosen, touched = {}, []
    original, run_experts = Checkpoint.read_into, StreamedLayer._run_experts

    def read_into(self, tensor, *others, **options):
        touched.append(tensor.name)
        return original(self, tensor, *others, **options)

    def choose(self, x, routing):
        chosen[self.plan.index] = set(np.asarray(routing.experts).flat)
        return run_experts(self, x, routing)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    monkeypatch.setattr(StreamedLayer, "_run_experts", choose)
    stream_layers(directory("released"), expert_group=4)(SHORT)
    assert list(chosen) == [1, 2, 3, 4]
    for index, experts in chosen.items():
        assert CHOSEN <= len(experts) < EXPERTS
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            groups = [r for p, r in reads if p == f"layers.{index}.ffn.experts.{matrix}"]
            assert sorted(itertools.chain(*groups)) == sorted(experts)
            assert all(len(group) <= 4 for group in groups)
            prefix = f"model.language_model.layers.{index}.mlp.experts."
            read = [name for name in touched if name.startswith(prefix) and matrix in name]
            assert sorted(read) == sorted(f"{prefix}{e}.{matrix}.weight" for e in experts)


@pytest.mark.parametrize("layout", ["native", "fp8"])
@pytest.mark.parametrize("orbax", [False, True], ids=["safetensors", "orbax"])
def test_some_experts_in_any_order_are_those_of_the_whole(directory, layout, orbax):
    path, rows = "layers.2.ffn.experts.down_proj", [9, 0, 15]
    for dtype in ("stored", "float32"):
        leaves = open_leaves(directory(layout, orbax), dtype)
        whole, part = leaves.read(path), leaves.read(path, rows, room=4)
        assert whole.keys() == part.keys()
        for name, array in part.items():
            assert len(array) == 4
            assert array.ctypes.data % restore.ALIGNMENT == 0
            assert_same_bits(array[:3], whole[name][rows])


@pytest.mark.parametrize("orbax", [False, True], ids=["safetensors", "orbax"])
def test_only_the_rows_of_the_batchs_tokens_are_read_of_the_embedding(directory, orbax):
    stream = stream_layers(directory("released", orbax))
    table = open_leaves(directory("released")).read("embed_tokens")["embed_tokens"]
    streams = stream.embed([[7, 7, 223], [0, 7, 1]])
    assert stream.bytes_read == 4 * HIDDEN * 2
    assert streams.shape == (2, 3, 4, HIDDEN)
    for m in range(4):
        assert_same_bits(streams[:, :, m], table[[[7, 7, 223], [0, 7, 1]]])


@jax.jit
def slow_outputs(experts, x, chosen):
    outputs = experts.outputs(x, chosen)
    busy = jax.lax.fori_loop(0, 4000, lambda _, y: y @ y, jax.numpy.eye(50))
    return outputs + 0 * busy[0, 1].astype(outputs.dtype)


@pytest.mark.parametrize("layout", ["released", "nvfp4_modelopt"])
def test_two_layers_and_two_groups_of_experts_are_held_at_once(
    directory, tokens, monkeypatch, layout
):
    # Slower than reading, as it is at full size: what is not waited for would pile up.
    monkeypatch.setattr(streaming, "expert_outputs", slow_outputs)
    group, held, most = 3, 0, 0
    lock, original = threading.RLock(), LeafReader.read

    def count(nbytes):
        nonlocal held, most
        with lock:
            held += nbytes
            most = max(most, held)

    def read(self, *args, **options):
        time.sleep(0.01)  # time for the runtime to let go of what is done with
        found = original(self, *args, **options)
        for array in found.values():
            count(array.nbytes)
            # What owns the memory: JAX holds on to that, and not to the view of it.
            weakref.finalize(array.base, count, -array.nbytes)
        return found

    leaves = open_leaves(directory(layout))
    of_layer, of_group = [], 0
    for index in range(5):
        paths = [path for path in leaves.leaves if path.startswith(f"layers.{index}.")]
        sizes = {p: sum(a.nbytes for a in leaves.read(p).values()) for p in paths}
        experts = sum(n for p, n in sizes.items() if ".ffn.experts." in p)
        of_layer.append(sum(sizes.values()) - experts)
        of_group = max(of_group, experts * group // EXPERTS)
    monkeypatch.setattr(LeafReader, "read", read)
    stream = stream_layers(directory(layout), expert_group=group)

    def with_layers():
        nonlocal most
        streams, found = stream.embed(tokens), []
        for _, layer in stream.layers():
            most = held
            streams, _ = layer(streams, np.ones(tokens.shape, bool))
            found.append(most)
        return found

    # What is computed with may go a moment earlier or later, but not in every run.
    peaks = np.array([with_layers() for _ in range(3)])
    bounds = [sum(of_layer[i : i + 2]) + 2 * of_group * (i > 0) for i in range(5)]
    rows_of_the_embedding = tokens.size * HIDDEN * 2
    assert all(peaks.min(axis=0) <= np.add(bounds, rows_of_the_embedding))
    assert all(peaks.max(axis=0)[1:] >= bounds[1:])  # what is counted is what is held
    for _ in range(100):
        jax.block_until_ready(jax.numpy.zeros(1))  # JAX lets go of memory with its next call
        if not held:
            break
        time.sleep(0.05)
    assert not held


def test_weights_are_used_where_they_were_read(directory):
    arrays = open_leaves(directory("released")).read("lm_head")
    array = jax.device_put(arrays["lm_head"])
    assert array.unsafe_buffer_pointer() == arrays["lm_head"].ctypes.data


# ---- what goes wrong


def reading_threads():
    return [thread for thread in threading.enumerate() if "glm5-jax-reader" in thread.name]


@pytest.fixture
def copy(tmp_path, directory):
    """A copy that may be damaged, of a layout or of what it is converted to."""

    def make(orbax):
        shutil.copytree(directory("released", orbax), tmp_path / "copy")
        return tmp_path / "copy"

    return make


def test_a_missing_tensor_is_found_before_anything_is_read(copy, reads):
    path = copy(False)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 6
    for key, kind in (("layer_types", "linear_attention"), ("mlp_layer_types", "sparse")):
        config["text_config"][key] += [kind]
    config["text_config"]["indexer_types"] += ["full"]
    config["text_config"]["linear_attn_config"]["kda_layers"] += [5]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers\.5\."):
        stream_layers(path)
    assert not reads


def test_a_file_that_ends_early_stops_the_run_with_its_name(copy, tokens):
    path = copy(False)
    stream = stream_layers(path)
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*the file ends inside it"):
        stream(tokens)
    assert not reading_threads()


def test_damaged_orbax_data_stop_the_run_with_the_arrays_name(copy, tokens):
    path = copy(True)
    stream = stream_layers(path)
    for file in path.rglob("d/*"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"embed_tokens cannot be read"):
        stream(tokens)


def test_an_iteration_that_is_left_ends_its_reading(directory):
    for _ in stream_layers(directory("released")).layers():
        assert reading_threads()
        break
    assert not reading_threads()


def test_an_error_of_the_users_own_ends_the_reading(directory, tokens):
    def record(name, value):
        if name == "layers.2.ffn.router.logits":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_layers(directory("released"))(tokens, record=record)
    assert not reading_threads()


def test_a_layer_is_gone_when_the_next_is_asked_for_or_none_is(directory, tokens):
    stream = stream_layers(directory("released"))
    streams, mask = stream.embed(tokens), np.ones(tokens.shape, bool)
    layers = stream.layers()
    _, first = next(layers)
    _, second = next(layers)
    with pytest.raises(ValueError, match="layer 0 is not in memory any more"):
        first(streams, mask)
    layers.close()
    with pytest.raises(ValueError, match="layer 1 is not in memory any more"):
        second(streams, mask)


def test_a_group_without_experts_is_refused(directory):
    with pytest.raises(ValueError, match="expert_group: expected a positive number of experts"):
        stream_layers(directory("released"), expert_group=0)


def test_inputs_are_checked_as_the_loaded_model_does(directory):
    with pytest.raises(ValueError, match="expected ids from 0 to 223, got 224"):
        stream_layers(directory("released"))([[224]])


# ---- the command


@pytest.fixture
def forward(monkeypatch, capsys, directory):
    """`forward` in this process on the released layout: (exit status, stdout, stderr)."""

    def run(*args):
        argv = ["glm5-jax", "forward", str(directory("released")), "--tokens", "5,6", *args]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


def test_forward_prints_the_same_with_and_without_stream(forward):
    status, plain, _ = forward()
    assert status == 0 and plain.count("\n") == 2
    status, streamed, told = forward("--stream", "--expert-group", "4")
    assert (status, streamed) == (0, plain)
    assert "of weights read in" in told and "peak memory" in told


def test_an_expert_group_without_stream_is_refused(forward):
    status, out, told = forward("--expert-group", "4")
    assert (status, out) == (2, "") and "--stream" in told and told.count("\n") == 1
