"""Measure what pruning documents costs: nDCG@10 against terms a document, on real collections.

Writes ``benchmarks/results/pruning.json`` and the table in ``docs/pruning.md``. Each text is encoded once, into shards
from which a killed run goes on; queries are never pruned.

    python scripts/measure_pruning.py --model path/to/model --data path/to/collections
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from scipy import sparse

from st_sparse_rescale.evaluation import SparseIndex, measure
from st_sparse_rescale.evaluation.beir import load_beir_folder
from st_sparse_rescale.evaluation.encoding import Task
from st_sparse_rescale.evaluation.metrics import mean
from st_sparse_rescale.serving import encode_corpus, overlap, prune
from st_sparse_rescale.whole import written_whole

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
DATA, MODEL = SHARED / "data", SHARED / "models" / "splade-tiny"
PAGE, RESULTS = ROOT / "docs" / "pruning.md", ROOT / "benchmarks" / "results" / "pruning.json"
MAX_LENGTH = 256
SETTINGS: list[dict[str, Any]] = [
    {},
    *({"top_k": top_k} for top_k in (128, 64, 32, 16)),
    *({"threshold": threshold} for threshold in (0.1, 0.2, 0.4, 0.8)),
    *({"mass": mass} for mass in (0.95, 0.9, 0.8, 0.7, 0.5)),
]
INTRODUCTION = """# Pruning documents

Made by `python scripts/measure_pruning.py`. Documents are pruned as `export --top-k`, `--threshold` and `--mass` do
it; queries are not. Texts are cut at {max_length} tokens. The model is {model}. nDCG@10, its change against all terms,
and the share of the exact top 10 of all terms that is still found.

"""


def encoded(model: str, texts: dict[str, str], folder: Path, task: Task) -> sparse.csr_matrix:
    """The vectors of texts, in their order."""
    shards = encode_corpus(model, texts, folder, task=task, max_length=MAX_LENGTH, shard_size=256)
    return sparse.vstack([batch.vectors for batch in shards], format="csr")


def pruned_results(model: str, folder: Path, work: Path) -> list[dict[str, Any]]:
    """One row for each setting on one collection."""
    collection = load_beir_folder(folder)
    documents = encoded(model, collection.corpus, work / folder.name / "documents", "document")
    queries = encoded(model, collection.queries, work / folder.name / "queries", "query")
    rows: list[dict[str, Any]] = []
    exact = None
    for limits in SETTINGS:
        vectors = prune(documents, **limits)
        hits = SparseIndex.from_embeddings(vectors, list(collection.corpus)).search(queries, 10)
        exact = exact or hits
        run = dict(zip(collection.queries, hits, strict=True))
        ndcg = mean(measure(run, collection.qrels, ["ndcg@10"])["ndcg@10"])
        rows.append(
            {
                "collection": collection.name,
                "documents": len(collection.corpus),
                "queries": len(collection.queries),
                **limits,
                "terms": vectors.nnz / vectors.shape[0],
                "ndcg@10": ndcg,
                "change": ndcg - rows[0]["ndcg@10"] if rows else 0.0,
                "overlap": overlap(hits, exact),
            }
        )
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """A table a collection."""
    lines = []
    for name in dict.fromkeys(row["collection"] for row in rows):
        some = [row for row in rows if row["collection"] == name]
        size = f"{some[0]['documents']:,} documents, {some[0]['queries']:,} queries"
        lines += [f"## {name}: {size}", "", "| pruning | terms a document | nDCG@10 | change | overlap |"]
        lines.append("|---|---:|---:|---:|---:|")
        for row in some:
            setting = next((f"{key} {row[key]}" for key in ("top_k", "threshold", "mass") if key in row), "none")
            numbers = f"{row['terms']:.0f} | {row['ndcg@10']:.3f} | {row['change']:+.3f} | {row['overlap']:.3f}"
            lines.append(f"| {setting.replace('_', '-')} | {numbers} |")
        lines.append("")
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Option(help="A trained sparse encoder.")] = str(MODEL),
    data: Annotated[Path, typer.Option(envvar="ST_SPARSE_RESCALE_DATA", help="Folder of collections.")] = DATA,
    collection: Annotated[list[str] | None, typer.Option(help="Which of them.")] = None,
    work: Annotated[Path, typer.Option(help="Folder for the encoded texts.")] = Path("build/pruning"),
) -> None:
    console = Console()
    wanted = [data / name for name in collection or ("cranfield", "cisi", "scifact")]
    folders = [folder for folder in wanted if (folder / "corpus.jsonl").exists()]
    if not folders or not Path(model).exists():
        console.print(f"Skipped: there is no model {model}, or none of {', '.join(map(str, wanted))}.")
        return
    rows = [row for folder in folders for row in pruned_results(model, folder, work)]
    table = as_markdown(rows)
    with written_whole(RESULTS) as partial:
        partial.write_text(
            json.dumps({"model": Path(model).name, "max_length": MAX_LENGTH, "rows": rows}, indent=1) + "\n"
        )
    with written_whole(PAGE) as partial:
        partial.write_text(INTRODUCTION.format(max_length=MAX_LENGTH, model=Path(model).name) + table)
    console.print(table, markup=False)


if __name__ == "__main__":
    typer.run(main)
