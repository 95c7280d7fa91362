"""Evaluate models on collections: metrics, run files, comparisons, and results that survive a kill."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer, SparseEncoder

from st_sparse_rescale.evaluation.bm25 import bm25_run
from st_sparse_rescale.evaluation.checksum import model_crc32
from st_sparse_rescale.evaluation.collection import Collection
from st_sparse_rescale.evaluation.hybrid import dense_run, reciprocal_rank_fusion
from st_sparse_rescale.evaluation.metrics import DEFAULT_METRICS, Run, depth, mean, measure, parse_metric
from st_sparse_rescale.evaluation.peak_memory import peak_memory_mib
from st_sparse_rescale.evaluation.retrieval import Retrieval, retrieve
from st_sparse_rescale.evaluation.significance import PERMUTATIONS, SEED, compare
from st_sparse_rescale.evaluation.sources import load_collections
from st_sparse_rescale.evaluation.trec_run import write_run
from st_sparse_rescale.evaluation.truncation import measure_truncation
from st_sparse_rescale.modules import fuse
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
class ComparisonResult:
    """Two systems on the queries of one collection, in one metric: see ``significance.compare``."""

    metric: str
    a: str
    b: str
    difference: float
    p_value: float
    exact: bool
    permutations: int
    seed: int
    wins: int
    losses: int
    ties: int
    per_query: dict[str, tuple[float, float]]
    """For each query the scores of a and b."""


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
    query_max_length: int | None
    corpus_max_length: int | None
    query_truncated: float
    """Share of the queries that the model cuts."""
    corpus_truncated: float
    seconds: float
    peak_memory_mib: float
    """Of the process, since it began."""
    problems: list[str]
    systems: list[SystemResult]
    comparisons: list[ComparisonResult] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, in the order of the collections."""

    settings: dict[str, Any]
    collections: list[CollectionResult] = field(default_factory=list)

    def means(self) -> list[SystemResult]:
        """Each system's means over the collections, in what was measured on all of them."""
        means = []
        for first in self.collections[0].systems:
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
        content = asdict(self) | ({"means": [asdict(row) for row in self.means()]} if self.collections else {})
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
            return cls(
                content["settings"],
                [
                    CollectionResult(
                        **entry
                        | {
                            "systems": [SystemResult(**row) for row in entry["systems"]],
                            "comparisons": [
                                ComparisonResult(
                                    **row | {"per_query": {q: (a, b) for q, (a, b) in row["per_query"].items()}}
                                )
                                for row in entry["comparisons"]
                            ],
                        }
                    )
                    for entry in content["collections"]
                ],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not hold results of an evaluation: choose another file.") from error


def evaluate(
    model: str | Path | SparseEncoder,
    data: Sequence[str | Path],
    *,
    metrics: Sequence[str] | None = None,
    max_active_dims: Sequence[int | None] = (None,),
    bm25: bool = False,
    compare_with: str | Path | SparseEncoder | None = None,
    hybrid_with: str | Path | SentenceTransformer | None = None,
    run_dir: str | Path | None = None,
    output: str | Path | None = None,
    split: str | None = None,
    strict: bool = False,
    data_dir: str | Path | None = None,
    exclude_self: bool | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    permutations: int = PERMUTATIONS,
    seed: int = SEED,
    show_progress_bar: bool = False,
) -> Evaluation:
    """Evaluate a model, and others beside it, on collections.

    Args:
        model: A checkpoint or a loaded model.
        data: Folders and names of collections: see :func:`~st_sparse_rescale.evaluation.sources.load_collections`.
        metrics: Such as ``ndcg@10``; by default nDCG@10, MRR@10, Recall@100, MAP@100 and what is customary for a
            collection.
        max_active_dims: Limits of active dimensions, all evaluated from one encoding; ``None`` is no limit.
        bm25: Also evaluate BM25.
        compare_with: Another sparse model, evaluated too and compared with the first query by query.
        hybrid_with: A dense model, evaluated too, alone and fused with the first model by reciprocal rank fusion.
        run_dir: Folder for TREC run files, ``COLLECTION.SYSTEM.trec``.
        output: JSON file for the results, written after each collection. If it is there already, its collections are
            not evaluated again: that is how a killed evaluation goes on.
        split: Of the judgements.
        strict: Stop at the first problem with the data.
        data_dir: Where local copies of named collections are.
        exclude_self: Leave out the document whose id is the query's; by default what is customary for the collection.
        max_length: Tokens a text, instead of the model's own limit.
        batch_size: Texts encoded at once.
        permutations: Sign patterns drawn by the comparison's randomisation test.
        seed: Seed of that draw.
        show_progress_bar: Show progress.

    Returns:
        The results.

    Raises:
        CollectionError: Data cannot be loaded.
        ValueError: A metric or a limit does not exist, or ``output`` holds results of another evaluation.
        ImportError: An optional library is needed and absent.

    Example:
        ::

            from st_sparse_rescale.evaluation import evaluate, results_table

            results = evaluate("my-splade", ["scifact", "nanobeir:nq"], bm25=True, output="results.json")
            print(results.means()[0].metrics["ndcg@10"])
    """
    for metric in metrics or ():
        parse_metric(metric)
    systems = _Systems(model, compare_with, hybrid_with, max_length)
    settings = {
        **systems.fingerprint,
        "metrics": None if metrics is None else list(metrics),
        "max_active_dims": list(max_active_dims),
        "bm25": bm25,
        "split": split,
        "exclude_self": exclude_self,
        "max_length": max_length,
        "permutations": permutations,
        "seed": seed,
    }
    results = _resumed(output, settings)
    done = {result.name: result.crc32 for result in results.collections}
    seen: set[str] = set()
    for source in data:
        for collection in load_collections(source, split=split, strict=strict, data_dir=data_dir):
            if collection.name in seen:
                raise ValueError(f"Two collections are called {collection.name!r}: rename a folder to tell them apart.")
            seen.add(collection.name)
            if collection.name in done:
                if done[collection.name] != collection.crc32():
                    raise ValueError(
                        f"{output} holds results on another {collection.name!r}: choose another file or delete it."
                    )
                continue
            result, runs = _evaluate_collection(
                systems,
                collection,
                wanted=tuple(dict.fromkeys(metrics or (*DEFAULT_METRICS, *collection.metrics))),
                limits=max_active_dims,
                bm25=bm25,
                exclude_self=collection.exclude_self if exclude_self is None else exclude_self,
                batch_size=batch_size,
                permutations=permutations,
                seed=seed,
                show_progress_bar=show_progress_bar,
            )
            if run_dir is not None:
                Path(run_dir).mkdir(parents=True, exist_ok=True)
                for name, run in runs.items():
                    write_run(Path(run_dir) / f"{_slug(collection.name)}.{_slug(name)}.trec", run, _slug(name))
            results.collections.append(result)
            if output is not None:
                results.write(output)
    return results


class _Systems:
    """The models, and what tells them apart from others of the same name."""

    def __init__(self, model: Any, compare_with: Any, hybrid_with: Any, max_length: int | None) -> None:
        self.name, self.model = _loaded(model, SparseEncoder, "model", max_length)
        self.fingerprint: dict[str, Any] = {"model": self.name, "model_crc32": model_crc32(self.model)}
        self.other = self.dense = None
        if compare_with is not None:
            self.other_name, self.other = _loaded(compare_with, SparseEncoder, "other model", max_length)
            if self.other_name == self.name:  # runs/a/final and runs/b/final
                self.name, self.other_name = f"A: {self.name}", f"B: {self.name}"
            self.fingerprint |= {"compare_with": self.other_name, "compare_with_crc32": model_crc32(self.other)}
        if hybrid_with is not None:
            name, self.dense = _loaded(hybrid_with, SentenceTransformer, "model", None)
            self.dense_name = f"{name} (dense)"
            self.fingerprint |= {"hybrid_with": self.dense_name, "hybrid_with_crc32": model_crc32(self.dense)}


def _loaded(model: Any, kind: Any, unnamed: str, max_length: int | None) -> tuple[str, Any]:
    if isinstance(model, kind):
        name, loaded = unnamed, model
    else:
        name, loaded = _name(model), _fast(kind(str(model)))
    if max_length is not None:
        loaded.max_seq_length = max_length
    return name, loaded


def _name(model: str | Path) -> str:
    """The folder's name, or for the ``model`` that a training leaves the name of the training's folder."""
    path = Path(model).resolve()
    return path.parent.name if path.name == "model" else path.name


def _fast(model: Any) -> Any:
    """Give a SPLADE model the fused head: equal vectors, sooner. Any other model runs as it is."""
    try:
        return fuse(model)
    except ValueError:
        return model


def _resumed(output: str | Path | None, settings: dict[str, Any]) -> Evaluation:
    if output is None or not Path(output).exists():
        return Evaluation(settings)
    known = Evaluation.read(output)
    # As JSON, which knows no tuples.
    now = json.loads(json.dumps(settings))
    differing = [name for name in now | known.settings if now.get(name) != known.settings.get(name)]
    if differing:
        changes = "; ".join(f"{name} was {known.settings.get(name)!r}, is {now.get(name)!r}" for name in differing)
        raise ValueError(f"{output} holds results of another evaluation ({changes}): choose another file or delete it.")
    return known


def _evaluate_collection(
    systems: _Systems,
    collection: Collection,
    *,
    wanted: tuple[str, ...],
    limits: Sequence[int | None],
    bm25: bool,
    exclude_self: bool,
    batch_size: int,
    permutations: int,
    seed: int,
    show_progress_bar: bool,
) -> tuple[CollectionResult, dict[str, Run]]:
    started = time.perf_counter()
    queries, corpus, top_k = collection.queries, collection.corpus, depth(wanted)
    settings: dict[str, Any] = {
        "exclude_self": exclude_self,
        "batch_size": batch_size,
        "show_progress_bar": show_progress_bar,
    }
    mine = retrieve(systems.model, queries, corpus, top_k, limits=limits, **settings)
    found: dict[str, Retrieval | Run] = {_limited(systems.name, retrieval.limit): retrieval for retrieval in mine}
    pairs = []
    if systems.other is not None:
        pairs = [(_limited(systems.name, limit), _limited(systems.other_name, limit)) for limit in limits]
        theirs = retrieve(systems.other, queries, corpus, top_k, limits=limits, **settings)
        found |= {_limited(systems.other_name, retrieval.limit): retrieval for retrieval in theirs}
    if bm25:
        found["BM25"] = bm25_run(corpus, queries, top_k, exclude_self=exclude_self)
    if systems.dense is not None:
        dense = dense_run(systems.dense, queries, corpus, top_k, **settings)
        # What shares no term with the query was not found, only filled in.
        matched = {query: [hit for hit in hits if hit[1] > 0] for query, hits in mine[0].run.items()}
        fused = reciprocal_rank_fusion([dense, matched])
        found[systems.dense_name] = dense
        found[f"{systems.name} + {systems.dense_name}"] = {query: hits[:top_k] for query, hits in fused.items()}
    runs = {name: entry.run if isinstance(entry, Retrieval) else entry for name, entry in found.items()}
    scores = {
        name: measure(run, collection.qrels, wanted, relevant_from=collection.relevant_from)
        for name, run in runs.items()
    }
    comparisons = [_compared(metric, a, b, scores, permutations, seed) for a, b in pairs for metric in wanted]
    asked = measure_truncation(systems.model, list(queries.values()), "query")
    documents = measure_truncation(systems.model, list(corpus.values()), "document")
    result = CollectionResult(
        name=collection.name,
        split=collection.split,
        crc32=collection.crc32(),
        documents=len(corpus),
        queries=len(queries),
        self_excluded=exclude_self,
        query_max_length=asked.max_length,
        corpus_max_length=documents.max_length,
        query_truncated=asked.share,
        corpus_truncated=documents.share,
        seconds=time.perf_counter() - started,
        peak_memory_mib=peak_memory_mib(),
        problems=collection.problems,
        systems=[_system(name, entry, scores[name]) for name, entry in found.items()],
        comparisons=comparisons,
    )
    return result, runs


def _system(name: str, entry: Retrieval | Run, scores: dict[str, dict[str, float]]) -> SystemResult:
    metrics = {metric: mean(by_query) for metric, by_query in scores.items()}
    if not isinstance(entry, Retrieval):
        return SystemResult(name, metrics)
    return SystemResult(name, metrics, entry.limit, entry.query_active_dims, entry.corpus_active_dims, entry.flops)


def _compared(
    metric: str, a: str, b: str, scores: dict[str, dict[str, dict[str, float]]], permutations: int, seed: int
) -> ComparisonResult:
    by_query = (scores[a][metric], scores[b][metric])
    result = compare(*by_query, permutations=permutations, seed=seed)
    return ComparisonResult(
        metric,
        a,
        b,
        result.difference,
        result.p_value,
        result.exact,
        result.permutations,
        result.seed,
        result.wins,
        result.losses,
        result.ties,
        {query: (by_query[0][query], by_query[1][query]) for query in by_query[0]},
    )


def _limited(name: str, limit: int | None) -> str:
    return name if limit is None else f"{name} ({limit} dims)"


def _slug(name: str) -> str:
    return "".join(character if character.isalnum() or character in "-_" else "-" for character in name).strip("-")
