"""Token ids in, token ids out: batches from a command line or a file, and what a person reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from glm5_jax.errors import CheckpointError
from glm5_jax.whole_file import whole_file


def read_tokens(
    text: str | None, file: Path | None, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] int32 and mask [B, T] bool; shorter sequences are padded on the left with 0.

    `text` is one sequence (`1,2,3`); `file` has one a line, or is a .npy array [T] or [B, T].

    Raises:
        CheckpointError: not exactly one of the two is given, or something in it is no token id
            below `vocab_size`.
    """
    if text is not None and file is None:
        rows = [read_ids(text, "--tokens")]
    elif file is not None and text is None:
        rows = _array_rows(file) if file.suffix == ".npy" else _line_rows(file)
    else:
        given = "neither" if text is None else "both"
        raise CheckpointError(f"expected either --tokens or --tokens-file, got {given}")
    _check_tokens(rows, str(file or "--tokens"), vocab_size)
    return left_padded(rows)


def text_tokens(ids: list[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """As `read_tokens`, of a text whose tokenizer gave `ids`."""
    _check_tokens([ids], "--prompt", vocab_size)
    return left_padded([ids])


def read_ids(line: str, where: str) -> list[int]:
    """The ids in a line, separated by commas or blanks; `where` is for the CheckpointError."""
    try:
        return [int(word) for word in line.replace(",", " ").split()]
    except ValueError as error:
        raise CheckpointError(f"{where}: expected token ids, got {line.strip()!r}") from error


def left_padded(rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] int32, padded on the left with 0, and mask [B, T] bool."""
    length = max(map(len, rows))
    tokens = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        tokens[i, length - len(row) :] = row
        mask[i, length - len(row) :] = True
    return tokens, mask


def right_padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Tokens [B, width] int32, padded on the right with 0."""
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


def top_tokens(
    logits: np.ndarray, tokens: np.ndarray, mask: np.ndarray, count: int
) -> Iterator[str]:
    """A line for each real position: row, position, token, and the likeliest tokens after it."""
    logits = np.asarray(logits, np.float64)
    for row, position in zip(*np.nonzero(mask), strict=True):
        scores = logits[row, position]
        log_total = np.logaddexp.reduce(scores)
        best = np.argsort(-scores, kind="stable")[:count]
        start = np.argmax(mask[row])
        shown = "  ".join(f"{token} ({np.exp(scores[token] - log_total):.4f})" for token in best)
        yield f"[{row}] {position - start:>5} token {tokens[row, position]:>6} → {shown}"


def write_logits(path: Path, logits: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> Path:
    """Write `logits`, `tokens` and `mask` to an .npz, whole or not at all."""
    with whole_file(path, is_npz) as stream:
        np.savez(stream, logits=np.asarray(logits), tokens=tokens, mask=mask)
    return path


def is_npz(head: bytes) -> bool:
    """Whether a file that begins so is an .npz, which is a ZIP archive."""
    return head.startswith(b"PK")


def _check_tokens(rows: Sequence[Sequence[int]], source: str, vocab_size: int) -> None:
    if not rows or not all(rows):
        raise CheckpointError(f"{source}: expected token ids, got none")
    for token in (token for row in rows for token in row):
        if not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{source}: expected token ids from 0 to {vocab_size - 1}, got {token}"
            )


def _line_rows(file: Path) -> list[list[int]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: expected token ids, got binary data") from error
    return [read_ids(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def _array_rows(file: Path) -> list[list[int]]:
    try:
        array = np.load(file, allow_pickle=False)
    except ValueError as error:
        raise CheckpointError(f"{file}: expected a .npy array of token ids: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise CheckpointError(
            f"{file}: expected integers [T] or [B, T], got {array.dtype} {list(array.shape)}"
        )
    return np.atleast_2d(array).tolist()
