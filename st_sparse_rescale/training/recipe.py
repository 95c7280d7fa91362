# ruff: noqa: RUF009 - the settings are declared by a function that returns dataclasses.field
"""A recipe: every setting of a training, in one small readable file."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from rich.table import Table
from transformers import PretrainedConfig

from st_sparse_rescale.rescaling import recorded_rescale, validate_k
from st_sparse_rescale.whole import written_whole

RECIPES = files("st_sparse_rescale.training") / "recipes"

Check = Callable[[Any], Any]


class RecipeError(ValueError):
    """A recipe that says something impossible; the message names the setting, the reason and the mend."""


def _number(above: float | None = None, at_least: float | None = None, at_most: float = math.inf) -> Check:
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least is not None else ""
    bound += f" and at most {at_most:g}" if at_most < math.inf else ""

    def check(value: Any) -> float:
        # YAML 1.1 reads 2e-5, which lacks a point, as text.
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        in_range = (above is None or number > above) and (at_least is None or number >= at_least) and number <= at_most
        if not (math.isfinite(number) and in_range):
            raise ValueError(f"a number{bound}")
        return number

    return check


def _integer(at_least: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"a whole number of at least {at_least}")
        return value

    return check


def _choice(*options: str) -> Check:
    def check(value: Any) -> str:
        if value not in options:
            raise ValueError(f"one of {', '.join(options)}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError("text")
    return str(value)


def _names(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ValueError("a mapping of role to column name")
    return dict(value)


def _k(value: Any) -> float | str | dict[str, float | str]:
    if isinstance(value, dict):
        return {str(model_type): validate_k(k) for model_type, k in value.items()}
    return validate_k(value)


def _factor(value: Any) -> float | str:
    if value == "k":
        return "k"
    try:
        return _number(above=0)(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "k"') from error


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _setting(default: Any, meaning: str, check: Check) -> Any:
    """Declare a setting; this is ``dataclasses.field`` with the two things that every setting has."""
    metadata = {"meaning": meaning, "check": check}
    return (
        field(default_factory=dict, metadata=metadata) if default == {} else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True)
class Recipe:
    """All settings of one training.

    A recipe loads from YAML (:meth:`load`), is completed for a checkpoint (:meth:`resolved`), printed (:meth:`table`)
    and saved beside the model (:meth:`save`); a saved recipe loads again and repeats the run.

    Raises:
        RecipeError: If a value is impossible; the message names the setting, the value and what it must be.

    Example:
        >>> recipe = Recipe.load("paper", batch_size=16)
        >>> recipe.batch_size, recipe.loss, recipe.k["modernbert"]
        (16, 'contrastive', 16.0)
        >>> Recipe.load("paper", batchsize=16)
        Traceback (most recent call last):
        ...
        st_sparse_rescale.training.recipe.RecipeError: unknown setting 'batchsize': did you mean 'batch_size'?
    """

    model: str | None = _setting(None, "checkpoint to train: a folder or a hub name", _or_none(_text))
    train: str | None = _setting(None, "training data: a file or a hub name", _or_none(_text))
    eval: str | None = _setting(None, "evaluation data: a BEIR folder or nanobeir", _or_none(_text))

    k: float | str | dict[str, float | str] | None = _setting(
        None, "divisor of the head's logits, auto to measure it, or one for each model_type", _or_none(_k)
    )
    k_source: str | None = _setting(None, "where k came from", _or_none(_text))
    strategy: Literal["weight", "norm"] = _setting(
        "weight", "what k divides: the head's matrix or the final norm", _choice("weight", "norm")
    )
    query_encoder: Literal["mlm", "idf"] = _setting(
        "mlm", "queries by the model, or by the terms' IDF alone", _choice("mlm", "idf")
    )
    max_seq_length: int = _setting(256, "tokens per text, in training and in use", _integer(1))
    trust_remote_code: bool = _setting(False, "run the checkpoint's own code", _flag)

    columns: dict[str, str] = _setting({}, "names of columns, as {query: question}", _names)
    num_negatives: int | None = _setting(None, "negatives kept per row; all if null", _or_none(_integer(0)))

    loss: Literal["contrastive", "margin_mse", "kl_div"] = _setting(
        "contrastive", "ranking loss: contrastive, margin_mse or kl_div", _choice("contrastive", "margin_mse", "kl_div")
    )
    scale: float = _setting(1.0, "contrastive: factor on dot products, 1 / temperature", _number(above=0))
    temperature: float = _setting(1.0, "kl_div: divisor of both sides' scores", _number(above=0))
    teacher_scale: float = _setting(1.0, "factor on teacher scores, into the student's unit", _number(above=0))

    regularizer: Literal["flops", "l1", "df_flops"] = _setting(
        "flops", "sparsity penalty of both sides: flops, l1 or df_flops", _choice("flops", "l1", "df_flops")
    )
    document_regularizer_weight: float = _setting(3e-5, "weight of the penalty on documents", _number(at_least=0))
    query_regularizer_weight: float = _setting(5e-5, "weight of the penalty on queries", _number(at_least=0))
    joint_flops_weight: float = _setting(0.0, "weight of the joint query-document FLOPS", _number(at_least=0))
    regularizer_warmup: float = _setting(
        1 / 3, "share of the steps in which the weights rise from 0, quadratically", _number(above=0, at_most=1)
    )

    epochs: float | None = _setting(None, "passes over the data; 1 without max_steps", _or_none(_number(above=0)))
    max_steps: int | None = _setting(None, "optimiser steps, instead of epochs", _or_none(_integer(1)))
    batch_size: int = _setting(32, "rows per batch, in each process", _integer(1))
    mini_batch_size: int | None = _setting(None, "texts in memory at once (GradCache)", _or_none(_integer(1)))
    gradient_accumulation: int = _setting(1, "batches per step, each with its own negatives", _integer(1))
    learning_rate: float = _setting(2e-5, "AdamW's peak learning rate", _number(above=0))
    head_learning_rate_factor: float | str = _setting(
        1.0, "factor of the head matrix's learning rate; k: the k of the head", _factor
    )
    query_learning_rate: float = _setting(
        0.0, "idf: learning rate of the terms' weights; 0 keeps them", _number(at_least=0)
    )
    warmup: float = _setting(
        0.1, "share of the steps in which learning rates rise from 0", _number(at_least=0, at_most=0.9)
    )
    weight_decay: float = _setting(0.01, "AdamW's weight decay", _number(at_least=0))
    max_grad_norm: float = _setting(1.0, "gradients are clipped to this norm", _number(above=0))
    precision: Literal["auto", "bf16", "fp32"] = _setting(
        "auto", "arithmetic; auto is bf16 where the GPU has it", _choice("auto", "bf16", "fp32")
    )
    seed: int = _setting(42, "seed of shuffling and dropout", _integer(0))

    logging_steps: int = _setting(50, "steps between two log lines", _integer(1))
    save_steps: int = _setting(500, "steps between two checkpoints, each evaluated", _integer(1))
    save_total_limit: int = _setting(3, "checkpoints kept", _integer(1))
    guard_patience: int = _setting(50, "collapsed steps in a row before training stops", _integer(1))

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            try:
                checked = setting.metadata["check"](value)
            except (TypeError, ValueError) as error:
                if setting.name == "k":
                    raise RecipeError(str(error)) from error
                raise RecipeError(f"{setting.name} is {value!r}, but must be {error}.") from error
            object.__setattr__(self, setting.name, checked)
        if self.epochs is not None and self.max_steps is not None:
            raise RecipeError(f"epochs is {self.epochs:g} and max_steps {self.max_steps}: leave one of them out.")
        if self.query_learning_rate and self.query_encoder != "idf":
            raise RecipeError(
                f"query_learning_rate is {self.query_learning_rate:g}, but with query_encoder {self.query_encoder} "
                "queries have no weights of their own: leave it at 0, or set query_encoder to idf."
            )

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> Recipe:
        """Load a recipe.

        Args:
            source: The name of a recipe of this package (``paper``, ``distil``) or the path of a YAML file.
            **overrides: Settings that replace the file's.

        Returns:
            The recipe.

        Raises:
            RecipeError: If there is no such recipe, it is not YAML, or it holds an unknown setting or an impossible
                value.
        """
        builtin = {file.name.removesuffix(".yaml"): file for file in RECIPES.iterdir() if file.name.endswith(".yaml")}
        path = builtin.get(str(source), Path(source))
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise RecipeError(
                f"there is no recipe {str(source)!r}: give a YAML file or one of {', '.join(sorted(builtin))}."
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RecipeError(f"{source} is not valid YAML in UTF-8: {error}") from error
        if not isinstance(settings, dict):
            raise RecipeError(f"{source} must hold 'setting: value' lines, but holds a {type(settings).__name__}.")
        if strange := [name for name in settings if not isinstance(name, str)]:
            raise RecipeError(f"{source}: {strange[0]!r} is not the name of a setting.")
        return cls().override(**settings).override(**overrides)

    def override(self, **changes: Any) -> Recipe:
        """Return this recipe with some settings replaced; epochs replaces max_steps, and the other way round.

        Args:
            **changes: Setting to new value.

        Returns:
            A new recipe.

        Raises:
            RecipeError: If a setting is unknown, with the nearest known one, or a value impossible.
        """
        known = [setting.name for setting in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(known)}."
                raise RecipeError(f"unknown setting {name!r}: {hint}")
        for length, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
            if changes.get(length) is not None:
                changes.setdefault(other, None)
        if "k" in changes:
            changes.setdefault("k_source", None)
        return dataclasses.replace(self, **changes)

    def resolved(self, config: PretrainedConfig) -> Recipe:
        """Settle what depends on the checkpoint and the machine: k and the precision.

        A given k wins, then the one recorded in the checkpoint, then the recipe's for its ``model_type``. A k of
        "auto" keeps what is recorded; else it stays, and the head is to be measured.

        Args:
            config: The checkpoint's configuration.

        Returns:
            A recipe of plain numbers, "auto" aside. Resolving it again changes nothing.

        Raises:
            RecipeError: If nothing says which k to use.
        """
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
        epochs = 1.0 if self.max_steps is None and self.epochs is None else self.epochs
        return dataclasses.replace(self, precision=precision, epochs=epochs, **self._k_for(config))

    def _k_for(self, config: PretrainedConfig) -> dict[str, Any]:
        recorded = recorded_rescale(config)
        if self.k is not None and not isinstance(self.k, dict) and (self.k != "auto" or recorded is None):
            return {"k": self.k, "k_source": self.k_source or "given"}
        if recorded is not None:
            return {"k": recorded.k, "strategy": recorded.strategy, "k_source": "recorded in the checkpoint"}
        by_type = self.k if isinstance(self.k, dict) else {}
        if config.model_type in by_type:
            return {"k": by_type[config.model_type], "k_source": f"the recipe's for model_type {config.model_type}"}
        raise RecipeError(
            f"no k is known for model_type {config.model_type!r}: give k (--k), a number, or auto to measure the head. "
            f"The recipe knows {', '.join(by_type) or 'no model_type'}."
        )

    def differences(self, other: Recipe) -> list[str]:
        """Name the settings in which two recipes differ, with both values.

        Args:
            other: The other recipe.

        Returns:
            Texts such as ``"seed 1 against 2"``.
        """
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self._names())
        return [f"{name} {mine!r} against {theirs!r}" for name, mine, theirs in pairs if mine != theirs]

    def save(self, path: str | Path) -> None:
        """Write the recipe as YAML, whole or not at all.

        Args:
            path: The file.
        """
        with written_whole(path) as partial:
            partial.write_text(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False), encoding="utf-8")

    def table(self) -> Table:
        """Return every setting with its value and meaning, for printing with rich."""
        table = Table(title="Resolved recipe", title_justify="left", show_edge=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("meaning")
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            shown = "-" if value in (None, {}) else f"{value:.6g}" if isinstance(value, float) else str(value)
            table.add_row(setting.name, shown, setting.metadata["meaning"])
        return table

    @classmethod
    def _names(cls) -> Iterable[str]:
        return (setting.name for setting in dataclasses.fields(cls))
