"""Collections in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sentence_transformers.base.evaluation import BaseEvaluator

from st_sparse_rescale.evaluation.collection import (
    Collection,
    CollectionError,
    Problems,
    judge,
    read_texts,
    whole_number,
)
from st_sparse_rescale.evaluation.sparse_information_retrieval import SparseInformationRetrievalEvaluator
from st_sparse_rescale.evaluation.sparse_nano_beir import SparseNanoBEIREvaluator
from st_sparse_rescale.jsonl import read_jsonl

# Collections whose queries are themselves documents: the evaluation of BEIR and MTEB leaves those out.
SELF_RETRIEVING = ("arguana", "quora")


def load_beir_folder(
    folder: str | Path, *, splits: tuple[str, ...] = ("test", "dev"), strict: bool = False
) -> Collection:
    r"""Read a collection. Lines end at ``\n`` only, since texts may hold other separators such as U+2028.

    Args:
        folder: Holds ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/*.tsv``.
        splits: The first of these that has judgements is taken.
        strict: Raise the first problem, instead of collecting them.

    Returns:
        The collection; its ``problems`` list malformed lines, ids that stand twice and judgements of what is not
        there, each with file and line.

    Raises:
        CollectionError: A file is missing or nothing is left to evaluate; in strict mode, any problem.

    Example:
        ::

            scifact = load_beir_folder("scifact", splits=("test",))
            print(len(scifact.corpus), len(scifact.queries), scifact.problems)
    """
    folder, problems = Path(folder), Problems(strict)
    found = sorted(file.stem for file in (folder / "qrels").glob("*.tsv"))
    split = next((split for split in splits if split in found), None)
    if split is None:
        raise CollectionError(
            f"{folder / 'qrels'} holds no {' or '.join(f'{split}.tsv' for split in splits)}; "
            f"its splits are {found or 'none'}."
        )
    corpus, queries = (
        read_texts(_rows(folder / f"{name}.jsonl", problems), problems) for name in ("corpus", "queries")
    )
    name = folder.resolve().name
    judgements = _judgements(folder / "qrels" / f"{split}.tsv", problems)
    return judge(
        name,
        corpus,
        queries,
        judgements,
        problems,
        split=split,
        exclude_self=name.lower() in SELF_RETRIEVING,
    )


def load_evaluator(source: str | Path, *, split: str | None = None, batch_size: int = 32) -> BaseEvaluator:
    """Make the evaluator of a retrieval collection, such as a trainer takes.

    Args:
        source: A folder in BEIR's layout; ``nanobeir`` for all of NanoBEIR, or ``nanobeir:msmarco,nq`` for some of
            its collections, which come from the hub.
        split: Of a folder's judgements; by default ``dev`` if there is one, else ``test``.
        batch_size: Texts encoded at once.

    Returns:
        An evaluator that reports nDCG@10, MRR@10, recall, active dimensions and FLOPS.

    Raises:
        CollectionError: The folder lacks a file, a file is malformed or no judged query and document exist.

    Example:
        ::

            evaluator = load_evaluator("scifact")
            print(evaluator(model)[evaluator.primary_metric])
    """
    name, _, collections = str(source).partition(":")
    if name.lower() == "nanobeir":
        return SparseNanoBEIREvaluator(collections.split(",") if collections else None, batch_size=batch_size)
    if not Path(source).is_dir():
        raise CollectionError(f"{source} is neither a folder in BEIR's layout nor nanobeir[:collection,...].")
    splits = (split,) if split else ("dev", "test")
    collection = load_beir_folder(source, splits=splits, strict=True)
    return SparseInformationRetrievalEvaluator(
        queries=collection.queries,
        corpus=collection.corpus,
        relevant_docs={query: {d for d, g in grades.items() if g > 0} for query, grades in collection.qrels.items()},
        precision_recall_at_k=[10, 100],
        batch_size=batch_size,
        name=f"{collection.name}-{collection.split}",
        exclude_self=collection.exclude_self,
    )


def _rows(file: Path, problems: Problems) -> Iterator[tuple[str, dict[str, object]]]:
    def malformed(message: str) -> None:
        line, _, problem = message.partition(": ")
        problems.report(f"{file}, {line}", problem.rstrip("."), "skipped")

    try:
        for number, row in read_jsonl(file, on_error=malformed):
            yield f"{file}, line {number}", row
    except OSError as error:
        raise CollectionError(f"{file}: cannot be read ({error.strerror or error}).") from error


def _judgements(file: Path, problems: Problems) -> Iterator[tuple[str, str, str, int]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file}, line {number}"
            try:
                row = line.decode("utf-8-sig").rstrip("\r\n").split("\t")
                if row == [""] or (number == 1 and row[-1] == "score"):
                    continue
                query, document, grade = row
                yield place, query, document, whole_number(grade)
            except ValueError:
                problems.report(place, "must be query id, document id, score (a whole number), by tabs", "skipped")
