"""Training data: files and hub names to a checked dataset with the columns that sparse losses expect."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, concatenate_datasets
from sentence_transformers import SparseEncoder

from st_sparse_rescale.evaluation.checksum import texts_crc32
from st_sparse_rescale.rows import DataError, Row, read_rows

logger = logging.getLogger(__name__)

LABEL_NAMES = ("label", "labels", "score", "scores")
NEGATIVE_NAME = re.compile(r"negatives?|negative_(\d+)")
CHUNK_ROWS = 10_000

TeacherScores = Literal["none", "margins", "scores"]


def load_training_data(
    source: str | Path | Dataset,
    *,
    columns: Mapping[str, str] | None = None,
    num_negatives: int | None = None,
    teacher_scores: TeacherScores = "none",
    teacher_scale: float = 1.0,
) -> Dataset:
    """Read training data, check every row and return it in the form that sentence-transformers' losses take.

    Roles are found by column name: ``query`` (or ``anchor``), ``positive``, any number of ``negative``,
    ``negative_1``... or lists in ``negatives``, and teacher scores in one of ``label``, ``labels``, ``score``,
    ``scores``. Other columns are ignored. The data is held in memory, as Arrow.

    Args:
        source: A ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` file, a dataset, or a hub name written
            ``owner/name``, ``owner/name:config`` or ``owner/name:config:split`` (split: ``train`` unless given).
        columns: Role to the name its column has in the source, such as ``{"query": "question"}``.
        num_negatives: Keep the first so many negatives of each row; all of them if None.
        teacher_scores: What the loss needs: nothing; ``"margins"`` between the positive and each negative, or the
            scores of positive and negatives, from which they follow; or those ``"scores"`` only.
        teacher_scale: Teacher scores are multiplied by this, to bring them into the unit of the student's dot products.

    Returns:
        A dataset with the columns ``query``, ``positive``, ``negative`` (or ``negative_1``...) and, if the loss needs
        teacher scores, ``label``.

    Raises:
        DataError: If the source is unreadable or empty, a column is missing, a text is null or blank, rows differ in
            their number of negatives, or a score is missing or not finite.

    Example:
        >>> from datasets import Dataset
        >>> rows = Dataset.from_list([{"answer": "Paris", "query": "capital of France", "negatives": ["Bonn", "Rome"]}])
        >>> load_training_data(rows, columns={"positive": "answer"})[0]
        {'query': 'capital of France', 'positive': 'Paris', 'negative_1': 'Bonn', 'negative_2': 'Rome'}
    """
    name = "dataset" if isinstance(source, Dataset) else str(source)
    examples = _examples(read_rows(source), dict(columns or {}), num_negatives, teacher_scores, teacher_scale)
    chunks = []
    try:
        while chunk := list(islice(examples, CHUNK_ROWS)):
            chunks.append(Dataset.from_list(chunk))
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error
    if not chunks:
        raise DataError(f"{name}: there are no rows; training needs at least one.")
    return concatenate_datasets(chunks)


def _examples(
    rows: Iterator[tuple[str, Row]],
    columns: dict[str, str],
    num_negatives: int | None,
    teacher_scores: TeacherScores,
    teacher_scale: float,
) -> Iterator[dict[str, Any]]:
    roles: _Roles | None = None
    first_count: int | None = None
    for place, row in rows:
        roles = roles or _Roles(list(row), columns, teacher_scores)
        roles.refuse_new_negatives(row, place)
        texts = {role: _text(row.get(column), column, place) for role, column in roles.texts.items()}
        negatives = [_text(text, column, place) for column in roles.negatives for text in _listed(row.get(column))]
        count = len(negatives)
        if num_negatives is None:
            first_count = count if first_count is None else first_count
            if count != first_count:
                raise DataError(
                    f"{place} has {count} negatives, the first row {first_count}: "
                    "give every row as many, or set num_negatives to keep the first n of each."
                )
        elif count < num_negatives:
            raise DataError(f"{place} has {count} negatives, fewer than num_negatives={num_negatives}: lower it.")
        else:
            negatives = negatives[:num_negatives]
        example: dict[str, Any] = {**texts, **_named(negatives)}
        if roles.label is not None:
            scores = _scores(row.get(roles.label), roles.label, place)
            kept = _kept_scores(scores, count, len(negatives), teacher_scores, place)
            scaled = [teacher_scale * score for score in kept]
            example["label"] = scaled if len(scaled) > 1 else scaled[0]
        yield example


class _Roles:
    """Which column plays which role, settled once from the names of the first row."""

    def __init__(self, found: list[str], columns: dict[str, str], teacher_scores: TeacherScores) -> None:
        self.found = found
        for role, column in columns.items():
            if role not in ("query", "positive", "label") and not NEGATIVE_NAME.fullmatch(role):
                raise DataError(f"columns names a role {role!r}; roles are query, positive, negative_1... and label.")
            if column not in found:
                raise DataError(f"there is no column {column!r} to be the {role}; the columns are {found}.")
        names = {name: name for name in found if name not in columns.values()} | columns
        query = "query" if "query" in names or "anchor" not in names else "anchor"
        self.texts = {"query": self._need(query, names), "positive": self._need("positive", names)}
        matches = [match for match in map(NEGATIVE_NAME.fullmatch, names) if match]
        matches.sort(key=lambda match: int(match[1] or 0))
        self.negatives = [names[match[0]] for match in matches]
        self.label: str | None = None
        if teacher_scores == "none":
            return
        if not self.negatives:
            raise DataError(
                f"there is no negative column, which distillation compares; the columns are {found}. "
                "`st-sparse-rescale mine` finds negatives."
            )
        labels = ["label"] if "label" in columns else [name for name in LABEL_NAMES if name in names]
        if len(labels) > 1:
            raise DataError(f"the teacher's scores could be any of {labels}: keep one, or set columns: {{label: ...}}.")
        if not labels:
            raise DataError(
                f"there is no column of teacher scores, label or score; the columns are {found}. "
                "Let `st-sparse-rescale score` add one, or set columns: {label: its name}."
            )
        self.label = names[labels[0]]

    def refuse_new_negatives(self, row: Row, place: str) -> None:
        """Refuse negatives that the first row has no column for: they would be left out without a word."""
        new = [name for name in row if name not in self.found and NEGATIVE_NAME.fullmatch(name)]
        if new:
            raise DataError(
                f"{place} has the negatives {new}, which the first row has not; its columns are {self.found}. "
                "Give every row as many negatives."
            )

    def _need(self, role: str, names: dict[str, str]) -> str:
        if role not in names:
            raise DataError(
                f"there is no column {role!r}; the columns are {self.found}. "
                f"Rename one, or set columns: {{{role}: its name}}."
            )
        return names[role]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _listed(value: Any) -> list[Any]:
    """A list of negatives, or one; in text files a list comes as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # a text that merely begins with a bracket
            parsed = json.loads(value)
            if isinstance(parsed, list) and all(isinstance(text, str) for text in parsed):
                return parsed
    return _as_list(value)


def _text(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str):
        found = "null or missing" if value is None else f"{type(value).__name__} {value!r:.40}"
        raise DataError(f"{place}: {column!r} must be text, but is {found}. Fill it in or drop the row.")
    if not value.strip():
        raise DataError(f"{place}: {column!r} is blank. Fill it in or drop the row.")
    return value


def _named(negatives: list[str]) -> dict[str, str]:
    if len(negatives) == 1:
        return {"negative": negatives[0]}
    return {f"negative_{number}": text for number, text in enumerate(negatives, start=1)}


def _scores(value: Any, column: str, place: str) -> list[float]:
    """Read a number or a list of numbers; in text files both come as JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # reported below, as any other value that is no number
            value = json.loads(value)
    scores = _as_list(value)
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise DataError(f"{place}: {column!r} must be a number or a list of numbers, but holds {score!r:.40}.")
        if not math.isfinite(score):
            raise DataError(f"{place}: {column!r} holds {score}, but teacher scores must be finite.")
    return [float(score) for score in scores]


def _kept_scores(scores: list[float], count: int, kept: int, wanted: TeacherScores, place: str) -> list[float]:
    """Check a row's scores against its negatives and drop those of the negatives that were dropped."""
    if len(scores) == count + 1:
        return scores[: kept + 1]
    if len(scores) == count and wanted == "margins":
        return scores[:kept]
    allowed = f"{count + 1} scores (of the positive and each negative)"
    if wanted == "margins":
        allowed = f"{count} margins (positive minus each negative) or {allowed}"
    raise DataError(f"{place} has {len(scores)} teacher scores for {count} negatives: it needs {allowed}.")


def dataset_crc32(dataset: Dataset) -> int:
    """Checksum of the rows, by which training data are known again."""
    return texts_crc32(json.dumps(row, sort_keys=True) for row in dataset)


def teacher_scale_warning(model: SparseEncoder, dataset: Dataset, rows: int = 32, limit: float = 100.0) -> str | None:
    """Compare the teacher's margins with those of the untrained student on the first rows.

    MarginMSE compares margins directly, and KL divergence their softmax: when the units differ by orders of magnitude,
    training fits the unit instead of the ranking.

    Args:
        model: The student.
        dataset: Training data with teacher scores, as :func:`load_training_data` returns it.
        rows: How many rows to look at.
        limit: The factor beyond which the magnitudes count as different units.

    Returns:
        What to tell the user, with the numbers and the scale that would help; None if all is well.
    """
    sample = dataset[:rows]
    queries = model.encode_query(sample["query"], show_progress_bar=False)
    candidates = [name for name in dataset.column_names if name not in ("query", "label")]
    student = torch.stack(
        [
            model.similarity_pairwise(queries, model.encode_document(sample[name], show_progress_bar=False)).cpu()
            for name in candidates
        ],
        dim=1,
    )
    teacher = torch.tensor(sample["label"]).reshape(len(queries), -1)
    student_margin = _mean_margin(student)
    teacher_margin = _mean_margin(teacher) if teacher.shape == student.shape else teacher.abs().mean().item()
    if not student_margin or not teacher_margin:
        return None
    ratio = teacher_margin / student_margin
    if 1 / limit <= ratio <= limit:
        return None
    return (
        f"The teacher's margins average {teacher_margin:.3g} and the untrained student's {student_margin:.3g}: "
        f"they are in different units. Multiply teacher_scale by about {1 / ratio:.2g}"
        + (", or raise k, if it is the student's scores that are too large." if ratio < 1 else ".")
    )


def _mean_margin(scores: torch.Tensor) -> float:
    return (scores[:, :1] - scores[:, 1:]).abs().mean().item()
