"""Write a teacher's scores into a training file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import CrossEncoder, SparseEncoder

from st_sparse_rescale.evaluation.checksum import model_crc32
from st_sparse_rescale.jsonl_parts import write_in_parts
from st_sparse_rescale.rows import DataError
from st_sparse_rescale.training.data import dataset_crc32, load_training_data
from st_sparse_rescale.training.pair_scores import (
    cross_encoder_scorer,
    load_cross_encoder,
    load_sparse,
    sparse_scorer,
)


def score(
    source: str | Path | Dataset,
    output: str | Path,
    *,
    cross_encoder: str | Path | CrossEncoder | None = None,
    sparse: str | Path | SparseEncoder | None = None,
    columns: Mapping[str, str] | None = None,
    num_negatives: int | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = True,
) -> Path:
    """Score the positive and the negatives of each row by a teacher, for the losses ``margin_mse`` and ``kl_div``.

    The file holds ``query``, ``positive``, the list ``negatives`` and the list ``score``, the positive's first, as
    :func:`load_training_data` reads it. A call that was killed goes on where it was when it is repeated.

    Args:
        source: Queries with positives and negatives: whatever :func:`load_training_data` reads, such as the file that
            :func:`mine` wrote.
        output: The JSON Lines file to write; it must not be there yet.
        cross_encoder: The teacher, any cross-encoder with one output. Its raw logits are taken: behind a sigmoid, the
            margins between good and bad documents would all be about 1.
        sparse: The teacher, a sparse model; its similarity is taken.
        columns: Role to the name its column has in the source.
        num_negatives: Keep the first so many negatives of each row; all of them if None.
        batch_size: Pairs scored, or texts encoded, at once.
        show_progress_bar: Show the rows done.

    Returns:
        The file.

    Raises:
        ValueError: Not exactly one teacher is given, it is a classifier or untrained, a score is not finite, all are
            the same, or the parts of another call lie beside the output.
        DataError: The source cannot be read or has no negatives.
        FileExistsError: The output is there already.

    Example::

        from st_sparse_rescale.training import score

        score("mined.jsonl", "scored.jsonl", cross_encoder="cross-encoder/ms-marco-MiniLM-L6-v2")
    """
    if (cross_encoder is None) == (sparse is None):
        raise ValueError("Give one teacher: a cross-encoder (--cross-encoder) or a sparse model (--sparse).")
    data = load_training_data(source, columns=columns, num_negatives=num_negatives)
    negatives = [name for name in data.column_names if name.startswith("negative")]
    if not negatives:
        raise DataError("the data hold no negatives for a teacher to compare with the positives: mine some first.")
    model: CrossEncoder | SparseEncoder
    if cross_encoder is not None:
        model = load_cross_encoder(cross_encoder)
        scores_of = cross_encoder_scorer(model, logits=True, batch_size=batch_size)
    else:
        model = load_sparse(sparse)  # type: ignore[arg-type]
        scores_of = sparse_scorer(model, batch_size=batch_size)

    def rows_of(numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        rows = [data[number] for number in numbers]
        pairs = [(row["query"], row[name]) for row in rows for name in ("positive", *negatives)]
        found = iter(scores_of(pairs))
        scores = [list(islice(found, 1 + len(negatives))) for _ in rows]
        if numbers[0] == 0 and all(min(own) == max(own) for own in scores):
            raise ValueError(
                f"The teacher gives all documents of a query one score, such as {scores[0][0]:g}, in each of the first "
                f"{len(rows):,} rows: there is nothing to learn from it. Look at the model."
            )
        for row, own in zip(rows, scores, strict=True):
            yield {
                "query": row["query"],
                "positive": row["positive"],
                "negatives": [row[name] for name in negatives],
                "score": own,
            }

    record = {"data": dataset_crc32(data), "teacher": model_crc32(model)}
    write_in_parts(
        output, range(len(data)), rows_of, record=record, description="Scoring", show_progress_bar=show_progress_bar
    )
    return Path(output)
