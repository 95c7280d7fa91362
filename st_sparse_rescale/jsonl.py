"""Read and write JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path, on_error: Callable[[str], None] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""Read one JSON object a line, blank lines aside.

    Lines end at ``\n`` only: texts may hold other separators (U+2028), which ``str.splitlines`` would cut at.

    Args:
        path: A UTF-8 file.
        on_error: Told what is wrong with a line, which is then skipped; by default the error is raised.

    Yields:
        The line's number, from 1 on, and its object.

    Raises:
        ValueError: If a line is no JSON object; the message names the line.
        OSError: If the file cannot be read.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _object(line)
            except ValueError as error:
                if on_error is None:
                    raise ValueError(f"line {number}: {error}") from error
                on_error(f"line {number}: {error}")
            else:
                yield number, row


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    r"""Write one JSON object a line, in UTF-8, each line ended by ``\n``.

    Args:
        path: The file; one that is there is replaced.
        rows: The objects.

    Returns:
        How many there were.
    """
    count = 0
    with open(path, "w", encoding="utf-8", newline="\n") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error}).") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"found {type(row).__name__}, but each line must be a JSON object "
            'such as {"query": "...", "positive": "..."}.'
        )
    return row
