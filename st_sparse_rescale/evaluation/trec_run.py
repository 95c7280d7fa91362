"""Rankings as TREC run files, which every evaluation tool reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from st_sparse_rescale.evaluation.metrics import Run
from st_sparse_rescale.whole import written_whole


def write_run(file: str | Path, run: Run, tag: str) -> Path:
    """Write rankings as ``query Q0 document rank score tag`` lines.

    TREC's tools read the scores, in single precision, and not the ranks; equal scores they order by id backwards. So
    that they see the ranking as it is, a score that does not fall below the one before it is lowered to the next
    number below.

    Args:
        file: Written whole or not at all; its folder is made if absent.
        run: The rankings.
        tag: Name of the system, without white space.

    Returns:
        The file.

    Raises:
        ValueError: An id or the tag is empty or holds white space.

    Example:
        ::

            write_run("scifact.trec", {"q1": [("d7", 14.2), ("d2", 11.9)]}, tag="splade")
    """
    file = Path(file)
    require_words([tag, *run])
    lines = []
    for query, hits in run.items():
        require_words(document for document, _ in hits)
        last = np.float32(np.inf)
        for rank, (document, score) in enumerate(hits, start=1):
            last = min(np.float32(score), np.nextafter(last, np.float32(-np.inf)))
            lines.append(f"{query} Q0 {document} {rank} {float(last)!r} {tag}\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as partial:
        partial.write_text("".join(lines), encoding="utf-8")
    return file


def read_run(file: str | Path) -> dict[str, list[tuple[str, float]]]:
    """Read a TREC run, each query's documents by falling score, equal scores in the order of the file.

    Raises:
        ValueError: A line is malformed; the message names file and line.
    """
    run: dict[str, list[tuple[str, float]]] = {}
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                query, _, document, _, score, _ = line.split()
                run.setdefault(query, []).append((document, float(score)))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: must be 'query Q0 document rank score tag'.") from error
    for hits in run.values():
        hits.sort(key=lambda hit: -hit[1])
    return run


def require_words(texts: Iterable[str]) -> None:
    """Check that texts can stand in a run.

    Raises:
        ValueError: One is empty or holds white space, which the format cannot express.
    """
    for text in texts:
        if text.split() != [text]:
            raise ValueError(f"{text!r} cannot stand in a TREC run: it is empty or holds white space.")
