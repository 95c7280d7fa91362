"""The learning rate of the head's matrix: in the optimiser, and against the division of the matrix."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import TrainerCallback

from st_sparse_rescale import MLMHead
from st_sparse_rescale.training import Recipe, RecipeError, train
from st_sparse_rescale.training.head_learning_rate import head_learning_rate
from st_sparse_rescale.training.train import build_loss, build_model
from tests.tiny_models import TEXTS

ROWS = [{"query": " ".join(text.split()[:4]), "positive": text} for text in TEXTS]
LEARNING_RATE = 1e-3


def recipe(model, tmp_path, **settings) -> Recipe:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    defaults = {"model": str(model), "train": str(file), "k": 4, "strategy": "norm", "learning_rate": LEARNING_RATE}
    defaults |= {"regularizer_warmup": 1}  # nothing counts as collapsed in so few steps
    return Recipe.load("sweep", **(defaults | {"batch_size": 4, "max_steps": 2} | settings))


class _Groups(TrainerCallback):
    """Notes, before training, the optimiser's groups and the head's matrix."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.matrix = MLMHead.of(kwargs["model"][0].model).decoder.weight
        self.groups = [(group["initial_lr"], group["params"]) for group in kwargs["optimizer"].param_groups]

    def rates(self, parameter) -> list[float]:
        return [rate for rate, parameters in self.groups for other in parameters if other is parameter]


@pytest.mark.parametrize("architecture", ["bert", "eurobert"])
@pytest.mark.parametrize(("factor", "expected"), [(1, 1), (3, 3), ("k", 4)])
def test_the_matrix_alone_has_the_rate_times_the_factor(architecture, factor, expected, checkpoint, tmp_path):
    seen = _Groups()
    settings = {"strategy": "weight", "head_learning_rate_factor": factor}
    train(recipe(checkpoint(architecture), tmp_path, **settings), tmp_path / "out", callbacks=[seen])
    assert seen.rates(seen.matrix) == [pytest.approx(expected * LEARNING_RATE)]
    others = [(p, rate) for rate, group in seen.groups for p in group if p is not seen.matrix]
    assert others
    assert {rate for _, rate in others} == {LEARNING_RATE}


def test_the_recipe_records_and_shows_the_factor(checkpoint, tmp_path):
    trained = recipe(checkpoint("bert"), tmp_path, head_learning_rate_factor="k")
    result = train(trained, tmp_path / "out")
    assert Recipe.load(result.folder / "recipe.yaml").head_learning_rate_factor == "k"
    table = trained.table()
    names, values = (list(column.cells) for column in table.columns[:2])
    assert values[names.index("head_learning_rate_factor")] == "k"


@pytest.mark.parametrize("wrong", [0, -1, "auto", float("inf"), True])
def test_an_impossible_factor_is_refused(wrong):
    with pytest.raises(RecipeError, match=r'head_learning_rate_factor is .* above 0, or "k"'):
        Recipe(head_learning_rate_factor=wrong)


def test_a_matrix_that_is_not_trained_is_an_error(checkpoint, tmp_path):
    settings = recipe(checkpoint("bert"), tmp_path)
    model = build_model(settings)
    MLMHead.of(model[0].model).decoder.weight.requires_grad_(False)
    with pytest.raises(RecipeError, match=r"factor is 3, .*decoder\.weight\) is not trained: .*leave the factor at 1"):
        head_learning_rate(build_loss(settings, model), model, 3, LEARNING_RATE)


def _trained_decoder(checkpoint, tmp_path, strategy: str, factor: float) -> list[torch.Tensor]:
    """The effective matrix of an untied head, W / k, at first and after some steps of Adam on nothing but it."""
    settings = recipe(checkpoint("eurobert"), tmp_path, strategy=strategy)
    model = build_model(settings).double().requires_grad_(False)
    matrix = MLMHead.of(model[0].model).decoder.weight.requires_grad_(True)
    loss = build_loss(settings, model)
    adam = torch.optim.Adam([matrix], lr=factor * LEARNING_RATE, eps=1e-300)
    queries, documents = (model.preprocess([row[side] for row in ROWS]) for side in ("query", "positive"))
    divisor = settings.k if strategy == "norm" else 1
    effective = [matrix.detach() / divisor]
    for _ in range(5):
        adam.zero_grad()
        sum(loss([dict(queries), dict(documents)]).values()).backward()
        adam.step()
    return [*effective, matrix.detach() / divisor]


def test_norm_with_the_factor_k_trains_the_matrix_as_weight_does(checkpoint, tmp_path):
    assert not MLMHead.of(build_model(recipe(checkpoint("eurobert"), tmp_path))[0].model).tied
    weight = _trained_decoder(checkpoint, tmp_path, "weight", 1)
    norm = _trained_decoder(checkpoint, tmp_path, "norm", 4)
    torch.testing.assert_close(norm[0], weight[0], rtol=0, atol=0)
    assert (weight[1] - weight[0]).abs().max() > 2 * LEARNING_RATE
    torch.testing.assert_close(norm[1], weight[1], rtol=0, atol=1e-6)
    alone = _trained_decoder(checkpoint, tmp_path, "norm", 1)
    assert (alone[1] - weight[1]).abs().max() > LEARNING_RATE
