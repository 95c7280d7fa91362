"""Exact search over sparse embeddings, in memory or memory-mapped from disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy.sparse import csr_matrix, vstack

from st_sparse_rescale.evaluation.csr import Embeddings, as_csr, csr_chunks, shape_of
from st_sparse_rescale.evaluation.index_build import build_shards
from st_sparse_rescale.evaluation.index_files import (
    MANIFEST,
    Ids,
    IndexFileError,
    Manifest,
    Shard,
    read_manifest,
    read_shard,
    write_manifest,
    write_shard,
)
from st_sparse_rescale.evaluation.top_k import CHUNK_SIZE, IdOrder, TopK, invert

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder


class SparseIndex:
    """Documents as inverted lists, searched exactly by dot product.

    The ranking is that of the full score matrix: highest score first, equal scores in the order of the document ids,
    whatever the sizes of shards and batches. Scores are sums in float32. A document that shares no term with a query
    is not found by it, unless asked for.

    The cost is 8 bytes a stored weight: 1.2 GB for a million documents of 150 terms. An index loaded from disk is
    memory-mapped, so that the lists of the queried terms are read and no more.

    Args:
        dimension: Size of the vocabulary; ``None`` takes it from the first documents.

    Example:
        ::

            index = SparseIndex.from_embeddings(model.encode_document(texts), ids)
            index.search(model.encode_query(["what is sparse retrieval?"]), top_k=3)
            # [[("d7", 14.2), ("d2", 11.9), ("d5", 3.1)]]
    """

    def __init__(self, dimension: int | None = None) -> None:
        self.dimension = dimension
        self._shards: list[Shard] = []
        self._known_order: IdOrder | None = None

    @classmethod
    def from_embeddings(
        cls, embeddings: Embeddings, ids: Sequence[str], *, shard_size: int = CHUNK_SIZE
    ) -> SparseIndex:
        """Index embeddings in memory.

        Args:
            embeddings: (documents, vocabulary): a sparse or dense torch tensor, a numpy array or a scipy matrix.
            ids: Their unique ids.
            shard_size: Documents a shard; changes speed and memory, not results.

        Returns:
            The index.

        Raises:
            ValueError: Another number of ids than of rows, an id that stands twice, a negative or non-finite weight.
            TypeError: An id is not a text.
        """
        index = cls()
        index.add(embeddings, ids, shard_size=shard_size)
        return index

    @classmethod
    def from_batches(
        cls, batches: Iterable[tuple[Embeddings, Sequence[str]]], *, shard_size: int = CHUNK_SIZE
    ) -> SparseIndex:
        """Index embeddings that come one batch after another, in memory.

        Args:
            batches: Embeddings and their ids, as for :meth:`from_embeddings`.
            shard_size: Documents a shard, at least.

        Returns:
            The index.

        Raises:
            ValueError: As for :meth:`from_embeddings`, or the batches differ in their vocabulary.
            TypeError: An id is not a text.

        Example:
            ::

                index = SparseIndex.from_batches((batch.vectors, batch.ids) for batch in Shards("encoded"))
        """
        index = cls()
        parts: list[csr_matrix] = []
        ids: list[str] = []
        for embeddings, names in batches:
            part = as_csr(embeddings)
            if part.shape[0] != len(names):
                raise ValueError(f"There are {part.shape[0]} embeddings but {len(names)} ids.")
            parts.append(part)
            ids.extend(names)
            if len(ids) >= shard_size:
                index._append(parts, ids)
                parts, ids = [], []
        if ids:
            index._append(parts, ids)
        index._order()
        return index

    @classmethod
    def build(
        cls,
        model: SparseEncoder,
        documents: Mapping[str, str] | Iterable[tuple[str, str]],
        folder: str | Path,
        *,
        batch_size: int = 32,
        shard_size: int = 16_384,
        max_active_dims: int | None = None,
        show_progress_bar: bool = True,
        **encode_kwargs: Any,
    ) -> SparseIndex:
        """Encode documents and index them on disk, a shard at a time.

        One shard is in memory at a time. A build that was killed goes on where it was when the call is repeated; at
        most one shard's work is lost. The model, the settings and the texts are compared with those of the first call.

        Args:
            model: The encoder; documents are encoded by ``encode_document``.
            documents: Texts by id, or (id, text) pairs such as a generator that reads a file.
            folder: Where the index lies; made if absent.
            batch_size: Texts encoded at once.
            shard_size: Documents a shard: what is held in memory, and what a kill can lose.
            max_active_dims: Terms kept a document; ``None`` takes the model's own setting.
            show_progress_bar: Show the documents done.
            **encode_kwargs: Further arguments of ``encode_document``, such as ``prompt`` or ``pool``.

        Returns:
            The index, memory-mapped.

        Raises:
            IndexFileError: The folder holds something else, or an index of other texts, settings or another model.
            ValueError: An id stands twice, or there are no documents.

        Example:
            ::

                index = SparseIndex.build(model, {"d1": "sparse retrieval", "d2": "dense retrieval"}, "my-index")
        """
        manifest = build_shards(
            model,
            documents,
            Path(folder),
            batch_size=batch_size,
            shard_size=shard_size,
            max_active_dims=max_active_dims,
            show_progress_bar=show_progress_bar,
            **encode_kwargs,
        )
        index = cls._mapped(Path(folder), manifest, verify=True)  # also what an earlier call has left
        index._order()  # finds ids that stand twice before the index counts as complete
        write_manifest(Path(folder), replace(manifest, complete=True))
        return index

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> SparseIndex:
        """Map a saved index into memory.

        Args:
            folder: Where :meth:`save` or :meth:`build` wrote it.
            verify: Compare the checksums, which reads every file once; ``False`` opens at once.

        Returns:
            The index.

        Raises:
            IndexFileError: The folder is no index, a file is missing or damaged, or a build was not finished.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if not manifest.complete:
            raise IndexFileError(f"{folder} is an unfinished index: repeat the call of SparseIndex.build to finish it.")
        return cls._mapped(folder, manifest, verify)

    def save(self, folder: str | Path) -> Path:
        """Write the index.

        Args:
            folder: A new or empty folder.

        Returns:
            The folder.

        Raises:
            FileExistsError: The folder holds something already.
            ValueError: The index is empty.
        """
        if self.dimension is None:
            raise ValueError("An empty index cannot be saved: add documents first.")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: save the index to a new folder.")
        records = [write_shard(folder, number, shard) for number, shard in enumerate(self._shards)]
        write_manifest(folder, Manifest(self.dimension, complete=True, shards=records))
        return folder

    def add(self, embeddings: Embeddings, ids: Sequence[str], *, shard_size: int = CHUNK_SIZE) -> None:
        """Add documents, in memory.

        Args:
            embeddings: (documents, vocabulary), as for :meth:`from_embeddings`.
            ids: Their ids, none of which the index holds already.
            shard_size: Documents a shard.

        Raises:
            ValueError: Another number of ids than of rows, another vocabulary, an id that stands twice, a negative or
                non-finite weight. The index is then as it was.
            TypeError: An id is not a text.
        """
        count, dimension = shape_of(embeddings)
        if count != len(ids):
            raise ValueError(f"There are {count} embeddings but {len(ids)} ids.")
        if self.dimension not in (None, dimension):
            raise ValueError(f"The index has {self.dimension} dimensions, the new documents {dimension}.")
        chunks = csr_chunks(embeddings, shard_size)
        new = [Shard(invert(part), Ids.of(ids[start : start + part.shape[0]])) for start, part in chunks]
        grown = SparseIndex(dimension)
        grown._shards = self._shards + new
        self._known_order = grown._order()
        self._shards, self.dimension = grown._shards, dimension

    def search(
        self,
        queries: Embeddings,
        top_k: int = 10,
        exclude_self: bool = False,
        *,
        query_ids: Sequence[str] | None = None,
        include_zeros: bool = False,
        n_threads: int = 1,
    ) -> list[list[tuple[str, float]]]:
        """Find the best documents of each query.

        Args:
            queries: (queries, vocabulary), as for :meth:`from_embeddings`.
            top_k: Documents a query.
            exclude_self: Leave out the document whose id is the query's: see ``query_ids``.
            query_ids: Ids of the queries. Without them, ``exclude_self`` takes the queries for the indexed documents
                themselves, in the order in which they were added.
            include_zeros: Fill up to ``top_k`` with documents of score 0, by id, as a score matrix would give them.
            n_threads: Threads over the queries; more than one pays for shards of many documents.

        Returns:
            For each query its (id, score) pairs in rank order; fewer than ``top_k`` where fewer documents share a term
            with the query.

        Raises:
            ValueError: Another vocabulary, ``top_k`` not positive, or another number of query ids than of queries.
        """
        matrix = as_csr(queries)
        if self.dimension not in (None, matrix.shape[1]):
            raise ValueError(
                f"The queries have {matrix.shape[1]} dimensions, the index {self.dimension}: encode both by one model."
            )
        order = self._order()
        if exclude_self and query_ids is None and matrix.shape[0] != len(self):
            raise ValueError(
                "exclude_self takes the queries for the indexed documents, but there are "
                f"{matrix.shape[0]} queries and {len(self)} documents: give query_ids."
            )
        excluded = (list(order.ids) if query_ids is None else query_ids) if exclude_self else None
        best = TopK(matrix, order, top_k, excluded=excluded, n_threads=n_threads)
        start = 0
        for shard in self._shards:
            best.add_inverted(shard.lists, start)
            start += len(shard.ids)
        return best.hits(include_zeros=include_zeros)

    @property
    def ids(self) -> Sequence[str]:
        """The document ids in the order in which they were added."""
        return self._order().ids

    def __len__(self) -> int:
        return sum(len(shard.ids) for shard in self._shards)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} documents, {self.dimension} dimensions)"

    def _append(self, parts: list[csr_matrix], ids: Sequence[str]) -> None:
        vectors = vstack(parts, format="csr")
        self._shards.append(Shard(invert(vectors), Ids.of(ids)))
        self.dimension = vectors.shape[1]

    def _order(self) -> IdOrder:
        if self._known_order is None:
            self._known_order = IdOrder(Ids.joined([shard.ids for shard in self._shards]))
        return self._known_order

    @classmethod
    def _mapped(cls, folder: Path, manifest: Manifest, verify: bool) -> SparseIndex:
        if manifest.dimension is None:
            raise IndexFileError(f"{folder / MANIFEST} is damaged (no dimension): build the index again.")
        index = cls(manifest.dimension)
        index._shards = [read_shard(folder, record, manifest.dimension, verify) for record in manifest.shards]
        return index
