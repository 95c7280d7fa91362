"""Prune documents: fewer terms a vector, and a smaller index for a measured loss."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

from st_sparse_rescale.evaluation.csr import limit_active_dims


def prune(
    matrix: sparse.csr_matrix,
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    mass: float | None = None,
) -> sparse.csr_matrix:
    """Drop the lightest terms of each row. Several limits hold together.

    Args:
        matrix: (rows, vocabulary), as :func:`~st_sparse_rescale.evaluation.csr.as_csr` gives it.
        top_k: Keep so many of the heaviest terms of each row; of equal weights the lowest term.
        threshold: Keep weights of at least this.
        mass: Keep the fewest of the heaviest terms that hold at least this share of the row's sum of weights, above 0
            and at most 1 (static pruning by share of mass, as Seismic's summaries are pruned: Bruch et al.,
            SIGIR 2024).

    Returns:
        (rows, vocabulary).

    Raises:
        ValueError: A limit is out of its range.

    Example:
        ::

            prune(as_csr(np.array([[4.0, 1.0, 3.0, 2.0]])), mass=0.7).toarray()  # [[4.0, 0.0, 3.0, 0.0]]
    """
    if threshold is not None and not (math.isfinite(threshold) and threshold >= 0):
        raise ValueError(f"The threshold must be a weight, 0 or more, got {threshold}.")
    if mass is not None and not 0 < mass <= 1:
        raise ValueError(f"The share of mass must be above 0 and at most 1, got {mass}.")
    matrix = limit_active_dims(matrix, top_k) if mass is None else _by_mass(matrix, mass, top_k)
    return matrix if threshold is None else kept(matrix, matrix.data >= threshold)


def kept(matrix: sparse.csr_matrix, keep: np.ndarray) -> sparse.csr_matrix:
    """Keep some of the stored weights.

    Args:
        matrix: (rows, vocabulary).
        keep: (stored weights,) of bool.
    """
    counts = np.concatenate([[0], np.cumsum(keep)])
    pruned = sparse.csr_matrix(
        (matrix.data[keep], matrix.indices[keep], counts[matrix.indptr].astype(np.int32)), shape=matrix.shape
    )
    pruned.has_canonical_format = True
    return pruned


def _by_mass(matrix: sparse.csr_matrix, mass: float, top_k: int | None) -> sparse.csr_matrix:
    row_of = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    heaviest_first = np.lexsort((-matrix.data, row_of))
    weights = matrix.data[heaviest_first].astype(np.float64)
    # The sum before each weight, within its row: what the heavier ones hold already.
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    starts = sums[matrix.indptr]
    before = sums[:-1] - starts[:-1][row_of]
    enough = mass * (1 - 1e-12) * np.diff(starts)[row_of]
    keep = np.empty(matrix.nnz, dtype=bool)
    keep[heaviest_first] = before < enough
    return limit_active_dims(kept(matrix, keep), top_k)
