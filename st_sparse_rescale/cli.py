"""The command line: every command calls one function of the package."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.prompt import Prompt

from st_sparse_rescale.many_values import ManyValues

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

# Under torchrun and accelerate every process runs the same command; one of them speaks.
console = Console(quiet=os.environ.get("RANK", "0") != "0")
errors = Console(stderr=True, quiet=console.quiet)


@app.callback()
def main() -> None:
    """Rescale the MLM head of a masked language model and train it as a SPLADE retriever."""


@app.command()
def train(
    model: Annotated[str | None, typer.Option(help="Checkpoint to train: a folder or a hub name.")] = None,
    train: Annotated[str | None, typer.Option(help="Training data: .jsonl, .csv, .parquet or a hub name.")] = None,
    k: Annotated[str | None, typer.Option(help="Divisor of the head's logits; 1 leaves the head alone.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How k is applied: weight or norm.")] = None,
    eval: Annotated[str | None, typer.Option(help="Evaluation data: a BEIR folder, or nanobeir.")] = None,
    config: Annotated[str, typer.Option(help="Recipe: paper, distil or a YAML file.")] = "paper",
    output: Annotated[Path, typer.Option(help="Folder for recipe, checkpoints and model.")] = Path("splade-out"),
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a process and batch.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of shuffling and dropout.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the recipe, as name=value; repeatable.")
    ] = None,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Train a SPLADE model, or go on with a killed training: the same command again resumes it.

    Flags replace the recipe's settings. The resolved recipe is printed and saved with the model.
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
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Train the shipped mini backbones with and without rescaling on installed docstrings, and compare them.

    At the end the best model answers three queries, typed in where a person is there to type.
    """
    from st_sparse_rescale.demo.run import run_demo

    with _one_message(debug):
        _quiet_libraries()
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
        list[str] | None, typer.Option(help="Limits of active dimensions to trace, such as 16 64 256 none.")
    ] = None,
    bm25: Annotated[bool, typer.Option("--bm25", help="Evaluate BM25 beside it.")] = False,
    compare: Annotated[str | None, typer.Option(help="Another sparse model, to compare query by query.")] = None,
    hybrid: Annotated[str | None, typer.Option(help="A dense model, to fuse with.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for TREC run files.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file for the results; a killed evaluation goes on from it.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of the judgements.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Local copies of nanobeir or beir.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first problem with the data.")] = False,
    exclude_self: Annotated[
        bool | None, typer.Option(help="Leave out the document whose id is the query's; by default as is customary.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens a text, instead of the model's limit.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts encoded at once.")] = 32,
    permutations: Annotated[int, typer.Option(help="Sign patterns drawn by the comparison's test.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of that draw.")] = 0,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Evaluate a sparse model on collections, or go on with a killed evaluation."""
    from st_sparse_rescale.evaluation.evaluate import evaluate as run
    from st_sparse_rescale.evaluation.report import parse_limits, show

    with _one_message(debug):
        _quiet_libraries()
        results = run(
            model,
            data,
            metrics=metrics,
            max_active_dims=parse_limits(max_active_dims or ["none"]),
            bm25=bm25,
            compare_with=compare,
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
        show(results, console, plot_dir=run_dir or (output.parent if output else None))


def _typed_queries(examples: Sequence[str]) -> list[str]:
    """Ask for as many queries as there are examples; Enter takes the example, as does a terminal without a person."""
    if not sys.stdin.isatty():
        return list(examples)
    return [Prompt.ask("Your query", default=example, console=console) for example in examples]


def _quiet_libraries() -> None:
    """Leave the screen to our own progress bars."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


def _settings(texts: list[str]) -> dict[str, Any]:
    """Parse name=value, where the value is written as in a recipe."""
    settings = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--set {text} must be written name=value, such as --set scale=20.")
        try:
            settings[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {text}: the value is not valid YAML ({error}).") from error
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
    from st_sparse_rescale.training import CollapseError

    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, CollapseError) as error:
        if debug:
            raise
        errors.print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
