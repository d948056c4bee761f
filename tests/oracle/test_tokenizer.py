"""The packages that read tokenizers, both of which the oracle brings."""

import json
import sys

import numpy as np
import pytest

from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.cli import main
from glm5_jax.errors import CheckpointError
from glm5_jax.generation import Generation, Stats
from glm5_jax.tokenizer import TextStream, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXTS = ["a cat sat", "Größe → 漢字 🙂", "  two  blanks ", ""]


@pytest.fixture(scope="module")
def trained():
    """Byte-level BPE with hardly a merge, so that characters are in pieces; adds a start token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=264, special_tokens=["<sop>", "<eos>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 4, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<sop> $A", special_tokens=[("<sop>", 0)]
    )
    return tokenizer


def check(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == 0 and (len(ids) > 1) == bool(text)
        assert tokenizer.decode(ids) == text
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in [*ids, 1]]
        assert "".join(pieces) + stream.rest() == text


def test_a_tokenizer_json_is_read_with_tokenizers(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    check(load_tokenizer(tmp_path))


def test_another_tokenizer_is_read_with_transformers(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    trained.model.save(str(tmp_path))
    settings = {
        "eos_token": "<eos>",
        "bos_token": "<sop>",
        "unk_token": None,
        "add_bos_token": True,
    }
    slow = transformers.GPT2Tokenizer(
        vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"), **settings
    )
    slow.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_broken_tokenizer_is_one_line_that_names_it(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model":\n{}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="AutoTokenizer") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_prompt_of_text_is_answered_in_text(trained, tmp_path, monkeypatch, capsys):
    raw = json.loads(packaged_config("tiny").read_text())
    raw["text_config"]["vocab_size"] = 264
    make_tiny(tmp_path / "tiny", raw)
    trained.save(str(tmp_path / "tiny" / "tokenizer.json"))
    answer, given = " größer 🙂", {}

    def fake(model, tokens, mask, on_token, **settings):
        given.update(tokens=tokens[mask].tolist())
        new = [*trained.encode(answer, add_special_tokens=False).ids, 1]
        if on_token is not None:
            for token in new:
                on_token(0, token)
        stats = Stats(2, len(new), len(new) - 1, (), (), 1.0, 1.0, 1.0, len(new) - 2)
        return Generation(np.array([new]), np.array([len(new)]), stats)

    def run(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["glm5-jax", "generate", str(tmp_path / "tiny"), *arguments]
        )
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    monkeypatch.setattr("glm5_jax.generation.generate", fake)
    status, out, err = run("--prompt", "the cat")
    assert (status, out) == (0, answer + "\n") and "2 prompt tokens" in err
    assert given["tokens"] == trained.encode("the cat").ids and given["tokens"][0] == 0
    found = json.loads(run("--prompt", "the cat", "--json")[1])
    assert found["text"] == [answer] and found["tokens"][0][-1] == 1

    raw["text_config"]["vocab_size"] = 224
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(raw))
    status, _, err = run("--prompt", "\N{GREEK SMALL LETTER OMEGA}")
    assert status == 2 and err.startswith("error: --prompt: expected token ids from 0 to 223")
