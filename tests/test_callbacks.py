"""The collapse guard step by step, with the events in the trainer's order, and the weights' schedules."""

from __future__ import annotations

import math

import pytest
import torch
from sentence_transformers.sparse_encoder.callbacks import SpladeRegularizerWeightSchedulerCallback
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState

from st_sparse_rescale.losses import (
    CachedSpladeLoss,
    FlopsLoss,
    JointFlopsLoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from st_sparse_rescale.training.callbacks import CollapseGuard, JointFlopsScheduler

VOCABULARY = 10
ROWS = 4


class Encoder(nn.Module):
    """Row i of the table is the embedding of token i: a test says which dimensions are active by writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, VOCABULARY)
        nn.init.zeros_(self.table.weight)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.table(features["input_ids"]).amax(dim=1).relu()}


def column(*tokens: int) -> dict[str, Tensor]:
    ids = torch.tensor(tokens or (0,) * ROWS)[:, None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Run:
    """A training of as many steps as a test asks for, which calls the guard as the trainer does."""

    def __init__(self, kind=SpladeLoss, query_weight=0.02, **guard) -> None:
        self.model = Encoder()
        extra = {"mini_batch_size": 3} if kind is CachedSpladeLoss else {}
        self.loss = kind(self.model, SparseMultipleNegativesRankingLoss(self.model), 0.03, query_weight, **extra)
        self.guard = CollapseGuard(self.loss, **{"patience": 3, "dense_after": 0.0, **guard})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state = TrainerState(max_steps=100)
        self.control = TrainerControl()
        self.guard.on_train_begin(None, self.state, self.control, model=self.model)

    def activate(self, token: int, dims: int) -> None:
        with torch.no_grad():
            self.model.table.weight[token] = (torch.arange(VOCABULARY) < dims).float()

    def step(self, *batches: list[dict[str, Tensor]], save: bool = False) -> TrainerControl:
        self.control = TrainerControl()
        for batch in batches:
            sum(self.loss(batch).values()).backward()
        event = {"model": self.model, "optimizer": self.optimizer}
        self.guard.on_pre_optimizer_step(None, self.state, self.control, **event)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.control.should_save = save
        self.guard.on_step_end(None, self.state, self.control, **event)
        return self.control

    def log(self) -> dict[str, float]:
        logs = {"loss": 1.0}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.guard.on_log(None, self.state, self.control, logs=logs)
        return logs


@pytest.fixture(autouse=True)
def frozen(monkeypatch):
    """Keep the embeddings as the test wrote them, whatever the optimiser would do."""
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)


KINDS = pytest.mark.parametrize("kind", [SpladeLoss, CachedSpladeLoss])


@KINDS
def test_all_zero_stops_after_patience_and_names_the_weight_to_lower(kind):
    run = Run(kind, k=16.0)
    batch = [column(), column()]
    assert not run.step(batch).should_training_stop
    assert not run.step(batch).should_training_stop
    control = run.step(batch)
    assert control.should_training_stop
    assert control.should_save
    assert run.guard.message == (
        "Training stopped at step 3: for 3 steps the queries were all zero, so nothing can be learnt or retrieved. "
        "Lower query_regularizer_weight (now 0.02); if it is low already, lower learning_rate or raise k (now 16)."
    )
    total = sum(run.loss(batch).values()).item()
    assert total == pytest.approx(math.log(ROWS))


@KINDS
def test_a_training_must_not_end_in_a_collapse_that_had_no_time_to_last(kind):
    run = Run(kind)
    run.state.max_steps = run.state.global_step + 1
    assert run.step([column(), column()]).should_training_stop
    assert "for 1 steps the queries were all zero" in run.guard.message


@KINDS
def test_the_side_that_vanished_is_the_one_named(kind):
    run = Run(kind)
    run.activate(1, dims=2)
    for _ in range(3):
        run.step([column(1, 1, 1, 1), column(), column()])
    assert "the documents were all zero" in run.guard.message
    assert "document_regularizer_weight (now 0.03)" in run.guard.message


@KINDS
def test_some_zero_texts_are_no_collapse_and_a_healthy_step_restarts_the_count(kind):
    run = Run(kind)
    run.activate(1, dims=2)
    zero, healthy = [column(), column()], [column(0, 0, 0, 1), column(1, 0, 0, 0)]
    for batch in (zero, zero, healthy, zero, zero, healthy, healthy, healthy):
        assert not run.step(batch).should_training_stop
    assert run.guard.message is None


@KINDS
def test_all_dense_stops_but_only_once_the_regularisers_have_their_weight(kind):
    run = Run(kind, dense_after=0.05, k=1.0)  # of 100 steps
    run.activate(1, dims=10)
    batch = [column(1, 1, 1, 1), column(1, 1, 1, 1)]
    for _ in range(7):
        assert not run.step(batch).should_training_stop
    assert run.step(batch).should_training_stop
    assert "queries had 10 of 10 dimensions active" in run.guard.message
    assert "Raise query_regularizer_weight (now 0.02), or k (now 1)" in run.guard.message
    almost = Run(kind)
    almost.activate(1, dims=9)
    for _ in range(5):
        assert not almost.step(batch).should_training_stop


@KINDS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights_alone_and_stops(monkeypatch, kind, value):
    monkeypatch.undo()  # this time the optimiser works
    run = Run(kind)
    run.activate(1, dims=2)
    run.activate(2, dims=4)
    before = run.model.table.weight.clone()
    poison = [column(1, 2, 1, 2), column(1, 2, 2, 2)]
    run.loss.query_regularizer_weight = value
    for step in range(3):
        control = run.step(poison, save=True)
        torch.testing.assert_close(run.model.table.weight, before)
        assert control.should_save, "what is saved is still good"
        assert control.should_training_stop == (step == 2)
    assert "the loss was NaN or infinite" in run.guard.message
    assert "Raise k" in run.guard.message
    assert "learning_rate" in run.guard.message


def test_one_bad_batch_among_accumulated_ones_is_enough_to_skip_the_step(monkeypatch):
    monkeypatch.undo()
    run = Run()
    run.activate(1, dims=2)
    good = [column(1, 1, 1, 1), column(1, 0, 0, 0)]
    before = run.model.table.weight.clone()
    with torch.no_grad():
        run.model.table.weight[3] = math.inf
    run.step(good, [column(3, 3, 3, 3), column(3, 3, 3, 3)], good)
    torch.testing.assert_close(run.model.table.weight[:3], before[:3])
    run.step(good, good)
    assert not torch.equal(run.model.table.weight[:3], before[:3])


def test_weights_that_are_not_finite_are_never_saved():
    run = Run()
    run.activate(1, dims=2)
    batch = [column(1, 1, 1, 1), column(1, 1, 1, 1)]
    assert run.step(batch, save=True).should_save
    with torch.no_grad():
        run.model.table.weight[7] = math.nan  # a token of no batch: the loss stays finite
    assert not run.step(batch, save=True).should_save


@KINDS
def test_active_dimensions_are_logged_by_side_since_the_last_line(kind):
    run = Run(kind)
    for token, dims in ((1, 1), (2, 2), (4, 4)):
        run.activate(token, dims)
    run.step([column(1, 1, 1, 1), column(2, 2, 2, 4), column(0, 0, 2, 4)])
    run.step([column(2, 2, 2, 2), column(2, 2, 2, 2), column(2, 2, 2, 2)])
    logs = run.log()
    assert logs["query_active_dims"] == 1.5
    assert logs["document_active_dims"] == 2.0  # (2 + 2 + 2 + 4 + 0 + 0 + 2 + 4) and 8 times 2, of 16
    assert run.state.log_history[-1]["document_active_dims"] == 2.0
    run.step([column(4, 4, 4, 4), column(1, 1, 1, 1)])
    assert run.log()["query_active_dims"] == 4.0


def test_evaluation_and_encoding_are_not_counted():
    run = Run()
    run.activate(1, dims=2)
    run.activate(4, dims=4)
    run.step([column(1, 1, 1, 1), column(1, 1, 1, 1)])
    run.model.eval()
    run.loss([column(4, 4, 4, 4), column(4, 4, 4, 4)])
    run.model(column(4, 4, 4, 4))
    assert run.log()["query_active_dims"] == 2.0


def test_the_guard_works_with_documents_only_and_lets_go_at_the_end():
    run = Run(query_weight=None)
    run.activate(1, dims=2)
    for _ in range(3):
        run.step([column(), column(1, 1, 1, 1)])
    assert "Lower query_regularizer_weight (now 0)" in run.guard.message
    run.guard.on_train_end()
    assert not run.loss._forward_hooks
    assert not run.model._forward_hooks


# --- schedules ---


def weights_at(callback, read, steps: int, fresh_from: int = 0) -> list[float]:
    """The weight in each of the steps from ``fresh_from`` on, for a callback that was made there."""
    state = TrainerState(max_steps=steps, global_step=fresh_from)
    callback.on_train_begin(None, state, TrainerControl())
    weights = []
    for step in range(fresh_from, steps):
        state.global_step = step
        callback.on_step_begin(None, state, TrainerControl())
        weights.append(read())
    return weights


def document_schedule():
    model = Encoder()
    loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), 0.8, 0.4, FlopsLoss(model), FlopsLoss(model))
    return SpladeRegularizerWeightSchedulerCallback(loss, "quadratic", 0.5), lambda: loss.document_regularizer_weight


def joint_schedule():
    joint = JointFlopsLoss(Encoder(), SparseMultipleNegativesRankingLoss(None), 0.8)
    return JointFlopsScheduler(joint, 0.5), lambda: joint.weight


@pytest.mark.parametrize("schedule", [document_schedule, joint_schedule])
def test_a_weight_rises_quadratically_from_nothing_and_goes_on_after_a_resume(schedule):
    weights = weights_at(*schedule(), steps=40)
    assert weights[0] == 0.0
    assert weights[10] == pytest.approx(0.8 / 4)  # half-way up the ramp of 20 steps
    assert weights[20:] == [0.8] * 20
    assert weights == sorted(weights)
    assert weights_at(*schedule(), steps=40, fresh_from=10) == weights[10:]
