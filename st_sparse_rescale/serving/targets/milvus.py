"""Milvus: rows with a sparse float vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.target import Target, decimals, json_file, json_line

MAX_ID_BYTES = 65_535


class MilvusTarget(Target):
    """A row a line, as the client's ``insert`` takes them."""

    engine = "Milvus"

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str | None:
        """A row with ``id`` and ``vector``; Milvus refuses empty vectors."""
        if len(id.encode()) > MAX_ID_BYTES:
            raise ValueError(
                f"The id {id!r:.60} is longer than the {MAX_ID_BYTES:,} bytes that Milvus takes: shorten it."
            )
        return json_line({"id": id, "vector": self._vector(terms, weights)}) if len(terms) else None

    def setup(self) -> Mapping[str, str]:
        """The body of ``POST /v2/vectordb/collections/create``."""
        fields = [
            {
                "fieldName": "id",
                "dataType": "VarChar",
                "isPrimary": True,
                "elementTypeParams": {"max_length": str(MAX_ID_BYTES)},
            },
            {"fieldName": "vector", "dataType": "SparseFloatVector"},
        ]
        index = {
            "fieldName": "vector",
            "indexName": "vector",
            "metricType": "IP",
            "params": {"index_type": "SPARSE_INVERTED_INDEX"},
        }
        schema = {"autoId": False, "enabledDynamicField": False, "fields": fields}
        return {"collection.json": json_file({"collectionName": self.name, "schema": schema, "indexParams": [index]})}

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The arguments of the client's ``search``."""
        terms, weights = self._one(vector)
        data = dict(zip(terms.tolist(), decimals(weights), strict=True))
        asked = {"collection_name": self.name, "anns_field": "vector", "data": [data], "limit": top_k}
        return asked | {"output_fields": ["id"]}  # Milvus Lite gives back the whole vector otherwise

    @staticmethod
    def _vector(terms: np.ndarray, weights: np.ndarray) -> dict[str, float]:
        return dict(zip(map(str, terms.tolist()), decimals(weights), strict=True))
