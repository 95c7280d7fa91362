"""The demonstration: train SPLADE with and without rescaling, evaluate, plot, save, and answer queries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_sparse_rescale.demo.backbones import backbone_path
from st_sparse_rescale.demo.corpus import docstring_corpus, write_corpus
from st_sparse_rescale.demo.report import LIMITS, TrainedRun, at_equal_cost, results_table, write_report
from st_sparse_rescale.evaluation.beir import load_evaluator
from st_sparse_rescale.evaluation.bm25 import bm25_run
from st_sparse_rescale.evaluation.sparse_index import SparseIndex
from st_sparse_rescale.evaluation.tradeoff import corpus_of, queries_of, score_run, trace_tradeoff
from st_sparse_rescale.training import CollapseError, Recipe, train
from st_sparse_rescale.training.train import collapsed_result
from st_sparse_rescale.whole import written_whole

RUNS = (("bert-mini", 1), ("modernbert-mini", 1), ("modernbert-mini", 16))
QUERIES = (
    "compute the mean along an axis and ignore missing values",
    "split an array into several sub-arrays",
    "open a file and read its lines",
)
TOP_DOCUMENTS, TOP_TERMS, PREVIEW = 3, 12, 110


def run_demo(
    output: str | Path,
    queries: Sequence[str] | Callable[[Sequence[str]], Sequence[str]] = QUERIES,
    *,
    recipe: str | Path = "demo",
    console: Console | None = None,
    **overrides: Any,
) -> Path:
    """Run the demonstration, or go on with a killed one.

    The corpus is built from the installed docstrings, each backbone of :data:`RUNS` is trained with its k and
    evaluated beside BM25, and the folder receives ``report.md`` with its plots and figures, ``corpus/``, ``runs/`` and
    the best model in ``model/``. At the end the best model answers the queries.

    Args:
        output: The folder; what an earlier call finished there is not done again.
        queries: Queries to answer, or a function that asks for them when it is time, given some examples.
        recipe: Name or path of the training recipe.
        console: Where to print.
        **overrides: Settings of the recipe to replace.

    Returns:
        The path of the report.

    Raises:
        ValueError: The folder cannot be written, or holds runs of another recipe.

    Example:
        ::

            from st_sparse_rescale.demo.run import run_demo

            run_demo("demo-out", max_steps=50)
    """
    console = console or Console()
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    settings = Recipe.load(recipe, **overrides)
    with _progress(console) as progress:
        corpus = _corpus(output / "corpus", progress)
        evaluator = cast(SparseInformationRetrievalEvaluator, load_evaluator(corpus / "test"))
        bm25 = score_run(evaluator, bm25_run(corpus_of(evaluator), queries_of(evaluator), top_k=100))
        runs, models = [], []
        for backbone, k in RUNS:
            trained, model = _trained_run(settings, backbone, k, corpus, evaluator, output / "runs", progress)
            runs.append(trained)
            models.append(model)
    best = max(range(len(runs)), key=lambda i: at_equal_cost(runs[i]))
    with written_whole(output / "model") as partial:
        models[best].save_pretrained(str(partial))
    page = write_report(output, runs, bm25, _setting(settings, corpus, evaluator))

    console.print(_rich_table(*results_table(runs, bm25)))
    console.print(f"The best model ({runs[best].name}) is saved: SparseEncoder({str(output / 'model')!r})")
    answer(models[best], evaluator, queries(QUERIES) if callable(queries) else queries, console)
    return page


def answer(
    model: SparseEncoder,
    evaluator: SparseInformationRetrievalEvaluator,
    queries: Sequence[str],
    console: Console,
) -> None:
    """Show, for each query, its strongest terms and the documents that it finds.

    Args:
        model: The model.
        evaluator: Holds the documents.
        queries: The queries.
        console: Where to print.
    """
    texts = corpus_of(evaluator)
    index = SparseIndex.from_embeddings(model.encode_document(list(texts.values()), batch_size=64), list(texts))
    embeddings = model.encode_query(list(queries))
    hits = index.search(embeddings, top_k=TOP_DOCUMENTS)
    decoded = cast(list[list[tuple[str, float]]], model.decode(embeddings, top_k=TOP_TERMS))
    for query, terms, found in zip(queries, decoded, hits, strict=True):
        console.print(f"\n[bold]{query}[/]")
        words = set(model.tokenizer.tokenize(query))
        shown = (f"{term} {weight:.2f}" if term in words else f"[cyan]{term} {weight:.2f}[/]" for term, weight in terms)
        console.print("  terms ([cyan]expansion[/]): " + ", ".join(shown))
        for place, (id, score) in enumerate(found, start=1):
            console.print(f"  {place}. {id} ({score:.1f})", markup=False, highlight=False)
            console.print(f"     {texts[id][:PREVIEW]}...", markup=False, highlight=False, style="dim")


@dataclass
class _TrainingProgress(TrainerCallback):
    """Moves a progress bar with the steps of a training, and shows its loss."""

    progress: Progress
    title: str

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.task = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if logs and "base_loss" in logs:
            self.progress.update(self.task, description=f"{self.title}, loss {logs['base_loss']:.3g}")


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def _corpus(folder: Path, progress: Progress) -> Path:
    if not folder.exists():
        task = progress.add_task("Reading the installed docstrings", total=100)
        write_corpus(
            docstring_corpus(progress=lambda share: progress.update(task, completed=round(100 * share))), folder
        )
    return folder


def _trained_run(
    settings: Recipe,
    backbone: str,
    k: float,
    corpus: Path,
    evaluator: SparseInformationRetrievalEvaluator,
    folder: Path,
    progress: Progress,
) -> tuple[TrainedRun, SparseEncoder]:
    name = f"{backbone}, k = {k:g}"
    output = folder / f"{backbone}-k{k:g}"
    recipe = settings.override(model=backbone_path(backbone), k=k, train=str(corpus / "train.jsonl"))
    began, said = time.perf_counter(), []
    try:
        result = train(recipe, output, callbacks=[_TrainingProgress(progress, f"Training {name}")], progress_bar=False)
        model, history = result.model, result.history
    except CollapseError as error:
        # A collapsed model is a result here: it is evaluated as it was when the guard stopped it.
        said.append(str(error))
        left, history = collapsed_result(output)
        if left is None:
            raise
        model = left
    seconds = time.perf_counter() - began
    task = progress.add_task(f"Evaluating {name}", total=1)
    curve = trace_tradeoff(model, evaluator, LIMITS, batch_size=64)
    progress.update(task, completed=1)
    losses = [(int(row["step"]), float(row["base_loss"])) for row in history if "base_loss" in row]
    return TrainedRun(name, backbone, k, curve[LIMITS.index(None)], curve, losses, seconds, said), model


def _setting(
    recipe: Recipe, corpus: Path, evaluator: SparseInformationRetrievalEvaluator
) -> dict[str, str | int | float]:
    with open(corpus / "train.jsonl", "rb") as lines:
        pairs = sum(1 for _ in lines)
    libraries = ("torch", "transformers", "sentence-transformers")
    return {
        "training pairs": pairs,
        "test documents": len(evaluator.corpus),
        "test queries": len(evaluator.queries),
        "steps": recipe.max_steps or 0,
        "batch size": recipe.batch_size,
        "learning rate": recipe.learning_rate,
        "FLOPS weight": recipe.document_regularizer_weight,
        "tokens a text": recipe.max_seq_length,
        "seed": recipe.seed,
        "threads": torch.get_num_threads(),
        "versions": ", ".join(f"{name} {version(name)}" for name in libraries),
    }


def _rich_table(header: list[str], rows: list[list[str]]) -> Table:
    """The columns that fit a narrow terminal; the report has all of them."""
    shown = [header.index(column) for column in ("model", "nDCG@10", "doc dims", "FLOPS", "at equal cost")]
    table = Table(title="Held-out queries", title_justify="left")
    for i in shown:
        table.add_column(header[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table
