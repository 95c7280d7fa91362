"""Export encoded documents to the files of a search engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from tqdm.auto import tqdm

from st_sparse_rescale.evaluation.index_files import Ids
from st_sparse_rescale.evaluation.top_k import IdOrder, TopK
from st_sparse_rescale.serving.chunks import combine_chunks
from st_sparse_rescale.serving.overlap import overlap
from st_sparse_rescale.serving.pruning import kept, prune
from st_sparse_rescale.serving.shards import VOCABULARY, Batch, Shards
from st_sparse_rescale.serving.targets import TARGETS, Target
from st_sparse_rescale.serving.targets.target import json_file
from st_sparse_rescale.serving.vocabulary import Vocabulary
from st_sparse_rescale.whole import written_whole

REPORT = "export.json"
DOCUMENTS = "documents"  # a folder with nothing else: Anserini reads whatever there is
LEVELS = 255
MAX_LEVELS = 1 << 24  # up to which float32 tells all whole numbers apart
# Queries whose top 10 is compared, about; documents stand in where there are no queries.
SAMPLE, TOP_K = 200, 10


@dataclass(frozen=True)
class Export:
    """What was exported, as ``export.json`` beside the documents says."""

    target: str
    name: str
    """Of the collection, index or table."""
    model: str
    documents: int
    """Documents written."""
    empty: int
    """Documents without a term, written where the engine has a place for them."""
    skipped: int
    """Those of the empty documents that were left out."""
    weights: int
    """Weights written."""
    no_tokens: int
    """Weights of dimensions that are no tokens, left out."""
    scale: float
    """What weights were multiplied by to become integers; 1 for engines with floats."""
    overlap: float | None
    """Share of the exact top 10, of all weights as floats, that these weights find; ``None`` if no query finds any."""
    queries: str
    """Whose top 10 that is."""
    files: list[str]
    """Of documents, in order."""

    def summary(self) -> str:
        """Tell people what was exported."""
        left_out = f", {self.skipped:,} without a term left out" if self.skipped else ""
        no_tokens = f", {self.no_tokens:,} weights of what is no token left out" if self.no_tokens else ""
        overlap = "not measured, no query finds anything" if self.overlap is None else f"{self.overlap:.3f}"
        return (
            f"{self.documents:,} documents with {self.weights / max(self.documents, 1):.1f} terms each for "
            f"{TARGETS[self.target].engine}{left_out}{no_tokens}. Overlap of the top {TOP_K} with exact search, by "
            f"{self.queries} as queries: {overlap}."
        )


def export(
    shards: Shards | str | Path,
    to: str,
    output: str | Path,
    *,
    name: str = "documents",
    top_k: int | None = None,
    threshold: float | None = None,
    mass: float | None = None,
    combine: bool = False,
    separator: str = "#",
    levels: int = LEVELS,
    queries: Shards | str | Path | None = None,
    show_progress_bar: bool = True,
) -> Export:
    """Write the files with which an engine is filled. The folder appears whole or not at all.

    Beside the folder of documents it holds the engine's schema, the vocabulary, and a report. Terms are in ascending
    order; there are no zeros, and no terms for dimensions that are no tokens. The shards are read twice, a batch at a
    time: first for the ids and the largest weight, then to be written.

    Args:
        shards: Encoded documents.
        to: The engine: a key of :data:`~st_sparse_rescale.serving.targets.TARGETS`.
        output: A folder that is not there yet.
        name: Of the collection, index or table.
        top_k: Keep so many of the heaviest terms of each document: see :func:`~st_sparse_rescale.serving.prune`.
        threshold: Keep weights of at least this.
        mass: Keep the heaviest terms with this share of a document's sum of weights.
        combine: Combine the chunks of a document: see :func:`~st_sparse_rescale.serving.combine_chunks`.
        separator: Between a document's id and the number of its chunk.
        levels: The largest integer, for engines with integer weights: the scale is this over the largest weight there
            is, so that no weight is cut off and the heaviest keep their order.
        queries: Encoded queries, of which about 200 are compared with exact search; by default documents stand in.
        show_progress_bar: Show the documents done.

    Returns:
        What was exported.

    Raises:
        ValueError: No such engine, a limit is out of its range or leaves nothing, the queries are another model's, or
            the engine cannot hold a document.
        IndexFileError: The shards are damaged or unfinished.
        FileExistsError: The output is there already.

    Example:
        ::

            report = export("encoded", "qdrant", "exported", mass=0.9)
            print(report.documents, report.overlap)
    """
    if to not in TARGETS:
        raise ValueError(f"There is no target {to!r}: choose one of {', '.join(TARGETS)}.")
    if not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"The largest integer must be from 1 to {MAX_LEVELS:,}, got {levels}.")
    shards = shards if isinstance(shards, Shards) else Shards(shards)
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} is there already: choose another folder, or delete it.")
    limits: dict[str, Any] = {"top_k": top_k, "threshold": threshold, "mass": mass}
    prune(sparse.csr_matrix((1, 1), dtype=np.float32), **limits)  # refuses them before any work
    target = TARGETS[to](shards.vocabulary, name=name)

    def documents(stage: str) -> Iterator[Batch]:
        batches = _shown(shards, stage, show_progress_bar)
        return combine_chunks(batches, separator) if combine else batches

    survey = _Survey(documents("Reading"), shards.vocabulary, every=max(1, len(shards) // SAMPLE))
    if threshold is not None and threshold > survey.largest:
        raise ValueError(
            f"A threshold of {threshold} leaves nothing, since the largest weight is {survey.largest:g}: lower it."
        )
    if target.integers:
        target.scale = levels / survey.largest
    comparison = _Comparison(target, survey, None if queries is None else _queries(queries, shards))
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(output) as partial:
        (partial / DOCUMENTS).mkdir(parents=True)
        with _Writer(partial / DOCUMENTS, target) as writer:
            for batch in documents("Writing"):
                vectors = target.written(prune(_tokens(batch.vectors, shards.vocabulary), **limits))
                writer.add(batch.ids, vectors)
                comparison.add(batch.vectors, vectors)
        report = Export(
            target=to,
            name=name,
            model=shards.settings["model"],
            documents=writer.documents,
            empty=writer.empty,
            skipped=writer.skipped,
            weights=writer.weights,
            no_tokens=survey.no_tokens,
            scale=target.scale,
            overlap=comparison.overlap(),
            queries=comparison.queries,
            files=[str(file.relative_to(partial)) for file in writer.files],
        )
        shards.vocabulary.write(partial / VOCABULARY)
        for file, content in {**target.setup(), REPORT: json_file(asdict(report))}.items():
            (partial / file).write_text(content, encoding="utf-8")
    return report


def load_target(folder: str | Path) -> Target:
    """Load the target of an export, to write queries by the names and the scale of its documents.

    Args:
        folder: Where :func:`export` wrote.

    Raises:
        ValueError: The folder holds something else.

    Example:
        ::

            target = load_target("exported")
            client.search(index="documents", **target.query(model.encode_query("sparse retrieval")))  # Elasticsearch
    """
    try:
        report = json.loads((Path(folder) / REPORT).read_text(encoding="utf-8"))
        vocabulary = Vocabulary.read(Path(folder) / VOCABULARY)
        return TARGETS[report["target"]](vocabulary, name=report["name"], scale=report["scale"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no export ({error}): export the documents again.") from error


class _Survey:
    """What must be known before the first document is written."""

    def __init__(self, batches: Iterable[Batch], vocabulary: Vocabulary, every: int) -> None:
        self.largest, self.no_tokens, seen = 0.0, 0, 0
        ids, rows, self.sample_ids = [], [], list[str]()
        for batch in batches:
            tokens = _tokens(batch.vectors, vocabulary)
            self.no_tokens += batch.vectors.nnz - tokens.nnz
            self.largest = max(self.largest, float(tokens.data.max(initial=0)))
            some = _spaced(seen, len(batch.ids), every)
            rows.append(batch.vectors[some])
            self.sample_ids += [batch.ids[row] for row in some]
            ids.append(Ids.of(batch.ids))
            seen += len(batch.ids)
        if not self.largest:
            raise ValueError("No document has a term: there is nothing to export. Look at the model's vectors.")
        try:
            self.order = IdOrder(Ids.joined(ids))
            """All documents."""
        except ValueError as error:
            raise ValueError(f"{error} Chunks to combine must follow each other.") from error
        self.sample = sparse.vstack(rows, format="csr")
        """Documents that stand in for queries."""


class _Comparison:
    """Searches all weights as floats, and those that the engine has, side by side."""

    def __init__(self, target: Target, survey: _Survey, queries: Shards | None) -> None:
        self._target = target
        asked, excluded = survey.sample, None
        if queries is not None:
            asked = _some_of(queries)
            self.queries = f"{asked.shape[0]} of {queries.folder}"
        else:
            excluded, self.queries = survey.sample_ids, f"{len(survey.sample_ids)} of the documents"
        self._exact = TopK(asked, survey.order, TOP_K, excluded=excluded)
        self._engine = TopK(target.asked(asked), survey.order, TOP_K, excluded=excluded)
        self._start = 0

    def add(self, exact: sparse.csr_matrix, written: sparse.csr_matrix) -> None:
        self._exact.add(exact, self._start)
        self._engine.add(self._target.searched(written), self._start)
        self._start += exact.shape[0]

    def overlap(self) -> float | None:
        exact = self._exact.hits()
        return overlap(self._engine.hits(), exact, TOP_K) if any(exact) else None


class _Writer:
    """Writes documents into files of bounded size."""

    def __init__(self, folder: Path, target: Target) -> None:
        self._folder, self._target = folder, target
        self.files: list[Path] = []
        self.documents = self.empty = self.skipped = self.weights = 0

    def __enter__(self) -> _Writer:
        self._next_file()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, ids: list[str], vectors: sparse.csr_matrix) -> None:
        bounds = vectors.indptr.tolist()
        for id, start, end in zip(ids, bounds[:-1], bounds[1:], strict=True):
            text = self._target.document(id, vectors.indices[start:end], vectors.data[start:end])
            self.empty += start == end
            if text is None:
                self.skipped += 1
                continue
            if self._file.tell() >= self._target.part_bytes:
                self._file.close()
                self._next_file()
            self._file.write(text.encode())
            self.documents += 1
            self.weights += end - start

    def _next_file(self) -> None:
        self.files.append(self._folder / f"{len(self.files):05d}.{self._target.suffix}")
        self._file = self.files[-1].open("wb")


def _tokens(vectors: sparse.csr_matrix, vocabulary: Vocabulary) -> sparse.csr_matrix:
    return kept(vectors, vocabulary.is_token[vectors.indices])


def _queries(queries: Shards | str | Path, documents: Shards) -> Shards:
    queries = queries if isinstance(queries, Shards) else Shards(queries)
    if queries.settings["weights_crc32"] != documents.settings["weights_crc32"]:
        raise ValueError(f"{queries.folder} and {documents.folder} were encoded by different models.")
    return queries


def _some_of(queries: Shards) -> sparse.csr_matrix:
    """Evenly spaced queries: to search by each of thousands would take longer than all the rest."""
    every, seen, rows = max(1, len(queries) // SAMPLE), 0, []
    for batch in queries:
        rows.append(batch.vectors[_spaced(seen, len(batch.ids), every)])
        seen += len(batch.ids)
    return sparse.vstack(rows, format="csr")


def _spaced(seen: int, count: int, every: int) -> list[int]:
    """Which of the next rows to take for one in so many of all."""
    return list(range(-seen % every, count, every))


def _shown(shards: Shards, stage: str, show_progress_bar: bool) -> Iterator[Batch]:
    with tqdm(total=len(shards), desc=stage, unit=" texts", disable=not show_progress_bar) as progress:
        for batch in shards:
            yield batch
            progress.update(len(batch.ids))
