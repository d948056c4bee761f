"""Processes that work together in a directory: which this one is, who else is there.

They are on one machine or on several that share the directory's file system, and know of each other
by locks on files in it alone, and by what they write into a file while they hold it. Locks are
`flock`: the system takes them from a process that ends, however it does. NFS 4, Lustre with
``-o flock``, GPFS and the like hold them between machines; a mount that keeps them to its own
machine (``nolock``, ``localflock``) is not fit for several.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import CheckpointError


@dataclass(frozen=True)
class Process:
    """One of `count` processes, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


ALONE = Process(0, 1)
COMPANY = "company"


def parse_process(text: str) -> tuple[int, int]:
    """(index, count) from `0/4`; CheckpointError if it is nothing like it."""
    if not (found := re.fullmatch(r"([0-9]+)/([0-9]+)", text)):
        raise CheckpointError(f"process: expected INDEX/COUNT, like 0/4 to 3/4, got {text!r}")
    return int(found[1]), int(found[2])


def check_process(index: int, count: int) -> Process:
    """That process; CheckpointError if there can be no such one."""
    if not 0 <= index < count:
        raise CheckpointError(
            f"process: expected an index from 0 and below the count, got {index}/{count}"
        )
    return Process(index, count)


def distributed_process() -> Process | None:
    """The process that this one is of a `jax.distributed` run of several, None without one."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return Process(jax.process_index(), jax.process_count())


class Company:
    """The processes at work in a directory, this one among them; it is made if it is not there.

    They come and go one at a time, at a `meeting`. The file `COMPANY`, which is held then, lists
    who came since there was nobody.
    """

    def __init__(self, root: Path, process: Process):
        self.root = root
        self.process = process
        self._presence: IO[bytes] | None = None
        self._list: IO[bytes] | None = None

    def hold(self, name: str, wait: bool = False) -> IO[bytes] | None:
        """A file that no other process holds until it is closed; None if one does already.

        With `wait` that one is waited for. Raises OSError for what can't be opened, CheckpointError
        where there are several processes and no locks.
        """
        # Unbuffered, so that nothing is left over to be written when a write has failed.
        file = open(self.root / name, "a+b", buffering=0)  # noqa: SIM115 - held while it is open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            if self.process.count > 1:
                file.close()
                raise CheckpointError(
                    f"{self.root}: this file system has no locks (flock), which several processes "
                    f"need; convert with one"
                ) from None
        except BaseException:
            file.close()
            raise
        return file

    def wait_for(self, name: str) -> IO[bytes]:
        """A file that no other process holds, once that is so."""
        file = self.hold(name, wait=True)
        assert file is not None
        return file

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While no other process comes or goes; only then may one ask who is there."""
        while True:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                file = self.wait_for(COMPANY)
            except FileNotFoundError:
                continue  # deleted by the last process that left
            except OSError as error:
                reason = error.strerror or error
                raise CheckpointError(f"{self.root}: cannot be written: {reason}") from None
            if _is_at(file, self.root / COMPANY):
                break
            file.close()
        with file:
            self._list = file
            try:
                yield
            finally:
                self._list = None

    @property
    def presence(self) -> str:
        """Name of the file that this process holds while it is there."""
        return _presence_name(self.process)

    def enter(self) -> Process | None:
        """Be there from now on; or the process in whose way this one is, by its number or count."""
        presence = self.hold(self.presence)
        if presence is None:
            return self.process
        others = self.others()
        for other in others:
            if other.count != self.process.count:
                presence.close()
                return other
        assert self._list is not None
        if not others:
            self._list.truncate(0)
        self._list.write(f"{self.process}\n".encode())
        self._presence = presence
        return None

    def leave(self) -> None:
        """Be there no longer."""
        if self._presence is not None:
            self._presence.close()

    def others(self) -> list[Process]:
        """The other processes that are there."""
        others = []
        for process in self._came():
            if process != self.process:
                if held := self.hold(_presence_name(process)):
                    held.close()
                else:
                    others.append(process)
        return others

    @property
    def complete(self) -> bool:
        """Whether all processes have been there, if only to be killed."""
        return len(self._came()) == self.process.count

    def _came(self) -> set[Process]:
        assert self._list is not None
        self._list.seek(0)
        lines = re.findall(rb"^([0-9]+)/([0-9]+)\n", self._list.read(), re.MULTILINE)
        return {Process(int(index), int(count)) for index, count in lines}


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _presence_name(process: Process) -> str:
    return f"process-{process.index}-{process.count}"
