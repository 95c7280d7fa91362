"""A report of a head for the terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from st_sparse_rescale.calibration.choice import KChoice
from st_sparse_rescale.calibration.head_report import HeadReport
from st_sparse_rescale.calibration.logits import BERT_MEAN, BERT_NEGATIVE, BERT_STD
from st_sparse_rescale.calibration.start import Start
from st_sparse_rescale.rescaling import Strategy

LEARNING_RATE = 2e-5  # a usual one, as an example of how far a step goes


def show(report: HeadReport, choice: KChoice, console: Console) -> None:
    """Print the verdict, the evidence and the line of Python to use.

    Args:
        report: What was measured.
        choice: What follows from it.
        console: Where to print.
    """
    console.print(choice.headline, style="bold", markup=False, highlight=False, soft_wrap=True)
    for line in choice.evidence:
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(facts_table(report))
    console.print()
    console.print(starts_table(report))
    console.print()
    console.print(python_line(report, choice), markup=False, highlight=False, soft_wrap=True)


def as_json(report: HeadReport, choice: KChoice) -> str:
    """The choice and the report as one JSON object.

    Args:
        report: What was measured.
        choice: What follows from it.

    Returns:
        JSON with the keys ``choice`` and ``report``.
    """
    return json.dumps({"choice": asdict(choice), "report": asdict(report)}, indent=2, allow_nan=False)


def facts_table(report: HeadReport) -> Table:
    """What the head is, and what it makes of texts as it is.

    Args:
        report: What was measured.

    Returns:
        Two columns.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(report):
        table.add_row(name, value)
    return table


def starts_table(report: HeadReport) -> Table:
    """What a training would start from, for each k and strategy.

    Args:
        report: What was measured.

    Returns:
        A row for each; the columns are attributes of `Start`.
    """
    alone = len(report.starts) == 1
    title = "As it is" if alone else "What a training would start from"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))  # 80 columns are enough
    varied = ("k", "strategy", "input\ncosine", "hidden\ncosine")
    measured = ("active\ndims", "rms\nweight", "score\nstd", "entropy", "loss", "gradient", "FLOPS\n/ loss")
    for name in measured if alone else varied + measured:
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    strategies: tuple[Strategy, ...] = ("weight", "norm")
    for strategy in strategies:
        for start in report.at(strategy).values():
            table.add_row(*_cells(start)[len(varied) if alone else 0 :])
    return table


def python_line(report: HeadReport, choice: KChoice) -> str:
    """The code that uses what was found.

    Args:
        report: What was measured.
        choice: What follows from it.

    Returns:
        One line of Python.
    """
    if report.trained:
        return f'model = SparseEncoder("{report.name}")'
    arguments = f'"{report.name}", k={choice.k:g}'
    if choice.strategy != "weight":
        arguments += f', strategy="{choice.strategy}"'
    return f"model = SparseEncoder(modules=[RescaledMLMTransformer({arguments}), SpladePooling()])"


def _facts(report: HeadReport) -> Iterator[tuple[str, str]]:
    tied = "tied to the input embeddings" if report.tied else "not tied to the input embeddings"
    yield "model", f"{report.architecture}, {report.parameters:,} parameters"
    yield "head", f"{report.decoder} ({report.vocab_size:,} x {report.hidden_size:,}), {tied}"
    yield "", f"bias {report.bias or 'none'}, norm {report.norm or 'none'}; {report.head_parameters:,} parameters"
    if (rescaled := report.rescaled) is not None:
        yield "recorded", f"k = {rescaled.k:g}, strategy {rescaled.strategy} ({rescaled.reason})"
    yield (
        "matrix",
        f"rows {report.row_norm_mean:.3g} ± {report.row_norm_std:.2g} long, Frobenius norm {report.frobenius:.4g}",
    )
    step = LEARNING_RATE / report.weight_rms
    yield "", f"typical |w| {report.weight_rms:.3g}: a step of Adam at {LEARNING_RATE:g} moves it by {step:.2g} |w|"
    gain = "none" if report.norm_gain is None else f"{report.norm_gain:.3g}"
    bias = "none" if report.bias_range is None else "{:.3g} to {:.3g}".format(*report.bias_range)
    yield "norm, bias", f"gain {gain}, bias {bias}; states {report.state_norm:.3g} long"
    logits = report.logits
    yield (
        "raw logits",
        f"mean {logits.mean:.2f}, std {logits.std:.2f}, {logits.minimum:.1f} to {logits.maximum:.1f}, "
        f"{logits.negative:.1%} negative",
    )
    yield "", "quantiles " + ", ".join(f"{float(share):.0%} {value:.2f}" for share, value in logits.quantiles.items())
    yield "", f"(BERT: mean {BERT_MEAN:.2f}, std {BERT_STD:.2f}, {BERT_NEGATIVE:.1%} negative)"
    start = report.as_is
    yield (
        "vectors",
        f"{start.active_dims:,.0f} of {report.vocab_size:,} dimensions active ({report.active_share:.1%}), "
        f"{start.empty:.0%} of the texts without any",
    )
    yield "", f"mean weight {start.mean_weight:.3g}, largest of a text {start.max_weight:.3g}"
    yield "", f"cosine of two texts {start.cosine:.4f}"
    yield "scores", f"of a text with itself {start.self_score:,.4g}, with another {start.pair_score:,.4g}"
    yield "measured on", f"{report.texts} texts of {report.tokens:,} tokens"


def _cells(start: Start) -> list[str]:
    return [
        f"{start.k:g}",
        start.strategy,
        "-" if start.input_cosine is None else f"{start.input_cosine:.3f}",
        f"{start.state_cosine:.3f}",
        f"{start.active_dims:,.0f}",
        f"{start.rms_weight:.3f}",
        f"{start.score_std:,.3g}",
        f"{start.entropy:.2f}",
        f"{start.loss:,.4g}",
        "-" if start.gradient_norm is None else f"{start.gradient_norm:.3g}",
        f"{start.flops / start.loss:.3g}",
    ]
