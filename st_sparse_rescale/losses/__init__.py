"""Losses of sentence-transformers for sparse encoders, and the regularisers it lacks.

``FlopsLoss`` here is the one that is right under data parallelism. ``SpladeLoss`` builds sentence-transformers' own
when it is given no regulariser, so on several processes pass this one as ``document_regularizer`` and
``query_regularizer``.
"""

from sentence_transformers.sparse_encoder.losses import (
    CachedSpladeLoss,
    CSRLoss,
    CSRReconstructionLoss,
    SparseAnglELoss,
    SparseCoSENTLoss,
    SparseCosineSimilarityLoss,
    SparseDistillKLDivLoss,
    SparseMarginMSELoss,
    SparseMSELoss,
    SparseMultipleNegativesRankingLoss,
    SparseTripletLoss,
    SpladeLoss,
)

from st_sparse_rescale.losses.df_flops import DFFlopsLoss
from st_sparse_rescale.losses.flops import FlopsLoss
from st_sparse_rescale.losses.joint_flops import JointFlopsLoss
from st_sparse_rescale.losses.l1 import L1Loss

__all__ = [
    "CSRLoss",
    "CSRReconstructionLoss",
    "CachedSpladeLoss",
    "DFFlopsLoss",
    "FlopsLoss",
    "JointFlopsLoss",
    "L1Loss",
    "SparseAnglELoss",
    "SparseCoSENTLoss",
    "SparseCosineSimilarityLoss",
    "SparseDistillKLDivLoss",
    "SparseMSELoss",
    "SparseMarginMSELoss",
    "SparseMultipleNegativesRankingLoss",
    "SparseTripletLoss",
    "SpladeLoss",
]
