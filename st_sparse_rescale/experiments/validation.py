"""The rule for k, held against the sweep's best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from st_sparse_rescale.experiments.outcomes import COST, LENGTHS, Outcome, Setting, line
from st_sparse_rescale.experiments.plots import KS


@dataclass(frozen=True)
class Validation:
    """What a chosen k costs on one backbone.

    Attributes:
        backbone: Its name.
        strategy: How k is applied.
        chosen: The chosen k.
        ndcg: The nDCG@10 with it.
        best: The k of the sweep with the highest nDCG@10.
        best_ndcg: That nDCG@10.
        stopped: Whether the collapse guard stopped a run with the chosen k.
        steps: Steps of training.
    """

    backbone: str
    strategy: str
    chosen: float
    ndcg: float
    best: float
    best_ndcg: float
    stopped: bool
    steps: int

    @property
    def loss(self) -> float:
        """How much worse the chosen k is, as a share of the best."""
        return 1 - self.ndcg / self.best_ndcg if self.best_ndcg else 0.0


def validate(
    outcomes: Mapping[Setting, Outcome],
    choices: Mapping[str, float],
    strategy: str,
    collection: str,
    cost: float | None = COST,
    steps: int = 120,
) -> list[Validation]:
    """Compare the chosen k of each backbone with all of the sweep's.

    Args:
        outcomes: What was found.
        choices: The chosen k, by backbone.
        strategy: How it is applied: "weight" or "norm".
        collection: What is compared, by nDCG@10.
        cost: The limit of FLOPS at which, None for no limit.
        steps: Steps of training, one of `LENGTHS`.

    Returns:
        One validation for each backbone whose chosen k was tried.

    Example:
        ::

            for found in validate(outcomes, {"bert-mini": 1}, "weight", "docstrings"):
                print(found.backbone, f"{found.loss:.1%} below the best k")
    """
    validations = []
    for backbone, k in choices.items():
        found = line(outcomes, backbone, strategy, KS, others=LENGTHS[steps])
        chosen = next((outcome for outcome in found if outcome.setting.k == k), None)
        if chosen is None:
            continue
        best = max(found, key=lambda outcome: outcome.ndcg(collection, cost))
        validations.append(
            Validation(
                backbone,
                strategy,
                chosen.setting.k,
                chosen.ndcg(collection, cost),
                best.setting.k,
                best.ndcg(collection, cost),
                chosen.stopped > 0,
                steps,
            )
        )
    return validations
