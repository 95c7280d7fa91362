"""The most memory this process has used."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def peak_memory_mib() -> float:
    """Largest resident size of this process since it began, in MiB.

    Example:
        ::

            print(f"{peak_memory_mib():,.0f} MiB")
    """
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage would hand down the peak of the parent
        return (
            next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10
        )
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
