"""mteb runs our models: through exact search, and through its own wrapper with equal scores."""

import sys

import mteb
import pytest
import torch
from mteb.models.models_protocols import EncoderProtocol, SearchProtocol
from sentence_transformers import SparseEncoder

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.evaluation.collection import Collection
from st_sparse_rescale.evaluation.mteb_search import SparseSearchModel, mteb_task
from tests.tiny_models import TEXTS

CORPUS = {f"d{i}": text for i, text in enumerate(TEXTS)}
QUERIES = {f"q{i}": " ".join(TEXTS[i].split()[2:7]) for i in range(8)}
QRELS = {f"q{i}": {f"d{i}": 2, f"d{15 - i}": 1} for i in range(8)}


@pytest.fixture
def model(checkpoint):
    model = SparseEncoder(modules=[RescaledMLMTransformer(str(checkpoint("bert")), k=4), SpladePooling()])
    with torch.no_grad():  # sparse as a trained model: some pairs of texts share no term
        model.transformers_model.get_output_embeddings().bias -= 1.0
    return model


def run(model, task, **kwargs):
    kwargs = {"cache": None, "show_progress_bar": False, "co2_tracker": False} | kwargs
    return mteb.evaluate(model, task, **kwargs).task_results[0]


def scores(result):
    return {name: value for name, value in result.scores["test"][0].items() if isinstance(value, float)}


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_exact_search_and_the_stock_wrapper_give_equal_scores(model, similarity):
    model.similarity_fn_name = similarity
    task = mteb_task(Collection("Toy", CORPUS, QUERIES, QRELS))
    ours, stock = run(SparseSearchModel(model, corpus_chunk_size=5), task), run(model, task)
    assert scores(ours) == pytest.approx(scores(stock), abs=1e-6, nan_ok=True)
    assert len(scores(ours)) > 50
    assert 0 < ours.get_score() < 1
    assert ours.task_name == "Toy"


def test_nothing_is_densified(model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("scored densely")

    task = mteb_task(Collection("Toy", CORPUS, QUERIES, QRELS))
    monkeypatch.setattr(type(model), "similarity", refuse)
    run(SparseSearchModel(model), task)
    with pytest.raises(AssertionError, match="scored densely"):
        run(model, task)


def test_prompts_and_lengths_are_honoured(model):
    task = mteb_task(Collection("Toy", CORPUS, QUERIES, QRELS))
    plain = scores(run(SparseSearchModel(model), task))
    model.prompts = {"query": "the river : ", "document": "bread : "}
    model.max_seq_length = 9
    asked = scores(run(SparseSearchModel(model), task))
    assert asked != pytest.approx(plain, nan_ok=True)
    assert asked == pytest.approx(scores(run(model, task)), abs=1e-6, nan_ok=True)
    # The same by hand: mteb's nDCG of what the model itself gives with its prompts.
    similarity = model.similarity(
        model.encode_query(list(QUERIES.values())), model.encode_document(list(CORPUS.values()))
    ).numpy()
    first = [max(zip(row, CORPUS, strict=True))[1] for row in similarity]
    expected = sum(document in QRELS[query] for query, document in zip(QUERIES, first, strict=True)) / len(QUERIES)
    assert asked["precision_at_1"] == pytest.approx(expected, abs=1e-5)


def test_identical_ids_are_left_out_where_the_task_says_so(model):
    qrels = {f"d{i}": {f"d{(i + 1) % 16}": 1} for i in range(16)}
    found = {}
    for exclude in (True, False):
        task = mteb_task(Collection("Toy", CORPUS, CORPUS, qrels, exclude_self=exclude))
        found[exclude] = scores(run(SparseSearchModel(model), task))
        assert found[exclude] == pytest.approx(scores(run(model, task)), abs=1e-6, nan_ok=True)
    assert found[True]["mrr_at_10"] > found[False]["mrr_at_10"]


def test_results_are_kept_in_mtebs_own_format(model, tmp_path):
    cache = mteb.ResultCache(cache_path=tmp_path)
    task = mteb_task(Collection("Toy", CORPUS, QUERIES, QRELS))
    result = run(SparseSearchModel(model), task, cache=cache)
    (file,) = tmp_path.rglob("Toy.json")
    assert mteb.TaskResult.from_disk(file).get_score() == pytest.approx(result.get_score(), abs=1e-5)


def test_other_tasks_run_as_with_the_stock_wrapper(model):
    from mteb.mocks.mock_tasks.reranking import MockRerankingTask
    from mteb.mocks.mock_tasks.sts import MockSTSTask

    for task in (MockRerankingTask(), MockSTSTask()):
        ours, stock = run(SparseSearchModel(model), task), run(model, task)
        assert ours.get_score() == pytest.approx(stock.get_score(), abs=1e-6)


def test_the_model_speaks_both_protocols(model):
    wrapped = SparseSearchModel(model)
    assert isinstance(wrapped, SearchProtocol)
    assert isinstance(wrapped, EncoderProtocol)
    assert wrapped.mteb_model_meta.model_type == ["sparse"]
    with pytest.raises(ValueError, match="Index a corpus"):
        wrapped.search([])


def test_a_missing_mteb_is_named_with_its_mend(monkeypatch):
    for name in [name for name in sys.modules if name == "mteb" or name.startswith("mteb.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "st_sparse_rescale.evaluation.mteb_search")
    with pytest.raises(ImportError, match=r"pip install \"st-sparse-rescale\[eval\]\""):
        import st_sparse_rescale.evaluation.mteb_search  # noqa: F401
