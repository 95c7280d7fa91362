"""The texts that a head is measured on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from st_sparse_rescale.rows import read_rows

SHIPPED = files("st_sparse_rescale.calibration") / "texts.txt"
IDENTIFIERS = ("id", "_id")

Item = TypeVar("Item")


def shipped_texts() -> list[str]:
    """Short texts in many languages, queries and passages, written for this purpose."""
    return SHIPPED.read_text(encoding="utf-8").strip().split("\n")


def read_texts(path: str | Path) -> list[str]:
    """Read texts from a file.

    Args:
        path: A ``.txt`` file with one text a line; or a ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` file, such as a
            training file or the corpus of a collection, of which all columns that hold text are read, ids aside.

    Returns:
        The texts, without blank ones.

    Raises:
        ValueError: If the file is of another kind, malformed, or holds no text.
        OSError: If it cannot be read.
    """
    path = Path(path)
    if path.suffix.lower() == ".txt":
        found = path.read_text(encoding="utf-8-sig").split("\n")
    else:
        try:
            found = [
                value
                for _, row in read_rows(path)
                for column, value in row.items()
                if isinstance(value, str) and column not in IDENTIFIERS
            ]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    texts = [text.strip() for text in found if text.strip()]
    if not texts:
        raise ValueError(f"{path} holds no texts.")
    return texts


def sample(items: Sequence[Item], count: int) -> list[Item]:
    """Draw items without repetition, the same in every call, in their order.

    Args:
        items: What to draw from.
        count: How many, at most.

    Returns:
        All of them, if they are not more.
    """
    if len(items) <= count:
        return list(items)
    return [items[i] for i in sorted(random.Random(0).sample(range(len(items)), count))]
