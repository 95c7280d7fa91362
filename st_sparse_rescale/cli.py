"""The command line: every command calls one function of the package."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.prompt import Prompt

from st_sparse_rescale.many_values import ManyValues
from st_sparse_rescale.quiet import quiet_libraries

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

# Under torchrun and accelerate every process runs the same command; one of them speaks.
console = Console(quiet=os.environ.get("RANK", "0") != "0")
errors = Console(stderr=True, quiet=console.quiet)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback()
def main() -> None:
    """Rescale the MLM head of a masked language model and train it as a SPLADE retriever."""


@app.command()
def train(
    model: Annotated[str | None, typer.Option(help="Checkpoint to train: a folder or a hub name.")] = None,
    train: Annotated[
        str | None, typer.Option(help="Training data: a .jsonl, .csv, .tsv or .parquet file, or a hub name.")
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(help="What the head is divided by: a number, 1 to leave it alone, or auto to measure it."),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="What k divides: weight (the head's matrix) or norm (the final norm).")
    ] = None,
    eval: Annotated[
        str | None, typer.Option(help="Evaluation data, for every checkpoint: a BEIR folder, or nanobeir[:a,b].")
    ] = None,
    config: Annotated[
        str, typer.Option(help="Recipe: paper, distil, distil-kl, inference-free or a YAML file.")
    ] = "paper",
    output: Annotated[Path, typer.Option(help="Folder for recipe, checkpoints and model.")] = Path("splade-out"),
    epochs: Annotated[float | None, typer.Option(help="Passes over the data, instead of the recipe's steps.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per batch, in each process.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of shuffling and dropout.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the recipe, as name=value; repeatable.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a SPLADE model, or go on with a killed training: the same command again resumes it.

    Flags replace the recipe's settings. All settings are printed, with their meaning, and saved with the model, which
    is in OUTPUT/model.
    """
    from st_sparse_rescale.training import Recipe
    from st_sparse_rescale.training import train as run
    from st_sparse_rescale.training.train import resolve

    with _one_message(debug):
        _show_log()
        flags = {
            "model": model,
            "train": train,
            "k": _number(k),
            "strategy": strategy,
            "eval": eval,
            "epochs": epochs,
            "max_steps": max_steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "save_steps": save_steps,
            "seed": seed,
        }
        given = {name: value for name, value in flags.items() if value is not None}
        recipe = resolve(Recipe.load(config, **given).override(**_settings(setting or [])))
        console.print(recipe.table())
        result = run(recipe, output)
        console.print(f"Saved. Load it with SparseEncoder({str(result.folder)!r}).")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for corpus, runs, report and the best model.")] = Path(
        "demo-out"
    ),
    query: Annotated[list[str] | None, typer.Option(help="Query to answer at the end; repeatable.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the demo's recipe, as name=value; repeatable.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train the shipped mini backbones with and without rescaling on installed docstrings, and compare them.

    At the end the best model answers three queries, typed in where a person is there to type.
    """
    from st_sparse_rescale.demo.run import run_demo

    with _one_message(debug):
        quiet_libraries()
        page = run_demo(output, query or _typed_queries, console=console, **_settings(setting or []))
        console.print(f"\nThe report: {page}")


@app.command(cls=ManyValues)
def evaluate(
    model: Annotated[str, typer.Argument(help="Checkpoint to evaluate: a folder or a hub name.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="Collections: BEIR folders, nanobeir[:a,b], beir[:a,b], msmarco-dev, trec-dl-2019, irds:ID..."
        ),
    ],
    metrics: Annotated[list[str] | None, typer.Option(help="Such as ndcg@10 mrr@10 recall@100.")] = None,
    max_active_dims: Annotated[
        list[str] | None,
        typer.Option(help="Numbers of terms to cut vectors to, such as 16 64 256 none; several are plotted."),
    ] = None,
    bm25: Annotated[bool, typer.Option("--bm25", help="Evaluate BM25 beside the model.")] = False,
    compare: Annotated[list[str] | None, typer.Option(help="Other sparse models, to compare query by query.")] = None,
    hybrid: Annotated[str | None, typer.Option(help="A dense model, evaluated alone and fused with the model.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for TREC run files.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file for the results; a killed evaluation goes on from it.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Judgements to use, qrels/SPLIT.tsv; by default test, else dev.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Local copies of nanobeir or beir.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first problem with the data.")] = False,
    exclude_self: Annotated[
        bool | None, typer.Option(help="Leave out the document with the query's id; by default for ArguAna and Quora.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per text, instead of the model's limit.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts encoded at once.")] = 32,
    permutations: Annotated[int, typer.Option(min=1, help="Sign patterns drawn by the test of --compare.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of that test.")] = 0,
    debug: Debug = False,
) -> None:
    """Evaluate a sparse model on collections, or go on with a killed evaluation.

    Options that take several values take them in a row.
    """
    from st_sparse_rescale.evaluation.evaluate import evaluate as run
    from st_sparse_rescale.evaluation.report import parse_limits, show

    with _one_message(debug):
        quiet_libraries()
        results = run(
            model,
            data,
            metrics=metrics,
            max_active_dims=parse_limits(max_active_dims or ["none"]),
            bm25=bm25,
            compare_with=compare or (),
            hybrid_with=hybrid,
            run_dir=run_dir,
            output=output,
            split=split,
            data_dir=data_dir,
            strict=strict,
            exclude_self=exclude_self,
            max_length=max_length,
            batch_size=batch_size,
            permutations=permutations,
            seed=seed,
            show_progress_bar=not console.quiet,
        )
        show(results, console, plot_dir=run_dir or (output.parent if output else Path()))


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="YAML file with recipe and grids, such as experiments/scale.yaml.")],
    output: Annotated[Path, typer.Option(help="JSON Lines file, one line per run; finished runs are not done again.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each with one thread.")] = 1,
    collection: Annotated[list[Path] | None, typer.Option(help="BEIR folder to evaluate on, too; repeatable.")] = None,
    work: Annotated[Path, typer.Option(help="Folder for the training corpus.")] = Path("build/sweep"),
    debug: Debug = False,
) -> None:
    """Train and evaluate mini models over grids of settings, or go on with a killed sweep."""
    from st_sparse_rescale.experiments import run_sweep

    with _one_message(debug):
        quiet_libraries()
        run_sweep(config, output, jobs=jobs, collections=collection or [], work=work, console=console)


@app.command()
def mine(
    train: Annotated[str, typer.Option(help="Pairs of query and positive: a file or a hub name.")],
    output: Annotated[Path, typer.Option(help="Training file to write, .jsonl.")],
    bm25: Annotated[
        bool, typer.Option("--bm25", help="Search by BM25; this, --sparse or --dense must be given.")
    ] = False,
    sparse: Annotated[str | None, typer.Option(help="Search by this sparse model.")] = None,
    dense: Annotated[str | None, typer.Option(help="Search by this dense model.")] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Documents to search beside the positives, such as BEIR's corpus.jsonl.")
    ] = None,
    cross_encoder: Annotated[
        str | None, typer.Option(help="A cross-encoder to score candidates anew for the filters.")
    ] = None,
    num_negatives: Annotated[int, typer.Option(help="Negatives per query.")] = 4,
    range_min: Annotated[int, typer.Option(help="How many of the best documents to skip.")] = 0,
    range_max: Annotated[
        int | None, typer.Option(help="Last rank to consider; by default range-min + 10 times num-negatives.")
    ] = None,
    max_score: Annotated[float | None, typer.Option(help="What a negative may score at most.")] = None,
    min_score: Annotated[float | None, typer.Option(help="What a negative must score at least.")] = None,
    absolute_margin: Annotated[
        float | None, typer.Option(help="By how much the positive must outscore a negative.")
    ] = None,
    relative_margin: Annotated[float | None, typer.Option(help="Likewise, as a share of the positive's score.")] = None,
    sampling: Annotated[str, typer.Option(help="Which of the documents left: the top ones or random ones.")] = "top",
    seed: Annotated[int, typer.Option(help="Seed of the random choice.")] = 0,
    column: Annotated[
        list[str] | None, typer.Option(help="Role and name of a column, as query=question; repeatable.")
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Folder to keep a sparse model's index in.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts encoded, or pairs scored, at once.")] = 32,
    debug: Debug = False,
) -> None:
    """Find hard negatives for training, or go on with a killed search: the same command again resumes it."""
    from st_sparse_rescale.training import mine as run

    with _one_message(debug):
        quiet_libraries()
        mined = run(
            train,
            output,
            bm25=bm25,
            sparse=sparse,
            dense=dense,
            corpus=corpus,
            cross_encoder=cross_encoder,
            columns=_settings(column or [], "--column"),
            index=index,
            batch_size=batch_size,
            show_progress_bar=not console.quiet,
            num_negatives=num_negatives,
            range_min=range_min,
            range_max=range_max,
            max_score=max_score,
            min_score=min_score,
            absolute_margin=absolute_margin,
            relative_margin=relative_margin,
            sampling=sampling,
            seed=seed,
        )
        console.print(f"{mined.rows:,} rows in {mined.file}; {mined.dropped:,} dropped for want of negatives.")


@app.command()
def score(
    train: Annotated[str, typer.Option(help="Queries with positives and negatives: a file or a hub name.")],
    output: Annotated[Path, typer.Option(help="Training file to write, .jsonl.")],
    cross_encoder: Annotated[
        str | None, typer.Option(help="The teacher, a cross-encoder; this or --sparse must be given.")
    ] = None,
    sparse: Annotated[str | None, typer.Option(help="The teacher, a sparse model.")] = None,
    num_negatives: Annotated[int | None, typer.Option(help="Negatives kept per row; by default all.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Role and name of a column, as query=question; repeatable.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs scored, or texts encoded, at once.")] = 32,
    debug: Debug = False,
) -> None:
    """Add a teacher's scores for distillation, or go on with a killed call: the same command again resumes it."""
    from st_sparse_rescale.training import score as run

    with _one_message(debug):
        quiet_libraries()
        file = run(
            train,
            output,
            cross_encoder=cross_encoder,
            sparse=sparse,
            columns=_settings(column or [], "--column"),
            num_negatives=num_negatives,
            batch_size=batch_size,
            show_progress_bar=not console.quiet,
        )
        console.print(f"Scored: {file}")


@app.command(cls=ManyValues)
def encode(
    model: Annotated[str, typer.Argument(help="Checkpoint: a folder or a hub name.")],
    corpus: Annotated[str, typer.Argument(help="A .jsonl, .csv, .tsv or .parquet file, a BEIR folder, or a hub name.")],
    output: Annotated[Path, typer.Argument(help="Folder for the shards; a killed encoding goes on from it.")],
    queries: Annotated[bool, typer.Option("--queries", help="The texts are queries, not documents.")] = False,
    devices: Annotated[list[str] | None, typer.Option(help="Such as cuda:0 cuda:1; by default the first.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes per device; with --ray, in all.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Encode by Ray, here or on the cluster of RAY_ADDRESS.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts encoded at once.")] = 32,
    shard_size: Annotated[int, typer.Option(min=1, help="Texts per file: what a kill can lose.")] = 16_384,
    max_active_dims: Annotated[int | None, typer.Option(min=1, help="Terms kept per text.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per text, instead of the model's limit.")
    ] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of the ids, if it is not _id, id, docid...")] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column of the texts, if it is not text, contents, document...")
    ] = None,
    title_column: Annotated[
        str | None, typer.Option(help="Column put in front of the text, if it is not title.")
    ] = None,
    parent_column: Annotated[str | None, typer.Option(help="Column of the document that a chunk belongs to.")] = None,
    debug: Debug = False,
) -> None:
    """Encode a corpus into Parquet files, or go on with a killed encoding: the same command again resumes it."""
    from st_sparse_rescale.serving import Corpus, encode_corpus

    with _one_message(debug):
        quiet_libraries()
        shards = encode_corpus(
            model,
            Corpus(corpus, id_column, text_column, title_column, parent_column),
            output,
            task="query" if queries else "document",
            devices=devices or (),
            processes=processes,
            ray=ray,
            batch_size=batch_size,
            shard_size=shard_size,
            max_active_dims=max_active_dims,
            max_length=max_length,
            show_progress_bar=not console.quiet,
        )
        console.print(f"{len(shards):,} texts of {shards.dimension:,} dimensions in {output}.", soft_wrap=True)


@app.command()
def export(
    shards: Annotated[Path, typer.Argument(help="Folder that encode wrote.")],
    output: Annotated[Path, typer.Argument(help="Folder to make.")],
    to: Annotated[
        str,
        typer.Option(
            help="anserini, elasticsearch[-rank-features], milvus, opensearch, pgvector, qdrant, seismic or vespa."
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the collection, index or table.")] = "documents",
    top_k: Annotated[int | None, typer.Option(help="Keep so many of each document's heaviest terms.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Keep weights of at least this.")] = None,
    mass: Annotated[
        float | None, typer.Option(help="Keep the heaviest terms that hold this share of a document's weight.")
    ] = None,
    combine: Annotated[bool, typer.Option("--combine", help="Combine a document's chunks by the maximum.")] = False,
    separator: Annotated[
        str, typer.Option(help="With --combine: what stands between a document's id and its chunk's number.")
    ] = "#",
    levels: Annotated[int, typer.Option(help="The largest weight, where the engine takes integers.")] = 255,
    queries: Annotated[
        Path | None,
        typer.Option(help="Queries (encode --queries) for the comparison; by default some of the documents."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write encoded documents as the files of a search engine, and compare their top 10 with exact search."""
    from st_sparse_rescale.serving import export as run

    with _one_message(debug):
        report = run(
            shards,
            to,
            output,
            name=name,
            top_k=top_k,
            threshold=threshold,
            mass=mass,
            combine=combine,
            separator=separator,
            levels=levels,
            queries=queries,
            show_progress_bar=not console.quiet,
        )
        console.print(report.summary(), soft_wrap=True)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Masked language model or SPLADE model: a folder or a hub name.")],
    texts: Annotated[
        Path | None, typer.Option(help="Texts like those to train on: .txt, .jsonl, .csv, .tsv or .parquet.")
    ] = None,
    strategy: Annotated[Literal["weight", "norm"], typer.Option(help="How k would be applied.")] = "weight",
    plot: Annotated[Path | None, typer.Option(help="Image file for a figure of all this.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all measurements as JSON instead.")] = False,
    debug: Debug = False,
) -> None:
    """Measure a head, say whether its scale is a problem, and which k to use."""
    from st_sparse_rescale.calibration import choose_k, measure_head, read_texts
    from st_sparse_rescale.calibration.plot import plot_report
    from st_sparse_rescale.calibration.show import as_json, show

    with _one_message(debug):
        quiet_libraries()
        report = measure_head(model, None if texts is None else read_texts(texts))
        choice = choose_k(report, strategy)
        if json:
            typer.echo(as_json(report, choice))
        else:
            show(report, choice, console)
        if plot is not None:
            plot_report(report, choice, plot)


def _typed_queries(examples: Sequence[str]) -> list[str]:
    """Ask for as many queries as there are examples; Enter takes the example, as does a terminal without a person."""
    if not sys.stdin.isatty():
        return list(examples)
    return [Prompt.ask("Your query", default=example, console=console) for example in examples]


def _settings(texts: list[str], option: str = "--set") -> dict[str, Any]:
    """Parse name=value, where the value is written as in a recipe."""
    settings = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{option} {text} must be written name=value.")
        try:
            settings[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{option} {text}: the value is not valid YAML ({error}).") from error
    return settings


def _number(text: str | None) -> float | str | None:
    try:
        return text if text is None else float(text)
    except ValueError:
        return text  # "auto", or what the recipe refuses


def _show_log() -> None:
    if console.quiet:
        return
    log = logging.getLogger("st_sparse_rescale")
    log.setLevel(logging.INFO)
    log.addHandler(RichHandler(console=errors, show_path=False, show_time=False))


@contextmanager
def _one_message(debug: bool) -> Iterator[None]:
    """Turn an error that the user can mend into one message and exit code 2."""
    import torch

    from st_sparse_rescale.training import CollapseError

    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, CollapseError, torch.cuda.OutOfMemoryError) as error:
        if debug:
            raise
        message = str(error)
        if isinstance(error, torch.cuda.OutOfMemoryError):
            message += (
                " Take a smaller batch size or shorter texts; in training, --set mini_batch_size=8 keeps the batch."
            )
        errors.print(f"[bold red]Error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
