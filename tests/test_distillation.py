"""A teacher's scores: right numbers in the file, read by training, in a unit that the student can learn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sentence_transformers import CrossEncoder, SparseEncoder
from typer.testing import CliRunner

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.cli import app
from st_sparse_rescale.jsonl import read_jsonl, write_jsonl
from st_sparse_rescale.training import (
    DataError,
    Recipe,
    distillation,
    load_training_data,
    mine,
    pair_scores,
    score,
    train,
)
from st_sparse_rescale.training.pair_scores import load_cross_encoder, load_sparse, sparse_scorer
from tests.tiny_models import TEXTS

ROWS = [
    {"query": " ".join(text.split()[:5]), "positive": text, "negatives": [TEXTS[i - 1], TEXTS[i - 2]]}
    for i, text in enumerate(TEXTS)
]
QUIET = {"show_progress_bar": False}


@pytest.fixture
def files(tmp_path):
    write_jsonl(tmp_path / "mined.jsonl", ROWS)
    return SimpleNamespace(mined=tmp_path / "mined.jsonl", out=tmp_path / "scored.jsonl")


@pytest.fixture(scope="module")
def cross_encoder(checkpoint) -> CrossEncoder:
    torch.manual_seed(0)
    return CrossEncoder(str(checkpoint("bert")), num_labels=1, device="cpu")


@pytest.fixture(scope="module")
def sparse(checkpoint) -> SparseEncoder:
    return SparseEncoder(modules=[RescaledMLMTransformer(str(checkpoint("bert")), k=4), SpladePooling()], device="cpu")


def rows_of(file) -> list[dict]:
    return [row for _, row in read_jsonl(file)]


def test_a_cross_encoder_gives_its_logits(files, cross_encoder):
    assert score(files.mined, files.out, cross_encoder=cross_encoder, batch_size=5, **QUIET) == files.out
    assert isinstance(cross_encoder.activation_fn, torch.nn.Sigmoid)  # its own output would be a probability
    for row, scored in zip(ROWS, rows_of(files.out), strict=True):
        assert {name: scored[name] for name in row} == row
        texts = [(row["query"], text) for text in (row["positive"], *row["negatives"])]
        probabilities = torch.tensor(scored["score"], dtype=torch.float64).sigmoid()
        assert probabilities.tolist() == pytest.approx(cross_encoder.predict(texts).tolist(), abs=1e-5)


def test_a_sparse_model_gives_its_similarity(files, sparse):
    score(files.mined, files.out, sparse=sparse, **QUIET)
    for row in rows_of(files.out):
        documents = sparse.encode_document([row["positive"], *row["negatives"]])
        expected = sparse.similarity(sparse.encode_query([row["query"]]), documents)[0]
        assert row["score"] == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_cosine_model_scores_by_cosine(sparse, monkeypatch):
    pairs = [(TEXTS[0], TEXTS[0]), (TEXTS[0], TEXTS[1])]
    dot = sparse_scorer(sparse)(pairs)
    monkeypatch.setattr(type(sparse), "similarity_fn_name", "cosine")
    cosine = sparse_scorer(sparse)(pairs)
    assert cosine[0] == pytest.approx(1.0, abs=1e-5)
    assert dot[0] > 1 > cosine[1] > 0


@pytest.mark.parametrize("loss", ["margin_mse", "kl_div"])
def test_mined_and_scored_and_trained(files, sparse, cross_encoder, checkpoint, tmp_path, loss):
    """The whole chain from pairs to a distilled student, of files that the next one reads."""
    write_jsonl(tmp_path / "pairs.jsonl", [{"query": row["query"], "positive": row["positive"]} for row in ROWS])
    mined = mine(tmp_path / "pairs.jsonl", tmp_path / "negatives.jsonl", sparse=sparse, num_negatives=2, **QUIET)
    scored = score(mined.file, tmp_path / "teacher.jsonl", cross_encoder=cross_encoder, **QUIET)
    data = load_training_data(scored, teacher_scores="margins")
    assert [len(label) for label in data["label"]] == [3] * mined.rows
    recipe = Recipe.load(
        {"margin_mse": "distil", "kl_div": "distil-kl"}[loss],
        model=str(checkpoint("bert")),
        k=4,
        train=str(scored),
        batch_size=4,
        max_steps=2,
        max_seq_length=24,
        logging_steps=1,
    )
    assert recipe.loss == loss
    history = train(recipe, tmp_path / "out", progress_bar=False).history
    assert all(record["base_loss"] > 0 for record in history if "base_loss" in record)


def test_a_killed_call_goes_on_with_the_rows_that_are_missing(files, sparse, monkeypatch):
    write = distillation.write_in_parts
    monkeypatch.setattr(distillation, "write_in_parts", lambda *args, **kwargs: write(*args, part_size=5, **kwargs))
    whole = rows_of(score(files.mined, files.out.with_name("whole.jsonl"), sparse=sparse, **QUIET))
    scored, make = [], distillation.sparse_scorer

    def dies(model, **settings):
        def scores(pairs):
            scored.append(pairs[0][0])
            if len(scored) == 3:
                raise KeyboardInterrupt
            return make(model, **settings)(pairs)

        return scores

    monkeypatch.setattr(distillation, "sparse_scorer", dies)
    with pytest.raises(KeyboardInterrupt):
        score(files.mined, files.out, sparse=sparse, **QUIET)
    assert not files.out.exists()
    assert rows_of(score(files.mined, files.out, sparse=sparse, **QUIET)) == whole
    assert scored == [ROWS[i]["query"] for i in (0, 5, 10, 10, 15)]


def test_parts_of_other_data_or_another_teacher_are_refused(files, sparse, cross_encoder, monkeypatch):
    def dies(model, **settings):
        def scores(pairs):
            raise KeyboardInterrupt

        return scores

    monkeypatch.setattr(distillation, "sparse_scorer", dies)
    with pytest.raises(KeyboardInterrupt):
        score(files.mined, files.out, sparse=sparse, **QUIET)
    with pytest.raises(ValueError, match=r"another call \(teacher was"):
        score(files.mined, files.out, cross_encoder=cross_encoder, **QUIET)
    write_jsonl(files.mined, ROWS[1:])
    with pytest.raises(ValueError, match=r"another call \(data was"):
        score(files.mined, files.out, sparse=sparse, **QUIET)


def test_refusals(files, sparse, checkpoint):
    with pytest.raises(ValueError, match="Give one teacher"):
        score(files.mined, files.out)
    write_jsonl(files.out.with_name("pairs.jsonl"), [{"query": "q", "positive": "p"}])
    with pytest.raises(DataError, match="no negatives for a teacher to compare"):
        score(files.out.with_name("pairs.jsonl"), files.out, sparse=sparse)
    with pytest.raises(ValueError, match="gives 3 numbers a pair, as a classifier does"):
        load_cross_encoder(CrossEncoder(str(checkpoint("bert")), num_labels=3, device="cpu"))
    with pytest.raises(ValueError, match=r"bert holds BertForMaskedLM, no trained cross-encoder: .* random layer"):
        score(files.mined, files.out, cross_encoder=checkpoint("bert"))
    assert not files.out.exists()


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (float("nan"), r"score of 'The quick brown fox jumps' and 'The quick .* is nan: look for NaN"),
        (2.5, r"one score, such as 2\.5, in each of the first 16 rows: there is nothing to learn"),
    ],
)
def test_a_teacher_that_tells_nothing_is_refused(files, checkpoint, bias, message):
    teacher = CrossEncoder(str(checkpoint("bert")), num_labels=1, device="cpu")
    torch.nn.init.zeros_(teacher.model.classifier.weight)
    torch.nn.init.constant_(teacher.model.classifier.bias, bias)
    with pytest.raises(ValueError, match=message):
        score(files.mined, files.out, cross_encoder=teacher, **QUIET)
    assert not files.out.exists()


def test_a_sparse_model_that_is_no_splade_model_is_a_teacher_too(sparse, tmp_path):
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    SparseEncoder(modules=[SparseStaticEmbedding(sparse.tokenizer)]).save_pretrained(str(tmp_path))
    same, other = sparse_scorer(load_sparse(tmp_path))([("paris", "paris"), ("paris", "berlin")])
    assert same > other == 0


def test_the_command_scores_by_a_saved_cross_encoder(files, cross_encoder, tmp_path):
    cross_encoder.save_pretrained(str(tmp_path / "teacher"))
    options = ["--train", str(files.mined), "--output", str(files.out), "--cross-encoder", str(tmp_path / "teacher")]
    result = CliRunner().invoke(app, ["score", *options, "--num-negatives", "1"])
    assert result.exit_code == 0, result.output
    expected = score(files.mined, tmp_path / "again.jsonl", cross_encoder=cross_encoder, num_negatives=1, **QUIET)
    for found, row in zip(rows_of(files.out), rows_of(expected), strict=True):
        assert found["negatives"] == row["negatives"]
        assert found["score"] == pytest.approx(row["score"], abs=1e-5)


def test_a_sparse_teacher_whose_score_overflows_is_an_error(sparse, monkeypatch):
    huge = csr_matrix(np.array([[1e30, 0]], dtype=np.float32))
    monkeypatch.setattr(pair_scores, "encode_texts", lambda *args, **kwargs: huge)
    with pytest.raises(ValueError, match=r"sparse model's score of 'a' and 'b' is inf: look for NaN"):
        sparse_scorer(sparse)([("a", "b")])
