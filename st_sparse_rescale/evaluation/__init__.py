"""Evaluation of sparse retrieval: exact search, metrics, collections, comparisons."""

from __future__ import annotations

from st_sparse_rescale.evaluation.collection import Collection, CollectionError
from st_sparse_rescale.evaluation.evaluate import evaluate
from st_sparse_rescale.evaluation.index_files import IndexFileError
from st_sparse_rescale.evaluation.metrics import measure
from st_sparse_rescale.evaluation.report import results_table
from st_sparse_rescale.evaluation.results import Evaluation
from st_sparse_rescale.evaluation.sources import load_collections
from st_sparse_rescale.evaluation.sparse_index import SparseIndex
from st_sparse_rescale.evaluation.sparse_information_retrieval import SparseInformationRetrievalEvaluator
from st_sparse_rescale.evaluation.sparse_nano_beir import SparseNanoBEIREvaluator

__all__ = [
    "Collection",
    "CollectionError",
    "Evaluation",
    "IndexFileError",
    "SparseIndex",
    "SparseInformationRetrievalEvaluator",
    "SparseNanoBEIREvaluator",
    "evaluate",
    "load_collections",
    "measure",
    "results_table",
]
