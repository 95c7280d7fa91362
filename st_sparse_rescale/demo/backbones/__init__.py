"""The mini backbones that ship with the package, each a folder that any Hugging Face loader reads."""

from __future__ import annotations

from pathlib import Path

BACKBONES = ("bert-mini", "modernbert-mini")


def backbone_path(name: str) -> str:
    """Return the local checkpoint folder of a shipped backbone.

    Args:
        name: ``"bert-mini"`` (a head of usual scale) or ``"modernbert-mini"`` (a head of large scale).

    Returns:
        A path for ``from_pretrained``, ``SparseEncoder`` or ``RescaledMLMTransformer``.

    Raises:
        ValueError: There is no backbone of that name.

    Example:
        ::

            from transformers import AutoModelForMaskedLM
            from st_sparse_rescale.demo import backbone_path

            model = AutoModelForMaskedLM.from_pretrained(backbone_path("bert-mini"))
    """
    if name not in BACKBONES:
        raise ValueError(f"No shipped backbone is called {name!r}: choose one of {', '.join(BACKBONES)}.")
    return str(Path(__file__).parent / name)
