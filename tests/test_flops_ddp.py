"""Two processes with a share of the batch each give the value and gradients of one process with all of it."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerControl, TrainerState

from st_sparse_rescale.losses import (
    DFFlopsLoss,
    FlopsLoss,
    JointFlopsLoss,
    L1Loss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from st_sparse_rescale.training.callbacks import CollapseGuard
from st_sparse_rescale.whole import written_whole
from tests.two_processes import leave_together

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]  # one pair of processes for all tests

REGULARIZERS = {"flops": FlopsLoss, "l1": L1Loss, "df-flops": DFFlopsLoss}
SHARES = {"equal": (4, 4), "unequal": (3, 5), "one empty": (0, 8)}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 10).double()

    def forward(self, features):
        return {"sentence_embedding": self.layer(features["x"]).relu().log1p()}


def batch(columns: int = 1) -> torch.Tensor:
    return torch.randn(columns, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def penalise(model: nn.Module, name: str, rows: torch.Tensor) -> torch.Tensor:
    return REGULARIZERS[name](model).compute_loss_from_embeddings(model({"x": rows})["sentence_embedding"])


def full_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """All terms of a training step; the ranking loss sees the other process's documents, too."""
    ranking = SparseMultipleNegativesRankingLoss(model, gather_across_devices=True)
    loss = SpladeLoss(
        model,
        JointFlopsLoss(model, ranking, weight=0.5),
        document_regularizer_weight=0.3,
        query_regularizer_weight=0.2,
        document_regularizer=FlopsLoss(model),
        query_regularizer=DFFlopsLoss(model),
    )
    return sum(loss([{"x": column} for column in rows]).values())


def measure(wrap, rows: slice) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Value and gradient of every case, for one share of the batch."""
    results = {}
    for name in REGULARIZERS:
        model = wrap(Encoder())
        value = penalise(model, name, batch()[0][rows])
        value.backward()
        results[name] = (value.detach(), next(model.parameters()).grad.clone())
    return results


def guarded_step(rank: int) -> tuple[bool, bool, dict[str, float]]:
    """One step in which the loss of the second process is not finite: is it skipped here, and what is logged?"""
    encoder = Encoder()
    model = DistributedDataParallel(encoder)
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(model, ranking, 1e-3, math.nan if rank else 1e-3, FlopsLoss(model), FlopsLoss(model))
    guard = CollapseGuard(loss, patience=1)
    state, control = TrainerState(max_steps=2, log_history=[{}]), TrainerControl()
    event = {"model": encoder, "optimizer": torch.optim.SGD(encoder.parameters())}
    guard.on_train_begin(None, state, control, **event)
    sum(loss([{"x": column} for column in batch(2)[:, 4 * rank : 4 * rank + 4]]).values()).backward()
    guard.on_pre_optimizer_step(None, state, control, **event)
    skipped = encoder.layer.weight.grad is None
    guard.on_step_end(None, state, control, **event)
    guard.on_log(None, state, control, logs=(logs := {"loss": 1.0}))
    return skipped, control.should_training_stop, logs


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    results = {}
    for share, sizes in SHARES.items():
        begin = sum(sizes[:rank])
        results[share] = measure(DistributedDataParallel, slice(begin, begin + sizes[rank]))
    model = DistributedDataParallel(Encoder())
    value = full_loss(model, batch(3)[:, 4 * rank : 4 * rank + 4])
    value.backward()
    dist.all_reduce(value.detach_())
    results["full"] = (value / 2, next(model.parameters()).grad)
    results["guard"] = guarded_step(rank)
    with written_whole(Path(folder, f"{rank}.pt")) as file:
        torch.save(results, file)
    leave_together([Path(folder, f"{rank}.pt") for rank in range(2)])


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("ddp")
    mp.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_regularisers_equal_one_process(two_processes, name, share):
    value, gradient = measure(lambda model: model, slice(0, 8))[name]
    assert value > 0
    for results in two_processes:
        torch.testing.assert_close(results[share][name][0], value)
        torch.testing.assert_close(results[share][name][1], gradient)


def test_the_guard_sees_the_whole_batch_and_all_processes_stop_together(two_processes):
    with torch.no_grad():
        used = (Encoder()({"x": batch(2)})["sentence_embedding"] != 0).float().sum(dim=-1).mean(dim=-1)
    for results in two_processes:
        skipped, stopped, logs = results["guard"]
        assert skipped
        assert stopped
        assert logs["query_active_dims"] == round(used[0].item(), 1)
        assert logs["document_active_dims"] == round(used[1].item(), 1)


def test_a_whole_training_loss_equals_one_process(two_processes):
    model = Encoder()
    value = full_loss(model, batch(3))
    value.backward()
    for results in two_processes:
        torch.testing.assert_close(results["full"][0], value.detach())
        torch.testing.assert_close(results["full"][1], model.layer.weight.grad)
