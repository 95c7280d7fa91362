"""A corpus to encode: documents of a file, a folder or a dataset, read one after another as often as needed."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from st_sparse_rescale.evaluation.checksum import texts_crc32
from st_sparse_rescale.evaluation.encoding import Task
from st_sparse_rescale.rows import DataError, Row, read_rows

ID_NAMES = ("_id", "id", "docid", "doc_id", "pid", "qid")
TEXT_NAMES = ("text", "contents", "content", "document", "passage", "query")


class Document(NamedTuple):
    """One text to encode."""

    id: str
    text: str
    parent: str | None = None
    """The document of which this is a chunk, where a column says so."""


@dataclass(frozen=True)
class Survey:
    """What a first reading of a corpus tells."""

    documents: int
    shards: tuple[int, ...]
    """CRC-32 of the ids and texts of each shard."""

    @property
    def crc32(self) -> int:
        """CRC-32 of the whole."""
        return texts_crc32(map(str, self.shards))


@dataclass(frozen=True)
class Corpus:
    """Documents that are read from where they lie, never held.

    Args:
        source: A ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` file, a folder in BEIR's layout, a dataset of the hub
            as ``owner/name[:config[:split]]``, or texts by id.
        id_column: Column of the ids; by default ``_id``, ``id``, ``docid``... whichever is there.
        text_column: Column of the texts; by default ``text``, ``contents``, ``document``...
        title_column: Column of a title to put in front of the text; by default ``title``, where a row has one.
        parent_column: Column with the id of the document that a chunk belongs to.

    Example:
        ::

            for document in Corpus("scifact"):
                print(document.id, document.text)
    """

    source: str | Path | Mapping[str, str]
    id_column: str | None = None
    text_column: str | None = None
    title_column: str | None = None
    parent_column: str | None = None

    def of(self, task: Task) -> Corpus:
        """What is to be encoded as ``document`` or as ``query``: a folder in BEIR's layout holds both."""
        if task == "document" or isinstance(self.source, Mapping) or not Path(self.source).is_dir():
            return self
        return replace(self, source=Path(self.source) / "queries.jsonl")

    @property
    def name(self) -> str:
        """How messages call it."""
        return "corpus" if isinstance(self.source, Mapping) else str(self.source)

    def __iter__(self) -> Iterator[Document]:
        return (document for _, document in self._placed())

    def survey(self, shard_size: int) -> Survey:
        """Read all of it once: count the documents, take their checksums and see that no id stands twice.

        Memory holds 8 bytes a document.

        Args:
            shard_size: Documents a shard.

        Raises:
            DataError: A document is malformed, an id stands twice, or there are no documents.
            OSError: The source cannot be read.
        """
        hashes, shards, documents = array("Q"), [], iter(self)
        while shard := list(islice(documents, shard_size)):
            hashes.extend(_hash(document.id) for document in shard)
            shards.append(crc32_of(shard))
        if not shards:
            raise DataError(f"{self.name}: there are no documents to encode.")
        ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64))
        twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        if twice:
            self._refuse_doubles(twice)
        return Survey(len(hashes), tuple(shards))

    def _refuse_doubles(self, hashes: set[int]) -> None:
        """Name an id that stands twice; two ids may also share a hash by chance."""
        seen: dict[str, str] = {}
        for place, document in self._placed():
            if _hash(document.id) in hashes:
                if document.id in seen:
                    raise DataError(
                        f"{self.name}, {place}: the id {document.id!r} stands twice, before at {seen[document.id]}. "
                        "Each document needs an id of its own."
                    )
                seen[document.id] = place

    def _placed(self) -> Iterator[tuple[str, Document]]:
        """Documents and their places, as the reader of an error message would look them up."""
        if isinstance(self.source, Mapping):
            rows: Iterator[tuple[str, Row]] = (
                (f"key {id!r}", {"_id": id, "text": text}) for id, text in self.source.items()
            )
        else:
            rows = read_rows(self._file())
        columns: _Columns | None = None
        try:
            for place, row in rows:
                columns = columns or _Columns(self, list(row))
                yield place, columns.document(row, place)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read ({error.strerror or error}).") from error
        except ValueError as error:
            raise DataError(f"{self.name}: {error}") from error

    def _file(self) -> str | Path:
        """The file or name to read; of a folder in BEIR's layout, the file of its documents."""
        assert not isinstance(self.source, Mapping)
        folder = Path(self.source)
        if not folder.is_dir():
            return self.source
        if not (folder / "corpus.jsonl").exists():
            raise DataError(f"{folder} is a folder without corpus.jsonl: give a file, or a folder in BEIR's layout.")
        return folder / "corpus.jsonl"


class ShardReader:
    """Reads the documents of one shard of a corpus after another; going forward it reads the corpus once.

    Args:
        corpus: The corpus.
        shard_size: Documents a shard.
    """

    def __init__(self, corpus: Corpus, shard_size: int) -> None:
        self.corpus, self.shard_size = corpus, shard_size
        self._documents, self._next = iter(corpus), 0

    def read(self, number: int) -> list[Document]:
        """Read the documents of a shard, counted from 0."""
        if number < self._next:
            self._documents, self._next = iter(self.corpus), 0
        deque(islice(self._documents, (number - self._next) * self.shard_size), maxlen=0)
        self._next = number + 1
        return list(islice(self._documents, self.shard_size))


def crc32_of(documents: list[Document]) -> int:
    """CRC-32 of the ids and texts of documents."""
    return texts_crc32(part for document in documents for part in document if part is not None)


class _Columns:
    """Which column plays which role, settled once from the names of the first row."""

    def __init__(self, corpus: Corpus, found: list[str]) -> None:
        self.found = found
        self.parent = self._given(corpus.parent_column)
        self.id = self._given(corpus.id_column) or self._first(ID_NAMES, "id")
        self.text = self._given(corpus.text_column) or self._first(TEXT_NAMES, "text")
        self.title = self._given(corpus.title_column) or "title"  # rows of JSON need not all have one

    def document(self, row: Row, place: str) -> Document:
        title = encodable(str(row.get(self.title) or ""), self.title, place)
        text = f"{title} {self._text(row, self.text, place)}".strip()
        parent = None if self.parent is None else self._id(row, self.parent, place)
        return Document(self._id(row, self.id, place), text, parent)

    def _given(self, name: str | None) -> str | None:
        if name is not None and name not in self.found:
            raise DataError(f"there is no column {name!r}; the columns are {self.found}.")
        return name

    def _first(self, names: tuple[str, ...], role: str) -> str:
        name = next((name for name in names if name in self.found and name != self.parent), None)
        if name is None:
            raise DataError(
                f"none of the columns {self.found} is called {' or '.join(names)}: say which holds the {role} "
                f"(--{role}-column)."
            )
        return name

    @staticmethod
    def _id(row: Row, column: str, place: str) -> str:
        value: Any = row.get(column)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value:
            raise DataError(f"{place}: {column!r} must be an id, a text or a whole number, but is {value!r:.40}.")
        return encodable(value, column, place)

    @staticmethod
    def _text(row: Row, column: str, place: str) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise DataError(f"{place}: {column!r} must be text, but is {value!r:.40}. Fill it in or drop the row.")
        return encodable(value, column, place)


def encodable(text: str, column: str, place: str) -> str:
    """Give a text back, unless it holds half a surrogate pair, which JSON can hold but no tokenizer and no UTF-8.

    Raises:
        DataError: It does; the message names the place.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: {column!r} holds {text[error.start]!r} at position {error.start}, half a surrogate pair "
                "that is no text. Mend the row or drop it."
            ) from error
    return text


def _hash(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")
