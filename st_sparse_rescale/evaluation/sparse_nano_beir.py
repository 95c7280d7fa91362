"""NanoBEIR on top of exact sparse search."""

from __future__ import annotations

from sentence_transformers.sparse_encoder.evaluation import SparseNanoBEIREvaluator as StockSparseNanoBEIREvaluator

from st_sparse_rescale.evaluation.sparse_information_retrieval import SparseInformationRetrievalEvaluator


class SparseNanoBEIREvaluator(StockSparseNanoBEIREvaluator):
    """sentence-transformers' NanoBEIR evaluator with exact search: equal arguments, names and metrics.

    Each collection is evaluated by :class:`~st_sparse_rescale.evaluation.SparseInformationRetrievalEvaluator`.
    ``dataset_id`` may be a local folder in the layout of the hub's dataset.

    Example:
        ::

            from st_sparse_rescale.evaluation import SparseNanoBEIREvaluator

            metrics = SparseNanoBEIREvaluator(["scifact", "nq"])(model)
            print(metrics["NanoBEIR_mean_dot_ndcg@10"])
    """

    information_retrieval_class = SparseInformationRetrievalEvaluator
