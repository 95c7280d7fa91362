"""The L1 penalty."""

from __future__ import annotations

from torch import Tensor

from st_sparse_rescale.losses.global_mean import global_mean
from st_sparse_rescale.losses.regularizer import Regularizer


class L1Loss(Regularizer):
    """The mean L1 norm of the embeddings, ``sum_t mean_i |e_{i,t}|``, over the global batch (Zamani et al., 2018).

    Unlike FLOPS it does not care whether the weight sits on terms that many texts share: it makes vectors short, not
    posting lists.

    Example:
        >>> import torch
        >>> L1Loss(model=None).compute_loss_from_embeddings(torch.tensor([[1.0, 0.0], [3.0, 2.0]])).item()
        3.0
    """

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute the mean L1 norm over the rows of all processes.

        Args:
            embeddings: Shape (rows, V), the queries or all documents of this process.

        Returns:
            A scalar, the same on every process.
        """
        return global_mean(embeddings.abs()).sum()

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return """
@inproceedings{zamani2018snrm,
    title={From Neural Re-Ranking to Neural Ranking: Learning a Sparse Representation for Inverted Indexing},
    author={Zamani, Hamed and Dehghani, Mostafa and Croft, W. Bruce and Learned-Miller, Erik and Kamps, Jaap},
    booktitle={Proceedings of the 27th ACM International Conference on Information and Knowledge Management},
    year={2018}
}
"""
