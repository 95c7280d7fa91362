"""BM25 as the lexical baseline, by the bm25s library."""

from __future__ import annotations

from collections.abc import Mapping

import bm25s
import Stemmer


def bm25_search(
    corpus: Mapping[str, str], queries: Mapping[str, str], top_k: int, k1: float = 1.5, b: float = 0.75
) -> list[list[dict[str, str | float]]]:
    """Rank a corpus for each query by BM25 with English stop words and Snowball stemming.

    Args:
        corpus: Document texts by id.
        queries: Query texts by id.
        top_k: Documents a query; all of them where the corpus is smaller.
        k1: Saturation of the term frequency.
        b: Strength of the length normalisation, from 0 to 1.

    Returns:
        For each query, in the order of ``queries``, hits ``{"corpus_id": ..., "score": ...}`` in rank order: the form
        that the ``compute_metrics`` of sentence-transformers' retrieval evaluators takes.

    Raises:
        ValueError: The corpus is empty.

    Example:
        ::

            from st_sparse_rescale.evaluation.bm25 import bm25_search

            hits = bm25_search({"d1": "sparse retrieval", "d2": "dense retrieval"}, {"q1": "sparse"}, top_k=1)
            # [[{"corpus_id": "d1", "score": ...}]]
    """
    if not corpus:
        raise ValueError("BM25 needs at least one document; the corpus is empty.")
    ids, stemmer = list(corpus), Stemmer.Stemmer("english")
    retriever = bm25s.BM25(k1=k1, b=b)
    retriever.index(_tokens(list(corpus.values()), stemmer), show_progress=False)
    documents, scores = retriever.retrieve(
        _tokens(list(queries.values()), stemmer), k=min(top_k, len(ids)), show_progress=False
    )
    return [
        [{"corpus_id": ids[d], "score": float(s)} for d, s in zip(row, row_scores, strict=True)]
        for row, row_scores in zip(documents, scores, strict=True)
    ]


def _tokens(texts: list[str], stemmer: Stemmer.Stemmer) -> bm25s.tokenization.Tokenized:
    return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)
