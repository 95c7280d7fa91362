"""The evaluate command: tables, files, comparisons, resuming, and one message for what the user can mend."""

import json
import re
import subprocess
import sys
import time

import ir_measures
import pytest
import torch
from sentence_transformers import SparseEncoder
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from st_sparse_rescale.cli import app
from st_sparse_rescale.evaluation.evaluate import evaluate
from st_sparse_rescale.evaluation.report import as_markdown, collections_table, parse_limits
from st_sparse_rescale.evaluation.results import Evaluation
from st_sparse_rescale.evaluation.sparse_information_retrieval import SparseInformationRetrievalEvaluator
from st_sparse_rescale.evaluation.tradeoff import trace_tradeoff
from st_sparse_rescale.many_values import repeated
from tests.tiny_models import MAX_LENGTH, TEXTS

CORPUS = {f"d{i}": text for i, text in enumerate(TEXTS)}
QUERIES = {f"q{i}": " ".join(TEXTS[i].split()[2:7]) for i in range(8)}


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory):
    """Two SPLADE models, sparse enough that some pairs of texts share no term."""
    folder = tmp_path_factory.mktemp("models")
    for name, shift in (("one", -1.0), ("two", -2.0)):
        model = SparseEncoder(str(checkpoint("bert")))
        with torch.no_grad():
            model.transformers_model.get_output_embeddings().bias += shift
        model.save_pretrained(str(folder / name))
    return folder


@pytest.fixture
def data(tmp_path):
    """Two collections: the queries' own documents are relevant in one, others and graded in the other."""
    qrels = {
        "near": [f"q{i}\td{i}\t1" for i in range(8)],
        "far": [f"q{i}\td{15 - i}\t{1 + i % 3}" for i in range(8)] + ["q0\td3\t0", "q9\td1\t1"],
    }
    for name, lines in qrels.items():
        (tmp_path / name / "qrels").mkdir(parents=True)
        for table, texts in (("corpus", CORPUS), ("queries", QUERIES)):
            rows = [json.dumps({"_id": id, "text": text}) for id, text in texts.items()]
            (tmp_path / name / f"{table}.jsonl").write_text("\n".join(rows))
        (tmp_path / name / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return [str(tmp_path / "near"), str(tmp_path / "far")]


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "200"})


def test_tables_files_and_plot(models, data, tmp_path):
    output = tmp_path / "out" / "results.json"
    result = run(
        models / "one", "--data", *data, "--max-active-dims", "none", 8, "--bm25", "--run-dir", tmp_path / "out",
        "--output", output, "--metrics", "ndcg@10", "map@5",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    assert [row[:2] for row in rows if row[0] == "mean"] == [
        ["mean", "one"],
        ["mean", "one (8 dims)"],
        ["mean", "BM25"],
    ]
    assert "judges query 'q9', which the collection does not hold" in result.output
    results = json.loads(output.read_text())
    by_name = {c["name"]: {s["system"]: s["metrics"] for s in c["systems"]} for c in results["collections"]}
    # The run files mean the same to trec_eval.
    for name, systems in by_name.items():
        qrels = [line.split("\t") for line in (tmp_path / name / "qrels" / "test.tsv").read_text().split("\n")[1:]]
        judged = {}
        for query, document, grade in qrels:
            if query in QUERIES:
                judged.setdefault(query, {})[document] = int(grade)
        for system, slug in (("one", "one"), ("one (8 dims)", "one--8-dims"), ("BM25", "BM25")):
            file = tmp_path / "out" / f"{name}.{slug}.trec"
            wanted = ir_measures.parse_measure("nDCG@10")
            theirs = ir_measures.calc_aggregate([wanted], judged, ir_measures.read_trec_run(str(file)))
            assert systems[system]["ndcg@10"] == pytest.approx(theirs[wanted], abs=1e-6)
    means = {row["system"]: row["metrics"] for row in results["means"]}
    assert means["one"]["map@5"] == pytest.approx(sum(c["one"]["map@5"] for c in by_name.values()) / 2)
    assert (tmp_path / "out" / "tradeoff.png").stat().st_size > 5_000
    assert Evaluation.read(output).means()[0].metrics == pytest.approx(means["one"])
    assert as_markdown(Evaluation.read(output)).splitlines()[-1].startswith("| mean | BM25 |")


def test_metrics_lengths_and_costs_equal_the_evaluators(models, data):
    model = SparseEncoder(str(models / "one"))
    relevant = {f"q{i}": {f"d{i}"} for i in range(8)}
    limits = [4, None]
    results = evaluate(model, data[:1], max_active_dims=limits, max_length=12)
    (collection,) = results.collections
    assert model.max_seq_length == 12
    for limit, system in zip(limits, collection.systems, strict=True):
        evaluator = SparseInformationRetrievalEvaluator(
            QUERIES, CORPUS, relevant, max_active_dims=limit, precision_recall_at_k=[100]
        )
        expected = evaluator(model)
        for metric, value in system.metrics.items():
            assert value == pytest.approx(expected[f"dot_{metric}"], abs=1e-6)
        assert system.query_active_dims == pytest.approx(expected["query_active_dims"], rel=1e-5)
        assert system.corpus_active_dims == pytest.approx(expected["corpus_active_dims"], rel=1e-5)
        assert system.flops == pytest.approx(expected["avg_flops"], rel=1e-5)
    (lengths,) = collection.lengths
    assert lengths.document.max_length == expected["corpus_max_length"] == 12
    assert lengths.document.share == expected["corpus_truncated"] > 0
    assert lengths.query.share == expected["query_truncated"]
    assert [*collections_table(results).columns[7].cells] == ["12"]  # of both sides
    (traced, _) = trace_tradeoff(model, evaluator, limits)
    assert traced["ndcg@10"] == pytest.approx(collection.systems[0].metrics["ndcg@10"], abs=1e-9)


def test_a_killed_evaluation_goes_on_collection_by_collection(models, data, tmp_path, monkeypatch):
    module, encoded = sys.modules["st_sparse_rescale.evaluation.evaluate"], []
    retrieve = module.retrieve

    def dying(model, queries, corpus, *args, **kwargs):
        if len(encoded) == 1:
            raise KeyboardInterrupt
        encoded.append(corpus)
        return retrieve(model, queries, corpus, *args, **kwargs)

    output = tmp_path / "results.json"
    monkeypatch.setattr(module, "retrieve", dying)
    with pytest.raises(KeyboardInterrupt):
        evaluate(models / "one", data, output=output)
    assert [c.name for c in Evaluation.read(output).collections] == ["near"]
    encoded.clear()
    resumed = evaluate(models / "one", data, output=output)
    assert len(encoded) == 1  # the second collection only
    monkeypatch.undo()
    whole = evaluate(models / "one", data)
    assert [c.systems for c in resumed.collections] == [c.systems for c in whole.collections]
    assert Evaluation.read(output) == resumed

    refused = run(models / "two", "--data", *data, "--output", output)
    assert refused.exit_code == 2
    assert "holds results of another evaluation (models was {'one': " in refused.output
    refused = run(models / "one", "--data", *data, "--output", output, "--bm25")
    assert "bm25 was False, is True" in refused.output
    (tmp_path / "near" / "qrels" / "test.tsv").write_text("q1\td2\t1\n")
    refused = run(models / "one", "--data", *data, "--output", output)
    assert "holds results on another 'near'" in refused.output
    output.write_text("[]")
    assert "does not hold results of an evaluation" in run(models / "one", "--data", *data, "--output", output).output


def test_two_models_are_compared_query_by_query(models, data, tmp_path):
    output = tmp_path / "results.json"
    result = run(
        models / "one", "--data", *data, "--compare", models / "two", "--metrics", "mrr@10", "--output", output
    )
    assert result.exit_code == 0, result.output
    assert "Paired randomisation test (every sign pattern)" in result.output
    for collection in Evaluation.read(output).collections:
        one, two = (system.metrics["mrr@10"] for system in collection.systems)
        (comparison,) = collection.comparisons
        assert (comparison.a, comparison.b, comparison.metric) == ("one", "two", "mrr@10")
        assert comparison.difference == pytest.approx(one - two)
        assert comparison.wins + comparison.losses + comparison.ties == len(comparison.per_query) == 8
        assert comparison.wins == sum(a > b for a, b in comparison.per_query.values())
        assert 0 < comparison.p_value <= 1
    same_name = evaluate(models / "one", data[:1], compare_with=models / "one")
    assert [system.system[:2] for system in same_name.collections[0].systems] == ["A:", "B:"]
    assert {c.p_value for c in same_name.collections[0].comparisons} == {1.0}
    assert [lengths.model[:2] for lengths in same_name.collections[0].lengths] == ["A:", "B:"]


def test_several_models_are_each_compared_with_the_first(models, data, tmp_path):
    output = tmp_path / "results.json"
    result = run(
        models / "one", "--data", data[0], "--metrics", "mrr@10", "--max-active-dims", 4, "none",
        "--compare", models / "two", models / "one", "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (collection,) = Evaluation.read(output).collections
    pairs = [(comparison.a, comparison.b) for comparison in collection.comparisons]
    assert pairs == [
        ("A: one (4 dims)", "B: two (4 dims)"),
        ("A: one", "B: two"),
        ("A: one (4 dims)", "C: one (4 dims)"),
        ("A: one", "C: one"),
    ]


def test_a_dense_model_is_fused_in(models, data, checkpoint):
    pytest.importorskip("faiss")
    results = evaluate(models / "one", data[:1], hybrid_with=checkpoint("electra"), max_active_dims=[4, None])
    names = [system.system for system in results.collections[0].systems]
    assert names == ["one (4 dims)", "one", "electra (dense)", "one (4 dims) + electra (dense)"]


def test_nothing_is_evaluated_before_all_data_is_found(models, data, tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("work that would be lost")

    monkeypatch.setattr(sys.modules["st_sparse_rescale.evaluation.evaluate"], "retrieve", never)
    for more, message in (
        (str(tmp_path / "nowhere"), "nowhere cannot be loaded"),
        (str(tmp_path / "near" / ".." / "near"), "Two collections are called 'near'"),
        ("nanobeir:everything", "NanoBEIR holds no everything"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(models / "one", [*data, more])
    (tmp_path / "file").touch()
    for place in ({"run_dir": tmp_path / "file"}, {"output": tmp_path / "file" / "results.json"}):
        with pytest.raises(OSError, match=r"Not a directory|File exists"):
            evaluate(models / "one", data, **place)


def test_run_files_are_made_when_they_are_wanted_later(models, data, tmp_path):
    output, runs = tmp_path / "results.json", tmp_path / "runs"
    first = evaluate(models / "one", data, output=output)
    again = evaluate(models / "one", data, output=output, run_dir=runs)
    assert [c.systems for c in again.collections] == [c.systems for c in first.collections]
    files = {file.name: file.stat().st_mtime_ns for file in runs.iterdir()}
    assert files.keys() == {"near.one.trec", "far.one.trec"}
    (runs / "far.one.trec").unlink()
    evaluate(models / "one", data, output=output, run_dir=runs)
    assert (runs / "near.one.trec").stat().st_mtime_ns == files["near.one.trec"]  # only what is missing
    assert (runs / "far.one.trec").exists()


def test_ids_that_no_run_file_can_hold_are_refused_before_the_work(models, data, tmp_path, monkeypatch):
    (tmp_path / "near" / "corpus.jsonl").write_text('{"_id": "d 1", "text": "x"}\n{"_id": "d1", "text": "y"}')
    monkeypatch.setattr(sys.modules["st_sparse_rescale.evaluation.evaluate"], "retrieve", None)
    result = run(models / "one", "--data", data[0], "--run-dir", tmp_path / "runs")
    assert result.exit_code == 2
    assert "'d 1' cannot stand in a TREC run" in result.output


def test_the_plot_shows_the_first_metric(models, data, tmp_path, monkeypatch):
    drawn = []
    report = sys.modules["st_sparse_rescale.evaluation.report"]
    monkeypatch.setattr(report, "draw_tradeoff", lambda *arguments: drawn.append(arguments) or arguments[0])
    monkeypatch.chdir(tmp_path)
    result = run(models / "one", "--data", data[0], "--metrics", "MRR@10", "--max-active-dims", 4, "none", "--bm25")
    assert result.exit_code == 0, result.output
    ((file, curves, baselines, metric),) = drawn
    assert (str(file), metric, list(baselines)) == ("tradeoff.png", "MRR@10", ["BM25"])
    assert [limit for _, _, limit in curves["one"]] == [4, None]


def test_random_weights_are_refused(checkpoint, data, tmp_path):
    """An encoder loads with an untrained module on top, and so does a masked LM without its head. Both find nothing."""
    encoder = AutoModelForMaskedLM.from_pretrained(checkpoint("bert")).base_model
    for architecture, message in (("BertModel", "holds no sparse encoder"), ("BertForMaskedLM", "no trained MLM head")):
        folder = tmp_path / architecture
        encoder.save_pretrained(folder)
        AutoTokenizer.from_pretrained(checkpoint("bert")).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        result = run(folder, "--data", data[0])
        assert result.exit_code == 2, result.output
        assert message in result.output


def test_the_folder_of_a_training_is_told_from_its_model(models, data, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "model").symlink_to(models / "one")
    result = run(tmp_path / "training", "--data", data[0])
    assert result.exit_code == 2
    assert "is the folder of a training: its model is" in " ".join(result.output.split())


def test_lengths_that_a_model_cannot_read_are_refused(models, data):
    result = run(models / "one", "--data", data[0], "--max-length", MAX_LENGTH + 1)
    assert result.exit_code == 2
    assert f"one cannot read {MAX_LENGTH + 1} tokens (" in result.output


@pytest.mark.slow
def test_an_evaluation_killed_by_the_system_goes_on(models, data, tmp_path):
    """kill -9 at the first result; the same command then does the rest, and the table is that of an untroubled run."""
    output = tmp_path / "results.json"
    arguments = [models / "one", "--data", *data, "--output", output]
    process = subprocess.Popen(
        [sys.executable, "-m", "st_sparse_rescale.cli", "evaluate", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not output.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert Evaluation.read(output).collections[0].name == "near"
    assert run(*arguments).exit_code == 0
    resumed, whole = Evaluation.read(output), evaluate(models / "one", data)
    assert [c.systems for c in resumed.collections] == [c.systems for c in whole.collections]


def test_queries_that_are_documents_can_be_left_out(models, data):
    for line in (True, False):
        assert evaluate(models / "one", data[:1], exclude_self=line).collections[0].self_excluded is line
    result = run(models / "one", "--data", data[0], "--exclude-self")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metrics", "bleu@4"], "There is no metric 'bleu@4'"),
        (["--max-active-dims", "0"], "positive whole number or none, got '0'"),
        (["--max-active-dims", "few"], "got 'few'"),
        (["--permutations", "0"], "--permutations"),
        (["--max-length", "-3"], "--max-length"),
        (["--strict"], "far/qrels/test.tsv, line 11: judges query 'q9'"),
        (["--split", "dev"], "holds no dev.tsv"),
    ],
)
def test_what_the_user_can_mend_is_one_message(models, data, arguments, message):
    result = run(models / "one", "--data", data[1], *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_missing_models_and_data_are_one_message(models, data, tmp_path):
    clash = run(models / "one", "--data", data[0], "--data", tmp_path / "near" / ".." / "near")
    assert (clash.exit_code, "Two collections are called 'near'" in clash.output) == (2, True)
    for arguments in ([models / "one", "--data", tmp_path / "none"], [tmp_path / "none", "--data", data[0]]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert str(tmp_path / "none") in result.output.replace("\n", "")


def test_options_take_values_in_a_row_or_repeated():
    lists = {"--data", "--metrics"}
    row = ["m", "--data", "a", "b", "--bm25", "--metrics", "x", "y", "--seed", "1"]
    assert repeated(row, lists) == [
        "m", "--data", "a", "--data", "b", "--bm25", "--metrics", "x", "--metrics", "y", "--seed", "1",
    ]  # fmt: skip
    assert repeated(repeated(row, lists), lists) == repeated(row, lists)
    assert parse_limits(["16", "None"]) == [16, None]
