"""Seismic: JSON lines with the weights of terms."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.target import Target, json_line

MAX_WEIGHT = 65_504
MAX_TERM = 30  # characters, beyond which some versions cut the terms of queries


class SeismicTarget(Target):
    """One file for ``SeismicIndex.build``, or for ``SeismicIndexLV.build`` beyond 65,535 terms."""

    engine = "Seismic"
    part_bytes = 1 << 62

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str | None:
        """An object with ``id``, ``content`` and ``vector``; an empty vector has no place in the index."""
        if not len(terms):
            return None
        if weights.max() > MAX_WEIGHT:
            raise ValueError(
                f"Document {id!r:.60} has a weight of {weights.max():g}, and Seismic's half precision ends at "
                f"{MAX_WEIGHT:,}: use a model with smaller weights, or another engine."
            )
        return json_line({"id": id, "content": "", "vector": self.named(terms, weights)})

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The arguments of the index's ``search``, but for those that trade exactness for speed.

        Raises:
            ImportError: Seismic, whose type the terms have, is absent.
        """
        try:
            from seismic import get_seismic_string
        except ImportError as error:
            raise ImportError('Queries of Seismic need it: pip install "st-sparse-rescale[serving]"') from error
        terms = self.named(*self._one(vector))
        return {
            "query_id": "0",
            "query_components": np.array(list(terms), dtype=get_seismic_string()),
            "query_values": np.array(list(terms.values()), dtype=np.float32),
            "k": top_k,
        }

    def searched(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """Half precision, as the index keeps them."""
        halved = vectors.copy()
        halved.data = vectors.data.astype(np.float16).astype(np.float32)
        return halved

    def usable(self, token: str) -> bool:
        """No more characters than the client keeps."""
        return 0 < len(token) <= MAX_TERM
