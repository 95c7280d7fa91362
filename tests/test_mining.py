"""Mining: the rule, its equality with sentence-transformers', the three ways to search, kills and refusals."""

from __future__ import annotations

import doctest
import json
import shutil
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import mine_hard_negatives
from typer.testing import CliRunner

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.cli import app
from st_sparse_rescale.jsonl import read_jsonl, write_jsonl
from st_sparse_rescale.training import DataError, NegativeFilter, load_training_data, mine, mining, negative_filter
from tests.tiny_models import TEXTS

PAIRS = [{"query": " ".join(text.split()[:5]), "positive": text} for text in TEXTS]
PAIRS.append({"query": PAIRS[0]["query"], "positive": TEXTS[1]})  # a query with two positives
CORPUS = [
    {"_id": str(i), "title": "", "text": f"{a} {b}"} for i, (a, b) in enumerate(zip(TEXTS, TEXTS[5:], strict=False))
]


@pytest.fixture
def files(tmp_path):
    write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    write_jsonl(tmp_path / "corpus.jsonl", CORPUS)
    return SimpleNamespace(pairs=tmp_path / "pairs.jsonl", corpus=tmp_path / "corpus.jsonl", out=tmp_path / "out.jsonl")


@pytest.fixture(scope="module")
def model(checkpoint) -> SparseEncoder:
    transformer = RescaledMLMTransformer(str(checkpoint("bert")), k=4, max_seq_length=32)
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")


@pytest.fixture(scope="module")
def dense(checkpoint) -> SentenceTransformer:
    transformer = Transformer(str(checkpoint("bert")), max_seq_length=32)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")


def rows_of(file) -> list[dict]:
    return [row for _, row in read_jsonl(file)]


# --- the rule ---

CANDIDATES = [("a", 10.0), ("p", 9.0), ("b", 8.8), ("c", 7.0), ("d", 6.0), ("e", 1.0)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_negatives": 2}, ["a", "b"]),
        ({"num_negatives": 2, "range_min": 1}, ["b", "c"]),
        ({"num_negatives": 2, "range_max": 2}, ["a", "b"]),
        ({"num_negatives": 5}, ["a", "b", "c", "d", "e"]),
        ({"num_negatives": 6}, None),
        ({"num_negatives": 2, "absolute_margin": 0.0}, ["b", "c"]),
        ({"num_negatives": 2, "absolute_margin": 2.0}, ["c", "d"]),
        ({"num_negatives": 2, "absolute_margin": 2.5}, ["d", "e"]),
        ({"num_negatives": 2, "relative_margin": 0.05}, ["c", "d"]),
        ({"num_negatives": 2, "max_score": 6.0}, ["d", "e"]),
        ({"num_negatives": 2, "max_score": 6.0, "min_score": 2.0}, None),
        ({"num_negatives": 1, "absolute_margin": 2.0, "range_min": 1}, ["d"]),
    ],
)
def test_what_is_left(settings, expected):
    assert NegativeFilter(**settings).choose("q", CANDIDATES, {"p"}, 9.0) == expected


def test_a_relative_margin_lowers_the_bar_for_negative_scores_too():
    rule = NegativeFilter(num_negatives=1, relative_margin=0.5)
    assert rule.choose("q", [("a", -2.5), ("b", -3.5)], set(), -2.0) == ["b"]


def test_a_random_choice_follows_from_the_seed_and_the_query_alone():
    def chosen(query, seed):
        return NegativeFilter(num_negatives=2, sampling="random", seed=seed).choose(query, CANDIDATES, {"p"}, 9.0)

    assert chosen("q", 0) == chosen("q", 0)
    assert len({tuple(chosen("q", seed)) for seed in range(20)}) > 3
    assert len({tuple(chosen(f"q{i}", 0)) for i in range(20)}) > 3
    scores = dict(CANDIDATES)
    assert all(scores[first] > scores[second] for first, second in (chosen("q", seed) for seed in range(20)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_negatives": 0}, "num_negatives is 0"),
        ({"range_min": -1}, "range_min is -1"),
        ({"range_max": 3}, "leaves 3 documents for 4 negatives: raise range_max"),
        ({"range_min": 9, "range_max": 3}, "leaves 0 documents"),
        ({"max_score": float("nan")}, "max_score is nan"),
        ({"absolute_margin": -1.0}, "a negative could outscore the positive"),
        ({"sampling": "best"}, "must be 'top' or 'random'"),
    ],
)
def test_impossible_rules_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NegativeFilter(**settings)


def test_docstring_examples_run():
    result = doctest.testmod(negative_filter)
    assert result.attempted > 0
    assert result.failed == 0


# --- equality with sentence-transformers ---


class Densified:
    """A sparse model as sentence-transformers' miner would have it: dense vectors, compared by dot product."""

    def __init__(self, model: SparseEncoder) -> None:
        self.device = torch.device("cpu")
        self._model = model

    def encode_document(self, texts, **_):
        return self._model.encode_document(list(texts)).to_dense().numpy()

    def encode_query(self, texts, **_):
        return self._model.encode_query(list(texts)).to_dense().numpy()

    def similarity(self, queries, documents):
        return torch.as_tensor(queries) @ torch.as_tensor(documents).T

    def similarity_pairwise(self, queries, documents):
        return torch.as_tensor(np.asarray(queries) * np.asarray(documents)).sum(dim=1)


class Judge:
    """A cross-encoder that likes texts of four times the query's length, no two alike."""

    num_labels = 1

    def predict(self, pairs, convert_to_tensor=False, **_):
        scores = [
            1 / (1 + abs(4 * len(query) - len(text)) + zlib.crc32(text.encode()) / 2**32) for query, text in pairs
        ]
        scores = torch.tensor(scores)
        return scores if convert_to_tensor else scores.numpy()


@pytest.mark.parametrize(
    "rule",
    [
        {"num_negatives": 3},
        {"num_negatives": 2, "range_min": 2, "range_max": 6},
        {"num_negatives": 1, "relative_margin": 0.005, "range_max": 40},
        {"num_negatives": 1, "absolute_margin": 0.2, "range_max": 40},
        {"num_negatives": 1, "max_score": 35.4, "min_score": 35.2, "range_max": 40},
        {"num_negatives": 2, "relative_margin": 0.1, "range_max": 40, "judge": True},
    ],
)
def test_by_a_sparse_model_the_negatives_are_those_of_sentence_transformers(files, model, monkeypatch, rule):
    rule = dict(rule)
    judge = Judge() if rule.pop("judge", False) else None
    monkeypatch.setattr(mining, "load_cross_encoder", lambda given: given)
    monkeypatch.setattr(mining, "model_crc32", lambda given: 0)
    theirs = mine_hard_negatives(
        Dataset.from_list(PAIRS),
        Densified(model),
        corpus=[row["text"] for row in CORPUS],
        cross_encoder=judge,
        output_format="n-tuple",
        verbose=False,
        **({"range_max": 10 * rule["num_negatives"]} | rule),
    )
    expected = {
        (row["query"], row["positive"], tuple(row[f"negative_{i + 1}"] for i in range(rule["num_negatives"])))
        for row in theirs
    }
    mined = mine(files.pairs, files.out, sparse=model, corpus=files.corpus, cross_encoder=judge, **rule, **QUIET)
    found = {(row["query"], row["positive"], tuple(row["negatives"])) for row in rows_of(files.out)}
    assert found == expected
    assert 0 < mined.rows == len(found)
    assert mined.dropped == len(PAIRS) - len(found)


QUIET = {"show_progress_bar": False}


# --- the ways to search ---


def test_a_mined_file_is_one_that_training_reads(files):
    mined = mine(files.pairs, files.out, bm25=True, corpus=files.corpus, num_negatives=2, **QUIET)
    assert mined.file == files.out
    assert mined.rows + mined.dropped == len(PAIRS)
    data = load_training_data(files.out)
    assert data.column_names == ["query", "positive", "negative_1", "negative_2"]
    assert len(data) == mined.rows
    relevant = {(row["query"], row["positive"]) for row in PAIRS}
    documents = {row["text"] for row in CORPUS} | {row["positive"] for row in PAIRS}
    for row in data:
        assert (row["query"], row["positive"]) in relevant
        for name in ("negative_1", "negative_2"):
            assert (row["query"], row[name]) not in relevant
            assert row[name] in documents


def test_by_bm25_the_negatives_share_words_with_the_query(tmp_path):
    write_jsonl(
        tmp_path / "pairs.jsonl",
        [
            {"query": "red rose", "positive": "a red rose in bloom"},
            {"query": "blue sea", "positive": "the blue sea at night"},
            {"query": "red sea", "positive": "the red sea parted"},
        ],
    )
    mined = mine(tmp_path / "pairs.jsonl", tmp_path / "out.jsonl", bm25=True, num_negatives=1, **QUIET)
    assert rows_of(mined.file) == [
        {"query": "red rose", "positive": "a red rose in bloom", "negatives": ["the red sea parted"]},
        {"query": "blue sea", "positive": "the blue sea at night", "negatives": ["the red sea parted"]},
        # Both others share one word; that of the shorter document weighs more.
        {"query": "red sea", "positive": "the red sea parted", "negatives": [rows_of(mined.file)[2]["negatives"][0]]},
    ]
    two = mine(tmp_path / "pairs.jsonl", tmp_path / "two.jsonl", bm25=True, num_negatives=2, **QUIET)
    assert (two.rows, two.dropped) == (1, 2)  # what shares no word with the query is no hard negative


def test_by_a_dense_model_through_sentence_transformers(files, dense):
    pytest.importorskip("faiss", reason="dense mining needs faiss-cpu")
    rule = {"num_negatives": 2, "relative_margin": 0.01, "range_max": 40}
    theirs = mine_hard_negatives(
        Dataset.from_list(PAIRS),
        dense,
        corpus=[row["text"] for row in CORPUS],
        output_format="n-tuple",
        verbose=False,
        **rule,
    )
    mined = mine(files.pairs, files.out, dense=dense, corpus=files.corpus, **rule, **QUIET)
    assert mined.rows == len(theirs) > 0
    assert [[row["query"], row["positive"], *row["negatives"]] for row in rows_of(files.out)] == [
        list(row.values()) for row in theirs
    ]


def test_a_random_choice_by_a_dense_model_follows_from_the_seed(files, dense):
    pytest.importorskip("faiss", reason="dense mining needs faiss-cpu")

    def chosen(name, seed):
        file = files.out.with_name(name)
        mine(files.pairs, file, dense=dense, sampling="random", num_negatives=2, seed=seed, **QUIET)
        return rows_of(file)

    assert chosen("a.jsonl", 1) == chosen("b.jsonl", 1) != chosen("c.jsonl", 2)


def test_without_a_corpus_the_positives_are_searched_and_given_negatives_not_looked_at(tmp_path, model):
    write_jsonl(tmp_path / "pairs.jsonl", [{**row, "negative": "old"} for row in PAIRS])
    mined = mine(tmp_path / "pairs.jsonl", tmp_path / "out.jsonl", sparse=model, num_negatives=2, **QUIET)
    assert {text for row in rows_of(mined.file) for text in row["negatives"]} <= set(TEXTS)


@pytest.mark.parametrize("way", ["bm25", "sparse", "dense"])
def test_a_querys_own_text_is_not_its_negative(files, model, dense, way):
    """As in a collection of duplicate questions, where each query is a document, and the one that is most like it."""
    if way == "dense":
        pytest.importorskip("faiss", reason="dense mining needs faiss-cpu")
    write_jsonl(files.corpus, [{"text": row["query"]} for row in PAIRS])
    by = {"bm25": True, "sparse": model, "dense": dense}[way]
    mined = mine(files.pairs, files.out, corpus=files.corpus, num_negatives=1, **{way: by}, **QUIET)
    found = rows_of(files.out)
    assert 0 < mined.rows == len(found) <= len(PAIRS)
    assert all(row["query"] not in (row["positive"], *row["negatives"]) for row in found)
    assert way == "bm25" or mined.dropped == 0


# --- kills ---


@pytest.mark.parametrize("index", ["index", None])
def test_a_killed_search_goes_on_from_its_parts_and_its_index(files, model, monkeypatch, tmp_path, index):
    index = index and tmp_path / index
    settings = {"sparse": model, "corpus": files.corpus, "num_negatives": 2, "index": index, **QUIET}
    write = mining.write_in_parts
    monkeypatch.setattr(mining, "write_in_parts", lambda *args, **kwargs: write(*args, part_size=4, **kwargs))
    whole = mine(files.pairs, tmp_path / "whole.jsonl", **settings)
    choose, calls = NegativeFilter.choose, []

    def dies(self, query, *rest):
        calls.append(query)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return choose(self, query, *rest)

    monkeypatch.setattr(NegativeFilter, "choose", dies)
    with pytest.raises(KeyboardInterrupt):
        mine(files.pairs, files.out, **settings)
    assert not files.out.exists()
    with pytest.raises(ValueError, match=r"another call \(num_negatives was 2, is 3\)"):
        mine(files.pairs, files.out, **settings | {"num_negatives": 3})
    # The index is not built again: the documents are not encoded.
    monkeypatch.setattr(model, "encode_document", None)
    mine(files.pairs, files.out, **settings)
    assert calls[6] == calls[4]  # from the second part on
    assert rows_of(files.out) == rows_of(whole.file)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"pairs.jsonl", "corpus.jsonl", "whole.jsonl", "out.jsonl"} | ({"index"} if index else set())


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Give one way to search"),
        ({"bm25": True, "sparse": "model"}, "Give one way to search"),
        ({"bm25": True, "cross_encoder": "model"}, "give absolute_margin, relative_margin, max_score or min_score"),
        ({"bm25": True, "num_negatives": 50}, "No query has 50 negatives left"),
        ({"bm25": True, "index": "index"}, "index in index is that of a sparse model: give the model"),
        ({"bm25": True, "corpus": "nowhere.jsonl"}, r"nowhere\.jsonl: cannot be read"),
        ({"bm25": True, "margin": 2}, "margin"),
    ],
)
def test_impossible_calls_are_refused_and_leave_nothing(files, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mine(files.pairs, files.out, **settings, **QUIET)
    assert sorted(path.name for path in files.out.parent.iterdir()) == ["corpus.jsonl", "pairs.jsonl"]


def test_a_corpus_without_texts_is_named(files):
    write_jsonl(files.corpus, [{"_id": "1", "text": "fine"}, {"_id": "2", "body": "not"}])
    with pytest.raises(DataError, match=r"corpus\.jsonl: line 2: 'text' must be text, but the row's columns are"):
        mine(files.pairs, files.out, bm25=True, corpus=files.corpus, **QUIET)


def test_a_text_that_no_file_can_hold_is_placed(files):
    files.corpus.write_text('{"text": "fine"}\n{"title": "river \\ud800", "text": "fox"}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl: line 2: 'text' holds '\\ud800' .* half a surrogate pair"):
        mine(files.pairs, files.out, bm25=True, corpus=files.corpus, **QUIET)


def test_a_cross_encoder_that_gives_nan_is_an_error(files, checkpoint):
    judge = CrossEncoder(str(checkpoint("bert")), num_labels=1, device="cpu")
    torch.nn.init.constant_(judge.model.classifier.bias, float("nan"))
    with pytest.raises(ValueError, match=r"cross-encoder's score of 'The quick .* is nan: look for NaN in its weights"):
        mine(files.pairs, files.out, bm25=True, cross_encoder=judge, num_negatives=1, max_score=1.0, **QUIET)


def test_an_output_that_is_there_is_refused_before_any_work(files, dense):
    files.out.write_text("")
    with pytest.raises(FileExistsError, match="is there already"):
        mine("nowhere.jsonl", files.out, dense=dense)


def test_a_model_that_compares_by_cosine_is_refused(files, model, monkeypatch):
    monkeypatch.setattr(type(model), "similarity_fn_name", "cosine")
    with pytest.raises(ValueError, match="the model's similarity is 'cosine': set"):
        mine(files.pairs, files.out, sparse=model, **QUIET)


# --- the command ---


def test_the_command_mines_by_a_saved_model(files, model, tmp_path):
    model.save_pretrained(str(tmp_path / "model"))
    shutil.move(files.pairs, tmp_path / "pairs.csv")
    quoted = (",".join(map(json.dumps, row.values())) for row in PAIRS)
    (tmp_path / "pairs.csv").write_text("\n".join(["question,positive", *quoted]), encoding="utf-8")
    options = ["--train", str(tmp_path / "pairs.csv"), "--output", str(files.out), "--corpus", str(files.corpus)]
    options += ["--sparse", str(tmp_path / "model"), "--num-negatives", "2", "--column", "query=question"]
    result = CliRunner().invoke(app, ["mine", *options])
    assert result.exit_code == 0, result.output
    assert f"{len(PAIRS)} rows in" in result.output.replace("\n", " ")
    expected = mine(files.pairs.with_suffix(".csv"), tmp_path / "again.jsonl", sparse=model, corpus=files.corpus,
                    num_negatives=2, columns={"query": "question"}, **QUIET)  # fmt: skip
    assert rows_of(files.out) == rows_of(expected.file)


def test_an_error_is_one_message(files):
    result = CliRunner().invoke(app, ["mine", "--train", str(files.pairs), "--output", str(files.out)])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: Give one way to search")
