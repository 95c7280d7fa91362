"""Write a JSON Lines file in parts, so that a killed writer goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from st_sparse_rescale.changes import changes
from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.whole import written_whole

Item = TypeVar("Item")


def write_in_parts(
    path: str | Path,
    items: Sequence[Item],
    rows_of: Callable[[Sequence[Item]], Iterable[Mapping[str, Any]]],
    *,
    record: Mapping[str, Any],
    part_size: int = 1_024,
    description: str = "Writing",
    show_progress_bar: bool = True,
) -> int:
    """Write the rows that are made of items, a part at a time.

    Finished parts lie in ``NAME.parts`` beside the file, each written whole or not at all, and the same call again
    makes only those that are missing. Once all are there the file appears in one step, and the folder goes.

    Args:
        path: The file to write; it must not be there yet.
        items: What the rows are made of.
        rows_of: Makes the rows of some consecutive items.
        record: All that the rows depend on, in the types of JSON: parts are only continued by a call with the same.
        part_size: Items a part: what a kill can lose.
        description: What the progress bar says.
        show_progress_bar: Show the items done.

    Returns:
        The number of rows in the file.

    Raises:
        FileExistsError: The file is there already.
        ValueError: The parts beside it were made with another record.

    Example:
        ::

            write_in_parts("squares.jsonl", range(10), lambda part: ({"x": x, "y": x * x} for x in part), record={})
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already: choose another file (--output), or delete it.")
    folder = path.with_name(path.name + ".parts")
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder / "record.json", {**record, "part_size": part_size})
    files = []
    with tqdm(total=len(items), desc=description, disable=not show_progress_bar) as progress:
        for start in range(0, len(items), part_size):
            part = items[start : start + part_size]
            file = folder / f"{start}.jsonl"
            if not file.exists():
                with written_whole(file) as partial:
                    write_jsonl(partial, rows_of(part))
            files.append(file)
            progress.update(len(part))
    with written_whole(path) as partial:
        count = _join(files, partial)
    shutil.rmtree(folder)
    return count


def _claim(file: Path, record: Mapping[str, Any]) -> None:
    """Begin the parts of a record, or see that those which are there are of the same one."""
    now = json.loads(json.dumps(record))  # as JSON, which knows no tuples
    if not file.exists():
        with written_whole(file) as partial:
            partial.write_text(json.dumps(now), encoding="utf-8")
    elif now != (known := json.loads(file.read_text(encoding="utf-8"))):
        raise ValueError(
            f"{file.parent} holds the parts of another call ({changes(known, now)}): delete it, or choose another "
            "output."
        )


def _join(files: Iterable[Path], target: Path) -> int:
    count = 0
    with open(target, "wb") as out:
        for file in files:
            with open(file, "rb") as lines:
                for line in lines:
                    out.write(line)
                    count += 1
    return count
