"""The exact best documents of each query, collected chunk by chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from scipy import sparse

# A good size of the chunks: enough documents to amortise the calls, few enough for their scores to stay in the cache.
CHUNK_SIZE = 32_768
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

    def position(self, id: str) -> int:
        """Position of a document, or -1 where there is none of that id."""
        rank = bisect_left(range(len(self.ids)), id, key=lambda rank: self.ids[int(self.by_rank[rank])])
        position = int(self.by_rank[rank]) if rank < len(self.ids) else -1
        return position if position >= 0 and self.ids[position] == id else -1

    def names(self, positions: np.ndarray) -> np.ndarray:
        """Ids of the documents at the given positions, as objects."""
        unique, place = np.unique(positions, return_inverse=True)
        return np.array([self.ids[position] for position in unique.tolist()], dtype=object)[place]


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
        n_threads: Threads over the queries. Much of the work holds Python's lock: more than one only pays for chunks
            of many more documents.

    Raises:
        ValueError: ``top_k`` or ``n_threads`` is not positive, or there are more or fewer excluded ids than queries.

    Example:
        ::

            best = TopK(as_csr(queries), IdOrder(ids), top_k=10)
            for start, chunk in csr_chunks(documents, CHUNK_SIZE):
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
        n_threads: int = 1,
    ) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1:
            raise ValueError(f"top_k must be a positive integer, got {top_k!r}.")
        if n_threads < 1:
            raise ValueError(f"n_threads must be a positive integer, got {n_threads!r}.")
        if excluded is not None and len(excluded) != queries.shape[0]:
            raise ValueError(f"There are {queries.shape[0]} queries but {len(excluded)} query ids.")
        self.order, self.top_k, self.n_threads = order, int(top_k), n_threads
        self._queries = queries
        self._excluded = (
            np.full(queries.shape[0], -1) if excluded is None else np.array([*map(order.position, excluded)])
        )
        # One more than asked for, where one may have to go.
        self._kept = self.top_k + (excluded is not None)
        self._keys = np.zeros((queries.shape[0], self._kept), dtype=np.uint64)

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
        """Score a chunk given as inverted lists, (vocabulary, documents): see :func:`invert`.

        Only the lists of the queried terms are touched: the others of a memory-mapped index stay on disk.
        """
        if lists.shape[0] != self._queries.shape[1]:
            raise ValueError(
                f"The documents have {lists.shape[0]} dimensions, the queries {self._queries.shape[1]}: "
                "encode both with the same model."
            )

        def score(rows: range) -> None:
            for row in rows:
                self._score(row, lists, start)

        shares = [range(first, len(self._keys), self.n_threads) for first in range(self.n_threads)]
        if self.n_threads == 1:
            score(shares[0])
        else:
            with ThreadPoolExecutor(self.n_threads) as pool:
                list(pool.map(score, shares))

    def result(self, *, include_zeros: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Give what was found so far.

        Args:
            include_zeros: Fill up to ``top_k`` with the documents of score 0, by id, as a score matrix would.

        Returns:
            Scores (queries, top_k), float32, in rank order, and positions (queries, top_k), int64. Where a query has
            fewer documents, its row ends in scores of 0 and positions of -1.
        """
        keys = self._keys.copy()
        for row in np.flatnonzero(self._excluded >= 0):
            keys[row, (keys[row] & _LOW) == _LOW - self.order.ranks[self._excluded[row]]] = 0
        keys = np.sort(keys, axis=1)[:, ::-1][:, : self.top_k]
        scores = (keys >> _HIGH_SHIFT).astype(np.uint32).view(np.float32)
        positions = np.full(keys.shape, -1, dtype=np.int64)
        found = keys > 0
        positions[found] = self.order.by_rank[_LOW - (keys[found] & _LOW)]
        if include_zeros:
            counts = found.sum(axis=1)
            for row in np.flatnonzero(counts < self.top_k):
                taken = np.append(positions[row, : counts[row]], self._excluded[row])
                first = self.order.by_rank[: self.top_k + 1].astype(np.int64)
                rest = first[~np.isin(first, taken)][: self.top_k - counts[row]]
                positions[row, counts[row] : counts[row] + len(rest)] = rest
        return scores, positions

    def hits(self, *, include_zeros: bool = False) -> list[list[tuple[str, float]]]:
        """Give what was found so far by id: for each query its (id, score) pairs in rank order."""
        scores, positions = self.result(include_zeros=include_zeros)
        found = positions >= 0
        counts, names = found.sum(axis=1).tolist(), self.order.names(positions[found])
        ends = np.cumsum(counts).tolist()
        return [
            list(zip(names[end - count : end].tolist(), row[:count].tolist(), strict=True))
            for row, count, end in zip(scores, counts, ends, strict=True)
        ]

    def _score(self, row: int, lists: sparse.csr_matrix, start: int) -> None:
        """Score a chunk for one query, and merge its best into the query's keys."""
        own = slice(*self._queries.indptr[row : row + 2])
        scores = lists[self._queries.indices[own]].T @ self._queries.data[own]
        # What is below the worst that is kept so far, or below this chunk's own best, need not be looked at; of what is
        # equal to it, the keys say what stays.
        floor = (self._keys[row].min() >> _HIGH_SHIFT).astype(np.uint32).view(np.float32)
        if not floor and len(scores) > self._kept:
            floor = np.partition(scores, -self._kept)[-self._kept]
        places = np.flatnonzero(scores >= floor if floor else scores)
        high = scores[places].view(np.uint32).astype(np.uint64) << _HIGH_SHIFT
        keys = np.append(self._keys[row], high | (_LOW - self.order.ranks[start + places]))
        self._keys[row] = np.partition(keys, -self._kept)[-self._kept :]


def invert(documents: sparse.csr_matrix) -> sparse.csr_matrix:
    """Turn (documents, vocabulary) into inverted lists, (vocabulary, documents)."""
    return documents.T.tocsr()
