"""Effectiveness against efficiency: one encoding, evaluated at several limits of active dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

from st_sparse_rescale.evaluation.metrics import Run, depth, mean, measure
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
    queries, corpus, top_k = queries_of(evaluator), corpus_of(evaluator), depth(metrics_of(evaluator))
    found = retrieve(model, queries, corpus, top_k, limits=limits, batch_size=batch_size)
    return [
        {
            **score_run(evaluator, point.run),
            "query_active_dims": point.query_active_dims,
            "corpus_active_dims": point.corpus_active_dims,
            "flops": point.flops,
        }
        for point in found
    ]


def best_at_cost(curve: Sequence[Mapping[str, float]], flops: float, metric: str = "ndcg@10") -> float:
    """Compare models of different density: the best value on a trade-off curve for at most so many FLOPS.

    Args:
        curve: Points as `trace_tradeoff` gives them.
        flops: The limit.
        metric: What is compared.

    Returns:
        The best value; 0 where no point is that cheap.

    Example:
        >>> best_at_cost([{"flops": 9.0, "ndcg@10": 0.3}, {"flops": 80.0, "ndcg@10": 0.4}], flops=20)
        0.3
    """
    return max((point[metric] for point in curve if point["flops"] <= flops), default=0.0)


def score_run(evaluator: SparseInformationRetrievalEvaluator, run: Run) -> dict[str, float]:
    """Score any run by the judgements and the cut-offs of an evaluator.

    Args:
        evaluator: Holds the queries, the judgements and the cut-offs.
        run: For each query id its (document id, score) pairs in rank order.

    Returns:
        ``ndcg@10``, ``mrr@10``, ... as means over the queries.
    """
    qrels = {query: dict.fromkeys(evaluator.relevant_docs[query], 1) for query in evaluator.queries_ids}
    return {metric: mean(scores) for metric, scores in measure(run, qrels, metrics_of(evaluator)).items()}


def metrics_of(evaluator: SparseInformationRetrievalEvaluator) -> list[str]:
    """The metrics that an evaluator reports, such as ``ndcg@10``."""
    cut_offs = {
        "accuracy": evaluator.accuracy_at_k,
        "precision": evaluator.precision_recall_at_k,
        "recall": evaluator.precision_recall_at_k,
        "ndcg": evaluator.ndcg_at_k,
        "mrr": evaluator.mrr_at_k,
        "map": evaluator.map_at_k,
    }
    return [f"{name}@{k}" for name, ks in cut_offs.items() for k in ks]


def queries_of(evaluator: SparseInformationRetrievalEvaluator) -> dict[str, str]:
    """The query texts of an evaluator, by id."""
    return dict(zip(evaluator.queries_ids, map(str, evaluator.queries), strict=True))


def corpus_of(evaluator: SparseInformationRetrievalEvaluator) -> dict[str, str]:
    """The document texts of an evaluator, by id."""
    return dict(zip(evaluator.corpus_ids, map(str, evaluator.corpus), strict=True))
