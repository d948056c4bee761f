"""The packages that read tokenizers, both of which the oracle brings."""

import pytest

from glm5_jax.errors import CheckpointError
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
