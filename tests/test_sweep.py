"""Sweeps: which runs a description holds, that killed sweeps go on, and what a record says."""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForMaskedLM

from st_sparse_rescale.experiments import GridError, load_grid, run_sweep
from st_sparse_rescale.experiments import sweep as sweep_module
from st_sparse_rescale.experiments.experiment import COSTS, CURVE, key_of
from st_sparse_rescale.experiments.results import append_result, read_results
from st_sparse_rescale.training import RecipeError
from tests.tiny_models import TEXTS


def grid_file(folder: Path, *grids: dict) -> Path:
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump({"recipe": "sweep", "grids": list(grids)}, sort_keys=False), encoding="utf-8")
    return file


def settings_of(folder: Path, *grids: dict) -> list[tuple]:
    return [
        (r.model, r.k, r.strategy, r.head_learning_rate_factor, r.seed) for r in load_grid(grid_file(folder, *grids))
    ]


# --- the grid ---


def test_a_grid_is_every_combination_once(tmp_path):
    runs = settings_of(tmp_path, {"model": ["a", "b"], "k": [1, 4], "strategy": ["weight", "norm"], "seed": 3})
    assert runs == [
        (model, k, strategy, 1.0, 3)
        for model in ("a", "b")
        for k, strategy in ((1.0, "weight"), (4.0, "weight"), (4.0, "norm"))
    ]


def test_a_factor_of_k_is_that_number_and_grids_share_runs(tmp_path):
    common = {"model": "a", "strategy": "norm"}
    runs = settings_of(
        tmp_path,
        {**common, "k": [4, 16], "head_learning_rate_factor": "k"},
        {**common, "k": 4, "head_learning_rate_factor": [1, 4]},
    )
    assert [(k, factor) for _, k, _, factor, _ in runs] == [(4, 4), (16, 16), (4, 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grids: [", "cannot be read as YAML"),
        ("recipe: sweep", "must hold `recipe:` and `grids:`"),
        ("grids: [{k: 1}]", "at least a model"),
        ("grids: [{model: a}]\nruns: 3", "'runs' is unknown"),
    ],
)
def test_a_file_that_is_no_grid_is_refused(content, message, tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text(content)
    with pytest.raises(GridError, match=message):
        load_grid(file)


def test_unknown_settings_and_a_k_that_is_no_number_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="unknown setting 'seeds': did you mean 'seed'"):
        load_grid(grid_file(tmp_path, {"model": "a", "seeds": [1]}))
    with pytest.raises(RecipeError, match="needs a number"):
        load_grid(grid_file(tmp_path, {"model": "a", "k": "auto"}))


# --- the file of results ---


def test_results_are_whole_lines_whatever_a_kill_left(tmp_path):
    file = tmp_path / "results.jsonl"
    assert read_results(file) == []
    append_result(file, {"run": 1, "text": "a\u2028b"})
    with open(file, "ab") as torn:
        torn.write(b'{"run": 2, "te')
    assert read_results(file) == [{"run": 1, "text": "a\u2028b"}]
    append_result(file, {"run": 3})
    assert [row["run"] for row in read_results(file)] == [1, 3]
    assert file.read_bytes().count(b"\n") == 2


def test_a_result_that_is_not_json_leaves_the_file_alone(tmp_path):
    file = tmp_path / "results.jsonl"
    append_result(file, {"run": 1})
    with pytest.raises(ValueError, match="JSON"):
        append_result(file, {"loss": math.nan})
    assert read_results(file) == [{"run": 1}]


# --- a sweep ---


def write_jsonl(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def work(tmp_path) -> Path:
    """A work folder whose corpus is tiny."""
    queries = [" ".join(text.split()[:4]) for text in TEXTS]
    test = tmp_path / "work" / "corpus" / "test"
    (test / "qrels").mkdir(parents=True)
    rows = [{"query": query, "positive": text} for query, text in zip(queries, TEXTS, strict=True)]
    write_jsonl(test.parent / "train.jsonl", rows)
    write_jsonl(test / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)])
    write_jsonl(test / "queries.jsonl", [{"_id": f"q{i}", "text": query} for i, query in enumerate(queries)])
    qrels = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(len(TEXTS)))]
    (test / "qrels" / "test.tsv").write_text("\n".join(qrels))
    return tmp_path / "work"


def dead_copy(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint whose vectors are all zero."""
    shutil.copytree(checkpoint, folder)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.cls.predictions.decoder.bias.fill_(-1e4)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_sweep_records_every_run_and_goes_on_where_it_was_killed(checkpoint, work, tmp_path, monkeypatch):
    tiny = {"max_steps": 20, "batch_size": 4, "max_seq_length": 24, "guard_patience": 3}
    models = [str(checkpoint("bert")), str(dead_copy(checkpoint("bert"), tmp_path / "dead"))]
    file, output = grid_file(tmp_path, {"model": models, **tiny}), tmp_path / "results.jsonl"
    quiet = Console(quiet=True)
    monkeypatch.setattr(sweep_module, "_pool", ThreadPoolExecutor)  # spares the imports of new processes

    run_sweep(file, output, work=work, console=quiet)
    results = read_results(output)
    recipes = load_grid(file)
    sources = {"docstrings": "anywhere"}
    assert [{name: row[name] for name in key_of(recipes[0], sources)} for row in results] == [
        key_of(recipe, sources) for recipe in recipes
    ]
    healthy, collapsed = results
    assert healthy["collapse"] is None
    assert healthy["curve"]["step"][:3] == [1, 10, 20]
    assert all(len(healthy["curve"][name]) == 3 for name in CURVE)
    evaluation = healthy["evaluations"]["docstrings"]
    assert 0 < evaluation["ndcg@10"] <= 1
    best = [evaluation["ndcg@10_at_flops"][str(cost)] for cost in COSTS]
    assert best == sorted(best)
    assert collapsed["collapse"].startswith("Training stopped at step")
    assert "Checkpoints" not in collapsed["collapse"]
    assert collapsed["evaluations"]["docstrings"]["query_active_dims"] == 0

    # Killed while it wrote its last line: the runs before it are not done again, and the line is.
    done = output.read_bytes()
    kept = done[: done.rindex(b"\n", 0, -1) + 1]
    output.write_bytes(done[:-100])
    run_sweep(file, output, work=work, console=quiet)
    assert output.read_bytes().startswith(kept)
    again = read_results(output)
    assert again[1]["curve"] == collapsed["curve"]

    # Complete: nothing is run.
    monkeypatch.setattr(sweep_module, "run_experiment", None)
    run_sweep(file, output, work=work, console=quiet)
    assert read_results(output) == again


@pytest.mark.slow
def test_a_run_that_fails_is_an_error_when_the_others_are_kept(checkpoint, work, tmp_path):
    tiny = {"max_steps": 2, "batch_size": 4, "max_seq_length": 24}
    file = grid_file(tmp_path, {**tiny, "model": [str(tmp_path / "absent"), str(checkpoint("bert"))]})
    output = tmp_path / "results.jsonl"
    with pytest.raises(sweep_module.SweepError, match=r"1 of 2 runs failed, the first with: .*absent"):
        run_sweep(file, output, work=work, console=Console(quiet=True))
    assert [row["backbone"] for row in read_results(output)] == [checkpoint("bert").name]
