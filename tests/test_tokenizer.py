"""What a checkpoint directory says about text, and what text becomes in a stream of tokens."""

import json
import sys

import pytest

from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import load_config
from glm5_jax.errors import CheckpointError
from glm5_jax.tokenizer import TextStream, Tokenizer, end_tokens, load_tokenizer


def bytes_of(text):
    return list(text.encode())


def text_of(tokens):
    return bytes(tokens).decode(errors="replace")


BYTES = Tokenizer(bytes_of, text_of)
"""A token is a byte, so a character is often more than one."""


def words_of(tokens):
    """As tokenizers that mark the beginning of a word: the first of a text loses its blank."""
    return "".join(f" {'abcdefgh'[token]}" for token in tokens).lstrip()


@pytest.mark.parametrize("text", ["plain", "Größe → 漢字 🙂!", "\N{REPLACEMENT CHARACTER}x", ""])
def test_a_stream_gives_whole_characters_as_soon_as_it_can(text):
    stream = TextStream(BYTES)
    pieces = [stream.push(token) for token in bytes_of(text)]
    assert "".join(pieces) + stream.rest() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert [piece for piece in pieces if piece] == list(text)


def test_what_is_no_character_comes_at_the_end():
    stream = TextStream(BYTES)
    pieces = [stream.push(token) for token in "ab→".encode()[:-1]]
    assert pieces == ["a", "b", "", ""]
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}" and stream.rest() == ""


def test_a_stream_keeps_the_blanks_between_words():
    stream = TextStream(Tokenizer(bytes_of, words_of))
    assert [stream.push(token) for token in (0, 1, 2)] == ["a", " b", " c"]


def test_a_directory_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json .* use token ids") as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("file", "package"),
    [("tokenizer.json", "tokenizers"), ("vocab.json", "transformers")],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, file, package):
    (tmp_path / file).write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=f"pip install {package}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("beside", "ids"),
    [
        (None, (211, 215)),
        ({}, (211, 215)),
        ({"eos_token_id": 215}, (211, 215)),
        ({"eos_token_id": [3, 211, 5]}, (211, 215, 3, 5)),
    ],
)
def test_a_generation_config_adds_tokens_that_end_a_text(tmp_path, beside, ids):
    if beside is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    assert end_tokens(tmp_path, load_config(packaged_config("tiny"))) == ids


@pytest.mark.parametrize(
    "beside", ["[1]", "{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}']
)
def test_a_generation_config_that_cannot_be_read_is_named(tmp_path, beside):
    (tmp_path / "generation_config.json").write_text(beside)
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as error:
        end_tokens(tmp_path, load_config(packaged_config("tiny")))
    assert "\n" not in str(error.value)
