"""A masked language model whose head is rescaled once, at the start of a SPLADE training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from sentence_transformers.base import BaseModel
from sentence_transformers.base.model_card import BaseModelCardData
from sentence_transformers.base.modules import Module, Transformer
from sentence_transformers.sparse_encoder import modules as stock

from st_sparse_rescale.calibration import KChoice, choose_k, measure_head
from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError
from st_sparse_rescale.modules.hand_over import (
    DECODER_INPUT,
    DecoderInput,
    HandedOver,
    can_hand_over,
    followers,
    handing_over,
)
from st_sparse_rescale.modules.splade_pooling import SpladePooling
from st_sparse_rescale.modules.stock_checkpoint import SavedAsStock
from st_sparse_rescale.rescaling import Strategy, recorded_rescale, rescale_mlm_head, validate_k, validate_strategy
from st_sparse_rescale.trained_head import require_trained_head

logger = logging.getLogger(__name__)

CITATION = """\
@misc{rescaling-mlm-head,
    title = {Rescaling MLM-Head for Neural Sparse Retrieval},
    year = {2026},
    eprint = {2606.18811},
    archivePrefix = {arXiv},
    url = {https://arxiv.org/abs/2606.18811},
}"""


class RescaledMLMTransformer(SavedAsStock, Transformer):
    """The first module of a SPLADE model: a masked LM whose logits start divided by k.

    A `sentence_transformers` ``Transformer`` with ``transformer_task="fill-mask"`` whose MLM head is rescaled once,
    when it is loaded (see `rescale_mlm_head`; arXiv:2606.18811). k, strategy and reason are recorded in the Hugging
    Face config, in the model card and in the ``repr``. A checkpoint that records a rescale is never divided again, so
    loading, resuming and copying are safe. What is saved is a stock ``Transformer``.

    An adapter (PEFT) is saved without its base. So save the rescaled model first, load that, and add the adapter then.

    Args:
        model_name_or_path: Folder or hub name of a masked language model.
        k: What the logits are divided by: a positive number; "auto" to measure the head and choose (see `choose_k`),
            or to keep what the checkpoint records; or None to take the checkpoint as it is.
        strategy: "weight" divides the decoder matrix, "norm" the norm before it and the bias.
        calibration_texts: Texts to measure the head on, for ``k="auto"``; by default the shipped ones.
        reason: How k was chosen, for the record; "auto" gives its own.
        **transformer_kwargs: Keyword arguments of ``Transformer``, such as ``max_seq_length``, ``model_kwargs``,
            ``processor_kwargs``, ``config_kwargs``.

    Raises:
        ValueError: If k or strategy is not usable, if the checkpoint records another rescale, or if the task or the
            backend is another than "fill-mask" and "torch".
        TypeError: If k is no number.
        UnsupportedHeadError: If the checkpoint holds no trained MLM head, or one that cannot be rescaled.

    Example:
        >>> from sentence_transformers import SparseEncoder
        >>> from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
        >>> from st_sparse_rescale.demo import backbone_path
        >>> transformer = RescaledMLMTransformer(backbone_path("modernbert-mini"), k=16)
        >>> model = SparseEncoder(modules=[transformer, SpladePooling()])
        >>> model.encode(["sparse retrieval"]).shape
        torch.Size([1, 8192])
    """

    stock_class: ClassVar[type[Module]] = Transformer
    hands_over: bool = False
    """Whether the pooling gets the decoder's input instead of the logits; found out when the model is built."""
    rescaled_here: bool = False
    """Whether the head was divided in memory and not yet on disk."""
    k_choice: KChoice | None = None
    """What was chosen for ``k="auto"``, with its evidence."""

    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        k: float | Literal["auto"] | None = None,
        strategy: Strategy = "weight",
        calibration_texts: Sequence[str] | None = None,
        reason: str = "given",
        **transformer_kwargs: Any,
    ) -> None:
        if k is not None:
            k = validate_k(k)
        validate_strategy(strategy)
        if calibration_texts is not None and k != "auto":
            raise ValueError(f'calibration_texts are for k="auto", and k is {k!r}: leave one of them out.')
        if (task := transformer_kwargs.setdefault("transformer_task", "fill-mask")) != "fill-mask":
            raise ValueError(f"transformer_task={task!r}: SPLADE reads its vectors from an MLM head, so leave it out.")
        if (backend := transformer_kwargs.get("backend", "torch")) != "torch":
            raise ValueError(
                f"backend={backend!r}: the head of an exported graph cannot be rescaled. Rescale with the torch "
                f"backend, save, and load what is saved with SparseEncoder(..., backend={backend!r})."
            )
        model_name_or_path = str(model_name_or_path)
        require_trained_head(
            model_name_or_path,
            model_kwargs=transformer_kwargs.get("model_kwargs"),
            config_kwargs=transformer_kwargs.get("config_kwargs"),
        )
        super().__init__(model_name_or_path, **transformer_kwargs)
        recorded = recorded_rescale(self.model)
        if k == "auto" and recorded is not None:
            logger.warning("%s records k=%g (%s), which is kept.", model_name_or_path, recorded.k, recorded.strategy)
            k = None
        elif k == "auto":
            self.k_choice = choose_k(measure_head(self, calibration_texts), strategy)
            k, reason = self.k_choice.k, self.k_choice.reason
            logger.info("%s: %s", model_name_or_path, self.k_choice.headline)
        if k is not None:
            rescale_mlm_head(self.model, k, strategy, reason=reason)
        self.rescaled_here = recorded is None and recorded_rescale(self.model) is not None
        self._refuse_adapter_without_base()

    def on_model_ready(self, model: BaseModel) -> None:
        """Promote the built model, tell its poolings the width of the vectors, and see who gets what from here."""
        super().on_model_ready(model)
        after = followers(model, self)
        self.hands_over = all(isinstance(module, SpladePooling) for module in after) and self._logits_are_a_product()
        for module in model.modules():
            if isinstance(module, stock.SpladePooling) and module.embedding_dimension is None:
                module.embedding_dimension = self.get_embedding_dimension()

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the masked LM.

        Args:
            features: What the tokenizer made: ``input_ids`` and ``attention_mask`` (batch, length), and others.
            **kwargs: Passed to the model.

        Returns:
            The features with ``token_embeddings``, the logits (batch, length, vocabulary), added; or, where our
            pooling comes next, with ``decoder_input``, what the logits are the product of.
        """
        decoder = self.model.get_output_embeddings()
        if not (self.hands_over and can_hand_over(decoder)):
            return super().forward(features, **kwargs)
        with handing_over(decoder):
            features = HandedOver(super().forward(features, **kwargs))
        features[DECODER_INPUT] = DecoderInput(features.pop("token_embeddings"), decoder.weight, decoder.bias)
        return features

    def before_save(self, card: BaseModelCardData) -> None:
        """Refuse to save an adapter alone, and put k, strategy, reason and the citation into the model card.

        Raises:
            ValueError: If an adapter was added to a base that is rescaled in memory only.
        """
        self._refuse_adapter_without_base()
        if (rescale := recorded_rescale(self.model)) is not None:
            heading = f'MLM-head rescaling (k = {rescale.k:g}, strategy "{rescale.strategy}", reason: {rescale.reason})'
            card.citations[heading] = CITATION
            card.add_tags("mlm-head-rescaling")

    def get_embedding_dimension(self) -> int:
        """The width of the logits: the vocabulary size of the model, which may be rounded up from the tokenizer's."""
        return self.config.vocab_size

    def _logits_are_a_product(self) -> bool:
        """Whether nothing but the decoder itself stands between its input and the logits."""
        try:
            head = MLMHead.of(self.model)
        except UnsupportedHeadError:
            return False
        return head.bias is head.decoder.bias

    def _refuse_adapter_without_base(self) -> None:
        if self.rescaled_here and getattr(self.model, "peft_config", None):
            raise ValueError(
                f"An adapter is saved without its base, and {self.model.name_or_path!r}, the base, is not rescaled "
                "on disk: the adapter would be loaded onto other weights. Save the rescaled model first "
                "(model.save_pretrained(folder)), load that with RescaledMLMTransformer(folder), and add the adapter "
                "to it."
            )

    def __repr__(self) -> str:
        rescale = recorded_rescale(self.model)
        settings: dict[str, Any] = {"k": 1.0} if rescale is None else dataclasses.asdict(rescale)
        if self.k_choice is not None:
            settings["reason"] = self.k_choice.reason  # of which k = 1 leaves no record
        architecture = type(self.model).__name__
        return f"{type(self).__name__}({self.get_config_dict() | {'architecture': architecture} | settings})"
