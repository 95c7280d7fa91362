"""Results of an evaluation as tables for the terminal and for documents, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from st_sparse_rescale.evaluation.results import (
    CollectionResult,
    ComparisonResult,
    Evaluation,
    ModelLengths,
    SystemResult,
)

_SPELLED = {"ndcg": "nDCG", "mrr": "MRR", "map": "MAP", "recall": "Recall", "precision": "P", "accuracy": "Acc"}
_TEXTS = {"collection", "system", "metric", "a", "b"}
SHOWN_PROBLEMS = 10


def show(results: Evaluation, console: Console, plot_dir: Path) -> None:
    """Print the tables and what is wrong with the data, and draw the trade-off if limits were traced.

    Args:
        results: The results.
        console: Where to print.
        plot_dir: Folder for ``tradeoff.png``.
    """
    for table in (results_table(results), collections_table(results), comparisons_table(results)):
        if table is not None:
            console.print(table)
    for collection in results.collections:
        for problem in collection.problems[:SHOWN_PROBLEMS]:
            console.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
        if (more := len(collection.problems) - SHOWN_PROBLEMS) > 0:
            console.print(f"... and {more:,} more problems with {collection.name}.", style="yellow", highlight=False)
    if len(results.settings["max_active_dims"]) > 1:
        console.print(f"The trade-off: {plot_tradeoff(results, plot_dir / 'tradeoff.png')}", highlight=False)


def parse_limits(texts: Sequence[str]) -> list[int | None]:
    """Read limits of active dimensions, ``none`` for no limit.

    Raises:
        ValueError: One is neither a positive whole number nor ``none``.
    """
    limits: list[int | None] = []
    for text in texts:
        if text.lower() != "none" and not (text.isdecimal() and int(text) > 0):
            raise ValueError(f"A limit of active dimensions is a positive whole number or none, got {text!r}.")
        limits.append(None if text.lower() == "none" else int(text))
    return limits


def results_table(results: Evaluation) -> Table:
    """One row a collection and system, and the means over the collections.

    Example:
        ::

            rich.print(results_table(evaluate("my-splade", ["scifact"])))
    """
    header, groups = _results(results)
    return _rich("Results", header, groups)


def collections_table(results: Evaluation) -> Table:
    """What the evaluation should not hide: lengths, truncation, self-exclusion, time and memory."""
    header = ["collection", "docs", "queries", "self excl.", "sec.", "peak MiB"]
    header += ["system", "max. length", "truncated"]
    return _rich("Collections", header, [[_facts(c, of) for of in c.lengths] for c in results.collections])


def comparisons_table(results: Evaluation) -> Table | None:
    """The comparisons query by query, or ``None`` where nothing was compared."""
    rows = [[c.name, *_compared(comparison)] for c in results.collections for comparison in c.comparisons]
    if not rows:
        return None
    first = next(comparison for c in results.collections for comparison in c.comparisons)
    test = "every sign pattern" if first.exact else f"{first.permutations:,} sign patterns, seed {first.seed}"
    header = ["collection", "metric", "a", "b", "a - b", "p", "a better", "b better", "equal"]
    return _rich(f"Paired randomisation test ({test})", header, [rows])


def as_markdown(results: Evaluation) -> str:
    """The results table in Markdown."""
    header, groups = _results(results)
    rows = [header, ["---", "---", *["---:"] * (len(header) - 2)], *(row for group in groups for row in group)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def plot_tradeoff(results: Evaluation, file: str | Path, metric: str | None = None) -> Path:
    """Draw effectiveness against FLOPS, a line for each model, from the mean over the collections.

    Args:
        results: Of an evaluation at several limits of active dimensions.
        file: Where the image goes; its suffix says the format.
        metric: What is drawn; by default the first that was measured.

    Returns:
        The file.
    """
    curves: dict[str, list[tuple[float, float, int | None]]] = {}
    baselines: dict[str, float] = {}
    means = results.means()
    metric = metric or next(iter(means[0].metrics))
    for row in means:
        value = row.metrics[metric]
        if row.flops is None:
            baselines[row.system] = value
        else:
            model = row.system.removesuffix(f" ({row.limit} dims)")
            curves.setdefault(model, []).append((row.flops, value, row.limit))
    return draw_tradeoff(file, curves, baselines, _spelled(metric))


def draw_tradeoff(
    file: str | Path,
    curves: Mapping[str, Sequence[tuple[float, float, int | None]]],
    baselines: Mapping[str, float],
    metric: str,
) -> Path:
    """Draw effectiveness against FLOPS.

    Args:
        file: Where the image goes; its suffix says the format.
        curves: For each model its (FLOPS, effectiveness, limit of active dimensions) points, in any order.
        baselines: The effectiveness of systems without FLOPS.
        metric: What effectiveness is, as the axis says.

    Returns:
        The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for model, points in curves.items():
        # What has nothing active has no place on a logarithmic axis.
        seen = sorted((x, y, "all" if limit is None else str(limit)) for x, y, limit in points if x > 0)
        if seen:
            axes.plot([x for x, _, _ in seen], [y for _, y, _ in seen], marker="o", label=model)
        for (x, y, label), after in zip(seen, [*(x for x, _, _ in seen[1:]), float("inf")], strict=True):
            if after > 1.15 * x:  # of points that nearly coincide, the last is labelled
                axes.annotate(label, (x, y), textcoords="offset points", xytext=(4, -10), fontsize=8)
    for (system, value), style in zip(baselines.items(), cycle((":", "--", "-.")), strict=False):
        axes.axhline(value, color="grey", linestyle=style, label=system)
    axes.set(xlabel="FLOPS a query and document", ylabel=metric, xscale="log", ylim=(0, None))
    axes.set_title("Effectiveness against efficiency, by active dimensions", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    return Path(file)


def _results(results: Evaluation) -> tuple[list[str], list[list[list[str]]]]:
    rows = [(c.name, system) for c in results.collections for system in c.systems]
    metrics = list(dict.fromkeys(metric for _, system in rows for metric in system.metrics))
    header = ["collection", "system", *map(_spelled, metrics), "query dims", "doc. dims", "FLOPS"]
    groups = [[_row(c.name, system, metrics) for system in c.systems] for c in results.collections]
    if len(results.collections) > 1:
        groups.append([_row("mean", system, metrics) for system in results.means()])
    return header, groups


def _row(collection: str, system: SystemResult, metrics: Sequence[str]) -> list[str]:
    scores = [f"{system.metrics[metric]:.3f}" if metric in system.metrics else "" for metric in metrics]
    costs: list[tuple[float | None, str]] = [
        (system.query_active_dims, ",.0f"),
        (system.corpus_active_dims, ",.0f"),
        (system.flops, ",.2f"),
    ]
    return [
        collection,
        system.system,
        *scores,
        *("" if value is None else format(value, form) for value, form in costs),
    ]


def _facts(c: CollectionResult, of: ModelLengths) -> list[str]:
    counts = [f"{c.documents:,}", f"{c.queries:,}", "yes" if c.self_excluded else "no"]
    costs = [f"{c.seconds:,.1f}", f"{c.peak_memory_mib:,.0f}"]
    lengths = " / ".join(dict.fromkeys(str(side.max_length or "none") for side in (of.query, of.document)))
    return [c.name, *counts, *costs, of.model, lengths, f"{of.query.share:.1%} / {of.document.share:.1%}"]


def _compared(c: ComparisonResult) -> list[str]:
    counts = [str(count) for count in (c.wins, c.losses, c.ties)]
    return [_spelled(c.metric), c.a, c.b, f"{c.difference:+.4f}", f"{c.p_value:.4f}", *counts]


def _spelled(metric: str) -> str:
    name, _, cut_off = metric.partition("@")
    return f"{_SPELLED.get(name, name)}@{cut_off}"


def _rich(title: str, header: Sequence[str], groups: Sequence[Sequence[Sequence[str]]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in header:
        # In two lines, and with names in several, so that the table fits narrow terminals whole.
        shown = name.replace("@", "\n@").replace(" ", "\n", 1)
        table.add_column(shown, justify="left" if name in _TEXTS else "right", overflow="fold")
    for group in groups:
        for row in group:
            table.add_row(*row)
        table.add_section()
    return table
