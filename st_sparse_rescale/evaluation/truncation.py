"""How much of the texts a model does not get to see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from sentence_transformers import SparseEncoder

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_BATCH = 256
_UNLIMITED = int(1e30)  # what transformers takes for a tokenizer without a limit


@dataclass(frozen=True)
class Truncation:
    """The length limit on one side, and what it does to the texts."""

    max_length: int | None
    """Tokens a text, special tokens and prompt included; ``None`` where there is no limit."""
    share: float
    """Share of the texts that are cut, from 0 to 1."""


def measure_truncation(
    model: SparseEncoder, texts: Sequence[str], task: Literal["query", "document"], prompt: str | None = None
) -> Truncation:
    """Count the texts that a model cuts off.

    The texts are tokenized by the model's own preprocessing, once without limit; the limit is what the model leaves of
    the longest text.

    Args:
        model: The model.
        texts: The texts.
        task: Which side the texts are on, as for ``encode_query`` and ``encode_document``.
        prompt: Prompt in front of each text; by default the model's own for the task.

    Returns:
        The limit and the share of texts beyond it.

    Example:
        ::

            measure_truncation(model, list(corpus.values()), "document")  # Truncation(max_length=256, share=0.31)
    """
    if not texts:
        return Truncation(_declared(model), 0.0)
    prompt = _default_prompt(model, task) if prompt is None else prompt
    with _unlimited(model):
        unlimited = {"text": {"truncation": False, "verbose": False}}
        lengths = [
            length
            for start in range(0, len(texts), _BATCH)
            for length in _lengths(model, texts[start : start + _BATCH], task, prompt, processing_kwargs=unlimited)
        ]
    longest = max(range(len(texts)), key=lengths.__getitem__)
    limit = _lengths(model, [texts[longest]], task, prompt)[0]
    cut = sum(length > limit for length in lengths)
    return Truncation(limit if cut else _declared(model), cut / len(texts))


def _lengths(model: SparseEncoder, texts: Sequence[str], task: str, prompt: str | None, **kwargs: Any) -> list[int]:
    return model.preprocess(list(texts), prompt=prompt, task=task, **kwargs)["attention_mask"].sum(dim=1).tolist()


def _declared(model: SparseEncoder) -> int | None:
    limit = model.max_seq_length
    return limit if limit is not None and limit < _UNLIMITED else None


def _default_prompt(model: SparseEncoder, task: str) -> str | None:
    names = ("query",) if task == "query" else DOCUMENT_PROMPTS
    name = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return model.prompts[name] if name is not None else None


@contextmanager
def _unlimited(model: SparseEncoder) -> Iterator[None]:
    """Lift the limits of all tokenizers: static embeddings take no ``processing_kwargs``."""
    found = (getattr(module, "tokenizer", None) for module in model.modules())
    limits = [(tokenizer, tokenizer.model_max_length) for tokenizer in found if tokenizer is not None]
    try:
        for tokenizer, _ in limits:
            tokenizer.model_max_length = _UNLIMITED
        yield
    finally:
        for tokenizer, limit in reversed(limits):
            tokenizer.model_max_length = limit
