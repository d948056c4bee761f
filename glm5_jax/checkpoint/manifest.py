"""`files.jsonl`: every file of a converted directory with its size, and the hash of the small ones.

The arrays' bytes are hashed leaf by leaf in the ledger. This list covers what no leaf does: Orbax's
own metadata, config.json and the ledger, which are always hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

MANIFEST = "files.jsonl"
HASHED_UP_TO = 16 * 2**20


def write_manifest(directory: Path) -> None:
    """List the files under a directory in its `files.jsonl`."""
    lines = []
    for name in _files(directory):
        size = os.path.getsize(directory / name)
        digest = _digest(directory / name) if "/" not in name or size <= HASHED_UP_TO else None
        lines.append(json.dumps({"file": name, "size": size, "sha256": digest}) + "\n")
    with open(directory / MANIFEST, "w", encoding="utf-8") as file:
        file.writelines(lines)


def check_manifest(
    directory: Path, quick: bool = False, only: Collection[str] | None = None
) -> Iterator[str]:
    """One line for each file that is missing, unlisted, of another size, or altered.

    With `quick` nothing is hashed, with `only` these files alone are looked at. Files beside
    Orbax's own are the user's to add.
    """
    listed = {}
    try:
        for text in (directory / MANIFEST).read_bytes().splitlines(keepends=True):
            entry = json.loads(text)
            name, size, digest = entry["file"], entry["size"], entry["sha256"]
            if name in listed or not name.isprintable() or not text.endswith(b"\n"):
                raise ValueError
            if type(size) is not int or not isinstance(digest, str | None):
                raise ValueError
            listed[name] = (size, digest)
    except OSError as error:
        yield f"{MANIFEST}: cannot be read: {error.strerror or error}"
        return
    except (AttributeError, KeyError, TypeError, ValueError):
        yield f"{MANIFEST}: line {len(listed) + 1} is damaged"
        return
    present = set(_files(directory))
    if only is not None:
        present &= set(only)
        yield from (f"{name}: not in {MANIFEST}" for name in only if name not in listed)
        listed = {name: listed[name] for name in only if name in listed}
    for name, (size, digest) in listed.items():
        if name not in present:
            yield f"{name}: the file is missing"
        elif (now := os.path.getsize(directory / name)) != size:
            yield f"{name}: has {now} bytes, {size} were written"
        elif not quick and digest is not None and _digest(directory / name) != digest:
            yield f"{name}: its bytes are not those that were written"
    for name in sorted(present - listed.keys()):
        if "/" in name:
            yield f"{name}: not a file that the conversion wrote"


def _files(directory: Path) -> list[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    names = (path.relative_to(directory).as_posix() for path in found)
    return sorted(name for name in names if name != MANIFEST)


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
