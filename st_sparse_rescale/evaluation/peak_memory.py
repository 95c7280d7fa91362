"""The most memory this process has used."""

from __future__ import annotations

import sys

import psutil


def peak_memory_mib() -> float:
    """Largest resident size of this process since it began, in MiB.

    Example:
        ::

            print(f"{peak_memory_mib():,.0f} MiB")
    """
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
