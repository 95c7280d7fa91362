"""k="auto": measured, chosen, applied as the number would be, and told wherever k is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from transformers import AutoModelForMaskedLM, ModernBertConfig
from typer.testing import CliRunner

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling, choose_k, measure_head
from st_sparse_rescale.calibration import choice
from st_sparse_rescale.cli import app
from st_sparse_rescale.rescaling import recorded_rescale
from st_sparse_rescale.training import Recipe, RecipeError, train
from st_sparse_rescale.training.train import build_model, resolve
from tests.tiny_models import TEXTS

Checkpoint = Callable[[str], Path]


def chosen_for(path: Path, texts: Any = None, strategy: Any = "weight") -> choice.KChoice:
    return choose_k(measure_head(Transformer(str(path), transformer_task="fill-mask"), texts), strategy)


def model_of(path: Path, **arguments: Any) -> SparseEncoder:
    return SparseEncoder(modules=[RescaledMLMTransformer(path, **arguments), SpladePooling()], device="cpu")


# The module


@pytest.mark.parametrize(("strategy", "texts"), [("weight", None), ("norm", TEXTS)])
def test_auto_is_the_number_that_is_chosen(checkpoint: Checkpoint, strategy: Any, texts: Any) -> None:
    path = checkpoint("modernbert")
    expected = chosen_for(path, texts, strategy)
    assert expected.k > 1
    auto = model_of(path, k="auto", strategy=strategy, calibration_texts=texts)
    given = model_of(path, k=expected.k, strategy=strategy)
    assert auto[0].k_choice == expected
    assert recorded_rescale(auto).k == expected.k
    assert torch.equal(auto.encode(list(TEXTS)).to_dense(), given.encode(list(TEXTS)).to_dense())


def test_the_reason_is_told_by_config_card_and_repr(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = model_of(checkpoint("modernbert"), k="auto", calibration_texts=TEXTS)
    reason = model[0].k_choice.reason
    assert f"use k={model[0].k_choice.k:g}" in caplog.text
    model.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["mlm_head_rescale"]["reason"] == reason
    assert f"reason: {reason})" in (tmp_path / "README.md").read_text()
    assert repr(reason) in repr(model[0])
    assert type(SparseEncoder(str(tmp_path))[0]) is Transformer


def test_a_given_reason_is_recorded(checkpoint: Checkpoint) -> None:
    assert recorded_rescale(model_of(checkpoint("bert"), k=2, reason="a sweep")).reason == "a sweep"
    assert recorded_rescale(model_of(checkpoint("bert"), k=2)).reason == "given"


def test_a_recorded_rescale_is_kept_and_that_is_said(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(checkpoint("modernbert"), k=3)
    model.save_pretrained(str(tmp_path))
    again = model_of(tmp_path, k="auto")
    assert "records k=3 (weight), which is kept" in caplog.text
    assert again[0].k_choice is None
    assert recorded_rescale(again) == recorded_rescale(model)
    assert torch.equal(again.encode(list(TEXTS)).to_dense(), model.encode(list(TEXTS)).to_dense())


def test_a_choice_of_1_leaves_every_byte_alone_and_is_said(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("bert")
    with caplog.at_level(logging.INFO):
        transformer = RescaledMLMTransformer(path, k="auto", calibration_texts=TEXTS)
    assert transformer.k_choice.k == 1  # a larger one would disturb the encoder
    assert recorded_rescale(transformer.model) is None
    assert "leave k=1" in caplog.text
    assert transformer.k_choice.reason in repr(transformer)
    before, after = AutoModelForMaskedLM.from_pretrained(path).state_dict(), transformer.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_whose_k_was_chosen_can_be_pickled(checkpoint: Checkpoint) -> None:
    import pickle

    model = model_of(checkpoint("modernbert"), k="auto", calibration_texts=TEXTS)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy.encode(list(TEXTS)).to_dense(), model.encode(list(TEXTS)).to_dense())


# Training


@pytest.fixture
def recipe(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Recipe]:
    rows = [{"query": " ".join(text.split()[:4]), "positive": text} for text in TEXTS]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def make(**settings: Any) -> Recipe:
        defaults = {"model": str(checkpoint("modernbert")), "train": str(tmp_path / "train.jsonl"), "k": "auto"}
        defaults |= {"batch_size": 4, "max_seq_length": 24, "max_steps": 2, "logging_steps": 1}
        return Recipe.load("paper", **(defaults | settings))

    return make


def test_a_recipe_is_resolved_by_measuring_its_training_texts(
    recipe: Callable[..., Recipe], checkpoint: Checkpoint
) -> None:
    resolved = resolve(recipe())
    texts = [" ".join(text.split()[:4]) for text in TEXTS] + list(TEXTS)
    backbone = Transformer(str(checkpoint("modernbert")), transformer_task="fill-mask", max_seq_length=24)
    expected = choose_k(measure_head(backbone, texts))
    assert (resolved.k, resolved.k_source) == (expected.k, expected.reason)
    assert resolve(resolved) == resolved == resolve(recipe())
    assert recorded_rescale(build_model(resolved)).reason == expected.reason


def test_training_with_auto_tells_k_and_reason_and_goes_on(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    result = train(recipe(), tmp_path / "out", progress_bar=False)
    assert result.recipe.k > 1
    record = json.loads((result.folder / "config.json").read_text())["mlm_head_rescale"]
    assert (record["k"], record["reason"]) == (result.recipe.k, result.recipe.k_source)
    assert Recipe.load(tmp_path / "out" / "recipe.yaml") == result.recipe
    assert result.recipe.k_source in (result.folder / "README.md").read_text()
    again = train(recipe(), tmp_path / "out", progress_bar=False)  # the same run: nothing is refused
    assert again.history == result.history


def test_auto_for_one_model_type(recipe: Callable[..., Recipe]) -> None:
    assert resolve(recipe(k={"modernbert": "auto"})).k == resolve(recipe()).k
    assert resolve(recipe(k={"bert": "auto", "modernbert": 5})).k == 5


def test_auto_keeps_what_the_checkpoint_records(recipe: Callable[..., Recipe]) -> None:
    rescaled = ModernBertConfig(mlm_head_rescale={"k": 8.0, "strategy": "norm", "reason": "given"})
    resolved = recipe().resolved(rescaled)
    assert (resolved.k, resolved.strategy, resolved.k_source) == (8.0, "norm", "recorded in the checkpoint")
    assert recipe().resolved(ModernBertConfig()).k == "auto"  # still to be measured


def test_another_k_has_another_source(recipe: Callable[..., Recipe]) -> None:
    resolved = resolve(recipe())
    assert resolve(resolved.override(k=4)).k_source == "given"


def test_auto_needs_training_texts(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="names no training data"):
        resolve(recipe(train=None))


def test_the_command_takes_auto(recipe: Callable[..., Recipe], checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = {"model": checkpoint("modernbert"), "train": tmp_path / "train.jsonl", "k": "auto"}
    options |= {"output": tmp_path / "out", "max-steps": 1, "batch-size": 4}
    result = CliRunner().invoke(app, ["train", *(f"--{name}={value}" for name, value in options.items())])
    assert result.exit_code == 0, result.output
    saved = Recipe.load(tmp_path / "out" / "recipe.yaml")
    assert saved.k > 1
    assert saved.k_source.startswith("a text's weights have a root mean square of")
