"""Sparse embeddings as CSR matrices: conversion, checks and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import sparse

Embeddings: TypeAlias = torch.Tensor | np.ndarray | sparse.spmatrix | sparse.sparray
"""(rows, vocabulary): a torch tensor (COO, CSR or dense), a numpy array or any scipy sparse matrix."""


def as_csr(embeddings: Embeddings) -> sparse.csr_matrix:
    """Turn sparse embeddings into a CSR matrix of float32, terms in order, nothing stored but positive weights.

    Args:
        embeddings: (rows, vocabulary).

    Returns:
        (rows, vocabulary) with 32-bit indices.

    Raises:
        TypeError: The type is not one of the above.
        ValueError: Not two-dimensional, or a weight is negative, infinite or NaN.

    Example:
        ::

            as_csr(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).indices  # [1, 0]
    """
    return _checked(sparse.csr_matrix(_to_scipy(embeddings), dtype=np.float32))


def shape_of(embeddings: Embeddings) -> tuple[int, int]:
    """Rows and vocabulary of embeddings.

    Raises:
        TypeError: Neither a tensor nor a matrix.
        ValueError: Not two-dimensional.
    """
    if not isinstance(embeddings, torch.Tensor | np.ndarray) and not sparse.issparse(embeddings):
        raise TypeError(
            "Embeddings must be a torch tensor, a numpy array or a scipy sparse matrix, "
            f"got {type(embeddings).__name__}."
        )
    if len(embeddings.shape) != 2:
        raise ValueError(
            f"Embeddings must have two dimensions (rows, vocabulary), got {len(embeddings.shape)}: "
            "encode a list of texts, not a single text."
        )
    return embeddings.shape[0], embeddings.shape[1]


def csr_chunks(embeddings: Embeddings, size: int) -> Iterator[tuple[int, sparse.csr_matrix]]:
    """Convert embeddings by consecutive chunks of rows, so that no second copy of all of them is made.

    Args:
        embeddings: (rows, vocabulary).
        size: Rows a chunk.

    Yields:
        The position of the chunk's first row, and :func:`as_csr` of the chunk.

    Raises:
        ValueError: The size is not positive; see :func:`as_csr` for the rest.
    """
    if size < 1:
        raise ValueError(f"A chunk needs at least one row, got {size}.")
    count, dimension = shape_of(embeddings)
    starts = range(0, count, size)
    if isinstance(embeddings, torch.Tensor) and embeddings.layout != torch.strided:
        # Sparse tensors cannot be sliced; coalesced ones are sorted by row, so a chunk of rows is a range of values.
        coalesced = _coalesced(embeddings)
        indices, values = coalesced.indices(), coalesced.values()
        bounds = torch.searchsorted(indices[0].contiguous(), torch.tensor([*starts, count], device=indices.device))
        for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True):
            shape = (min(size, count - start), dimension)
            yield start, _checked(_from_coo(indices[:, first:last], values[first:last], shape, first_row=start))
    else:
        sliceable: Any = sparse.csr_matrix(embeddings) if sparse.issparse(embeddings) else embeddings
        for start in starts:
            yield start, as_csr(sliceable[start : start + size])


def limit_active_dims(matrix: sparse.csr_matrix, limit: int | None) -> sparse.csr_matrix:
    """Keep the heaviest terms of each row, as ``max_active_dims`` of sentence-transformers does.

    Args:
        matrix: (rows, vocabulary).
        limit: Terms a row; ``None`` keeps all. Of equal weights the lowest term stays.

    Returns:
        (rows, vocabulary).

    Raises:
        ValueError: The limit is not positive.
    """
    if limit is None:
        return matrix
    if limit <= 0:
        raise ValueError(f"The limit of active dimensions must be a positive integer, got {limit}.")
    lengths = np.diff(matrix.indptr)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    by_weight = np.lexsort((-matrix.data, row_of))
    place = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], lengths)
    keep = np.sort(by_weight[place < limit])
    indptr = np.concatenate([[0], np.cumsum(np.minimum(lengths, limit))]).astype(np.int32)
    return sparse.csr_matrix((matrix.data[keep], matrix.indices[keep], indptr), shape=matrix.shape)


def unit_rows(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Scale each row to length 1, so that a dot product is a cosine; empty rows stay empty."""
    norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1), dtype=np.float64)).ravel()
    scale = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    scaled = (matrix.data * np.repeat(scale, np.diff(matrix.indptr))).astype(np.float32)
    return sparse.csr_matrix((scaled, matrix.indices, matrix.indptr), shape=matrix.shape)


def _to_scipy(embeddings: Any) -> Any:
    shape = shape_of(embeddings)
    if not isinstance(embeddings, torch.Tensor):
        return embeddings
    tensor = _coalesced(embeddings)
    return _from_coo(tensor.indices(), tensor.values(), shape)


def _coalesced(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.layout == torch.sparse_coo else tensor.to_sparse_coo()).coalesce()


def _from_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], first_row: int = 0
) -> sparse.csr_matrix:
    """CSR of coalesced coordinates, which are in the order of rows and columns: only the row pointers are missing."""
    rows, columns = indices.cpu().numpy()
    indptr = np.searchsorted(rows, np.arange(first_row, first_row + shape[0] + 1))
    matrix = sparse.csr_matrix((values.detach().cpu().float().numpy(), columns.astype(np.int32), indptr), shape=shape)
    matrix.has_canonical_format = True
    return matrix


def _checked(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    if not matrix.has_canonical_format or (matrix.nnz and matrix.data.min() == 0):
        matrix = matrix.copy()  # never touch the caller's
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
    # A NaN fails both comparisons.
    if matrix.nnz and not (matrix.data.min() > 0 and matrix.data.max() < np.inf):
        place = int(np.flatnonzero(~((matrix.data > 0) & (matrix.data < np.inf)))[0])
        raise ValueError(
            f"Sparse search needs term weights that are finite and not negative, found {matrix.data[place]} in row "
            f"{int(np.searchsorted(matrix.indptr, place, side='right')) - 1}: check the model for NaN, or end it with "
            "an activation such as ReLU."
        )
    if matrix.nnz > np.iinfo(np.int32).max:
        raise ValueError(f"{matrix.nnz:,} weights are more than 32-bit indices can count: take fewer rows at once.")
    matrix.indptr = matrix.indptr.astype(np.int32, copy=False)
    matrix.indices = matrix.indices.astype(np.int32, copy=False)
    return matrix
