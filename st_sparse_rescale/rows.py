"""Rows of files and of hub datasets, each with its place."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from st_sparse_rescale.jsonl import read_jsonl

FILE_TYPES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

Row = Mapping[str, Any]


class DataError(ValueError):
    """Data that cannot be used; the message names the place, the reason and the mend."""


def read_rows(source: str | Path | Dataset) -> Iterator[tuple[str, Row]]:
    """Read rows one after another.

    Args:
        source: A ``.jsonl``, ``.json`` (lines), ``.csv``, ``.tsv`` or ``.parquet`` file, a dataset, or a hub name:
            ``owner/name``, ``owner/name:config`` or ``owner/name:config:split`` (split: ``train`` unless given).

    Yields:
        Each row's place, as the reader of an error message would look it up, and the row by column.

    Raises:
        DataError: The file is of another kind or malformed, or the hub delivers nothing.
        ValueError: A line of JSON is malformed.
        OSError: The file cannot be read.

    Example:
        ::

            for place, row in read_rows("corpus.csv"):
                print(place, row["text"])  # line 2 ...
    """
    if isinstance(source, Dataset):
        yield from _numbered(source)
        return
    path = Path(source)
    kind = path.suffix.lower()
    if kind not in FILE_TYPES:
        if path.exists():
            raise DataError(f"the file must be one of {', '.join(FILE_TYPES)}.")
        yield from _numbered(_from_hub(str(source)))
    elif kind in (".jsonl", ".json"):
        for number, row in read_jsonl(path):
            yield f"line {number}", row
    elif kind == ".parquet":
        yield from _numbered(_parquet_rows(path))
    else:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, delimiter="\t" if kind == ".tsv" else ",", strict=True)
            try:
                names = reader.fieldnames or ()
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise DataError(f"line 1 names the columns {twice} more than once; give each a name of its own.")
                for row in reader:
                    if None in row:
                        raise DataError(f"line {reader.line_num} has more fields than the header; quote its texts.")
                    yield f"line {reader.line_num}", row
            except csv.Error as error:
                raise DataError(f"line {reader.line_num}: {error}") from error


def _numbered(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable Parquet file ({error})") from error


def _from_hub(name: str) -> Dataset:
    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        return load_dataset(repository, config or None, split=split or "train")
    except Exception as error:  # the hub client raises many kinds; each means that there is no data
        raise DataError(
            f"neither an existing file ({', '.join(FILE_TYPES)}) nor a dataset that the hub can deliver, written "
            f"owner/name[:config[:split]] ({error})."
        ) from error
