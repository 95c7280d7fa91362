"""Write a file or a folder whole, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Lend a path beside another to write to; when that ends well, it takes the other's place in one step.

    What a failed writer wrote is removed at once, since the disk may be full, and what a killed one left behind
    (``NAME.partial``) before the next one begins.

    Args:
        path: The file or folder to make or to replace.

    Yields:
        Where to write; nothing is there yet.

    Raises:
        OSError: It cannot be put into place; where the disk is full, the message names the path.

    Example:
        ::

            with written_whole("results.json") as file:
                file.write_text("{}")
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    _remove(partial)
    try:
        yield partial
    except BaseException as error:
        _remove(partial)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    if path.is_dir():  # only files can be replaced by a rename
        _remove(path)
    os.replace(partial, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
