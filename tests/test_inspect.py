"""The command that says whether a head's scale is a problem: verdict, evidence, and the line of Python to use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling as StockPooling
from transformers import AutoModel
from typer.testing import CliRunner, Result

from st_sparse_rescale import HeadReport, RescaledMLMTransformer, SpladePooling, choose_k, measure_head
from st_sparse_rescale.calibration import read_texts
from st_sparse_rescale.calibration.plot import plot_report
from st_sparse_rescale.cli import app
from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.rescaling import recorded_rescale
from tests.tiny_models import TEXTS, build_tokenizer

Checkpoint = Callable[[str], Path]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    return file


def inspect(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def lines_of(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.strip().splitlines()


def run_line(line: str) -> SparseEncoder:
    names: dict[str, Any] = {
        "SparseEncoder": SparseEncoder,
        "RescaledMLMTransformer": RescaledMLMTransformer,
        "SpladePooling": SpladePooling,
    }
    exec(line, names)
    return names["model"]


def test_the_other_strategy_has_its_own_k_and_stands_in_the_line() -> None:
    lines = lines_of(inspect(backbone_path("bert-mini"), "--strategy", "norm"))
    chosen = choose_k(measure_head(backbone_path("bert-mini")), "norm")
    assert lines[0] == chosen.headline
    assert f'k={chosen.k:g}, strategy="norm")' in lines[-1]
    assert recorded_rescale(run_line(lines[-1])).strategy == "norm"


@pytest.mark.parametrize(
    ("name", "first", "k"), [("bert-mini", "healthy: leave k=1; ", 1), ("modernbert-mini", "scale problem: ", 16)]
)
def test_verdict_evidence_and_the_line_of_python(name: str, first: str, k: float) -> None:
    lines = lines_of(inspect(backbone_path(name)))
    assert lines[0].startswith(first)
    assert f"k={k}" in lines[0]
    assert lines[1].startswith("- ")
    assert lines[1].endswith(("are active", "cosine of two texts is 0.55", "cosine of two texts is 0.68"))
    output = "\n".join(lines)
    assert "tied to the input embeddings" in " ".join(output.split())
    assert "\n64 weight " in output
    assert "\n64 norm " in output
    assert max(map(len, lines[lines.index("") : -1])) <= 80  # tables fit a terminal
    model = run_line(lines[-1])
    recorded = recorded_rescale(model)
    assert (1 if recorded is None else recorded.k) == k


def test_a_missing_decoder_weight_is_told_as_tied(checkpoint: Checkpoint, texts: Path) -> None:
    """ModernBERT checkpoints hold ``decoder.bias``, but no ``decoder.weight``."""
    keys = load_file(checkpoint("modernbert") / "model.safetensors").keys()
    assert "decoder.bias" in keys
    assert "decoder.weight" not in keys
    output = inspect(checkpoint("modernbert"), "--texts", texts).stdout
    assert "decoder (512 x 32), tied to the input embeddings" in output


def test_json_holds_choice_and_report(checkpoint: Checkpoint, texts: Path) -> None:
    found = json.loads("\n".join(lines_of(inspect(checkpoint("modernbert"), "--texts", texts, "--json"))))
    report = measure_head(checkpoint("modernbert"), read_texts(texts))
    assert HeadReport.from_json(json.dumps(found["report"])) == report
    choice = choose_k(report)
    assert (found["choice"]["k"], found["choice"]["verdict"]) == (choice.k, choice.verdict)
    assert tuple(found["choice"]["evidence"]) == choice.evidence


def test_texts_may_be_a_training_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    rows = [{"query": text[:20], "positive": text} for text in TEXTS]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    output = inspect(checkpoint("bert"), "--texts", tmp_path / "train.jsonl").stdout
    assert f"{2 * len(TEXTS)} texts" in output


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot(checkpoint: Checkpoint, texts: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"head.{suffix}"
    lines_of(inspect(checkpoint("modernbert"), "--texts", texts, "--plot", file))
    if suffix == "svg":
        assert "hidden states" not in file.read_text()[:100]
        assert file.read_text().count('<g id="axes_') == 6
    else:
        assert Image.open(file).size == (1440, 768)


def test_what_is_not_varied_is_drawn_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = SparseEncoder(modules=[Transformer(str(checkpoint("bert")), transformer_task="fill-mask"), StockPooling()])
    report = measure_head(model, TEXTS)
    file = plot_report(report, choose_k(report), tmp_path / "head.svg")
    assert file.read_text().count('<g id="axes_') == 1


@pytest.mark.parametrize(
    ("bias", "verdict"), [(-100, "dead: 100% of the texts have no active dimension"), (0, "dense: ")]
)
def test_a_splade_checkpoint_is_judged_as_it_is(
    checkpoint: Checkpoint, texts: Path, tmp_path: Path, bias: float, verdict: str
) -> None:
    """Stock modules, saved; random weights are the densest model of all."""
    transformer = Transformer(str(checkpoint("nomic-bert")), transformer_task="fill-mask")
    with torch.no_grad():
        transformer.model.cls.predictions.decoder.bias.add_(bias)
    SparseEncoder(modules=[transformer, StockPooling()], device="cpu").save_pretrained(str(tmp_path / "splade"))
    lines = lines_of(inspect(tmp_path / "splade", "--texts", texts))
    assert lines[0].startswith(verdict)
    assert lines[-1] == f'model = SparseEncoder("{tmp_path / "splade"}")'
    table = lines[[line.strip() for line in lines].index("As it is") + 1 :]
    assert table[0].split()[:2] == ["active", "rms"]  # no k, which is nothing to choose any more
    assert run_line(lines[-1]).encode(list(TEXTS)).shape[0] == len(TEXTS)


def test_a_rescaled_checkpoint_is_kept(checkpoint: Checkpoint, texts: Path, tmp_path: Path) -> None:
    transformer = RescaledMLMTransformer(checkpoint("modernbert"), k=3, strategy="norm", reason="a sweep")
    transformer.model.save_pretrained(tmp_path / "backbone")
    build_tokenizer("modernbert").save_pretrained(tmp_path / "backbone")
    lines = lines_of(inspect(tmp_path / "backbone", "--texts", texts))
    assert lines[0].startswith("healthy: leave k=3; the checkpoint records it")
    assert "k = 3, strategy norm (a sweep)" in "\n".join(lines)
    assert recorded_rescale(run_line(lines[-1])).k == 3


def test_errors_are_one_message_and_exit_code_2(checkpoint: Checkpoint, texts: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    AutoModel.from_pretrained(checkpoint("bert")).save_pretrained(encoder)
    build_tokenizer("bert").save_pretrained(encoder)
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    training = tmp_path / "training"
    SparseEncoder(str(checkpoint("bert"))).save_pretrained(str(training / "model"))
    cases = [
        ((encoder,), "encoder' holds no trained MLM head"),
        ((training,), f"{training} is the folder of a training: its model is {training / 'model'}."),
        (("/no/such/model",), "/no/such/model"),
        ((checkpoint("bert"), "--texts", blank), "blank.txt holds no texts"),
        ((checkpoint("bert"), "--texts", tmp_path / "absent.txt"), "absent.txt"),
        ((checkpoint("bert"), "--texts", texts, "--plot", tmp_path / "plot.xyz"), "xyz"),
    ]
    for arguments, message in cases:
        result = inspect(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr.startswith("Error: ")
        assert message in " ".join(result.stderr.split()), arguments
        assert "Traceback" not in result.output
