"""How much memory this process has taken."""

import sys
from pathlib import Path


def peak_memory() -> int:
    """The most bytes that this process has had resident at once, from its start to now."""
    try:
        # Not ru_maxrss where this is: a child begins with its parent's as its own peak.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
