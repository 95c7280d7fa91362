"""The corpus of installed docstrings: what it holds, how it splits and what it writes."""

import json

import pytest

from st_sparse_rescale.demo import corpus as demo_corpus
from st_sparse_rescale.demo.corpus import (
    DocstringPair,
    as_pair,
    dependency_closure,
    docstring_corpus,
    docstrings,
    split_of,
    write_corpus,
)

SOURCE = '''"""The module in one line."""

class Shelf:
    """Hold things in order of arrival.

    A shelf has room for as many things as fit, and gives them back
    in the order in which they came.
    """

    def put(self, thing):
        """Put a thing on it."""

        def check():
            """Check the thing, inside."""

def no_docstring():
    pass
'''
BODY = "A shelf has room for as many things as fit, and gives them back in the order in which they came."


def test_every_docstring_is_found_with_its_place():
    found = dict(docstrings("pkg.shelf", SOURCE))
    assert found["pkg.shelf:"] == "The module in one line."
    assert found["pkg.shelf:Shelf.put"] == "Put a thing on it."
    assert found["pkg.shelf:Shelf.put.check"] == "Check the thing, inside."
    assert len(found) == 4


def test_a_source_that_does_not_parse_yields_nothing():
    assert list(docstrings("pkg.template", "def {{ name }}(): pass")) == []


def test_the_summary_is_the_query_and_the_rest_the_document():
    text = dict(docstrings("pkg.shelf", SOURCE))["pkg.shelf:Shelf"]
    pair = as_pair("pkg.shelf:Shelf", text)
    assert pair == DocstringPair("pkg.shelf:Shelf", "Hold things in order of arrival.", BODY)
    assert pair.module == "pkg.shelf"


@pytest.mark.parametrize(
    "text", ["Put it.\n\n" + BODY, "Hold things in order of arrival.", "Hold things in order of arrival.\n\nToo short."]
)
def test_summaries_and_bodies_without_use_are_left_out(text):
    assert as_pair("m:f", text) is None


def test_the_closure_holds_dependencies_but_not_itself():
    names = dependency_closure("st-sparse-rescale")
    assert {"sentence-transformers", "torch", "transformers", "numpy"} <= set(names)
    assert "st-sparse-rescale" not in names
    assert "ruff" not in names  # behind the extra "dev", which does not count
    assert names == sorted(names)


def test_shares_of_the_splits():
    splits = [split_of(f"package.module_{i}") for i in range(4000)]
    assert 0.13 < splits.count("test") / 4000 < 0.17
    assert 0.03 < splits.count("dev") / 4000 < 0.07


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A pretended distribution: modules m0..m59 with one docstring each, the last twenty copies of the first."""
    texts = []
    for i in range(60):
        words = " ".join(f"word{(i % 40) * 31 + j}" for j in range(30))
        texts.append((f"m{i}:f", f"Summary of the function number {i}.\n\n{words} {'tail' * (i >= 40)}"))
    monkeypatch.setattr(demo_corpus, "all_docstrings", lambda distribution, progress=None: iter(texts))
    return texts


def test_splits_are_disjoint_by_module_and_free_of_copies(library):
    corpus = docstring_corpus("pretended")
    sides = [corpus.train, corpus.dev, corpus.test]
    assert all(
        split_of(p.module) == name for name, side in zip(("train", "dev", "test"), sides, strict=True) for p in side
    )
    for i, side in enumerate(sides):
        earlier = {w for before in sides[:i] for p in before for w in p.document.split()[:30]}
        assert not any(set(p.document.split()[:30]) <= earlier for p in side)
    # m40..m59 repeat m0..m19 but for one word: within a split they may stay, across splits they must not.
    kept = {p.module for side in sides for p in side}
    crossing = [i for i in range(40, 60) if split_of(f"m{i}") != split_of(f"m{i - 40}")]
    assert crossing
    assert not any({f"m{i}", f"m{i - 40}"} <= kept for i in crossing)


def test_no_docstrings_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(demo_corpus, "all_docstrings", lambda distribution, progress=None: iter([]))
    with pytest.raises(ValueError, match="Install the package with pip"):
        docstring_corpus("pretended")


def test_written_corpus_is_complete_and_replaces_the_old_one(library, tmp_path):
    corpus = docstring_corpus("pretended")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "stale").touch()
    write_corpus(corpus, folder, num_queries=2)
    assert sorted(p.name for p in folder.iterdir()) == ["dev", "test", "train.jsonl"]
    train = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert train == [{"query": p.query, "positive": p.document} for p in corpus.train]
    documents = {json.loads(line)["_id"] for line in (folder / "test" / "corpus.jsonl").read_text().splitlines()}
    queries = {json.loads(line)["_id"] for line in (folder / "test" / "queries.jsonl").read_text().splitlines()}
    header, *judgements = (folder / "test" / "qrels" / "test.tsv").read_text().splitlines()
    assert header == "query-id\tcorpus-id\tscore"
    assert len(queries) == len(judgements) == 2
    for line in judgements:
        query, document, score = line.split("\t")
        assert query in queries
        assert document in documents
        assert score == "1"
    assert documents == {p.id for p in corpus.test}
