"""Collections from folders, the hub's layouts and ir_datasets; what is wrong with them is said with file and line."""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

from st_sparse_rescale.evaluation import evaluate
from st_sparse_rescale.evaluation.beir import load_beir_folder
from st_sparse_rescale.evaluation.bm25 import bm25_run
from st_sparse_rescale.evaluation.collection import CollectionError
from st_sparse_rescale.evaluation.metrics import mean, measure
from st_sparse_rescale.evaluation.sources import find_collections, load_collections

DATA = Path(os.environ.get("ST_SPARSE_RESCALE_DATA", Path(__file__).parents[2] / "shared" / "data"))
# nDCG@10 of BM25 with (k1, b) = (0.9, 0.4) and (1.5, 0.75), as their READMEs have it.
BM25 = {
    "adi": (82, 35, 0.480, 0.494),
    "cranfield": (1400, 225, 0.343, 0.365),
    "cisi": (1460, 76, 0.373, 0.396),
    "vaswani": (11429, 93, 0.445, 0.428),
    "scifact": (5183, 300, 0.676, 0.686),
}


def one(source, **settings):
    (collection,) = load_collections(source, **settings)
    return collection


def write(folder, corpus, queries, qrels, split="test"):
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("\n".join(corpus) + "\n", encoding="utf-8")
    (folder / "queries.jsonl").write_text("\n".join(queries) + "\n", encoding="utf-8")
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(qrels) + "\n")
    return folder


def line(id, text, **more):
    return json.dumps({"_id": id, "text": text, **more}, ensure_ascii=False)


CORPUS = [line("d1", "a\u2028b", title="T"), line("d2", "second", title=""), line("d3", "third")]
QUERIES = [line("q1", "first?"), line("q2", "second?"), line("q3", "not judged")]
QRELS = ["q1\td1\t2", "q1\td2\t0", "q2\td3\t1"]


def test_a_folder_is_read_line_by_line(tmp_path):
    collection = one(write(tmp_path / "toy", CORPUS, QUERIES, QRELS), strict=True)
    assert collection.name == "toy"
    assert collection.corpus == {"d1": "T a\u2028b", "d2": "second", "d3": "third"}  # U+2028 ends no line
    assert collection.queries == {"q1": "first?", "q2": "second?"}
    assert collection.qrels == {"q1": {"d1": 2, "d2": 0}, "q2": {"d3": 1}}
    assert collection.problems == []


# (what is broken, which file, what is said, what is left)
FAULTS = [
    ({"corpus": [*CORPUS, "{broken"]}, r"corpus.jsonl, line 4: not valid JSON .*; skipped", {}),
    ({"corpus": [*CORPUS, "[1]"]}, r"corpus.jsonl, line 4: found list", {}),
    ({"corpus": [*CORPUS, '{"_id": "d4"}']}, r"corpus.jsonl, line 4: needs the texts _id and text", {}),
    ({"corpus": [*CORPUS, line("d1", "again")]}, r"corpus.jsonl, line 4: the id 'd1' stands twice; the first", {}),
    ({"queries": [*QUERIES, line("q1", "again")]}, r"queries.jsonl, line 4: the id 'q1' stands twice", {}),
    ({"queries": [*QUERIES, line("", "no id")]}, r"queries.jsonl, line 4: needs the texts", {}),
    ({"qrels": [*QRELS, "q9\td1\t1"]}, r"test.tsv, line 5: judges query 'q9', which .* not hold; skipped", {}),
    (
        {"qrels": [*QRELS, "q1\td9\t1"]},
        r"test.tsv, line 5: judges document 'd9', .*; counted as never found",
        {"d9": 1},
    ),
    ({"qrels": [*QRELS, "q1\td1\t1"]}, r"test.tsv, line 5: grades 'd1' for 'q1' as 1, before as 2; the first", {}),
    ({"qrels": [*QRELS, "q1 d1 1"]}, r"test.tsv, line 5: must be query id, document id, score", {}),
    ({"qrels": [*QRELS, "q1\td1\t1.5"]}, r"test.tsv, line 5: must be query id, document id, score", {}),
    ({"qrels": [*QRELS, "q1\td1\t1\t"]}, r"test.tsv, line 5: must be query id, document id, score", {}),
    ({"qrels": [*QRELS, 'q1\t"d1\t1']}, r"""test.tsv, line 5: judges document '"d1'""", {'"d1': 1}),  # no quotes here
    ({"corpus": [*CORPUS, r'{"_id": "d4", "text": "\ud800"}']}, r"corpus.jsonl, line 4: holds half of a surrog", {}),
    ({"corpus": [*CORPUS, r'{"_id": "\ud800", "text": "x"}']}, r"corpus.jsonl, line 4: holds half of a surrog", {}),
]


@pytest.mark.parametrize(("fault", "said", "more"), FAULTS)
def test_faults_are_reported_with_file_and_line_and_strict_stops(tmp_path, fault, said, more):
    folder = write(tmp_path / "toy", **{"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS} | fault)
    collection = one(folder)
    assert len(collection.problems) == 1
    import re

    assert re.search(said, collection.problems[0])
    assert (len(collection.corpus), list(collection.queries)) == (3, ["q1", "q2"])
    assert collection.qrels["q1"] == {"d1": 2, "d2": 0} | more
    with pytest.raises(CollectionError, match=said.split("; ")[0].split(";")[0]):
        one(folder, strict=True)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"qrels": []}, "toy cannot be evaluated: no document is judged relevant"),
        ({"qrels": ["q1\td1\t0"]}, "no document is judged relevant"),
        ({"corpus": [""]}, "it holds no document"),
        ({"queries": ["{"]}, r"it holds no query.\n  .*queries.jsonl, line 1: not valid JSON"),
    ],
)
def test_nothing_to_evaluate_is_an_error(tmp_path, fault, said):
    with pytest.raises(CollectionError, match=said):
        one(write(tmp_path / "toy", **{"corpus": CORPUS, "queries": QUERIES, "qrels": QRELS} | fault))


def test_missing_files_and_splits_are_named(tmp_path):
    folder = write(tmp_path / "toy", CORPUS, QUERIES, QRELS, split="train")
    with pytest.raises(CollectionError, match=r"holds no test.tsv or dev.tsv; its splits are \['train'\]"):
        one(folder)
    assert one(folder, split="train").split == "train"
    (folder / "queries.jsonl").unlink()
    with pytest.raises(CollectionError, match=r"queries.jsonl: cannot be read \(No such file"):
        one(folder, split="train")
    for name in ("nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(CollectionError, match=r"nowhere cannot be loaded .*: give a folder in BEIR's layout"):
            one(name)


def test_judgements_are_lines_of_bytes(tmp_path):
    """Windows line ends, a byte-order mark, no header, NUL, ids with blanks and U+2028: none breaks a line."""
    folder = write(tmp_path / "toy", [line("d\u2028 1", "x"), line("d\0", "y")], [line("q 1", "?")], [])
    (folder / "qrels" / "test.tsv").write_bytes("\ufeffq 1\td\u2028 1\t1\r\nq 1\td\0\t-1\r\n\r\n".encode())
    collection = one(folder, strict=True)
    assert collection.qrels == {"q 1": {"d\u2028 1": 1, "d\0": -1}}
    (folder / "qrels" / "test.tsv").write_bytes(b"q 1\td\0\t2\nq 1\t\xff\t1\n")
    (problem,) = one(folder).problems
    assert "test.tsv, line 2: must be query id" in problem


def test_negative_grades_are_not_relevant_and_gain_nothing():
    scores = measure({"q": [("bad", 3.0), ("good", 2.0)]}, {"q": {"bad": -2, "good": 2}}, ["ndcg@10", "recall@10"])
    assert scores == {"ndcg@10": {"q": pytest.approx(1 / math.log2(3))}, "recall@10": {"q": 1.0}}


def test_numbers_as_ids_are_taken_as_the_judgements_write_them(tmp_path):
    corpus = ['{"_id": 7, "text": "seven"}', '{"_id": true, "text": "no id"}']
    collection = one(write(tmp_path / "toy", corpus, ['{"_id": 1, "text": "?"}'], ["1\t7\t1.0"]))
    assert (collection.corpus, collection.qrels) == ({"7": "seven"}, {"1": {"7": 1}})
    assert len(collection.problems) == 1


def test_queries_that_are_documents_are_left_out_where_that_is_customary(tmp_path):
    for name, expected in (("arguana", True), ("quora", True), ("scifact", False)):
        assert load_beir_folder(write(tmp_path / name, CORPUS, QUERIES, QRELS)).exclude_self is expected


# Layouts of the hub, from local copies


def hub_copy(folder, configs):
    """Parquet files and a card that names subsets and splits, as on the hub."""
    card = []
    for subset, splits in configs.items():
        card.append(f"- config_name: {subset}\n  data_files:\n")
        for split, rows in splits.items():
            file = folder / subset / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows).to_parquet(str(file))
            card.append(f"  - split: {split}\n    path: {subset}/{split}.parquet\n")
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(card) + "---\n")
    return folder


ROWS = {
    "corpus": [{"_id": "d1", "text": "one"}, {"_id": "d2", "text": "two"}, {"_id": "d3", "text": ""}],
    "queries": [{"_id": "q1", "text": "one?"}, {"_id": "q2", "text": "two?"}],
    "qrels": [{"query-id": "q1", "corpus-id": "d1"}, {"query-id": "q2", "corpus-id": "d2"}],
}


def test_nanobeir_from_a_local_copy(tmp_path):
    splits = ("NanoSciFact", "NanoNQ")
    folder = hub_copy(tmp_path / "nano", {subset: dict.fromkeys(splits, rows) for subset, rows in ROWS.items()})
    collections = list(load_collections("nanobeir:scifact,nq", data_dir=folder))
    assert [collection.name for collection in collections] == list(splits)
    assert collections[0].corpus == {"d1": "one", "d2": "two"}  # without the empty text, as in sentence-transformers
    assert collections[0].qrels == {"q1": {"d1": 1}, "q2": {"d2": 1}}
    with pytest.raises(CollectionError, match="NanoBEIR holds no sciencefact; it holds climatefever"):
        one("nanobeir:sciencefact")
    with pytest.raises(CollectionError, match="NanoBEIR-en cannot be loaded"):  # no hub here
        one("nanobeir:nq")


def test_beir_from_a_folder_of_folders(tmp_path):
    for name in ("scifact", "arguana"):
        write(tmp_path / name, CORPUS, QUERIES, QRELS)
    found = list(load_collections("beir:arguana,scifact", data_dir=tmp_path))
    assert [(c.name, c.exclude_self) for c in found] == [("arguana", True), ("scifact", False)]
    with pytest.raises(CollectionError, match="BEIR holds no cranfield"):
        one("beir:cranfield")
    with pytest.raises(CollectionError, match=r"fiqa is no folder in BEIR's layout: it holds no corpus.jsonl"):
        find_collections("beir:scifact,fiqa", data_dir=tmp_path)  # before any is loaded
    assert list(find_collections(tmp_path)) == ["arguana", "scifact"]  # all that are there


def test_a_dataset_of_three_tables(tmp_path):
    graded = [{**row, "score": 2.0} for row in ROWS["qrels"]]
    configs = {
        "corpus": {"corpus": ROWS["corpus"]},
        "queries": {"queries": ROWS["queries"]},
        "default": {"test": graded},
    }
    collection = one(str(hub_copy(tmp_path / "three", configs)))
    assert (collection.name, len(collection.corpus), collection.qrels["q2"]) == ("three", 3, {"d2": 2})


def test_a_dataset_of_pairs(tmp_path):
    rows = [
        {"query": "who?", "answer": "she", "n": 1},
        {"query": "who?", "answer": "he", "n": 2},
        {"query": "what?", "answer": "she", "n": 3},
    ]
    collection = one(str(hub_copy(tmp_path / "pairs", {"default": {"test": rows}})))
    assert (len(collection.queries), len(collection.corpus)) == (2, 2)  # equal texts are one
    assert sorted(len(grades) for grades in collection.qrels.values()) == [1, 2]


def test_ir_datasets(monkeypatch):
    def record(**fields):
        return SimpleNamespace(**fields)

    loaded = record(
        docs_iter=lambda: [record(doc_id="7", text="passage"), record(doc_id="8", default_text=lambda: "title body")],
        queries_iter=lambda: [record(query_id="q", text="what")],
        qrels_iter=lambda: [
            record(query_id="q", doc_id="7", relevance=1), record(query_id="q", doc_id="8", relevance=2),
        ],
    )  # fmt: skip
    asked = []
    monkeypatch.setitem(sys.modules, "ir_datasets", record(load=lambda id: asked.append(id) or loaded))
    collection = one("trec-dl-2019")
    assert asked == ["msmarco-passage/trec-dl-2019/judged"]
    assert collection.corpus == {"7": "passage", "8": "title body"}
    assert collection.metrics[0] == "ndcg@10"
    # TREC's "related" counts in nDCG, and not as relevant.
    scores = measure({"q": [("7", 2.0), ("8", 1.0)]}, collection.qrels, ["mrr@10", "ndcg@10"], relevant_from=2)
    assert collection.relevant_from == 2
    assert scores["mrr@10"] == {"q": 0.5}
    assert scores["ndcg@10"]["q"] == pytest.approx((1 + 2 / 1.5849625) / (2 + 1 / 1.5849625))
    assert one("msmarco-dev").metrics[0] == "mrr@10"
    assert one("irds:any/thing").name == "any-thing"


def test_ir_datasets_absent_or_ignorant(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(ImportError, match=r"pip install \"st-sparse-rescale\[ir-datasets\]\""):
        one("msmarco-dev")

    def unknown(id):
        raise KeyError(id)

    monkeypatch.setitem(sys.modules, "ir_datasets", SimpleNamespace(load=unknown))
    with pytest.raises(CollectionError, match="knows no dataset 'no/such'"):
        one("irds:no/such")


# Real collections


@pytest.mark.parametrize("name", BM25)
def test_bm25_reaches_the_published_reference(name):
    if not (DATA / name).is_dir():
        pytest.skip(f"{DATA / name} is not there: set ST_SPARSE_RESCALE_DATA to a folder of BEIR collections")
    documents, queries, early, late = BM25[name]
    collection = load_beir_folder(DATA / name, strict=True)
    assert (len(collection.corpus), len(collection.queries)) == (documents, queries)
    for (k1, b), expected in {(0.9, 0.4): early, (1.5, 0.75): late}.items():
        run = bm25_run(collection.corpus, collection.queries, 10, k1, b)
        assert mean(measure(run, collection.qrels, ["ndcg@10"])["ndcg@10"]) == pytest.approx(expected, abs=6e-4)


def test_a_real_model_on_a_real_collection_equals_the_stock_evaluator():
    checkpoint = DATA.parent / "models" / "splade-tiny"
    if not (checkpoint.is_dir() and (DATA / "adi").is_dir()):
        pytest.skip(f"{checkpoint} or {DATA / 'adi'} is not there")
    collection = load_beir_folder(DATA / "adi")
    relevant = {query: {d for d, grade in grades.items() if grade} for query, grades in collection.qrels.items()}
    stock = SparseInformationRetrievalEvaluator(collection.queries, collection.corpus, relevant)
    expected = stock(SparseEncoder(str(checkpoint)))
    (system,) = evaluate(checkpoint, [DATA / "adi"]).collections[0].systems
    for metric in ("ndcg@10", "mrr@10", "map@100"):
        assert system.metrics[metric] == pytest.approx(expected[f"dot_{metric}"], abs=1e-6)
    assert system.metrics["ndcg@10"] == pytest.approx(0.395, abs=2e-3)
    assert system.flops == pytest.approx(expected["avg_flops"], rel=1e-4)
