"""The joint FLOPS of queries and documents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from torch import Tensor, nn

from st_sparse_rescale.losses.global_mean import global_mean


class JointFlopsLoss(nn.Module):
    """A ranking loss plus ``weight * sum_t mean_q,t * mean_d,t``, the expected cost of scoring one pair.

    ``p_q . p_d``, the dot product of the terms' probabilities of being active in a query and in a document, is the
    number of multiplications per query-document pair: the FLOPS that evaluators report (Paria et al., 2020). This term
    relaxes it with mean activations, as FLOPS does for one side: a term is cheap if either side leaves it alone. The
    relaxation of the product is ours.

    ``SpladeLoss`` hands its regularisers one side at a time, so a penalty on both wraps the ranking loss, which sees
    all columns; ``SpladeLoss`` logs its two components by name. Its weight is not part of ``SpladeLoss``'s schedule:
    :class:`~st_sparse_rescale.training.callbacks.JointFlopsScheduler` ramps it.

    Args:
        model: The model to be trained.
        loss: The ranking loss; anything that ``SpladeLoss`` accepts.
        weight: Of the joint term, not negative.

    Raises:
        ValueError: If the weight is negative or not finite, or the loss has no ``compute_loss_from_embeddings``.

    Example::

        from st_sparse_rescale.losses import JointFlopsLoss, SpladeLoss, SparseMultipleNegativesRankingLoss

        ranking = JointFlopsLoss(model, SparseMultipleNegativesRankingLoss(model), weight=1e-3)
        loss = SpladeLoss(model, ranking, document_regularizer_weight=3e-5, query_regularizer_weight=5e-5)
    """

    def __init__(self, model: SparseEncoder, loss: nn.Module, weight: float) -> None:
        super().__init__()
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"The joint FLOPS weight is {weight}; give 0 or a positive, finite number.")
        if not hasattr(loss, "compute_loss_from_embeddings"):
            raise ValueError(
                f"{type(loss).__name__} has no compute_loss_from_embeddings, which SpladeLoss needs: "
                "pass one of the sparse ranking losses."
            )
        self.model = model
        self.loss = loss
        self.weight = weight

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Refuse to run alone, as sentence-transformers' own ranking losses do.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("JointFlopsLoss needs SpladeLoss or CachedSpladeLoss around it.")

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the ranking loss and the weighted joint term.

        Args:
            embeddings: One (rows, V) matrix for each column: queries, positives, negatives...
            labels: Passed to the ranking loss.

        Returns:
            The scalars ``base_loss`` and ``joint_flops_loss``; SpladeLoss adds them up.
        """
        ranking: Any = self.loss
        joint = (global_mean(embeddings[0]) * global_mean(torch.cat(embeddings[1:]))).sum()
        return {
            "base_loss": ranking.compute_loss_from_embeddings(embeddings, labels),
            "joint_flops_loss": self.weight * joint,
        }

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings shown in the model card."""
        return {"loss": self.loss, "weight": self.weight}

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return """
@article{paria2020minimizing,
    title={Minimizing flops to learn efficient sparse representations},
    author={Paria, Biswajit and Yeh, Chih-Kuan and Yen, Ian EH and Xu, Ning and Ravikumar, Pradeep and P{\\'o}czos, Barnab{\\'a}s},
    journal={arXiv preprint arXiv:2004.05665},
    year={2020}
}
"""  # noqa: E501
