"""BM25 as the lexical baseline, by the bm25s library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import bm25s
import numpy as np
import Stemmer
from scipy import sparse

from st_sparse_rescale.evaluation.top_k import IdOrder, TopK


class BM25Index:
    """A corpus to be searched by BM25 with English stop words and Snowball stemming.

    BM25 is a sparse retriever too: the weights are bm25s's, the search is ours, so that ties are broken by document id
    as everywhere else.

    Args:
        corpus: Document texts by id.
        k1: Saturation of the term frequency.
        b: Strength of the length normalisation, from 0 to 1.

    Raises:
        ValueError: The corpus is empty.

    Example:
        ::

            BM25Index({"d1": "sparse retrieval", "d2": "dense retrieval"}).search(["sparse"], top_k=1)
            # [[("d1", ...)]]
    """

    def __init__(self, corpus: Mapping[str, str], k1: float = 1.5, b: float = 0.75) -> None:
        if not corpus:
            raise ValueError("BM25 needs at least one document; the corpus is empty.")
        self._order = IdOrder(list(corpus))
        self._terms: dict[str, int] = {}
        self._lists = sparse.csr_matrix((0, len(corpus)), dtype=np.float32)
        words = _words(list(corpus.values()))
        if not any(words):  # stop words only, which bm25s cannot index
            return
        retriever = bm25s.BM25(k1=k1, b=b)
        retriever.index(words, show_progress=False)
        weights = retriever.scores
        vocabulary = len(weights["indptr"]) - 1
        # An empty text is the term "" to bm25s, which has an id but no weights.
        self._terms = {word: term for word, term in retriever.vocab_dict.items() if word and term < vocabulary}
        self._lists = sparse.csr_matrix(
            (weights["data"], weights["indices"], weights["indptr"]), shape=(vocabulary, len(corpus)), dtype=np.float32
        )

    def search(
        self,
        queries: Sequence[str],
        top_k: int,
        *,
        excluded: Sequence[str] | None = None,
        include_zeros: bool = False,
    ) -> list[list[tuple[str, float]]]:
        """Find the best documents of each query.

        Args:
            queries: Query texts.
            top_k: Documents a query.
            excluded: For each query the id of a document to leave out.
            include_zeros: Fill up to ``top_k`` with documents without a term of the query, by id.

        Returns:
            For each query its (document id, score) pairs in rank order.
        """
        asked = [[self._terms[word] for word in text if word in self._terms] for text in _words(list(queries))]
        counts = sparse.csr_matrix(
            (
                np.ones(sum(map(len, asked)), dtype=np.float32),
                np.array([term for row in asked for term in row], dtype=np.int32),
                np.cumsum([0, *map(len, asked)]),
            ),
            shape=(len(asked), self._lists.shape[0]),
        )
        counts.sum_duplicates()
        best = TopK(counts, self._order, top_k, excluded=excluded)
        best.add_inverted(self._lists, 0)
        return best.hits(include_zeros=include_zeros)


def bm25_run(
    corpus: Mapping[str, str],
    queries: Mapping[str, str],
    top_k: int,
    k1: float = 1.5,
    b: float = 0.75,
    exclude_self: bool = False,
) -> dict[str, list[tuple[str, float]]]:
    """Rank a corpus for each query by BM25: see :class:`BM25Index`.

    Args:
        corpus: Document texts by id.
        queries: Query texts by id.
        top_k: Documents a query; all of them where the corpus is smaller. Those without a term of the query follow by
            id with score 0.
        k1: Saturation of the term frequency.
        b: Strength of the length normalisation, from 0 to 1.
        exclude_self: Leave out the document whose id is the query's.

    Returns:
        For each query id its (document id, score) pairs in rank order.

    Raises:
        ValueError: The corpus is empty.

    Example:
        ::

            from st_sparse_rescale.evaluation.bm25 import bm25_run

            bm25_run({"d1": "sparse retrieval", "d2": "dense retrieval"}, {"q1": "sparse"}, top_k=1)
            # {"q1": [("d1", ...)]}
    """
    excluded = list(queries) if exclude_self else None
    hits = BM25Index(corpus, k1, b).search(list(queries.values()), top_k, excluded=excluded, include_zeros=True)
    return dict(zip(queries, hits, strict=True))


def _words(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(
        texts, stopwords="en", stemmer=Stemmer.Stemmer("english"), return_ids=False, show_progress=False
    )
