"""Modules of a sparse encoder: stock sentence-transformers modules on disk, with more to offer in memory."""

from st_sparse_rescale.modules.fuse import fuse, unfuse
from st_sparse_rescale.modules.rescaled_mlm_transformer import RescaledMLMTransformer
from st_sparse_rescale.modules.splade_pooling import SpladePooling

__all__ = ["RescaledMLMTransformer", "SpladePooling", "fuse", "unfuse"]
