"""A report of a head as a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from st_sparse_rescale.calibration.choice import MAX_RMS_WEIGHT, MIN_STATE_COSINE, KChoice
from st_sparse_rescale.calibration.head_report import HeadReport
from st_sparse_rescale.calibration.logits import BERT_QUANTILES
from st_sparse_rescale.calibration.start import Start
from st_sparse_rescale.rescaling import Strategy

STYLES: dict[Strategy, str] = {"weight": "o-", "norm": "s--"}


def plot_report(report: HeadReport, choice: KChoice, file: str | Path) -> Path:
    """Draw the distribution of the raw logits and, where k was varied, the quantities against k.

    Args:
        report: What was measured.
        choice: What follows from it; its k is marked.
        file: Where the image goes; its suffix says the format.

    Returns:
        The file.

    Raises:
        ValueError: If the format is unknown.
    """
    varied = len(report.starts) > 1
    figure = Figure(figsize=(12, 6.4) if varied else (6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flatten() if varied else [figure.subplots()]
    _draw_logits(axes[0], report)
    if varied:
        chance = math.log(report.texts - 1)
        _draw(axes[1], report, choice, "rms weight", lambda start: start.rms_weight, log=True)
        axes[1].axhline(MAX_RMS_WEIGHT, color="grey", linestyle=":", label="limit")
        _draw(axes[2], report, choice, "cosine of hidden states to those at k = 1", lambda start: start.state_cosine)
        axes[2].axhline(MIN_STATE_COSINE, color="grey", linestyle=":", label="limit of weight")
        axes[2].set_ylim(0, 1.05)
        _draw(axes[3], report, choice, "contrastive loss at step 0", lambda start: start.loss, log=True)
        axes[3].axhline(chance, color="grey", linestyle=":", label="all scores equal")
        _draw(axes[4], report, choice, "std of a text's scores", lambda start: start.score_std, log=True)
        _draw(axes[5], report, choice, "mean weight", lambda start: start.mean_weight, log=True)
        for panel in axes[1:]:
            panel.legend(fontsize=8)
    figure.suptitle(f"{Path(report.name).name}: {choice.verdict}, k = {choice.k:g}")
    figure.savefig(file, dpi=120)
    return Path(file)


def _draw_logits(axes: Axes, report: HeadReport) -> None:
    logits = report.logits
    edges = np.linspace(*logits.edges, len(logits.histogram) + 1)
    axes.stairs(np.array(logits.histogram) / logits.count / np.diff(edges), edges, fill=True, alpha=0.6)
    axes.axvline(0, color="black", linewidth=0.8)
    mixed = axes.get_xaxis_transform()  # x in logits, y in shares of the height
    for number, (share, value) in enumerate(BERT_QUANTILES.items()):
        axes.axvline(value, color="C1", linestyle="--", label=None if number else "quantiles of BERT")
        name = f" {float(share):.0%}"
        axes.text(value, 0.97, name, color="C1", fontsize=8, rotation=90, ha="left", va="top", transform=mixed)
    axes.set(xlabel="raw logit", ylabel="density", ylim=(0, 1.3 * axes.get_ylim()[1]))
    axes.set_title(f"raw logits, {logits.negative:.1%} negative", fontsize=10)
    axes.legend(fontsize=8)


def _draw(
    axes: Axes, report: HeadReport, choice: KChoice, title: str, value: Callable[[Start], float], log: bool = False
) -> None:
    for strategy, style in STYLES.items():
        starts = report.at(strategy)
        axes.plot(
            list(starts),
            [value(start) for start in starts.values()],
            style,
            markersize=4,
            markerfacecolor="none",
            label=strategy,
        )
    axes.axvline(choice.k, color="C2", linewidth=5, alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(report.at("weight")), [f"{k:g}" for k in report.at("weight")])
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="k")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
