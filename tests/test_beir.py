"""Loading a BEIR folder, and what the evaluator reports on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from st_sparse_rescale.evaluation.beir import load_evaluator
from tests.tiny_models import TEXTS


def write(folder: Path, queries=None, corpus=None, qrels="q1\td2\t1\nq1\td3\t0\n", split="test") -> Path:
    queries = queries or [{"_id": "q1", "text": "which\u2028river"}, {"_id": "q2", "text": "unjudged"}]
    corpus = corpus or [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("queries", queries), ("corpus", corpus)):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    return folder


def test_a_folder_becomes_an_evaluator_of_its_judged_queries(tmp_path):
    corpus = [{"_id": "d2", "title": "Seine", "text": "a river"}, {"_id": "d3", "text": "no title"}]
    evaluator = load_evaluator(write(tmp_path / "toy", corpus=corpus))
    assert dict(zip(evaluator.corpus_ids, evaluator.corpus, strict=True)) == {"d2": "Seine a river", "d3": "no title"}
    assert dict(zip(evaluator.queries_ids, evaluator.queries, strict=True)) == {"q1": "which\u2028river"}
    assert evaluator.relevant_docs == {"q1": {"d2"}}
    assert evaluator.name == "toy-test"


def test_dev_judgements_come_before_test_and_a_split_can_be_named(tmp_path):
    write(tmp_path, split="test")
    write(tmp_path, split="dev", qrels="q2\td1\t1\n")
    assert load_evaluator(tmp_path).queries_ids == ["q2"]
    assert load_evaluator(tmp_path, split="test").queries_ids == ["q1"]


def test_reported_dimensions_and_flops_are_those_of_the_vectors(tmp_path, checkpoint):
    queries = [{"_id": f"q{i}", "text": text.upper()} for i, text in enumerate(TEXTS[:3])]
    qrels = "".join(f"q{i}\td{i}\t1\n" for i in range(3))
    evaluator = load_evaluator(write(tmp_path / "toy", queries=queries, qrels=qrels))
    transformer = Transformer(str(checkpoint("bert")), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling()])
    metrics = evaluator(model)
    query_use = (model.encode(evaluator.queries).to_dense() != 0).float()
    document_use = (model.encode(evaluator.corpus).to_dense() != 0).float()
    assert 0 < query_use.mean() < 1, "a model whose vectors are neither empty nor full"
    # The multiplications per query-document pair, by counting them.
    pairs = torch.stack([(query * document).sum() for query in query_use for document in document_use])
    assert metrics["toy-test_avg_flops"] == pytest.approx(pairs.mean().item(), rel=1e-5)
    assert metrics["toy-test_query_active_dims"] == pytest.approx(query_use.sum(dim=1).mean().item())
    assert metrics["toy-test_corpus_active_dims"] == pytest.approx(document_use.sum(dim=1).mean().item())
    assert {"toy-test_dot_ndcg@10", "toy-test_dot_mrr@10", "toy-test_dot_recall@100"} <= metrics.keys()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"qrels": "q1\td99\t1\n"}, "test.tsv, line 2: judges document 'd99', which the collection does not hold"),
        ({"qrels": "q9\td1\t1\n"}, "test.tsv, line 2: judges query 'q9'"),
        ({"qrels": "q1\td1\t0\n"}, "no document is judged relevant"),
        ({"qrels": "q1 d1 1\n"}, "test.tsv, line 2: must be query id, document id, score"),
        ({"qrels": "q1\td1\thigh\n"}, "test.tsv, line 2: must be"),
        ({"queries": [{"id": "q1", "text": "x"}]}, "queries.jsonl, line 1: needs the texts _id and text"),
        ({"split": "train"}, r"no dev.tsv or test.tsv; its splits are \['train'\]"),
    ],
)
def test_broken_folders_name_the_place(tmp_path, change, reason):
    with pytest.raises(ValueError, match=reason):
        load_evaluator(write(tmp_path, **change))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is neither a folder in BEIR's layout nor nanobeir"):
        load_evaluator("nowhere")
    (write(tmp_path) / "corpus.jsonl").unlink()
    with pytest.raises(ValueError, match=r"corpus.jsonl: cannot be read \(No such file"):
        load_evaluator(tmp_path)
