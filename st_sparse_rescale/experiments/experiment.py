"""One run of a sweep: train, evaluate, and say all of it in one record."""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

from st_sparse_rescale.demo.backbones import BACKBONES, backbone_path
from st_sparse_rescale.evaluation.beir import load_evaluator
from st_sparse_rescale.evaluation.tradeoff import best_at_cost, trace_tradeoff
from st_sparse_rescale.training import CollapseError, Recipe, train
from st_sparse_rescale.training.train import collapsed_result

LIMITS = (16, 32, 64, 128, None)
"""Limits of active dimensions, from which the best below a cost is taken."""
COSTS = (10, 20, 50)
"""FLOPS at which runs are compared."""
METRICS = ("ndcg@10", "recall@100", "query_active_dims", "corpus_active_dims", "flops")
CURVE = ("base_loss", "grad_norm", "query_active_dims", "document_active_dims")
LIBRARIES = ("torch", "transformers", "sentence-transformers")
HERE = ("model", "train", "eval", "k_source")
"""Settings that say where things lie, not what is done."""


def key_of(recipe: Recipe, collections: Mapping[str, str | Path]) -> dict[str, Any]:
    """What makes a run the same as another: backbone, settings and what it is evaluated on.

    Args:
        recipe: The recipe, with the model as the sweep names it.
        collections: Name to folder.

    Returns:
        ``backbone``, ``settings`` and ``collections``, of plain JSON values.
    """
    settings = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in HERE}
    return {"backbone": Path(str(recipe.model)).name, "settings": settings, "collections": sorted(collections)}


def key_in(result: dict[str, Any]) -> dict[str, Any]:
    """Read the key of a recorded run; settings that recipes did not have then are as by default.

    Args:
        result: What `run_experiment` returned.

    Returns:
        As `key_of`.
    """
    default = key_of(Recipe(model=result["backbone"]), {})["settings"]
    return {**{name: result[name] for name in ("backbone", "collections")}, "settings": default | result["settings"]}


def run_experiment(recipe: Recipe, train_file: str | Path, collections: Mapping[str, str | Path]) -> dict[str, Any]:
    """Train a model, evaluate it, and describe the run.

    A collapse is a result: the guard's message is recorded, and the model that it stopped is evaluated.

    Args:
        recipe: The recipe; its model is a checkpoint or the name of a shipped mini backbone.
        train_file: The training pairs.
        collections: Name to folder, in BEIR's layout.

    Returns:
        The run's key (see `key_of`) with ``curve`` (lists by log line; the first is that of step 1, before anything was
        learnt, and the gradient norm is that before clipping; None where a number is not finite), ``collapse`` (the
        guard's message or None), ``evaluations`` (by collection: metrics without a limit, and ``ndcg@10_at_flops``, the
        best for at most so many FLOPS), ``seconds`` and ``versions``. Evaluations are None, and the curve empty, where
        not even a checkpoint with finite weights is left.

    Raises:
        ValueError: The checkpoint, the data or a collection cannot be used.
    """
    began = time.perf_counter()
    model_name = str(recipe.model)
    checkpoint = backbone_path(model_name) if model_name in BACKBONES else model_name
    with TemporaryDirectory() as folder:
        model, history, collapse = _trained(recipe.override(model=checkpoint, train=str(train_file)), Path(folder))
    trained = time.perf_counter()
    evaluations = {name: None if model is None else _evaluated(model, source) for name, source in collections.items()}
    logged = [row for row in history if "base_loss" in row]
    curve = {name: [_finite(row[name]) for row in logged] for name in CURVE}
    return {
        **key_of(recipe, collections),
        "curve": {"step": [row["step"] for row in logged], **curve},
        "collapse": collapse,
        "evaluations": evaluations,
        "seconds": {"training": round(trained - began, 1), "evaluation": round(time.perf_counter() - trained, 1)},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }


def _trained(recipe: Recipe, folder: Path) -> tuple[SparseEncoder | None, list[dict[str, Any]], str | None]:
    try:
        result = train(recipe, folder, progress_bar=False)
        return result.model, result.history, None
    except CollapseError as error:
        model, history = collapsed_result(folder)
        return model, history, str(error).partition(" Checkpoints are in ")[0]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _evaluated(model: SparseEncoder, source: str | Path) -> dict[str, Any]:
    evaluator = cast(SparseInformationRetrievalEvaluator, load_evaluator(source, split="test"))
    curve = trace_tradeoff(model, evaluator, LIMITS, batch_size=32)
    whole = curve[LIMITS.index(None)]
    at_cost = {str(cost): round(best_at_cost(curve, cost), 4) for cost in COSTS}
    return {**{name: round(whole[name], 4) for name in METRICS}, "ndcg@10_at_flops": at_cost}
