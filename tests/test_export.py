"""Exports: what the files hold, read back by strict readers, and what is refused."""

from __future__ import annotations

import json
import struct
import sys
import uuid

import numpy as np
import pytest
import torch
from scipy import sparse
from sentence_transformers import SparseEncoder
from typer.testing import CliRunner

from st_sparse_rescale.cli import app
from st_sparse_rescale.evaluation.csr import as_csr
from st_sparse_rescale.evaluation.index_files import IndexFileError
from st_sparse_rescale.serving import TARGETS, Vocabulary, encode_corpus, export, load_target, overlap
from st_sparse_rescale.serving.export import _some_of
from st_sparse_rescale.serving.targets.target import decimals
from tests import engine_schemas as schemas
from tests.shard_files import make_shards
from tests.tiny_models import TEXTS

# Tokens that give engines trouble: dots, white space, quotes, a control character, one too long, and two that are none.
TOKENS = ["the", "U.S.", "two words", 'say "it"', "back\\slash", "\x07", "x" * 31, "Ġrepräsentation", None, None]


def read(folder, report):
    """The weights of all documents, as the engine would read them: by document and name, in the order of the file."""
    body = b"".join((folder / file).read_bytes() for file in report.files)
    if report.target.startswith(("elasticsearch", "opensearch")):
        return schemas.read_bulk(body, (folder / "index.json").read_text())
    if report.target == "anserini":
        return schemas.read_anserini(body)
    if report.target == "vespa":
        return schemas.read_vespa(body, (folder / "documents.sd").read_text())[0]
    if report.target == "pgvector":
        rows = [line.split("\t") for line in body.decode().splitlines()]
        literals = {id: literal.partition("}/") for id, literal in rows}
        pairs = {id: [p.split(":") for p in inner[1:].split(",") if p] for id, (inner, _, _) in literals.items()}
        assert {int(dimension) for _, _, dimension in literals.values()} == {report_dimension(folder)}
        return {id: {str(int(term) - 1): float(weight) for term, weight in row} for id, row in pairs.items()}
    rows = [schemas.loads(line) for line in schemas.lines(body)]
    if report.target == "qdrant":
        for row in rows:
            assert uuid.UUID(row["id"]) == uuid.uuid5(uuid.NAMESPACE_URL, row["payload"]["id"])
        vectors = {row["payload"]["id"]: row["vector"].get("vector", {"indices": [], "values": []}) for row in rows}
        return {id: dict(zip(map(str, v["indices"]), v["values"], strict=True)) for id, v in vectors.items()}
    return {row["id"]: row["vector"] for row in rows}


def report_dimension(folder):
    return len(Vocabulary.read(folder / "vocabulary.json"))


def expected_weights(shards, target):
    """What should be in the file, by a loop over the dense rows."""
    named = target.names if target.engine not in ("Qdrant", "Milvus", "pgvector") else list(map(str, range(10_000)))
    return {
        id: {
            named[term]: np.float32(row[term])
            for term in range(shards.dimension)
            if row[term] and shards.vocabulary.tokens[term] is not None
        }
        for batch in shards
        for id, row in zip(batch.ids, batch.vectors.toarray(), strict=True)
    }


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    dense = (rng.gamma(1.0, 2.0, (40, 10)) * (rng.random((40, 10)) < 0.6)).astype(np.float32)
    dense[7] = 0  # an empty vector
    dense[8] = 0
    dense[8, 9] = 1.5  # empty once what is no token is left out
    ids = [f"d{i}" for i in range(40)]
    ids[3] = "tab\tand\\slash"
    return make_shards(tmp_path / "shards", dense, ids, TOKENS, shard_size=17)


@pytest.mark.parametrize("to", TARGETS)
def test_what_is_written_is_read_back_to_the_last_bit(shards, tmp_path, to):
    report = export(shards, to, tmp_path / "out", show_progress_bar=False)
    target = load_target(tmp_path / "out")
    expected = expected_weights(shards, target)
    if to == "pgvector":
        expected = {id.replace("\\", "\\\\").replace("\t", "\\t"): row for id, row in expected.items()}
    found = read(tmp_path / "out", report)
    kept = to in ("anserini", "milvus", "seismic")
    if kept:  # engines without a place for an empty vector
        expected = {id: row for id, row in expected.items() if row}
    assert (report.skipped, report.empty, report.documents) == (2 if kept else 0, 2, len(expected))
    if to == "anserini":
        largest = max(max(row.values()) for row in expected.values())
        scale = np.float32(255 / largest)
        expected = {id: {t: int(np.rint(w * scale)) for t, w in row.items()} for id, row in expected.items()}
        expected = {id: {t: w for t, w in row.items() if w} for id, row in expected.items()}
        assert max(max(row.values()) for row in found.values()) == 255
    assert list(found) == list(expected)
    for id, row in found.items():
        assert list(row) == list(expected[id])  # ascending
        assert [np.float32(weight) for weight in row.values()] == list(expected[id].values())
    assert report.weights == sum(map(len, expected.values()))
    assert report.no_tokens == sum(batch.vectors[:, 8:].nnz for batch in shards)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["overlap"] == report.overlap


def test_ids_of_a_model_that_are_no_tokens_are_never_exported(checkpoint, tmp_path):
    # The vocabulary of ModernBERT is rounded up beyond its tokenizer's.
    model = SparseEncoder(str(checkpoint("modernbert")))
    shards = encode_corpus(model, dict(enumerate_texts()), tmp_path / "encoded", show_progress_bar=False)
    beyond = range(len(model.tokenizer), shards.dimension)
    assert len(beyond) > 0
    assert sum(batch.vectors[:, beyond.start :].nnz for batch in shards) > 0  # the model does give them weights
    for to in TARGETS:
        report = export(shards, to, tmp_path / to, show_progress_bar=False)
        names = {name for row in read(tmp_path / to, report).values() for name in row}
        target = load_target(tmp_path / to)
        assert report.no_tokens > 0
        assert not names & ({str(id) for id in beyond} | {target.names[id] for id in beyond})
    query = model.encode_query(TEXTS[0])
    assert query.coalesce().indices().max() >= beyond.start
    asked = load_target(tmp_path / "qdrant").query(query)["query"]["indices"]
    assert asked == sorted(asked)
    assert len(asked) > 0
    assert max(asked) < beyond.start
    asked = load_target(tmp_path / "opensearch").query(query)["query"]["neural_sparse"]["vector"]["query_tokens"]
    assert set(asked) <= set(load_target(tmp_path / "opensearch").names[: beyond.start])


def enumerate_texts():
    return ((f"d{number}", text) for number, text in enumerate(TEXTS))


def test_integers_keep_the_order_of_the_largest_weights_whatever_the_models_scale(tmp_path):
    # Weights of 50 and more, where a scale made for weights up to 5 would make all of them equal.
    rng = np.random.default_rng(1)
    dense = rng.uniform(40, 60, (30, 20)).astype(np.float32)
    shards = make_shards(tmp_path / "shards", dense, [f"d{i}" for i in range(30)])
    for levels in (255, 10_000):
        report = export(shards, "anserini", tmp_path / f"{levels}", levels=levels, show_progress_bar=False)
        found = read(tmp_path / f"{levels}", report)
        integers = np.array([[found[f"d{i}"][f"t{j}"] for j in range(20)] for i in range(30)])
        assert integers.max() == levels
        order = np.argsort(dense.ravel())
        assert (np.diff(integers.ravel()[order]) >= 0).all()
        assert len(np.unique(integers)) > 80
    assert report.overlap == 1.0


def test_the_overlap_is_that_of_the_top_10_by_brute_force(tmp_path):
    rng = np.random.default_rng(2)
    dense = (rng.gamma(1.0, 1.0, (200, 60)) * (rng.random((200, 60)) < 0.2)).astype(np.float32)
    queries = (rng.gamma(1.0, 1.0, (20, 60)) * (rng.random((20, 60)) < 0.2)).astype(np.float32)
    documents = make_shards(tmp_path / "d", dense, [f"d{i:03d}" for i in range(200)])
    asked = make_shards(tmp_path / "q", queries, [f"q{i}" for i in range(20)])
    report = export(documents, "anserini", tmp_path / "out", levels=7, queries=asked, show_progress_bar=False)
    rounded = [np.rint(m * np.float32(report.scale)) for m in (dense, queries)]

    def top(scores):
        return [set(np.lexsort((np.arange(200), -row))[:10].tolist()) for row in scores]

    pairs = zip(top(queries @ dense.T), top(rounded[1] @ rounded[0].T), strict=True)
    assert report.overlap == pytest.approx(np.mean([len(exact & found) / 10 for exact, found in pairs]))
    assert 0.3 < report.overlap < 0.95  # 7 levels are few
    stand_ins = export(documents, "qdrant", tmp_path / "floats", show_progress_bar=False)
    assert (stand_ins.overlap, stand_ins.queries) == (1.0, "200 of the documents")
    pruned = export(documents, "qdrant", tmp_path / "pruned", top_k=3, queries=asked, show_progress_bar=False)
    assert pruned.overlap < 1.0
    assert pruned.weights <= 3 * 200
    other = make_shards(tmp_path / "other", queries, [f"q{i}" for i in range(20)])
    other.settings["weights_crc32"] = 1
    with pytest.raises(ValueError, match="encoded by different models"):
        export(documents, "qdrant", tmp_path / "no", queries=other, show_progress_bar=False)


def test_queries_may_have_other_lengths_and_prompts_than_the_documents(checkpoint, tmp_path):
    quiet = {"show_progress_bar": False}
    documents = encode_corpus(checkpoint("bert"), dict(enumerate_texts()), tmp_path / "d", max_length=24, **quiet)
    model = SparseEncoder(str(checkpoint("bert")), prompts={"query": "river : ", "document": ""})
    queries = encode_corpus(model, {"q": "the capital"}, tmp_path / "q", task="query", max_length=9, **quiet)
    report = export(documents, "qdrant", tmp_path / "out", queries=queries, **quiet)
    assert (report.overlap, report.queries) == (1.0, f"1 of {tmp_path / 'q'}")


def test_of_many_queries_some_are_compared(tmp_path):
    dense = np.random.default_rng(5).random((1_500, 4)).astype(np.float32)
    documents = make_shards(tmp_path / "d", dense[:20], [f"d{i}" for i in range(20)])
    queries = make_shards(tmp_path / "q", dense, [f"q{i}" for i in range(1_500)], shard_size=700)
    report = export(documents, "qdrant", tmp_path / "out", queries=queries, show_progress_bar=False)
    assert report.queries == f"215 of {tmp_path / 'q'}"  # each seventh
    assert np.array_equal(_some_of(queries).toarray(), dense[::7])


def test_a_single_document_is_exported_though_nothing_can_be_compared(tmp_path):
    shards = make_shards(tmp_path / "shards", np.ones((1, 2)), ["only"])
    report = export(shards, "qdrant", tmp_path / "out", show_progress_bar=False)
    assert (report.documents, report.overlap) == (1, None)
    assert "not measured" in report.summary()


def test_overlap_by_hand():
    assert overlap([[("a", 2), ("c", 1)], [("x", 1)]], [[("a", 2), ("b", 1)], [("x", 1)]]) == 0.75
    assert overlap([[("b", 2), ("a", 1)]], [[("a", 2), ("b", 1)]]) == 1.0  # as sets
    assert overlap([[], [("a", 1)]], [[], [("a", 1)]]) == 1.0  # a query that finds nothing tells nothing
    with pytest.raises(ValueError, match="nothing to compare"):
        overlap([[]], [[]])


def test_lucenes_nine_bits_are_those_of_its_feature_field(shards):
    weights = as_csr(np.array([[1.2345678, 0.33333334, 100.4]], dtype=np.float32))
    kept = TARGETS["elasticsearch"](shards.vocabulary).searched(weights).data
    for value, cut in zip(weights.data, kept, strict=True):  # floatToIntBits >>> 15, and back
        bits = struct.unpack(">i", struct.pack(">f", value))[0] >> 15 << 15
        assert cut == struct.unpack(">f", struct.pack(">i", bits))[0]
        assert 0 <= (value - cut) / value < 2**-8


def test_the_overlap_of_lucene_is_that_of_its_nine_bits(tmp_path):
    weights = 1 + np.arange(100, dtype=np.float32)[:, None] / 25_600  # all equal to Lucene
    shards = make_shards(tmp_path / "shards", weights, [f"d{i:02d}" for i in range(100)])
    query = make_shards(tmp_path / "query", np.ones((1, 1)), ["q"])
    overlaps = {
        to: export(shards, to, tmp_path / to, queries=query, show_progress_bar=False).overlap
        for to in ("elasticsearch", "opensearch", "qdrant")
    }
    assert overlaps == {"elasticsearch": 0.0, "opensearch": 0.0, "qdrant": 1.0}


def test_the_overlap_of_seismic_is_that_of_its_half_precision(tmp_path):
    weights = 1 + np.arange(100, dtype=np.float32)[:, None] / 250_000  # all 1 in half precision
    shards = make_shards(tmp_path / "shards", weights, [f"d{i:02d}" for i in range(100)])
    query = make_shards(tmp_path / "query", np.ones((1, 1)), ["q"])
    assert export(shards, "seismic", tmp_path / "out", queries=query, show_progress_bar=False).overlap == 0.0


def test_weights_that_lucene_refuses_are_left_out(tmp_path):
    shards = make_shards(tmp_path / "shards", np.array([[1e-40, 1.0], [1e-40, 0.0]], dtype=np.float32), ["a", "b"])
    report = export(shards, "elasticsearch", tmp_path / "out", show_progress_bar=False)
    assert read(tmp_path / "out", report) == {"a": {"t1": 1.0}, "b": {}}
    assert (report.weights, report.empty) == (1, 1)


def test_tokens_that_an_engine_does_not_take_are_called_by_their_number():
    vocabulary = Vocabulary(tuple(TOKENS))
    names = {to: TARGETS[to](vocabulary).names for to in ("elasticsearch", "anserini", "vespa", "seismic")}
    assert names["elasticsearch"][:3] == ["the", "[1]", "two words"]
    assert names["anserini"][:3] == ["the", "U.S.", "[2]"]
    assert names["vespa"][5] == "[5]"
    assert names["seismic"][6] == "[6]"
    looks_like_one = Vocabulary(("[1]", "U.S.", "[2]", "[x]", None))
    assert looks_like_one.names(lambda token: "." not in token) == ["[0]", "[1]", "[2]", "[x]", "[4]"]


def test_numbers_are_as_short_as_float32_allows():
    weights = np.random.default_rng(3).gamma(1.0, 2.0, 1_000).astype(np.float32)
    assert decimals(np.array([0.1, 2.0, 1e-9], dtype=np.float32)) == [0.1, 2.0, 1e-09]
    assert (np.array(decimals(weights)).astype(np.float32) == weights).all()


def test_files_end_where_the_engine_wants_them_to(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(TARGETS["elasticsearch"], "part_bytes", 1_000)
    report = export(shards, "elasticsearch", tmp_path / "out", show_progress_bar=False)
    assert len(report.files) > 3
    sizes = [(tmp_path / "out" / file).stat().st_size for file in report.files]
    assert all(1_000 <= size < 2_000 for size in sizes[:-1])
    for file in report.files:  # each is a request of its own
        schemas.read_bulk((tmp_path / "out" / file).read_bytes(), (tmp_path / "out" / "index.json").read_text())
    assert len(read(tmp_path / "out", report)) == 40
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "documents",  # nothing else is in there, since Anserini reads whatever it finds
        "export.json",
        "index.json",
        "vocabulary.json",
    }
    assert [f"documents/{file.name}" for file in sorted((tmp_path / "out" / "documents").iterdir())] == report.files


def test_chunks_are_combined_on_request(tmp_path):
    dense = np.array([[1.0, 0.0, 2.0], [3.0, 4.0, 0.0], [0.0, 0.0, 5.0]], dtype=np.float32)
    shards = make_shards(tmp_path / "shards", dense, ["a#0", "a#1", "b#0"], shard_size=1)
    report = export(shards, "milvus", tmp_path / "out", combine=True, show_progress_bar=False)
    assert read(tmp_path / "out", report) == {"a": {"0": 3.0, "1": 4.0, "2": 2.0}, "b": {"2": 5.0}}
    apart = make_shards(tmp_path / "apart", dense, ["a#0", "b#0", "a#1"])
    with pytest.raises(ValueError, match=r"'a' stands at positions 0 and 2.*Chunks to combine must follow each other"):
        export(apart, "milvus", tmp_path / "none", combine=True, show_progress_bar=False)
    with pytest.raises(ValueError, match=r"separator .* is empty"):
        export(apart, "milvus", tmp_path / "none", combine=True, separator="", show_progress_bar=False)


def test_an_export_appears_whole_or_not_at_all(shards, tmp_path, monkeypatch):
    document = TARGETS["qdrant"].document

    def dying(self, id, terms, weights):
        if id == "d30":
            raise OSError("the disk is full")
        return document(self, id, terms, weights)

    monkeypatch.setattr(TARGETS["qdrant"], "document", dying)
    with pytest.raises(OSError, match="disk is full"):
        export(shards, "qdrant", tmp_path / "out", show_progress_bar=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    export(shards, "qdrant", tmp_path / "out", show_progress_bar=False)
    with pytest.raises(FileExistsError, match="is there already"):
        export(shards, "qdrant", tmp_path / "out", show_progress_bar=False)


def test_what_cannot_be_exported_is_refused_by_name(shards, tmp_path):
    for arguments, message in (
        ({"to": "solr"}, "no target 'solr': choose one of anserini"),
        ({"to": "qdrant", "mass": 2}, "share of mass"),
        ({"to": "qdrant", "name": "Docs"}, "'Docs' will not do"),
        ({"to": "anserini", "levels": 0}, "from 1 to 16,777,216, got 0"),
        ({"to": "anserini", "levels": 10**12}, "from 1 to 16,777,216, got"),
        ({"to": "anserini", "threshold": 99}, "threshold of 99 leaves nothing, since the largest weight is"),
    ):
        with pytest.raises(ValueError, match=message):
            export(shards, output=tmp_path / "none", show_progress_bar=False, **arguments)
    assert not (tmp_path / "none").exists()
    wide = make_shards(tmp_path / "wide", sparse.csr_matrix(np.ones((1, 16_001), dtype=np.float32)), ["w"])
    with pytest.raises(ValueError, match=r"'w' has 16,001 terms, pgvector takes 16,000.*--top-k"):
        export(wide, "pgvector", tmp_path / "none", show_progress_bar=False)
    long = make_shards(tmp_path / "long", np.ones((1, 2)), ["ü" * 300])
    with pytest.raises(ValueError, match="600 bytes, Elasticsearch takes 512"):
        export(long, "elasticsearch", tmp_path / "none", show_progress_bar=False)
    with pytest.raises(ValueError, match="2,700 bytes, a key of PostgreSQL 2,692"):
        export(make_shards(tmp_path / "key", np.ones((1, 2)), ["k" * 2_700]), "pgvector", tmp_path / "none")
    with pytest.raises(ValueError, match=r"control character '\\x00', which Vespa refuses"):
        export(make_shards(tmp_path / "null", np.ones((1, 2)), ["a\0b"]), "vespa", tmp_path / "none")
    with pytest.raises(ValueError, match="weight of 70000, and Seismic's half precision ends at 65,504"):
        export(make_shards(tmp_path / "huge", np.full((1, 2), 7e4), ["h"]), "seismic", tmp_path / "none")
    nothing = make_shards(tmp_path / "nothing", np.zeros((1, 2)), ["n"])
    with pytest.raises(ValueError, match="No document has a term"):
        export(nothing, "qdrant", tmp_path / "none", show_progress_bar=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(IndexFileError, match="is not a folder of encoded texts"):
        export(tmp_path, "qdrant", tmp_path / "none", show_progress_bar=False)
    with pytest.raises(ValueError, match="is no export"):
        load_target(tmp_path)


def test_queries_have_the_names_and_the_scale_of_the_documents(shards, tmp_path, monkeypatch):
    vector = np.zeros(10, dtype=np.float32)
    vector[[0, 1, 8]] = 2.0, 1.1, 5.0  # 8 is no token
    forms = [vector, vector[None], torch.tensor(vector), torch.tensor(vector).to_sparse_coo(), as_csr(vector[None])]

    def query(to, form=vector):
        if not (tmp_path / to).exists():
            export(shards, to, tmp_path / to, show_progress_bar=False)
        return load_target(tmp_path / to).query(form, top_k=3)

    for form in forms:
        assert query("qdrant", form)["query"] == {"indices": [0, 1], "values": [2.0, 1.1]}
        assert query("milvus", form)["data"] == [{0: 2.0, 1: 1.1}]
    assert query("elasticsearch") == {
        "size": 3,
        "_source": False,
        "query": {"sparse_vector": {"field": "vector", "query_vector": {"the": 2.0, "[1]": 1.1}, "prune": False}},
    }
    clauses = query("elasticsearch-rank-features")["query"]["bool"]["should"]
    assert clauses[0] == {"rank_feature": {"field": "vector.the", "linear": {}, "boost": 2.0}}
    assert query("opensearch")["query"] == {"neural_sparse": {"vector": {"query_tokens": {"the": 2.0, "[1]": 1.1}}}}
    scale = load_target(tmp_path / "anserini").scale if query("anserini") else 0
    assert query("anserini") == {"the": round(2 * scale), "U.S.": round(1.1 * scale)}
    vespa = query("vespa")
    assert vespa["yql"].startswith("select id from documents where {targetHits: 100}wand(terms, {")
    assert vespa["input.query(vector)"] == {"the": 2.0, "U.S.": 1.1}
    assert 'FROM "documents" ORDER BY' in query("pgvector")  # a table may be called as a word of SQL is
    assert query("pgvector").endswith("ORDER BY vector <#> '{1:2.0,2:1.1}/10', id LIMIT 3")
    with pytest.raises(ValueError, match="one vector of 10 dimensions, got 1 of 3"):
        query("qdrant", np.ones(3))
    monkeypatch.setitem(sys.modules, "seismic", None)
    with pytest.raises(ImportError, match=r'pip install "st-sparse-rescale\[serving\]"'):
        query("seismic")


def test_the_reader_of_each_schema_refuses_what_the_engine_would():
    fields = {"id": {"type": "keyword"}, "vector": {"type": "sparse_vector"}}
    index = json.dumps({"mappings": {"dynamic": "strict", "properties": fields}})
    action, source = '{"index":{"_id":"a"}}\n', '{"id":"a","vector":{"the":1.5}}\n'
    assert schemas.read_bulk((action + source).encode(), index) == {"a": {"the": 1.5}}
    for wrong in (
        source.replace("the", "U.S."),
        source.replace("1.5", "0.0"),
        source.replace("1.5", "-1"),
        source.replace("1.5", "NaN"),
        source.replace("1.5", "1e-40"),
        source.replace('{"the":1.5}', "{}"),
        source.replace('"the":1.5', '"the":1.5,"the":2'),
        source.replace("vector", "other"),
        source[:-1],
        source + action,
        source + action + source,
    ):
        with pytest.raises(AssertionError):
            schemas.read_bulk((action + wrong).encode(), index)
    with pytest.raises(AssertionError):
        schemas.read_anserini(b'{"id":"a","contents":"","vector":{"two words":3}}\n')
    with pytest.raises(AssertionError):
        schemas.read_anserini(b'{"id":"a","contents":"","vector":{"the":1.5}}\n')


def test_the_command_reports_what_it_wrote(shards, tmp_path):
    runner = CliRunner()
    arguments = ["export", str(shards.folder), "--to", "anserini", str(tmp_path / "out"), "--top-k", "4"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "export.json").read_text())
    shown = " ".join(result.output.split())
    assert f"{report['documents']} documents" in shown
    assert "2 without a term left out" in shown
    assert f"{report['overlap']:.3f}" in shown
    again = runner.invoke(app, arguments)
    assert again.exit_code == 2
    assert "is there already" in again.stderr
