"""Trainer callbacks: a guard against collapse, and the schedule of the joint FLOPS weight."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from st_sparse_rescale.losses import JointFlopsLoss

logger = logging.getLogger(__name__)


class CollapseError(RuntimeError):
    """Training was stopped because the model collapsed; the message says what to change."""


class _Statistics:
    """What some forward passes of the loss showed: sums over the texts of each side, and losses that are not finite."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5)  # query dims, queries, document dims, documents, non-finite losses

    def add(self, active: Tensor, loss: Tensor) -> None:
        """Count one batch of this process: active dimensions, shape (columns, rows), and its loss."""
        sides = [active[0].sum(), active[0].new_tensor(active[0].numel())]
        sides += [active[1:].sum(), active[1:].new_tensor(active[1:].numel())]
        self._sums = self._sums.to(active.device) + torch.stack([*sides, (~loss.isfinite()).float()])

    def reduce(self) -> None:
        """Add up over processes and fetch from the accelerator."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._sums)
        self._sums = self._sums.cpu()

    def merge(self, other: _Statistics) -> None:
        """Add those of another span of training."""
        self._sums = self._sums + other._sums

    @property
    def query_dims(self) -> float:
        """Mean active dimensions of a query; NaN if none was seen."""
        return (self._sums[0] / self._sums[1]).item()

    @property
    def document_dims(self) -> float:
        """Mean active dimensions of a document; NaN if none was seen."""
        return (self._sums[2] / self._sums[3]).item()

    @property
    def nonfinite(self) -> bool:
        """Whether any loss was NaN or infinite."""
        return self._sums[4].item() > 0


class CollapseGuard(TrainerCallback):
    """Stops a training whose embeddings are all zero or all dense, or whose loss is NaN or infinite.

    Every symptom must last ``patience`` optimiser steps in a row. Then training saves a checkpoint and ends, and
    :attr:`message` says what happened and what to change; :func:`~st_sparse_rescale.training.train.train` raises it as
    :class:`CollapseError`. All processes see the same statistics and stop together.

    A step whose loss is not finite leaves the weights alone, and a checkpoint never holds weights that are not finite:
    what is saved can be resumed.

    The guard also logs the mean number of active dimensions, ``query_active_dims`` and ``document_active_dims``.

    It watches the forward passes of the loss and of the model through PyTorch's public hooks, so it works with any
    ``SpladeLoss`` and sees the loss before ``logging_nan_inf_filter`` hides it.

    Args:
        loss: The loss that the trainer uses; its first column must be the queries.
        patience: Steps in a row.
        dense_share: Share of the vocabulary from which on an embedding counts as dense.
        dense_after: Share of the training before which density is no symptom: the regulariser's weights are still
            rising. Give the ``warmup_ratio`` of the regulariser weight scheduler.
        k: The divisor of the head, for the message.

    Example::

        guard = CollapseGuard(loss)
        trainer = SparseEncoderTrainer(model, args, train_dataset=dataset, loss=loss, callbacks=[guard])
        trainer.train()
        if guard.message:
            raise CollapseError(guard.message)
    """

    def __init__(
        self,
        loss: SpladeLoss,
        *,
        patience: int = 50,
        dense_share: float = 0.95,
        dense_after: float = 1 / 3,
        k: float | str | None = None,
    ) -> None:
        self.loss = loss
        self.patience = patience
        self.dense_share = dense_share
        self.dense_after = dense_after
        self.k = k
        self.message: str | None = None
        self._hooks: list[RemovableHandle] = []
        self._watching = False
        self._active: list[Tensor] = []  # active dimensions of each text, in the current forward pass of the loss
        self._vocabulary = 0
        self._step = _Statistics()
        self._since_log = _Statistics()
        self._streaks = {"zero": 0, "dense": 0, "nonfinite": 0}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start watching."""
        self.on_train_end()  # an earlier training may have ended in an exception
        self._hooks = [
            self.loss.register_forward_pre_hook(self._before_loss),
            self.loss.register_forward_hook(self._after_loss),
            kwargs["model"].register_forward_hook(self._after_model),
        ]

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_loss(self, loss: nn.Module, inputs: Any) -> None:
        # GradCache runs the model again in the backward pass, and evaluation runs it alone: neither is counted.
        self._watching = self.loss.model.training
        self._active = []

    def _after_model(self, model: nn.Module, inputs: Any, output: dict[str, Tensor]) -> None:
        if self._watching:
            embeddings = output["sentence_embedding"].detach()
            self._vocabulary = embeddings.shape[1]
            self._active.append((embeddings != 0).sum(dim=1))

    def _after_loss(self, loss: nn.Module, inputs: Any, output: dict[str, Tensor] | Tensor) -> None:
        if not self._watching:
            return
        self._watching = False
        parts = output.values() if isinstance(output, dict) else [output]
        total = torch.stack([part.detach().float() for part in parts]).sum()
        # Losses embed column after column, all of equal length, however they are cut into forward passes.
        counts = torch.cat(self._active).float()
        columns = len(inputs[0])
        self._step.add(counts.reshape(columns, len(counts) // columns), total)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Complete the statistics of this step; drop its gradients if its loss is not finite."""
        self._step.reduce()
        if self._step.nonfinite:
            logger.warning("Step %d: the loss is not finite; the weights are left alone.", state.global_step + 1)
            kwargs["optimizer"].zero_grad()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count symptoms, stop training where one lasts, and refuse to save weights that are not finite."""
        step, self._step = self._step, _Statistics()
        self._since_log.merge(step)
        dense = self.dense_share * self._vocabulary
        after_warmup = state.global_step > self.dense_after * state.max_steps
        symptoms = {
            "nonfinite": step.nonfinite,
            "zero": 0 in (step.query_dims, step.document_dims),
            "dense": after_warmup and max(step.query_dims, step.document_dims) >= dense,
        }
        for symptom, present in symptoms.items():
            self._streaks[symptom] = self._streaks[symptom] + 1 if present else 0
        # A training must not end in a collapse that had no time to last.
        ended = state.global_step >= state.max_steps
        lasting = [
            symptom
            for symptom, streak in self._streaks.items()
            if streak >= (1 if ended and symptom != "nonfinite" else self.patience)
        ]
        if lasting and self.message is None:
            self.message = self._diagnose(lasting[0], step, state)
            logger.error(self.message)
            control.should_training_stop = True
            control.should_save = True
        if control.should_save and not _is_finite(kwargs["model"]):
            logger.error("Step %d: the weights are not finite; no checkpoint is written.", state.global_step)
            control.should_save = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the mean active dimensions since the last log line, and bring the history up to the logs."""
        if logs is None or "loss" not in logs or math.isnan(self._since_log.query_dims):
            return
        logs["query_active_dims"] = round(self._since_log.query_dims, 1)
        logs["document_active_dims"] = round(self._since_log.document_dims, 1)
        # The trainer wrote its history before any callback could add to the logs.
        state.log_history[-1].update(logs)
        self._since_log = _Statistics()

    def _diagnose(self, symptom: str, step: _Statistics, state: TrainerState) -> str:
        weights = {
            "query": ("query_regularizer_weight", self.loss.query_regularizer_weight),
            "document": ("document_regularizer_weight", self.loss.document_regularizer_weight),
        }
        k = "k" if self.k is None else f"k (now {self.k:g})" if isinstance(self.k, float | int) else f"k ({self.k})"
        begin = f"Training stopped at step {state.global_step}: for {self._streaks[symptom]} steps "
        if symptom == "nonfinite":
            return (
                begin + "the loss was NaN or infinite; these steps left the weights alone. "
                f"Raise {k}, if the scores are very large, lower learning_rate, or use precision fp32."
            )
        if symptom == "zero":
            side = "query" if step.query_dims == 0 else "document"
            name, weight = weights[side]
            return (
                begin + f"the {_plural(side)} were all zero, so nothing can be learnt or retrieved. "
                f"Lower {name} (now {weight or 0:g}); if it is low already, lower learning_rate or raise {k}."
            )
        side = "query" if step.query_dims >= self.dense_share * self._vocabulary else "document"
        name, weight = weights[side]
        dims = step.query_dims if side == "query" else step.document_dims
        return (
            begin + f"the {_plural(side)} had {dims:.0f} of {self._vocabulary} dimensions active. "
            f"Raise {name} (now {weight or 0:g}), or {k}, if the scores are very large, too."
        )


def _is_finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _plural(side: str) -> str:
    return {"query": "queries", "document": "documents"}[side]


class JointFlopsScheduler(TrainerCallback):
    """Raises the weight of a :class:`JointFlopsLoss` quadratically from 0, as the regularisers' weights rise.

    The weight follows from the step alone, so a resumed training goes on where it stood.

    Args:
        joint: The loss; its weight is the maximum.
        warmup_ratio: Share of the training after which the maximum is reached, above 0.

    Example::

        joint = JointFlopsLoss(model, ranking_loss, weight=1e-3)
        trainer = SparseEncoderTrainer(..., callbacks=[JointFlopsScheduler(joint)])
    """

    def __init__(self, joint: JointFlopsLoss, warmup_ratio: float = 1 / 3) -> None:
        self.joint = joint
        self.maximum = joint.weight
        self.warmup_ratio = warmup_ratio

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the weight of the step to come."""
        warmup_steps = max(1, int(state.max_steps * self.warmup_ratio))
        self.joint.weight = self.maximum * min(1.0, state.global_step / warmup_steps) ** 2
