"""The shipped backbones, and the demonstration from the corpus to the answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from sentence_transformers import SparseEncoder
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from st_sparse_rescale import MLMHead
from st_sparse_rescale.cli import app
from st_sparse_rescale.demo import DocstringCorpus, DocstringPair, backbone_path
from st_sparse_rescale.demo import run as demo_run
from tests.tiny_models import TEXTS

BACKBONES = ("bert-mini", "modernbert-mini")


def mean_row_norm(name: str) -> float:
    model = AutoModelForMaskedLM.from_pretrained(backbone_path(name))
    return MLMHead.of(model).decoder.weight.norm(dim=1).mean().item()


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_loads_whole_in_single_precision_and_tied(name):
    model, report = AutoModelForMaskedLM.from_pretrained(backbone_path(name), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert MLMHead.of(model).tied
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(backbone_path(name)))


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_knows_words(name):
    model = AutoModelForMaskedLM.from_pretrained(backbone_path(name)).eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone_path(name))
    inputs = tokenizer("the default [MASK] is none .", return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    best = model(**inputs).logits[0, place].topk(20).indices.tolist()
    assert "value" in tokenizer.convert_ids_to_tokens(best)


def test_the_logs_say_what_the_weights_are():
    for name in BACKBONES:
        last = json.loads((Path(backbone_path(name)) / "pretraining.jsonl").read_text().splitlines()[-1])
        assert mean_row_norm(name) == pytest.approx(last["mean_row_norm"], abs=2e-3)  # stored in half precision


def test_one_head_is_of_usual_scale_and_one_is_large():
    assert mean_row_norm("bert-mini") < 2
    assert mean_row_norm("modernbert-mini") > 10


def test_an_unknown_backbone_is_refused_with_the_names():
    with pytest.raises(ValueError, match="'roberta-mini': choose one of bert-mini, modernbert-mini"):
        backbone_path("roberta-mini")


@pytest.fixture
def small_corpus(monkeypatch):
    pairs = [DocstringPair(f"m{i}:f", " ".join(text.split()[:5]), text) for i, text in enumerate(TEXTS)]
    corpus = DocstringCorpus(train=pairs, dev=pairs[:4], test=pairs[4:])
    monkeypatch.setattr(demo_run, "docstring_corpus", lambda progress: corpus)


SMALL = {"max_steps": 3, "batch_size": 8, "save_steps": 3, "logging_steps": 1}


@pytest.mark.slow
def test_the_demonstration_leaves_a_report_and_a_model_and_goes_on_where_it_was(small_corpus, tmp_path, monkeypatch):
    console = Console(width=200, record=True)
    page = demo_run.run_demo(tmp_path / "out", ["sparse retrieval"], console=console, **SMALL)

    text = page.read_text()
    for row in ("bert-mini, k = 1 |", "modernbert-mini, k = 1 |", "modernbert-mini, k = 16 |", "BM25 |"):
        assert f"| {row}" in text
    for name in ("loss.png", "tradeoff.png"):
        assert f"({name})" in text
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    first_losses = [run["losses"][0][1] for run in results["runs"]]
    assert first_losses[1] > 4 * first_losses[2] > 0  # the division by 16 acts from the first step on
    assert all(len(run["curve"]) == len(demo_run.LIMITS) for run in results["runs"])
    assert 0 <= results["bm25"]["ndcg@10"] <= 1
    assert SparseEncoder(str(tmp_path / "out" / "model")).encode(["paris"]).shape[-1] == 8192
    shown = console.export_text()
    assert "terms (expansion)" in shown
    assert all(f"  {place}. m" in shown for place in (1, 2, 3))

    def no_training(*args, **kwargs):
        raise AssertionError("what is finished is not trained again")

    monkeypatch.setattr(sys.modules["st_sparse_rescale.training.train"], "SparseEncoderTrainer", no_training)
    again = demo_run.run_demo(tmp_path / "out", ["sparse retrieval"], console=Console(quiet=True), **SMALL)
    assert (
        json.loads((again.parent / "results.json").read_text())["runs"][2]["metrics"] == results["runs"][2]["metrics"]
    )


def test_the_command_answers_with_the_examples_where_nobody_types(monkeypatch, tmp_path):
    asked = []

    def run_demo(output, queries, console, **settings):
        assert settings in ({}, {"seed": 1})
        asked.append(queries(["one", "two"]) if callable(queries) else queries)
        return output / "report.md"

    monkeypatch.setattr(demo_run, "run_demo", run_demo)
    runner = CliRunner()
    assert runner.invoke(app, ["demo", "--output", str(tmp_path)]).exit_code == 0
    assert runner.invoke(app, ["demo", "--output", str(tmp_path), "--query", "mine", "--set", "seed=1"]).exit_code == 0
    assert asked == [["one", "two"], ["mine"]]
