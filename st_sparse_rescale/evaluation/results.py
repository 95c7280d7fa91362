"""The results of an evaluation, and the file that holds them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from st_sparse_rescale.evaluation.significance import Comparison
from st_sparse_rescale.evaluation.truncation import Truncation
from st_sparse_rescale.whole import written_whole


@dataclass(frozen=True)
class SystemResult:
    """What one system reached on one collection."""

    system: str
    metrics: dict[str, float]
    limit: int | None = None
    """Active dimensions a vector at most."""
    query_active_dims: float | None = None
    corpus_active_dims: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class ComparisonResult(Comparison):
    """Two systems, a and b, on the queries of one collection, in one metric."""

    metric: str
    a: str
    b: str
    per_query: dict[str, tuple[float, float]]
    """For each query the scores of a and b."""


@dataclass(frozen=True)
class ModelLengths:
    """What a model got to see of the texts of a collection."""

    model: str
    query: Truncation
    document: Truncation


@dataclass(frozen=True)
class CollectionResult:
    """All systems on one collection, and what the evaluation should not hide."""

    name: str
    split: str
    crc32: int
    """Of the texts and judgements."""
    documents: int
    queries: int
    self_excluded: bool
    lengths: list[ModelLengths]
    """Of each sparse model."""
    seconds: float
    peak_memory_mib: float
    """Of the process, since it began."""
    problems: list[str]
    systems: list[SystemResult]
    comparisons: list[ComparisonResult]


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, in the order in which the collections were evaluated."""

    settings: dict[str, Any]
    collections: list[CollectionResult] = field(default_factory=list)

    def means(self) -> list[SystemResult]:
        """Each system's means over the collections, in what was measured on all of them."""
        means = []
        for first in self.collections[0].systems if self.collections else []:
            rows = [next(s for s in c.systems if s.system == first.system) for c in self.collections]
            shared = [m for m in first.metrics if all(m in row.metrics for row in rows)]
            costs = {
                cost: sum(getattr(row, cost) for row in rows) / len(rows)
                for cost in ("query_active_dims", "corpus_active_dims", "flops")
                if getattr(first, cost) is not None
            }
            metrics = {metric: sum(row.metrics[metric] for row in rows) / len(rows) for metric in shared}
            means.append(SystemResult(first.system, metrics, first.limit, **costs))
        return means

    def write(self, file: str | Path) -> Path:
        """Write the results as JSON, in one step."""
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self) | {"means": [asdict(row) for row in self.means()]}
        with written_whole(file) as partial:
            partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return file

    @classmethod
    def read(cls, file: str | Path) -> Evaluation:
        """Read results.

        Raises:
            ValueError: The file holds something else.
        """
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            return cls(content["settings"], [_collection(entry) for entry in content["collections"]])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} does not hold results of an evaluation: choose another file.") from error


def _collection(entry: dict[str, Any]) -> CollectionResult:
    lengths = [
        ModelLengths(row["model"], Truncation(**row["query"]), Truncation(**row["document"]))
        for row in entry["lengths"]
    ]
    comparisons = [
        ComparisonResult(**row | {"per_query": {query: (a, b) for query, (a, b) in row["per_query"].items()}})
        for row in entry["comparisons"]
    ]
    systems = [SystemResult(**row) for row in entry["systems"]]
    return CollectionResult(**entry | {"lengths": lengths, "systems": systems, "comparisons": comparisons})
