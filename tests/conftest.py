"""Everything offline, one thread, and one tiny checkpoint per architecture and session."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import build_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from an architecture's name to its tiny checkpoint. Read only: copy before you write."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = build_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)
        return built[name]

    return build
