"""The results of a sweep: one line a run, written whole, in a file that a killed sweep goes on with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append_result(path: str | Path, result: dict[str, Any]) -> None:
    """Add a line, and make sure that it is on the disk.

    What a writer that was killed left of a line is removed first.

    Args:
        path: A JSON Lines file; it is made if need be.
        result: What to write.
    """
    line = json.dumps(result, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    with open(path, "a+b") as file:
        file.truncate(_length_of_whole_lines(Path(path)))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """Read the whole lines of a file of results.

    Args:
        path: A JSON Lines file; where there is none, there are no results.

    Returns:
        The results, in order.

    Raises:
        ValueError: A line is not JSON.
    """
    path = Path(path)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes()[: _length_of_whole_lines(path)].split(b"\n") if line]


def _length_of_whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
