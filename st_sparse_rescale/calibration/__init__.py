"""Measure a head on texts, diagnose it, and choose k."""

from st_sparse_rescale.calibration.choice import KChoice, choose_k
from st_sparse_rescale.calibration.head_report import HeadReport
from st_sparse_rescale.calibration.measure import MAX_TEXTS, measure_head
from st_sparse_rescale.calibration.texts import read_texts, sample, shipped_texts

__all__ = [
    "MAX_TEXTS",
    "HeadReport",
    "KChoice",
    "choose_k",
    "measure_head",
    "read_texts",
    "sample",
    "shipped_texts",
]
