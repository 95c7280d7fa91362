"""Qdrant: points with a sparse vector."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.target import Target, decimals, json_file, json_line


class QdrantTarget(Target):
    """A point a line.

    Ids of points are whole numbers or UUIDs, so a document's id is in the payload, and the point's is derived from it:
    the same document is the same point whenever it is exported.
    """

    engine = "Qdrant"

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str:
        """A point; one with an empty vector has no vector, and is never found by it."""
        vector = {"vector": self._vector(terms, weights)} if len(terms) else {}
        return json_line({"id": str(uuid.uuid5(uuid.NAMESPACE_URL, id)), "vector": vector, "payload": {"id": id}})

    def setup(self) -> Mapping[str, str]:
        """The body of ``PUT /collections/NAME``."""
        return {"collection.json": json_file({"vectors": {}, "sparse_vectors": {"vector": {}}})}

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The body of ``POST /collections/NAME/points/query``.

        The client's ``query_points`` takes the same arguments, ``query`` as ``models.SparseVector(**query)``.
        """
        return {"query": self._vector(*self._one(vector)), "using": "vector", "limit": top_k, "with_payload": True}

    @staticmethod
    def _vector(terms: np.ndarray, weights: np.ndarray) -> dict[str, list[Any]]:
        return {"indices": terms.tolist(), "values": decimals(weights)}
