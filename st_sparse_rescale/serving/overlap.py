"""How much of an exact ranking another ranking keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Hits: TypeAlias = Sequence[tuple[str, float]]
"""(document id, score) pairs in rank order."""


def overlap(found: Sequence[Hits], exact: Sequence[Hits], top_k: int = 10) -> float:
    """Share of the exact best documents that were found, as a mean over the queries that have any.

    Args:
        found: For each query what an engine found.
        exact: For each query what exact search found.
        top_k: Documents a query that are compared, as sets.

    Returns:
        From 0 to 1.

    Raises:
        ValueError: Another number of queries, or exact search found nothing for any of them.

    Example:
        ::

            overlap([[("a", 2.0), ("c", 1.0)]], [[("a", 2.1), ("b", 1.1)]])  # 0.5
    """
    shares = []
    for hits, best in zip(found, exact, strict=True):
        wanted = {id for id, _ in best[:top_k]}
        if wanted:
            shares.append(len(wanted & {id for id, _ in hits[:top_k]}) / len(wanted))
    if not shares:
        raise ValueError("Exact search found nothing for any query: there is nothing to compare.")
    return sum(shares) / len(shares)
