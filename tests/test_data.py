"""Training data: every way to write it, and every way to get it wrong."""

from __future__ import annotations

import csv
import doctest
import json
import math

import pytest
import torch
from datasets import Dataset

from st_sparse_rescale.training import data
from st_sparse_rescale.training.data import DataError, load_training_data, teacher_scale_warning

PAIRS = [{"query": "red", "positive": "a rose"}, {"query": "blue", "positive": "the sea"}]
NEGATIVES = [{**pair, "negative_1": "grass", "negative_2": "snow"} for pair in PAIRS]


def write_jsonl(path, rows):
    path.write_bytes(b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"\n")
    return path


def write_csv(path, rows, delimiter=","):
    with open(path, "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path, rows):
    Dataset.from_list(rows).to_parquet(path)
    return path


WRITERS = {
    "data.jsonl": write_jsonl,
    "data.json": write_jsonl,
    "data.csv": write_csv,
    "data.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "data.parquet": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("rows", [PAIRS, NEGATIVES], ids=["pairs", "negatives"])
def test_every_file_type_gives_the_same_dataset(tmp_path, name, rows):
    dataset = load_training_data(WRITERS[name](tmp_path / name, rows))
    assert dataset.to_list() == rows == load_training_data(Dataset.from_list(rows)).to_list()
    assert dataset.column_names == list(rows[0])


@pytest.mark.parametrize("name", WRITERS)
def test_separators_and_line_ends_inside_a_text_do_not_cut_it(tmp_path, name):
    rows = [{"query": "what\u2028is\x0b\x85this", "positive": 'a "quoted",\ntwo-line\ttext'}]
    assert load_training_data(WRITERS[name](tmp_path / name, rows)).to_list() == rows


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"query": "q", "positive": "p"}\r\n\r\n')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfquery,positive\r\nq,p\r\n")
    assert load_training_data(tmp_path / "a.jsonl").to_list() == [{"query": "q", "positive": "p"}]
    assert load_training_data(tmp_path / "a.csv").to_list() == [{"query": "q", "positive": "p"}]


def test_more_rows_than_a_chunk_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CHUNK_ROWS", 3)
    rows = [{"query": f"q{i}", "positive": f"p{i}"} for i in range(8)]
    assert load_training_data(write_jsonl(tmp_path / "a.jsonl", rows)).to_list() == rows


def test_columns_are_found_by_role_whatever_their_order_and_others_ignored():
    row = {"id": 7, "negative_2": "n2", "negative_10": "n10", "positive": "p", "negative": "n0", "anchor": "q"}
    dataset = load_training_data(Dataset.from_list([row]))
    assert dataset.to_list() == [
        {"query": "q", "positive": "p", "negative_1": "n0", "negative_2": "n2", "negative_3": "n10"}
    ]
    assert dataset.column_names[:2] == ["query", "positive"]


def test_columns_can_be_named():
    row = {"query": "not this", "question": "q", "answer": "p", "bad": "n", "margin": 1.5, "score": 3}
    columns = {"query": "question", "positive": "answer", "negative": "bad", "label": "margin"}
    dataset = load_training_data(Dataset.from_list([row]), columns=columns, teacher_scores="margins")
    assert dataset.to_list() == [{"query": "q", "positive": "p", "negative": "n", "label": 1.5}]


def test_lists_of_negatives_become_columns_and_can_be_cut():
    rows = Dataset.from_list(
        [{"query": "q", "positive": "p", "negatives": ["a", "b", "c"], "score": [4.0, 3.0, 2.0, 1.0]}]
    )
    assert load_training_data(rows).column_names == ["query", "positive", "negative_1", "negative_2", "negative_3"]
    cut = load_training_data(rows, num_negatives=2, teacher_scores="scores", teacher_scale=0.5)
    assert cut.to_list() == [
        {"query": "q", "positive": "p", "negative_1": "a", "negative_2": "b", "label": [2.0, 1.5, 1.0]}
    ]
    assert load_training_data(rows, num_negatives=0).column_names == ["query", "positive"]


@pytest.mark.parametrize("name", WRITERS)
def test_teacher_scores_of_every_file_type(tmp_path, name):
    lists = name.endswith((".csv", ".tsv"))  # where a list is written as JSON
    margins = [{**PAIRS[0], "negative": "grass", "label": 2.5}]
    scores = [{**NEGATIVES[0], "scores": "[3, 2.5, 1]" if lists else [3, 2.5, 1]}]
    loaded = load_training_data(WRITERS[name](tmp_path / name, margins), teacher_scores="margins")
    assert loaded["label"][0] == 2.5
    loaded = load_training_data(WRITERS[name](tmp_path / name, scores), teacher_scores="scores")
    assert loaded["label"][0] == [3.0, 2.5, 1.0]


def test_labels_are_left_out_where_no_loss_reads_them():
    assert "label" not in load_training_data(Dataset.from_list([{**PAIRS[0], "label": math.nan}])).column_names


# --- errors ---


def broken(tmp_path, name, content, **kwargs):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        WRITERS[name](path, content)
    with pytest.raises(DataError) as caught:
        load_training_data(path, **kwargs)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_missing_or_unreadable_file(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl: cannot be read \(No such file"):
        load_training_data(tmp_path / "nothing.jsonl")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match=r"folder\.csv: cannot be read"):
        load_training_data(tmp_path / "folder.csv")
    (tmp_path / "notes.txt").write_text("q p")
    with pytest.raises(DataError, match=r"must be one of \.jsonl"):
        load_training_data(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"nobody/nothing: neither an existing file .* nor a dataset"):
        load_training_data("nobody/nothing")
    assert "not a readable Parquet file" in broken(tmp_path, "data.parquet", b"query,positive\n")
    assert "utf-8" in broken(tmp_path, "data.csv", "query,positive\ncaf\xe9,x\n".encode("latin-1"))


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.tsv"])
def test_an_empty_file(tmp_path, name):
    assert "no rows" in broken(tmp_path, name, b"")
    assert "no rows" in broken(tmp_path, name, b"\n" if name == "data.jsonl" else b"query,positive\n")


def test_a_missing_column_names_those_found(tmp_path):
    message = broken(tmp_path, "data.jsonl", [{"question": "q", "positive": "p"}])
    assert "no column 'query'" in message
    assert "['question', 'positive']" in message
    assert "columns: {query:" in message
    assert "no column 'positive'" in broken(tmp_path, "data.csv", [{"query": "q", "answer": "p"}])
    assert "no column 'nope'" in broken(tmp_path, "data.csv", PAIRS, columns={"query": "nope"})
    assert "role 'positve'" in broken(tmp_path, "data.csv", PAIRS, columns={"positve": "positive"})


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "null"), ("", "blank"), (" \u2028\t", "blank"), (5, "int 5"), (["p"], "list"), (math.nan, "float nan")],
)
@pytest.mark.parametrize("column", ["query", "positive"])
def test_a_row_without_text_is_named(tmp_path, column, value, reason):
    rows = [PAIRS[0], {**PAIRS[1], column: value}]
    message = broken(tmp_path, "data.jsonl", rows)
    assert f"line 2: '{column}'" in message
    assert reason in message


def test_a_row_that_lacks_the_key_or_the_field_is_named(tmp_path):
    assert "line 2: 'positive' must be text, but is null" in broken(tmp_path, "data.jsonl", [PAIRS[0], {"query": "q"}])
    assert "line 3: 'positive' must be text, but is null" in broken(tmp_path, "data.csv", b"query,positive\na,b\nc\n")
    assert "line 2 has more fields" in broken(tmp_path, "data.csv", b"query,positive\na,b,c\n")
    assert "row 2: 'positive'" in broken(tmp_path, "data.parquet", [PAIRS[0], {"query": "q", "positive": None}])
    assert "line 2: 'negative_2'" in broken(tmp_path, "data.jsonl", [NEGATIVES[0], {**NEGATIVES[1], "negative_2": ""}])


@pytest.mark.parametrize(("name", "separator"), [("data.csv", ","), ("data.tsv", "\t")])
def test_a_header_that_names_a_column_twice_is_refused(tmp_path, name, separator):
    content = "query,positive,positive\nq,p,other\n".replace(",", separator).encode()
    assert "line 1 names the columns ['positive'] more than once" in broken(tmp_path, name, content)


def test_a_line_that_is_no_object_is_named(tmp_path):
    assert "line 2: not valid JSON" in broken(
        tmp_path, "data.jsonl", b'{"query": "q", "positive": "p"}\n{"query": "q"\n'
    )
    assert "line 1: found list" in broken(tmp_path, "data.jsonl", b'["q", "p"]\n')


def test_ragged_negatives(tmp_path):
    rows = [{**PAIRS[0], "negatives": ["a", "b"]}, {**PAIRS[1], "negatives": ["a"]}]
    message = broken(tmp_path, "data.jsonl", rows)
    assert "line 2 has 1 negatives, the first row 2" in message
    assert "num_negatives" in message
    assert "fewer than num_negatives=2" in broken(tmp_path, "data.jsonl", rows, num_negatives=2)


def test_negatives_that_the_first_row_has_not_are_refused(tmp_path):
    rows = [PAIRS[0], {**PAIRS[1], "negative": "n"}]
    assert "line 2 has the negatives ['negative'], which the first row has not" in broken(tmp_path, "data.jsonl", rows)


def test_a_list_of_negatives_in_a_text_file_is_a_list(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text('query,positive,negatives\na,b,"[""x"",""y""]"\n', encoding="utf-8")
    assert load_training_data(file)[0] == {"query": "a", "positive": "b", "negative_1": "x", "negative_2": "y"}
    file.write_text('query,positive,negative\na,b,"[sic] and so on"\n', encoding="utf-8")
    assert load_training_data(file)[0]["negative"] == "[sic] and so on"


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (math.nan, "holds nan"),
        (math.inf, "holds inf"),
        (None, "holds None"),
        ("high", "holds 'high'"),
        (True, "holds True"),
        ([1.0, -math.inf, 0.0], "holds -inf"),
        ([1.0], "1 teacher scores for 2 negatives: it needs 2 margins"),
        ([1.0, 2.0, 3.0, 4.0], "4 teacher scores for 2 negatives"),
    ],
)
def test_scores_that_cannot_be_learnt(tmp_path, label, reason):
    rows = [{**NEGATIVES[0], "label": [1.0, 2.0]}, {**NEGATIVES[1], "label": label}]
    message = broken(tmp_path, "data.jsonl", rows, teacher_scores="margins")
    assert "line 2" in message
    assert reason in message


def test_distillation_needs_scores_and_negatives(tmp_path):
    message = broken(tmp_path, "data.jsonl", NEGATIVES, teacher_scores="margins")
    assert "no column of teacher scores" in message
    assert "`st-sparse-rescale score`" in message
    message = broken(tmp_path, "data.jsonl", [{**PAIRS[0], "label": 1}], teacher_scores="margins")
    assert "no negative column" in message
    assert "`st-sparse-rescale mine`" in message
    both = [{**NEGATIVES[0], "label": [1, 2], "score": [1, 2]}]
    assert "['label', 'score']: keep one" in broken(tmp_path, "data.jsonl", both, teacher_scores="margins")
    margins = [{**NEGATIVES[0], "label": [1, 2]}]
    assert "it needs 3 scores" in broken(tmp_path, "data.jsonl", margins, teacher_scores="scores")


def test_docstring_examples_run():
    result = doctest.testmod(data)
    assert result.attempted > 0
    assert result.failed == 0


# --- the teacher's unit ---


class Student:
    """Scores 3 for the positive and 1 for the negative, whatever the texts."""

    def encode_query(self, texts, **_):
        return torch.ones(len(texts), 1)

    def encode_document(self, texts, **_):
        return torch.tensor([[3.0 if text == "good" else 1.0] for text in texts])

    def similarity_pairwise(self, queries, documents):
        return (queries * documents).sum(dim=1)


def teacher(label):
    kind = "scores" if isinstance(label, list) else "margins"
    row = Dataset.from_list([{"query": "q", "positive": "good", "negative": "bad", "label": label}] * 4)
    return load_training_data(row, teacher_scores=kind)


@pytest.mark.parametrize("label", [2.0, 190.0, 0.03, [5.0, 2.0], [-10.0, -12.0]])
def test_teacher_and_student_in_one_unit_are_left_alone(label):
    assert teacher_scale_warning(Student(), teacher(label)) is None


def test_a_teacher_in_another_unit_is_warned_about_with_the_scale_that_mends_it():
    too_large = teacher_scale_warning(Student(), teacher(4000.0))
    assert "average 4e+03 and the untrained student's 2" in too_large
    assert "teacher_scale by about 0.0005" in too_large
    too_small = teacher_scale_warning(Student(), teacher([0.9, 0.899]))
    assert "average 0.001" in too_small
    assert "teacher_scale by about 2e+03, or raise k" in too_small
