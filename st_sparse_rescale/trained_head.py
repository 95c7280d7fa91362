"""Refuse checkpoints that hold no trained MLM head, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel
from transformers.utils import find_adapter_config_file, logging

from st_sparse_rescale.heads import UnsupportedHeadError


def require_trained_head(
    model_name_or_path: str, *, model_kwargs: dict[str, Any] | None = None, config_kwargs: dict[str, Any] | None = None
) -> None:
    """Check that a checkpoint is a masked language model whose whole head was trained.

    transformers fills in whatever a checkpoint lacks with random weights and says so in its load report, which few
    read: a retriever on a random head runs, and finds nothing. The report is taken from a load onto the meta device,
    which reads names and shapes only.

    Args:
        model_name_or_path: Folder or hub name of a checkpoint, or of an adapter, whose base is then checked.
        model_kwargs: Passed to ``AutoModelForMaskedLM.from_pretrained``.
        config_kwargs: Settings that override the checkpoint's config.

    Raises:
        UnsupportedHeadError: If the checkpoint cannot be loaded as a masked LM, if any parameter outside its base
            model, or the embedding that is tied to its decoder, is missing, or if it is quantised.

    Example:
        >>> require_trained_head("google-bert/bert-base-uncased")  # doctest: +SKIP
    """
    config_kwargs, model_kwargs = dict(config_kwargs or {}), dict(model_kwargs or {})
    name = model_name_or_path
    refuse_training_folder(name)
    if (base := _adapter_base(name, config_kwargs)) is not None:
        name = base
        for kwargs in (config_kwargs, model_kwargs):  # they locate the adapter, not its base
            kwargs.pop("revision", None)
            kwargs.pop("subfolder", None)

    config = AutoConfig.from_pretrained(name, **config_kwargs)
    if getattr(config, "quantization_config", None) or model_kwargs.get("quantization_config"):
        raise UnsupportedHeadError(
            f"{name!r} is quantised, and a quantised matrix cannot be divided without loss: load the checkpoint "
            "unquantised, and quantise what is saved afterwards."
        )
    try:
        with _quiet():
            model, report = AutoModelForMaskedLM.from_pretrained(
                name, config=config, **model_kwargs | {"device_map": "meta"}, output_loading_info=True
            )
    except ValueError as error:
        raise UnsupportedHeadError(
            f"{name!r} cannot be loaded as a masked language model: {error}\n"
            "SPLADE reads its vectors from an MLM head, so pass a checkpoint with one, a ...ForMaskedLM."
        ) from error
    if missing := _missing_from_head(model, report):
        raise UnsupportedHeadError(
            f"{name!r} holds no trained MLM head: {', '.join(missing)} would be newly initialised at random. Pass a "
            "complete masked language model; for an encoder or a dense model, the one that it was made from. (A "
            "missing decoder weight is no fault where it is tied to the input embeddings.)"
        )


def refuse_training_folder(name: str) -> None:
    """Refuse the folder of a training, which holds its model in a folder of its own.

    Raises:
        ValueError: The folder is no model, but holds a folder ``model`` that is one.
    """
    model = Path(name) / "model"
    if (model / "modules.json").exists() and not (Path(name) / "config.json").exists():
        raise ValueError(f"{name} is the folder of a training: its model is {model}.")


def _adapter_base(name: str, config_kwargs: dict[str, Any]) -> str | None:
    """The checkpoint that an adapter was made for; None if it is no adapter."""
    located = ("cache_dir", "token", "revision", "subfolder", "local_files_only")
    adapter = find_adapter_config_file(name, **{key: config_kwargs[key] for key in located if key in config_kwargs})
    return adapter and json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]


def _missing_from_head(model: PreTrainedModel, report: dict[str, Any]) -> list[str]:
    missing = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    decoder = model.get_output_embeddings()
    tied = {name for name, weight in model.named_parameters() if decoder is not None and weight is decoder.weight}
    return sorted(key for key in missing if key in tied or not key.startswith(f"{model.base_model_prefix}."))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers: whatever it has to say, the real load says again."""
    verbosity, progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress_bar:
            logging.enable_progress_bar()
