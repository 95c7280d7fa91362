"""Measuring a head: hand-computed values, equivalence with models that are really rescaled, and the rule for k."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from sentence_transformers.sparse_encoder.modules import SpladePooling as StockPooling
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoModelForMaskedLM, GPT2Config, GPT2LMHeadModel

from st_sparse_rescale import HeadReport, MLMHead, SpladePooling, choose_k, measure_head, rescale_mlm_head
from st_sparse_rescale.calibration import choice, logits, measure, read_texts, sample, shipped_texts, start
from st_sparse_rescale.calibration.measure import KS, MAX_TEXTS, MAX_TOKENS
from st_sparse_rescale.calibration.start import describe_logits, describe_vectors
from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.heads import UnsupportedHeadError
from tests.tiny_models import ARCHITECTURES, TEXTS, build_checkpoint, build_tokenizer

Checkpoint = Callable[[str], Path]
SPLADE_TINY = Path(__file__).parents[2] / "shared" / "models" / "splade-tiny"


@pytest.fixture(scope="module")
def reports() -> dict[str, HeadReport]:
    """Of the shipped backbones, on the shipped texts."""
    return {name: measure_head(backbone_path(name)) for name in ("bert-mini", "modernbert-mini")}


def transformer_of(path: Path | str) -> Transformer:
    return Transformer(str(path), transformer_task="fill-mask")


def stock_vectors(transformer: Transformer) -> torch.Tensor:
    model = SparseEncoder(modules=[transformer, StockPooling()], device="cpu")
    return model.encode(list(TEXTS), convert_to_sparse_tensor=False)


def states_of(transformer: Transformer) -> torch.Tensor:
    """What enters the decoder, all tokens of all texts, by way of transformers alone."""
    entered = []
    decoder = transformer.model.get_output_embeddings()
    hook = decoder.register_forward_pre_hook(lambda _, args: entered.append(args[0][0]))
    with hook, torch.no_grad():
        for text in TEXTS:
            transformer.model(**transformer.tokenizer(text, return_tensors="pt"))
    return torch.cat(entered)


# The numbers


def test_vectors_are_described_as_by_hand() -> None:
    """Three texts over four terms: scores 1, 4 and 8 between different texts."""
    vectors = torch.tensor([[1.0, 0.0, 2.0, 0.0], [1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]], dtype=torch.float64)
    found = describe_vectors(vectors)
    a, b, c = 1.0, 4.0, 0.0  # scores of texts 1 and 2, 1 and 3, 2 and 3
    rows = [(a, b), (a, c), (b, c)]
    assert found["active_dims"] == pytest.approx(5 / 3)
    assert found["empty"] == 0
    assert found["mean_weight"] == pytest.approx(9 / 12)
    assert found["rms_weight"] == pytest.approx(math.sqrt((1 + 4 + 1 + 9 + 4) / 12))
    assert found["max_weight"] == pytest.approx((2 + 3 + 2) / 3)
    assert found["cosine"] == pytest.approx((a / math.sqrt(5 * 10) + b / math.sqrt(5 * 4) + 0) / 3)
    assert found["self_score"] == pytest.approx((5 + 10 + 4) / 3)
    assert found["pair_score"] == pytest.approx((a + b + c) / 3)
    assert found["score_std"] == pytest.approx(np.mean([abs(x - y) / 2 for x, y in rows]))
    logistic = [1 / (1 + math.exp(-(x - y))) for x, y in rows]
    assert found["entropy"] == pytest.approx(np.mean([-p * math.log(p) - (1 - p) * math.log(1 - p) for p in logistic]))
    losses = [math.log(math.exp(x) + math.exp(y)) - (x + y) / 2 for x, y in rows]
    assert found["loss"] == pytest.approx(np.mean(losses))
    assert found["flops"] == pytest.approx((4 + 9 + 16) / 9)


def test_equal_scores_are_chance() -> None:
    found = describe_vectors(torch.ones(5, 7))
    assert found["loss"] == pytest.approx(math.log(4))
    assert found["entropy"] == pytest.approx(math.log(4))
    assert (found["score_std"], found["cosine"]) == (0, pytest.approx(1))


def test_an_empty_text_has_no_cosine_and_counts_as_empty() -> None:
    found = describe_vectors(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    assert found["empty"] == 0.5
    assert found["cosine"] == pytest.approx(1 / 6)


def test_the_gradient_is_that_of_finite_differences() -> None:
    maxima = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(x: torch.Tensor) -> float:
        return describe_vectors(x.relu().log1p())["loss"]

    eps = 1e-6
    differences = []
    for i in range(maxima.numel()):
        step = torch.zeros_like(maxima)
        step.view(-1)[i] = eps
        differences.append((loss(maxima + step) - loss(maxima - step)) / (2 * eps))
    assert describe_logits(maxima)["gradient_norm"] == pytest.approx(np.linalg.norm(differences), rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "eurobert"])  # with a bias and without
def test_the_distribution_of_logits_is_that_of_all_of_them(
    checkpoint: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "TILE", 7)  # divides no vocabulary
    transformer = transformer_of(checkpoint(name))
    states = states_of(transformer)
    head = MLMHead.of(transformer.model)
    found = measure_head(transformer, TEXTS).logits
    every = head.logits(states).detach().double().numpy().ravel()
    assert found.count == every.size == sum(found.histogram)
    assert found.mean == pytest.approx(every.mean(), rel=1e-4)
    assert found.std == pytest.approx(every.std(), rel=1e-4)
    assert (found.minimum, found.maximum) == (
        pytest.approx(every.min(), abs=1e-4),
        pytest.approx(every.max(), abs=1e-4),
    )
    assert found.negative == pytest.approx((every < 0).mean(), abs=1e-4)
    for share, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(every, float(share)), abs=found.resolution)
    assert found.resolution < 0.02
    assert found.edges[0] == pytest.approx(every.min(), abs=found.resolution)
    counts, _ = np.histogram(every, len(found.histogram), found.edges)
    assert np.abs(counts - found.histogram).sum() < 1e-3 * every.size  # up to rounding at the edges


def test_facts_of_a_head_are_those_of_its_parameters(checkpoint: Checkpoint) -> None:
    model = AutoModelForMaskedLM.from_pretrained(checkpoint("bert"))
    report = measure_head(checkpoint("bert"), TEXTS)
    matrix = model.cls.predictions.decoder.weight.detach().double()
    assert report.architecture == "BertForMaskedLM"
    assert (report.decoder, report.bias) == ("cls.predictions.decoder", "cls.predictions.decoder.bias")
    assert report.norm == "cls.predictions.transform.LayerNorm"
    assert report.tied
    assert report.parameters == model.num_parameters()
    assert report.head_parameters == matrix.numel() + len(matrix)
    assert (report.vocab_size, report.hidden_size) == matrix.shape
    assert report.row_norm_mean == pytest.approx(matrix.norm(dim=1).mean().item(), rel=1e-5)
    assert report.row_norm_std == pytest.approx(matrix.norm(dim=1).std(correction=0).item(), rel=1e-4)
    assert report.frobenius == pytest.approx(matrix.norm().item(), rel=1e-5)
    assert report.weight_rms == pytest.approx(matrix.square().mean().sqrt().item(), rel=1e-5)
    assert report.norm_gain == pytest.approx(model.cls.predictions.transform.LayerNorm.weight.abs().mean().item())
    bias = model.cls.predictions.decoder.bias
    assert report.bias_range == (bias.min().item(), bias.max().item())
    assert report.state_norm == pytest.approx(
        states_of(transformer_of(checkpoint("bert"))).norm(dim=1).mean().item(), rel=1e-4
    )
    assert (report.texts, report.tokens) == (len(TEXTS), len(states_of(transformer_of(checkpoint("bert")))))


# Equivalence with models that are really rescaled


@pytest.mark.parametrize("name", ["bert", "albert", "roberta", "modernbert", "eurobert", "esm"])
@pytest.mark.parametrize(("k", "strategy"), [(1, "weight"), (4, "weight"), (64, "weight"), (1, "norm"), (8, "norm")])
def test_a_start_is_that_of_a_rescaled_model(checkpoint: Checkpoint, name: str, k: float, strategy: Any) -> None:
    original, rescaled = transformer_of(checkpoint(name)), transformer_of(checkpoint(name))
    rescale_mlm_head(rescaled.model, k, strategy)
    found = dataclasses.asdict(measure_head(original, TEXTS).at(strategy)[k])
    expected = describe_vectors(stock_vectors(rescaled))
    for quantity in expected.keys() - {"gradient_norm"}:
        assert found[quantity] == pytest.approx(expected[quantity], rel=2e-3, abs=1e-5), quantity
    before, after = states_of(original), states_of(rescaled)
    if strategy == "norm":
        after = after * k  # the same direction
    cosines = cosine_similarity(before - before.mean(dim=0), after - after.mean(dim=0), dim=1)
    assert found["state_cosine"] == pytest.approx(cosines.mean().item(), abs=1e-4)


def test_only_a_tied_matrix_changes_what_the_encoder_reads(checkpoint: Checkpoint, tmp_path: Path) -> None:
    untied = build_checkpoint("bert", tmp_path / "untied", tie_word_embeddings=False)
    free, shared = measure_head(untied, TEXTS), measure_head(checkpoint("bert"), TEXTS)
    assert not free.tied
    for k in KS:
        assert (free.at("weight")[k].input_cosine, free.at("weight")[k].state_cosine) == (1, 1)
        assert (shared.at("norm")[k].input_cosine, shared.at("norm")[k].state_cosine) == (1, 1)
    cosines = [shared.at("weight")[k].input_cosine for k in KS]
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[0] == 1 > 0.96 > cosines[-1]


def test_the_input_of_the_encoder_is_the_first_of_its_hidden_states(checkpoint: Checkpoint) -> None:
    original, rescaled = transformer_of(checkpoint("bert")), transformer_of(checkpoint("bert"))
    rescale_mlm_head(rescaled.model, 4)
    inputs = []
    for transformer in (original, rescaled):
        tokens = []
        for text in TEXTS:
            with torch.no_grad():
                features = transformer.tokenizer(text, return_tensors="pt")
                tokens.append(transformer.model(**features, output_hidden_states=True).hidden_states[0][0])
        inputs.append(torch.cat(tokens))
    one, other = (x - x.mean(dim=0) for x in inputs)
    expected = cosine_similarity(one, other, dim=1).mean().item()
    assert measure_head(original, TEXTS).at("weight")[4].input_cosine == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_measured(checkpoint: Checkpoint, name: str) -> None:
    report = measure_head(checkpoint(name), TEXTS[:4])
    assert [start.k for start in report.starts] == [*KS, *(KS if report.norm else ())]
    assert all(start.input_cosine is not None for start in report.starts)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_the_model_is_left_as_it_was_to_the_byte(checkpoint: Checkpoint, name: str) -> None:
    transformer = transformer_of(checkpoint(name))
    transformer.train()
    before = copy.deepcopy(transformer.state_dict())
    addresses = {name: parameter.data_ptr() for name, parameter in transformer.named_parameters()}
    config = copy.deepcopy(transformer.model.config.to_dict())
    state = torch.get_rng_state()
    measure_head(transformer, TEXTS)
    assert torch.equal(torch.get_rng_state(), state)
    after = transformer.state_dict()
    assert before.keys() == after.keys()
    assert all(before[key].numpy().tobytes() == after[key].numpy().tobytes() for key in before)
    assert addresses == {name: parameter.data_ptr() for name, parameter in transformer.named_parameters()}
    assert transformer.model.config.to_dict() == config
    assert transformer.unpad_inputs is None
    for module in transformer.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in transformer.parameters())


def test_equal_texts_give_equal_reports(checkpoint: Checkpoint) -> None:
    assert measure_head(checkpoint("modernbert"), TEXTS) == measure_head(checkpoint("modernbert"), list(TEXTS))


def test_bfloat16_is_measured_in_float32(checkpoint: Checkpoint) -> None:
    half = Transformer(
        str(checkpoint("modernbert")), transformer_task="fill-mask", model_kwargs={"dtype": torch.bfloat16}
    )
    full = measure_head(checkpoint("modernbert"), TEXTS)
    found = measure_head(half, TEXTS)
    assert found.as_is.rms_weight == pytest.approx(full.as_is.rms_weight, rel=0.02)
    assert found.at("weight")[64].rms_weight == pytest.approx(full.at("weight")[64].rms_weight, rel=0.02)


def test_a_report_survives_json(checkpoint: Checkpoint, tmp_path: Path) -> None:
    transformer = transformer_of(checkpoint("eurobert"))  # no bias
    rescale_mlm_head(transformer.model, 4, reason="because")
    for report in (measure_head(checkpoint("bert"), TEXTS), measure_head(transformer, TEXTS)):
        assert HeadReport.from_json(report.to_json()) == report
        assert HeadReport.from_json(json.dumps(json.loads(report.to_json()))).at("weight") == report.at("weight")


# SPLADE models


@pytest.mark.parametrize("pooling", [{}, {"pooling_strategy": "sum"}, {"activation_function": "log1p_relu"}])
def test_a_splade_model_is_described_by_its_own_vectors(checkpoint: Checkpoint, pooling: dict[str, str]) -> None:
    model = SparseEncoder(modules=[transformer_of(checkpoint("bert")), StockPooling(**pooling)], device="cpu")
    report = measure_head(model, TEXTS)
    assert report.trained
    assert len(report.starts) == 1
    expected = describe_vectors(model.encode(list(TEXTS), convert_to_sparse_tensor=False))
    found = dataclasses.asdict(report.as_is)
    for quantity in expected.keys() - {"gradient_norm"}:
        assert found[quantity] == pytest.approx(expected[quantity], rel=1e-4), quantity


def test_our_saved_model_and_its_fused_form_are_measured_alike(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from st_sparse_rescale import RescaledMLMTransformer

    ours = SparseEncoder(modules=[RescaledMLMTransformer(checkpoint("bert"), k=4), SpladePooling()], device="cpu")
    ours.save_pretrained(str(tmp_path))
    fused, saved = measure_head(ours, TEXTS), measure_head(tmp_path, TEXTS)
    assert (fused.trained, saved.trained) == (True, True)
    assert saved.rescaled is not None
    assert (saved.rescaled.k, saved.rescaled.reason) == (4, "given")
    assert fused.logits.mean == pytest.approx(saved.logits.mean, rel=1e-5)
    assert fused.as_is.rms_weight == pytest.approx(saved.as_is.rms_weight, rel=1e-5)


def test_a_router_is_judged_by_its_documents(checkpoint: Checkpoint) -> None:
    documents = [transformer_of(checkpoint("bert")), StockPooling()]
    queries = SparseStaticEmbedding(documents[0].tokenizer)
    router = SparseEncoder(modules=[Router.for_query_document([queries], documents)], device="cpu")
    report = measure_head(router, TEXTS)
    plain = measure_head(SparseEncoder(modules=documents, device="cpu"), TEXTS)
    assert report.as_is == plain.as_is
    assert report.decoder == plain.decoder


def with_bias(path: Path, target: Path, bias: float) -> Path:
    """A SPLADE checkpoint whose logits are all shifted."""
    model = SparseEncoder(modules=[transformer_of(path), StockPooling()], device="cpu")
    with torch.no_grad():
        MLMHead.of(model[0].model).bias.add_(bias)
    model.save_pretrained(str(target))
    return target


@pytest.mark.parametrize(
    ("bias", "verdict", "words"),
    [(-100, "dead", "no active dimension"), (100, "dead", "same vector"), (0.5, "dense", "of the vocabulary")],
)
def test_a_splade_model_is_dead_or_dense(
    checkpoint: Checkpoint, tmp_path: Path, bias: float, verdict: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MAX_COSINE", 0.995)  # random models hardly tell texts apart
    chosen = choose_k(measure_head(with_bias(checkpoint("esm"), tmp_path / "shifted", bias), TEXTS))
    assert (chosen.verdict, chosen.k) == (verdict, 1)
    assert words in chosen.headline


@pytest.mark.skipif(not SPLADE_TINY.exists(), reason="needs the trained SPLADE checkpoint in shared/models")
def test_a_trained_splade_model_is_healthy(tmp_path: Path) -> None:
    texts = shipped_texts()[:32]
    as_backbone = choose_k(measure_head(SPLADE_TINY, texts))
    model = SparseEncoder(str(SPLADE_TINY), device="cpu")
    model.save_pretrained(str(tmp_path))
    report = measure_head(tmp_path, texts)
    assert report.trained
    for chosen in (as_backbone, choose_k(report)):
        assert (chosen.verdict, chosen.k) == ("healthy", 1)
    assert report.active_share < 0.01


# What is refused


def test_what_has_no_trained_head_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    encoder, dense, gpt = tmp_path / "encoder", tmp_path / "dense", tmp_path / "gpt"
    AutoModel.from_pretrained(checkpoint("bert")).save_pretrained(encoder)
    build_tokenizer("bert").save_pretrained(encoder)
    SentenceTransformer(str(encoder), device="cpu").save_pretrained(str(dense))
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=1)).save_pretrained(gpt)
    for path in (encoder, dense, gpt):
        with pytest.raises(UnsupportedHeadError, match=path.name):
            measure_head(path, TEXTS)


def test_a_model_without_its_tokenizer_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match="BertForMaskedLM cannot be measured, since its tokenizer is unknown"):
        measure_head(AutoModelForMaskedLM.from_pretrained(checkpoint("bert")), TEXTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        (["one", "two"], ValueError, "2 texts are too few"),
        (["one", " ", "three"], ValueError, "text 2 is blank"),
        (["one", "two", 3], TypeError, "text 3 is a int"),
        ("one text", TypeError, "texts is one string"),
    ],
)
def test_bad_texts_are_refused_before_anything_is_loaded(texts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure_head("no/such-checkpoint", texts)


def test_logits_that_are_not_finite_are_refused(checkpoint: Checkpoint) -> None:
    transformer = transformer_of(checkpoint("bert"))
    with torch.no_grad():
        transformer.model.bert.encoder.layer[0].output.dense.bias[0] = math.nan
    with pytest.raises(ValueError, match=r"not finite|not what enters"):
        measure_head(transformer, TEXTS)


# Texts


def test_the_shipped_texts_are_as_many_as_are_measured_and_all_different() -> None:
    texts = shipped_texts()
    assert len(set(texts)) == len(texts) == MAX_TEXTS
    assert all(text == text.strip() for text in texts)
    assert sum(any(ord(letter) > 0x24F for letter in text) for text in texts) >= 12  # other scripts than Latin


def test_a_sample_is_the_same_in_every_call_and_in_order() -> None:
    items = list(range(1000))
    drawn = sample(items, 50)
    assert drawn == sample(items, 50) == sorted(set(drawn))
    assert len(drawn) == 50
    assert sample(items[:50], 50) == items[:50]
    assert {i % 2 for i in drawn} == {0, 1}  # no stride


def test_texts_are_sampled_and_cut(checkpoint: Checkpoint) -> None:
    many = [f"{TEXTS[i % len(TEXTS)]} {i}" for i in range(300)]
    report = measure_head(checkpoint("bert"), many)
    assert report.texts == MAX_TEXTS
    assert measure_head(checkpoint("bert"), sample(many, MAX_TEXTS)) == report
    long = [f"{text} " * 50 for text in TEXTS]
    assert measure_head(checkpoint("bert"), long).tokens == MAX_TOKENS * len(TEXTS)
    short = Transformer(str(checkpoint("bert")), transformer_task="fill-mask", max_seq_length=8)
    assert measure_head(short, long).tokens == 8 * len(TEXTS)


def test_texts_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\u2028still one\n\n  two \n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"_id": "d1", "query": "q", "positive": "p", "score": 3}\n', encoding="utf-8")
    (tmp_path / "a.csv").write_text("id,text\n1,first\n2,second\n", encoding="utf-8")
    assert read_texts(tmp_path / "a.txt") == ["one\u2028still one", "two"]
    assert read_texts(tmp_path / "a.jsonl") == ["q", "p"]
    assert read_texts(tmp_path / "a.csv") == ["first", "second"]
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "a.pdf").write_text("x")
    (tmp_path / "bad.jsonl").write_text("{")
    for name, message in (("empty.txt", "holds no texts"), ("a.pdf", "must be one of"), ("bad.jsonl", "line 1")):
        with pytest.raises(ValueError, match=message) as error:
            read_texts(tmp_path / name)
        assert name in str(error.value)


# The rule


def changed(report: HeadReport, by_k: dict[float, dict[str, float]], **fields: Any) -> HeadReport:
    """A report with some quantities replaced, under both strategies."""
    starts = tuple(dataclasses.replace(start, **by_k.get(start.k, {})) for start in report.starts)
    return dataclasses.replace(report, starts=starts, **fields)


def sized(report: HeadReport, rms: float, cosines: dict[float, float] | None = None) -> HeadReport:
    """A report whose weights shrink as k grows, and whose hidden states turn under "weight"."""
    report = changed(report, {k: {"rms_weight": rms / k, "score_std": 10.0, "empty": 0.0} for k in KS})
    starts = tuple(
        dataclasses.replace(start, state_cosine=(cosines or {}).get(start.k, 1.0))
        if start.strategy == "weight"
        else start
        for start in report.starts
    )
    return dataclasses.replace(report, starts=starts)


@pytest.mark.parametrize(
    ("rms", "cosines", "k", "verdict"),
    [
        (0.10, {}, 1, "healthy"),
        (0.14, {}, 1, "healthy"),
        (0.15, {}, 2, "scale problem"),
        (1.00, {}, 8, "scale problem"),
        (1.00, {8: 0.94, 16: 0.9, 32: 0.8, 64: 0.8}, 4, "scale problem"),
        (0.30, {2: 0.9, 4: 0.96}, 1, "healthy"),
        (3.00, dict.fromkeys(KS[1:], 0.9), 1, "scale problem"),
        (20.0, {}, 64, "scale problem"),
    ],
)
def test_k_is_as_large_as_the_scale_asks_and_the_encoder_bears(
    reports: dict[str, HeadReport], rms: float, cosines: dict[float, float], k: float, verdict: str
) -> None:
    report = sized(reports["bert-mini"], rms, cosines)
    chosen = choose_k(report)
    assert (chosen.k, chosen.verdict) == (k, verdict)
    assert chosen.headline.startswith(f"{verdict}: ")
    assert f"k={k}" in chosen.headline
    assert f"{rms:.2g}" in chosen.reason
    assert choose_k(HeadReport.from_json(report.to_json())) == chosen
    free = choose_k(report, "norm")  # leaves the encoder alone
    assert free.k == min((k for k in KS if rms / k <= choice.MAX_RMS_WEIGHT), default=64)
    hint = f'strategy="norm" would leave the encoder alone, and take k={free.k:g}, '
    hinted = any(line.startswith(hint) for line in chosen.evidence)
    assert hinted == (free.k > k and rms > choice.HEALTHY_RMS_WEIGHT)
    if cosines:
        assert f"k={2 * k} would disturb the encoder" in chosen.reason


def test_what_no_k_mends_is_named(reports: dict[str, HeadReport]) -> None:
    report = reports["modernbert-mini"]
    silent = choose_k(changed(report, {1: {"empty": 0.9}}))
    assert (silent.verdict, silent.k) == ("dead", 1)
    flat = choose_k(changed(report, {1: {"score_std": 0.05}}))
    assert (flat.verdict, flat.k) == ("too small", 1)
    assert flat.headline.startswith("too small: leave k=1; ")


def test_a_strategy_that_the_head_does_not_allow_is_refused(reports: dict[str, HeadReport]) -> None:
    starts = tuple(start for start in reports["bert-mini"].starts if start.strategy == "weight")
    with pytest.raises(ValueError, match='strategy="norm" needs a norm before the head'):
        choose_k(dataclasses.replace(reports["bert-mini"], starts=starts), "norm")


def test_a_recorded_rescale_is_kept(checkpoint: Checkpoint) -> None:
    transformer = transformer_of(checkpoint("modernbert"))
    rescale_mlm_head(transformer.model, 3, reason="because")
    report = measure_head(transformer, TEXTS)
    assert len(report.starts) == 1
    chosen = choose_k(report)
    assert chosen.k == 3
    assert chosen.headline.startswith("healthy: leave k=3; the checkpoint records it")


def test_the_shipped_backbones_are_the_healthy_and_the_sick_head(reports: dict[str, HeadReport]) -> None:
    healthy, sick = choose_k(reports["bert-mini"]), choose_k(reports["modernbert-mini"])
    assert (healthy.k, healthy.verdict) == (1, "healthy")
    assert (sick.k, sick.verdict) == (16, "scale problem")
    assert sick.headline.endswith("use k=16")
    assert "16 times as large relative to the head's matrix" in sick.evidence[-1]


@pytest.mark.parametrize("part", [slice(0, 32), slice(32, 64)])  # English and code; other languages
def test_k_hardly_depends_on_the_texts(part: slice) -> None:
    texts = shipped_texts()[part]
    assert choose_k(measure_head(backbone_path("bert-mini"), texts)).k == 1
    assert choose_k(measure_head(backbone_path("modernbert-mini"), texts)).k == 16


def test_a_head_with_every_row_20_times_as_long_is_a_scale_problem(reports: dict[str, HeadReport]) -> None:
    transformer = transformer_of(backbone_path("bert-mini"))
    with torch.no_grad():
        transformer.model.get_output_embeddings().weight.mul_(20)
    report = measure_head(transformer)
    chosen = choose_k(report)
    assert chosen.verdict == "scale problem"
    assert chosen.k > 1
    assert report.as_is.mean_weight > 2 * reports["bert-mini"].as_is.mean_weight
    rescale_mlm_head(transformer.model, chosen.k, reason=chosen.reason)
    assert measure_head(transformer).as_is.mean_weight < 0.9 * report.as_is.mean_weight


def test_all_dimensions_active_is_said(checkpoint: Checkpoint) -> None:
    chosen = choose_k(measure_head(checkpoint("modernbert"), TEXTS))
    assert chosen.verdict == "scale problem"
    assert chosen.evidence[0].startswith("all of the 512 dimensions are active in a text")


# The examples


@pytest.mark.parametrize("module", [measure, choice, start, logits])
def test_docstring_examples_run(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
