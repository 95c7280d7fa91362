"""The evaluator on exact search: equal to sentence-transformers' own and to ir-measures, and telling more."""

import csv
import json
import logging
import math

import ir_measures
import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.evaluation import (
    SparseInformationRetrievalEvaluator as StockEvaluator,
)
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

from st_sparse_rescale.evaluation.metrics import measure, parse_metric, score_ranking
from st_sparse_rescale.evaluation.sparse_information_retrieval import SparseInformationRetrievalEvaluator
from st_sparse_rescale.evaluation.sparse_nano_beir import SparseNanoBEIREvaluator
from st_sparse_rescale.evaluation.trec_run import read_run, write_run
from st_sparse_rescale.evaluation.truncation import measure_truncation
from tests.tiny_models import TEXTS

CORPUS = {f"d{i}": text for i, text in enumerate(TEXTS)}
QUERIES = {f"q{i}": " ".join(TEXTS[i].split()[2:7]) for i in range(8)} | {"unjudged": "never asked"}
RELEVANT = {f"q{i}": {f"d{i}", f"d{15 - i}"} for i in range(8)}
NEW = ("max_length", "truncated", "self_excluded", "seconds", "peak_memory_mib")


@pytest.fixture
def model(checkpoint):
    model = SparseEncoder(str(checkpoint("bert")))
    with torch.no_grad():  # sparse as a trained model: some pairs of texts share no term
        model.transformers_model.get_output_embeddings().bias -= 4.0
    return model


def stock_part(metrics):
    return {name: value for name, value in metrics.items() if not any(part in name for part in NEW)}


def compare(model, **settings):
    ours = SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="toy", **settings)
    stock = StockEvaluator(QUERIES, CORPUS, RELEVANT, name="toy", **settings)
    expected, found = stock(model), ours(model)
    assert set(stock_part(found)) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert ours.primary_metric == stock.primary_metric == f"toy_{model.similarity_fn_name}_ndcg@10"
    return found


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("limit", [None, 2])
def test_every_metric_equals_the_stock_evaluator(model, similarity, limit):
    model.similarity_fn_name = similarity
    settings = {
        "max_active_dims": limit,
        "precision_recall_at_k": [1, 5, 40],
        "map_at_k": [3, 100],
        "mrr_at_k": [1, 10],
    }
    found = compare(model, **settings)
    # Some of what is compared are documents that share no term with the query, which follow by id.
    assert found["toy_corpus_active_dims"] < 20
    assert found["toy_query_sparsity_ratio"] > 0.9


def test_chunks_change_nothing(model):
    metrics = compare(model, corpus_chunk_size=5, batch_size=3)
    whole = compare(model, corpus_chunk_size=50_000, batch_size=32)
    for name, value in stock_part(whole).items():
        assert metrics[name] == pytest.approx(value, abs=1e-6)


def test_given_embeddings_full_of_ties_equal_the_stock_evaluator():
    rng = np.random.default_rng(0)
    vocabulary, documents = 40, 300
    ids = [f"d{i}" for i in rng.permutation(documents)]
    queries = {f"q{i}": "x" for i in range(12)}
    relevant = {query: set(rng.choice(ids, 9, replace=False).tolist()) for query in queries}

    def quarters(count):
        return torch.tensor(rng.integers(1, 3, (count, vocabulary)) * (rng.random((count, vocabulary)) < 0.2) / 4.0)

    encoded, corpus = quarters(12).float().to_sparse(), quarters(documents).float().to_sparse()

    class Given:
        similarity_fn_name = "dot"
        max_seq_length, prompts, default_prompt_name = None, {}, None
        sparsity = staticmethod(SparseEncoder.sparsity)

        def encode_query(self, *args, **kwargs):
            return encoded

        def modules(self):
            return []

        def preprocess(self, texts, **kwargs):
            return {"attention_mask": torch.ones(len(texts), 1)}

    scores = {}
    for cls in (SparseInformationRetrievalEvaluator, StockEvaluator):
        evaluator = cls(queries, dict.fromkeys(ids, "x"), relevant, map_at_k=[5, 200], corpus_chunk_size=64)
        if cls is StockEvaluator:
            evaluator.score_functions = {"dot": lambda a, b: torch.mm(a, b.t()).to_dense()}
            evaluator.score_function_names = ["dot"]
        scores[cls] = evaluator.compute_all_metrics(Given(), corpus_embeddings=corpus)["dot"]
        scores[cls]["flops"] = {0: evaluator._calculate_avg_flops()}
    ours, stock = scores.values()
    assert ours.keys() == stock.keys()
    for name in stock:
        assert ours[name] == pytest.approx(stock[name], abs=1e-6), name


def test_files_are_those_of_the_stock_evaluator(model, tmp_path):
    for folder, cls in (("ours", SparseInformationRetrievalEvaluator), ("stock", StockEvaluator)):
        evaluator = cls(QUERIES, CORPUS, RELEVANT, name="toy", write_predictions=True)
        for epoch in (1, 2):
            evaluator(model, str(tmp_path / folder), epoch=epoch, steps=10)
    ours, stock = (sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("ours", "stock"))
    assert ours == stock
    for name in stock:
        ours, stock = ((tmp_path / folder / name).read_text() for folder in ("ours", "stock"))
        if name.endswith(".csv"):
            ours, stock = (list(csv.DictReader(text.splitlines())) for text in (ours, stock))
            assert [row["epoch"] for row in ours] == ["1", "2"]
            for mine, theirs in zip(ours, stock, strict=True):
                assert {k: float(v) for k, v in mine.items()} == pytest.approx({k: float(v) for k, v in theirs.items()})
        else:
            for mine, theirs in zip(ours.splitlines(), stock.splitlines(), strict=True):
                mine, theirs = json.loads(mine), json.loads(theirs)
                assert [hit["corpus_id"] for hit in mine["results"]] == [hit["corpus_id"] for hit in theirs["results"]]
                assert mine.keys() == theirs.keys()


def test_truncation_and_lengths_are_reported(model, caplog):
    model.max_seq_length = 16
    evaluator = SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="toy")
    with caplog.at_level(logging.INFO):
        metrics = evaluator(model)
    # Counted by the tokenizer alone.
    cut = sum(len(model.tokenizer(text)["input_ids"]) > 16 for text in CORPUS.values()) / len(CORPUS)
    assert 0 < cut < 1
    assert metrics["toy_corpus_truncated"] == cut
    assert metrics["toy_corpus_max_length"] == metrics["toy_query_max_length"] == 16
    assert metrics["toy_query_truncated"] == 0
    assert metrics["toy_seconds"] > 0
    assert 50 < metrics["toy_peak_memory_mib"] < 50_000
    assert "corpus truncated" in caplog.text
    prompted = SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, query_prompt="so many words in front : ")
    assert prompted(model)["query_truncated"] > 0  # a prompt takes room


def test_truncation_sees_lengths_by_task_and_routes(model, checkpoint):
    long = " ".join(TEXTS)
    model[0].document_length = 12
    assert measure_truncation(model, [long, "short"], "document").share == 0.5
    assert measure_truncation(model, [long, "short"], "document").max_length == 12
    assert measure_truncation(model, [long, "short"], "query").share == 0.0
    assert measure_truncation(model, [], "query").share == 0.0
    static = SparseStaticEmbedding(model.tokenizer)
    router = Router.for_query_document(query_modules=[static], document_modules=list(model.children()))
    routed = SparseEncoder(modules=[router])
    limit = model.tokenizer.model_max_length
    assert measure_truncation(routed, [long, "short"], "document").max_length == 12
    model.tokenizer.model_max_length = 9
    assert measure_truncation(routed, [long, "short"], "query").share == 0.5
    assert model.tokenizer.model_max_length == 9  # as it was
    model.tokenizer.model_max_length = limit


def test_the_length_of_training_is_that_of_evaluation(model, tmp_path):
    """A limit set in training is saved, used and reported: 600 tokens give the vector of the first 512."""
    words = (" ".join(TEXTS) + " ") * 10
    ids = model.tokenizer(words, add_special_tokens=False)["input_ids"]
    first = model.tokenizer.decode(ids[:510])
    assert len(model.tokenizer(words)["input_ids"]) > 600
    model.max_seq_length = 512
    model.save_pretrained(str(tmp_path / "model"))
    loaded = SparseEncoder(str(tmp_path / "model"))
    assert loaded.max_seq_length == 512
    long, short = loaded.encode_document([words, first]).to_dense()
    assert torch.allclose(long, short, atol=1e-5)
    evaluator = SparseInformationRetrievalEvaluator({"q": "a"}, {"d": words, "e": "short"}, {"q": {"d"}})
    metrics = evaluator(loaded)
    assert (metrics["corpus_max_length"], metrics["corpus_truncated"]) == (512, 0.5)


def test_self_matches_are_excluded_on_request(model):
    same = {f"d{i}": text for i, text in enumerate(TEXTS)}
    relevant = {f"d{i}": {f"d{(i + 1) % 16}"} for i in range(16)}
    with_self = SparseInformationRetrievalEvaluator(same, same, relevant, accuracy_at_k=[1, 15])
    without = SparseInformationRetrievalEvaluator(same, same, relevant, accuracy_at_k=[1, 15], exclude_self=True)
    first, second = with_self(model), without(model)
    assert (first["self_excluded"], second["self_excluded"]) == (0.0, 1.0)
    assert second["dot_accuracy@15"] == 1.0  # all the others
    assert first["dot_accuracy@15"] < 1.0
    embeddings = model.encode_document(list(TEXTS)).to_dense()
    scores = embeddings @ embeddings.T
    scores.fill_diagonal_(-1)
    rank = torch.tensor([(scores[i] > scores[i, (i + 1) % 16]).sum() + 1 for i in range(16)])
    assert second["dot_mrr@10"] == pytest.approx(float(((rank <= 10) / rank).mean()), abs=0.02)


def test_what_cannot_be_searched_sparsely_is_refused(model):
    with pytest.raises(ValueError, match=r"score_functions cannot be chosen .* \['mine'\]"):
        SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, score_functions={"mine": torch.mm})
    model.similarity_fn_name = "euclidean"
    with pytest.raises(ValueError, match="model's similarity is 'euclidean'"):
        SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT)(model)


def test_it_serves_as_the_evaluator_of_a_trainer(model, tmp_path):
    evaluator = SparseInformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, name="dev")
    data = Dataset.from_dict({"anchor": list(TEXTS[:4]), "positive": list(TEXTS[4:8])})
    arguments = SparseEncoderTrainingArguments(
        str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1, report_to="none",
        per_device_train_batch_size=2, load_best_model_at_end=True, metric_for_best_model="eval_dev_dot_ndcg@10",
        use_cpu=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=1e-4)
    trainer = SparseEncoderTrainer(model, arguments, data, data, loss, evaluator=evaluator)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_dev_dot_ndcg@10" in entry]
    assert len(logged) == 2
    assert "eval_dev_corpus_truncated" in logged[0]


# Metrics


def test_metrics_by_hand():
    found, grades = [(2, 3), (4, 1)], [3, 1, 2]
    dcg = 3 / math.log2(3) + 1 / math.log2(5)
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    expected = {
        "ndcg@4": dcg / ideal, "ndcg@1": 0.0, "ndcg@2": (3 / math.log2(3)) / (3 + 2 / math.log2(3)),
        "mrr@10": 0.5, "mrr@1": 0.0, "recall@4": 2 / 3, "precision@4": 0.5, "precision@10": 0.2,
        "accuracy@1": 0.0, "accuracy@2": 1.0, "map@4": (1 / 2 + 2 / 4) / 3, "map@2": (1 / 2) / 2,
    }  # fmt: skip
    for metric, value in expected.items():
        assert score_ranking(metric, found, grades) == pytest.approx(value), metric
    for bad in ("ndcg", "ndcg@0", "bleu@10", "ndcg@-1", "mrr@1.5"):
        with pytest.raises(ValueError, match="There is no metric"):
            parse_metric(bad)


def test_queries_without_a_relevant_document_are_left_out():
    qrels = {"q1": {"d1": 1}, "q2": {"d1": 0}, "q3": {"d2": 2}}
    scores = measure({"q1": [("d1", 1.0)], "q2": [("d1", 1.0)]}, qrels, ["mrr@10"])
    assert scores == {"mrr@10": {"q1": 1.0, "q3": 0.0}}  # a judged query without a ranking counts as 0
    with pytest.raises(ValueError, match="nothing to measure"):
        measure({}, {"q": {"d": 0}})


NAMES = {
    "ndcg@10": "nDCG@10", "mrr@10": "RR@10", "recall@5": "R@5", "precision@5": "P@5", "accuracy@3": "Success@3",
    "map@100": "AP@100",
}  # fmt: skip


def test_metrics_equal_ir_measures_on_the_written_run(tmp_path):
    """Graded, with ties and zeros: the written file must mean the same ranking to trec_eval."""
    rng = np.random.default_rng(3)
    documents = [f"d{i}" for i in range(60)]
    run, qrels = {}, {}
    for number in range(25):
        order = rng.permutation(documents).tolist()
        scores = np.sort(rng.integers(0, 6, 60) / 4)[::-1]  # many equal, many zero
        run[f"q{number}"] = list(zip(order, scores.tolist(), strict=True))
        judged = rng.choice(documents, 12, replace=False)
        qrels[f"q{number}"] = {str(d): int(g) for d, g in zip(judged, rng.integers(0, 4, 12), strict=True)}
    file = write_run(tmp_path / "toy.trec", run, "toy")
    ours = measure(run, qrels, NAMES)
    theirs = {(m.query_id, str(m.measure)): m.value for m in ir_measures.iter_calc(
        [ir_measures.parse_measure(name) for name in NAMES.values()],
        qrels,
        ir_measures.read_trec_run(str(file)),
    )}  # fmt: skip
    for metric, name in NAMES.items():
        for query, value in ours[metric].items():
            assert value == pytest.approx(theirs[query, name], abs=1e-6), (metric, query)
    assert [[d for d, _ in hits] for hits in read_run(file).values()] == [[d for d, _ in hits] for hits in run.values()]


def test_the_evaluator_equals_ir_measures_on_its_run(model, tmp_path):
    evaluator = SparseInformationRetrievalEvaluator(
        QUERIES, CORPUS, RELEVANT, write_predictions=True, accuracy_at_k=[3], precision_recall_at_k=[5]
    )
    metrics = evaluator(model, str(tmp_path))
    predictions = tmp_path / evaluator.predictions_file.replace(".jsonl", "_dot.jsonl")
    rows = [json.loads(line) for line in predictions.read_text().splitlines()]
    run = {row["query_id"]: [(hit["corpus_id"], hit["score"]) for hit in row["results"]] for row in rows}
    file = write_run(tmp_path / "run.trec", run, "toy")
    qrels = {query: dict.fromkeys(ids, 1) for query, ids in RELEVANT.items()}
    wanted = [ir_measures.parse_measure(name) for name in NAMES.values()]
    theirs = ir_measures.calc_aggregate(wanted, qrels, ir_measures.read_trec_run(str(file)))
    for metric, name in NAMES.items():
        assert metrics[f"dot_{metric}"] == pytest.approx(theirs[ir_measures.parse_measure(name)], abs=1e-6)


def test_runs_that_cannot_be_written_or_read_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'a b' cannot stand in a TREC run"):
        write_run(tmp_path / "x", {"q": [("a b", 1.0)]}, "t")
    (tmp_path / "bad").write_text("q Q0 d 1 0.5 t\nq d 1\n")
    with pytest.raises(ValueError, match="bad, line 2"):
        read_run(tmp_path / "bad")


# NanoBEIR


@pytest.fixture
def nano_folder(tmp_path):
    """A local copy in the layout of the hub's dataset: three subsets, one split a collection."""
    configs = {}
    for split in ("NanoSciFact", "NanoNQ"):
        tables = {
            "corpus": [{"_id": id, "text": text} for id, text in CORPUS.items()],
            "queries": [{"_id": id, "text": text} for id, text in QUERIES.items()],
            "qrels": [{"query-id": q, "corpus-id": d} for q, ids in RELEVANT.items() for d in sorted(ids)],
        }
        for subset, rows in tables.items():
            (tmp_path / "nano" / subset).mkdir(parents=True, exist_ok=True)
            Dataset.from_list(rows).to_parquet(str(tmp_path / "nano" / subset / f"{split}-00000-of-00001.parquet"))
            configs.setdefault(subset, []).append(f"  - split: {split}\n    path: {subset}/{split}-*")
    card = "".join(
        f"- config_name: {name}\n  data_files:\n" + "\n".join(files) + "\n" for name, files in configs.items()
    )
    (tmp_path / "nano" / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return tmp_path / "nano"


def test_nanobeir_from_a_local_copy_with_the_stock_names(model, nano_folder):
    from sentence_transformers.sparse_encoder.evaluation import SparseNanoBEIREvaluator as StockNano

    ours = SparseNanoBEIREvaluator(["scifact", "nq"], dataset_id=str(nano_folder))
    stock = StockNano(["scifact", "nq"], dataset_id=str(nano_folder))
    found, expected = ours(model), stock(model)
    assert ours.primary_metric == stock.primary_metric == "NanoBEIR_mean_dot_ndcg@10"
    assert {"NanoBEIR_mean_corpus_active_dims", "NanoSciFact_dot_mrr@10"} <= set(found)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
