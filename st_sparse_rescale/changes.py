"""How the settings of a call differ from those of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name the settings that differ, with both values.

    Args:
        known: Those of the earlier call.
        now: Those of this one; a setting that either lacks counts as None.

    Returns:
        For a message; empty where nothing differs.

    Example:
        >>> changes({"seed": 1, "k": 2}, {"seed": 1, "k": 4})
        'k was 2, is 4'
    """
    differing = [name for name in {**now, **known} if now.get(name) != known.get(name)]
    return "; ".join(f"{name} was {known.get(name)!r}, is {now.get(name)!r}" for name in differing)
