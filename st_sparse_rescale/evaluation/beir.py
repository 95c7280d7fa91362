"""Evaluators from a local BEIR folder or from NanoBEIR."""

from __future__ import annotations

import csv
from pathlib import Path

from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sparse_encoder.evaluation import (
    SparseInformationRetrievalEvaluator,
    SparseNanoBEIREvaluator,
)

from st_sparse_rescale.jsonl import read_jsonl


def load_evaluator(source: str | Path, *, split: str | None = None, batch_size: int = 32) -> BaseEvaluator:
    """Make sentence-transformers' evaluator for a retrieval collection.

    Args:
        source: A folder in BEIR's layout (``corpus.jsonl``, ``queries.jsonl``, ``qrels/SPLIT.tsv``); ``nanobeir`` for
            all of NanoBEIR, or ``nanobeir:msmarco,nq`` for some of its collections, which come from the hub.
        split: Of a folder's judgements; by default ``dev`` if there is one, else ``test``.
        batch_size: Texts encoded at once.

    Returns:
        An evaluator that reports nDCG@10, MRR@10, recall, active dimensions and FLOPS.

    Raises:
        ValueError: If the folder lacks a file, a file is malformed or no judged query and document exist.

    Example::

        evaluator = load_evaluator("scifact")
        print(evaluator(model)[evaluator.primary_metric])
    """
    name, _, collections = str(source).partition(":")
    if name.lower() == "nanobeir":
        return SparseNanoBEIREvaluator(collections.split(",") if collections else None, batch_size=batch_size)
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{source} is neither a folder in BEIR's layout nor nanobeir[:collection,...].")
    judgements = _judgements_file(folder, split)
    queries = {key: row["text"] for key, row in _texts(folder / "queries.jsonl").items()}
    corpus = {
        key: f"{row.get('title') or ''} {row['text']}".strip() for key, row in _texts(folder / "corpus.jsonl").items()
    }
    relevant = _relevant(judgements, queries, corpus)
    return SparseInformationRetrievalEvaluator(
        queries={key: queries[key] for key in relevant},
        corpus=corpus,
        relevant_docs=relevant,
        precision_recall_at_k=[10, 100],
        batch_size=batch_size,
        name=f"{folder.resolve().name}-{judgements.stem}",
    )


def _judgements_file(folder: Path, split: str | None) -> Path:
    found = sorted(file.stem for file in (folder / "qrels").glob("*.tsv"))
    for wanted in (split,) if split else ("dev", "test"):
        if wanted in found:
            return folder / "qrels" / f"{wanted}.tsv"
    raise ValueError(
        f"{folder / 'qrels'} holds no {split + '.tsv' if split else 'dev.tsv or test.tsv'}; "
        f"its splits are {found or 'none'}."
    )


def _texts(file: Path) -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    try:
        for number, row in read_jsonl(file):
            if not isinstance(row.get("_id"), str) or not isinstance(row.get("text"), str):
                raise ValueError(f"line {number} needs the texts _id and text; it has {list(row)}.")
            rows[row["_id"]] = row
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return rows


def _relevant(file: Path, queries: dict[str, str], corpus: dict[str, str]) -> dict[str, set[str]]:
    relevant: dict[str, set[str]] = {}
    with open(file, encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            if number == 1 and row[-1:] == ["score"]:
                continue
            try:
                query, document, score = row[0], row[1], float(row[2])
            except (IndexError, ValueError) as error:
                raise ValueError(f"{file}, line {number}: must be query id, document id, score by tabs.") from error
            if query not in queries or document not in corpus:
                absent = f"query {query!r}" if query not in queries else f"document {document!r}"
                raise ValueError(f"{file}, line {number}: judges {absent}, which the collection does not hold.")
            if score > 0:
                relevant.setdefault(query, set()).add(document)
    if not relevant:
        raise ValueError(f"{file}: no document is judged relevant.")
    return relevant
