"""Where collections come from: a local folder, or a name on the hub or in ir_datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers.sentence_transformer.evaluation.nano_beir import DATASET_NAME_TO_HUMAN_READABLE

from st_sparse_rescale.evaluation.beir import SELF_RETRIEVING, load_beir_folder
from st_sparse_rescale.evaluation.collection import (
    Collection,
    CollectionError,
    Problems,
    judge,
    read_texts,
    whole_number,
)

NANOBEIR = "sentence-transformers/NanoBEIR-en"
BEIR = (
    "arguana", "climate-fever", "dbpedia-entity", "fever", "fiqa", "hotpotqa", "nfcorpus", "nq", "quora", "scidocs",
    "scifact", "trec-covid", "webis-touche2020",
)  # fmt: skip
"""The 13 collections of BEIR that anyone may download."""

_MRR_FIRST = ("mrr@10", "ndcg@10", "recall@100", "recall@1000")
_DL = {"metrics": ("ndcg@10", "map@100", "recall@100"), "relevant_from": 2}
# Name here: (id in ir_datasets, what differs from the usual). TREC counts "related" (1) as not relevant but in nDCG.
IR_DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "msmarco-dev": ("msmarco-passage/dev/small", {"metrics": _MRR_FIRST}),
    "trec-dl-2019": ("msmarco-passage/trec-dl-2019/judged", _DL),
    "trec-dl-2020": ("msmarco-passage/trec-dl-2020/judged", _DL),
}


def load_collections(
    source: str | Path, *, split: str | None = None, strict: bool = False, data_dir: str | Path | None = None
) -> Iterator[Collection]:
    """Load the collections that a folder or a name stands for, one after another.

    Args:
        source: One of

            - a folder in BEIR's layout (``corpus.jsonl``, ``queries.jsonl``, ``qrels/*.tsv``), or a folder of such,
            - ``nanobeir`` or ``nanobeir:scifact,nq``,
            - ``beir`` for the 13 collections of BEIR that anyone may download, or ``beir:scifact,nq``,
            - ``msmarco-dev``, ``trec-dl-2019``, ``trec-dl-2020``, or ``irds:ID`` for any id of ir_datasets,
            - the name of a dataset on the hub, or a local copy of one: either with subsets ``corpus``, ``queries`` and
              ``qrels`` (or ``default``), or pairs of a query and its document in the first two columns.
        split: Of the judgements; by default ``test``, or the one that there is.
        strict: Raise the first problem with the data, instead of collecting them.
        data_dir: Local copies: for ``nanobeir`` the folder of the dataset, for ``beir`` one that holds a folder in
            BEIR's layout for each collection.

    Yields:
        The collections.

    Raises:
        CollectionError: Nothing of that name can be loaded, or it holds nothing to evaluate.
        ImportError: ir_datasets is needed and absent.

    Example:
        ::

            for collection in load_collections("nanobeir:scifact,nq"):
                print(collection.name, len(collection.queries))
    """
    for load in find_collections(source, split=split, strict=strict, data_dir=data_dir).values():
        yield load()


def find_collections(
    source: str | Path, *, split: str | None = None, strict: bool = False, data_dir: str | Path | None = None
) -> dict[str, Callable[[], Collection]]:
    """Find what :func:`load_collections` would load, without loading it.

    Returns:
        By the name of each collection a function that loads it.

    Raises:
        CollectionError: There is nothing of that name.
        ImportError: ir_datasets is needed and absent.
    """
    text, folder = str(source), Path(source)
    if folders := [folder] if _is_beir(folder) else sorted(filter(_is_beir, folder.glob("*"))):
        return {found.resolve().name: _beir_folder(found, split, strict) for found in folders}
    family, _, names = text.partition(":")
    chosen = names.split(",") if names else None
    if family.lower() == "nanobeir":
        known = _known(chosen, list(DATASET_NAME_TO_HUMAN_READABLE), "NanoBEIR")
        splits = [f"Nano{DATASET_NAME_TO_HUMAN_READABLE[name]}" for name in known]
        return {split: partial(_nanobeir, split, str(data_dir or NANOBEIR), strict) for split in splits}
    if family.lower() == "beir":
        known = _known(chosen, BEIR, "BEIR")
        if data_dir is not None:
            return {name: _beir_folder(Path(data_dir) / name, split, strict) for name in known}
        return {name: partial(_beir, name, split or "test", strict) for name in known}
    if text.lower() in IR_DATASETS:
        id, settings = IR_DATASETS[text.lower()]
        return {text.lower(): _ir_dataset(text.lower(), id, strict, **settings)}
    if family == "irds":
        name = names.replace("/", "-")
        return {name: _ir_dataset(name, names, strict)}
    return {folder.name: _hub_dataset(text, split, strict)}


def _is_beir(folder: Path) -> bool:
    return (folder / "corpus.jsonl").exists()


def _beir_folder(folder: Path, split: str | None, strict: bool) -> Callable[[], Collection]:
    if not _is_beir(folder):
        raise CollectionError(f"{folder} is no folder in BEIR's layout: it holds no corpus.jsonl.")
    return partial(load_beir_folder, folder, splits=(split,) if split else ("test", "dev"), strict=strict)


def _known(chosen: list[str] | None, names: Any, family: str) -> list[str]:
    chosen = list(names) if chosen is None else [name.strip().lower() for name in chosen]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise CollectionError(f"{family} holds no {', '.join(unknown)}; it holds {', '.join(names)}.")
    return chosen


def _nanobeir(split: str, dataset: str, strict: bool) -> Collection:
    problems = Problems(strict)
    corpus, queries = (
        # Texts without content are left out, as sentence-transformers' evaluator does.
        read_texts((row for row in _table(dataset, subset, split) if row[1].get("text") != ""), problems)
        for subset in ("corpus", "queries")
    )
    return judge(split, corpus, queries, _judged(_table(dataset, "qrels", split), problems), problems)


def _beir(name: str, split: str, strict: bool) -> Collection:
    return _three_tables(name, f"BeIR/{name}", (f"BeIR/{name}-qrels", None), split, strict)


def _hub_dataset(name: str, split: str | None, strict: bool) -> Callable[[], Collection]:
    from datasets import get_dataset_config_names

    subsets = _from_hub(name, lambda: get_dataset_config_names(name))
    short = Path(name).name
    if {"corpus", "queries"} <= set(subsets):
        judged = "qrels" if "qrels" in subsets else "default"
        return partial(_three_tables, short, name, (name, judged), split or "test", strict)
    return partial(_pairs, short, name, split, strict)


def _three_tables(name: str, dataset: str, judged: tuple[str, str | None], split: str, strict: bool) -> Collection:
    problems = Problems(strict)
    corpus, queries = (read_texts(_table(dataset, subset, None), problems) for subset in ("corpus", "queries"))
    judgements = _judged(_table(*judged, split), problems)
    exclude = name.lower() in SELF_RETRIEVING
    return judge(name, corpus, queries, judgements, problems, split=split, exclude_self=exclude)


def _pairs(name: str, dataset: str, split: str | None, strict: bool) -> Collection:
    """Queries and documents of a dataset of pairs; equal texts are one query, one document."""
    problems = Problems(strict)
    queries: dict[str, str] = {}
    corpus: dict[str, str] = {}
    judgements = []
    for number, (place, row) in enumerate(_table(dataset, None, split)):
        texts = [value for value in row.values() if isinstance(value, str)][:2]
        if len(texts) < 2:
            problems.report(place, "needs two texts, a query and its document", "skipped")
            continue
        query = queries.setdefault(texts[0], f"q{number}")
        judgements.append((place, query, corpus.setdefault(texts[1], f"d{number}"), 1))
    by_id = [{id: text for text, id in ids.items()} for ids in (corpus, queries)]
    return judge(name, by_id[0], by_id[1], iter(judgements), problems, split=split or "all")


def _judged(table: Iterator[tuple[str, Mapping[str, Any]]], problems: Problems) -> Iterator[tuple[str, str, str, int]]:
    """(place, query id, document id, grade) of rows with query-id, corpus-id and perhaps score."""
    for place, row in table:
        query, documents = row.get("query-id"), row.get("corpus-id")
        for document in documents if isinstance(documents, list) else [documents]:
            try:
                if query is None or document is None:
                    raise ValueError
                yield place, str(query), str(document), whole_number(row.get("score", 1))
            except (ValueError, TypeError):
                problems.report(place, "needs query-id, corpus-id and, if any, a whole number as score", "skipped")


def _table(dataset: str, subset: str | None, split: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, row) of a hub dataset; without a split, of all of them that a collection may come in."""
    from datasets import DatasetDict, load_dataset

    loaded = _from_hub(dataset, lambda: load_dataset(dataset, subset, split=split))
    parts = loaded if isinstance(loaded, DatasetDict) else {split: loaded}
    for name, part in parts.items():
        place = "/".join(str(piece) for piece in (dataset, subset, name) if piece)
        for number, row in enumerate(part):
            yield f"{place}, row {number}", row


def _from_hub(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # datasets raises some of every kind
        said = str(error).partition("\n")[0]
        raise CollectionError(
            f"{name} cannot be loaded ({type(error).__name__}: {said}): give a folder in BEIR's layout, a name of the "
            "hub that can be reached, or one of nanobeir, beir, msmarco-dev, trec-dl-2019, trec-dl-2020, irds:ID."
        ) from error


def _ir_dataset(name: str, id: str, strict: bool, **settings: Any) -> Callable[[], Collection]:
    try:
        import ir_datasets
    except ImportError as error:
        raise ImportError(f'{name} comes from ir_datasets: pip install "st-sparse-rescale[ir-datasets]"') from error
    try:
        dataset = ir_datasets.load(id)
    except KeyError as error:
        raise CollectionError(f"ir_datasets knows no dataset {id!r}.") from error
    return partial(_ir_tables, name, id, dataset, strict, **settings)


def _ir_tables(name: str, id: str, dataset: Any, strict: bool, **settings: Any) -> Collection:
    problems = Problems(strict)
    corpus = read_texts(_numbered(f"{id} documents", dataset.docs_iter(), _document), problems)
    queries = read_texts(_numbered(f"{id} queries", dataset.queries_iter(), _query), problems)
    judgements = (
        (place, row["query"], row["document"], row["grade"])
        for place, row in _numbered(f"{id} judgements", dataset.qrels_iter(), _judgement)
    )
    return judge(name, corpus, queries, judgements, problems, **settings)


def _numbered(place: str, items: Any, as_row: Callable[[Any], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{place}, row {number}", as_row(item)) for number, item in enumerate(items))


def _document(item: Any) -> dict[str, Any]:
    # Not every record has a title; default_text joins what there is to search.
    return {"_id": item.doc_id, "text": item.default_text() if hasattr(item, "default_text") else item.text}


def _query(item: Any) -> dict[str, Any]:
    return {"_id": item.query_id, "text": item.default_text() if hasattr(item, "default_text") else item.text}


def _judgement(item: Any) -> dict[str, Any]:
    return {"query": item.query_id, "document": item.doc_id, "grade": item.relevance}
