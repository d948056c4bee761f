"""What is on the disk when the machine stops, and not only in the system's cache."""

from __future__ import annotations

import os
from pathlib import Path


def flush(directory: Path) -> None:
    """Have all files and directories below a directory on the disk, and itself."""
    for parent, _, files in os.walk(directory):
        for file in files:
            flush_entry(Path(parent, file))
        flush_entry(Path(parent))


def flush_entry(path: Path) -> None:
    """Have one file on the disk, or the names in one directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
