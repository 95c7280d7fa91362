"""Combine the chunks of a document: the maximum weight of each term."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from scipy import sparse

from st_sparse_rescale.serving.shards import Batch


def combine_chunks(batches: Iterable[Batch], separator: str = "#") -> Iterator[Batch]:
    """Combine consecutive rows of one document into one row that holds the maximum of each term.

    That is how a document longer than the model's limit is best represented (Nguyen et al., "Adapting Learned Sparse
    Retrieval for Long Documents", SIGIR 2023). Chunks of a document must follow each other, as they do where a corpus
    was cut document by document.

    Args:
        batches: Encoded texts. A batch with parents says itself what belongs together; otherwise the number behind the
            last separator is cut off the id, as in ``doc#0``, ``doc#1``. An id without one is a whole document.
        separator: Stands between the document's id and the chunk's number.

    Raises:
        ValueError: The separator is empty.

    Yields:
        Batches in which each document is one row, called by its id.

    Example:
        ::

            both = Batch(["d#0", "d#1"], as_csr(np.array([[1.0, 0.0], [0.5, 2.0]])))
            next(combine_chunks([both]))  # ids ["d"], vectors [[1.0, 2.0]]
    """
    if not separator:
        raise ValueError("The separator between a document's id and its chunk's number is empty: give a text, as #.")
    chunk = re.compile(rf"(.+){re.escape(separator)}\d+", re.DOTALL)
    held: Batch | None = None  # the last document so far, which may go on
    for batch in batches:
        parents = batch.parents or [match[1] if (match := chunk.fullmatch(id)) else id for id in batch.ids]
        vectors = batch.vectors
        if held is not None:
            parents, vectors = held.ids + parents, sparse.vstack([held.vectors, vectors], format="csr")
        merged = _merged(parents, vectors)
        held = Batch(merged.ids[-1:], merged.vectors[-1:])
        if len(merged.ids) > 1:
            yield Batch(merged.ids[:-1], merged.vectors[:-1])
    if held is not None:
        yield held


def _merged(parents: list[str], vectors: sparse.csr_matrix) -> Batch:
    names = np.array(parents, dtype=object)
    begins = np.concatenate([[True], names[1:] != names[:-1]])
    group = np.cumsum(begins) - 1
    rows = np.repeat(group, np.diff(vectors.indptr))
    order = np.lexsort((vectors.indices, rows))
    rows, terms, weights = rows[order], vectors.indices[order], vectors.data[order]
    first = np.flatnonzero(np.concatenate([[True], (rows[1:] != rows[:-1]) | (terms[1:] != terms[:-1])])[: len(rows)])
    maxima = np.maximum.reduceat(weights, first) if len(first) else weights
    indptr = np.searchsorted(rows[first], np.arange(group[-1] + 2)).astype(np.int32)
    combined = sparse.csr_matrix((maxima, terms[first], indptr), shape=(group[-1] + 1, vectors.shape[1]))
    combined.has_canonical_format = True
    return Batch(names[begins].tolist(), combined)
