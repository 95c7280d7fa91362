"""Mine hard negatives: for each query of a training file, documents that a search finds and that are not relevant."""

from __future__ import annotations

import importlib.util
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util import mine_hard_negatives

from st_sparse_rescale.evaluation.bm25 import BM25Index
from st_sparse_rescale.evaluation.checksum import model_crc32, texts_crc32
from st_sparse_rescale.evaluation.encoding import encode_texts
from st_sparse_rescale.evaluation.sparse_index import SparseIndex
from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.jsonl_parts import write_in_parts
from st_sparse_rescale.rows import DataError, read_rows
from st_sparse_rescale.serving.corpus import encodable
from st_sparse_rescale.training.data import load_training_data
from st_sparse_rescale.training.negative_filter import NegativeFilter
from st_sparse_rescale.training.pair_scores import (
    PairScorer,
    cross_encoder_scorer,
    load_cross_encoder,
    load_sparse,
)
from st_sparse_rescale.whole import written_whole

Hits = list[list[tuple[str, float]]]
Search = Callable[[Sequence[str], int], Hits]
"""From queries and a depth to (document, score) pairs, best first, for each query."""


@dataclass(frozen=True)
class Mined:
    """A mined training file.

    Attributes:
        file: Where it is.
        rows: How many (query, positive) pairs it holds, each with its negatives.
        dropped: How many pairs were left out because too few negatives were found for their query.
    """

    file: Path
    rows: int
    dropped: int


def mine(
    source: str | Path | Dataset,
    output: str | Path,
    *,
    bm25: bool = False,
    sparse: str | Path | SparseEncoder | None = None,
    dense: str | Path | SentenceTransformer | None = None,
    corpus: str | Path | Dataset | None = None,
    cross_encoder: str | Path | CrossEncoder | None = None,
    columns: Mapping[str, str] | None = None,
    index: str | Path | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = True,
    **rule: Any,
) -> Mined:
    """Search a corpus for each query and write what is left after the filters as its negatives.

    The file holds ``query``, ``positive`` and the list ``negatives``, as :func:`load_training_data` reads it. All
    documents that stand beside a query as positive are relevant to it, and so is its own text, where the corpus holds
    it; negatives that the source may hold are not looked at. A pair whose query has fewer than ``num_negatives`` left
    is dropped and counted.

    BM25 and sparse models search exactly, by our index; a document that shares no term with the query is no candidate.
    They go on where a killed call was when it is repeated. A dense model goes through sentence-transformers'
    ``mine_hard_negatives`` with faiss, whole or not at all, and compares by cosine.

    Args:
        source: Pairs of query and positive: whatever :func:`load_training_data` reads.
        output: The JSON Lines file to write; it must not be there yet.
        bm25: Search by BM25.
        sparse: Search by this sparse model.
        dense: Search by this dense model (extra ``eval``).
        corpus: Documents to search beside the positives: rows with ``text`` and perhaps ``title``, joined by a blank,
            such as BEIR's ``corpus.jsonl``, or a folder that holds one.
        cross_encoder: Scores the candidates and positives anew for the filters; the ranks follow its scores.
        columns: Role to the name its column has in the source.
        index: Folder for the index of a sparse model, which is then kept and used again; otherwise it lies in
            ``NAME.index`` beside the output until that is complete.
        batch_size: Texts encoded, or pairs scored, at once.
        show_progress_bar: Show progress.
        **rule: How negatives are chosen: the arguments of :class:`NegativeFilter`.

    Returns:
        The file and what became of the pairs.

    Raises:
        ValueError: Not exactly one way to search is given, a filter is impossible, a cross-encoder has no filter to
            serve or gives what is no number, an index is given without a sparse model, no pair was left, or the parts
            of another call lie beside the output.
        DataError: The source or the corpus cannot be read.
        FileExistsError: The output is there already.
        ImportError: faiss is needed and absent.

    Example::

        from st_sparse_rescale.training import mine

        mine("pairs.jsonl", "mined.jsonl", bm25=True, corpus="corpus.jsonl", num_negatives=8, relative_margin=0.05)
    """
    output, chosen = Path(output), NegativeFilter(**rule)
    if sum((bm25, sparse is not None, dense is not None)) != 1:
        raise ValueError("Give one way to search: bm25 (--bm25), a sparse model (--sparse) or a dense model (--dense).")
    if cross_encoder is not None and not chosen.looks_at_scores:
        raise ValueError(
            "A cross-encoder decides which candidates are too good to be negatives: give absolute_margin, "
            "relative_margin, max_score or min_score beside it."
        )
    if index is not None and sparse is None:
        raise ValueError(f"The index in {index} is that of a sparse model: give the model, or leave the index out.")
    if output.exists():
        raise FileExistsError(f"{output} is there already: choose another file (--output), or delete it.")
    pairs = load_training_data(source, columns=columns, num_negatives=0)
    positives = _positives(pairs)
    documents = list(dict.fromkeys([*_texts(corpus), *(text for texts in positives.values() for text in texts)]))
    judge = None if cross_encoder is None else load_cross_encoder(cross_encoder)
    output.parent.mkdir(parents=True, exist_ok=True)
    if dense is not None:
        rows = _mine_dense(dense, positives, documents, chosen, judge, batch_size)
        with written_whole(output) as partial:
            count = write_jsonl(partial, rows)
    else:
        model = None if sparse is None else load_sparse(sparse)
        settings: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
        count = _mine_exactly(output, positives, documents, chosen, judge, model, index, **settings)
    if not count:
        output.unlink()
        raise ValueError(
            f"No query has {chosen.num_negatives} negatives left: lower num_negatives or the margins, raise range_max, "
            "or search a larger corpus."
        )
    return Mined(output, count, sum(map(len, positives.values())) - count)


def _positives(pairs: Dataset) -> dict[str, list[str]]:
    """The positives of each query, without repetition."""
    positives: dict[str, dict[str, None]] = {}
    for row in pairs:
        positives.setdefault(row["query"], {})[row["positive"]] = None
    return {query: list(texts) for query, texts in positives.items()}


def _texts(corpus: str | Path | Dataset | None) -> Iterator[str]:
    if corpus is None:
        return
    name = "the corpus" if isinstance(corpus, Dataset) else str(corpus)
    if not isinstance(corpus, Dataset) and Path(corpus).is_dir():
        corpus = Path(corpus) / "corpus.jsonl"
    try:
        for place, row in read_rows(corpus):
            text = row.get("text")
            if not isinstance(text, str):
                raise DataError(f"{place}: 'text' must be text, but the row's columns are {list(row)}.")
            if whole := encodable(f"{row.get('title') or ''} {text}".strip(), "text", place):
                yield whole
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error


def _mine_exactly(
    output: Path,
    positives: dict[str, list[str]],
    documents: list[str],
    chosen: NegativeFilter,
    judge: CrossEncoder | None,
    model: SparseEncoder | None,
    index: str | Path | None,
    *,
    batch_size: int,
    show_progress_bar: bool,
) -> int:
    """Mine by BM25, or by a sparse model where one is given."""
    record = {
        "pairs": texts_crc32(text for query, texts in positives.items() for text in (query, *texts)),
        "documents": texts_crc32(documents),
        "model": "BM25" if model is None else model_crc32(model),
        "cross_encoder": None if judge is None else model_crc32(judge),
        **asdict(chosen),
    }
    rescore = None if judge is None else cross_encoder_scorer(judge, logits=False, batch_size=batch_size)
    # So many may be the positives and the query itself, which are looked at and left out.
    depth = chosen.depth + max(map(len, positives.values())) + 1
    folder = output.with_name(output.name + ".index") if index is None else Path(index)
    if model is None:
        search = _bm25_search(documents)
    else:
        search = _sparse_search(model, documents, folder, batch_size, show_progress_bar)

    def rows_of(queries: Sequence[str]) -> Iterator[dict[str, Any]]:
        for query, hits in zip(queries, search(queries, depth), strict=True):
            candidates, floor = _scored(query, hits, positives[query], rescore)
            negatives = chosen.choose(query, candidates, [*positives[query], query], floor)
            if negatives is not None:
                for positive in positives[query]:
                    yield {"query": query, "positive": positive, "negatives": negatives}

    count = write_in_parts(
        output, list(positives), rows_of, record=record, description="Mining", show_progress_bar=show_progress_bar
    )
    if model is not None and index is None:
        shutil.rmtree(folder)
    return count


def _scored(
    query: str, hits: Sequence[tuple[str, float]], positives: Sequence[str], rescore: PairScorer | None
) -> tuple[Sequence[tuple[str, float]], float]:
    """The candidates of a query, best first, and the lowest score of its positives."""
    if rescore is None:
        found = dict(hits)
        # Whatever the search puts before a positive outscores it: of a positive beyond its depth no more need be known.
        return hits, min(found.get(positive, float("-inf")) for positive in positives)
    texts = [*positives, *(document for document, _ in hits)]
    scores = rescore([(query, text) for text in texts])
    candidates = list(zip(texts, scores, strict=True))[len(positives) :]
    return sorted(candidates, key=lambda hit: -hit[1]), min(scores[: len(positives)])


def _bm25_search(documents: Sequence[str]) -> Search:
    found = BM25Index(_numbered(documents))
    return lambda queries, depth: _as_texts(found.search(queries, depth), documents)


def _sparse_search(
    model: SparseEncoder, documents: Sequence[str], folder: str | Path, batch_size: int, show_progress_bar: bool
) -> Search:
    if model.similarity_fn_name != "dot":
        raise ValueError(
            f"Mining searches by dot product, but the model's similarity is {model.similarity_fn_name!r}: set "
            "model.similarity_fn_name to 'dot', or use another model."
        )
    settings: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
    found = SparseIndex.build(model, _numbered(documents), folder, **settings)

    def search(queries: Sequence[str], depth: int) -> Hits:
        vectors = encode_texts(model, queries, task="query", batch_size=batch_size)
        return _as_texts(found.search(vectors, depth), documents)

    return search


def _numbered(documents: Iterable[str]) -> dict[str, str]:
    """Texts by ids that are in the order of the texts."""
    return {f"{number:09d}": text for number, text in enumerate(documents)}


def _as_texts(hits: Hits, documents: Sequence[str]) -> Hits:
    return [[(documents[int(id)], score) for id, score in row if score > 0] for row in hits]


def _mine_dense(
    model: str | Path | SentenceTransformer,
    positives: dict[str, list[str]],
    documents: list[str],
    chosen: NegativeFilter,
    judge: CrossEncoder | None,
    batch_size: int,
) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("faiss") is None:
        raise ImportError('Dense search needs faiss: pip install "st-sparse-rescale[eval]"')
    settings = {name: value for name, value in asdict(chosen).items() if name not in ("sampling", "seed")}
    held = set(documents)
    pairs = [
        {"query": query, "positive": text}
        for query, texts in positives.items()
        for text in dict.fromkeys([*texts, *held.intersection([query])])  # its own text is left out as a positive is
    ]
    with _seeded(chosen.seed):
        mined = mine_hard_negatives(
            Dataset.from_list(pairs),
            model if isinstance(model, SentenceTransformer) else SentenceTransformer(str(model)),
            anchor_column_name="query",
            positive_column_name="positive",
            corpus=documents,
            cross_encoder=judge,
            **settings | {"range_max": chosen.depth},
            sampling_strategy=chosen.sampling,
            output_format="n-tuple",
            batch_size=batch_size,
            use_faiss=True,
            verbose=False,
        )
    for row in mined:
        if row["positive"] not in positives[row["query"]]:
            continue
        negatives = [row[f"negative_{number}"] for number in range(1, chosen.num_negatives + 1)]
        yield {"query": row["query"], "positive": row["positive"], "negatives": negatives}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's own random numbers, which sentence-transformers draws from, for a while."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
