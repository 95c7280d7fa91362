"""FLOPS that charges frequent terms more."""

from __future__ import annotations

import math
from typing import Any

from sentence_transformers import SparseEncoder
from torch import Tensor

from st_sparse_rescale.losses.global_mean import global_mean
from st_sparse_rescale.losses.regularizer import Regularizer


class DFFlopsLoss(Regularizer):
    """DF-FLOPS (Porco et al., 2025, arXiv:2505.15070): terms with long posting lists pay, rare ones go free.

    The paper's: ``sum_t (w_t * mean_i e_{i,t})**2`` with ``w_t = 1 / (1 + (x_t**log_alpha(2) - 1)**beta)``, where
    ``x_t`` is the share of documents that hold term t. The weight is 0 for an unused term, 1/2 at ``x_t = alpha`` and
    1 for a term of every document; ``beta`` is the steepness.

    Ours: the paper encodes a validation set every 100 steps to count document frequencies. Here they are a running mean
    over the training batches (of all processes), which costs nothing; with the default momentum it remembers about
    100 batches. The first batches are corrected for the empty start as in Adam. The estimate is not part of a
    checkpoint: a resumed training gathers it anew. :attr:`document_frequency` shows it.

    Args:
        model: The model to be regularised. Documents and queries need an instance each.
        alpha: Document share at which the weight is one half, in (0, 1).
        beta: Steepness, positive.
        momentum: Of the running document frequencies, in [0, 1).

    Raises:
        ValueError: If a setting is out of its range.

    Example:
        >>> import torch
        >>> penalty = DFFlopsLoss(model=None, alpha=0.5, beta=1.0)
        >>> both_documents_use_term_0 = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> penalty.compute_loss_from_embeddings(both_documents_use_term_0).item()  # (1 * 2)**2 + (0.5 * 1)**2
        4.25
    """

    def __init__(self, model: SparseEncoder, alpha: float = 0.1, beta: float = 10.0, momentum: float = 0.99) -> None:
        super().__init__(model)
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}, but it is a share of documents: give a number between 0 and 1.")
        if not (beta > 0 and math.isfinite(beta)):
            raise ValueError(f"beta is {beta}, but it is the steepness of the weight: give a positive number.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}: give a number from 0 (last batch only) to below 1.")
        self.alpha = alpha
        self.beta = beta
        self.momentum = momentum
        self._running: Tensor | float = 0.0
        self._batches = 0

    @property
    def document_frequency(self) -> Tensor | None:
        """The estimated share of documents that hold each term, shape (V,); None before the first batch."""
        if not isinstance(self._running, Tensor):
            return None
        return self._running / (1 - self.momentum**self._batches)

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Update the document frequencies from a training batch and compute the penalty.

        Args:
            embeddings: Shape (rows, V), the queries or all documents of this process.

        Returns:
            A scalar, the same on every process.
        """
        share = global_mean((embeddings.detach() > 0).float())
        if embeddings.requires_grad:  # evaluation runs without gradients and must not be counted as training data
            self._running = self.momentum * self._running + (1 - self.momentum) * share
            self._batches += 1
        frequency = share if self.document_frequency is None else self.document_frequency
        return (self._weight(frequency) * global_mean(embeddings)).square().sum()

    def _weight(self, share: Tensor) -> Tensor:
        # A share of 0 becomes infinity and then a weight of 0; rounding must not turn a share of 1 negative.
        odds = (share.double() ** (math.log(2) / math.log(self.alpha)) - 1).clamp(min=0)
        return (1 / (1 + odds**self.beta)).to(share.dtype)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings shown in the model card."""
        return {"alpha": self.alpha, "beta": self.beta, "momentum": self.momentum}

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return """
@misc{porco2025alternativeflopsregularization,
    title={An Alternative to FLOPS Regularization to Effectively Productionize SPLADE-Doc},
    author={Aldo Porco and Dhruv Mehra and Igor Malioutov and Karthik Radhakrishnan and Moniba Keymanesh and Daniel Preo\\c{t}iuc-Pietro and Sean MacAvaney and Pengxiang Cheng},
    year={2025},
    eprint={2505.15070},
    archivePrefix={arXiv},
    primaryClass={cs.IR},
    url={https://arxiv.org/abs/2505.15070},
}
"""  # noqa: E501
