"""Effectiveness against efficiency, and BM25, in the metrics of sentence-transformers' evaluator."""

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

from st_sparse_rescale.evaluation.bm25 import bm25_run
from st_sparse_rescale.evaluation.csr import as_csr
from st_sparse_rescale.evaluation.retrieval import Activity
from st_sparse_rescale.evaluation.sparse_index import SparseIndex
from st_sparse_rescale.evaluation.tradeoff import trace_tradeoff
from tests.tiny_models import TEXTS


@pytest.fixture(scope="module")
def model(checkpoint):
    return SparseEncoder(str(checkpoint("bert")))


@pytest.fixture
def evaluator():
    corpus = {f"d{i}": text for i, text in enumerate(TEXTS)}
    queries = {f"q{i}": " ".join(TEXTS[i].split()[3:7]) for i in range(6)}
    relevant = {f"q{i}": {f"d{i}"} for i in range(6)}
    return SparseInformationRetrievalEvaluator(queries, corpus, relevant, show_progress_bar=False)


def test_the_trace_equals_the_evaluator_of_sentence_transformers(model, evaluator):
    limits = [4, 16, None]
    curve = trace_tradeoff(model, evaluator, limits)
    for limit, point in zip(limits, curve, strict=True):
        evaluator.max_active_dims = limit
        stock = evaluator(model)
        for name in ("ndcg@10", "mrr@10", "map@100"):
            assert point[name] == pytest.approx(stock[f"dot_{name}"], abs=1e-9)
        for name in ("query_active_dims", "corpus_active_dims"):
            assert point[name] == pytest.approx(stock[name], rel=1e-6)
        assert point["flops"] == pytest.approx(stock["avg_flops"], rel=1e-5)


def test_a_limit_that_is_not_positive_is_refused(model, evaluator):
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        trace_tradeoff(model, evaluator, [0])


def mean_flops(queries, documents):
    asked, found = (Activity(side.shape[1], as_csr(side)) for side in (queries, documents))
    return asked.shares @ found.shares


def test_flops_is_the_sum_over_terms_of_the_two_shares():
    queries = torch.tensor([[1.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    documents = torch.tensor([[0.5, 1.0, 0.0], [0.1, 0.0, 3.0], [0.0, 1.0, 0.0], [0.2, 0.0, 0.0]])
    assert mean_flops(queries, documents) == 1.0 * 0.75 + 0.0 * 0.5 + 0.5 * 0.25
    assert mean_flops(queries.to_sparse(), documents.to_sparse()) == mean_flops(queries, documents)


def test_equal_scores_are_ranked_by_id():
    index = SparseIndex.from_embeddings(torch.tensor([[1.0], [2.0], [1.0], [2.0]]), ["d", "c", "a", "b"])
    (hits,) = index.search(torch.tensor([[1.0]]), top_k=3)
    assert [id for id, _ in hits] == ["b", "c", "a"]
    assert [score for _, score in hits] == [2.0, 2.0, 1.0]


def test_bm25_ranks_by_rare_terms_and_stems():
    corpus = {"a": "the cats sit on the mat", "b": "a dog sits on the mat", "c": "birds fly"}
    run = bm25_run(corpus, {"q1": "cat", "q2": "flying bird"}, top_k=10)
    assert [hits[0][0] for hits in run.values()] == ["a", "c"]
    assert len(run["q1"]) == 3  # top_k beyond the corpus gives the whole corpus
    assert bm25_run({"b": "of the", "a": ""}, {"q": "the cat"}, top_k=2) == {"q": [("a", 0.0), ("b", 0.0)]}
    with pytest.raises(ValueError, match="at least one document"):
        bm25_run({}, {"q": "cat"}, top_k=1)
