"""Queries without a model: IDF by hand, training, stock checkpoints, kills, and k on the document side only."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.evaluation import SparseIndex
from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.rescaling import recorded_rescale
from st_sparse_rescale.training import Recipe, RecipeError, idf_query_encoder, train
from st_sparse_rescale.training.train import build_model, resolve
from tests.tiny_models import TEXTS, build_checkpoint, build_tokenizer

ROWS = [
    {"query": " ".join(text.split()[2:6]), "positive": text, "negative": TEXTS[i - 1]} for i, text in enumerate(TEXTS)
]
WORDS = " ".join(TEXTS)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    """A tiny ModernBERT: no dropout, and a vocabulary that is rounded up from its tokenizer's."""
    return build_checkpoint("modernbert", tmp_path_factory.mktemp("backbone") / "modernbert")


@pytest.fixture
def recipe(backbone, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)

    def make(**settings) -> Recipe:
        defaults = {"model": str(backbone), "train": str(tmp_path / "train.jsonl"), "k": 16, "max_steps": 4}
        defaults |= {"batch_size": 4, "max_seq_length": 24, "learning_rate": 1e-3, "logging_steps": 1}
        return Recipe.load("inference-free", **(defaults | settings))

    return make


def queries_of(model: SparseEncoder) -> torch.Tensor:
    return model.encode_query(list(TEXTS)).to_dense()


def documents_of(model: SparseEncoder) -> torch.Tensor:
    return model.encode_document(list(TEXTS)).to_dense()


# --- the query side ---


def test_the_weights_are_the_idf_of_the_documents():
    tokenizer = build_tokenizer("bert")
    queries = idf_query_encoder(tokenizer, ["paris river paris", "river bridge", "river"])
    ids = dict(
        zip(("river", "paris", "water"), tokenizer.convert_tokens_to_ids(["river", "paris", "water"]), strict=True)
    )
    assert queries.weight[ids["river"]].item() == pytest.approx(math.log(1 + 0.5 / 3.5))
    assert queries.weight[ids["paris"]].item() == pytest.approx(math.log(1 + 2.5 / 1.5))  # once a document
    assert queries.weight[ids["water"]].item() == pytest.approx(math.log(1 + 3.5 / 0.5))  # in none
    assert not queries.weight[tokenizer.all_special_ids].any()
    assert not queries.weight.requires_grad
    assert idf_query_encoder(tokenizer, ["paris"], trained=True).weight.requires_grad


def test_a_tokenizer_with_gaps_is_refused():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 5}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="has 3 tokens but ids up to 5"):
        idf_query_encoder(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"), ["a b"], 8)


def test_a_query_is_its_terms_each_once_with_its_weight():
    tokenizer = build_tokenizer("bert")
    queries = idf_query_encoder(tokenizer, TEXTS)
    vector = SparseEncoder(modules=[queries]).encode_query("paris paris river 漢字").to_dense()
    expected = torch.zeros_like(vector)
    for id in tokenizer.convert_tokens_to_ids(["paris", "river"]):
        expected[id] = queries.weight[id]
    assert torch.equal(vector, expected)  # what is unknown matches nothing


def test_filler_tokens_make_up_for_a_rounded_vocabulary_and_match_nothing():
    tokenizer = build_tokenizer("modernbert")
    known = len(tokenizer.get_vocab())
    queries = idf_query_encoder(tokenizer, TEXTS, known + 7)
    assert len(queries.tokenizer.get_vocab()) == queries.num_dimensions == known + 7
    assert not queries.weight[known:].any()
    assert len(tokenizer.get_vocab()) == known  # the given one is as it was
    with pytest.raises(ValueError, match=f"dimension is 5, but the tokenizer knows {known} tokens"):
        idf_query_encoder(tokenizer, TEXTS, 5)
    with pytest.raises(ValueError, match="There are no documents"):
        idf_query_encoder(tokenizer, [])


# --- training ---


def test_documents_are_encoded_by_the_rescaled_model_and_queries_by_none(recipe, backbone):
    made = resolve(recipe())
    model = build_model(made, TEXTS)
    assert isinstance(model[0], Router)
    modules = [RescaledMLMTransformer(str(backbone), k=16, max_seq_length=24), SpladePooling()]
    symmetric = SparseEncoder(modules=modules)
    torch.testing.assert_close(documents_of(model), documents_of(symmetric))
    assert model.get_embedding_dimension() == symmetric.get_embedding_dimension()
    assert model.max_seq_length == 24
    [cut] = model.tokenizer([WORDS], truncation=True, add_special_tokens=False)["input_ids"]
    assert model.encode_query(WORDS).to_dense().count_nonzero() == len(set(cut)) <= 24
    other_k = build_model(resolve(recipe(k=2)), TEXTS)
    assert torch.equal(queries_of(model), queries_of(other_k))
    assert not torch.allclose(documents_of(model), documents_of(other_k))


def test_training_leaves_a_stock_checkpoint(recipe, tmp_path):
    made = recipe()
    before = build_model(resolve(made), TEXTS)
    result = train(made, tmp_path / "out", progress_bar=False)
    loaded = SparseEncoder(str(result.folder))
    assert type(loaded) is SparseEncoder
    routes = {name: [type(module).__name__ for module in route] for name, route in loaded[0].sub_modules.items()}
    assert routes == {"query": ["SparseStaticEmbedding"], "document": ["Transformer", "SpladePooling"]}
    assert all(
        type(m).__module__.startswith(("sentence_transformers", "torch", "transformers")) for m in loaded.modules()
    )
    assert torch.equal(queries_of(loaded), queries_of(result.model))
    torch.testing.assert_close(documents_of(loaded), documents_of(result.model))
    assert recorded_rescale(loaded).k == 16
    assert loaded.similarity_fn_name == "dot"
    # The documents were trained, the frozen queries were not.
    assert torch.equal(queries_of(loaded), queries_of(before))
    assert not torch.allclose(documents_of(loaded), documents_of(before))
    logged = [record for record in result.history if "loss" in record]
    assert all(record["query_regularizer_loss"] == 0 for record in logged)
    assert logged[-1]["document_regularizer_loss"] > 0
    assert all(record["query_active_dims"] < 24 < record["document_active_dims"] for record in logged)


def test_the_index_and_the_evaluation_take_it(recipe, tmp_path):
    result = train(recipe(max_steps=1), tmp_path / "out", progress_bar=False)
    index = SparseIndex.from_embeddings(result.model.encode_document(list(TEXTS)), [str(i) for i in range(len(TEXTS))])
    (hits,) = index.search(result.model.encode_query([TEXTS[3]]), top_k=3)
    scores = queries_of(result.model)[3] @ documents_of(result.model).T
    assert [score for _, score in hits] == pytest.approx(scores.topk(3).values.tolist(), rel=1e-5)


def test_trained_query_weights_follow_their_own_rate_and_never_fall_below_zero(recipe, tmp_path):
    """Terms of every document start near 0, where a step would take them below."""
    result = train(recipe(query_learning_rate=0.5, max_steps=6), tmp_path / "out", progress_bar=False)
    before = build_model(resolve(recipe()), [row["positive"] for row in ROWS])
    (trained,) = [m.weight for m in result.model.modules() if isinstance(m, SparseStaticEmbedding)]
    (start,) = [m.weight for m in before.modules() if isinstance(m, SparseStaticEmbedding)]
    assert (trained - start).abs().max() > 0.3  # far more than six steps of 1e-3
    assert trained.min() == 0
    assert start[trained == 0].max() > 0
    SparseIndex.from_embeddings(result.model.encode_query(list(TEXTS)), list(map(str, range(len(TEXTS)))))


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_killed_training_ends_alike(recipe, tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, "query_learning_rate": 1e-2, "regularizer_warmup": 1.0}
    whole = train(recipe(**settings), tmp_path / "whole", progress_bar=False)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(**settings), tmp_path / "out", callbacks=[Kill()], progress_bar=False)
    resumed = train(recipe(**settings), tmp_path / "out", progress_bar=False)
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_rate_for_query_weights_that_are_not_there_is_refused():
    with pytest.raises(RecipeError, match=r"query_learning_rate is 0\.001, but with query_encoder mlm"):
        Recipe.load("paper", query_learning_rate=1e-3)


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_whole_batch(recipe, tmp_path):
    shared = {"max_steps": 3, "save_steps": 3, "regularizer_warmup": 0.3, "query_learning_rate": 1e-3}
    # A text that stands in two rows would be kept out of a batch of 8, but not out of two of 4.
    shared |= {"num_negatives": 0}
    one = train(recipe(batch_size=8, **shared), tmp_path / "one", progress_bar=False)
    recipe(batch_size=4, **shared).save(tmp_path / "two.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "st_sparse_rescale.cli", "train", "--config", "two.yaml", "--output", "two"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "two" / "model" / "training_log.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, log) if "loss" in record]
    assert losses == pytest.approx([record["loss"] for record in one.history if "loss" in record], rel=1e-3)
    two = SparseEncoder(str(tmp_path / "two" / "model"))
    torch.testing.assert_close(queries_of(two), queries_of(one.model), rtol=1e-2, atol=1e-2)
