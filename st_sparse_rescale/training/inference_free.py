"""Queries without a model: each term has one weight, from the start its inverse document frequency."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

CHUNK = 1_024  # texts tokenised at once
QUERY_WEIGHTS = r"\.sub_modules\.query\.\d+\.weight$"
"""Matches the name of a static query side's weights, for a ``learning_rate_mapping``."""


def idf_query_encoder(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], dimension: int | None = None, *, trained: bool = False
) -> SparseStaticEmbedding:
    """Make the query side of an inference-free retriever: a query is its terms, each with its IDF.

    At query time there is a tokenizer and a table, no model (SPLADE-doc, arXiv:2109.10086; inference-free with IDF,
    arXiv:2411.04403). Put it beside a document side in a ``Router``; what is saved is stock.

    Args:
        tokenizer: That of the document side; a copy is used, so that each side keeps its own settings.
        documents: Texts whose document frequencies count, such as the corpus or the training documents.
        dimension: Width of the document vectors, where the vocabulary of the model is larger than the tokenizer's, as
            models that round it up have it. The tokenizer gets filler tokens of weight 0 for the rest, since a stock
            checkpoint takes the width of the table from the tokenizer.
        trained: Whether the weights are parameters to be trained; otherwise they are frozen.

    Returns:
        The module for ``Router.for_query_document``.

    Raises:
        ValueError: There are no documents, ``dimension`` is smaller than the tokenizer's vocabulary, or that has gaps.

    Example::

        transformer = RescaledMLMTransformer("answerdotai/ModernBERT-base", k=16)
        queries = idf_query_encoder(transformer.tokenizer, documents, transformer.get_embedding_dimension())
        router = Router.for_query_document([queries], [transformer, SpladePooling()])
        model = SparseEncoder(modules=[router])
    """
    own: Any = copy.deepcopy(tokenizer)
    known = len(own.get_vocab())
    dimension = known if dimension is None else dimension
    if (last := max(own.get_vocab().values())) >= known:
        raise ValueError(
            f"The tokenizer has {known} tokens but ids up to {last}, and the table of weights has one row a token: "
            "use a checkpoint whose tokenizer counts without gaps."
        )
    if dimension < known:
        raise ValueError(f"dimension is {dimension}, but the tokenizer knows {known} tokens, each with its own weight.")
    weight = idf(own, documents, dimension)
    # No text is to match by these: not by what stands for any unknown word, nor by what is no token at all.
    weight[own.all_special_ids] = 0
    weight[known:] = 0
    own.add_tokens([f"<filler-{number}>" for number in range(known, dimension)])
    return SparseStaticEmbedding(own, weight=weight, frozen=not trained)


def idf(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], dimension: int) -> Tensor:
    """Count in how many documents each token stands: ``log(1 + (N - df + 0.5) / (df + 0.5))``, as in BM25.

    Args:
        tokenizer: Cuts documents at its ``model_max_length``.
        documents: N texts.
        dimension: Size of the vocabulary.

    Returns:
        Shape (dimension,), positive, in float32.

    Raises:
        ValueError: There are no documents.
    """
    texts, count = iter(documents), 0
    frequency = torch.zeros(dimension, dtype=torch.float64)
    while chunk := list(islice(texts, CHUNK)):
        count += len(chunk)
        for ids in tokenizer(chunk, add_special_tokens=False, truncation=True)["input_ids"]:
            frequency[list(set(ids))] += 1
    if not count:
        raise ValueError("There are no documents to count terms in.")
    return torch.log1p((count - frequency + 0.5) / (frequency + 0.5)).float()


def query_weights(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The weights of the static query sides in a model."""
    for module in model.modules():
        if isinstance(module, SparseStaticEmbedding):
            yield module.weight


class NonNegativeQueries(TrainerCallback):
    """Keeps trained query weights from falling below 0 after each step: inverted indexes hold no negative weights.

    Example::

        trainer = SparseEncoderTrainer(..., callbacks=[NonNegativeQueries()])
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Project the weights."""
        with torch.no_grad():
            for weight in query_weights(kwargs["model"]):
                weight.clamp_(min=0)
