"""Encode a collection once and search it, at one or several limits of active dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from sentence_transformers import SparseEncoder
from tqdm.auto import tqdm

from st_sparse_rescale.evaluation.csr import limit_active_dims, unit_rows
from st_sparse_rescale.evaluation.encoding import encode_texts
from st_sparse_rescale.evaluation.top_k import IdOrder, TopK

# Documents encoded, searched and forgotten at a time.
SEARCH_CHUNK = 4_096


@dataclass(frozen=True)
class Retrieval:
    """What one model found, with at most so many active dimensions a vector."""

    limit: int | None
    run: dict[str, list[tuple[str, float]]]
    """For each query id its (document id, score) pairs in rank order."""
    query_active_dims: float
    corpus_active_dims: float
    flops: float
    """Expected number of multiplications a query and document: sum over terms of the two shares of active vectors."""


def retrieve(
    model: SparseEncoder,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    top_k: int,
    *,
    limits: Sequence[int | None] = (None,),
    exclude_self: bool = False,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> list[Retrieval]:
    """Rank a corpus for each query.

    Every text is encoded once, whatever the number of limits. Documents are encoded and searched chunk by chunk, so
    that memory holds one chunk of vectors and the best ``top_k`` of each query. Documents of score 0 fill up the
    rankings, by id, as a score matrix would have them.

    Args:
        model: The model; its similarity is dot product or cosine.
        queries: Query texts by id.
        corpus: Document texts by id.
        top_k: Documents a query.
        limits: Limits of active dimensions on both sides; ``None`` keeps what the model gives.
        exclude_self: Leave out the document whose id is the query's.
        batch_size: Texts encoded at once.
        show_progress_bar: Show the documents done.

    Returns:
        One retrieval for each limit, in order.

    Raises:
        ValueError: A limit or ``top_k`` is not positive, or the similarity is another.

    Example:
        ::

            full, short = retrieve(model, queries, corpus, top_k=100, limits=[None, 32])
            print(full.flops, short.flops)
    """
    scale = similarity_scale(model)
    order, ids, texts = IdOrder(list(corpus)), list(queries), list(corpus.values())
    encoded = encode_texts(model, list(queries.values()), task="query", batch_size=batch_size)
    sides = [(limit_active_dims(encoded, limit), Activity(encoded.shape[1])) for limit in limits]
    searches = [TopK(scale(cut), order, top_k, excluded=ids if exclude_self else None) for cut, _ in sides]
    with tqdm(total=len(texts), desc="Encoding", unit=" documents", disable=not show_progress_bar) as progress:
        for start in range(0, len(texts), SEARCH_CHUNK):
            chunk = texts[start : start + SEARCH_CHUNK]
            documents = encode_texts(model, chunk, batch_size=batch_size, on_encoded=progress.update)
            for limit, search, (_, activity) in zip(limits, searches, sides, strict=True):
                cut = limit_active_dims(documents, limit)
                activity.add(cut)
                search.add(scale(cut), start)
    return [
        Retrieval(
            limit,
            dict(zip(ids, search.hits(include_zeros=True), strict=True)),
            (asked := Activity(cut.shape[1], cut)).dims,
            activity.dims,
            float(asked.shares @ activity.shares),
        )
        for limit, search, (cut, activity) in zip(limits, searches, sides, strict=True)
    ]


def similarity_scale(model: SparseEncoder) -> Callable[[sparse.csr_matrix], sparse.csr_matrix]:
    """How vectors are scaled so that dot products are the model's similarity.

    Raises:
        ValueError: The similarity is neither dot product nor cosine.
    """
    similarity = model.similarity_fn_name
    if similarity == "dot":
        return lambda matrix: matrix
    if similarity == "cosine":
        return unit_rows
    raise ValueError(
        f"Sparse search computes dot products and cosines, but the model's similarity is {similarity!r}: "
        "set model.similarity_fn_name to 'dot' or 'cosine', or use sentence-transformers' own evaluator."
    )


class Activity:
    """In how many vectors each term is active.

    The product of the ``shares`` of queries and documents is the expected number of multiplications to score a pair
    (Formal et al., "SPLADE", SIGIR 2021; the quantity behind the FLOPS regulariser of Paria et al., ICLR 2020).
    """

    def __init__(self, dimension: int, matrix: sparse.csr_matrix | None = None) -> None:
        self.rows, self.counts = 0, np.zeros(dimension, dtype=np.int64)
        if matrix is not None:
            self.add(matrix)

    def add(self, matrix: sparse.csr_matrix) -> None:
        """Count the terms of further vectors."""
        self.rows += matrix.shape[0]
        self.counts += np.bincount(matrix.indices, minlength=len(self.counts))

    @property
    def shares(self) -> np.ndarray:
        """For each term the share of the vectors in which it is active."""
        return self.counts / self.rows

    @property
    def dims(self) -> float:
        """Mean number of active terms a vector."""
        return float(self.shares.sum())
