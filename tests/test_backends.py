"""Other ways to run a saved model: int8 in torch, and sentence-transformers' ONNX and OpenVINO backends."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sentence_transformers import SparseEncoder
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as QuantizedLinear
from torch.ao.quantization import quantize_dynamic

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.modules.hand_over import HandOverDecoder, handing_over
from tests.tiny_models import TEXTS

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "backends.py"


@pytest.fixture
def model(checkpoint) -> SparseEncoder:
    modules = [RescaledMLMTransformer(str(checkpoint("bert")), k=16, max_seq_length=32), SpladePooling()]
    return SparseEncoder(modules=modules, device="cpu")


def vectors_of(model: SparseEncoder) -> torch.Tensor:
    return model.encode_document(list(TEXTS)).to_dense()


# --- int8 in torch ---


def test_dynamic_quantisation_after_an_encode_takes_the_decoder_too(model):
    expected = vectors_of(model)
    assert model[0].hands_over
    quantize_dynamic(model[0].model, {nn.Linear}, inplace=True)
    assert isinstance(model[0].model.get_output_embeddings(), QuantizedLinear)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    found = vectors_of(model)
    assert not torch.equal(found, expected)
    assert torch.cosine_similarity(found, expected).min() > 0.98


def test_a_decoder_at_rest_is_a_plain_linear_layer(model):
    decoder = model[0].model.get_output_embeddings()
    with handing_over(decoder), handing_over(decoder):  # as in two threads
        assert type(decoder) is HandOverDecoder
    assert type(decoder) is nn.Linear
    with pytest.raises(RuntimeError, match="stop"), handing_over(decoder):
        raise RuntimeError("stop")
    assert type(decoder) is nn.Linear
    vectors_of(model)
    assert type(decoder) is type(copy.deepcopy(decoder)) is nn.Linear


# --- the backends of sentence-transformers ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "library"), [("onnx", "optimum.onnxruntime"), ("openvino", "optimum.intel.openvino")]
)
def test_an_exported_model_carries_k_and_gives_the_vectors_of_torch(model, tmp_path, backend, library):
    pytest.importorskip(
        library, reason=f"needs sentence-transformers[{backend}], see docs/backends.md", exc_type=ImportError
    )
    model.save_pretrained(str(tmp_path / "model"))
    SparseEncoder(str(tmp_path / "model"), backend=backend).save_pretrained(str(tmp_path / "exported"))
    exported = SparseEncoder(str(tmp_path / "exported"), backend=backend)
    torch.testing.assert_close(
        vectors_of(exported), vectors_of(model), rtol=1e-2, atol=5e-3
    )  # it may compute in bfloat16
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["mlm_head_rescale"]["k"] == 16


# --- the benchmark ---


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    sys.path.insert(0, str(BENCHMARK.parent))  # its companions are beside it
    try:
        spec = importlib.util.spec_from_file_location("backends_benchmark", BENCHMARK)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARK.parent))
    return module


@pytest.fixture
def collection(tmp_path) -> Path:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    write_jsonl(folder / "corpus.jsonl", [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])
    write_jsonl(folder / "queries.jsonl", [{"_id": f"q{i}", "text": text} for i, text in enumerate(TEXTS)])
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(len(TEXTS)))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines))
    return folder


def test_the_benchmark_measures_what_runs_here_and_says_why_the_rest_does_not(
    model, benchmark_module, collection, tmp_path
):
    model.save_pretrained(str(tmp_path / "model"))
    names = ["torch, stock", "torch, fused", "torch, int8", "onnx", "openvino"]
    results = {name: benchmark_module.run(name, str(tmp_path / "model"), str(collection), 1, None) for name in names}
    assert (results["torch, stock"]["vectors"] != results["torch, int8"]["vectors"]).nnz
    difference = results["torch, stock"]["vectors"] - results["torch, fused"]["vectors"]
    assert abs(difference).max() < 1e-4
    assert results["torch, int8"]["mib"] < results["torch, stock"]["mib"]
    for name, result in results.items():
        if name.startswith("torch") or "skipped" not in result:
            assert 0 < result["ndcg@10"] <= 1
        else:
            assert result["skipped"].endswith(f"is not installed: pip install 'sentence-transformers[{name}]'")
