"""How shards lie on disk: a manifest beside one file a shard, each written whole or not at all.

A sparse index has safetensors files of inverted lists; encoded documents, which have manifests of the same form, are
Parquet files (see :mod:`st_sparse_rescale.serving.shards`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy import sparse

from st_sparse_rescale.changes import changes
from st_sparse_rescale.evaluation.checksum import file_crc32
from st_sparse_rescale.whole import written_whole

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Kind:
    """What a folder of shards holds."""

    format: str
    """Says so in the manifest."""
    name: str
    """Says so in messages, with its article."""
    again: str
    """How it is made anew."""


INDEX = Kind("st-sparse-rescale/sparse-index", "a sparse index", "build the index again")


class IndexFileError(ValueError):
    """A folder without the shards it should hold, or with damaged or unfinished ones; names the file and the mend."""


class Ids(Sequence[str]):
    """Document ids as one run of UTF-8 bytes, which can stay on disk.

    Args:
        text: (bytes,) of uint8.
        ends: (ids,) of int64, where each id ends.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, ids: Iterable[str]) -> Ids:
        """Pack ids.

        Raises:
            TypeError: An id is not a text.
        """
        encoded = []
        for id in ids:
            if not isinstance(id, str):
                raise TypeError(f"Document ids must be texts, got {id!r} ({type(id).__name__}): pass str(id).")
            encoded.append(id.encode())
        ends = np.fromiter(accumulate(map(len, encoded)), dtype=np.int64, count=len(encoded))
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    @classmethod
    def joined(cls, parts: Sequence[Ids]) -> Ids:
        """Join packed ids in order."""
        if not parts:
            return cls.of([])
        lengths = np.concatenate([np.diff(part.ends, prepend=0) for part in parts])
        return cls(np.concatenate([part.text for part in parts]), np.cumsum(lengths))

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        text, start = self.text.tobytes(), 0
        for end in self.ends.tolist():
            yield text[start:end].decode()
            start = end

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start = int(self.ends[position - 1]) if position else 0
        return self.text[start : int(self.ends[position])].tobytes().decode()


@dataclass(frozen=True)
class Shard:
    """Consecutive documents of an index."""

    lists: sparse.csr_matrix
    """(vocabulary, documents): for each term the documents that hold it, and their weights."""
    ids: Ids


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest knows of a shard's file."""

    file: str
    documents: int
    crc32: int
    texts_crc32: int | None = None
    """Of the ids and texts it was built from, by which a resumed build knows them again."""


@dataclass
class Manifest:
    """The table of contents of a folder of shards."""

    dimension: int | None = None
    """Size of the vocabulary; unknown before the first shard."""
    complete: bool = False
    built_with: dict[str, Any] = field(default_factory=dict)
    """Settings of the build, which a resumed build must repeat."""
    shards: list[ShardRecord] = field(default_factory=list)


def read_manifest(folder: Path, kind: Kind = INDEX) -> Manifest:
    """Read the manifest of a folder of shards.

    Raises:
        IndexFileError: There is none, or it is damaged, foreign or of a newer version.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IndexFileError(f"{folder} is not {kind.name}: it holds no {MANIFEST}.") from error
    except (ValueError, OSError) as error:
        raise IndexFileError(f"{file} cannot be read ({error}): {kind.again}.") from error
    if not isinstance(content, dict) or content.pop("format", None) != kind.format:
        raise IndexFileError(f"{file} belongs to something else: {kind.name} says format {kind.format!r}.")
    version = content.pop("version", None)
    if version != VERSION:
        raise IndexFileError(
            f"{file} has version {version}, this package reads version {VERSION}: "
            f"install the version of st-sparse-rescale that wrote it, or {kind.again}."
        )
    try:
        return Manifest(**content | {"shards": [ShardRecord(**record) for record in content["shards"]]})
    except (TypeError, KeyError) as error:
        raise IndexFileError(f"{file} is damaged ({error}): {kind.again}.") from error


def write_manifest(folder: Path, manifest: Manifest, kind: Kind = INDEX) -> None:
    """Replace the manifest in one step."""
    content = {"format": kind.format, "version": VERSION, **asdict(manifest)}
    with written_whole(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def begin_or_resume(folder: Path, settings: dict[str, Any], kind: Kind = INDEX) -> Manifest:
    """Take up the making of shards where it was left, or begin it.

    Args:
        folder: Where the shards lie; made if absent.
        settings: What they are made with, as JSON holds it.
        kind: What the folder is to hold.

    Raises:
        IndexFileError: The folder holds something else, or shards made with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if all(file.suffix == ".partial" for file in folder.iterdir()):  # new, or killed before anything was written
        write_manifest(folder, Manifest(built_with=settings), kind)
    manifest = read_manifest(folder, kind)
    if not manifest.shards:  # nothing was done yet that other settings could be mixed with
        manifest.built_with = settings
        write_manifest(folder, manifest, kind)
    known = {name: manifest.built_with.get(name) for name in settings}  # it may hold more, such as the model's name
    if differing := changes(known, settings):
        raise IndexFileError(
            f"{folder} holds {kind.name} made otherwise ({differing}): delete the folder or choose another."
        )
    return manifest


def write_shard(folder: Path, number: int, shard: Shard, texts_crc32: int | None = None) -> ShardRecord:
    """Write a shard's file in one step and return its record."""
    tensors = {
        "indptr": shard.lists.indptr,
        "documents": shard.lists.indices,
        "weights": shard.lists.data,
        "ids": shard.ids.text,
        "id_ends": shard.ids.ends,
    }
    file = folder / f"shard-{number:05d}.safetensors"
    as_torch = {name: torch.tensor(array) for name, array in tensors.items()}
    with written_whole(file) as partial:
        save_file(as_torch, partial, metadata={"format": INDEX.format})
    return ShardRecord(file.name, len(shard.ids), file_crc32(file), texts_crc32)


def read_shard(folder: Path, record: ShardRecord, dimension: int, verify: bool) -> Shard:
    """Map a shard's file into memory.

    Args:
        folder: The index's folder.
        record: The shard's record in the manifest.
        dimension: Size of the vocabulary.
        verify: Compare the checksum, which reads the whole file.

    Raises:
        IndexFileError: The file is missing or damaged.
    """
    file = folder / record.file
    mend = f"{INDEX.again}, or restore the file"
    try:
        if verify and file_crc32(file) != record.crc32:
            raise IndexFileError(f"{file} is damaged (its checksum differs from the manifest's): {mend}.")
        with safe_open(file, framework="pt") as tensors:
            part = {name: tensors.get_tensor(name).numpy() for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        ids = Ids(part["ids"], part["id_ends"])
        shape = (dimension, record.documents)
        lists = sparse.csr_matrix((part["weights"], part["documents"], part["indptr"]), shape=shape)
    except FileNotFoundError as error:
        raise IndexFileError(f"{file} is missing: {mend}.") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, IndexFileError):
            raise
        raise IndexFileError(f"{file} is damaged ({error}): {mend}.") from error
    if len(ids) != record.documents:
        raise IndexFileError(f"{file} holds {len(ids)} documents, the manifest says {record.documents}: {mend}.")
    return Shard(lists, ids)
