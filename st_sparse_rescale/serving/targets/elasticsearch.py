"""Elasticsearch: bulk requests for a field of the type sparse_vector or rank_features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.pruning import kept
from st_sparse_rescale.serving.targets.target import MIB, Target, json_file, json_line


class BulkTarget(Target):
    """Bodies of bulk requests, small enough to be sent as they are: ``POST /NAME/_bulk``.

    Lucene keeps 9 significant bits of each weight (``FeatureField``).
    """

    suffix = "ndjson"
    part_bytes = 16 * MIB  # far below the 100 MB that a request may have
    field_type: ClassVar[str]

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str:
        """An action and a source; a document with an empty vector goes without the field, and is never found by it."""
        if len(id.encode()) > 512:
            raise ValueError(f"The id {id!r:.60} has {len(id.encode())} bytes, {self.engine} takes 512: shorten it.")
        source: dict[str, Any] = {"id": id}
        if len(terms):
            source["vector"] = self.named(terms, weights)
        return json_line({"index": {"_id": id}}) + json_line(source)

    def setup(self) -> Mapping[str, str]:
        """The body of ``PUT /NAME``."""
        fields = {"id": {"type": "keyword"}, "vector": {"type": self.field_type}}
        return {"index.json": json_file({"mappings": {"dynamic": "strict", "properties": fields}})}

    def written(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """Without what is so small that Lucene refuses the whole document for it."""
        return kept(vectors, vectors.data >= np.finfo(np.float32).smallest_normal)

    def searched(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """Cut off after 9 significant bits, as Lucene does."""
        cut = vectors.copy()
        cut.data = (vectors.data.view(np.uint32) & np.uint32(0xFFFF8000)).view(np.float32)
        return cut

    def usable(self, token: str) -> bool:
        """No dots, which would be paths."""
        return bool(token) and "." not in token


class ElasticsearchTarget(BulkTarget):
    """A ``sparse_vector`` field, from Elasticsearch 8.15 on."""

    engine = "Elasticsearch"
    field_type = "sparse_vector"

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The body of ``POST /NAME/_search``. Newer versions prune the terms of queries unless told not to."""
        query = {"field": "vector", "query_vector": self.named(*self._one(vector)), "prune": False}
        return {"size": top_k, "_source": False, "query": {"sparse_vector": query}}


class ElasticsearchRankFeaturesTarget(BulkTarget):
    """A ``rank_features`` field, for versions and distributions without ``sparse_vector``."""

    engine = "Elasticsearch"
    field_type = "rank_features"

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The body of ``POST /NAME/_search``: a linear clause a term, so that the score is the dot product."""
        clauses = [
            {"rank_feature": {"field": f"vector.{term}", "linear": {}, "boost": weight}}
            for term, weight in self.named(*self._one(vector)).items()
        ]
        return {"size": top_k, "_source": False, "query": {"bool": {"should": clauses}}}
