"""Checksums, by which texts, models and files are known again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import torch


def texts_crc32(texts: Iterable[str]) -> int:
    """CRC-32 of texts and of where each ends: ``["ab", "c"]`` differs from ``["a", "bc"]``."""
    checksum = 0
    for text in texts:
        encoded = text.encode()
        checksum = zlib.crc32(encoded, zlib.crc32(len(encoded).to_bytes(8, "little"), checksum))
    return checksum


def model_crc32(model: torch.nn.Module) -> int:
    """CRC-32 of a model's weights."""
    checksum = 0
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
