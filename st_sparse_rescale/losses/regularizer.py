"""What every regulariser here shares: the protocol that SpladeLoss and CachedSpladeLoss call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from sentence_transformers import SparseEncoder
from torch import Tensor, nn


class Regularizer(nn.Module, ABC):
    """A penalty on one matrix of sparse embeddings, pluggable into ``SpladeLoss`` and ``CachedSpladeLoss``.

    Args:
        model: The model to be regularised.
    """

    def __init__(self, model: SparseEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Refuse to run alone, as sentence-transformers' own regularisers do.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not train alone: pass it to SpladeLoss as document_ or query_regularizer."
        )

    @abstractmethod
    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute the unweighted penalty.

        Args:
            embeddings: Shape (rows, V), the queries or all documents of this process.

        Returns:
            A scalar.
        """

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings shown in the model card."""
        return {}

    @property
    @abstractmethod
    def citation(self) -> str:
        """BibTeX for the model card."""
