"""What the demonstration leaves behind for a person to look at: a page, two plots and the figures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from st_sparse_rescale.evaluation.report import draw_tradeoff
from st_sparse_rescale.evaluation.tradeoff import best_at_cost

METRICS = ("ndcg@10", "mrr@10", "recall@100")
LIMITS = (32, 64, 128, 256, None)
"""Limits of active dimensions at which each model is evaluated."""
EQUAL_COST = 20.0
"""FLOPS at which the models are compared: vectors of very different density say little side by side."""


@dataclass(frozen=True)
class TrainedRun:
    """One backbone, trained and evaluated."""

    name: str
    """Backbone and k, as shown: ``modernbert-mini, k = 16``."""
    backbone: str
    k: float
    metrics: dict[str, float]
    """``ndcg@10``, ``mrr@10``, ``recall@100``, ``query_active_dims``, ``corpus_active_dims``, ``flops``."""
    curve: list[dict[str, float]]
    """The same metrics at each of `LIMITS`."""
    losses: list[tuple[int, float]]
    """(step, ranking loss without regularisers)."""
    seconds: float
    """Duration of the training."""
    warnings: list[str]
    """What the collapse guard said."""


def write_report(
    folder: Path, runs: Sequence[TrainedRun], bm25: dict[str, float], setting: dict[str, str | int | float]
) -> Path:
    """Write ``report.md``, ``loss.png``, ``tradeoff.png`` and ``results.json`` into a folder.

    Args:
        folder: An existing folder.
        runs: The trained runs.
        bm25: The metrics of BM25 on the same queries.
        setting: What the runs share, shown as a table: corpus sizes, steps, batch size, versions.

    Returns:
        The path of ``report.md``.
    """
    batch = int(setting["batch size"])
    _plot_losses(folder / "loss.png", runs, math.log(batch))
    curves = {
        run.name: [(p["flops"], p["ndcg@10"], limit) for p, limit in zip(run.curve, LIMITS, strict=True)]
        for run in runs
    }
    draw_tradeoff(folder / "tradeoff.png", curves, {"BM25": bm25["ndcg@10"]}, "nDCG@10")
    results = {"setting": setting, "bm25": bm25, "runs": [asdict(run) for run in runs]}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    page = folder / "report.md"
    page.write_text(_page(runs, bm25, setting), encoding="utf-8")
    return page


def results_table(runs: Sequence[TrainedRun], bm25: dict[str, float]) -> tuple[list[str], list[list[str]]]:
    """The results as header and rows of text."""
    header = [
        "model",
        "nDCG@10",
        "MRR@10",
        "R@100",
        "query dims",
        "doc dims",
        "FLOPS",
        "loss at step 1",
        "at equal cost",
    ]
    rows = []
    for run in runs:
        m = run.metrics
        effect = [f"{m[name]:.3f}" for name in METRICS]
        cost = [f"{m['query_active_dims']:,.0f}", f"{m['corpus_active_dims']:,.0f}", f"{m['flops']:,.1f}"]
        rows.append([run.name, *effect, *cost, f"{run.losses[0][1]:,.1f}", f"{at_equal_cost(run):.3f}"])
    rows.append(["BM25", *(f"{bm25[name]:.3f}" for name in METRICS), "", "", "", "", ""])
    return header, rows


def at_equal_cost(run: TrainedRun) -> float:
    """The best nDCG@10 on a run's curve for at most `EQUAL_COST` FLOPS."""
    return best_at_cost(run.curve, EQUAL_COST)


def _page(runs: Sequence[TrainedRun], bm25: dict[str, float], setting: dict[str, str | int | float]) -> str:
    header, rows = results_table(runs, bm25)
    table = "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))
    facts = "\n".join(f"- {name}: {value}" for name, value in setting.items())
    chance = f"ln({setting['batch size']}) = {math.log(float(setting['batch size'])):.2f}"
    said = "\n".join(f"- **{run.name}**: {warning}" for run in runs for warning in run.warnings)
    return f"""# SPLADE with and without rescaling

{table}

Active dimensions and FLOPS (the expected number of multiplications a query and document) measure the cost of a search.
*At equal cost* is the best nDCG@10 with the vectors cut to at most {EQUAL_COST:g} FLOPS: compare the models by this
column, or by the second plot. *Loss at step 1* is the ranking loss before anything was learned; one of {chance} is that
of a model that cannot tell the documents of a batch apart.

![Ranking loss](loss.png)

![Effectiveness against FLOPS](tradeoff.png)

## What the collapse guard said

{said or "Nothing: it stopped no run."}

## Setting

{facts}
"""


def _plot_losses(file: Path, runs: Sequence[TrainedRun], chance: float) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        steps, losses = zip(*run.losses, strict=True)
        axes.plot(steps, losses, label=run.name)
    axes.axhline(chance, color="grey", linestyle=":", label="chance: ln(batch size)")
    axes.set(
        xlabel="step", ylabel="ranking loss", yscale="log", title="Ranking loss in training (mean since the last point)"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
