"""The logits are divided exactly, once, whatever is shared; and everything else is refused before a byte changes."""

from __future__ import annotations

import copy
import doctest
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertForMaskedLM, PreTrainedModel

from st_sparse_rescale import rescaling
from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError
from st_sparse_rescale.rescaling import CONFIG_KEY, HeadRescale, recorded_rescale, rescale_mlm_head, validate_k
from tests.tiny_models import ARCHITECTURES, build_model

STRATEGIES = ("weight", "norm")


def run(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Logits of a padded batch and what entered the decoder, in the model's own way."""
    ids = torch.randint(10, 200, (3, 17), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    seen: list[Tensor] = []
    with model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        logits = model.eval()(input_ids=ids, attention_mask=mask).logits
    return seen[0], logits


def matrices(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def share_memory(model: PreTrainedModel) -> bool:
    one, other = matrices(model)
    return one.data_ptr() == other.data_ptr()


def values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the equation


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_weight_is_the_equation(name: str, tied: bool) -> None:
    model = build_model(name, tie_word_embeddings=tied).double()
    head = MLMHead.of(model)
    assert head.tied is share_memory(model) is tied
    inputs, matrix = (weight.clone() for weight in matrices(model))
    bias = torch.zeros(head.vocab_size).double() if head.bias is None else head.bias.clone()
    states, logits = run(model)
    torch.testing.assert_close(logits, states @ matrix.T + bias)

    rescale_mlm_head(model, 3.7)
    new_states, new_logits = run(model)
    torch.testing.assert_close(new_logits, new_states @ (matrix / 3.7).T + bias, rtol=1e-12, atol=1e-12)
    assert torch.equal(new_states, states) is not tied  # the encoder's input follows the tied matrix, and only that
    assert torch.equal(matrices(model)[1], matrix / 3.7)
    assert torch.equal(matrices(model)[0], inputs / 3.7 if tied else inputs)
    assert share_memory(model) is tied
    assert head.bias is None or torch.equal(head.bias, bias)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_norm_divides_the_logits_and_leaves_the_matrix(name: str, tied: bool) -> None:
    model = build_model(name, tie_word_embeddings=tied).double()
    before = values(model)
    _, logits = run(model)
    rescale_mlm_head(model, 3.7, "norm")
    _, new_logits = run(model)
    torch.testing.assert_close(new_logits, logits / 3.7, rtol=1e-12, atol=1e-12)
    assert share_memory(model) is tied
    head = MLMHead.of(model)
    changed = {key for key, value in values(model).items() if not torch.equal(value, before[key])}
    allowed = {head.norm_name, head.decoder_name, head.decoder_name.rpartition(".")[0]}
    assert {key.rpartition(".")[0] for key in changed} <= allowed
    assert f"{head.norm_name}.weight" in changed
    assert head.bias is None or head.bias_name in changed
    assert not any(torch.equal(weight, before[f"{head.decoder_name}.weight"] / 3.7) for weight in matrices(model))


@pytest.mark.parametrize("name", ["bert", "modernbert", "esm"])
@torch.no_grad()
def test_norm_by_a_power_of_two_is_exact_in_float32(name: str) -> None:
    model = build_model(name)
    _, logits = run(model)
    rescale_mlm_head(model, 16, "norm")
    assert torch.equal(run(model)[1], logits / 16)


def test_a_k_below_one_multiplies() -> None:
    model = build_model("bert").double()
    matrix = matrices(model)[1].clone()
    assert rescale_mlm_head(model, 0.25) == HeadRescale(0.25, "weight", "given")
    assert torch.equal(matrices(model)[1], matrix * 4)


# --- ties


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tie_stays_as_it_was(name: str, strategy: str, tied: bool, tmp_path: Path) -> None:
    model = build_model(name, tie_word_embeddings=tied)
    rescale_mlm_head(model, 4, strategy)
    assert share_memory(model) is tied
    rescaled = values(model)

    model.tie_weights()
    assert share_memory(model) is tied
    assert same(values(model), rescaled)

    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert share_memory(loaded) is tied
    assert same(values(loaded), rescaled)
    assert torch.equal(run(loaded)[1], run(model)[1])

    copied = copy.deepcopy(model)
    assert share_memory(copied) is tied
    assert same(values(copied), rescaled)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model)[1].square().mean().backward()
    optimizer.step()
    assert share_memory(model) is tied
    assert torch.equal(*matrices(model)) is tied
    assert not torch.equal(matrices(model)[1], matrices(loaded)[1])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_can_be_added_after_rescaling(name: str, tied: bool) -> None:
    model = build_model(name, tie_word_embeddings=tied)
    head = MLMHead.of(model)
    rescale_mlm_head(model, 4)
    size = head.vocab_size
    rows = [weight.clone() for weight in matrices(model)]
    bias = None if head.bias is None else head.bias.clone()
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    assert share_memory(model) is tied
    assert all(torch.equal(weight[:size], old) for weight, old in zip(matrices(model), rows, strict=True))
    if name == "esm":  # transformers leaves the bias outside the decoder as short as it was, and the model broken
        with pytest.raises(RuntimeError, match="must match"):
            run(model)
        with pytest.raises(UnsupportedHeadError, match="must match"):
            MLMHead.of(model)
        return
    new = MLMHead.of(model)
    assert new.vocab_size == size + 8
    if bias is None:
        assert new.bias is None
    else:
        assert new.bias.shape == (size + 8,)
        assert torch.equal(new.bias[:size], bias)
    assert recorded_rescale(model).k == 4


def test_both_names_of_a_tied_matrix_hold_the_matrix_divided_once() -> None:
    model = build_model("bert").double()
    before = values(model)
    rescale_mlm_head(model, 4)
    names = ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"]
    twice = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        assert torch.equal(model.state_dict()[name], before[name] / 4)
        assert torch.equal(twice[name], before[name] / 4)


# --- once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_is_recorded_and_never_divided_twice(strategy: str, tmp_path: Path) -> None:
    model = build_model("modernbert")
    assert recorded_rescale(model) is recorded_rescale(model.config) is None
    expected = HeadRescale(16.0, strategy, "the paper's value for ModernBERT")
    assert rescale_mlm_head(model, 16, strategy, reason="the paper's value for ModernBERT") == expected
    rescaled = values(model)
    assert recorded_rescale(model) == expected

    for _ in range(2):  # save, load, rescale, and again
        model.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())[CONFIG_KEY]
        assert written == {"k": 16.0, "strategy": strategy, "reason": "the paper's value for ModernBERT"}
        assert recorded_rescale(AutoConfig.from_pretrained(tmp_path)) == expected
        model = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert rescale_mlm_head(model, 16.0, strategy, reason="another") == expected
        assert same(values(model), rescaled)
    assert rescale_mlm_head(copy.deepcopy(model), 16, strategy) == expected

    other = STRATEGIES[1 - STRATEGIES.index(strategy)]
    for k, wanted in ((8, strategy), (1, strategy), (16, other)):
        with pytest.raises(ValueError, match=rf"already divided by k=16 with strategy='{strategy}'.*original checkpo"):
            rescale_mlm_head(model, k, wanted)
    assert same(values(model), rescaled)


def test_the_record_is_of_one_model_not_of_all_that_share_its_config() -> None:
    one = build_model("bert")
    other = BertForMaskedLM(one.config)
    matrix = matrices(other)[1].detach().clone()
    assert rescale_mlm_head(one, 4) is not None
    assert one.bert.config is one.config
    assert recorded_rescale(other) is None
    assert rescale_mlm_head(other, 4) is not None
    assert torch.equal(matrices(other)[1].detach(), matrix / 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "deberta-v2-new-head"])
def test_one_leaves_every_byte_alone(name: str, strategy: str) -> None:
    model = build_model(name)
    before, config = values(model), model.config.to_json_string()
    assert rescale_mlm_head(model, 1, strategy) is None
    assert same(values(model), before)
    assert model.config.to_json_string() == config
    assert recorded_rescale(model) is None


@pytest.mark.parametrize(
    "record",
    [
        16,
        {"k": 16.0},
        {"k": -1.0, "strategy": "weight", "reason": ""},
        {"k": "auto", "strategy": "weight", "reason": ""},
        {"k": 2.0, "strategy": "scale", "reason": ""},
        {"k": 2.0, "strategy": "weight", "reason": "", "more": 1},
    ],
    ids=str,
)
def test_a_record_that_nobody_wrote_is_refused(record: Any) -> None:
    model = build_model("bert")
    setattr(model.config, CONFIG_KEY, record)
    with pytest.raises(ValueError, match=r"mlm_head_rescale=.*no record of a rescale.*original checkpoint"):
        rescale_mlm_head(model, 2)


# --- bad input


@pytest.mark.parametrize(
    ("k", "error", "reason"),
    [
        (0, ValueError, "k=0 is not positive"),
        (-0.0, ValueError, "k=-0.0 is not positive"),
        (-2, ValueError, "k=-2 is not positive"),
        (float("nan"), ValueError, "k=nan is not finite"),
        (float("inf"), ValueError, "k=inf is not finite"),
        (10**400, ValueError, "is not finite"),
        (True, TypeError, "k=True is a bool"),
        (np.True_, TypeError, "is a bool"),
        ("16", ValueError, "k='16' is a string"),
        ("Auto", ValueError, "k='Auto' is a string"),
        (None, TypeError, "k=None is a NoneType"),
        ([16], TypeError, "is a list"),
        (2j, TypeError, "is a complex"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_k_that_cannot_be_is_refused(k: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        validate_k(k)
    assert "give a positive number" in str(caught.value)
    model = build_model("bert")
    before = values(model)
    with pytest.raises(error, match=reason):
        rescale_mlm_head(model, k)
    assert same(values(model), before)


@pytest.mark.parametrize(
    ("k", "expected"),
    [(16, 16.0), (0.5, 0.5), (np.float32(2), 2.0), (np.int64(3), 3.0), (Fraction(1, 4), 0.25), ("auto", "auto")],
)
def test_a_k_that_can_be_is_a_float(k: Any, expected: float | str) -> None:
    assert validate_k(k) == expected
    assert type(validate_k(k)) is type(expected)


def test_other_bad_input_is_refused() -> None:
    model = build_model("bert")
    with pytest.raises(ValueError, match="strategy='wieght' is unknown"):
        rescale_mlm_head(model, 2, "wieght")
    with pytest.raises(ValueError, match="measuring the head on texts"):
        rescale_mlm_head(model, "auto")
    with pytest.raises(UnsupportedHeadError, match=r"BertModel.*no MLM head"):
        rescale_mlm_head(AutoModel.from_config(model.config), 2)
    with pytest.raises(UnsupportedHeadError, match="meta device"):
        rescale_mlm_head(copy.deepcopy(model).to("meta"), 2)
    with pytest.raises(UnsupportedHeadError, match=r"Linear.*not a transformers model"):
        rescale_mlm_head(torch.nn.Linear(2, 3), 2)
    with pytest.raises(UnsupportedHeadError, match=r"object.*not a PyTorch model"):
        rescale_mlm_head(object(), 2)
    model = build_model("modernbert")
    model.head.norm = torch.nn.LayerNorm(32, elementwise_affine=False)
    with pytest.raises(UnsupportedHeadError, match=r'ModernBertForMaskedLM.*strategy="norm".*Use strategy="weight"'):
        rescale_mlm_head(model, 2, "norm")
    assert rescale_mlm_head(model, 2, "weight") is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failed_check_restores_the_head(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("bert")
    before = values(model)
    monkeypatch.setattr(rescaling, "agree", lambda *_: False)
    with pytest.raises(UnsupportedHeadError, match=r"BertForMaskedLM by k=4.*restored"):
        rescale_mlm_head(model, 4, strategy)
    assert same(values(model), before)
    assert recorded_rescale(model) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_check_catches_a_wrong_division(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rescaling._divide
    for wrong in (lambda part, k: None, lambda part, k: right(part, k * k), lambda part, k: right(part, k * 1.02)):
        model = build_model("bert")
        before = values(model)
        monkeypatch.setattr(rescaling, "_divide", wrong)
        with pytest.raises(UnsupportedHeadError, match="did not give the logits it should"):
            rescale_mlm_head(model, 4, strategy)
        assert same(values(model), before)


# --- half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [16, 3.7])
@pytest.mark.parametrize("name", ["bert", "modernbert", "esm"])
def test_half_precision_is_divided_in_float32_and_rounded_once(name: str, dtype: torch.dtype, k: float) -> None:
    model = build_model(name).to(dtype)
    matrix = matrices(model)[1].detach().clone()
    rescale_mlm_head(model, k)
    now = matrices(model)[1].detach()
    assert now.dtype == dtype
    assert torch.equal(now, (matrix.float() / k).to(dtype))
    if k == 16 and dtype == torch.bfloat16:
        assert torch.equal(now * 16, matrix)  # nothing is lost


@pytest.mark.parametrize(
    ("k", "reason"), [(1e7, r"% of the weights would become zero"), (1e-6, "weights would become infinite")]
)
def test_float16_that_cannot_hold_the_result_is_refused(k: float, reason: str) -> None:
    model = build_model("bert").to(torch.float16)
    before = values(model)
    with pytest.raises(ValueError, match=rf"out of the range of float16: .*{reason}.*float32"):
        rescale_mlm_head(model, k)
    assert same(values(model), before)
    assert recorded_rescale(model) is None


def test_where_float32_cannot_hold_the_result_only_another_k_helps() -> None:
    with pytest.raises(ValueError, match=r"range of float32: .* of the weights would become zero; use a k closer to 1"):
        rescale_mlm_head(build_model("bert"), 1e50)


# --- inside sentence-transformers


def test_accepts_a_sparse_encoder(checkpoint: Callable[[str], Path]) -> None:
    transformer = Transformer(str(checkpoint("bert")), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    matrix = matrices(transformer.model)[1].detach().clone()
    assert recorded_rescale(model) is None
    assert rescale_mlm_head(model, 4) == recorded_rescale(model) == recorded_rescale(transformer.model)
    assert torch.equal(matrices(transformer.model)[1].detach(), matrix / 4)


def test_refuses_a_sparse_encoder_without_one_masked_lm(checkpoint: Callable[[str], Path]) -> None:
    dense = Transformer(str(checkpoint("bert")))
    with pytest.raises(UnsupportedHeadError, match=r"BertModel.*no MLM head"):
        rescale_mlm_head(SparseEncoder(modules=[dense, SpladePooling(embedding_dimension=32)], device="cpu"), 4)
    with pytest.raises(ValueError, match="holds 0 transformers, not one"):
        rescale_mlm_head(SparseEncoder(modules=[SpladePooling(embedding_dimension=32)], device="cpu"), 4)


def test_the_examples_run() -> None:
    results = doctest.testmod(rescaling)
    assert results.attempted > 3
    assert results.failed == 0
