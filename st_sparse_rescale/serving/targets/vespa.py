"""Vespa: a feed of puts, and the schema that goes with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from st_sparse_rescale.evaluation.csr import Embeddings
from st_sparse_rescale.serving.targets.target import Target, json_line

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
SCHEMA = """\
schema NAME {
    document NAME {
        field id type string {
            indexing: attribute | summary
        }
        field terms type weightedset<string> {
            indexing: attribute
            attribute: fast-search
        }
        field vector type tensor<float>(term{}) {
            indexing: attribute
        }
    }
    rank-profile sparse {
        inputs {
            query(vector) tensor<float>(term{})
        }
        first-phase {
            expression: sum(query(vector) * attribute(vector))
        }
    }
}
"""


class VespaTarget(Target):
    """Puts with the weights twice: as integers to find documents by WAND, and as floats to rank what was found."""

    engine = "Vespa"
    integers = True

    def document(self, id: str, terms: np.ndarray, weights: np.ndarray) -> str:
        """A put; a document with an empty vector goes without it, and is never found by it."""
        if control := _CONTROL.search(id):
            raise ValueError(
                f"The id {id!r:.60} holds the control character {control[0]!r}, which Vespa refuses: rename it."
            )
        fields: dict[str, Any] = {"id": id}
        if len(terms):
            fields |= {"terms": self._integers(terms, weights), "vector": {"cells": self.named(terms, weights)}}
        return json_line({"put": f"id:{self.name}:{self.name}::{id}", "fields": fields})

    def setup(self) -> Mapping[str, str]:
        """The schema; one of these files belongs into the application package."""
        return {f"{self.name}.sd": SCHEMA.replace("NAME", self.name)}

    def query(self, vector: Embeddings, top_k: int = 10) -> dict[str, Any]:
        """The body of ``POST /search/``. WAND hands more documents on than asked for, since it ranks by integers."""
        terms, weights = self._one(vector)
        wanted = json.dumps(self._integers(terms, weights), ensure_ascii=False)
        return {
            "yql": f"select id from {self.name} where {{targetHits: {max(100, 10 * top_k)}}}wand(terms, {wanted})",
            "input.query(vector)": self.named(terms, weights),
            "ranking": "sparse",
            "hits": top_k,
        }

    def usable(self, token: str) -> bool:
        """No control characters, which documents may not hold."""
        return bool(token) and token.isprintable()

    def _integers(self, terms: np.ndarray, weights: np.ndarray) -> dict[str, int]:
        """Integer weights by term; what is lighter than 1 finds the document by 1, since it still counts in ranking."""
        names = self.names
        integers = np.maximum(np.rint(weights * self.scale), 1).astype(int).tolist()
        return dict(zip([names[term] for term in terms.tolist()], integers, strict=True))
