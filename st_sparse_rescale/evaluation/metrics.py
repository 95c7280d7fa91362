"""Retrieval metrics, query by query."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Run: TypeAlias = Mapping[str, Sequence[tuple[str, float]]]
"""For each query id its (document id, score) pairs in rank order."""
Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""For each query id the grades of its judged documents; above 0 is relevant."""

DEFAULT_METRICS = ("ndcg@10", "mrr@10", "recall@100", "map@100")
NAMES = ("ndcg", "mrr", "recall", "precision", "accuracy", "map")


def parse_metric(metric: str) -> tuple[str, int]:
    """Split ``"ndcg@10"`` into ``("ndcg", 10)``.

    Raises:
        ValueError: No such metric.
    """
    match = re.fullmatch(rf"({'|'.join(NAMES)})@([1-9]\d*)", metric.lower())
    if match is None:
        raise ValueError(f"There is no metric {metric!r}: write NAME@CUTOFF with NAME of {', '.join(NAMES)}.")
    return match[1], int(match[2])


def score_ranking(metric: str, found: Sequence[tuple[int, int]], grades: Sequence[int]) -> float:
    """Score the ranking of one query.

    The definitions are those of sentence-transformers' evaluator, and agree with trec_eval except that average
    precision at k divides by min(k, relevant documents), not by the relevant documents. Grades count in nDCG only, as
    linear gains; for binary judgements they are 1.

    Args:
        metric: ``ndcg@k``, ``mrr@k``, ``recall@k``, ``precision@k``, ``accuracy@k`` or ``map@k``.
        found: (rank, grade) of the relevant documents in the ranking, in rank order, ranks from 1 on.
        grades: Grades of all relevant documents; at least one.

    Returns:
        The score, from 0 to 1.

    Example:
        ::

            score_ranking("mrr@10", found=[(2, 1)], grades=[1, 1])  # 0.5
    """
    name, k = parse_metric(metric)
    top = [(rank, grade) for rank, grade in found if rank <= k]
    if name == "ndcg":
        ideal = enumerate(sorted(grades, reverse=True)[:k], start=1)
        return _dcg(top) / _dcg(ideal)
    if name == "mrr":
        return 1 / top[0][0] if top else 0.0
    if name == "recall":
        return len(top) / len(grades)
    if name == "precision":
        return len(top) / k
    if name == "accuracy":
        return float(bool(top))
    return sum(number / rank for number, (rank, _) in enumerate(top, start=1)) / min(k, len(grades))


def measure(
    run: Run, qrels: Qrels, metrics: Iterable[str] = DEFAULT_METRICS, *, relevant_from: int = 1
) -> dict[str, dict[str, float]]:
    """Score a run.

    Args:
        run: The rankings; a query without one scores 0.
        qrels: The judgements. Queries without a relevant document cannot be scored and are left out.
        metrics: Such as ``ndcg@10``: see :func:`score_ranking`.
        relevant_from: Lowest grade that counts as relevant in metrics other than nDCG.

    Returns:
        For each metric the score of each query that has a relevant document.

    Raises:
        ValueError: No such metric, or no query has a relevant document.

    Example:
        ::

            scores = measure({"q": [("d1", 2.0), ("d2", 1.0)]}, {"q": {"d2": 1}}, ["mrr@10"])
            # {"mrr@10": {"q": 0.5}}
    """
    graded = _relevant(qrels, 1)
    binary = graded if relevant_from == 1 else _relevant(qrels, relevant_from)
    scores = {}
    for metric in dict.fromkeys(metrics):
        judged = graded if parse_metric(metric)[0] == "ndcg" else binary
        scores[metric] = {query: _score(metric, run.get(query, ()), grades) for query, grades in judged.items()}
    return scores


def _score(metric: str, hits: Sequence[tuple[str, float]], grades: Mapping[str, int]) -> float:
    found = [(rank, grades[id]) for rank, (id, _) in enumerate(hits, start=1) if id in grades]
    return score_ranking(metric, found, list(grades.values()))


def _relevant(qrels: Qrels, lowest: int) -> dict[str, dict[str, int]]:
    judged = {query: {id: grade for id, grade in grades.items() if grade >= lowest} for query, grades in qrels.items()}
    judged = {query: grades for query, grades in judged.items() if grades}
    if not judged:
        raise ValueError("No query has a relevant document: there is nothing to measure.")
    return judged


def depth(metrics: Iterable[str]) -> int:
    """How many documents a query the metrics look at."""
    return max(parse_metric(metric)[1] for metric in metrics)


def mean(scores: Mapping[str, float]) -> float:
    """Mean over the queries."""
    return sum(scores.values()) / len(scores)


def _dcg(ranked: Iterable[tuple[int, int]]) -> float:
    return sum(grade / math.log2(rank + 1) for rank, grade in ranked)
