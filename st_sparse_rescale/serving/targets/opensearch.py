"""OpenSearch: bulk requests for a rank_features field, searched by neural_sparse queries."""

from __future__ import annotations

from typing import Any

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.elasticsearch import BulkTarget


class OpenSearchTarget(BulkTarget):
    """A ``rank_features`` field, from OpenSearch 2.14 on."""

    engine = "OpenSearch"
    field_type = "rank_features"

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The body of ``POST /NAME/_search``, with the terms of the query as they are."""
        terms = self.named(*self._one(vector))
        return {"size": top_k, "_source": False, "query": {"neural_sparse": {"vector": {"query_tokens": terms}}}}
