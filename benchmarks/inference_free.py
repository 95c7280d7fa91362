"""Inference-free retrieval beside a symmetric model: trained alike, on the docstrings of the installed packages.

    python benchmarks/inference_free.py build/inference-free --output benchmarks/results/inference_free.json

All train the shipped modernbert-mini at k = 16 with the demonstration's recipe, shortened to about two minutes of one
core; they differ in the query side alone. A query's latency is the median over the queries, encoded one at a time as a
server would, in milliseconds of the processor. A killed call goes on when it is repeated.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from sentence_transformers import SparseEncoder

from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.demo.corpus import docstring_corpus, write_corpus
from st_sparse_rescale.evaluation import evaluate
from st_sparse_rescale.evaluation.beir import load_beir_folder
from st_sparse_rescale.training import Recipe, train

SHORT = {"max_steps": 200, "batch_size": 32, "max_seq_length": 80, "save_steps": 50}
FREE = {"query_encoder": "idf", "query_regularizer_weight": 0}
CONTENDERS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "IDF queries": FREE,
    "IDF queries, trained": {**FREE, "query_learning_rate": 1e-3},
}


def measure(name: str, work: Path, corpus: Path, **settings: Any) -> dict[str, Any]:
    """Train one contender and evaluate it."""
    train_file = str(corpus / "train.jsonl")
    recipe = Recipe.load("demo", model=backbone_path("modernbert-mini"), k=16, train=train_file, **SHORT, **settings)
    result = train(recipe, work / name.replace(", ", "-").replace(" ", "-"))
    [found] = evaluate(result.folder, corpus / "test", metrics=["ndcg@10", "recall@100"]).collections
    [system] = found.systems
    return {
        "name": name,
        "settings": settings,
        **{metric: round(value, 4) for metric, value in system.metrics.items()},
        "query_dims": round(system.query_active_dims or 0, 1),
        "document_dims": round(system.corpus_active_dims or 0, 1),
        "flops": round(system.flops or 0, 2),
        "query_milliseconds": round(latency(result.model, list(load_beir_folder(corpus / "test").queries.values())), 2),
    }


def latency(model: SparseEncoder, queries: list[str]) -> float:
    """Median milliseconds to encode one query."""
    model.eval().to("cpu")
    times = []
    for query in [queries[0], *queries]:  # the first one warms up
        began = time.process_time()
        model.encode_query(query, show_progress_bar=False)
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times[1:])


def main(
    work: Annotated[Path, typer.Argument(help="Folder for the corpus and the trainings.")],
    output: Annotated[Path, typer.Option(help="JSON file for the results.")],
    threads: Annotated[int, typer.Option(help="Threads.")] = 1,
) -> None:
    torch.set_num_threads(threads)
    corpus = work / "corpus"
    if not corpus.exists():
        corpus.parent.mkdir(parents=True, exist_ok=True)
        write_corpus(docstring_corpus(), corpus)
    results = [measure(name, work, corpus, **settings) for name, settings in CONTENDERS.items()]
    record = {"machine": describe_machine(), "threads": threads, "results": results}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shown = ["name", "ndcg@10", "recall@100", "query_dims", "document_dims", "flops", "query_milliseconds"]
    table = Table(*shown)
    for result in results:
        table.add_row(*(str(result[column]) for column in shown))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
