"""The models of an evaluation: loaded, named, and known again by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, TypeAlias

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder
from sentence_transformers.util import load_file_path

from st_sparse_rescale.evaluation.checksum import model_crc32
from st_sparse_rescale.modules import fuse
from st_sparse_rescale.trained_head import refuse_training_folder, require_trained_head

Sparse: TypeAlias = str | Path | SparseEncoder
Dense: TypeAlias = str | Path | SentenceTransformer


class Systems:
    """The sparse models, the first of which is the one in question, and perhaps a dense one.

    Args:
        models: Sparse models, loaded or not.
        dense: A dense model, loaded or not.
        max_length: Tokens a text for the sparse models, instead of their own limits.

    Raises:
        ValueError: A checkpoint would run on random weights, or a model cannot read ``max_length`` tokens.
        OSError: A checkpoint is not there.

    Example:
        ::

            systems = Systems(["runs/a/model", "runs/b/model"])
            list(systems.sparse)  # ["a", "b"]
    """

    def __init__(self, models: Sequence[Sparse], dense: Dense | None = None, max_length: int | None = None) -> None:
        names = [name_of(model) for model in models]
        if len(set(names)) < len(names):  # runs/a/final and runs/b/final
            names = [f"{letter}: {name}" for letter, name in zip(ascii_uppercase, names, strict=False)]
        self.sparse: dict[str, SparseEncoder] = dict(zip(names, map(_sparse, models), strict=True))
        """By name."""
        if max_length is not None:
            for name, model in self.sparse.items():
                _limit_length(name, model, max_length)
        self.dense: dict[str, SentenceTransformer] = {}
        """By name, if there is one."""
        if dense is not None:
            loaded = dense if isinstance(dense, SentenceTransformer) else SentenceTransformer(str(dense))
            self.dense[f"{name_of(dense)} (dense)"] = loaded

    def checksums(self) -> dict[str, int]:
        """Checksum of each model, by which it is known again."""
        return {name: model_crc32(model) for name, model in (self.sparse | self.dense).items()}


def name_of(model: Any) -> str:
    """The folder's name, or for the ``model`` that a training leaves the name of the training's folder."""
    if not isinstance(model, str | Path):
        return "model"
    path = Path(model).resolve()
    return path.parent.name if path.name == "model" else path.name


def _sparse(model: Sparse) -> SparseEncoder:
    if isinstance(model, SparseEncoder):
        return model
    refuse_training_folder(str(model))
    loaded = SparseEncoder(str(model))
    _require_trained(str(model), loaded)
    try:
        return fuse(loaded)  # equal vectors, sooner
    except ValueError:
        return loaded  # another architecture runs as it is


def _require_trained(name: str, model: SparseEncoder) -> None:
    """Refuse what would run on random weights, of which sentence-transformers tells its log only."""
    if _shows_its_head(model[0]):
        require_trained_head(name)
    saved = load_file_path(name, "modules.json")
    known = Path(saved).read_text(encoding="utf-8") if saved else ""
    if any(isinstance(module, SparseAutoEncoder) for module in model) and "SparseAutoEncoder" not in known:
        raise ValueError(
            f"{name} holds no sparse encoder: sentence-transformers would put a new SparseAutoEncoder, random and "
            "untrained, on top of it. Pass a trained sparse encoder, or a masked language model with its head."
        )


def _shows_its_head(module: torch.nn.Module) -> bool:
    """Whether it is a masked language model that torch runs, and not quantised."""
    if not isinstance(module, Transformer) or module.transformer_task != "fill-mask" or module.backend != "torch":
        return False
    return getattr(module.model.config, "quantization_config", None) is None


def _transformers(model: SparseEncoder) -> list[Transformer]:
    return [module for module in model.modules() if isinstance(module, Transformer)]


def _limit_length(name: str, model: SparseEncoder, max_length: int) -> None:
    model.max_seq_length = max_length
    for module in _transformers(model):
        module.query_length = module.document_length = None  # limits of one side come before it
    try:
        model.encode_document([" ".join(["a"] * max_length)], show_progress_bar=False)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"{name} cannot read {max_length} tokens ({error}): choose a smaller length.") from error
