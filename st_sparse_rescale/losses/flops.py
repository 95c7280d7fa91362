"""FLOPS, right under data parallelism."""

from __future__ import annotations

from sentence_transformers.sparse_encoder import losses
from torch import Tensor

from st_sparse_rescale.losses.global_mean import global_mean


class FlopsLoss(losses.FlopsLoss):
    """sentence-transformers' ``FlopsLoss``, with the mean taken over the global batch.

    ``FLOPS = sum_t (mean_i e_{i,t})**2`` (Paria et al., 2020, arXiv:2004.05665). On one process it equals the class it
    extends; on several, where that class squares a mean per process, value and gradients here are those of one process
    with the whole batch.

    Under gradient accumulation the mean is still that of one micro-batch, as the others are gone by then; use
    ``CachedSpladeLoss`` for a large batch with its true FLOPS.

    Args:
        model: The model to be regularised.
        threshold: Only rows with more active dimensions than this are penalised (arXiv:2504.14839).

    Example:
        >>> import torch
        >>> FlopsLoss(model=None).compute_loss_from_embeddings(torch.tensor([[1.0, 0.0], [3.0, 2.0]])).item()
        5.0
    """

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute FLOPS over the rows of all processes.

        Args:
            embeddings: Shape (rows, V), the queries or all documents of this process.

        Returns:
            A scalar, the same on every process.
        """
        if self.threshold is not None:
            embeddings = embeddings * ((embeddings != 0).sum(dim=1, keepdim=True) > self.threshold)
        return global_mean(embeddings).square().sum()
