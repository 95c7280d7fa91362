"""A retrieval collection: documents, queries and judgements, and what was wrong with its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from st_sparse_rescale.evaluation.checksum import texts_crc32
from st_sparse_rescale.evaluation.metrics import DEFAULT_METRICS


class CollectionError(ValueError):
    """A collection that cannot be used; the message names file, line and mend."""


@dataclass(frozen=True)
class Collection:
    """What a retriever is evaluated on. All ids are texts."""

    name: str
    corpus: dict[str, str]
    """Document texts by id: title and text, joined by a blank."""
    queries: dict[str, str]
    """Texts, by id, of the queries that have a relevant document."""
    qrels: dict[str, dict[str, int]]
    """Grades of the judged documents, by query id and document id; above 0 is relevant."""
    split: str = "test"
    metrics: tuple[str, ...] = DEFAULT_METRICS
    """The metrics that are customary for it."""
    exclude_self: bool = False
    """Whether the document whose id is the query's is customarily left out: queries that are documents."""
    relevant_from: int = 1
    """Lowest grade that counts as relevant in metrics other than nDCG."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the files, and what was done about it."""

    def crc32(self) -> int:
        """Checksum of the texts and judgements, by which the collection is known again."""
        grades = (
            text
            for query, judged in self.qrels.items()
            for document, grade in judged.items()
            for text in (query, document, str(grade))
        )
        texts = (text for table in (self.corpus, self.queries) for pair in table.items() for text in pair)
        return texts_crc32(chain(texts, grades))


@dataclass
class Problems:
    """Collects what is wrong, or raises it at once.

    Args:
        strict: Raise the first problem.
    """

    strict: bool = False
    found: list[str] = field(default_factory=list)

    def report(self, place: str, problem: str, remedy: str) -> None:
        """Note a problem and what is done about it.

        Raises:
            CollectionError: In strict mode.
        """
        if self.strict:
            raise CollectionError(f"{place}: {problem}.")
        self.found.append(f"{place}: {problem}; {remedy}.")


def read_texts(rows: Iterable[tuple[str, Mapping[str, Any]]], problems: Problems) -> dict[str, str]:
    """Take texts by id from (place, row) pairs, each row with ``_id``, ``text`` and perhaps ``title``."""
    texts: dict[str, str] = {}
    for place, row in rows:
        id, text = row.get("_id"), row.get("text")
        id = str(id) if isinstance(id, int) and not isinstance(id, bool) else id  # as the judgements name it
        if not isinstance(id, str) or not id or not isinstance(text, str):
            problems.report(place, f"needs the texts _id and text, it has {_shown(row)}", "skipped")
        elif not _is_unicode(f"{id}{row.get('title')}{text}"):
            problems.report(place, "holds half of a surrogate pair, which is no character", "skipped")
        elif id in texts:
            problems.report(place, f"the id {id!r} stands twice", "the first text is kept")
        else:
            texts[id] = f"{row.get('title') or ''} {text}".strip()
    return texts


def judge(
    name: str,
    corpus: dict[str, str],
    queries: dict[str, str],
    judgements: Iterator[tuple[str, str, str, int]],
    problems: Problems,
    **settings: Any,
) -> Collection:
    """Put a collection together.

    Args:
        name: Its name.
        corpus: Document texts by id.
        queries: Query texts by id.
        judgements: (place, query id, document id, grade).
        problems: Takes judgements of what is not there, or that contradict each other.
        **settings: Further fields of :class:`Collection`.

    Raises:
        CollectionError: No document or query is left, or no document is judged relevant.
    """
    qrels: dict[str, dict[str, int]] = {}
    for place, query, document, grade in judgements:
        if query not in queries:
            problems.report(place, f"judges query {query!r}, which the collection does not hold", "skipped")
            continue
        if document not in corpus:
            # As trec_eval and BEIR do: a relevant document that cannot be found counts against recall.
            problems.report(
                place, f"judges document {document!r}, which the collection does not hold", "counted as never found"
            )
        known = qrels.setdefault(query, {}).setdefault(document, grade)
        if known != grade:
            problems.report(
                place, f"grades {document!r} for {query!r} as {grade}, before as {known}", "the first is kept"
            )
    relevant = [query for query, grades in qrels.items() if max(grades.values()) > 0]
    for lack, there in (
        ("it holds no document", corpus),
        ("it holds no query", queries),
        ("no document is judged relevant", relevant),
    ):
        if not there:
            said = "".join(f"\n  {problem}" for problem in problems.found[:5])
            raise CollectionError(f"{name} cannot be evaluated: {lack}.{said}")
    return Collection(
        name,
        corpus,
        {query: queries[query] for query in relevant},
        {query: qrels[query] for query in relevant},
        problems=problems.found,
        **settings,
    )


def whole_number(grade: Any) -> int:
    """Read a grade; "1.0" is a whole number too.

    Raises:
        ValueError: It is not a whole number.
    """
    number = float(grade)
    if not number.is_integer():
        raise ValueError(f"{grade!r} is not a whole number.")
    return int(number)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can express what UTF-8 and tokenizers cannot
        return False
    return True


def _shown(row: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {type(value).__name__}" for key, value in row.items()) + "}"
