"""The command line: what it prints, what it exits with, and one line for bad input."""

import json
import sys

import numpy as np
import pytest

from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.cli import main
from glm5_jax.config import load_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("cli") / "tiny", shards=2)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["glm5-jax", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capsys.readouterr()
        return exit.value.code or 0, out, err

    return run


def assert_one_line(status, err, *named):
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in named:
        assert str(word) in err


def test_audit_exits_0_when_complete_and_1_when_a_layer_is_missing(run, tiny, tmp_path):
    status, out, _ = run("audit", tiny)
    assert status == 0 and out.splitlines()[-1] == "complete"

    longer = json.loads((tiny / "config.json").read_text())
    longer["text_config"] |= {
        "num_hidden_layers": 6,
        "layer_types": [*longer["text_config"]["layer_types"], "linear_attention"],
        "mlp_layer_types": [*longer["text_config"]["mlp_layer_types"], "sparse"],
        "indexer_types": [*longer["text_config"]["indexer_types"], "full"],
        "num_nextn_predict_layers": 0,
    }
    del longer["text_config"]["linear_attn_config"]["kda_layers"]
    other = tmp_path / "longer"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(longer))
    for file in tiny.glob("*.safetensors*"):
        (other / file.name).symlink_to(file)
    status, out, _ = run("audit", other)
    assert status == 1 and "layers.5." in out


def test_a_config_that_says_quantised_over_plain_tensors_is_noted(run, tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text())
    other = tmp_path / "claims"
    other.mkdir()
    for file in tiny.glob("*.safetensors*"):
        (other / file.name).symlink_to(file)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (other / "config.json").write_text(json.dumps(config))
    status, out, _ = run("audit", other)
    assert status == 0 and "note: config.json says quantised (fp8)" in out


def test_version_is_printed(run):
    import glm5_jax

    assert run("--version")[1].strip() == glm5_jax.__version__


def test_audit_json_is_the_report(run, tiny):
    status, out, _ = run("audit", tiny, "--json")
    report = json.loads(out)
    assert status == 0 and report["complete"] and report["missing"] == []


def test_audit_of_some_layers_needs_only_those(run, tiny):
    assert run("audit", tiny, "--layers", "0-3,5")[0] == 0
    assert_one_line(*(run("audit", tiny, "--layers", "0-x")[i] for i in (0, 2)), "0-x")


def test_convert_refuses_an_existing_destination_and_force_replaces_it(
    run, tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a relative destination is fine
    status, out, _ = run("convert", tiny, "orbax")
    assert status == 0 and "172 leaves" in out
    status, _, err = run("convert", tiny, "orbax")
    assert_one_line(status, err, "orbax", "--force")
    assert run("convert", tiny, "orbax", "--force", "--no-mtp")[0] == 0
    assert run("verify", "orbax")[0] == 0
    assert run("verify", "orbax", "--quick")[0] == 0
    (tmp_path / "orbax" / "config.json").write_text("{}")
    status, out, _ = run("verify", "orbax")
    assert status == 1 and "config.json" in out


def test_export_gives_back_what_was_converted(run, tiny, tmp_path):
    assert run("convert", tiny, tmp_path / "orbax")[0] == 0
    status, out, _ = run("export", tmp_path / "orbax", tmp_path / "back", "--shard-size", "500KB")
    assert status == 0 and "444 tensors in 4 files" in out
    status, out, _ = run("export", tmp_path / "orbax", tmp_path / "native", "--naming", "native")
    assert status == 0 and "naming native" in out
    assert run("audit", tmp_path / "back")[0] == run("audit", tmp_path / "native")[0] == 0
    status, _, err = run("export", tmp_path / "orbax", tmp_path / "back")
    assert_one_line(status, err, "back", "exists already")


def test_forward_writes_the_logits_that_the_model_gives(run, tiny, tmp_path):
    import glm5_jax as glm

    file = tmp_path / "prompts.txt"
    file.write_text("5 6 7 8\n\n9,10\n")
    out = tmp_path / "logits.npz"
    status, _, _ = run("forward", tiny, "--tokens-file", file, "--out", out)
    assert status == 0
    saved = np.load(out)
    np.testing.assert_array_equal(saved["tokens"], [[5, 6, 7, 8], [0, 0, 9, 10]])
    np.testing.assert_array_equal(saved["mask"], [[1, 1, 1, 1], [0, 0, 1, 1]])
    logits = glm.load(tiny)(saved["tokens"], saved["mask"])
    np.testing.assert_array_equal(saved["logits"], logits)

    status, text, _ = run("forward", tiny, "--tokens-file", file, "--top", 2)
    lines = text.splitlines()
    assert status == 0 and len(lines) == 6
    assert f"→ {np.argmax(saved['logits'][1, 3])} (" in lines[-1]


def test_forward_reads_an_array_of_tokens(run, tiny, tmp_path):
    np.save(tmp_path / "t.npy", np.array([[1, 2], [3, 4]]))
    assert len(run("forward", tiny, "--tokens-file", tmp_path / "t.npy")[1].splitlines()) == 4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two layers of the tiny model and its MTP layer: less to compile for generation."""
    raw = json.loads(packaged_config("tiny").read_text())
    del raw["text_config"]["linear_attn_config"]["kda_layers"]
    del raw["text_config"]["linear_attn_config"]["full_attn_layers"]
    raw["text_config"] |= {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
    }
    return make_tiny(tmp_path_factory.mktemp("cli") / "small", raw)


def test_generate_streams_tokens_and_says_what_it_took(run, small, tmp_path):
    import glm5_jax as glm

    expected = glm.generate(glm.load(small), [[5, 6, 7]], max_new_tokens=6)
    asked = ("--tokens", "5,6,7", "--max-new", 6)
    status, out, err = run("generate", small, *asked)
    assert status == 0 and out.endswith("\n") and list(map(int, out.split())) == expected.rows[0]
    assert err.startswith("3 prompt tokens") and "6 new ones, 5 calls" in err

    status, out, _ = run("generate", small, *asked, "--json")
    found = json.loads(out)
    assert found["tokens"] == expected.rows and found["stats"]["trunk_calls"] == 5

    ends = expected.rows[0][2:0:-1]
    stopped = " ".join(map(str, expected.rows[0][:2]))
    assert run("generate", small, *asked, "--eos", f"{ends[0]},{ends[1]}")[1].strip() == stopped
    for file in small.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert run("generate", tmp_path, *asked)[1].strip() == stopped


def test_generate_prints_several_continuations_by_row(run, small, tmp_path):
    import glm5_jax as glm

    file = tmp_path / "prompts.txt"
    file.write_text("5 6 7\n9\n")
    status, out, _ = run("generate", small, "--tokens-file", file, "--max-new", 5, "--eos", "")
    rows = glm.generate(glm.load(small), [[5, 6, 7], [9]], max_new_tokens=5, eos=()).rows
    assert status == 0 and out.splitlines() == [
        " ".join(map(str, [f"[{i}]", *row])) for i, row in enumerate(rows)
    ]


def test_generate_hands_on_what_it_is_asked(run, small, monkeypatch):
    asked = {}

    def fake(model, tokens, mask, **settings):
        asked.update(settings, head=model.mtp is not None, dtype=model.norm.dtype)
        raise FloatingPointError("row 0: after 1 tokens the logits are NaN")

    monkeypatch.setattr("glm5_jax.generation.generate", fake)
    drawn = ("--temperature", 1.5, "--top-k", 9, "--top-p", 0.9, "--seed", 3, "--draft", 2)
    how = ("--max-new", 4, "--dtype", "float32")
    status, _, err = run("generate", small, "--tokens", 1, *drawn, *how)
    assert_one_line(status, err, small, "NaN")
    del asked["on_token"]
    assert asked == {
        "max_new_tokens": 4,
        "temperature": 1.5,
        "top_k": 9,
        "top_p": 0.9,
        "seed": 3,
        "eos": (211, 215),
        "draft_tokens": 2,
        "head": True,
        "dtype": np.float32,
    }


def test_budget_prints_the_released_totals(run):
    release = packaged_config("glm5_3_flash")
    status, out, _ = run("budget", release)
    assert status == 0
    for figure in ("321,323,031,390", "142,606,336", "5,013,504", "11,264", "5,643"):
        assert figure in out
    status, out, _ = run("budget", release, "--json")
    assert status == 0 and json.loads(out)


def test_make_tiny_in_transformers_names_holds_the_same_model(run, tiny, tmp_path):
    import glm5_jax as glm

    status, _, _ = run("make-tiny", tmp_path / "native", "--naming", "native")
    assert status == 0
    tokens = np.array([[3, 1, 4, 1]])
    np.testing.assert_array_equal(glm.load(tmp_path / "native")(tokens), glm.load(tiny)(tokens))
    status, _, err = run("make-tiny", tmp_path / "native")
    assert_one_line(status, err, "native")


def test_make_tiny_in_a_quantised_layout_is_audited_as_one(run, tmp_path):
    status, _, _ = run("make-tiny", tmp_path / "fp8", "--quantization", "fp8")
    assert status == 0
    status, out, _ = run("audit", tmp_path / "fp8", "--json")
    assert status == 0 and json.loads(out)["quantization"] == "fp8"
    status, _, err = run("make-tiny", tmp_path / "int4", "--quantization", "int4")
    assert_one_line(status, err, "int4", "nvfp4_modelopt")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["audit", "/nowhere"], "/nowhere"),
        (["forward", "{tiny}"], "--tokens"),
        (["forward", "{tiny}", "--tokens", "1,x"], "1,x"),
        (["forward", "{tiny}", "--tokens", "1,224"], "from 0 to 223, got 224"),
        (["forward", "{tiny}", "--tokens", "99999999999999999999"], "got 99999999999999999999"),
        (["forward", "{tiny}", "--tokens", "1", "--tokens-file", "x"], "got both"),
        (["forward", "{tiny}", "--tokens", "1", "--out", "/nowhere/x.npz"], "/nowhere"),
        (["convert", "{tiny}", "/dev/null"], "choose another"),
        (["forward", "{tiny}", "--tokens", ""], "token ids"),
        (["forward", "{tiny}", "--tokens-file", "{tiny}/none.txt"], "none.txt"),
        (["forward", "{tiny}", "--tokens", "1", "--dtype", "float16"], "float16"),
        (["convert", "{tiny}", "{tiny}/inside"], "inside"),
        (["verify", "{tiny}"], "glm5-jax convert"),
        (["export", "{tiny}", "/tmp/never-made"], "glm5-jax convert"),
        (["export", "{tiny}", "/tmp/never-made", "--shard-size", "5XB"], "5XB"),
        (["export", "{tiny}", "/tmp/never-made", "--naming", "mine"], "mine"),
        (["make-tiny", "/dev/null/tiny"], "/dev/null: "),
        (["budget", "/nowhere.json"], "/nowhere.json"),
        (["make-tiny", "/tmp/never-made", "--naming", "mine"], "mine"),
        (["bench", "nothing"], "nothing"),
        (["nothing"], "nothing"),
        (["audit"], "audit --help"),
        (["audit", "{tiny}", "--nothing"], "--nothing"),
        (["forward", "{tiny}", "--tokens", "1", "--expert-group", "x"], "--expert-group"),
        (["forward", "{tiny}", "--tokens", "1", "--out", "{tiny}/config.json"], "another kind"),
        (["generate", "{tiny}"], "--tokens"),
        (["generate", "{tiny}", "--prompt", "hello"], "tokenizer.json"),
        (["generate", "{tiny}", "--prompt", "hello", "--tokens", "1"], "got both"),
        (["generate", "{tiny}", "--tokens", "224"], "got 224"),
        (["generate", "{tiny}", "--tokens", "1", "--eos", "x"], "--eos"),
        (["generate", "{tiny}", "--tokens", "1", "--eos", "-1"], "--eos"),
        (["generate", "{tiny}", "--tokens", "1", "--temperature", "-1"], "temperature"),
        (
            ["generate", "{tiny}", "--tokens", "1", "--top-p", "0.5"],
            "top_p=0.5 needs a temperature",
        ),
        (["generate", "{tiny}", "--tokens", "1", "--dtype", "float16"], "float16"),
        (["generate", "/nowhere", "--tokens", "1"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_that_names_it(run, tiny, args, named):
    status, _, err = run(*(arg.replace("{tiny}", str(tiny)) for arg in args))
    assert_one_line(status, err, named)


def test_demo_runs_and_agrees(run, tmp_path):
    status, out, _ = run("demo", "--out", tmp_path / "demo")
    assert status == 0 and "bit-identical" in out and "complete" in out
    assert load_config(tmp_path / "demo" / "orbax") == load_config(tmp_path / "demo/safetensors")
    status, _, err = run("demo", "--out", tmp_path / "demo")
    assert_one_line(status, err, "demo")
