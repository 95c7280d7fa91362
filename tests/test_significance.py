"""Comparisons: the randomisation test, and the fusion of rankings."""

import json
import sys

import numpy as np
import pytest
from scipy import stats
from sentence_transformers import SentenceTransformer
from sentence_transformers.sparse_encoder.evaluation import ReciprocalRankFusionEvaluator

from st_sparse_rescale.evaluation.hybrid import dense_run, reciprocal_rank_fusion
from st_sparse_rescale.evaluation.metrics import mean, measure
from st_sparse_rescale.evaluation.significance import compare
from tests.tiny_models import TEXTS


def scores(values):
    return {f"q{i}": float(value) for i, value in enumerate(values)}


def test_by_hand():
    # Differences 0.5, 0.4, -0.1: of the eight patterns of signs, those with |sum| >= 0.8 are +++, ++-, and opposites.
    result = compare(scores([0.9, 0.5, 0.1]), scores([0.4, 0.1, 0.2]))
    assert result.p_value == pytest.approx(4 / 8)
    assert result.difference == pytest.approx(0.8 / 3)
    assert (result.wins, result.losses, result.ties, result.exact) == (2, 1, 0, True)


def test_exact_p_equals_scipys_permutation_test():
    rng = np.random.default_rng(0)
    for count in (2, 5, 9, 12):
        a, b = rng.integers(0, 5, (2, count)) / 4  # with ties, as ranking metrics have them
        expected = stats.permutation_test(
            (a, b), lambda x, y: abs(np.mean(x - y)), permutation_type="samples", n_resamples=np.inf,
            alternative="greater",
        )  # fmt: skip
        assert compare(scores(a), scores(b)).p_value == pytest.approx(expected.pvalue)


def test_a_drawn_p_is_reproducible_and_near_that_of_the_t_test():
    rng = np.random.default_rng(1)
    a = rng.normal(0.5, 0.2, 200)
    b = a - rng.normal(0.02, 0.15, 200)
    first = compare(scores(a), scores(b), permutations=20_000)
    assert first == compare(scores(a), scores(b), permutations=20_000)
    assert first.p_value == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.01)
    assert not first.exact
    assert (first.seed, first.permutations) == (0, 20_000)
    assert compare(scores(a), scores(b), permutations=20_000, seed=1).p_value != first.p_value
    assert compare(scores(b), scores(a), permutations=20_000).p_value == pytest.approx(first.p_value, abs=0.01)


def test_equal_systems_and_certain_differences():
    same = scores(np.linspace(0, 1, 30))
    assert compare(same, same).p_value == 1.0
    assert compare(same, same).ties == 30
    better = {query: value + 0.1 for query, value in same.items()}
    assert compare(better, same, permutations=999).p_value == 1 / 1000  # never 0


def test_different_queries_are_refused():
    for a, b in (({"q1": 1.0}, {"q2": 1.0}), ({}, {})):
        with pytest.raises(ValueError, match="scored on the same queries"):
            compare(a, b)


# Fusion


def test_fusion_by_hand():
    fused = reciprocal_rank_fusion([{"q": [("a", 9.0), ("b", 8.0)]}, {"q": [("b", 0.7), ("c", 0.6)]}])
    assert fused == {"q": [("b", 1 / 62 + 1 / 61), ("a", 1 / 61), ("c", 1 / 62)]}
    with pytest.raises(ValueError, match="same queries"):
        reciprocal_rank_fusion([{"q": []}, {"r": []}])


def test_fusion_equals_that_of_sentence_transformers(tmp_path):
    rng = np.random.default_rng(2)
    documents = [f"d{i}" for i in range(40)]
    runs = [
        {f"q{q}": [(d, -float(r)) for r, d in enumerate(rng.permutation(documents)[:15].tolist())] for q in range(12)}
        for _ in range(2)
    ]
    relevant = {query: set(rng.choice(documents, 3, replace=False).tolist()) for query in runs[0]}
    samples = [
        [
            {"query_id": q, "query": q, "positive": sorted(relevant[q]), "documents": [d for d, _ in hits]}
            for q, hits in run.items()
        ]
        for run in runs
    ]
    stock = ReciprocalRankFusionEvaluator(*samples, write_csv=False, write_predictions=True)
    metrics = stock(str(tmp_path))
    fused = reciprocal_rank_fusion(runs)
    for line, hits in zip((tmp_path / stock.predictions_file).read_text().splitlines(), fused.values(), strict=True):
        assert json.loads(line)["documents"] == [document for document, _ in hits]
    qrels = {query: dict.fromkeys(ids, 1) for query, ids in relevant.items()}
    assert mean(measure(fused, qrels, ["mrr@10"])["mrr@10"]) == pytest.approx(metrics["mrr@10"])


def test_dense_search_equals_the_models_own_similarity(checkpoint):
    pytest.importorskip("faiss")
    model = SentenceTransformer(str(checkpoint("bert")))
    corpus = {f"d{i}": text for i, text in enumerate(TEXTS)}
    for similarity in ("cosine", "dot"):
        model.similarity_fn_name = similarity
        expected = model.similarity(model.encode_query(TEXTS[:3]), model.encode_document(list(TEXTS)))
        run = dense_run(model, {f"d{i}": TEXTS[i] for i in range(3)}, corpus, 5)
        for row, hits in zip(expected, run.values(), strict=True):
            assert [d for d, _ in hits] == [f"d{i}" for i in row.argsort(descending=True)[:5].tolist()]
            assert [s for _, s in hits] == pytest.approx(row.sort(descending=True).values[:5].tolist(), rel=1e-4)
        without = dense_run(model, {f"d{i}": TEXTS[i] for i in range(3)}, corpus, 5, exclude_self=True)
        assert all(query not in dict(hits) and len(hits) == 5 for query, hits in without.items())
    model.similarity_fn_name = "manhattan"
    with pytest.raises(ValueError, match="similarity is 'manhattan'"):
        dense_run(model, {"q": "x"}, corpus, 1)


def test_a_missing_faiss_is_named_with_its_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install \"st-sparse-rescale\[eval\]\""):
        dense_run(None, {}, {}, 1)
