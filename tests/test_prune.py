"""Pruning and the combination of chunks: by hand, and against loops over dense rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from st_sparse_rescale.evaluation.csr import as_csr
from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.serving import Batch, combine_chunks, prune
from tests.tiny_models import TEXTS

ROW = [[4.0, 0.0, 1.0, 3.0, 2.0]]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, [4, 0, 1, 3, 2]),
        ({"top_k": 2}, [4, 0, 0, 3, 0]),
        ({"threshold": 2.0}, [4, 0, 0, 3, 2]),  # "at least"
        ({"threshold": 9.0}, [0, 0, 0, 0, 0]),
        ({"mass": 0.4}, [4, 0, 0, 0, 0]),  # 4 of 10 is enough
        ({"mass": 0.41}, [4, 0, 0, 3, 0]),
        ({"mass": 0.7}, [4, 0, 0, 3, 0]),
        ({"mass": 1.0}, [4, 0, 1, 3, 2]),
        ({"mass": 0.9, "top_k": 2}, [4, 0, 0, 3, 0]),
        ({"mass": 0.9, "threshold": 2.5}, [4, 0, 0, 3, 0]),
        ({"top_k": 3, "threshold": 3.5}, [4, 0, 0, 0, 0]),
    ],
)
def test_the_lightest_terms_go(limits, expected):
    assert prune(as_csr(np.array(ROW)), **limits).toarray().tolist() == [expected]


def test_of_equal_weights_the_lowest_terms_stay_and_empty_rows_stay_empty():
    matrix = as_csr(np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 5.0]]))
    pruned = [[1, 1, 0, 0], [0, 0, 0, 0], [0, 5, 0, 0]]
    assert prune(matrix, mass=0.5).toarray().tolist() == pruned
    assert prune(matrix, mass=0.5, top_k=1).toarray().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 5, 0, 0]]
    assert matrix.nnz == 6  # untouched


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 1.0])
def test_share_of_mass_equals_a_loop_over_sorted_rows(mass):
    rng = np.random.default_rng(0)
    dense = (rng.random((60, 40)) * (rng.random((60, 40)) < 0.4)).astype(np.float32)
    expected = np.zeros_like(dense)
    for row, wanted in zip(dense, expected, strict=True):
        total = 0.0
        for term in np.argsort(-row, kind="stable"):
            if total >= mass * row.sum(dtype=np.float64) - 1e-9 or not row[term]:
                break
            wanted[term] = row[term]
            total += float(row[term])
    pruned = prune(as_csr(dense), mass=mass)
    assert np.array_equal(pruned.toarray(), expected)
    assert all(np.all(np.diff(pruned[i].indices) > 0) for i in range(60))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"top_k": 0}, "positive integer, got 0"),
        ({"threshold": -0.1}, "0 or more, got -0.1"),
        ({"threshold": float("nan")}, "0 or more, got nan"),
        ({"mass": 0.0}, "above 0 and at most 1, got 0.0"),
        ({"mass": 1.1}, "above 0 and at most 1, got 1.1"),
    ],
)
def test_limits_out_of_range_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        prune(as_csr(np.array(ROW)), **limits)


def test_the_script_measures_what_pruning_costs(checkpoint, tmp_path):
    folder = tmp_path / "tiny"
    (folder / "qrels").mkdir(parents=True)
    write_jsonl(folder / "corpus.jsonl", ({"_id": f"d{n}", "text": text} for n, text in enumerate(TEXTS)))
    write_jsonl(folder / "queries.jsonl", ({"_id": f"q{n}", "text": text[:30]} for n, text in enumerate(TEXTS)))
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{n}\td{n}\t1\n" for n in range(len(TEXTS))))
    script = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "measure_pruning.py"))
    rows = script["pruned_results"](str(checkpoint("bert")), folder, tmp_path / "work")
    assert [rows[0][name] for name in ("collection", "documents", "queries", "change", "overlap")] == [
        "tiny", 16, 16, 0.0, 1.0
    ]  # fmt: skip
    by_limit = {row["top_k"]: row for row in rows if "top_k" in row}
    assert by_limit[16]["terms"] == 16
    assert by_limit[16]["change"] == by_limit[16]["ndcg@10"] - rows[0]["ndcg@10"]
    assert by_limit[16]["overlap"] <= by_limit[128]["overlap"]
    table = script["as_markdown"](rows).splitlines()
    assert table[0] == "## tiny: 16 documents, 16 queries"
    assert len([line for line in table if line.startswith("| ")]) == 1 + len(rows)


# Chunks


def combined(batches, **settings):
    parts = list(combine_chunks(batches, **settings))
    return {
        id: row.toarray().ravel().tolist() for part in parts for id, row in zip(part.ids, part.vectors, strict=True)
    }


def test_chunks_are_combined_by_the_maximum_of_each_term():
    batch = Batch(
        ["a#0", "a#1", "b", "c#0"],
        as_csr(np.array([[1.0, 0.0, 2.0], [3.0, 4.0, 1.0], [5.0, 0.0, 0.0], [0.0, 0.0, 6.0]])),
    )
    assert combined([batch]) == {"a": [3, 4, 2], "b": [5, 0, 0], "c": [0, 0, 6]}


def test_only_a_number_behind_the_last_separator_is_cut_off():
    ids = ["C#", "F#sharp", "http://x/#0#12", "doc_7", "#0"]
    batch = Batch(ids, as_csr(np.eye(5, dtype=np.float32)))
    assert list(combined([batch])) == ["C#", "F#sharp", "http://x/#0", "doc_7", "#0"]
    assert list(combined([batch], separator="_")) == ["C#", "F#sharp", "http://x/#0#12", "doc", "#0"]


def test_a_document_may_reach_over_batches_and_parents_come_before_ids():
    rng = np.random.default_rng(1)
    dense = (rng.random((50, 20)) * (rng.random((50, 20)) < 0.3)).astype(np.float32)
    dense[10] = 0  # an empty chunk
    parents = [f"d{number}" for number in np.sort(rng.integers(0, 12, 50))]
    ids = [f"x#{row}" for row in range(50)]
    expected = {
        parent: dense[[row for row in range(50) if parents[row] == parent]].max(axis=0).tolist() for parent in parents
    }
    for size in (1, 3, 7, 50):
        cuts = range(0, 50, size)
        batches = [Batch(ids[c : c + size], as_csr(dense[c : c + size]), parents[c : c + size]) for c in cuts]
        assert combined(batches) == expected
    assert combined([Batch(["a#0"], as_csr(np.zeros((1, 3))))]) == {"a": [0, 0, 0]}
