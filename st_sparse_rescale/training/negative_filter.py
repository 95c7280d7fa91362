"""Which of the documents that a search found are kept as negatives."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Sampling = Literal["top", "random"]


@dataclass(frozen=True)
class NegativeFilter:
    """The rule by which negatives are chosen from ranked candidates.

    What scores nearly as high as the positive is often relevant too, only not labelled (NV-Retriever,
    arXiv:2407.15831): margins and ranks keep such false negatives out. The rule is that of sentence-transformers'
    ``mine_hard_negatives``: the query's positives go first, then whatever violates a margin or a limit; of the rest, by
    rank, those from ``range_min`` to ``range_max``.

    Args:
        num_negatives: Negatives a query.
        range_min: How many of the best to skip.
        range_max: The last rank to consider; by default ten times ``num_negatives`` beyond ``range_min``.
        max_score: A negative scores no more than this.
        min_score: A negative scores no less than this.
        absolute_margin: A negative scores lower than the positive by at least this.
        relative_margin: Likewise, as a share of the positive's score: 0.05 keeps what reaches up to 95 % of it.
        sampling: The best of those that are left, or some of them at random.
        seed: Of the random choice; it depends on the query besides, not on the other queries.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> rule = NegativeFilter(num_negatives=1, absolute_margin=2.0)
        >>> rule.choose("q", [("a", 9.0), ("b", 8.5), ("c", 6.0)], positives={"a"}, positive_score=9.0)
        ['c']
    """

    num_negatives: int = 4
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    sampling: Sampling = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives is {self.num_negatives}, but must be at least 1.")
        if self.range_min < 0:
            raise ValueError(f"range_min is {self.range_min}, but is a number of documents to skip: give 0 or more.")
        if self.depth - self.range_min < self.num_negatives:
            raise ValueError(
                f"range_min is {self.range_min} and range_max {self.depth}, which leaves "
                f"{max(0, self.depth - self.range_min)} documents for {self.num_negatives} negatives: raise range_max."
            )
        for name in ("max_score", "min_score", "absolute_margin", "relative_margin"):
            limit = getattr(self, name)
            if limit is not None and not math.isfinite(limit):
                raise ValueError(f"{name} is {limit}, but must be a finite number.")
            if limit is not None and limit < 0 and name.endswith("margin"):
                raise ValueError(f"{name} is {limit}: with a negative margin a negative could outscore the positive.")
        if self.sampling not in ("top", "random"):
            raise ValueError(f"sampling is {self.sampling!r}, but must be 'top' or 'random'.")

    @property
    def depth(self) -> int:
        """``range_max``, or its default."""
        return self.range_min + 10 * self.num_negatives if self.range_max is None else self.range_max

    @property
    def looks_at_scores(self) -> bool:
        """Whether anything but the ranks decides."""
        limits = (self.max_score, self.min_score, self.absolute_margin, self.relative_margin)
        return any(limit is not None for limit in limits)

    def choose(
        self,
        query: str,
        candidates: Sequence[tuple[str, float]],
        positives: Collection[str],
        positive_score: float,
    ) -> list[str] | None:
        """Choose the negatives of a query.

        Args:
            query: The query, which seeds the random choice.
            candidates: (document, score) pairs, best first.
            positives: The query's relevant documents.
            positive_score: The lowest score of these.

        Returns:
            ``num_negatives`` documents, best first; None if so many are not left.
        """
        highest = math.inf if self.max_score is None else self.max_score
        if self.absolute_margin is not None:
            highest = min(highest, positive_score - self.absolute_margin)
        if self.relative_margin is not None:
            highest = min(highest, positive_score - self.relative_margin * abs(positive_score))
        lowest = -math.inf if self.min_score is None else self.min_score
        fit = [document for document, score in candidates if document not in positives and lowest <= score <= highest]
        left = fit[self.range_min : self.depth]
        if len(left) < self.num_negatives:
            return None
        if self.sampling == "top":
            return left[: self.num_negatives]
        places = random.Random(f"{self.seed} {query}").sample(range(len(left)), self.num_negatives)
        return [left[place] for place in sorted(places)]
