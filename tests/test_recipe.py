"""Recipes: what they say, what they refuse, and that nothing in them stays hidden."""

from __future__ import annotations

import dataclasses
import doctest
import io
import math

import pytest
import torch
import yaml
from rich.console import Console
from transformers import BertConfig, ModernBertConfig, RobertaConfig, XLMRobertaConfig

from st_sparse_rescale.training import recipe as module
from st_sparse_rescale.training.recipe import RECIPES, Recipe, RecipeError

BUILTIN = ("paper", "distil", "distil-kl", "inference-free")


def printed(recipe: Recipe) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(recipe.table())
    return out.getvalue()


@pytest.mark.parametrize("name", BUILTIN)
def test_every_recipe_prints_all_its_resolved_numbers(name):
    recipe = Recipe.load(name, model="m", train="t").resolved(ModernBertConfig())
    shown = dict(line.split("│")[:2] for line in printed(recipe).splitlines() if line.count("│") == 2)
    shown = {key.strip(): value.strip() for key, value in shown.items()}
    for setting in dataclasses.fields(recipe):
        value = getattr(recipe, setting.name)
        if isinstance(value, float):
            assert float(shown[setting.name]) == pytest.approx(value, rel=1e-5)
        else:
            assert shown[setting.name] == ("-" if value in (None, {}) else str(value))
    assert shown["k"] == "16"
    assert shown["precision"] in ("bf16", "fp32")


@pytest.mark.parametrize("name", BUILTIN)
def test_every_value_of_a_recipe_says_whose_it_is(name):
    for line in (RECIPES / f"{name}.yaml").read_text().splitlines():
        if line and not line.startswith("#") and line != "k:":
            comment = line.partition("#")[2].strip()
            assert comment.startswith(("paper", "SPLADE", "ours")), line


@pytest.mark.parametrize(
    ("config", "k"),
    [(ModernBertConfig(), 16), (RobertaConfig(), 2), (BertConfig(), 1), (BertConfig(model_type="bert"), 1)],
)
def test_k_follows_the_backbone(config, k):
    recipe = Recipe.load("paper").resolved(config)
    assert recipe.k == k
    assert config.model_type in recipe.k_source


def test_a_given_k_wins_over_the_record_and_the_record_over_the_recipe():
    rescaled = ModernBertConfig(mlm_head_rescale={"k": 8.0, "strategy": "norm", "reason": "given"})
    given = Recipe.load("paper", k=4).resolved(rescaled)
    assert (given.k, given.k_source, given.strategy) == (4.0, "given", "weight")
    recorded = Recipe.load("paper").resolved(rescaled)
    assert (recorded.k, recorded.k_source, recorded.strategy) == (8.0, "recorded in the checkpoint", "norm")


def test_an_unknown_backbone_is_not_guessed():
    with pytest.raises(RecipeError, match=r"no k is known for model_type 'xlm-roberta': give k \(--k\)"):
        Recipe.load("paper").resolved(XLMRobertaConfig())
    assert Recipe.load("paper", k=2).resolved(XLMRobertaConfig()).k == 2.0


def test_resolving_twice_changes_nothing():
    once = Recipe.load("paper").resolved(ModernBertConfig())
    assert once.resolved(ModernBertConfig()) == once
    assert once.resolved(BertConfig()) == once


def test_precision_follows_the_gpu(monkeypatch):
    for has_bf16, precision in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_bf16=has_bf16: has_bf16)
        assert Recipe(k=1).resolved(BertConfig()).precision == precision
    assert Recipe(k=1, precision="fp32").resolved(BertConfig()).precision == "fp32"


def test_a_saved_recipe_repeats_the_run(tmp_path):
    recipe = Recipe.load("distil", model="m", columns={"query": "q"}, learning_rate=3e-6, epochs=2).resolved(
        BertConfig()
    )
    recipe.save(tmp_path / "recipe.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe
    assert Recipe.load(tmp_path / "recipe.yaml", seed=1).differences(recipe) == ["seed 1 against 42"]


def test_overrides_win_and_epochs_and_max_steps_exclude_each_other():
    assert Recipe.load("paper").max_steps == 150_000
    by_epochs = Recipe.load("paper", epochs=3)
    assert (by_epochs.epochs, by_epochs.max_steps) == (3.0, None)
    assert by_epochs.override(max_steps=7).epochs is None
    assert Recipe(k=1).resolved(BertConfig()).epochs == 1.0
    assert Recipe(k=1, max_steps=5).resolved(BertConfig()).epochs is None
    with pytest.raises(RecipeError, match="epochs is 1 and max_steps 2: leave one"):
        Recipe.load("paper", epochs=1, max_steps=2)


def test_numbers_in_every_yaml_spelling(tmp_path):
    (tmp_path / "r.yaml").write_text("learning_rate: 2e-5\nscale: 20\nbatch_size: 8\n")
    assert yaml.safe_load("2e-5") == "2e-5"  # why this needs care
    recipe = Recipe.load(tmp_path / "r.yaml")
    assert (recipe.learning_rate, recipe.scale, recipe.batch_size) == (2e-5, 20.0, 8)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("batchsize", "batch_size"),
        ("learning_rte", "learning_rate"),
        ("lr", None),
        ("document_weight", "document_regularizer_weight"),
    ],
)
def test_an_unknown_setting_names_the_nearest(tmp_path, name, near):
    (tmp_path / "r.yaml").write_text(f"{name}: 1\n")
    for load in (lambda: Recipe.load(tmp_path / "r.yaml"), lambda: Recipe.load("paper", **{name: 1})):
        with pytest.raises(RecipeError, match=f"unknown setting '{name}'") as caught:
            load()
        assert (f"did you mean '{near}'?" if near else "the settings are") in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("batch_size", 0, "whole number of at least 1"),
        ("batch_size", 2.5, "whole number"),
        ("batch_size", True, "whole number"),
        ("learning_rate", 0, "a number above 0"),
        ("learning_rate", "fast", "a number above 0"),
        ("learning_rate", math.nan, "a number above 0"),
        ("learning_rate", False, "a number above 0"),
        ("scale", math.inf, "a number above 0"),
        ("query_regularizer_weight", -1e-3, "a number of at least 0"),
        ("regularizer_warmup", 1.5, "above 0 and at most 1"),
        ("loss", "hinge", "one of contrastive, margin_mse, kl_div"),
        ("regularizer", "l2", "one of flops, l1, df_flops"),
        ("precision", "fp16", "one of auto, bf16, fp32"),
        ("trust_remote_code", "yes", "true or false"),
        ("columns", ["query"], "a mapping"),
        ("model", " ", "text"),
    ],
)
def test_impossible_values_are_refused_with_the_reason(setting, value, reason):
    with pytest.raises(RecipeError, match=setting) as caught:
        Recipe.load("paper", **{setting: value})
    assert repr(value) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("k", [0, -1, math.nan, math.inf, "big", True, {"bert": 0}])
def test_impossible_k_is_refused(k):
    with pytest.raises(RecipeError, match="k="):
        Recipe(k=k)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a: [", "not valid YAML"),
        ("- paper", "holds a list"),
        ("just text", "holds a str"),
        ("1: 2", "1 is not the name"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, reason):
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(RecipeError, match=reason):
        Recipe.load(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match=r"no recipe 'papr'.*one of .*distil, .*paper"):
        Recipe.load("papr")


def test_docstring_examples_run():
    result = doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.attempted > 0
    assert result.failed == 0
