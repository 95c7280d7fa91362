"""The exact best documents of each query, collected chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from scipy import sparse
from sparse_dot_topn import sp_matmul_topn

# Bounds what the product of one chunk holds: this many rows of ``top_k`` scores.
QUERY_BATCH = 1024
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)


class IdOrder:
    """The documents in the order of their ids, which is how ties are broken.

    Args:
        ids: Unique ids.

    Raises:
        ValueError: An id stands twice.

    Example:
        ::

            IdOrder(["b", "a", "c"]).ranks  # [1, 0, 2]
    """

    def __init__(self, ids: Sequence[str]) -> None:
        names = list(ids)
        order = sorted(range(len(names)), key=names.__getitem__)
        for first, second in pairwise(order):
            if names[first] == names[second]:
                raise ValueError(
                    f"Document ids must be unique, but {names[first]!r} stands at positions {first} and {second}."
                )
        self.ids = ids
        self.by_rank = np.array(order, dtype=np.uint32)
        """Position of each document, in the order of the ids."""
        self.ranks = np.empty_like(self.by_rank)
        """Place of each document in the order of the ids."""
        self.ranks[self.by_rank] = np.arange(len(order), dtype=np.uint32)


class TopK:
    """The running best documents of each query: highest score first, equal scores by document id.

    The result is exact and depends neither on the order nor on the size of the chunks. Only ``top_k`` keys of 8 bytes
    a query are kept. A key is the score's bits, which order like the number since scores are positive, followed by the
    reversed rank of the id: one integer comparison settles both score and tie.

    Args:
        queries: (queries, vocabulary), as :func:`~st_sparse_rescale.evaluation.csr.as_csr` gives it.
        order: The ids of all documents.
        top_k: Documents a query.
        excluded: For each query the id of a document to leave out.
        n_threads: Threads of the sparse product; torch's number by default.

    Raises:
        ValueError: ``top_k`` is not a positive integer, or there is another number of excluded ids than of queries.

    Example:
        ::

            best = TopK(as_csr(queries), IdOrder(ids), top_k=10)
            for start, chunk in csr_chunks(documents, 50_000):
                best.add(chunk, start)
            best.hits()  # [[("d7", 14.2), ...], ...]
    """

    def __init__(
        self,
        queries: sparse.csr_matrix,
        order: IdOrder,
        top_k: int,
        *,
        excluded: Sequence[str] | None = None,
        n_threads: int | None = None,
    ) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1:
            raise ValueError(f"top_k must be a positive integer, got {top_k!r}.")
        if excluded is not None and len(excluded) != queries.shape[0]:
            raise ValueError(f"There are {queries.shape[0]} queries but {len(excluded)} query ids.")
        self.dimension, self.order, self.top_k, self.excluded = queries.shape[1], order, int(top_k), excluded
        self.n_threads = n_threads or torch.get_num_threads()
        # One more than asked for, where one may have to go.
        self._kept = self.top_k + (excluded is not None)
        self._keys = np.zeros((queries.shape[0], 0), dtype=np.uint64)
        # Only the lists of the queried terms are ever touched: the others may stay on disk.
        self._terms = np.unique(queries.indices)
        self._queries = queries[:, self._terms]

    def add(self, documents: sparse.csr_matrix, start: int) -> None:
        """Score a chunk of documents and keep the best.

        Args:
            documents: (documents, vocabulary).
            start: Position of the first of them among all documents.

        Raises:
            ValueError: Another vocabulary than that of the queries.
        """
        self.add_inverted(invert(documents), start)

    def add_inverted(self, lists: sparse.csr_matrix, start: int) -> None:
        """Score a chunk given as inverted lists, (vocabulary, documents): see :func:`invert`."""
        if lists.shape[0] != self.dimension:
            raise ValueError(
                f"The documents have {lists.shape[0]} dimensions, the queries {self.dimension}: "
                "encode both with the same model."
            )
        lists = lists[self._terms]
        if not lists.nnz:
            return
        batches = range(0, self._queries.shape[0], QUERY_BATCH)
        best = [self._best(self._queries[b : b + QUERY_BATCH], lists, start) for b in batches]
        self._keys = _largest(np.hstack([self._keys, np.vstack(best)]), self._kept)

    def hits(self, *, include_zeros: bool = False) -> list[list[tuple[str, float]]]:
        """Give what was found so far.

        Args:
            include_zeros: Fill up to ``top_k`` with the documents of score 0, by id, as a score matrix would.

        Returns:
            For each query its (id, score) pairs in rank order.
        """
        keys = np.sort(self._keys, axis=1)[:, ::-1]
        found = keys != 0
        scores = (keys >> _HIGH_SHIFT).astype(np.uint32).view(np.float32)
        positions, place = np.unique(self.order.by_rank[_LOW - (keys[found] & _LOW)], return_inverse=True)
        names = np.array([self.order.ids[position] for position in positions.tolist()], dtype=object)[place]
        rows, end = [], 0
        for number, count in enumerate(found.sum(axis=1).tolist()):
            row_names, end = names[end : end + count], end + count
            row = list(zip(row_names.tolist(), scores[number, :count].tolist(), strict=True))
            own = self.excluded[number] if self.excluded is not None else None
            row = [hit for hit in row if hit[0] != own] if own is not None else row
            if include_zeros and len(row) < self.top_k:
                row += self._zeros(row, self.top_k - len(row), own)
            rows.append(row[: self.top_k])
        return rows

    def _zeros(self, row: list[tuple[str, float]], count: int, own: str | None) -> list[tuple[str, float]]:
        taken = {id for id, _ in row} | {own}
        first = self.order.by_rank[: count + len(taken)].tolist()
        names = (self.order.ids[position] for position in first)
        return [(name, 0.0) for name in names if name not in taken][:count]

    def _best(self, queries: sparse.csr_matrix, lists: sparse.csr_matrix, start: int) -> np.ndarray:
        """Keys of at least the best documents of a chunk, (queries, kept + 1), zeros for none."""
        # One more than needed: if the last two scores are equal, which documents came through at that score was
        # arbitrary, and the row is done again with all documents that reach it.
        product = self._product(queries, lists, self._kept + 1, above=0.0)
        lengths = np.diff(product.indptr)
        keys = np.zeros((len(lengths), self._kept + 1), dtype=np.uint64)
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        keys[row_of, np.arange(product.nnz) - product.indptr[row_of]] = self._to_keys(product, start)
        scores = keys >> _HIGH_SHIFT
        lowest = scores.min(axis=1, keepdims=True)
        tied = (lowest[:, 0] > 0) & ((scores == lowest).sum(axis=1) > 1)
        for row in np.flatnonzero(tied):
            score = lowest[row].astype(np.uint32).view(np.float32)[0]
            below = float(np.nextafter(score, np.float32(0)))
            candidates = self._to_keys(self._product(queries[row], lists, lists.shape[1], above=below), start)
            keys[row, 0] = 0
            keys[row, 1:] = _largest(candidates, self._kept)
        return keys

    def _product(self, a: sparse.csr_matrix, b: sparse.csr_matrix, top_n: int, above: float) -> sparse.csr_matrix:
        if not a.nnz:  # the library's shortcut returns a matrix with a stored zero
            return sparse.csr_matrix((a.shape[0], b.shape[1]), dtype=np.float32)
        return sp_matmul_topn(a, b, top_n=top_n, threshold=above, n_threads=self.n_threads)

    def _to_keys(self, product: sparse.csr_matrix, start: int) -> np.ndarray:
        high = np.ascontiguousarray(product.data).view(np.uint32).astype(np.uint64) << _HIGH_SHIFT
        return high | (_LOW - self.order.ranks[start + product.indices.astype(np.int64)])


def invert(documents: sparse.csr_matrix) -> sparse.csr_matrix:
    """Turn (documents, vocabulary) into inverted lists, (vocabulary, documents)."""
    return documents.T.tocsr()


def _largest(keys: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` largest along the last axis, in no order."""
    surplus = keys.shape[-1] - count
    return np.partition(keys, surplus, axis=-1)[..., surplus:] if surplus > 0 else keys
