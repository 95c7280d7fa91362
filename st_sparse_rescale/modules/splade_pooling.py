"""The SPLADE pooling of sentence-transformers, safe against infinite padding, with an option to skip [CLS]."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base import BaseModel
from sentence_transformers.base.modules import Module
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder import modules as stock

from st_sparse_rescale.modules.fused_head import splade_head, unpad
from st_sparse_rescale.modules.hand_over import DECODER_INPUT, DecoderInput
from st_sparse_rescale.modules.stock_checkpoint import SavedAsStock


class SpladePooling(SavedAsStock, stock.SpladePooling):
    """Pool token logits into one sparse vector: the maximum (or sum) over the positions of log(1 + relu(logit)).

    Equal to `sentence_transformers.sparse_encoder.modules.SpladePooling` bit for bit, gradients included, except that
    a padded position never counts: stock multiplies its logits by zero, which turns an infinite one into NaN.

    ``mask_special_tokens`` leaves out the positions of the special tokens that the tokenizer itself puts around every
    text ([CLS] and [SEP], ``<s>`` and ``</s>``), of queries and documents alike. Padding is known by the attention
    mask alone, so a padding token that doubles as a real token does no harm. A text may hold special tokens too: an
    [UNK] stands for a word and counts. Stock SPLADE pooling has no such option, but stock `MultiVectorMask`, put in
    front of it, does the same, so this is how it is computed here and how it is saved: plain sentence-transformers
    loads three modules and gives equal vectors. Two limits come with it: flattened inputs are padded again before the
    pooling, and in a plain model the mask knows no tasks but "query", "document" and none.

    Args:
        pooling_strategy: "max" (SPLADE v2 and later, https://arxiv.org/abs/2109.10086) or "sum"
            (https://arxiv.org/abs/2107.05720).
        activation_function: "relu", or "log1p_relu" for a second log(1 + x) (https://arxiv.org/abs/2504.14839).
        embedding_dimension: Width of the vectors, the vocabulary size; None takes it from the model.
        chunk_size: Number of positions pooled at a time, against memory; None pools all at once. Not saved.
        mask_special_tokens: Whether the tokenizer's own special tokens are left out of the pooling.
        tile: Number of terms that the fused head scores at a time, see `splade_head`; None chooses. Not saved.

    Raises:
        ValueError: If ``pooling_strategy`` or ``activation_function`` is unknown, or ``mask_special_tokens`` is
            neither True nor False.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[[1.0, -2.0], [3.0, float("inf")]]])  # (1 text, 2 positions, 2 terms)
        >>> features = {"token_embeddings": logits, "attention_mask": torch.tensor([[1, 0]])}
        >>> SpladePooling()(features)["sentence_embedding"]  # log(1 + 1) and 0; (1 text, 2 terms)
        tensor([[0.6931, 0.0000]])
    """

    stock_class: ClassVar[type[Module]] = stock.SpladePooling
    config_keys: list[str] = [*stock.SpladePooling.config_keys, "mask_special_tokens"]  # noqa: RUF012

    def __init__(
        self,
        pooling_strategy: Literal["max", "sum"] = "max",
        activation_function: Literal["relu", "log1p_relu"] = "relu",
        embedding_dimension: int | None = None,
        chunk_size: int | None = None,
        *,
        mask_special_tokens: bool = False,
        tile: int | None = None,
    ) -> None:
        super().__init__(pooling_strategy, activation_function, embedding_dimension, chunk_size)
        if not isinstance(mask_special_tokens, bool):
            raise ValueError(f"mask_special_tokens is {mask_special_tokens!r}, but must be True or False.")
        self.mask_special_tokens = mask_special_tokens
        self.tile = tile
        self.mask = MultiVectorMask(skiplist_tasks=["query", "document"]) if mask_special_tokens else None

    def on_model_ready(self, model: BaseModel) -> None:
        """Promote the built model, and look up the special tokens of its tokenizer.

        Raises:
            ValueError: If they are to be masked and there are none.
        """
        super().on_model_ready(model)
        if isinstance(model, SparseEncoder):
            model.similarity_fn_name = model.similarity_fn_name  # the default, dot, is saved rather than left open
        if self.mask is not None:
            self.mask.skiplist_words = special_tokens(model)
            if not self.mask.skiplist_words:
                raise ValueError(
                    "mask_special_tokens=True, but the tokenizer puts no special tokens around a text: "
                    "there is nothing to mask, so leave the option out."
                )
            self.mask.on_model_ready(model)

    def stock_modules(self) -> list[Module]:
        """The pooling, behind the mask if there is one."""
        return [self] if self.mask is None else [self.mask, self]

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Pool the logits of a batch, or what they are the product of.

        Args:
            features: ``token_embeddings``, the logits (batch, length, vocabulary), and ``attention_mask``
                (batch, length); or flattened, (1, total length, vocabulary) with the bounds ``cu_seq_lens_q``. From a
                `RescaledMLMTransformer`, ``decoder_input`` instead of the logits, which then never exist.

        Returns:
            The features with ``sentence_embedding`` (batch, vocabulary) added.
        """
        if DECODER_INPUT in features:
            return self._forward_fused(features, features.pop(DECODER_INPUT))
        counted = features if self.mask is None else self._without_special_tokens(features, self.mask)
        if "cu_seq_lens_q" in counted:
            return super().forward(features)  # flattened inputs hold no padding

        logits = counted["token_embeddings"]
        padding = (counted["attention_mask"] == 0).unsqueeze(-1)
        chunk_size = self.chunk_size if self.chunk_size and self.chunk_size > 0 else logits.shape[1]
        chunks = zip(logits.split(chunk_size, dim=1), padding.split(chunk_size, dim=1), strict=True)
        pooled = functools.reduce(self._combine, (self._pool(*chunk) for chunk in chunks))

        self.embedding_dimension = pooled.shape[1]
        features["sentence_embedding"] = pooled
        return features

    def _forward_fused(self, features: dict[str, Any], decoder_input: DecoderInput) -> dict[str, Any]:
        """Multiply and pool tile by tile, over the positions that count."""
        counted = {**features, "token_embeddings": decoder_input.states}
        if self.mask is not None:
            counted = self._without_special_tokens(counted, self.mask)
        if "cu_seq_lens_q" in counted:  # flattened inputs hold no padding
            tokens, bounds = counted["token_embeddings"].squeeze(0), counted["cu_seq_lens_q"]
        else:
            tokens, bounds = unpad(counted["token_embeddings"], counted["attention_mask"])
        features["sentence_embedding"] = splade_head(
            tokens,
            bounds,
            decoder_input.weight,
            decoder_input.bias,
            activation=self.activation_function,
            pooling=self.pooling_strategy,
            tile=self.tile,
        )
        self.embedding_dimension = len(decoder_input.weight)
        return features

    @staticmethod
    def _without_special_tokens(features: dict[str, Any], mask: MultiVectorMask) -> dict[str, Any]:
        if not mask.skiplist_words:
            raise RuntimeError(
                "mask_special_tokens=True needs the special tokens of a model. Call `pooling.on_model_ready(model)` "
                "after putting a SpladePooling into a model that is already built."
            )
        return mask(dict(features))

    def _pool(self, logits: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Pool (batch, positions, vocabulary) to (batch, vocabulary); ``padding`` is (batch, positions, 1)."""
        scores = logits.masked_fill(padding, 0.0).relu_()
        for _ in range(2 if self.activation_function == "log1p_relu" else 1):
            scores = scores.log1p() if self.training or scores.requires_grad else scores.log1p_()
        return scores.max(dim=1).values if self.pooling_strategy == "max" else scores.sum(dim=1)

    def _combine(self, pooled: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        return torch.maximum(pooled, chunk) if self.pooling_strategy == "max" else pooled + chunk


def special_tokens(model: BaseModel) -> list[str]:
    """The tokens that the tokenizer of a model puts around every text."""
    return model.tokenizer.convert_ids_to_tokens(model.tokenizer("").input_ids)
