"""Anserini and Pyserini: a JSON vector collection with integer weights, for a Lucene impact index."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.target import Target, json_line


class AnseriniTarget(Target):
    """Files for ``-collection JsonVectorCollection -impact -pretokenized``.

    Anserini repeats each term as often as its weight says and splits what comes out at white space.
    """

    engine = "Anserini"
    integers = True

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str | None:
        """An object with ``id``, ``contents`` and ``vector``; Lucene would index nothing of an empty one."""
        if not len(terms):
            return None
        return json_line({"id": id, "contents": "", "vector": self._counts(terms, weights)})

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, int]:
        """Integer weights by term, as a query encoder of Pyserini's ``LuceneImpactSearcher`` returns them."""
        return self._counts(*self._one(vector))

    def written(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """Integers."""
        return self.rounded(vectors)

    def asked(self, queries: sparse.csr_matrix) -> sparse.csr_matrix:
        """Integers."""
        return self.rounded(queries)

    def usable(self, token: str) -> bool:
        """No white space; Lucene splits longer terms than 255 characters."""
        return 0 < len(token) <= 255 and not any(map(str.isspace, token))

    def _counts(self, terms: np.ndarray, weights: np.ndarray) -> dict[str, int]:
        names = self.names
        return {names[term]: int(weight) for term, weight in zip(terms.tolist(), weights.tolist(), strict=True)}
