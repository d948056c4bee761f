"""Text in and out, where the directory of a checkpoint knows about text. Token ids need none of it.

A `tokenizer.json` is read with the package tokenizers; other kinds of tokenizer with transformers'
`AutoTokenizer`. Neither is required, and what a directory brings is never executed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm5_jax.config import ModelConfig
from glm5_jax.errors import CheckpointError

TOKENIZER = "tokenizer.json"
# What else AutoTokenizer can begin with.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Tokenizer:
    """`encode` adds the special tokens that belong around a text, `decode` leaves them out."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: there is none, it cannot be read, or the package that reads it is missing.
    """
    directory = Path(directory)
    if (directory / TOKENIZER).is_file():
        return _from_json(directory / TOKENIZER)
    if any((directory / name).is_file() for name in OTHER_TOKENIZERS):
        return _from_transformers(directory)
    raise CheckpointError(f"{directory}: there is no {TOKENIZER} beside the weights; use token ids")


class TextStream:
    """Tokens to text as they come: a token may be a part of a character, or change a space."""

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        # Tokens from `_begin` are decoded together, those before `_shown` have been given out.
        self._begin = self._shown = 0

    def push(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._begin, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was held back, after the last token."""
        text = self._pending()
        self._begin = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = self._decode(self._tokens[self._begin : self._shown])
        return self._decode(self._tokens[self._begin :])[len(shown) :]


def end_tokens(directory: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a text: config.json's, and those of a generation_config.json beside it.

    Raises:
        CheckpointError: that file is no JSON object, or its eos_token_id no token or list of them.
    """
    file = Path(directory) / GENERATION_CONFIG
    if not file.is_file():
        return config.eos_token_ids
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: expected a JSON object: {error}") from error
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(
            f"{file}: eos_token_id must be a token or a list of tokens, got {found!r}"
        )
    return tuple(dict.fromkeys([*config.eos_token_ids, *ids]))


def _from_json(file: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise CheckpointError(
            f"{file}: needs the package tokenizers (pip install tokenizers); or use token ids"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"{file}: cannot be read: {_one_line(error)}") from error
    return Tokenizer(lambda text: tokenizer.encode(text).ids, tokenizer.decode)


def _from_transformers(directory: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{directory}: its tokenizer needs transformers (pip install transformers); "
            "or use token ids"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # of many kinds, by tokenizer
        raise CheckpointError(
            f"{directory}: AutoTokenizer cannot read its tokenizer: {_one_line(error)}"
        ) from error
    return Tokenizer(
        tokenizer.encode, lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
