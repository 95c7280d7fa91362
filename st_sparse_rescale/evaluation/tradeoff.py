"""Effectiveness against efficiency: one encoding, evaluated at several limits of active dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.util import select_max_active_dims


def trace_tradeoff(
    model: SparseEncoder,
    evaluator: SparseInformationRetrievalEvaluator,
    limits: Sequence[int | None],
    batch_size: int = 32,
) -> list[dict[str, float]]:
    """Evaluate a model with at most so many active dimensions a vector, on both sides, from one encoding.

    All scores are held at once: (queries, documents) floats, meant for collections of some ten thousand documents.

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
    queries = model.encode_query(list(map(str, evaluator.queries)), batch_size=batch_size, save_to_cpu=True)
    documents = model.encode_document(list(map(str, evaluator.corpus)), batch_size=batch_size, save_to_cpu=True)
    cut_offs = (evaluator.accuracy_at_k, evaluator.precision_recall_at_k, evaluator.mrr_at_k, evaluator.ndcg_at_k)
    top_k = max(k for ks in (*cut_offs, evaluator.map_at_k) for k in ks)
    curve = []
    for limit in limits:
        q, d = (_cut(side, limit) for side in (queries, documents))
        hits = rank(model.similarity(q, d), evaluator.corpus_ids, top_k)
        curve.append(
            {
                **flat_metrics(evaluator.compute_metrics(hits)),
                "query_active_dims": model.sparsity(q)["active_dims"],
                "corpus_active_dims": model.sparsity(d)["active_dims"],
                "flops": mean_flops(q, d),
            }
        )
    return curve


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


def _cut(embeddings: torch.Tensor, limit: int | None) -> torch.Tensor:
    if limit is None:
        return embeddings
    return select_max_active_dims(embeddings.to_dense(), limit).to_sparse()


def _activity(embeddings: torch.Tensor) -> torch.Tensor:
    """Share of the rows in which each column is active: (vocabulary,)."""
    return (embeddings.to_dense() != 0).double().mean(dim=0)
