"""Whether two systems differ by more than chance, on the same queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Up to 2^16 sign patterns are enumerated; beyond, so many are drawn.
EXACT_QUERIES = 16
PERMUTATIONS = 100_000
SEED = 0
_BLOCK = 1_000


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same queries."""

    mean_a: float
    mean_b: float
    p_value: float
    """Share of the sign patterns whose mean difference is at least as large, on either side."""
    exact: bool
    """Whether all sign patterns were enumerated, rather than drawn."""
    seed: int
    permutations: int
    wins: int
    """Queries on which a is better."""
    losses: int
    ties: int

    @property
    def difference(self) -> float:
        """Mean of a less mean of b."""
        return self.mean_a - self.mean_b


def compare(
    a: Mapping[str, float], b: Mapping[str, float], *, permutations: int = PERMUTATIONS, seed: int = SEED
) -> Comparison:
    """Compare two systems by a paired randomisation test.

    If the systems were alike, the sign of each query's difference would be a coin toss (Fisher; Smucker, Allan and
    Carterette, "A comparison of statistical significance tests for information retrieval evaluation", CIKM 2007). Up
    to 16 queries every pattern of signs is counted; beyond, patterns are drawn, and the observed one is counted among
    them, so that p is never 0.

    Args:
        a: Score of each query under the first system.
        b: Score of each query under the second system.
        permutations: Patterns to draw.
        seed: Seed of the draw.

    Returns:
        Means, two-sided p value, wins and losses.

    Raises:
        ValueError: The systems were scored on different queries, or on none, or there are no patterns to draw.

    Example:
        ::

            result = compare({"q1": 0.9, "q2": 0.5}, {"q1": 0.4, "q2": 0.1})
            print(result.difference, result.p_value)  # 0.45 0.5
    """
    if a.keys() != b.keys() or not a:
        raise ValueError(
            f"Both systems must be scored on the same queries, found {len(a)} and {len(b)} with "
            f"{len(a.keys() & b.keys())} in common."
        )
    if permutations < 1:
        raise ValueError(f"The test draws at least one pattern of signs, not {permutations}.")
    differences = np.array([a[query] - b[query] for query in a])
    observed, count = abs(differences.sum()), len(differences)
    exact = count <= EXACT_QUERIES
    # A sum that equals the observed one but for rounding is as large.
    at_least = observed * (1 - 1e-12) - 1e-12
    if exact:
        patterns = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        p_value = float(np.mean(np.abs((2 * patterns - 1) @ differences) >= at_least))
    else:
        generator, larger = np.random.default_rng(seed), 0
        for start in range(0, permutations, _BLOCK):
            signs = generator.integers(0, 2, (min(_BLOCK, permutations - start), count)) * 2 - 1
            larger += int(np.sum(np.abs(signs @ differences) >= at_least))
        p_value = (larger + 1) / (permutations + 1)
    return Comparison(
        mean_a=float(np.mean(list(a.values()))),
        mean_b=float(np.mean([b[query] for query in a])),
        p_value=p_value,
        exact=exact,
        seed=seed,
        permutations=2**count if exact else permutations,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )
