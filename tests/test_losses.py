"""Regularisers against hand-computed values, against sentence-transformers' own, and inside its losses."""

from __future__ import annotations

import copy
import doctest
import importlib
import math

import pytest
import torch
from sentence_transformers.sparse_encoder import losses as stock
from torch import Tensor, nn

from st_sparse_rescale import losses
from st_sparse_rescale.losses import (
    CachedSpladeLoss,
    DFFlopsLoss,
    FlopsLoss,
    JointFlopsLoss,
    L1Loss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)

TOY = torch.tensor([[1.0, 0.0], [3.0, 2.0]])


class ToyEncoder(nn.Module):
    """The part of a SparseEncoder that losses see: features in, non-negative (rows, V) embeddings out."""

    def __init__(self, tokens: int = 20, vocabulary: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(tokens, vocabulary)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": self.table(features["input_ids"]).amax(dim=1).relu().log1p()}


def columns(rows: int = 6, n: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (n, rows, 4), generator=generator)
    return [{"input_ids": column, "attention_mask": torch.ones_like(column)} for column in ids]


@pytest.mark.parametrize("module", ["global_mean", "flops", "l1", "df_flops"])
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"st_sparse_rescale.losses.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_sparse_loss_of_sentence_transformers_is_here():
    assert set(stock.__all__) <= set(losses.__all__)
    assert losses.SpladeLoss is stock.SpladeLoss
    assert losses.FlopsLoss is not stock.FlopsLoss


# --- FLOPS ---


def test_flops_by_hand():
    assert FlopsLoss(None).compute_loss_from_embeddings(TOY).item() == 5.0  # (4 / 2)**2 + (2 / 2)**2


@pytest.mark.parametrize("threshold", [None, 0, 2, 100])
def test_flops_on_one_process_is_the_stock_one(threshold):
    ours = torch.rand(8, 30).sub(0.5).relu().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    value = FlopsLoss(None, threshold).compute_loss_from_embeddings(ours)
    expected = stock.FlopsLoss(None, threshold).compute_loss_from_embeddings(theirs)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_flops_of_half_precision_is_summed_in_float32():
    rows = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)  # a running bfloat16 sum would stop at 256
    value = FlopsLoss(None).compute_loss_from_embeddings(rows)
    assert value.dtype == torch.float32
    assert value.item() == 1.0


@pytest.mark.parametrize("regularizer", [FlopsLoss, L1Loss, DFFlopsLoss])
@pytest.mark.parametrize("rows", [0, 5])
def test_no_rows_or_no_activity_cost_nothing_and_stay_finite(regularizer, rows):
    embeddings = torch.zeros(rows, 9, requires_grad=True)
    value = regularizer(None).compute_loss_from_embeddings(embeddings)
    value.backward()
    assert value.item() == 0.0
    assert torch.isfinite(embeddings.grad).all()


# --- L1 and DF-FLOPS ---


def test_l1_by_hand():
    assert L1Loss(None).compute_loss_from_embeddings(TOY).item() == 3.0  # ((1 + 0) + (3 + 2)) / 2


def test_df_flops_weight_is_nothing_half_and_all_at_its_three_anchors():
    used_by = torch.tensor([0, 2, 10])  # of 10 documents; alpha is a fifth
    embeddings = (torch.arange(10)[:, None] < used_by).float()
    value = DFFlopsLoss(None, alpha=0.2, beta=3.0).compute_loss_from_embeddings(embeddings)
    assert value.item() == pytest.approx((0.0 * 0.0) ** 2 + (0.5 * 0.2) ** 2 + (1.0 * 1.0) ** 2)


def test_df_flops_against_the_formula_of_the_paper():
    embeddings = torch.rand(50, 40, dtype=torch.float64).sub(0.5).relu().requires_grad_()
    alpha, beta = 0.1, 2.0
    expected = 0.0
    for term in range(40):
        share = (embeddings[:, term] > 0).double().mean().item()
        weight = 1 / (1 + (share ** (math.log(2) / math.log(alpha)) - 1) ** beta) if share else 0.0
        expected += (weight * embeddings[:, term].mean().item()) ** 2
    value = DFFlopsLoss(None, alpha, beta).compute_loss_from_embeddings(embeddings)
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_df_flops_remembers_training_batches_and_ignores_evaluation():
    penalty = DFFlopsLoss(None, momentum=0.5)
    batches = [torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])]
    for batch in batches:
        penalty.compute_loss_from_embeddings(batch.requires_grad_())
    # The weighted mean of (1, 1/2) and (1/2, 0), the last batch counting twice.
    expected = torch.tensor([(1 * 1 + 2 * 0.5) / 3, (1 * 0.5 + 2 * 0) / 3])
    torch.testing.assert_close(penalty.document_frequency, expected)
    penalty.compute_loss_from_embeddings(torch.ones(2, 2))
    torch.testing.assert_close(penalty.document_frequency, expected)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"alpha": 0}, "alpha is 0"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"beta": -1}, "beta is -1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"momentum": 1}, "momentum is 1"),
    ],
)
def test_df_flops_refuses_impossible_settings(settings, named):
    with pytest.raises(ValueError, match=named):
        DFFlopsLoss(None, **settings)


# --- joint FLOPS ---


def test_joint_flops_is_the_mean_score_of_all_pairs():
    queries, positives, negatives = torch.rand(3, 4, 11).sub(0.4).relu().unbind()
    model = ToyEncoder()
    ranking = SparseMultipleNegativesRankingLoss(model)
    joint = JointFlopsLoss(model, ranking, weight=0.5)
    parts = joint.compute_loss_from_embeddings([queries, positives, negatives], None)
    documents = torch.cat([positives, negatives])
    torch.testing.assert_close(parts["joint_flops_loss"], 0.5 * (queries @ documents.T).mean())
    torch.testing.assert_close(
        parts["base_loss"], ranking.compute_loss_from_embeddings([queries, positives, negatives], None)
    )


def test_joint_flops_refuses_a_negative_weight_and_a_loss_it_cannot_call():
    for weight in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"weight is {weight}"):
            JointFlopsLoss(None, SparseMultipleNegativesRankingLoss(None), weight=weight)
    with pytest.raises(ValueError, match="Linear has no compute_loss_from_embeddings"):
        JointFlopsLoss(None, nn.Linear(1, 1), weight=1)


# --- inside SpladeLoss and CachedSpladeLoss ---


def build(kind, model, regularizer, joint=0.0, **kwargs):
    ranking = SparseMultipleNegativesRankingLoss(model)
    return kind(
        model,
        JointFlopsLoss(model, ranking, joint) if joint else ranking,
        document_regularizer_weight=0.3,
        query_regularizer_weight=0.2,
        document_regularizer=regularizer(model),
        query_regularizer=regularizer(model),
        **kwargs,
    )


@pytest.mark.parametrize("joint", [0.0, 0.7])
@pytest.mark.parametrize("regularizer", [FlopsLoss, L1Loss, DFFlopsLoss])
def test_cached_equals_uncached(regularizer, joint):
    plain, cached = ToyEncoder(), ToyEncoder()
    expected = build(SpladeLoss, plain, regularizer, joint)(columns())
    actual = build(CachedSpladeLoss, cached, regularizer, joint, mini_batch_size=2)(columns())
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name].detach(), expected[name].detach())
    sum(expected.values()).backward()
    sum(actual.values()).backward()
    torch.testing.assert_close(cached.table.weight.grad, plain.table.weight.grad)


def test_the_model_card_shows_regularisers_by_name_and_cites_them():
    model = ToyEncoder()
    assert "document_regularizer" not in build(SpladeLoss, model, FlopsLoss).get_config_dict()  # FLOPS is the default
    config = build(SpladeLoss, model, DFFlopsLoss, joint=0.7).get_config_dict()
    assert config["document_regularizer"] == config["query_regularizer"] == "DFFlopsLoss"
    assert config["loss"].get_config_dict()["weight"] == 0.7
    assert DFFlopsLoss(model, alpha=0.2).get_config_dict() == {"alpha": 0.2, "beta": 10.0, "momentum": 0.99}
    for regularizer in (FlopsLoss(model), L1Loss(model), DFFlopsLoss(model), config["loss"]):
        assert regularizer.citation.strip().startswith("@")


@pytest.mark.parametrize("regularizer", [L1Loss(None), DFFlopsLoss(None)])
def test_a_regulariser_does_not_train_alone(regularizer):
    with pytest.raises(NotImplementedError, match="pass it to SpladeLoss"):
        regularizer(columns(), None)


def test_the_joint_term_does_not_train_alone():
    model = ToyEncoder()
    with pytest.raises(NotImplementedError, match="needs SpladeLoss or CachedSpladeLoss around it"):
        JointFlopsLoss(model, SparseMultipleNegativesRankingLoss(model), weight=1.0)(columns(), None)


def zero_queries(model: ToyEncoder) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        model.table.weight[0] = -1.0
    features = columns()
    features[0] = {"input_ids": torch.zeros(6, 4, dtype=torch.long), "attention_mask": torch.ones(6, 4)}
    return features


def test_each_side_has_its_own_weight():
    """With silent queries the query weight is idle, and the document weight doubles the document term only."""

    def parts(document_weight: float, query_weight: float) -> dict[str, float]:
        model = ToyEncoder()
        features = zero_queries(model)
        loss = build(SpladeLoss, model, FlopsLoss)
        loss.document_regularizer_weight, loss.query_regularizer_weight = document_weight, query_weight
        return {name: value.item() for name, value in loss(features).items()}

    once = parts(0.3, 0.2)
    assert once["query_regularizer_loss"] == 0.0
    assert parts(0.3, 0.4) == once
    twice = parts(0.6, 0.2)
    assert twice["document_regularizer_loss"] == pytest.approx(2 * once["document_regularizer_loss"])
    assert twice["base_loss"] == once["base_loss"]


def test_all_zero_embeddings_keep_the_loss_finite():
    model = ToyEncoder()
    with torch.no_grad():
        model.table.weight.fill_(-1.0)
    loss = build(SpladeLoss, model, FlopsLoss)(columns())
    total = sum(loss.values())
    total.backward()
    assert total.item() == pytest.approx(math.log(6 * 2))  # every one of the 12 documents is equally good
    assert torch.isfinite(model.table.weight.grad).all()


def test_the_contrastive_scale_of_dot_products_is_one_over_the_temperature_and_one_by_default():
    ranking = SparseMultipleNegativesRankingLoss(None)
    assert ranking.scale == 1.0
    assert SparseMultipleNegativesRankingLoss(None, scale=4.0).temperature == 0.25
    embeddings = list(torch.rand(2, 5, 8).unbind())
    scores = embeddings[0] @ embeddings[1].T
    expected = nn.functional.cross_entropy(scores, torch.arange(5))
    torch.testing.assert_close(ranking.compute_loss_from_embeddings(copy.copy(embeddings), None), expected)
