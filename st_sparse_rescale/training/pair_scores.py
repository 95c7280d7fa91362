"""Scores of (query, document) pairs, by a cross-encoder or a sparse model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy import sparse
from sentence_transformers import CrossEncoder, SparseEncoder
from torch import nn

from st_sparse_rescale.evaluation.encoding import Task, encode_texts
from st_sparse_rescale.evaluation.retrieval import similarity_scale
from st_sparse_rescale.evaluation.systems import Systems

Pair = tuple[str, str]
PairScorer = Callable[[Sequence[Pair]], list[float]]
_CLASSIFIER = re.compile("SequenceClassification|Ranking")


def load_sparse(model: str | Path | SparseEncoder) -> SparseEncoder:
    """Load a sparse model as an evaluation does; one that is loaded is taken as it is.

    Raises:
        ValueError: Parts of it are untrained, such as the head.
    """
    [loaded] = Systems([model]).sparse.values()
    return loaded


def load_cross_encoder(model: str | Path | CrossEncoder) -> CrossEncoder:
    """Load a cross-encoder that gives one score a pair; one that is loaded is taken as it is.

    Raises:
        ValueError: It gives several numbers a pair, or it is loaded from a checkpoint that is no classifier, on top of
            which sentence-transformers would put a random one.
    """
    loaded = model if isinstance(model, CrossEncoder) else _trained(str(model))
    if loaded.num_labels != 1:
        raise ValueError(
            f"The cross-encoder gives {loaded.num_labels} numbers a pair, as a classifier does: use one that gives a "
            "single score of relevance."
        )
    return loaded


def _trained(name: str) -> CrossEncoder:
    loaded = CrossEncoder(name)
    made_as = loaded.model.config.architectures or []
    by_adapter = getattr(loaded.model, "peft_config", None) is not None  # which brings the layer that its base lacks
    classifies = loaded[0].transformer_task == "sequence-classification"
    if classifies and made_as and not by_adapter and not any(map(_CLASSIFIER.search, made_as)):
        raise ValueError(
            f"{name} holds {made_as[0]}, no trained cross-encoder: its scores would be those of a new, random layer. "
            "Give a cross-encoder, a ...ForSequenceClassification."
        )
    return loaded


def cross_encoder_scorer(model: CrossEncoder, *, logits: bool, batch_size: int = 32) -> PairScorer:
    """Score pairs by a cross-encoder.

    Args:
        model: The cross-encoder.
        logits: Whether to take its raw output; otherwise what its own activation makes of it, often a probability.
        batch_size: Pairs scored at once.

    Returns:
        A function from pairs to scores, which raises a ``ValueError`` where one is not finite.
    """
    activation = nn.Identity() if logits else None

    def score(pairs: Sequence[Pair]) -> list[float]:
        scores = model.predict(list(pairs), batch_size=batch_size, activation_fn=activation, show_progress_bar=False)
        return _finite(pairs, scores.tolist(), "cross-encoder")

    return score


def sparse_scorer(model: SparseEncoder, *, batch_size: int = 32) -> PairScorer:
    """Score pairs by the similarity of a sparse model, dot product or cosine. Each text is encoded once a call.

    Args:
        model: The sparse model.
        batch_size: Texts encoded at once.

    Returns:
        A function from pairs to scores.

    Raises:
        ValueError: The model's similarity is another.
    """
    scale = similarity_scale(model)

    def score(pairs: Sequence[Pair]) -> list[float]:
        def vectors(texts: Sequence[str], task: Task) -> sparse.csr_matrix:
            rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
            return scale(encode_texts(model, list(rows), task=task, batch_size=batch_size))[[rows[t] for t in texts]]

        queries, documents = zip(*pairs, strict=True)
        products = vectors(queries, "query").multiply(vectors(documents, "document"))
        return _finite(pairs, np.asarray(products.sum(axis=1)).ravel().tolist(), "sparse model")

    return score


def _finite(pairs: Sequence[Pair], scores: list[float], teacher: str) -> list[float]:
    """Give scores back, unless one is not finite."""
    for pair, value in zip(pairs, scores, strict=True):
        if not math.isfinite(value):
            raise ValueError(
                f"The {teacher}'s score of {pair[0]!r:.60} and {pair[1]!r:.60} is {value}: look for NaN in its "
                "weights, or load it in float32."
            )
    return scores
