"""The figures of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from st_sparse_rescale.experiments.outcomes import COST, LENGTHS, Outcome, Setting, line

KS = (1, 2, 4, 8, 16, 32, 64)
FACTORS = (1, 4, 16)
LINES = {
    "weight": ("weight", False, 120, "o-"),
    "weight, 600 steps": ("weight", False, 600, "D-"),
    "norm": ("norm", False, 120, "s--"),
    "norm, head's learning rate x k": ("norm", True, 120, "^:"),
}
"""What is drawn along k: label to strategy, whether the head's matrix learns k times as fast, steps and style."""

COLUMNS = 3
FIRST = {"base_loss": "ranking loss", "grad_norm": "gradient norm"}

Outcomes = Mapping[Setting, Outcome]


def draw_scale(
    file: Path, outcomes: Outcomes, backbones: Sequence[str], collection: str, choices: Mapping[str, float]
) -> None:
    """Draw nDCG@10 at equal cost against k, a panel for each backbone.

    Args:
        file: The image.
        outcomes: What was found.
        backbones: Those to draw.
        collection: What they were evaluated on.
        choices: The k that the rule chooses, by backbone, marked by a vertical line.
    """
    figure, panels = _panels(backbones)
    for axes, backbone in zip(panels, backbones, strict=True):
        for label, (strategy, with_factor, steps, style) in LINES.items():
            found = line(outcomes, backbone, strategy, KS, with_factor, LENGTHS[steps])
            ks, means = [outcome.setting.k for outcome in found], [outcome.ndcg(collection) for outcome in found]
            axes.plot(ks, means, style, ms=5, label=label)
            seeds = [(outcome.setting.k, value) for outcome in found for value in outcome.ndcgs(collection)]
            axes.scatter([k for k, _ in seeds], [value for _, value in seeds], s=8, color=axes.lines[-1].get_color())
        top = max((value for drawn in axes.lines for value in drawn.get_ydata()), default=1)
        axes.set(title=backbone, xscale="log", xticks=KS, xlim=(0.8, 80), ylim=(0, 1.1 * top or 1))
        if backbone in choices:
            axes.axvline(choices[backbone], color="grey", linewidth=6, alpha=0.3, label="k by the rule (weight)")
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:g}"))
        axes.grid(alpha=0.3)
    _label(figure, panels, "k", f"nDCG@10 at {COST} FLOPS", f"What k does: {collection}")
    figure.savefig(file, dpi=120)


def draw_steps(file: Path, outcomes: Outcomes, backbones: Sequence[str], collection: str) -> None:
    """Draw nDCG@10 at equal cost for each scale of the logits and each learning rate of the head's matrix.

    Args:
        file: The image.
        outcomes: What was found, with the logits divided through the norm.
        backbones: Those to draw.
        collection: What they were evaluated on.
    """
    figure, panels = _panels(backbones, height=4.0)
    for axes, backbone in zip(panels, backbones, strict=True):
        cells = [
            [outcomes.get(Setting(backbone, k, "weight" if k == 1 else "norm", factor)) for factor in FACTORS]
            for k in FACTORS
        ]
        values = [[math.nan if cell is None else cell.ndcg(collection) for cell in row] for row in cells]
        image = axes.imshow(values, cmap="viridis", vmin=0)
        for y, row in enumerate(cells):
            for x, cell in enumerate(row):
                if cell is not None:
                    text = f"{values[y][x]:.3f}" + (f"\n{len(cell.runs)} seeds" if len(cell.runs) > 1 else "")
                    bright = image.norm(values[y][x]) > 0.6
                    axes.text(x, y, text, ha="center", va="center", color="black" if bright else "white")
        axes.set(title=backbone, xticks=range(len(FACTORS)), yticks=range(len(FACTORS)))
        axes.set_xticklabels([f"x {factor}" for factor in FACTORS])
        axes.set_yticklabels([f"/ {k}" for k in FACTORS])
    title = f"nDCG@10 at no more than {COST} FLOPS: {collection}"
    _label(figure, panels, "learning rate of the head's matrix", "logits", title, legend=False)
    figure.savefig(file, dpi=120)


def draw_first_step(file: Path, outcomes: Outcomes, backbones: Sequence[str], collection: str) -> None:
    """Draw what is known before the first step against how well the training ended.

    Args:
        file: The image.
        outcomes: What was found.
        backbones: Those to draw.
        collection: What they were evaluated on.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, FIRST, strict=True):
        for colour, backbone in enumerate(backbones):
            best = (
                max((o.ndcg(collection) for o in outcomes.values() if o.setting.backbone == backbone), default=0) or 1
            )
            for strategy, marker in (("weight", "o"), ("norm", "x")):
                found = line(outcomes, backbone, strategy, KS)
                axes.plot(
                    [outcome.first(name) for outcome in found],
                    [outcome.ndcg(collection) / best for outcome in found],
                    marker,
                    color=f"C{colour}",
                    label=f"{backbone}, {strategy}",
                )
        axes.set(xlabel=f"{FIRST[name]} at step 1", xscale="log", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("nDCG@10, share of the best")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=7, ncols=5)
    figure.suptitle(f"Does the start tell the end? ({collection})")
    figure.savefig(file, dpi=120)


def draw_curves(file: Path, outcomes: Outcomes, backbones: Sequence[str], strategy: str) -> None:
    """Draw the ranking loss in training for each k, a panel for each backbone.

    Args:
        file: The image.
        outcomes: What was found.
        backbones: Those to draw.
        strategy: "weight" or "norm".
    """
    figure, panels = _panels(backbones)
    colours = colormaps["viridis"].resampled(len(KS))
    for axes, backbone in zip(panels, backbones, strict=True):
        for outcome in line(outcomes, backbone, strategy, KS):
            run, k = outcome.runs[0], outcome.setting.k
            curve, colour = run["curve"], colours(KS.index(int(k)))
            axes.plot(curve["step"], curve["base_loss"], color=colour, label=f"k = {k:g}")
            axes.axhline(math.log(run["settings"]["batch_size"]), color="grey", linestyle=":")
        axes.set(title=backbone, yscale="log")
        axes.grid(alpha=0.3)
    _label(figure, panels, "step", "ranking loss", f"Ranking loss ({strategy}); dotted: chance, ln(batch size)")
    figure.savefig(file, dpi=120)


def _panels(names: Sequence[str], height: float = 2.9) -> tuple[Figure, list[Any]]:
    """Up to three panels a row, one for each name."""
    rows, columns = math.ceil(len(names) / COLUMNS) or 1, min(COLUMNS, len(names)) or 1
    figure = Figure(figsize=(4 * columns, height * rows + 0.8), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in panels[len(names) :]:
        spare.set_visible(False)
    return figure, panels[: len(names)]


def _label(figure: Figure, panels: Sequence[Any], x: str, y: str, title: str, legend: bool = True) -> None:
    """Name the axes, at the left and below, and explain the lines of all panels once."""
    figure.suptitle(title)
    entries: dict[str, Any] = {}
    for number, axes in enumerate(panels):
        if number % COLUMNS == 0:
            axes.set_ylabel(y)
        if number + COLUMNS >= len(panels):
            axes.set_xlabel(x)
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if legend and entries:
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=min(7, len(entries)))
