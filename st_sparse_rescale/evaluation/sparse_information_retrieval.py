"""sentence-transformers' retrieval evaluator on top of exact sparse search."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import (
    SparseInformationRetrievalEvaluator as StockSparseInformationRetrievalEvaluator,
)

from st_sparse_rescale.evaluation.csr import as_csr, csr_chunks
from st_sparse_rescale.evaluation.metrics import score_ranking
from st_sparse_rescale.evaluation.peak_memory import peak_memory_mib
from st_sparse_rescale.evaluation.retrieval import similarity_scale
from st_sparse_rescale.evaluation.top_k import CHUNK_SIZE, IdOrder, TopK
from st_sparse_rescale.evaluation.truncation import measure_truncation

logger = logging.getLogger(__name__)


class SparseInformationRetrievalEvaluator(StockSparseInformationRetrievalEvaluator):
    """A drop-in for sentence-transformers' evaluator of the same name: equal metrics, searched sparsely.

    The stock evaluator makes a dense matrix of all scores; this one multiplies sparse by sparse and keeps the top-k of
    each query. Documents that share no term with a query follow by id with score 0, as in the stock ranking, so every
    metric is equal. Arguments, metric names, files and use as a trainer's ``evaluator`` are those of sentence-
    transformers, except that ``score_functions`` cannot be given: dot product and cosine are what can be computed
    sparsely, and the model says which.

    The metrics are joined by what an evaluation should not hide: ``query_max_length`` and ``corpus_max_length``,
    ``query_truncated`` and ``corpus_truncated`` (shares of the texts that were cut), ``self_excluded`` (1 if a query's
    own document was left out), ``seconds`` and ``peak_memory_mib`` (of the process). Relevance is binary, as in
    sentence-transformers; for graded judgements see :mod:`st_sparse_rescale.evaluation.metrics`.

    Args:
        queries: Query texts by id.
        corpus: Document texts by id.
        relevant_docs: Ids of the relevant documents by query id.
        *args: As for the stock evaluator.
        exclude_self: Leave the document whose id is the query's out of its ranking, as BEIR does.
        **kwargs: As for the stock evaluator.

    Raises:
        ValueError: ``score_functions`` is given; at the call, the model's similarity is neither dot nor cosine.

    Example:
        ::

            from st_sparse_rescale.evaluation import SparseInformationRetrievalEvaluator

            evaluator = SparseInformationRetrievalEvaluator(queries, corpus, relevant_docs, name="scifact")
            metrics = evaluator(model)
            print(metrics["scifact_dot_ndcg@10"], metrics["scifact_corpus_truncated"])
    """

    def __init__(
        self,
        queries: dict[str, str],
        corpus: dict[str, str],
        relevant_docs: dict[str, set[str]],
        *args: Any,
        exclude_self: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, *args, **kwargs)
        self.queries: list[str]  # type: ignore[assignment]
        self.corpus: list[str]  # type: ignore[assignment]
        if self.score_functions is not None:
            raise ValueError(
                "score_functions cannot be chosen for a sparse search, found "
                f"{sorted(self.score_functions)}: set model.similarity_fn_name to 'dot' or 'cosine', or use "
                "sentence-transformers' own evaluator."
            )
        self.exclude_self = exclude_self
        self.order = IdOrder(self.corpus_ids)
        self.report: dict[str, float] = {}
        """Of the last call: maximum lengths, truncation, self-exclusion, seconds, memory."""

    def __call__(  # type: ignore[override]  # as the stock sparse evaluator has it
        self,
        model: SparseEncoder,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate a model; see the class for what is reported."""
        started = time.perf_counter()
        metrics = super().__call__(model, output_path, epoch, steps, *args, **kwargs)
        self.report |= {
            "self_excluded": float(self.exclude_self),
            "seconds": time.perf_counter() - started,
            "peak_memory_mib": peak_memory_mib(),
        }
        logger.info("; ".join(f"{name.replace('_', ' ')}: {value:,.4g}" for name, value in self.report.items()))
        return metrics | self.prefix_name_to_metrics(self.report, self.name)

    def compute_all_metrics(  # type: ignore[override]  # the stock annotation is not what is returned
        self,
        model: SparseEncoder,
        corpus_model: SparseEncoder | None = None,
        corpus_embeddings: torch.Tensor | None = None,
        output_path: str | None = None,
    ) -> dict[str, dict[str, dict[int, float]]]:
        """Search and score; the arguments are those of the stock evaluator.

        Returns:
            For the one score function the metrics by name and cut-off.
        """
        corpus_model = corpus_model or model
        similarity, scale = model.similarity_fn_name, similarity_scale(model)
        encoded = self.embed_inputs(
            model, self.queries, encode_fn_name="query", prompt_name=self.query_prompt_name, prompt=self.query_prompt
        )
        cut_offs = (self.mrr_at_k, self.ndcg_at_k, self.accuracy_at_k, self.precision_recall_at_k, self.map_at_k)
        top_k = max(k for ks in cut_offs for k in ks)
        excluded = self.queries_ids if self.exclude_self else None
        best = TopK(scale(as_csr(encoded)), self.order, top_k, excluded=excluded)
        for start, documents in self._documents(corpus_model, corpus_embeddings):
            best.add(scale(documents), start)
        self.report = self._lengths(model, corpus_model)
        if self.write_predictions and output_path is not None:
            self._write_predictions(Path(output_path), similarity, best.hits(include_zeros=True))
        logger.info(f"Queries: {len(self.queries)}")
        logger.info(f"Corpus: {len(self.corpus)}\n")
        logger.info(f"Score-Function: {similarity}")
        scores = self._scores(best.result(include_zeros=True)[1])
        self.output_scores(scores)
        return {similarity: scores}

    def _scores(self, positions: np.ndarray) -> dict[str, dict[int, float]]:
        """The stock metrics of rankings, (queries, top_k), by name and cut-off."""
        position_of = {id: position for position, id in enumerate(self.corpus_ids)}
        rankings = []
        for id, row in zip(self.queries_ids, positions, strict=True):
            relevant = self.relevant_docs[id]
            ranks = np.flatnonzero(np.isin(row, [position_of[d] for d in relevant if d in position_of])) + 1
            rankings.append(([(rank, 1) for rank in ranks.tolist()], [1] * len(relevant)))
        cut_offs = {
            "accuracy": self.accuracy_at_k,
            "precision": self.precision_recall_at_k,
            "recall": self.precision_recall_at_k,
            "ndcg": self.ndcg_at_k,
            "mrr": self.mrr_at_k,
            "map": self.map_at_k,
        }
        return {
            f"{name}@k": {k: fmean(score_ranking(f"{name}@{k}", *ranking) for ranking in rankings) for k in ks}
            for name, ks in cut_offs.items()
        }

    def _documents(
        self, model: SparseEncoder, embeddings: torch.Tensor | None
    ) -> Iterator[tuple[int, sparse.csr_matrix]]:
        """Encode, or take as given, one chunk of the corpus after another."""
        if embeddings is not None:
            for start, chunk in csr_chunks(embeddings, CHUNK_SIZE):
                self._record_documents(chunk)
                yield start, chunk
            return
        for first in range(0, len(self.corpus), self.corpus_chunk_size):
            encoded = self.embed_inputs(
                model,
                self.corpus[first : first + self.corpus_chunk_size],
                encode_fn_name="document",
                prompt_name=self.corpus_prompt_name,
                prompt=self.corpus_prompt,
            )
            for start, chunk in csr_chunks(encoded, CHUNK_SIZE):
                yield first + start, chunk

    def _record_documents(self, chunk: sparse.csr_matrix) -> None:
        """Note the active dimensions of given embeddings, as ``embed_inputs`` does for encoded ones."""
        count, dimension = chunk.shape
        active = chunk.nnz / count
        self.sparsity_stats["corpus"]["active_dims"].append(active)
        self.sparsity_stats["corpus"]["sparsity_ratio"].append(1 - active / dimension)
        counts = torch.bincount(torch.from_numpy(chunk.indices), minlength=dimension).int()
        self.count_vectors["corpus"] = self.count_vectors.get("corpus", 0) + counts
        self.count_lengths["corpus"].append(count)

    def _lengths(self, model: SparseEncoder, corpus_model: SparseEncoder) -> dict[str, float]:
        sides = {
            "query": measure_truncation(model, self.queries, "query", self._prompt(model, "query")),
            "corpus": measure_truncation(corpus_model, self.corpus, "document", self._prompt(corpus_model, "corpus")),
        }
        lengths = {f"{side}_max_length": t.max_length for side, t in sides.items() if t.max_length is not None}
        return {**lengths, **{f"{side}_truncated": t.share for side, t in sides.items()}}

    def _prompt(self, model: SparseEncoder, side: str) -> str | None:
        prompt, name = getattr(self, f"{side}_prompt"), getattr(self, f"{side}_prompt_name")
        return model.prompts[name] if prompt is None and name is not None else prompt

    def _write_predictions(self, folder: Path, similarity: str, hits: list[list[tuple[str, float]]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / self.predictions_file.replace(".jsonl", f"_{similarity}.jsonl")
        with file.open("w", encoding="utf-8") as out:
            for id, query, row in zip(self.queries_ids, self.queries, hits, strict=True):
                results = [{"corpus_id": document, "score": score} for document, score in row]
                out.write(json.dumps({"query_id": id, "query": query, "results": results}) + "\n")
