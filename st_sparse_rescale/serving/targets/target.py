"""What a search engine needs to take encoded documents, and to be asked about them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from st_sparse_rescale.evaluation.csr import Embeddings, as_csr
from st_sparse_rescale.serving.vocabulary import Vocabulary

MIB = 1 << 20


class Target(ABC):
    """One engine: its files of documents, its schema, and its form of a query.

    A subclass is the whole of what is known of an engine. Rows that reach it hold tokens only, in ascending order, with
    finite positive weights.

    Args:
        vocabulary: What the dimensions stand for.
        name: Of the collection, index or table: letters, digits and underscores, such as ``documents``.
        scale: What weights are multiplied by to become integers, for engines with ``integers``.

    Raises:
        ValueError: The name has other characters.
    """

    engine: ClassVar[str]
    """What people call it."""
    suffix: ClassVar[str] = "jsonl"
    """Of the files of documents."""
    part_bytes: ClassVar[int] = 256 * MIB
    """A file of documents ends once it is larger."""
    integers: ClassVar[bool] = False
    """Whether weights become integers, for which a scale is measured from the data."""

    def __init__(self, vocabulary: Vocabulary, *, name: str = "documents", scale: float = 1.0) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(
                f"The name {name!r} will not do for every engine: use lower-case letters, digits and underscores, "
                "a letter first."
            )
        self.vocabulary, self.name, self.scale = vocabulary, name, scale

    @abstractmethod
    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str | None:
        """Write a document as the engine reads it, its line's end included.

        Args:
            id: Its id.
            terms: (n,) of int32, ascending; n may be 0.
            weights: (n,) of float32, as :meth:`written` gives them.

        Returns:
            The text, or ``None`` where the engine has no place for an empty vector.

        Raises:
            ValueError: The engine cannot hold it.
        """

    @abstractmethod
    def query(self, vector: Embeddings, top_k: int = 10) -> Any:
        """Write a query as the engine, or its Python client, takes it.

        Args:
            vector: (vocabulary,) or (1, vocabulary): one encoded query.
            top_k: Documents to find.

        Example:
            ::

                target = load_target("exported")
                target.query(model.encode_query("sparse retrieval"))
        """

    def setup(self) -> Mapping[str, str]:
        """The schema, mapping or settings with which the engine's collection is made: file names and contents."""
        return {}

    def written(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """The weights that are written; none is 0."""
        return vectors

    def searched(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """The weights with which the engine computes scores, from those that are written."""
        return vectors

    def asked(self, queries: sparse.csr_matrix) -> sparse.csr_matrix:
        """The weights of queries with which the engine computes scores."""
        return queries

    def usable(self, token: str) -> bool:
        """Whether the engine takes a token as the name of a term."""
        return True

    @cached_property
    def names(self) -> list[str]:
        """(vocabulary,): what the terms are called where the engine has names for them."""
        return self.vocabulary.names(self.usable)

    def named(self, terms: np.ndarray, weights: np.ndarray) -> dict[str, float]:
        """Weights by the names of their terms."""
        names = self.names
        return dict(zip([names[term] for term in terms.tolist()], decimals(weights), strict=True))

    def _one(self, vector: Any) -> tuple[np.ndarray, np.ndarray]:
        """Terms and weights of one query, cleaned and rounded as the documents are."""
        row = as_csr(_as_row(vector))
        if row.shape != (1, len(self.vocabulary)):
            raise ValueError(
                f"A query has one vector of {len(self.vocabulary)} dimensions, got {row.shape[0]} of {row.shape[1]}."
            )
        asked = self.asked(row)
        tokens = self.vocabulary.is_token[asked.indices]
        return asked.indices[tokens], asked.data[tokens]

    def rounded(self, vectors: sparse.csr_matrix) -> sparse.csr_matrix:
        """Weights as integers, still in float32; those of 0 go."""
        rounded = vectors.copy()
        rounded.data = np.rint(vectors.data * np.float32(self.scale))
        return as_csr(rounded)


def decimals(weights: np.ndarray) -> list[float]:
    """Weights as numbers that print as the shortest decimals which are read back as the same float32.

    Example:
        ::

            decimals(np.array([0.1], dtype=np.float32))  # [0.1], not [0.10000000149011612]
    """
    return weights.astype(str).astype(np.float64).tolist()


def json_line(row: Mapping[str, Any]) -> str:
    """A row as a line of compact JSON."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def json_file(content: Any) -> str:
    """What a JSON file for people holds."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _as_row(vector: Any) -> Any:
    if vector.ndim != 1:
        return vector
    return vector[None] if isinstance(vector, np.ndarray) else vector.unsqueeze(0)
