"""Our modules among the other parts of sentence-transformers: Router, adapters, process pools, ONNX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

from st_sparse_rescale.modules import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.rescaling import recorded_rescale
from tests.tiny_models import TEXTS

QUERIES, DOCUMENTS = list(TEXTS[:5]), list(TEXTS[5:])
Checkpoint = Callable[[str], Path]


def splade(path: Path | str, *, k: float | None = 4, **pooling: Any) -> SparseEncoder:
    return SparseEncoder(modules=[RescaledMLMTransformer(str(path), k=k), SpladePooling(**pooling)], device="cpu")


def documents_of(model: SparseEncoder) -> torch.Tensor:
    return model.encode_document(DOCUMENTS).to_dense()


# Router


@pytest.fixture
def inference_free(checkpoint: Checkpoint) -> SparseEncoder:
    """Static weights for the queries, our modules for the documents."""
    document = [RescaledMLMTransformer(str(checkpoint("bert")), k=4), SpladePooling()]
    tokenizer = document[0].tokenizer
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(0))
    query = [SparseStaticEmbedding(tokenizer, weight=weight)]
    return SparseEncoder(modules=[Router.for_query_document(query, document)], device="cpu")


def test_the_document_side_alone_is_rescaled(checkpoint: Checkpoint, inference_free: SparseEncoder) -> None:
    dimension = splade(checkpoint("bert")).get_embedding_dimension()
    assert inference_free.get_embedding_dimension() == dimension
    assert torch.equal(documents_of(inference_free), documents_of(splade(checkpoint("bert"))))
    static = inference_free[0].sub_modules["query"][0]
    ids = static.tokenizer(QUERIES[0], add_special_tokens=False).input_ids
    query = inference_free.encode_query(QUERIES[0]).to_dense()
    assert query.nonzero().flatten().tolist() == sorted(set(ids))
    assert torch.equal(query[ids], static.weight[ids])  # as given, not divided


def test_a_router_trains_and_its_checkpoint_is_stock(inference_free: SparseEncoder, tmp_path: Path) -> None:
    before, data = documents_of(inference_free), Dataset.from_dict({"q": QUERIES, "d": DOCUMENTS[:5]})
    loss = SpladeLoss(inference_free, SparseMultipleNegativesRankingLoss(inference_free), 1e-3, 1e-3)
    arguments = SparseEncoderTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        save_steps=2,
        router_mapping={"q": "query", "d": "document"},
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    SparseEncoderTrainer(inference_free, arguments, train_dataset=data, loss=loss).train()
    after = documents_of(inference_free)
    assert not torch.equal(after, before)

    loaded = SparseEncoder(str(tmp_path / "checkpoint-2"), device="cpu")
    modules = [type(module) for module in loaded[0].sub_modules["document"]]
    assert [class_.__module__.split(".")[0] for class_ in modules] == ["sentence_transformers"] * 2
    assert torch.equal(documents_of(loaded), after)
    assert torch.equal(loaded.encode_query(QUERIES).to_dense(), inference_free.encode_query(QUERIES).to_dense())
    assert recorded_rescale(loaded[0].sub_modules["document"][0].model).k == 4


def test_each_route_has_a_k_of_its_own(checkpoint: Checkpoint) -> None:
    routes = [
        [RescaledMLMTransformer(str(checkpoint("modernbert")), k=k), SpladePooling(mask_special_tokens=True)]
        for k in (2, 16)
    ]
    model = SparseEncoder(modules=[Router.for_query_document(*routes)], device="cpu")
    sides = [splade(checkpoint("modernbert"), k=k, mask_special_tokens=True) for k in (2, 16)]
    assert torch.equal(model.encode_query(QUERIES).to_dense(), sides[0].encode_query(QUERIES).to_dense())
    assert torch.equal(documents_of(model), documents_of(sides[1]))


# Tying


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_tied_checkpoint_holds_one_matrix_and_reloads_tied(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    model = splade(checkpoint(name), k=16)
    model.save_pretrained(str(tmp_path))
    vocabulary = model.get_embedding_dimension()
    matrices = [w for w in load_file(tmp_path / "model.safetensors").values() if w.ndim == 2 and len(w) == vocabulary]
    assert len(matrices) == 1
    for loaded in (model, SparseEncoder(str(tmp_path), device="cpu"), splade(tmp_path, k=16)):
        masked_lm = loaded.transformers_model
        decoder, embeddings = masked_lm.get_output_embeddings().weight, masked_lm.get_input_embeddings().weight
        assert decoder.data_ptr() == embeddings.data_ptr()
        assert torch.equal(decoder.norm(dim=1), matrices[0].norm(dim=1))


# Adapters


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A LoRA on the attention that does something before any training."""
    peft = pytest.importorskip("peft")
    # transformers may ask for a newer peft than there is; what is used here is older than both.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.13.0")
    return peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)


def test_an_adapter_on_a_saved_rescaled_base(checkpoint: Checkpoint, tmp_path: Path, lora: Any) -> None:
    splade(checkpoint("bert"), mask_special_tokens=True).save_pretrained(str(tmp_path / "base"))
    model = splade(tmp_path / "base", k=None, mask_special_tokens=True)
    plain = documents_of(model)
    model.add_adapter(lora)
    adapted = documents_of(model)
    assert not torch.equal(adapted, plain)
    masked_lm = model.transformers_model
    assert masked_lm.get_output_embeddings().weight is masked_lm.get_input_embeddings().weight

    model.save_pretrained(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert torch.equal(documents_of(SparseEncoder(str(tmp_path / "adapter"), device="cpu")), adapted)
    for k in (None, 4):
        assert torch.equal(documents_of(splade(tmp_path / "adapter", k=k, mask_special_tokens=True)), adapted)
    with pytest.raises(ValueError, match="4"):
        splade(tmp_path / "adapter", k=8)
    anew = splade(tmp_path / "base", k=4, mask_special_tokens=True)
    anew.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(documents_of(anew), adapted)


def test_an_adapter_on_a_base_that_was_never_saved_is_refused_at_once(
    checkpoint: Checkpoint, tmp_path: Path, lora: Any
) -> None:
    model = splade(checkpoint("bert"))
    with pytest.raises(ValueError, match="Save the rescaled model first"):
        model.add_adapter(lora)
    with pytest.raises(ValueError, match="Save the rescaled model first"):
        model.save_pretrained(str(tmp_path / "adapter"))

    untouched = splade(checkpoint("bert"), k=1)
    untouched.add_adapter(lora)
    untouched.save_pretrained(str(tmp_path / "adapter"))  # k=1: the base on disk is the one in memory
    assert torch.equal(documents_of(SparseEncoder(str(tmp_path / "adapter"))), documents_of(untouched))
    with pytest.raises(ValueError, match="Save the rescaled model first"):
        splade(tmp_path / "adapter", k=4)


def test_an_adapter_on_a_headless_base_is_refused(checkpoint: Checkpoint, tmp_path: Path, lora: Any) -> None:
    from transformers import AutoModel

    untouched = splade(checkpoint("bert"), k=1)
    untouched.add_adapter(lora)
    AutoModel.from_pretrained(checkpoint("bert")).save_pretrained(tmp_path / "encoder")
    lora.base_model_name_or_path = str(tmp_path / "encoder")
    untouched.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"encoder' holds no trained MLM head"):
        splade(tmp_path / "adapter", k=1)


# Other processes, other runtimes


@pytest.mark.slow
def test_two_processes_give_the_vectors_of_one_in_the_order_of_the_texts(checkpoint: Checkpoint) -> None:
    model = splade(checkpoint("bert"), mask_special_tokens=True)
    texts = [text[: 10 + 7 * i] for i, text in enumerate(TEXTS)] + list(TEXTS)
    expected = torch.stack([model.encode(text).to_dense() for text in texts])
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        vectors = model.encode(texts, pool=pool, chunk_size=9).to_dense()
        queries = model.encode_query(texts, pool=pool, chunk_size=9).to_dense()
    finally:
        model.stop_multi_process_pool(pool)
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(queries, vectors)


@pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("onnxscript", "onnxruntime")),
    reason="ONNX export needs onnxscript and onnxruntime: pip install onnxscript onnxruntime",
)
def test_the_onnx_export_of_a_saved_model_gives_the_same_vectors(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import onnxruntime

    splade(checkpoint("bert"), k=16, mask_special_tokens=True).save_pretrained(str(tmp_path))
    model = SparseEncoder(str(tmp_path), device="cpu")

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked_lm = model.transformers_model

        def forward(self, **features: torch.Tensor) -> torch.Tensor:
            return self.masked_lm(**features).logits

    features = dict(model.tokenizer(DOCUMENTS, padding=True, truncation=True, return_tensors="pt"))
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(Logits().eval(), kwargs=features, f=file, input_names=list(features), dynamo=True)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {name: values.numpy() for name, values in features.items()})
    features["token_embeddings"] = torch.from_numpy(logits)
    for module in list(model)[1:]:
        features = module(features)
    torch.testing.assert_close(features["sentence_embedding"], documents_of(model), atol=1e-5, rtol=1e-5)
