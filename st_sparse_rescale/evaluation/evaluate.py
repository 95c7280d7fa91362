"""Evaluate models on collections: metrics, run files, comparisons, and results that survive a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sentence_transformers import SparseEncoder

from st_sparse_rescale.changes import changes
from st_sparse_rescale.evaluation.bm25 import bm25_run
from st_sparse_rescale.evaluation.collection import Collection
from st_sparse_rescale.evaluation.hybrid import dense_run, reciprocal_rank_fusion
from st_sparse_rescale.evaluation.metrics import DEFAULT_METRICS, Run, depth, mean, measure, parse_metric
from st_sparse_rescale.evaluation.peak_memory import peak_memory_mib
from st_sparse_rescale.evaluation.results import (
    CollectionResult,
    ComparisonResult,
    Evaluation,
    ModelLengths,
    SystemResult,
)
from st_sparse_rescale.evaluation.retrieval import Retrieval, retrieve
from st_sparse_rescale.evaluation.significance import PERMUTATIONS, SEED, compare
from st_sparse_rescale.evaluation.sources import find_collections
from st_sparse_rescale.evaluation.systems import Dense, Sparse, Systems
from st_sparse_rescale.evaluation.trec_run import require_words, write_run
from st_sparse_rescale.evaluation.truncation import measure_truncation


def evaluate(
    model: Sparse,
    data: str | Path | Sequence[str | Path],
    *,
    metrics: Sequence[str] | None = None,
    max_active_dims: Sequence[int | None] = (None,),
    bm25: bool = False,
    compare_with: Sparse | Sequence[Sparse] = (),
    hybrid_with: Dense | None = None,
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
        compare_with: Other sparse models, each evaluated too and compared with the first query by query.
        hybrid_with: A dense model, evaluated too, alone and fused with the first model (at the first limit) by
            reciprocal rank fusion.
        run_dir: Folder for TREC run files, ``COLLECTION.SYSTEM.trec``.
        output: JSON file for the results, written after each collection. If it is there already, its collections are
            not evaluated again, unless their run files are wanted and absent: that is how a killed evaluation goes on.
        split: Of the judgements.
        strict: Stop at the first problem with the data.
        data_dir: Where local copies of named collections are.
        exclude_self: Leave out the document whose id is the query's; by default what is customary for the collection.
        max_length: Tokens a text, instead of the sparse models' own limits.
        batch_size: Texts encoded at once.
        permutations: Sign patterns drawn by the comparison's randomisation test.
        seed: Seed of that draw.
        show_progress_bar: Show progress.

    Returns:
        The results: of all collections in ``output``, if it was there.

    Raises:
        CollectionError: Data cannot be loaded.
        ValueError: A metric or a limit does not exist, two collections have one name, ``output`` holds results of
            another evaluation, or an id cannot stand in a run file.
        ImportError: An optional library is needed and absent.

    Example:
        ::

            from st_sparse_rescale.evaluation import evaluate, results_table

            results = evaluate("my-splade", ["scifact", "nanobeir:nq"], bm25=True, output="results.json")
            print(results.means()[0].metrics["ndcg@10"])
    """
    chosen = None if metrics is None else [metric.lower() for metric in metrics]
    for metric in chosen or ():
        parse_metric(metric)
    limits = list(dict.fromkeys(max_active_dims))
    test = {"permutations": permutations, "seed": seed}
    loaders = _loaders(_several(data), split=split, strict=strict, data_dir=data_dir)
    systems = Systems([model, *_several(compare_with)], hybrid_with, max_length)
    settings = {
        "models": systems.checksums(),
        "metrics": chosen,
        "max_active_dims": limits,
        "bm25": bm25,
        "split": split,
        "exclude_self": exclude_self,
        "max_length": max_length,
        **test,
    }
    done = _done(output, settings)
    for folder in (run_dir, output and Path(output).parent):
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
    for name, load in loaders.items():
        collection = load()
        if name in done and done[name].crc32 != collection.crc32():
            raise ValueError(f"{output} holds results on another {name!r}: choose another file or delete it.")
        if name in done and (run_dir is None or all(file.exists() for file in _run_files(run_dir, done[name]))):
            continue
        if run_dir is not None:  # found out before the work is done
            require_words([*collection.queries, *collection.corpus])
        done[name], runs = _evaluate_collection(
            systems,
            collection,
            metrics=list(dict.fromkeys(chosen or (*DEFAULT_METRICS, *collection.metrics))),
            limits=limits,
            bm25=bm25,
            test=test,
            exclude_self=collection.exclude_self if exclude_self is None else exclude_self,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
        )
        if run_dir is not None:
            for file, (system, run) in zip(_run_files(run_dir, done[name]), runs.items(), strict=True):
                write_run(file, run, _slug(system))
        if output is not None:
            Evaluation(settings, list(done.values())).write(output)
    return Evaluation(settings, list(done.values()))


def _several(value: Any) -> list[Any]:
    """One or several of something as a list."""
    return [value] if isinstance(value, str | Path | SparseEncoder) else list(value)


def _loaders(data: Sequence[str | Path], **settings: Any) -> dict[str, Callable[[], Collection]]:
    """Everything that is asked for, by name, so that what is not there is found out before the work is done."""
    loaders: dict[str, Callable[[], Collection]] = {}
    for source in data:
        for name, load in find_collections(source, **settings).items():
            if name in loaders:
                raise ValueError(f"Two collections are called {name!r}: rename a folder to tell them apart.")
            loaders[name] = load
    return loaders


def _done(output: str | Path | None, settings: dict[str, Any]) -> dict[str, CollectionResult]:
    """What an earlier call has left, by name."""
    if output is None or not Path(output).exists():
        return {}
    known = Evaluation.read(output)
    if differing := changes(known.settings, settings):
        raise ValueError(
            f"{output} holds results of another evaluation ({differing}): choose another file or delete it."
        )
    return {result.name: result for result in known.collections}


def _evaluate_collection(
    systems: Systems,
    collection: Collection,
    *,
    metrics: Sequence[str],
    limits: Sequence[int | None],
    bm25: bool,
    test: Mapping[str, Any],
    **search: Any,
) -> tuple[CollectionResult, dict[str, Run]]:
    """Search and score; the runs are in the order of the result's systems."""
    started = time.perf_counter()
    found, baselines = _search(systems, collection, depth(metrics), limits, bm25, **search)
    runs = {name: retrieval.run for name, retrieval in found.items()} | baselines
    scores = {
        name: measure(run, collection.qrels, metrics, relevant_from=collection.relevant_from)
        for name, run in runs.items()
    }
    means = {name: {metric: mean(of) for metric, of in by_metric.items()} for name, by_metric in scores.items()}
    first, *others = systems.sparse
    result = CollectionResult(
        name=collection.name,
        split=collection.split,
        crc32=collection.crc32(),
        documents=len(collection.corpus),
        queries=len(collection.queries),
        self_excluded=search["exclude_self"],
        lengths=[
            ModelLengths(
                name,
                measure_truncation(model, list(collection.queries.values()), "query"),
                measure_truncation(model, list(collection.corpus.values()), "document"),
            )
            for name, model in systems.sparse.items()
        ],
        problems=collection.problems,
        systems=[
            *(
                SystemResult(name, means[name], r.limit, r.query_active_dims, r.corpus_active_dims, r.flops)
                for name, r in found.items()
            ),
            *(SystemResult(name, means[name]) for name in baselines),
        ],
        comparisons=[
            _compared(_limited(first, limit), _limited(other, limit), metric, scores, test)
            for other in others
            for limit in limits
            for metric in metrics
        ],
        seconds=time.perf_counter() - started,
        peak_memory_mib=peak_memory_mib(),
    )
    return result, runs


def _search(
    systems: Systems, collection: Collection, top_k: int, limits: Sequence[int | None], bm25: bool, **search: Any
) -> tuple[dict[str, Retrieval], dict[str, Run]]:
    """What the sparse models find, and what the others do."""
    queries, corpus = collection.queries, collection.corpus
    found = {
        _limited(name, retrieval.limit): retrieval
        for name, model in systems.sparse.items()
        for retrieval in retrieve(model, queries, corpus, top_k, limits=limits, **search)
    }
    baselines: dict[str, Run] = {}
    if bm25:
        baselines["BM25"] = bm25_run(corpus, queries, top_k, exclude_self=search["exclude_self"])
    for name, model in systems.dense.items():
        dense = dense_run(model, queries, corpus, top_k, **search)
        first, retrieval = next(iter(found.items()))
        # What shares no term with the query was not found, only filled in.
        matched = {query: [hit for hit in hits if hit[1] > 0] for query, hits in retrieval.run.items()}
        fused = reciprocal_rank_fusion([dense, matched])
        baselines |= {name: dense, f"{first} + {name}": {query: hits[:top_k] for query, hits in fused.items()}}
    return found, baselines


def _compared(
    a: str, b: str, metric: str, scores: Mapping[str, Mapping[str, Mapping[str, float]]], test: Mapping[str, Any]
) -> ComparisonResult:
    by_query = scores[a][metric], scores[b][metric]
    per_query = {query: (by_query[0][query], by_query[1][query]) for query in by_query[0]}
    return ComparisonResult(**vars(compare(*by_query, **test)), metric=metric, a=a, b=b, per_query=per_query)


def _limited(name: str, limit: int | None) -> str:
    return name if limit is None else f"{name} ({limit} dims)"


def _run_files(folder: str | Path, result: CollectionResult) -> list[Path]:
    """The run file of each system."""
    return [Path(folder) / f"{_slug(result.name)}.{_slug(row.system)}.trec" for row in result.systems]


def _slug(name: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in name).strip("-")
