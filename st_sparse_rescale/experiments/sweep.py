"""Run a sweep: many small trainings, a few at a time, each kept as soon as it is done."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from st_sparse_rescale.demo.corpus import docstring_corpus, write_corpus
from st_sparse_rescale.experiments.experiment import key_in, key_of, run_experiment
from st_sparse_rescale.experiments.grid import load_grid
from st_sparse_rescale.experiments.results import append_result, read_results
from st_sparse_rescale.quiet import quiet_libraries

DOCSTRINGS = "docstrings"
NUM_DOCUMENTS, NUM_QUERIES = 1_500, 300


class SweepError(ValueError):
    """Runs of a sweep that failed; the message says how many, and why the first did."""


def run_sweep(
    config: str | Path,
    output: str | Path,
    *,
    jobs: int = 1,
    collections: Sequence[str | Path] = (),
    work: str | Path = "build/sweep",
    console: Console | None = None,
) -> Path:
    """Run what a sweep describes and the output lacks: the same call again goes on with a killed sweep.

    Every run trains on the docstring corpus and is evaluated on a sample of its test split and on the given
    collections, which it never saw. Each run has one thread.

    Args:
        config: The description, see `load_grid`.
        output: JSON Lines file that receives one line a run, see `run_experiment`.
        jobs: Runs at a time, each in a process of its own.
        collections: Further folders to evaluate on, in BEIR's layout.
        work: Folder for the corpus.
        console: Where to show progress.

    Returns:
        The output file.

    Raises:
        ValueError: The description or a folder cannot be used.
        SweepError: Some runs failed, other than by a collapse; the others are done and kept.

    Example:
        ::

            run_sweep("experiments/scale.yaml", "experiments/results/scale.jsonl", jobs=2)
    """
    recipes, output = load_grid(config), Path(output)
    corpus = _corpus(Path(work) / "corpus")
    sources = {DOCSTRINGS: corpus / "test", **{Path(folder).resolve().name: folder for folder in collections}}
    output.parent.mkdir(parents=True, exist_ok=True)
    done = [key_in(result) for result in read_results(output)]
    missing = [recipe for recipe in recipes if key_of(recipe, sources) not in done]
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        _pool(jobs) as pool,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        task = progress.add_task(output.stem, total=len(recipes), completed=len(recipes) - len(missing))
        futures = {pool.submit(run_experiment, recipe, corpus / "train.jsonl", sources): recipe for recipe in missing}
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                failures.append(f"{futures[future].model}, k = {futures[future].k}: {error}")
            else:
                append_result(output, future.result())
            progress.advance(task)
    if failures:
        raise SweepError(f"{len(failures)} of {len(missing)} runs failed, the first with: {failures[0]}")
    return output


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Processes that share nothing with this one, so that libraries may have started threads here."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet_single_thread)


def _quiet_single_thread() -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    quiet_libraries()


def _corpus(folder: Path) -> Path:
    """The docstring corpus with a sample of its test split, made once."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        corpus = docstring_corpus()
        sample = random.Random(0).sample(corpus.test, min(NUM_DOCUMENTS, len(corpus.test)))
        write_corpus(replace(corpus, test=sample), folder, num_queries=NUM_QUERIES)
    return folder
