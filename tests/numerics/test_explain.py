"""What `explain` does with two traces; tests/oracle has it name every mistake of the catalogue.

Here the other engine is ours with other weights, which some mistakes amount to.
"""

import hashlib
import json
import sys

import numpy as np
import pytest

from glm5_jax import TextModel
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.cli import main
from glm5_jax.errors import TraceError
from glm5_jax.numerics.explain import Explanation, Trial, explain
from glm5_jax.numerics.explain_parts import parts_of
from glm5_jax.numerics.trace import Trace
from glm5_jax.numerics.tracing import trace
from glm5_jax.streaming import stream_layers

TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "num_nextn_predict_layers": 0,
}
ROUTER = "layers.1.ffn.router"


def words(found):
    """What is printed of it, without the lines that the terminal's width makes of it."""
    return " ".join(str(found).split())


class Engine:
    """A checkpoint of two layers, our model of it, and models of it with other weights."""

    def __init__(self, directory):
        raw = json.loads(packaged_config("tiny").read_text())
        raw["text_config"] |= TWO_LAYERS
        del raw["text_config"]["first_k_dense_replace"]
        config = directory / "config.json"
        config.write_text(json.dumps(raw))
        self.directory = make_tiny(directory / "tiny", config, dtype="float32")
        self.config, self.leaves = load_leaves(self.directory, dtype="float32")
        self.tokens = np.arange(2 * 13).reshape(2, 13) % self.config.vocab_size
        self.mask = np.arange(13) >= np.array([[0], [3]])
        self.model = self.with_leaves()
        self.right = self.trace(self.model)

    def with_leaves(self, **changed):
        changed = {path.replace("__", "."): change for path, change in changed.items()}
        leaves = {k: changed.get(k, np.array)(np.array(v)) for k, v in self.leaves.items()}
        return TextModel.from_leaves(self.config, leaves)

    def trace(self, model, **options):
        return trace(model, self.tokens, self.mask, **options)

    def other(self, keep="*", **changed):
        return self.trace(self.with_leaves(**changed), keep=keep)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(tmp_path_factory.mktemp("explain"))


def test_every_site_is_given_by_one_part(engine):
    given = [site for part in parts_of(engine.model) for site in part.gives]
    assert len(given) == len(set(given))
    assert set(given) == set(engine.right.sites) - {"layers.1.in"}


def test_a_mistake_is_named_and_nothing_compiled_with_it_stays(engine):
    other = engine.other(layers__1__ffn__router__bias=np.zeros_like)
    found = explain(engine.model, engine.right, other)
    assert found.named == ("correction_bias_ignored",)
    assert found.divergence == f"{ROUTER}.scores" and found.part == ROUTER
    assert "makes the mistake correction_bias_ignored" in words(found)
    again = engine.trace(engine.model)
    for name in engine.right:
        np.testing.assert_array_equal(again[name], engine.right[name], err_msg=name)


def test_what_was_not_traced_is_computed_from_what_was(engine):
    keep = ["layers.1.attn.expand", "layers.1.ffn.router.[es]*", "layers.1.ffn.moe"]
    other = engine.other(keep, layers__1__ffn__router__bias=np.zeros_like)
    found = explain(engine.model, engine.right, other)
    assert found.named == ("correction_bias_ignored",)
    assert "comb_not_transposed" not in [trial.name for trial in found.trials]
    assert "norm_weight_plus_one" in [trial.name for trial in found.trials]


def test_a_fault_that_no_mistake_makes_is_given_no_name(engine):
    other = engine.other(layers__1__ffn__router__weight=lambda w: 1.01 * w)
    found = explain(engine.model, engine.right, other)
    assert found.part == ROUTER and not found.named and not found.ok
    assert found.trials[0].misfit > 1
    assert "None of the" in words(found)


def test_what_came_in_from_before_is_followed_back(engine):
    other = engine.other(layers__1__ffn__router__bias=np.zeros_like)
    found = explain(engine.model, engine.right, other, site="layers.1.ffn.expand")
    assert found.part == ROUTER
    assert found.named == ("correction_bias_ignored",)


def test_mistakes_that_the_inputs_do_not_tell_apart_are_all_named():
    trials = [Trial("a", "", 0.1), Trial("b", "", 0.9), Trial("c", "", 1.1)]
    found = Explanation("site", "part", {"site": 40.0}, tuple(trials))
    assert found.named == ("a", "b")
    assert "one of the mistakes a, b" in words(found)


def test_mistake_that_explains_little_is_not_named():
    found = Explanation("site", "part", {"site": 1.1}, (Trial("a", "", 0.9),))
    assert not found.named


def test_streamed_model_has_the_same_parts(engine):
    streamed = stream_layers(engine.directory, dtype="float32")
    found = explain(streamed, engine.right, engine.right, site="final.head")
    parts = len(parts_of(engine.model))
    assert found.ok and found.divergence is None
    assert (found.parts_checked, found.parts) == (parts, parts)
    assert set(found.checked) == set(engine.right.sites) - {"layers.1.in"}
    assert f"{parts} of {parts} parts" in words(found)
    assert "The traces part" not in words(found) and "not traced" not in words(found)


def test_what_could_be_checked_is_said(engine):
    other = engine.other("layers.0.attn.q")
    found = explain(engine.model, engine.right, other, site="final.head")
    assert found.ok and found.checked == ("layers.0.attn.q",)
    text = words(found)
    assert f"3 of {len(parts_of(engine.model))} parts of the model" in text
    assert "(checked at layers.0.attn.q). The rest was not traced." in text
    with pytest.raises(TraceError, match=r"no numbers of layers\.0\.attn\.norm or of what comes"):
        explain(engine.model, engine.right, other, site="layers.0.attn.norm")


def test_trace_that_is_not_of_the_model_is_refused(engine):
    change = {"layers__1__ffn__router__weight": lambda w: 1.5 * w}
    wrong, other = engine.other(**change), engine.other(layers__1__ffn__router__weight=np.negative)
    for second in (engine.right, other):
        with pytest.raises(TraceError, match=r"not of this model.*another checkpoint.*order") as e:
            explain(engine.model, wrong, second)
        assert ROUTER in str(e.value) and "\n" not in str(e.value)
    # Rounded weights do not make another model.
    rounded = engine.trace(stream_layers(engine.directory, "bfloat16"))
    assert explain(engine.model, rounded, other, site=f"{ROUTER}.logits").part == ROUTER
    # Nothing is held against a trace from which the part in question cannot be run.
    for lacking in (engine.other(f"{ROUTER}.*", **change), wrong.reduced()):
        assert explain(engine.model, lacking, other, site=f"{ROUTER}.scores").part == ROUTER


def test_only_what_comes_nearer_is_shown(engine):
    trials = [Trial("half", "", 20.0), Trial("idle", "", 40.0)]
    found = Explanation("site", "part", {"site": 40.0}, tuple(trials))
    assert "the nearest, half" in words(found) and "idle" not in words(found)
    found = Explanation("site", "part", {"site": 40.0}, tuple(trials[1:]))
    assert "nor does one come" in words(found) and "idle" not in words(found)


def test_numbers_that_are_none_are_followed_to_where_they_arise(engine):
    other = engine.other(layers__1__ffn__router__weight=lambda w: w * np.float32(np.nan))
    for site in (None, "final.head"):
        found = explain(engine.model, engine.right, other, site=site)
        assert found.part == ROUTER and not found.ok and not found.named
        assert "apart beyond measure" in words(found) and "∞" not in words(found)


def test_model_can_be_a_directory(engine):
    assert explain(engine.directory, engine.right, engine.right, site="embedding").ok


def test_equal_traces_have_nothing_to_explain(engine):
    found = explain(engine.model, engine.right, engine.right)
    assert found.ok and not found.named
    assert str(found) == "Nothing to explain: all that differs is rounding."


def test_what_cannot_be_explained_says_why(engine):
    def with_meta(**meta):
        return Trace({}, engine.right.tokens, engine.right.mask, engine.right.meta | meta)

    with pytest.raises(TraceError, match="full arrays, got stats"):
        explain(engine.model, engine.right, with_meta(reduce="stats"))
    with pytest.raises(TraceError, match="no site of this model is called 'attn'"):
        explain(engine.model, engine.right, engine.right, site="attn")
    raw = json.loads(engine.right.meta["config"])
    raw["mlp_layer_types"] = ["sparse", "sparse"]
    config = json.dumps(raw)
    sha256 = hashlib.sha256(config.encode()).hexdigest()
    with pytest.raises(TraceError, match="of another model"):
        explain(engine.model, engine.right, with_meta(config=config, config_sha256=sha256))


def test_command_explains_two_files(engine, tmp_path, monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["glm5-jax", "explain", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    ours = engine.right.save(tmp_path / "ours.safetensors")
    other = engine.other(layers__1__ffn__router__bias=np.zeros_like)
    theirs = other.save(tmp_path / "theirs.safetensors")
    assert run(engine.directory, ours, ours)[0] == 0
    assert run(engine.directory, ours, ours, "--site", "final.head")[0] == 0
    assert run(engine.directory, ours, theirs, "--site", "final.head")[0] == 1
    status, _, err = run(engine.directory, theirs, ours)
    assert status == 2 and err.count("\n") == 1 and "in the other order?" in err
    status, out, _ = run(engine.directory, ours, theirs, "--json")
    found = json.loads(out)
    assert status == 1 and found["named"] == ["correction_bias_ignored"]
    assert found["trials"][0]["misfit"] <= 1 < found["misfits"][f"{ROUTER}.scores"]
    status, out, _ = run(engine.directory, ours, theirs)
    assert status == 1 and "correction_bias_ignored" in out
    status, _, err = run(engine.directory, ours, ours, "--site", "nowhere")
    assert status == 2 and err.count("\n") == 1 and "nowhere" in err
