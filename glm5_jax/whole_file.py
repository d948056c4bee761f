"""Files that appear whole or not at all, and replace nothing but a file of their own kind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

HEAD = 2**20  # bytes at the beginning of a file, by which its kind is known
Kind = Callable[[bytes], bool]


def check_place(path: str | os.PathLike[str], kind: Kind) -> None:
    """Raise OSError, which names `path`, where no file can be put, or another would be lost.

    A file that is there is replaced if its beginning is of this `kind`; a device never is.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        problem = f"there is no directory {path.absolute().parent}"
        raise OSError(errno.ENOENT, problem, str(path))
    if not path.exists():
        return
    if not path.is_file():
        raise OSError(errno.EEXIST, "is there already, and no file", str(path))
    with path.open("rb") as stream:
        head = stream.read(HEAD)
    if head and not kind(head):
        problem = "is there already, and a file of another kind; choose another name"
        raise OSError(errno.EEXIST, problem, str(path))


@contextmanager
def whole_file(path: str | os.PathLike[str], kind: Kind) -> Iterator[BinaryIO]:
    """A stream to a file beside its place, which gets there, and onto the disk, if all went well.

    Raises OSError, which names `path`, as `check_place` does, or for what cannot be written.
    """
    path = Path(path)
    check_place(path, kind)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write_whole(path: str | os.PathLike[str], data: bytes, begins: bytes) -> Path:
    """Write a file of a kind that begins so; errors are those of `whole_file`."""
    with whole_file(path, lambda head: head.startswith(begins)) as stream:
        stream.write(data)
    return Path(path)
