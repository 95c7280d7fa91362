"""Rescale the MLM head of any masked language model and train it as a SPLADE retriever with sentence-transformers."""

# ruff: noqa: E402
from st_sparse_rescale.compatibility import require_companions

require_companions()  # before an import that would fail with a riddle

from st_sparse_rescale.calibration import HeadReport, KChoice, choose_k, measure_head
from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError
from st_sparse_rescale.modules import RescaledMLMTransformer, SpladePooling, fuse, unfuse
from st_sparse_rescale.rescaling import rescale_mlm_head

__version__ = "0.1.0"

__all__ = [
    "HeadReport",
    "KChoice",
    "MLMHead",
    "RescaledMLMTransformer",
    "SpladePooling",
    "UnsupportedHeadError",
    "choose_k",
    "fuse",
    "measure_head",
    "rescale_mlm_head",
    "unfuse",
]
