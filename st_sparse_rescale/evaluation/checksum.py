"""Checksums, by which texts, models and files are known again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from sentence_transformers.base import BaseModel
from sentence_transformers.base.modules import Module


def texts_crc32(texts: Iterable[str]) -> int:
    """CRC-32 of texts and of where each ends: ``["ab", "c"]`` differs from ``["a", "bc"]``.

    Raises:
        TypeError: One is no text.
    """
    checksum = 0
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"Texts must be strings, got {text!r} ({type(text).__name__}).")
        encoded = text.encode()
        checksum = zlib.crc32(encoded, zlib.crc32(len(encoded).to_bytes(8, "little"), checksum))
    return checksum


def model_crc32(model: BaseModel) -> int:
    """CRC-32 of all that decides on a model's vectors: weights, prompts, lengths and the settings of its modules."""
    modules = [module.get_config_dict() for module in model.modules() if isinstance(module, Module)]
    for config in modules:
        config.pop("embedding_dimension", None)  # some modules learn it from their first input
    names = ("prompts", "default_prompt_name", "similarity_fn_name", "max_seq_length", "max_active_dims")
    settings = [modules, *(getattr(model, name, None) for name in names)]
    return weights_crc32(model, zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode()))


def weights_crc32(model: torch.nn.Module, checksum: int = 0) -> int:
    """CRC-32 of a model's weights, by which it is known again where its lengths and prompts are others."""
    for tensor in model.state_dict().values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
    return checksum


def file_crc32(file: Path) -> int:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
