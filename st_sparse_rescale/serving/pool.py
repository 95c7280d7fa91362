"""A pool of processes that encode: one that ends with the command, and says so when one of its processes dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from sentence_transformers import SparseEncoder

Pool: TypeAlias = dict[Literal["input", "output", "processes"], Any]


@contextmanager
def encoding_pool(model: SparseEncoder, targets: Sequence[str]) -> Iterator[Pool]:
    """Start sentence-transformers' pool, a process a target, and stop it in the end.

    Args:
        model: The encoder; it is moved to the CPU.
        targets: The device of each process.

    Yields:
        What ``encode`` takes as ``pool``.

    Raises:
        ChildProcessError: A process died.

    Example:
        ::

            with encoding_pool(model, ["cuda:0", "cuda:1"]) as pool:
                vectors = model.encode_document(texts, pool=pool)
    """
    model.ends_with_parent = _EndsWithParent()  # type: ignore[assignment]  # travels within the model
    try:
        pool = model.start_multi_process_pool(list(targets))
    finally:
        del model.ends_with_parent
    try:
        yield pool
    except Exception as error:  # of whichever kind: what is not sent to the end fails here in many ways
        if died := [process for process in pool["processes"] if not process.is_alive()]:
            codes = ", ".join(f"{process.pid} (exit code {process.exitcode})" for process in died)
            raise ChildProcessError(
                f"A process that encoded died: {codes}. What is finished is kept: repeat the command to go on. If "
                "memory ran out, as exit code -9 suggests, take fewer processes or a smaller batch_size."
            ) from error
        raise
    finally:
        model.stop_multi_process_pool(pool)


class _EndsWithParent:
    """Ends the process that it is unpickled in once the one that pickled it, its parent, has ended.

    The pool's processes wait for work for ever. If the command is killed, nobody stops them, and they would hold the
    memory of the device that the next command needs.
    """

    def __reduce__(self) -> tuple[Callable[[int], _EndsWithParent], tuple[int]]:
        return _watching, (os.getpid(),)


def _watching(parent: int) -> _EndsWithParent:
    def watch() -> None:
        while os.getppid() == parent:  # of a process whose parent is dead it is another
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return _EndsWithParent()
