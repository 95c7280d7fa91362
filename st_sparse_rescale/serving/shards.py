"""Encoded texts as sharded Parquet files: each written whole or not at all, read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

from st_sparse_rescale.evaluation.checksum import file_crc32
from st_sparse_rescale.evaluation.csr import as_csr
from st_sparse_rescale.evaluation.index_files import IndexFileError, Kind, ShardRecord, read_manifest
from st_sparse_rescale.evaluation.sparse_index import SparseIndex
from st_sparse_rescale.serving.vocabulary import Vocabulary
from st_sparse_rescale.whole import written_whole

ENCODED = Kind("st-sparse-rescale/encoded", "a folder of encoded texts", "encode the texts again")
VOCABULARY = "vocabulary.json"
# Rows of a row group: what a reader holds at a time.
BATCH_ROWS = 1_024


class Batch(NamedTuple):
    """Consecutive encoded texts."""

    ids: list[str]
    vectors: sparse.csr_matrix
    """(texts, vocabulary), terms in order, positive weights only."""
    parents: list[str] | None = None
    """The documents of which the texts are chunks, where the corpus said so."""


class Shards:
    """Encoded texts on disk.

    Args:
        folder: Where :func:`~st_sparse_rescale.serving.encode_corpus` wrote them.
        verify: Compare the checksums, which reads every file once.

    Raises:
        IndexFileError: The folder holds something else, is not finished, or a file is missing or damaged.

    Example:
        ::

            shards = Shards("encoded")
            for batch in shards:
                print(batch.ids[0], batch.vectors[0].nnz)
            shards.index().search(model.encode_query(["sparse retrieval"]))
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        self._manifest = read_manifest(self.folder, ENCODED)
        if not self._manifest.complete or self._manifest.dimension is None:
            raise IndexFileError(f"{folder} is unfinished: repeat the command that encodes it to finish it.")
        self.dimension = self._manifest.dimension
        """Size of the vocabulary."""
        try:
            self.vocabulary = Vocabulary.read(self.folder / VOCABULARY)
        except (OSError, ValueError) as error:
            raise IndexFileError(f"{self.folder / VOCABULARY} cannot be read ({error}): {ENCODED.again}.") from error
        if self.vocabulary.crc32() != self.settings.get("vocabulary_crc32"):
            raise IndexFileError(
                f"{self.folder / VOCABULARY} is not the one that the texts were encoded with: repeat the command that "
                "encodes them, which writes it anew."
            )
        for record in self._manifest.shards:
            check_file(self.folder, record, verify=verify)

    @property
    def settings(self) -> dict[str, Any]:
        """The model, its k and all else that the texts were encoded with."""
        return self._manifest.built_with

    def __len__(self) -> int:
        return sum(record.documents for record in self._manifest.shards)

    def __iter__(self) -> Iterator[Batch]:
        for record in self._manifest.shards:
            yield from read_file(self.folder / record.file, self.dimension)

    def index(self) -> SparseIndex:
        """Index the texts in memory, for exact search: 8 bytes a weight."""
        return SparseIndex.from_batches((batch.vectors, batch.ids) for batch in self)


def check_file(folder: Path, record: ShardRecord, *, verify: bool) -> None:
    """See that a shard's file is there and as it was written.

    Raises:
        IndexFileError: It is missing or damaged.
    """
    file = folder / record.file
    mend = "delete it and repeat the command that encodes the texts, or restore it"
    if not file.exists():
        raise IndexFileError(f"{file} is missing: repeat the command that encodes the texts, or restore it.")
    if verify and file_crc32(file) != record.crc32:
        raise IndexFileError(f"{file} is damaged (its checksum differs from the manifest's): {mend}.")


def file_name(number: int) -> str:
    """Name of a shard's file."""
    return f"shard-{number:05d}.parquet"


def write_file(file: Path, batch: Batch, texts_crc32: int) -> ShardRecord:
    """Write a shard's file in one step and return its record."""
    vectors = batch.vectors
    columns = {
        "id": pa.array(batch.ids, type=pa.string()),
        "indices": pa.ListArray.from_arrays(vectors.indptr, pa.array(vectors.indices)),
        "values": pa.ListArray.from_arrays(vectors.indptr, pa.array(vectors.data)),
    }
    if batch.parents is not None:
        columns["parent"] = pa.array(batch.parents, type=pa.string())
    table = pa.table(columns).replace_schema_metadata({"format": ENCODED.format, "vocabulary": str(vectors.shape[1])})
    with written_whole(file) as partial:
        pq.write_table(table, partial, row_group_size=BATCH_ROWS)
    return ShardRecord(file.name, len(batch.ids), file_crc32(file), texts_crc32)


def read_file(file: Path, dimension: int) -> Iterator[Batch]:
    """Read a shard's file in batches.

    Raises:
        IndexFileError: It cannot be read, or holds what no encoder gives.
    """
    try:
        with pq.ParquetFile(file) as shard:
            for rows in shard.iter_batches(batch_size=BATCH_ROWS):
                parents = rows.column("parent").to_pylist() if "parent" in rows.schema.names else None
                yield Batch(rows.column("id").to_pylist(), _vectors(rows, dimension), parents)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise IndexFileError(f"{file} is damaged ({error}): {ENCODED.again}.") from error


def _vectors(rows: pa.RecordBatch, dimension: int) -> sparse.csr_matrix:
    terms = rows.column("indices")
    indices, values = terms.flatten().to_numpy(), rows.column("values").flatten().to_numpy()
    if len(indices) and not 0 <= indices.min() <= indices.max() < dimension:
        raise ValueError(f"a term is not in the vocabulary of {dimension}")
    indptr = np.concatenate([[0], np.cumsum(terms.value_lengths().to_numpy())])
    return as_csr(sparse.csr_matrix((values, indices, indptr), shape=(rows.num_rows, dimension)))
