"""What a sweep found: runs that differ in their seed alone, taken together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from st_sparse_rescale.experiments.experiment import key_in, key_of
from st_sparse_rescale.training.recipe import Recipe

VARIED = ("k", "strategy", "head_learning_rate_factor", "seed")
COST = 20
"""FLOPS at which outcomes are compared."""

Others = tuple[tuple[str, Any], ...]
LENGTHS: dict[int, Others] = {120: (), 600: (("max_steps", 600),)}
"""Steps of training to the settings, besides k, that make a run so long."""


@dataclass(frozen=True)
class Setting:
    """What a sweep varies.

    Attributes:
        backbone: Its name.
        k: The divisor of the head.
        strategy: How k is applied; "weight" for k = 1, where there is no difference.
        factor: Of the learning rate of the head's matrix.
        others: Further settings that differ from the sweep's recipe, with their values.
    """

    backbone: str
    k: float
    strategy: str = "weight"
    factor: float = 1.0
    others: Others = ()


@dataclass(frozen=True)
class Outcome:
    """The runs of one setting, one a seed."""

    setting: Setting
    runs: list[dict[str, Any]] = field(default_factory=list)

    def ndcg(self, collection: str, cost: float | None = COST) -> float:
        """Mean nDCG@10, for at most so many FLOPS or, with None, without a limit."""
        return mean(self.ndcgs(collection, cost))

    def ndcgs(self, collection: str, cost: float | None = COST) -> list[float]:
        """The nDCG@10 of each run; 0 where a collapse left no model."""
        found = [run["evaluations"][collection] for run in self.runs]
        return [0.0 if e is None else e["ndcg@10"] if cost is None else e["ndcg@10_at_flops"][str(cost)] for e in found]

    def metric(self, name: str, collection: str) -> float:
        """The mean of another metric of the evaluations; 0 where a collapse left no model."""
        return mean((run["evaluations"][collection] or {}).get(name, 0.0) for run in self.runs)

    def first(self, name: str) -> float:
        """The mean of a quantity at step 1, before anything was learnt; infinite where one is not finite."""
        values = [run["curve"][name][0] if run["curve"][name] else None for run in self.runs]
        return mean(float("inf") if value is None else value for value in values)

    @property
    def stopped(self) -> int:
        """How many of the runs the collapse guard stopped."""
        return sum(run["collapse"] is not None for run in self.runs)


def outcomes_of(results: Iterable[dict[str, Any]], recipe: str = "sweep") -> dict[Setting, Outcome]:
    """Group runs by their settings.

    Args:
        results: Recorded runs, see `run_experiment`.
        recipe: The recipe that the sweeps share; what differs from it is named in `Setting`.

    Returns:
        Outcomes by setting, in the order of the runs.
    """
    base = key_of(Recipe.load(recipe), {})["settings"]
    found: dict[Setting, Outcome] = {}
    for result in results:
        settings = key_in(result)["settings"]
        others = tuple((name, settings[name]) for name in base if name not in VARIED and settings[name] != base[name])
        setting = Setting(
            result["backbone"], settings["k"], settings["strategy"], settings["head_learning_rate_factor"], others
        )
        runs = found.setdefault(setting, Outcome(setting)).runs
        if all(run["settings"]["seed"] != settings["seed"] for run in runs):  # else it is the same run, of two sweeps
            runs.append(result)
    return found


def line(
    outcomes: Mapping[Setting, Outcome],
    backbone: str,
    strategy: str,
    ks: Sequence[float],
    with_factor_k: bool = False,
    others: Others = (),
) -> list[Outcome]:
    """The outcomes of one backbone and strategy along k.

    Args:
        outcomes: What a sweep found.
        backbone: The backbone's name.
        strategy: "weight" or "norm"; k = 1 belongs to both.
        ks: The values of k.
        with_factor_k: Whether the head's matrix learns k times as fast.
        others: Further settings that differ from the sweep's recipe.

    Returns:
        Those that there are, by k.
    """
    settings = (Setting(backbone, k, "weight" if k == 1 else strategy, k if with_factor_k else 1.0, others) for k in ks)
    return [outcomes[setting] for setting in settings if setting in outcomes]
