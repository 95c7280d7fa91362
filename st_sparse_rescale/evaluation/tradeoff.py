"""Effectiveness against efficiency: one encoding, evaluated at several limits of active dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

from st_sparse_rescale.evaluation.metrics import depth, mean, measure
from st_sparse_rescale.evaluation.retrieval import retrieve


def trace_tradeoff(
    model: SparseEncoder,
    evaluator: SparseInformationRetrievalEvaluator,
    limits: Sequence[int | None],
    batch_size: int = 32,
) -> list[dict[str, float]]:
    """Evaluate a model with at most so many active dimensions a vector, on both sides, from one encoding.

    Texts are encoded once and searched exactly, a chunk of documents at a time.

    Args:
        model: The model.
        evaluator: Holds the queries, the documents, the judgements and the cut-offs.
        limits: Limits of active dimensions; ``None`` keeps every dimension.
        batch_size: Texts encoded at a time.

    Returns:
        For each limit, in order: the metrics of the evaluator (``ndcg@10``, ``mrr@10``, ...), ``query_active_dims``,
        ``corpus_active_dims`` and ``flops``.

    Raises:
        ValueError: A limit is not positive.

    Example:
        ::

            curve = trace_tradeoff(model, evaluator, limits=[32, 128, None])
            print([(point["flops"], point["ndcg@10"]) for point in curve])
    """
    queries = dict(zip(evaluator.queries_ids, map(str, evaluator.queries), strict=True))
    corpus = dict(zip(evaluator.corpus_ids, map(str, evaluator.corpus), strict=True))
    qrels = {query: dict.fromkeys(evaluator.relevant_docs[query], 1) for query in queries}
    cut_offs = {
        "accuracy": evaluator.accuracy_at_k,
        "precision": evaluator.precision_recall_at_k,
        "recall": evaluator.precision_recall_at_k,
        "ndcg": evaluator.ndcg_at_k,
        "mrr": evaluator.mrr_at_k,
        "map": evaluator.map_at_k,
    }
    metrics = [f"{name}@{k}" for name, ks in cut_offs.items() for k in ks]
    found = retrieve(model, queries, corpus, depth(metrics), limits=limits, batch_size=batch_size)
    return [
        {
            **{metric: mean(scores) for metric, scores in measure(point.run, qrels, metrics).items()},
            "query_active_dims": point.query_active_dims,
            "corpus_active_dims": point.corpus_active_dims,
            "flops": point.flops,
        }
        for point in found
    ]


def mean_flops(queries: torch.Tensor, documents: torch.Tensor) -> float:
    """Expected number of multiplications to score a query against a document.

    The sum over terms of the share of queries times the share of documents in which the term is active (Formal et
    al., "SPLADE", SIGIR 2021; the quantity behind the FLOPS regulariser of Paria et al., ICLR 2020).

    Args:
        queries: (queries, vocabulary), sparse or dense.
        documents: (documents, vocabulary), sparse or dense.

    Returns:
        The expected number of multiplications.

    Example:
        ::

            mean_flops(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 1.0]]))  # 1 * 1 + 0.5 * 1 = 1.5
    """
    return float(_activity(queries) @ _activity(documents))


def rank(scores: torch.Tensor, ids: Sequence[str], top_k: int) -> list[Any]:
    """Order the documents of each query by score, equal scores by id, and keep the first ``top_k``."""
    # Documents in the order of their ids, then a stable sort: ties keep that order.
    by_id = sorted(range(len(ids)), key=lambda i: ids[i])
    values, places = scores[:, by_id].sort(dim=1, descending=True, stable=True)
    return [
        [{"corpus_id": ids[by_id[place]], "score": value} for place, value in zip(row, row_values, strict=True)]
        for row, row_values in zip(places[:, :top_k].tolist(), values[:, :top_k].tolist(), strict=True)
    ]


def flat_metrics(metrics: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Turn ``{"ndcg@k": {10: 0.4}}`` into ``{"ndcg@10": 0.4}``."""
    return {name.replace("@k", f"@{k}"): float(v) for name, by_k in metrics.items() for k, v in by_k.items()}


def _activity(embeddings: torch.Tensor) -> torch.Tensor:
    """Share of the rows in which each column is active: (vocabulary,)."""
    return (embeddings.to_dense() != 0).double().mean(dim=0)
