"""Encode texts chunk by chunk, and tell one encoding from another by its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from scipy import sparse

from st_sparse_rescale.evaluation.checksum import model_crc32
from st_sparse_rescale.evaluation.csr import as_csr

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

Task: TypeAlias = Literal["query", "document"]

# Texts that a process encodes at a time: enough to sort by length, few enough to show progress. The batches, and so the
# vectors to the last bit, follow from it: they are the same for any number of processes.
CHUNK = 1_024


def encode_texts(
    model: SparseEncoder,
    texts: Sequence[str],
    *,
    task: Task = "document",
    batch_size: int = 32,
    max_active_dims: int | None = None,
    on_encoded: Callable[[int], Any] | None = None,
    **encode_kwargs: Any,
) -> sparse.csr_matrix:
    """Encode texts in chunks; within each the model sorts them by length.

    Args:
        model: The encoder.
        texts: At least one text.
        task: Which side they are on: ``encode_query`` or ``encode_document``.
        batch_size: Texts encoded at once.
        max_active_dims: Terms kept a text; ``None`` takes the model's own setting.
        on_encoded: Told how many further texts are done.
        **encode_kwargs: Further arguments of the model's method, such as ``prompt`` or ``pool``.

    Returns:
        (texts, vocabulary), as :func:`~st_sparse_rescale.evaluation.csr.as_csr` gives it.

    Raises:
        ValueError: A weight is negative, infinite or NaN.

    Example:
        ::

            vectors = encode_texts(model, ["sparse retrieval", "dense retrieval"])
            vectors.shape  # (2, 30522)
    """
    encode = model.encode_query if task == "query" else model.encode_document
    pool = encode_kwargs.get("pool")
    step = CHUNK * (len(pool["processes"]) if pool is not None else 1)
    parts = []
    for start in range(0, len(texts), step):
        chunk = list(texts[start : start + step])
        vectors = encode(
            chunk,
            batch_size=batch_size,
            max_active_dims=max_active_dims,
            show_progress_bar=False,
            save_to_cpu=True,
            **{"chunk_size": CHUNK} | encode_kwargs,
        )
        parts.append(as_csr(vectors))
        if on_encoded is not None:
            on_encoded(len(chunk))
    return sparse.vstack(parts, format="csr")


def encoding_settings(model: SparseEncoder, max_active_dims: int | None, **encode_kwargs: Any) -> dict[str, Any]:
    """What the vectors of an encoding depend on besides the texts, as JSON holds it.

    Args:
        model: The encoder.
        max_active_dims: As for :func:`encode_texts`.
        **encode_kwargs: As for :func:`encode_texts`.
    """
    return {
        "model_crc32": model_crc32(model),
        "prompts": dict(model.prompts),
        "max_seq_length": model.max_seq_length,
        "max_active_dims": model.max_active_dims if max_active_dims is None else max_active_dims,
        **{name: encode_kwargs.get(name) for name in ("prompt", "prompt_name")},
    }
