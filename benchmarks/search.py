"""Scoring a collection: exact sparse search beside sentence-transformers' evaluator and mteb's stock wrapper.

The search alone is timed beside sparse_dot_topn, too, both in one thread.

    python benchmarks/search.py                             # 100,000 documents, 500 queries, top 1,000
    python benchmarks/search.py --docs 1000000 --only index # a million documents: memory, disk and time of the index

All contenders get the same synthetic embeddings, and each run has a process of its own. Timed is what comes after
encoding: from embeddings to metrics (evaluators), or to mteb's results. Seconds are medians over the rounds; memory is
the growth of the process's peak over what it held with the embeddings in place.

The embeddings look like those of a trained SPLADE model: a vocabulary of 30,522 of which documents hold about 150
terms and queries about 40, with term frequencies that fall as a power of the rank. The table says how many FLOPS that
makes; published models are between 0.5 and 5.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from scipy import sparse

VOCABULARY = 30_522
QUERIES, QUERY_TERMS, DOCUMENT_TERMS, TOP_K = 500, 42, 155, 1_000
CHUNK = 50_000
RESULTS = Path(__file__).parent / "results"


def synthetic(rows: int, terms: int, seed: int, exponent: float) -> sparse.csr_matrix:
    """Rows of about `terms` terms, drawn by a power law over the vocabulary."""
    generator = np.random.default_rng(seed)
    weights = 1 / (np.arange(VOCABULARY) + 50.0) ** exponent
    cumulated = np.cumsum(weights / weights.sum())
    columns = np.searchsorted(cumulated, generator.random(rows * terms)).clip(0, VOCABULARY - 1).astype(np.int32)
    values = generator.gamma(2.0, 0.5, rows * terms).astype(np.float32) + np.float32(0.01)
    matrix = sparse.csr_matrix((values, columns, np.arange(rows + 1) * terms), shape=(rows, VOCABULARY))
    matrix.sum_duplicates()
    return matrix


def as_coo(matrix: sparse.csr_matrix) -> torch.Tensor:
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    indices = torch.from_numpy(np.stack([rows, matrix.indices.astype(np.int64)]))
    return torch.sparse_coo_tensor(
        indices, torch.from_numpy(matrix.data), matrix.shape, is_coalesced=True, check_invariants=False
    )


def documents(count: int, exponent: float) -> sparse.csr_matrix:
    starts = range(0, count, CHUNK)
    return sparse.vstack(
        [synthetic(min(CHUNK, count - start), DOCUMENT_TERMS, start + 1, exponent) for start in starts], format="csr"
    )


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = status("VmRSS"), clock()
    result = run()
    return {
        "seconds": clock() - start,
        "grown_bytes": status("VmHWM") - before,
        "held_bytes": before,
        "result": result,
    }


class Encoded:
    """Stands for a model whose texts are encoded already."""

    similarity_fn_name = "dot"
    max_seq_length = None
    default_prompt_name = None

    def __init__(self, queries: torch.Tensor) -> None:
        from sentence_transformers import SparseEncoder
        from sentence_transformers.util import dot_score

        self.queries, self.prompts = queries, {}
        self.similarity, self.sparsity = dot_score, SparseEncoder.sparsity

    def encode_query(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: D102
        return self.queries

    def modules(self) -> list[Any]:  # noqa: D102
        return []

    def preprocess(self, texts: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:  # noqa: D102
        return {"attention_mask": torch.ones(len(texts), 1)}


def evaluator(ours: bool, queries: torch.Tensor, corpus: torch.Tensor) -> dict[str, Any]:
    if ours:
        from st_sparse_rescale.evaluation import SparseInformationRetrievalEvaluator
    else:
        from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
    ids, texts = [f"q{i}" for i in range(QUERIES)], {f"d{i}": "" for i in range(corpus.shape[0])}
    relevant = {id: {f"d{i}"} for i, id in enumerate(ids)}
    evaluator = SparseInformationRetrievalEvaluator(
        dict.fromkeys(ids, ""), texts, relevant, precision_recall_at_k=[TOP_K], map_at_k=[TOP_K]
    )
    model = Encoded(queries)
    if not ours:
        evaluator.score_functions, evaluator.score_function_names = {"dot": model.similarity}, ["dot"]
    return timed(lambda: evaluator.compute_all_metrics(model, corpus_embeddings=corpus)["dot"]["map@k"][TOP_K])


def mteb(ours: bool, queries: torch.Tensor, corpus: torch.Tensor) -> dict[str, Any]:
    from datasets import Dataset
    from mteb.models import search_wrappers
    from mteb.models.model_meta import ModelMeta

    from st_sparse_rescale.evaluation.collection import Collection
    from st_sparse_rescale.evaluation.mteb_search import SparseSearchModel, mteb_task

    # Nothing is encoded, so for both the preparation of texts is left out: the loader names its first document.
    search_wrappers.create_dataloader = lambda data, **kwargs: data
    ids = [f"d{i}" for i in range(corpus.shape[0])]
    chunks = {
        ids[s]: corpus.index_select(0, torch.arange(s, min(s + CHUNK, len(ids)))) for s in range(0, len(ids), CHUNK)
    }

    class Model(SparseSearchModel):
        def __init__(self) -> None:
            self.model, self.corpus_chunk_size, self._search = Encoded(queries), CHUNK, None
            self.mteb_model_meta = ModelMeta.create_empty()

        def encode(self, inputs: Dataset, **kwargs: Any) -> torch.Tensor:
            return chunks.get(inputs[0]["id"], queries)

    data = Dataset.from_dict({"id": ids, "text": [""] * len(ids)})
    asked = Dataset.from_dict({"id": [f"q{i}" for i in range(QUERIES)], "text": [""] * QUERIES})
    settings = {
        "task_metadata": mteb_task(Collection("Synthetic", {}, {}, {})).metadata,
        "hf_split": "test", "hf_subset": "default", "encode_kwargs": {"show_progress_bar": False}, "num_proc": None,
    }  # fmt: skip
    model = Model() if ours else search_wrappers.SearchEncoderWrapper(Model())

    def run() -> float:
        model.index(data, **settings)
        found = model.search(asked, top_k=TOP_K, **settings)
        return statistics.fmean(max(hits.values()) for hits in found.values())

    return timed(run)


def kernel(ours: bool, queries: torch.Tensor, corpus: torch.Tensor) -> dict[str, Any]:
    """From CSR matrices to the best documents of each query, in CPU seconds of one thread."""
    from st_sparse_rescale.evaluation.csr import as_csr, csr_chunks
    from st_sparse_rescale.evaluation.top_k import CHUNK_SIZE, IdOrder, TopK

    asked, documents = as_csr(queries), as_csr(corpus)
    order = IdOrder([f"d{i}" for i in range(documents.shape[0])])

    def collect() -> float:
        best = TopK(asked, order, TOP_K)
        for start, chunk in csr_chunks(documents, CHUNK_SIZE):
            best.add(chunk, start)
        return float(best.result()[0].max(axis=1).mean())

    def product() -> float:
        from sparse_dot_topn import sp_matmul_topn

        return float(sp_matmul_topn(asked, documents.T.tocsr(), top_n=TOP_K, sort=True).max(axis=1).mean())

    return timed(collect if ours else product, clock=time.process_time)


def index(count: int, exponent: float) -> dict[str, Any]:
    """Index documents chunk by chunk, write the index, map it back and search it."""
    from st_sparse_rescale.evaluation import SparseIndex

    queries = synthetic(QUERIES, QUERY_TERMS, 0, exponent)
    measured: dict[str, Any] = {}

    def lap(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        measured[name] = time.perf_counter() - start
        return result

    built, adding = SparseIndex(), 0.0
    for start in range(0, count, CHUNK):
        chunk = synthetic(min(CHUNK, count - start), DOCUMENT_TERMS, start + 1, exponent)
        ids = [f"d{i}" for i in range(start, start + chunk.shape[0])]
        begin = time.perf_counter()
        built.add(chunk, ids)
        adding += time.perf_counter() - begin
    measured["add"] = adding
    with tempfile.TemporaryDirectory(dir=".") as folder:
        lap("save", partial(built.save, Path(folder) / "index"))
        measured["disk_bytes"] = sum(file.stat().st_size for file in (Path(folder) / "index").iterdir())
        del built
        loaded = lap("load and verify", lambda: SparseIndex.load(Path(folder) / "index"))
        hits = lap(f"search {QUERIES} queries", lambda: loaded.search(queries, TOP_K))
        singles = []
        for row in range(50):
            begin = time.perf_counter()
            (alone,) = loaded.search(queries[row], TOP_K)
            singles.append(time.perf_counter() - begin)
            assert alone == hits[row]
        measured["search one query"] = statistics.median(singles)
    measured["peak_bytes"] = status("VmHWM")
    return measured


CONTENDERS: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "evaluator, ours": lambda q, d: evaluator(True, q, d),
    "evaluator, sentence-transformers": lambda q, d: evaluator(False, q, d),
    "mteb, ours": lambda q, d: mteb(True, q, d),
    "mteb, stock wrapper": lambda q, d: mteb(False, q, d),
    "search alone (CPU seconds), ours": lambda q, d: kernel(True, q, d),
    "search alone (CPU seconds), sparse_dot_topn": lambda q, d: kernel(False, q, d),  # pip install sparse_dot_topn
}
PAIRS = dict(zip(("evaluator", "mteb", "search"), zip(*[iter(CONTENDERS)] * 2, strict=True), strict=True))


def in_fresh_process(name: str, docs: int, exponent: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, "--docs", str(docs), "--exponent", str(exponent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def tables(results: dict[str, Any]) -> list[Table]:
    made = []
    if results.get("contenders"):
        setting = results["setting"]
        title = (
            f"{setting['documents']:,} documents, {setting['queries']} queries, top {setting['top_k']:,}, "
            f"{setting['flops']:.2f} FLOPS a pair"
        )
        table = Table("contender", title=title)
        for column in ("seconds", "ours is faster", "peak growth MiB", "ours takes less"):
            table.add_column(column, justify="right")
        for ours, stock in (pair for pair in PAIRS.values() if pair[0] in results["contenders"]):
            for name in (ours, stock):
                row = results["contenders"][name]
                ratios = ["", ""]
                if name == stock:
                    ratios = [f"{results['ratios'][stock][key]:.1f}x" for key in ("seconds", "grown_bytes")]
                seconds, grown = f"{row['seconds']:.2f}", f"{row['grown_bytes'] / 2**20:,.0f}"
                table.add_row(name, seconds, ratios[0], grown, ratios[1])
            table.add_section()
        made.append(table)
    for count, row in results.get("index", {}).items():
        table = Table("index", title=f"SparseIndex, {int(count):,} documents")
        table.add_column("measured", justify="right")
        for name, value in row.items():
            is_bytes = name.endswith("_bytes")
            table.add_row(name.replace("_bytes", ""), f"{value / 2**30:.2f} GiB" if is_bytes else f"{value:.3f} s")
        made.append(table)
    return made


def compared(pair: tuple[str, str], docs: int, rounds: int, exponent: float, console: Console) -> dict[str, Any]:
    """Run two contenders in alternation: their runs, their medians, and how much the second takes of the first."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pair}
    for _ in range(rounds):
        for name, of in runs.items():
            of.append(in_fresh_process(name, docs, exponent))
            console.print(f"{name}: {of[-1]['seconds']:.2f} s", highlight=False)
    ours, theirs = runs.values()
    assert abs(ours[0]["result"] - theirs[0]["result"]) < 1e-5, runs  # they must have computed the same
    medians = {
        name: {key: statistics.median(run[key] for run in of) for key in ("seconds", "grown_bytes", "held_bytes")}
        for name, of in runs.items()
    }
    ratios = {
        key: statistics.median(b[key] / a[key] for a, b in zip(ours, theirs, strict=True))
        for key in ("seconds", "grown_bytes")
    }
    return {"runs": runs, "contenders": medians, "ratios": {pair[1]: ratios}}


def main(
    docs: Annotated[int, typer.Option(help="Documents.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Runs of each contender, in alternation.")] = 3,
    only: Annotated[str, typer.Option(help="evaluator, mteb, search or index; others keep their results.")] = "all",
    exponent: Annotated[float, typer.Option(help="Of the power law of term frequencies.")] = 0.8,
    save: Annotated[bool, typer.Option(help="Write benchmarks/results/search.json and .txt.")] = True,
    measure: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    if measure is not None:
        if measure == "index":
            print(json.dumps(index(docs, exponent)))
            return
        queries, corpus = synthetic(QUERIES, QUERY_TERMS, 0, exponent), documents(docs, exponent)
        print(json.dumps(CONTENDERS[measure](as_coo(queries), as_coo(corpus))))
        return
    file = RESULTS / "search.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    console = Console(width=120)
    chosen = [group for group in PAIRS if only in (group, "all")]
    if chosen:
        queries, corpus = synthetic(QUERIES, QUERY_TERMS, 0, exponent), documents(min(docs, CHUNK), exponent)
        shares = [np.bincount(m.indices, minlength=VOCABULARY) / m.shape[0] for m in (queries, corpus)]
        setting = {
            "documents": docs, "queries": QUERIES, "top_k": TOP_K, "rounds": rounds, "exponent": exponent,
            "document_terms": corpus.nnz / corpus.shape[0], "query_terms": queries.nnz / QUERIES,
            "flops": float(shares[0] @ shares[1]),
        }  # fmt: skip
        known = results.get("setting", setting)
        if save and only != "all" and any(known[name] != setting[name] for name in ("documents", "rounds", "exponent")):
            raise SystemExit(f"{file} holds results of another setting: measure all, or take --no-save.")
        results["setting"] = setting
        del corpus
    for group in chosen:
        measured = compared(PAIRS[group], docs, rounds, exponent, console)
        for part, value in measured.items():
            results.setdefault(part, {}).update(value)
        results.setdefault("machine", {})[group] = describe_machine()
    if only in ("index", "all"):
        results.setdefault("index", {})[str(docs)] = in_fresh_process("index", docs, exponent)
        results.setdefault("machine", {})["index"] = describe_machine()
    shown = tables(results)
    console.print(*shown)
    if save:
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
        with (RESULTS / "search.txt").open("w") as out:
            Console(file=out, width=120).print(*shown)


if __name__ == "__main__":
    typer.run(main)
