"""The page that shows what the sweeps found: tables, figures and the validation of the rule for k."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from st_sparse_rescale.demo.backbones import BACKBONES
from st_sparse_rescale.experiments import plots
from st_sparse_rescale.experiments.outcomes import COST, LENGTHS, Outcome, Setting, outcomes_of
from st_sparse_rescale.experiments.validation import Validation, validate

COLUMNS = (
    "k",
    "strategy",
    "head's rate",
    "others",
    "seeds",
    "loss at step 1",
    "gradient norm",
    "query / document dims",
    "FLOPS",
    "stopped",
)


def write_report(
    folder: str | Path, results: Sequence[dict[str, Any]], choices: Mapping[str, Mapping[str, float]]
) -> Path:
    """Write ``README.md`` and its figures.

    Args:
        folder: It is made if need be.
        results: Recorded runs, see `run_experiment`; all of them evaluated on the same collections.
        choices: For each strategy the k that the rule chooses, by backbone.

    Returns:
        The path of the page.

    Raises:
        ValueError: There are no results.
    """
    if not results:
        raise ValueError("there are no results to report: run a sweep first.")
    folder, outcomes = Path(folder), outcomes_of(results)
    folder.mkdir(parents=True, exist_ok=True)
    found = dict.fromkeys(setting.backbone for setting in outcomes)
    backbones = [*(name for name in BACKBONES if name in found), *sorted(found.keys() - set(BACKBONES))]
    collections = list(results[0]["evaluations"])
    stepped = [b for b in backbones if any(s.backbone == b and s.factor not in (1, s.k) for s in outcomes)]
    for collection in collections:
        plots.draw_scale(folder / f"scale-{collection}.png", outcomes, backbones, collection, choices.get("weight", {}))
        plots.draw_steps(folder / f"steps-{collection}.png", outcomes, stepped, collection)
    plots.draw_first_step(folder / "first-step.png", outcomes, backbones, collections[0])
    for strategy in ("weight", "norm"):
        plots.draw_curves(folder / f"curves-{strategy}.png", outcomes, backbones, strategy)
    page = folder / "README.md"
    page.write_text("\n".join(_page(outcomes, backbones, collections, choices, results)) + "\n", encoding="utf-8")
    return page


def _page(
    outcomes: Mapping[Setting, Outcome],
    backbones: Sequence[str],
    collections: Sequence[str],
    choices: Mapping[str, Mapping[str, float]],
    results: Sequence[dict[str, Any]],
) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results[0]["versions"].items())
    yield "# Sweeps"
    yield ""
    yield f"<!-- Written by `make sweep` from the {len(results)} runs in experiments/results/. -->"
    yield ""
    yield (
        f"{len(results)} trainings of mini backbones on docstrings, each evaluated on held-out docstrings and, unseen, "
        f"on {', '.join(collections[1:]) or 'nothing else'}. nDCG@10 is the best for at most {COST} FLOPS unless the "
        f"column says otherwise; several seeds are given as mean (lowest to highest). Made with {versions}."
    )
    for collection in collections:
        yield from ("", f"![nDCG@10 against k, {collection}](scale-{collection}.png)")
        yield from ("", f"![Scale of the logits and step of the head, {collection}](steps-{collection}.png)")
    yield from ("", "![What is known at step 1 against the outcome](first-step.png)")
    yield from ("", "![Ranking loss, weight](curves-weight.png)", "", "![Ranking loss, norm](curves-norm.png)")
    yield from ("", "## The rule for k", "")
    measures = [(collection, cost) for collection in collections for cost in (COST, None)]
    yield "How much worse the chosen k is than the best that was tried; left out where it was not tried itself."
    yield ""
    header = (
        "strategy",
        "steps",
        "backbone",
        "collection",
        "FLOPS",
        "chosen k",
        "nDCG@10",
        "best k",
        "nDCG@10",
        "worse by",
        "stopped",
    )
    rows = [
        _validated(collection, cost, validation)
        for strategy, by_backbone in choices.items()
        for steps in LENGTHS
        for collection, cost in measures
        for validation in validate(outcomes, by_backbone, strategy, collection, cost, steps)
    ]
    yield from _table(header, rows)
    for backbone in backbones:
        yield from ("", f"## {backbone}", "")
        rows = [_row(outcome, collections) for outcome in _sorted(outcomes, backbone)]
        ndcg = [f"nDCG@10, {collection}" for collection in collections]
        yield from _table((*COLUMNS[:7], *ndcg, f"without limit, {collections[0]}", *COLUMNS[7:]), rows)


def _sorted(outcomes: Mapping[Setting, Outcome], backbone: str) -> list[Outcome]:
    mine = [outcome for setting, outcome in outcomes.items() if setting.backbone == backbone]

    def order(outcome: Outcome) -> tuple[bool, bool, float, float]:
        setting = outcome.setting
        return bool(setting.others), setting.strategy == "norm", setting.factor, setting.k

    return sorted(mine, key=order)


def _row(outcome: Outcome, collections: Sequence[str]) -> list[str]:
    setting, first = outcome.setting, collections[0]
    dims = "{:,.0f} / {:,.0f}".format(*(outcome.metric(f"{side}_active_dims", first) for side in ("query", "corpus")))
    return [
        f"{setting.k:g}",
        setting.strategy,
        f"x {setting.factor:g}",
        ", ".join(f"{name} {value:g}" for name, value in setting.others),
        str(len(outcome.runs)),
        f"{outcome.first('base_loss'):,.1f}",
        f"{outcome.first('grad_norm'):,.1f}",
        *(_spread(outcome.ndcgs(collection)) for collection in collections),
        _spread(outcome.ndcgs(first, None)),
        dims,
        f"{outcome.metric('flops', first):,.1f}",
        str(outcome.stopped or ""),
    ]


def _spread(values: Sequence[float]) -> str:
    middle = f"{sum(values) / len(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


def _validated(collection: str, cost: float | None, v: Validation) -> list[str]:
    limit = "no limit" if cost is None else f"{cost:g}"
    numbers = [f"{v.chosen:g}", f"{v.ndcg:.3f}", f"{v.best:g}", f"{v.best_ndcg:.3f}", f"{v.loss:.1%}"]
    return [v.strategy, f"{v.steps}", v.backbone, collection, limit, *numbers, "yes" if v.stopped else ""]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
