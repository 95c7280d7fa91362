"""The backends of sentence-transformers beside torch: size, speed and nDCG@10 of one checkpoint.

    python benchmarks/backends.py MODEL COLLECTION --output benchmarks/results/backends.json

MODEL is a saved SPLADE model, COLLECTION a folder in BEIR's layout. Each contender runs in a process of its own: it
encodes the documents (timed, after a first batch to warm up), then all queries, and is evaluated by exact search. With
one thread, which is the default, the time is what the process really ran, which a busy machine disturbs less; otherwise
it is that on the wall. "cosine" is the mean over the documents between its vectors and those of the first contender.
What cannot run here is skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from sentence_transformers import (
    SparseEncoder,
    export_dynamic_quantized_onnx_model,
    export_static_quantized_openvino_model,
)
from torch import nn

from st_sparse_rescale import fuse
from st_sparse_rescale.evaluation.beir import load_beir_folder
from st_sparse_rescale.evaluation.csr import as_csr, unit_rows
from st_sparse_rescale.evaluation.metrics import mean, measure
from st_sparse_rescale.evaluation.sparse_index import SparseIndex

BATCH_SIZE, TOP_K, CALIBRATION_TEXTS = 32, 10, 300
MEBIBYTE = 2**20


class SkippedError(Exception):
    """Why a contender cannot run here."""


def stock(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """Plain sentence-transformers."""
    return SparseEncoder(model, device="cpu"), Path(model) / "model.safetensors"


def fused(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """Ours: the logits never exist."""
    return fuse(SparseEncoder(model, device="cpu")), Path(model) / "model.safetensors"


def torch_int8(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """Every linear layer, the decoder among them, with int8 weights and inputs quantised as they come."""
    loaded = SparseEncoder(model, device="cpu")
    masked_lm = loaded[0].model
    torch.ao.quantization.quantize_dynamic(masked_lm, {nn.Linear}, dtype=torch.qint8, inplace=True)
    file = work / "int8.pt"
    torch.save(masked_lm.state_dict(), file)
    return loaded, file


def onnx(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """ONNX Runtime, float32."""
    require("optimum.onnxruntime", "sentence-transformers[onnx]")
    SparseEncoder(model, backend="onnx", device="cpu").save_pretrained(str(work / "onnx"))
    return SparseEncoder(str(work / "onnx"), backend="onnx", device="cpu"), work / "onnx" / "onnx" / "model.onnx"


def onnx_int8(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """ONNX Runtime, int8 weights and inputs quantised as they come."""
    exported, file = onnx(model, work)
    kind = "avx512_vnni" if "avx512_vnni" in Path("/proc/cpuinfo").read_text() else "avx2"
    export_dynamic_quantized_onnx_model(exported, kind, str(work / "onnx"))
    file = next(file.parent.glob("*quint8*.onnx"), None) or next(file.parent.glob("*qint8*.onnx"))
    kwargs = {"file_name": f"onnx/{file.name}"}
    return SparseEncoder(str(work / "onnx"), backend="onnx", device="cpu", model_kwargs=kwargs), file


def onnxruntime(model: str, work: Path, int8: bool = False) -> tuple[SparseEncoder, Path]:
    """ONNX Runtime without optimum: the graph that torch exports takes the place of the masked LM's forward pass."""
    for module in ("onnxruntime", "onnxscript"):
        require(module, "st-sparse-rescale[onnx]")
    from onnxruntime import InferenceSession, SessionOptions
    from onnxruntime.quantization import quantize_dynamic

    encoder, file = SparseEncoder(model, device="cpu"), work / "model.onnx"
    masked_lm = encoder.transformers_model

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked_lm = masked_lm

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.masked_lm(**dict(zip(features, values, strict=True))).logits

    texts = ["a text and", "another text which is a little longer"]
    features = dict(encoder.tokenizer(texts, padding=True, return_tensors="pt"))
    size = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=encoder.max_seq_length)}
    torch.onnx.export(
        Logits().eval(),
        tuple(features.values()),
        file,
        input_names=list(features),
        dynamic_shapes={"values": (size,) * len(features)},
        external_data=False,
    )
    if int8:
        quantize_dynamic(file, work / "int8.onnx")
        file = work / "int8.onnx"
    options = SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def forward(**features: Any) -> dict[str, torch.Tensor]:
        [logits] = session.run(None, {name: features[name].numpy() for name in names})
        return {"logits": torch.from_numpy(logits)}

    masked_lm.forward = forward
    return encoder, file


def onnxruntime_int8(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """The same with int8 weights and inputs quantised as they come."""
    return onnxruntime(model, work, int8=True)


def openvino(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """OpenVINO, float32."""
    require("optimum.intel", "sentence-transformers[openvino]")
    SparseEncoder(model, backend="openvino", device="cpu").save_pretrained(str(work / "openvino"))
    file = work / "openvino" / "openvino" / "openvino_model.xml"
    return load_openvino(file, INFERENCE_PRECISION_HINT="f32"), file.with_suffix(".bin")


def openvino_int8(model: str, work: Path) -> tuple[SparseEncoder, Path]:
    """OpenVINO, int8 weights and inputs, calibrated on documents."""
    exported, file = openvino(model, work)
    calibration = {"dataset_name": str(work / "texts"), "dataset_config_name": "default"}
    calibration |= {"dataset_split": "train", "column_name": "text"}
    export_static_quantized_openvino_model(exported, None, str(work / "openvino"), **calibration)
    file = file.with_name("openvino_model_qint8_quantized.xml")
    return load_openvino(file), file.with_suffix(".bin")


def load_openvino(file: Path, **config: str) -> SparseEncoder:
    """Load an exported graph, with as many threads as torch has."""
    config["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
    kwargs = {"file_name": f"openvino/{file.name}", "ov_config": config}
    return SparseEncoder(str(file.parents[1]), backend="openvino", device="cpu", model_kwargs=kwargs)


CONTENDERS: dict[str, Callable[[str, Path], tuple[SparseEncoder, Path]]] = {
    "torch, stock": stock,
    "torch, fused": fused,
    "torch, int8": torch_int8,
    "onnx": onnx,
    "onnx, int8": onnx_int8,
    "onnxruntime": onnxruntime,
    "onnxruntime, int8": onnxruntime_int8,
    "openvino": openvino,
    "openvino, int8": openvino_int8,
}


def require(module: str, install: str) -> None:
    """Skip a contender whose libraries are absent."""
    try:
        absent = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        absent = True
    if absent:
        raise SkippedError(f"{module} is not installed: pip install {install!r}")


def run(name: str, model: str, collection: str, threads: int, documents: int | None) -> dict[str, Any]:
    """One contender, from loading to nDCG@10."""
    torch.set_num_threads(threads)
    data = load_beir_folder(collection)
    texts = dict(list(data.corpus.items())[:documents])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts").mkdir()
        rows = [json.dumps({"text": text}) + "\n" for text in list(texts.values())[:CALIBRATION_TEXTS]]
        (Path(folder) / "texts" / "train.jsonl").write_text("".join(rows), encoding="utf-8")
        try:
            encoder, file = CONTENDERS[name](model, Path(folder))
        except Exception as error:  # libraries that do not fit together fail in many ways, each a reason
            return {
                "name": name,
                "skipped": f"{error}" if isinstance(error, SkippedError) else f"{type(error).__name__}: {error}",
            }
        settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "show_progress_bar": False}
        encoder.encode_document(list(texts.values())[:BATCH_SIZE], **settings)
        clock = time.process_time if threads == 1 else time.perf_counter
        began = clock()
        vectors = as_csr(encoder.encode_document(list(texts.values()), **settings))
        seconds = clock() - began
        queries = as_csr(encoder.encode_query(list(data.queries.values()), **settings))
        size = file.stat().st_size
    hits = SparseIndex.from_embeddings(vectors, list(texts)).search(queries, top_k=TOP_K)
    scores = measure(dict(zip(data.queries, hits, strict=True)), data.qrels, ("ndcg@10",))
    return {
        "name": name,
        "mib": round(size / MEBIBYTE, 2),
        "documents_per_second": round(len(texts) / seconds, 1),
        "ndcg@10": round(mean(scores["ndcg@10"]), 4),
        "document_dims": round(vectors.nnz / len(texts), 1),
        "vectors": vectors,
    }


def alone(*args: Any) -> dict[str, Any]:
    """Run a contender in a fresh process, so that none inherits another's threads or memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *args).result()


def main(
    model: Annotated[str, typer.Argument(help="A saved SPLADE model.")],
    collection: Annotated[str, typer.Argument(help="A folder in BEIR's layout.")],
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each contender.")] = 1,
    documents: Annotated[int | None, typer.Option(help="Only the first so many documents.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A contender to run; repeatable.")] = None,
) -> None:
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    console, results = Console(), []
    reference: Any = None
    for name in only or CONTENDERS:
        result = alone(name, model, collection, threads, documents)
        vectors = result.pop("vectors", None)
        if vectors is not None:
            vectors = unit_rows(vectors)
            reference = vectors if reference is None else reference
            result["cosine"] = round(float(np.asarray(reference.multiply(vectors).sum(axis=1)).mean()), 4)
        results.append(result)
        console.print(result)
    table = Table("backend", "MiB", "documents/s", "nDCG@10", "document dims", "cosine")
    for result in results:
        shown = [result.get(key) for key in ("mib", "documents_per_second", "ndcg@10", "document_dims", "cosine")]
        table.add_row(result["name"], *(["skipped"] if "skipped" in result else map(str, shown)))
    console.print(table)
    if output is not None:
        setting = {"model": Path(model).name, "collection": Path(collection).name, "documents": documents}
        record = {"machine": describe_machine(), **setting, "threads": threads, "batch_size": BATCH_SIZE}
        output.write_text(json.dumps({**record, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
