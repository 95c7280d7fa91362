"""From a mini model to production: encode on Ray, export to two search engines, and compare them with exact search.

    pip install "st-sparse-rescale[ray,serving]"
    python examples/production.py

Without `--model` the mini backbone that ships with the package is trained first, on the docstrings of the installed
packages; without `--collection` the held-out docstrings are searched. A killed run goes on where it was. An engine that
is not installed is left out.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from st_sparse_rescale.demo import backbone_path, docstring_corpus, write_corpus
from st_sparse_rescale.evaluation import measure
from st_sparse_rescale.evaluation.beir import load_beir_folder
from st_sparse_rescale.serving import Export, encode_corpus, export, load_target, overlap
from st_sparse_rescale.training import Recipe, train

TOP_K = 10
Search = Callable[[object], list[tuple[str, float]]]


def trained_model(folder: Path, corpus: Path, steps: int) -> Path:
    """Train the shipped backbone with the large head, which needs the rescaling."""
    settings = {"model": backbone_path("modernbert-mini"), "k": 16, "train": str(corpus / "train.jsonl")}
    return train(Recipe.load("demo", **settings, max_steps=steps), folder).folder


def qdrant(folder: Path, report: Export) -> Search:
    """Fill Qdrant's local mode; against a server it is the same code with another `QdrantClient(...)`."""
    from qdrant_client import QdrantClient, models

    client = QdrantClient(":memory:")
    sparse = {"vector": models.SparseVectorParams()}
    client.create_collection(report.name, vectors_config={}, sparse_vectors_config=sparse)
    client.upload_points(report.name, [models.PointStruct(**row) for row in rows(folder, report)])
    target = load_target(folder)

    def search(vector: object) -> list[tuple[str, float]]:
        asked = target.query(vector, TOP_K)
        asked["query"] = models.SparseVector(**asked["query"])
        return [(hit.payload["id"], hit.score) for hit in client.query_points(report.name, **asked).points]

    return search


def seismic(folder: Path, report: Export) -> Search:
    """Build an index of Seismic, which trades a little exactness for speed."""
    from seismic import SeismicIndex

    index, target = SeismicIndex.build(str(folder / report.files[0])), load_target(folder)

    def search(vector: object) -> list[tuple[str, float]]:
        asked = target.query(vector, TOP_K)
        hits = index.search(**asked, query_cut=len(asked["query_components"]), heap_factor=0.8, n_knn=0, sorted=True)
        return [(id, score) for _, score, id in hits]

    return search


def rows(folder: Path, report: Export) -> list[dict]:
    return [json.loads(line) for file in report.files for line in (folder / file).open(encoding="utf-8")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a trained sparse encoder: a folder or a hub name")
    parser.add_argument("--collection", type=Path, help="a folder in BEIR's layout")
    parser.add_argument("--output", type=Path, default=Path("production-out"))
    parser.add_argument("--steps", type=int, default=200, help="of training, where no model is given")
    parser.add_argument("--workers", type=int, default=2, help="of Ray; 0 encodes in this process")
    parser.add_argument("--document-terms", type=int, default=128, help="strongest terms that a document keeps")
    parser.add_argument("--query-terms", type=int, default=32, help="strongest terms that a query keeps")
    args = parser.parse_args()
    console, began = Console(), time.perf_counter()

    corpus = args.output / "corpus"
    if (args.model is None or args.collection is None) and not corpus.exists():
        console.print("Reading the docstrings of the installed packages.")
        write_corpus(docstring_corpus(), corpus)
    model = args.model or trained_model(args.output / "training", corpus, args.steps)
    collection = load_beir_folder(args.collection or corpus / "test")

    on_ray = args.workers > 0 and find_spec("ray") is not None
    console.print(f"Encoding {len(collection.corpus):,} documents {'on Ray' if on_ray else 'without Ray'}.")
    workers = args.workers if on_ray else None
    documents = encode_corpus(
        model,
        collection.corpus,
        args.output / "documents",
        max_active_dims=args.document_terms,
        ray=on_ray,
        processes=workers,
    )
    queries = encode_corpus(
        model, collection.queries, args.output / "queries", task="query", max_active_dims=args.query_terms
    )
    vectors = [row for batch in queries for row in batch.vectors]
    ids = [id for batch in queries for id in batch.ids]

    index = documents.index()
    exact = [index.search(vector, TOP_K)[0] for vector in vectors]
    table = Table("engine", "overlap with exact search", "nDCG@10")
    table.add_row("exact", "", f"{ndcg(ids, exact, collection.qrels):.3f}")
    for name, module, fill in (("qdrant", "qdrant_client", qdrant), ("seismic", "seismic", seismic)):
        if find_spec(module) is None:
            console.print(f'{name} is left out: pip install "st-sparse-rescale[serving]"')
            continue
        folder = args.output / f"{name}-{time.time_ns()}"
        report = export(documents, name, folder, queries=queries)
        console.print(report.summary())
        search = fill(folder, report)
        found = [search(vector) for vector in vectors]
        table.add_row(name, f"{overlap(found, exact):.3f}", f"{ndcg(ids, found, collection.qrels):.3f}")
    console.print(table)
    console.print(f"{time.perf_counter() - began:.0f} seconds in all.")


def ndcg(ids: list[str], hits: list, qrels: dict) -> float:
    scores = measure(dict(zip(ids, hits, strict=True)), qrels, ["ndcg@10"])["ndcg@10"]
    return sum(scores.values()) / len(scores)


if __name__ == "__main__":
    main()
