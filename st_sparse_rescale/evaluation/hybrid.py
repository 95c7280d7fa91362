"""Dense search by faiss, and its fusion with sparse search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_sparse_rescale.evaluation.metrics import Run

RRF_K = 60


def dense_run(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    top_k: int,
    *,
    exclude_self: bool = False,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> dict[str, list[tuple[str, float]]]:
    """Rank a corpus for each query by a dense model, exactly, in a flat faiss index.

    Args:
        model: The model; its similarity is dot product or cosine.
        queries: Query texts by id.
        corpus: Document texts by id.
        top_k: Documents a query.
        exclude_self: Leave out the document whose id is the query's.
        batch_size: Texts encoded at once.
        show_progress_bar: Show progress.

    Returns:
        For each query id its (document id, score) pairs in rank order.

    Raises:
        ImportError: faiss is absent.
        ValueError: The similarity is another.

    Example:
        ::

            run = dense_run(SentenceTransformer("all-MiniLM-L6-v2"), queries, corpus, top_k=100)
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError('Dense search needs faiss: pip install "st-sparse-rescale[eval]"') from error
    similarity = model.similarity_fn_name
    if similarity not in ("dot", "cosine"):
        raise ValueError(
            f"Dense search computes dot products and cosines, but the model's similarity is {similarity!r}."
        )
    settings: dict[str, Any] = {"batch_size": batch_size, "normalize_embeddings": similarity == "cosine"}
    documents = model.encode_document(list(corpus.values()), show_progress_bar=show_progress_bar, **settings)
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(np.ascontiguousarray(documents, dtype=np.float32))
    asked = model.encode_query(list(queries.values()), show_progress_bar=False, **settings)
    depth = min(top_k + exclude_self, len(corpus))
    scores, places = index.search(np.ascontiguousarray(asked, dtype=np.float32), depth)
    ids = list(corpus)
    run = {}
    for query, row, row_scores in zip(queries, places.tolist(), scores.tolist(), strict=True):
        hits = [(ids[place], score) for place, score in zip(row, row_scores, strict=True)]
        run[query] = sorted(hits, key=lambda hit: (-hit[1], hit[0]))
        if exclude_self:
            run[query] = [hit for hit in run[query] if hit[0] != query][:top_k]
    return run


def reciprocal_rank_fusion(runs: Sequence[Run], *, k: int = RRF_K) -> dict[str, list[tuple[str, float]]]:
    """Fuse rankings: each document scores the sum of 1 / (k + rank) over the runs that hold it.

    This is the fusion of sentence-transformers' ``ReciprocalRankFusionEvaluator`` (Cormack, Clarke and Büttcher, SIGIR
    2009), and like there documents of equal score keep the order in which the runs bring them.

    Args:
        runs: Rankings of the same queries.
        k: How much the first ranks stand out: the smaller, the more.

    Returns:
        For each query id its (document id, fused score) pairs in rank order.

    Raises:
        ValueError: The runs rank different queries.

    Example:
        ::

            reciprocal_rank_fusion([{"q": [("a", 9.0), ("b", 8.0)]}, {"q": [("b", 0.7)]}])
            # {"q": [("b", 0.0325...), ("a", 0.0164...)]}
    """
    if any(run.keys() != runs[0].keys() for run in runs):
        raise ValueError("Only rankings of the same queries can be fused.")
    fused = {}
    for query in runs[0]:
        scores: dict[str, float] = {}
        for run in runs:
            for rank, (document, _) in enumerate(run[query], start=1):
                scores[document] = scores.get(document, 0.0) + 1 / (k + rank)
        fused[query] = sorted(scores.items(), key=lambda hit: -hit[1])
    return fused
