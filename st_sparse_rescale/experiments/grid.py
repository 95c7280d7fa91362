"""The runs of a sweep, from a small description of its grids."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from st_sparse_rescale.training.recipe import Recipe, RecipeError


class GridError(ValueError):
    """A description of a sweep that cannot be read; the message says what it must hold."""


def load_grid(path: str | Path) -> list[Recipe]:
    """Read a sweep: one recipe for every combination of settings, each once, in the order of the file.

    The file holds ``recipe``, the name or path of the recipe that all runs share, and ``grids``, a list. Each grid maps
    settings of the recipe to a value or a list of values; its first setting changes slowest. ``model`` is a checkpoint
    or the name of a shipped mini backbone.

    Runs that would be equal are one: dividing by k = 1 is the same under either strategy, and a
    ``head_learning_rate_factor`` of ``"k"`` is written as that number.

    Args:
        path: A YAML file.

    Returns:
        The recipes.

    Raises:
        GridError: The file cannot be read or holds something else.
        RecipeError: A setting is unknown or impossible.

    Example:
        ::

            # grid.yaml
            # recipe: sweep
            # grids:
            #   - {model: [bert-mini, modernbert-mini], k: [1, 4, 16], strategy: [weight, norm]}
            len(load_grid("grid.yaml"))  # 2 x (1 + 2 x 2) = 10
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GridError(f"{path} cannot be read as YAML: {error}") from error
    grids = content.get("grids") if isinstance(content, dict) else None
    if not isinstance(grids, list) or not all(isinstance(grid, dict) and "model" in grid for grid in grids):
        raise GridError(f"{path} must hold `recipe:` and `grids:`, a list of mappings that each name at least a model.")
    if unknown := sorted(content.keys() - {"recipe", "grids"}):
        raise GridError(f"{path}: {unknown[0]!r} is unknown: a sweep has `recipe` and `grids`.")
    base = Recipe.load(content.get("recipe", "sweep"))
    runs = [_settled(base.override(**settings)) for grid in grids for settings in _combinations(grid)]
    return [run for i, run in enumerate(runs) if run not in runs[:i]]


def _combinations(grid: dict[str, Any]) -> list[dict[str, Any]]:
    values = [value if isinstance(value, list) else [value] for value in grid.values()]
    return [dict(zip(grid, chosen, strict=True)) for chosen in product(*values)]


def _settled(recipe: Recipe) -> Recipe:
    """One way to write each run."""
    if not isinstance(recipe.k, float):
        raise RecipeError(f"k is {recipe.k!r}, but every run of a sweep needs a number.")
    factor = recipe.k if recipe.head_learning_rate_factor == "k" else recipe.head_learning_rate_factor
    strategy = "weight" if recipe.k == 1 else recipe.strategy
    return dataclasses.replace(recipe, strategy=strategy, head_learning_rate_factor=factor)
