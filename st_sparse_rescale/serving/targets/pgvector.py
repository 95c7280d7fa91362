"""PostgreSQL with pgvector: rows for COPY into a table with a column of the type sparsevec."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.target import Target, decimals

MAX_TERMS = 16_000
MAX_ID_BYTES = 2_692  # a row of a B-tree index has at most 2,704 with its header
_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})


class PgvectorTarget(Target):
    """Text for ``COPY NAME FROM``, for pgvector 0.7 or newer. Its terms are counted from 1."""

    engine = "pgvector"
    suffix = "copy"

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str:
        """A row; an empty vector is one as well, of score 0."""
        if len(terms) > MAX_TERMS:
            raise ValueError(
                f"Document {id!r} has {len(terms):,} terms, pgvector takes {MAX_TERMS:,}: keep fewer (--top-k)."
            )
        if len(id.encode()) > MAX_ID_BYTES:
            raise ValueError(
                f"The id {id!r:.60} has {len(id.encode()):,} bytes, a key of PostgreSQL {MAX_ID_BYTES:,}: shorten it."
            )
        if "\0" in id:
            raise ValueError(
                f"The id {id!r:.60} holds a null character, which PostgreSQL refuses: rename the document."
            )
        return f"{id.translate(_ESCAPES)}\t{self._literal(terms, weights)}\n"

    def setup(self) -> Mapping[str, str]:
        """The table. An HNSW index would hold vectors of at most 1,000 terms; without one the search is exact."""
        return {
            "schema.sql": "CREATE EXTENSION IF NOT EXISTS vector;\n"
            f'CREATE TABLE "{self.name}" (id text PRIMARY KEY, vector sparsevec({len(self.vocabulary)}));\n'
        }

    def query(self, vector: Embeddings, top_k: int = 10) -> str:
        """A SELECT of ids and scores; ``<#>`` is the negative inner product."""
        distance = f"vector <#> '{self._literal(*self._one(vector))}'"
        return f'SELECT id, -({distance}) AS score FROM "{self.name}" ORDER BY {distance}, id LIMIT {top_k}'

    def _literal(self, terms: np.ndarray, weights: np.ndarray) -> str:
        pairs = zip((terms + 1).tolist(), decimals(weights), strict=True)
        return "{" + ",".join(f"{term}:{weight!r}" for term, weight in pairs) + f"}}/{len(self.vocabulary)}"
