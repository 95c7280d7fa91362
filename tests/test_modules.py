"""The two modules against stock sentence-transformers, against hand-computed values, and against bad checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder import modules as stock
from transformers import AutoModel, AutoModelForMaskedLM, GPT2Config, GPT2LMHeadModel

import st_sparse_rescale
from st_sparse_rescale import compatibility
from st_sparse_rescale.heads import UnsupportedHeadError
from st_sparse_rescale.modules import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.rescaling import recorded_rescale
from tests.tiny_models import ARCHITECTURES, TEXTS, build_checkpoint, build_tokenizer

BACKBONES = ("bert", "distilbert", "albert", "gte", "roberta", "modernbert", "ettin")
Checkpoint = Callable[[str], Path]


def ours(path: Path, *, k: float | None = None, strategy: Any = "weight", **pooling: Any) -> SparseEncoder:
    transformer = RescaledMLMTransformer(str(path), k=k, strategy=strategy)
    return SparseEncoder(modules=[transformer, SpladePooling(**pooling)], device="cpu")


def stocks(path: Path, **pooling: Any) -> SparseEncoder:
    transformer = Transformer(str(path), transformer_task="fill-mask")
    return SparseEncoder(modules=[transformer, stock.SpladePooling(**pooling)], device="cpu")


def encode(model: SparseEncoder, texts: list[str] | tuple[str, ...] = TEXTS) -> torch.Tensor:
    return model.encode(list(texts), convert_to_sparse_tensor=False)


# The model as a whole


@pytest.mark.parametrize("name", BACKBONES)
def test_k_1_is_stock_bit_for_bit(checkpoint: Checkpoint, name: str) -> None:
    expected = encode(stocks(checkpoint(name)))
    assert expected.count_nonzero() > 0
    assert torch.equal(encode(ours(checkpoint(name), k=1)), expected)


@pytest.mark.parametrize("name", BACKBONES)
def test_k_16_is_a_stock_model_divided_by_hand(checkpoint: Checkpoint, name: str) -> None:
    by_hand = stocks(checkpoint(name))
    with torch.no_grad():
        by_hand.transformers_model.get_output_embeddings().weight.div_(16)
    rescaled = encode(ours(checkpoint(name), k=16))
    assert torch.equal(rescaled, encode(by_hand))
    assert not torch.equal(rescaled, encode(stocks(checkpoint(name))))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("mask", [False, True])
def test_a_padded_text_equals_the_text_alone(checkpoint: Checkpoint, name: str, mask: bool) -> None:
    model = ours(checkpoint(name), mask_special_tokens=mask)
    texts = [TEXTS[0], "water", f"{TEXTS[1]} {TEXTS[2]} {TEXTS[3]}"]
    alone = torch.cat([encode(model, [text]) for text in texts])
    torch.testing.assert_close(encode(model, texts), alone, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_stock_too(checkpoint: Checkpoint) -> None:
    kwargs = {"model_kwargs": {"dtype": torch.bfloat16}}
    transformer = RescaledMLMTransformer(str(checkpoint("bert")), k=16, **kwargs)
    model = SparseEncoder(modules=[transformer, SpladePooling()])
    by_hand = SparseEncoder(
        modules=[Transformer(str(checkpoint("bert")), transformer_task="fill-mask", **kwargs), stock.SpladePooling()]
    )
    with torch.no_grad():
        by_hand.transformers_model.get_output_embeddings().weight.div_(16)  # a power of two: exact in bfloat16
    assert encode(model).dtype == torch.bfloat16
    assert torch.equal(encode(model), encode(by_hand))


@pytest.mark.parametrize("pooling", [SpladePooling, stock.SpladePooling])
def test_the_dimension_is_the_vocabulary_size_from_the_start(checkpoint: Checkpoint, pooling: type) -> None:
    transformer = RescaledMLMTransformer(str(checkpoint("modernbert")), k=16)  # a vocabulary rounded up to 64
    model = SparseEncoder(modules=[transformer, pooling()])
    dimension = model.get_embedding_dimension()
    assert dimension == model[0].get_embedding_dimension() == model.config.vocab_size
    assert encode(model).shape[1] == dimension


def test_the_dimension_follows_a_resized_vocabulary(checkpoint: Checkpoint) -> None:
    model = ours(checkpoint("bert"), k=4)
    before = model.get_embedding_dimension()
    model.tokenizer.add_tokens([f"<new{i}>" for i in range(8)])
    model.transformers_model.resize_token_embeddings(len(model.tokenizer))
    assert encode(model).shape[1] == model.get_embedding_dimension() == before + 8


def test_repr_and_config_tell_k_strategy_and_reason(checkpoint: Checkpoint) -> None:
    model = ours(checkpoint("bert"), k=4, strategy="norm")
    assert recorded_rescale(model[0].model).k == 4
    assert model.config.mlm_head_rescale["strategy"] == "norm"
    for setting in ("'k': 4", "'strategy': 'norm'", "'reason': 'given'"):
        assert setting in repr(model[0])
    assert "'k': 1.0" in repr(ours(checkpoint("bert"))[0])
    assert "'mask_special_tokens': True" in repr(ours(checkpoint("bert"), mask_special_tokens=True)[1])


def test_the_first_512_tokens_of_600_make_the_vector(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = ours(checkpoint("bert"), k=4)
    assert model.max_seq_length == 512
    long = "water " * 600
    kept = model.tokenizer.decode(model.tokenizer(long, truncation=True).input_ids, skip_special_tokens=True)
    assert len(model.tokenizer(kept).input_ids) == 512
    assert torch.equal(encode(model, [long]), encode(model, [kept]))

    model.max_seq_length = 8
    shorter = encode(model, [long, TEXTS[0]])
    model.save_pretrained(str(tmp_path))
    reloaded = SparseEncoder(str(tmp_path))
    assert reloaded.max_seq_length == 8
    assert torch.equal(encode(reloaded, [long, TEXTS[0]]), shorter)
    again = RescaledMLMTransformer(str(checkpoint("bert")), k=4, max_seq_length=8)
    assert torch.equal(encode(SparseEncoder(modules=[again, SpladePooling()]), [long, TEXTS[0]]), shorter)


def test_prompts_decode_sparsity_and_max_active_dims(checkpoint: Checkpoint) -> None:
    prompts = {"query": "question: ", "document": "text: "}
    models = [ours(checkpoint("bert"), k=1), stocks(checkpoint("bert"))]
    for model in models:
        model.prompts = prompts
    mine, theirs = models
    queries, documents = list(TEXTS[:4]), list(TEXTS[4:])
    query, document = mine.encode_query(queries), mine.encode_document(documents)
    assert torch.equal(query.to_dense(), theirs.encode_query(queries).to_dense())
    assert torch.equal(document.to_dense(), theirs.encode_document(documents).to_dense())
    assert not torch.equal(query.to_dense(), encode(mine, queries))  # the prompt counts
    assert torch.equal(mine.similarity(query, document), theirs.similarity(query, document))
    assert mine.decode(query, top_k=5) == theirs.decode(query, top_k=5)
    assert mine.sparsity(query) == theirs.sparsity(query)
    pruned = mine.encode(documents, max_active_dims=7)
    assert torch.equal(pruned.to_dense(), theirs.encode(documents, max_active_dims=7).to_dense())
    assert mine.sparsity(pruned)["active_dims"] <= 7


def test_dot_products_are_what_is_saved(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = ours(checkpoint("bert"), k=4)
    vectors = encode(model)
    assert (vectors == 0).any()  # exact zeros, and nothing normalises
    assert not torch.allclose(vectors.norm(dim=1), torch.ones(len(vectors)))
    model.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "config_sentence_transformers.json").read_text())["similarity_fn_name"] == "dot"
    cosine = SparseEncoder(
        modules=[RescaledMLMTransformer(str(checkpoint("bert"))), SpladePooling()], similarity_fn_name="cosine"
    )
    assert cosine.similarity_fn_name == "cosine"


# The pooling


def batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 11, 37, generator=generator)
    mask = (torch.arange(11) < torch.tensor([11, 1, 6, 3]).unsqueeze(1)).long()
    return {"token_embeddings": logits.to(dtype), "attention_mask": mask}


def flattened(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    real = features["attention_mask"].bool()
    bounds = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
    flat = {"token_embeddings": features["token_embeddings"][real][None], "cu_seq_lens_q": bounds}
    return flat | ({"input_ids": features["input_ids"][real][None]} if "input_ids" in features else {})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 0, 4, 100])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("layout", [dict, flattened])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_is_stock_bit_for_bit(
    training: bool, chunk_size: int | None, activation: Any, strategy: Any, layout: Callable, dtype: torch.dtype
) -> None:
    results = []
    for pooling_class in (SpladePooling, stock.SpladePooling):
        features = layout(batch(dtype))
        logits = features["token_embeddings"].requires_grad_(training)
        before = logits.detach().clone()
        pooling = pooling_class(strategy, activation, chunk_size=chunk_size).train(training)
        pooled = pooling(features)["sentence_embedding"]
        assert torch.equal(logits, before)  # the input is not modified
        if training:
            pooled.sin().sum().backward()
        results.append((pooled, logits.grad, pooling.embedding_dimension))
    (mine, my_gradient, my_dimension), (theirs, their_gradient, their_dimension) = results
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    assert my_dimension == their_dimension == 37
    if training:
        assert torch.equal(my_gradient, their_gradient)


def test_pooling_has_a_gradient_in_evaluation_mode_too() -> None:
    features = batch()
    features["token_embeddings"].requires_grad_()
    SpladePooling().eval()(features)["sentence_embedding"].sum().backward()
    assert features["token_embeddings"].grad.count_nonzero() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU, autocast leaves log1p as it is")
@pytest.mark.parametrize("training", [False, True])
def test_pooling_is_stock_under_autocast_without_gradients(training: bool) -> None:
    """As gradient caching runs it first: the second run, with gradients, must find the same numbers."""
    features = {name: tensor.cuda() for name, tensor in batch(torch.bfloat16).items()}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        mine, theirs = (
            pooling().train(training)(dict(features))["sentence_embedding"]
            for pooling in (SpladePooling, stock.SpladePooling)
        )
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_padding_never_counts_whatever_its_logits(value: float, strategy: Any, chunk_size: int | None) -> None:
    clean, dirty = batch(), batch()
    dirty["token_embeddings"][dirty["attention_mask"] == 0] = value
    expected = stock.SpladePooling(strategy, chunk_size=chunk_size)(clean)["sentence_embedding"]
    assert torch.equal(SpladePooling(strategy, chunk_size=chunk_size)(dict(dirty))["sentence_embedding"], expected)
    assert stock.SpladePooling(strategy)(dirty)["sentence_embedding"].isnan().any()  # once this fails, ours can go


def test_an_infinite_logit_of_a_real_token_stays_infinite() -> None:
    features = batch()
    features["token_embeddings"][0, 0, 0] = float("inf")
    assert SpladePooling()(features)["sentence_embedding"][0, 0] == float("inf")


@pytest.mark.parametrize(
    "bad", [{"pooling_strategy": "mean"}, {"activation_function": "gelu"}, {"mask_special_tokens": "yes"}]
)
def test_pooling_refuses_what_stock_refuses(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SpladePooling(**bad)


# Special tokens


def logits_of(model: SparseEncoder, text: str) -> tuple[list[int], torch.Tensor]:
    encoded = model.tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        return encoded.input_ids[0].tolist(), model.transformers_model(**encoded).logits[0]


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_special_tokens_are_masked_on_both_sides(checkpoint: Checkpoint, name: str) -> None:
    plain, masked = ours(checkpoint(name)), ours(checkpoint(name), mask_special_tokens=True)
    for text in TEXTS[:4]:
        _, logits = logits_of(plain, text)
        expected = logits[1:-1].relu().log1p().amax(0)  # all but the first and the last token
        for vector in (masked.encode(text), masked.encode_query(text), masked.encode_document(text)):
            torch.testing.assert_close(vector.to_dense(), expected)
        assert not torch.allclose(plain.encode(text).to_dense(), expected)
    assert masked.encode("").to_dense().count_nonzero() == 0


def test_flattened_and_padded_inputs_are_masked_alike(checkpoint: Checkpoint) -> None:
    pooling = ours(checkpoint("bert"), mask_special_tokens=True)[1]
    features = batch() | {"input_ids": torch.full((4, 11), 50)}
    features["input_ids"][:, 0] = 2  # [CLS]
    expected = features["token_embeddings"].clone()
    expected[:, 0] = 0
    expected = SpladePooling()({**features, "token_embeddings": expected})["sentence_embedding"]
    assert torch.equal(pooling(dict(features))["sentence_embedding"], expected)
    assert torch.equal(pooling(flattened(features))["sentence_embedding"], expected)


@pytest.mark.parametrize("mask", [False, True])
def test_a_pad_token_that_is_a_real_word_counts_as_a_word(checkpoint: Checkpoint, tmp_path: Path, mask: bool) -> None:
    expected = encode(ours(checkpoint("bert"), mask_special_tokens=mask), ["water", TEXTS[0]])
    path = shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer = build_tokenizer("bert")
    tokenizer.pad_token = "water"
    tokenizer.save_pretrained(path)
    same = ours(path, mask_special_tokens=mask)
    assert same.tokenizer.pad_token_id == same.tokenizer.convert_tokens_to_ids("water")
    torch.testing.assert_close(encode(same, ["water", TEXTS[0]]), expected, atol=1e-5, rtol=1e-5)


def test_a_pad_token_that_is_the_end_token_is_masked_as_the_end_token(checkpoint: Checkpoint, tmp_path: Path) -> None:
    expected = encode(ours(checkpoint("bert"), mask_special_tokens=True), ["water", TEXTS[0]])
    path = shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer = build_tokenizer("bert")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    same = encode(ours(path, mask_special_tokens=True), ["water", TEXTS[0]])
    torch.testing.assert_close(same, expected, atol=1e-5, rtol=1e-5)


def test_an_unknown_word_is_not_masked(checkpoint: Checkpoint) -> None:
    model = ours(checkpoint("bert"), mask_special_tokens=True)
    ids, logits = logits_of(model, "water \N{SNOWMAN}")
    assert ids[2] == model.tokenizer.unk_token_id
    torch.testing.assert_close(model.encode("water \N{SNOWMAN}").to_dense(), logits[1:-1].relu().log1p().amax(0))


def test_masking_asks_for_special_tokens(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on_model_ready"):
        SpladePooling(mask_special_tokens=True)(batch() | {"input_ids": torch.zeros(4, 11, dtype=torch.long)})
    path = shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    with pytest.raises(ValueError, match="no special tokens around a text"):
        ours(path, mask_special_tokens=True)


# What the transformer takes and refuses


@pytest.mark.parametrize("k", [0, -1, float("nan"), float("inf"), True, "16"])
def test_bad_k_is_refused_before_anything_is_loaded(k: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="k"):
        RescaledMLMTransformer("no/such-checkpoint", k=k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "both"}, "strategy='both'"),
        ({"k": 2, "calibration_texts": ["water"]}, 'k="auto"'),
        ({"k": 2, "backend": "onnx"}, "backend='onnx'"),
        ({"k": 2, "transformer_task": "feature-extraction"}, "feature-extraction"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RescaledMLMTransformer("no/such-checkpoint", **arguments)


def test_the_recorded_rescale_holds(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = ours(checkpoint("bert"), k=4)
    expected = encode(model)
    model.save_pretrained(str(tmp_path))
    for k in (None, 4, 4.0):
        assert torch.equal(encode(ours(tmp_path, k=k)), expected)
    for arguments in ({"k": 2}, {"k": 1}, {"k": 4, "strategy": "norm"}):
        with pytest.raises(ValueError, match="4"):
            ours(tmp_path, **arguments)


@pytest.mark.parametrize("k", [None, 1, 16])
def test_a_checkpoint_without_mlm_head_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path, k: Any) -> None:
    encoder, dense = tmp_path / "encoder", tmp_path / "dense"
    AutoModel.from_pretrained(checkpoint("bert")).save_pretrained(encoder)
    build_tokenizer("bert").save_pretrained(encoder)
    SentenceTransformer(str(encoder), device="cpu").save_pretrained(str(dense))
    for path in (encoder, dense):
        with pytest.raises(UnsupportedHeadError, match=r"(?s)(encoder|dense)'.*transform\.dense\.weight"):
            RescaledMLMTransformer(str(path), k=k)


def test_a_model_that_is_no_masked_lm_is_refused_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "gpt")
    with pytest.raises(UnsupportedHeadError, match=r"gpt' cannot be loaded as a masked language model.*GPT2Config"):
        RescaledMLMTransformer(str(tmp_path / "gpt"), k=2)


def without(path: Path, target: Path, key: str) -> str:
    shutil.copytree(path, target)
    weights = load_file(target / "model.safetensors")
    del weights[key]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert", "cls.predictions.transform.LayerNorm.bias"),
        ("roberta", "lm_head.dense.weight"),
        ("modernbert", "decoder.bias"),
        ("modernbert", "head.norm.weight"),
        ("bert", "bert.embeddings.word_embeddings.weight"),  # tied: without it there is no decoder either
    ],
)
@pytest.mark.parametrize("k", [1, 16])
def test_missing_head_weights_are_named(checkpoint: Checkpoint, tmp_path: Path, name: str, key: str, k: float) -> None:
    path = without(checkpoint(name), tmp_path / "cut", key)
    with pytest.raises(UnsupportedHeadError, match=key):
        RescaledMLMTransformer(path, k=k)


def test_a_missing_decoder_is_no_fault_where_it_is_tied(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert not any(key.endswith("decoder.weight") for key in load_file(checkpoint("modernbert") / "model.safetensors"))
    RescaledMLMTransformer(str(checkpoint("modernbert")), k=16)
    untied = build_checkpoint("modernbert", tmp_path / "untied", tie_word_embeddings=False)
    RescaledMLMTransformer(str(untied), k=16)
    with pytest.raises(UnsupportedHeadError, match=r"decoder\.weight"):
        RescaledMLMTransformer(without(untied, tmp_path / "cut", "decoder.weight"), k=16)


def test_a_quantised_checkpoint_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    quantisation = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(UnsupportedHeadError, match="quantised"):
        RescaledMLMTransformer(str(checkpoint("bert")), k=2, model_kwargs={"quantization_config": quantisation})
    path = shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation.to_dict()}))
    with pytest.raises(UnsupportedHeadError, match="quantised"):
        RescaledMLMTransformer(str(path), k=2)


def test_trust_remote_code_passes_through(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("bert"), tmp_path / "custom_bert")
    (path / "custom_bert.py").write_text(
        "from transformers import BertConfig, BertForMaskedLM\n"
        "class CustomBertConfig(BertConfig):\n    model_type = 'custom_bert'\n"
        "class CustomBertForMaskedLM(BertForMaskedLM):\n    config_class = CustomBertConfig\n"
    )
    auto_map = {
        "AutoConfig": "custom_bert.CustomBertConfig",
        "AutoModelForMaskedLM": "custom_bert.CustomBertForMaskedLM",
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "custom_bert", "auto_map": auto_map}))
    trusted = {f"{part}_kwargs": {"trust_remote_code": True} for part in ("model", "processor", "config")}
    model = SparseEncoder(modules=[RescaledMLMTransformer(str(path), k=4, **trusted), SpladePooling()])
    assert type(model.transformers_model).__name__ == "CustomBertForMaskedLM"
    assert torch.equal(encode(model), encode(ours(checkpoint("bert"), k=4)))
    with pytest.raises(ValueError, match="trust_remote_code"):
        RescaledMLMTransformer(str(path), k=4)


def test_a_folder_with_safetensors_alone_loads(checkpoint: Checkpoint) -> None:
    assert not list(checkpoint("bert").glob("*.bin"))
    RescaledMLMTransformer(str(checkpoint("bert")), k=4)


# What we rely on upstream


def test_the_load_report_of_the_meta_device_is_that_of_a_load(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = without(checkpoint("bert"), tmp_path / "cut", "cls.predictions.transform.dense.bias")
    reports = []
    for kwargs in ({}, {"device_map": "meta"}):
        model, report = AutoModelForMaskedLM.from_pretrained(path, output_loading_info=True, **kwargs)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        reports.append((report["missing_keys"], report["mismatched_keys"]))
    assert reports[0] == reports[1] == ({"cls.predictions.transform.dense.bias"}, set())


@pytest.mark.parametrize("found", ["5.5.1", None])
def test_old_companions_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(package: str) -> str:
        if package == "sentence-transformers" and found is None:
            raise compatibility.PackageNotFoundError
        return found if package == "sentence-transformers" else "5.0.0"

    monkeypatch.setattr(compatibility, "version", version)
    with pytest.raises(ImportError, match=r"sentence-transformers>=6\.0, found (5\.5\.1|none)") as error:
        compatibility.require_companions()
    assert "\n" not in str(error.value)


def test_old_companions_are_refused_before_they_are_imported() -> None:
    script = (
        "import importlib.metadata as metadata, sys\n"
        "metadata.version = lambda package: '5.1.0'\n"
        "try:\n    import st_sparse_rescale\n"
        "except ImportError as error:\n    print(error)\n"
        "print([name for name in ('torch', 'transformers', 'sentence_transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    line, imported = output.splitlines()
    assert line.startswith("st-sparse-rescale needs sentence-transformers>=6.0, found 5.1.0: pip install -U")
    assert imported == "[]"


def test_public_names() -> None:
    for name in ("RescaledMLMTransformer", "SpladePooling", "MLMHead", "rescale_mlm_head", "UnsupportedHeadError"):
        assert name in st_sparse_rescale.__all__
        assert hasattr(st_sparse_rescale, name)
