"""The command line: what it prints, what it passes on, and that no error is a traceback."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from st_sparse_rescale.cli import app
from tests.tiny_models import TEXTS


@pytest.fixture
def run(tmp_path, checkpoint):
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"query": text[:20], "positive": text}) for text in TEXTS), encoding="utf-8"
    )

    def invoke(*flags: str, **given: str | None):
        defaults = {"model": str(checkpoint("bert")), "train": str(tmp_path / "train.jsonl"), "k": "2"}
        defaults |= {"output": str(tmp_path / "out"), "max-steps": "2", "batch-size": "4"}
        options = [f"--{name}={value}" for name, value in (defaults | given).items() if value is not None]
        return CliRunner().invoke(app, ["train", *options, *flags])

    return invoke


def test_train_prints_its_resolved_recipe_and_leaves_a_model(run, tmp_path):
    result = run("--set", "max_seq_length=16", "--set", "learning_rate=1e-4", "--set", "logging_steps=1")
    assert result.exit_code == 0, result.output
    shown = {
        line.split("│")[0].strip(): line.split("│")[1].strip() for line in result.output.splitlines() if "│" in line
    }
    assert (shown["k"], shown["k_source"], shown["max_steps"], shown["batch_size"]) == ("2", "given", "2", "4")
    assert (shown["max_seq_length"], shown["learning_rate"]) == ("16", "0.0001")
    assert shown["document_regularizer_weight"] == "0.0001"
    assert "SparseEncoder(" in result.output
    assert (tmp_path / "out" / "model" / "modules.json").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": "0"}, "k=0"),
        ({"k": "-3"}, "k=-3"),
        ({"k": "nan"}, "k=nan"),
        ({"k": "big"}, "k='big'"),
        ({"model": "/no/such/model"}, "'/no/such/model' cannot be loaded: it is no folder"),
        ({"model": None}, "names no model: give a checkpoint (--model)"),
        ({"train": None}, "names no training data: give a file or a hub name (--train)"),
        ({"train": "none.jsonl"}, "none.jsonl: cannot be read"),
        ({"config": "papr"}, "no recipe 'papr'"),
        ({"strategy": "logits"}, "strategy is 'logits', but must be one of weight, norm"),
        ({"set": "batchsize=4"}, "unknown setting 'batchsize': did you mean 'batch_size'?"),
        ({"set": "batch_size"}, "--set batch_size must be written name=value"),
        ({"set": "columns={query: question}"}, "there is no column 'question' to be the query"),
        ({"batch-size": "0"}, "batch_size is 0, but must be a whole number of at least 1"),
        ({"output": "/proc/nothing"}, "output folder /proc/nothing cannot be written"),
        ({"eval": "nowhere"}, "nowhere is neither a folder in BEIR's layout"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(run, given, message):
    result = run(**given)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_markup_in_a_message_is_printed_as_it_is(run, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"[bold]": "q", "[/]": "p"}')
    assert "the columns are ['[bold]', '[/]']" in run().stderr


def test_a_full_gpu_is_one_message_with_the_mend(run, monkeypatch):
    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    result = run()
    assert result.exit_code == 2
    assert "Error: CUDA out of memory. Take a smaller batch size" in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_debug_shows_the_traceback(run):
    with pytest.raises(ValueError, match="k=0"):
        raise run("--debug", k="0").exception


def test_a_collapse_is_an_error_too(run, monkeypatch):
    import st_sparse_rescale.training as training

    def collapse(recipe, output):
        raise training.CollapseError("Training stopped at step 3")

    monkeypatch.setattr(training, "train", collapse)
    result = run()
    assert result.exit_code == 2
    assert "Error: Training stopped at step 3" in result.stderr
