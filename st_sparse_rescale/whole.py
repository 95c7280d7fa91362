"""Write a file or a folder whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Lend a path beside another to write to; when that ends well, it takes the other's place in one step.

    What a killed writer left behind (``NAME.partial``) is removed before the next one begins.

    Args:
        path: The file or folder to make or to replace.

    Yields:
        Where to write; nothing is there yet.

    Raises:
        OSError: It cannot be put into place.

    Example:
        ::

            with written_whole("results.json") as file:
                file.write_text("{}")
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    _remove(partial)
    yield partial
    if path.is_dir():  # only files can be replaced by a rename
        _remove(path)
    os.replace(partial, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
