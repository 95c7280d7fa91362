"""Strict readers of what engines document, for those whose servers do not run in the tests.

Each reads one file as the engine would and returns the weights by document and term; what the engine would refuse, or
read otherwise than it was meant, is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

MIN_NORMAL = 2.0**-126  # Lucene's FeatureField takes positive normal floats only
MAX_BULK_BYTES = 100 * 2**20  # http.max_content_length
Weights = dict[str, dict[str, float]]


def loads(text: str) -> Any:
    """Parse JSON without Python's extensions: no NaN or Infinity, no key twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(items)) == len(items), "a key stands twice"
        return dict(items)

    def constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)


def lines(body: bytes) -> list[str]:
    assert body.endswith(b"\n"), "the last line must end"
    text = body.decode()
    assert "\r" not in text
    return text[:-1].split("\n")


def read_bulk(body: bytes, index: str) -> Weights:
    """Elasticsearch and OpenSearch: the body of a bulk request, for the mapping of an index."""
    assert len(body) <= MAX_BULK_BYTES
    fields = read_mapping(index)
    rows, documents = lines(body), {}
    assert len(rows) % 2 == 0, "an action without a source"
    for action, source in zip(map(loads, rows[::2]), map(loads, rows[1::2]), strict=True):
        assert list(action) == ["index"]
        assert list(action["index"]) == ["_id"]
        id = action["index"]["_id"]
        assert isinstance(id, str)
        assert 0 < len(id.encode()) <= 512
        assert set(source) <= set(fields), "the mapping is strict"
        assert source["id"] == id
        features = source.get("vector", {})
        assert "vector" not in source or features, "an empty object"
        for feature, weight in features.items():
            assert feature
            assert "." not in feature, "a path, not a feature"
            assert isinstance(weight, int | float)
            assert math.isfinite(weight)
            assert weight >= MIN_NORMAL
        assert id not in documents, "one document would replace another"
        documents[id] = features
    return documents


def read_mapping(index: str) -> dict[str, dict[str, str]]:
    content = loads(index)
    assert list(content) == ["mappings"]
    assert content["mappings"]["dynamic"] == "strict"
    fields = content["mappings"]["properties"]
    assert fields["id"] == {"type": "keyword"}
    assert fields["vector"] in ({"type": "sparse_vector"}, {"type": "rank_features"})
    return fields


def read_anserini(body: bytes) -> Weights:
    """Anserini's JsonVectorCollection, pretokenized: terms are repeated and split at white space again."""
    documents = {}
    for row in map(loads, lines(body)):
        assert set(row) == {"id", "contents", "vector"}
        assert isinstance(row["id"], str)
        assert row["id"]
        for weight in row["vector"].values():
            assert type(weight) is int
            assert weight >= 1
        pseudo = " ".join(" ".join([term] * count) for term, count in row["vector"].items())
        counted = Counter(pseudo.split())
        assert all(len(term) <= 255 for term in counted), "Lucene splits longer terms"
        assert dict(counted) == row["vector"], "white space within a term"
        assert row["id"] not in documents
        documents[row["id"]] = row["vector"]
    return documents


def read_vespa(body: bytes, schema: str) -> tuple[Weights, Weights]:
    """Vespa's document JSON, for a schema: the floats of the tensor and the integers of the weighted set."""
    name = re.match(r"schema (\w+) \{\n    document \1 \{", schema)[1]
    fields = dict(re.findall(r"field (\w+) type (\S+) \{", schema))
    assert fields == {"id": "string", "terms": "weightedset<string>", "vector": "tensor<float>(term{})"}
    floats, integers = {}, {}
    for row in map(loads, lines(body)):
        assert set(row) == {"put", "fields"}
        namespace, kind, pairs, id = re.fullmatch(r"id:(\w+):(\w+):([^:]*):(.+)", row["put"], re.DOTALL).groups()
        assert (namespace, kind, pairs) == (name, name, "")
        values = row["fields"]
        assert set(values) <= set(fields)
        assert values["id"] == id
        assert ("terms" in values) == ("vector" in values)
        terms, cells = values.get("terms", {}), values.get("vector", {"cells": {}})
        assert list(cells) == ["cells"]
        assert list(terms) == list(cells["cells"])
        for term, weight in terms.items():
            assert term.isprintable(), "documents hold no control characters"
            assert type(weight) is int
            assert 1 <= weight < 2**31
        for weight in cells["cells"].values():
            assert isinstance(weight, int | float)
            assert math.isfinite(weight)
        assert id not in floats
        floats[id], integers[id] = cells["cells"], terms
    return floats, integers
