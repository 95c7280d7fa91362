"""The LM head of SPLADE without its logits: projection, pooling over the tokens and activation, tile by tile.

A stock SPLADE head multiplies every token with every term and keeps several copies of the (batch, length, vocabulary)
result, of which max pooling uses one entry in `length`. Three facts make those copies needless:

* `log1p(relu(x))` never decreases, so it commutes with max: pool the raw logits and transform (batch, vocabulary).
* The vocabulary can be walked in tiles. A tile's logits are pooled while they are in the cache, and their buffer is
  used again for the next tile: the forward pass costs its matrix product and little else.
* Only the token that wins a term receives gradient, and only where the logit is positive. The gradient of the logits
  is a sparse matrix with at most one entry per sequence and term, so the two products of the backward pass cost
  `1 / length` of the dense ones, and less once the vectors are sparse.

Memory is O(batch * vocabulary + tokens * tile), whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

Activation = Literal["relu", "log1p_relu"]
Pooling = Literal["max", "sum"]


def unpad(hidden: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the real tokens of a padded batch.

    Args:
        hidden: Hidden states, shape (batch, length, dimension).
        attention_mask: Non-zero at the tokens to keep, shape (batch, length). Padding may be on either side, and
            tokens in the middle may be left out too.

    Returns:
        The kept hidden states, shape (tokens, dimension), and where each sequence begins and ends among them:
        int64, shape (batch + 1,), beginning with 0 and ending with `tokens`.

    Raises:
        ValueError: If the mask does not have the shape of the batch.

    Example:
        >>> hidden = torch.arange(6.0).view(2, 3, 1)
        >>> tokens, cu_seqlens = unpad(hidden, torch.tensor([[1, 1, 1], [1, 0, 0]]))
        >>> tokens.flatten().tolist(), cu_seqlens.tolist()
        ([0.0, 1.0, 2.0, 3.0], [0, 3, 4])
    """
    if attention_mask.shape != hidden.shape[:-1]:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but hidden states of shape "
            f"{tuple(hidden.shape)} need one of shape {tuple(hidden.shape[:-1])}."
        )
    keep = attention_mask.bool()
    return hidden[keep], pad(keep.sum(dim=1).cumsum(dim=0), (1, 0))


@torch.compiler.disable  # The loops depend on the lengths: a compiled encoder hands over here and nothing is retraced.
def splade_head(
    hidden: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "relu",
    pooling: Pooling = "max",
    tile: int | None = None,
) -> Tensor:
    """Score every term of the vocabulary for every sequence, without building the logits.

    Equals a linear layer followed by sentence-transformers' `SpladePooling`, in values and in gradients, up to the
    order of additions. Where several tokens of a sequence share the greatest logit of a term, the first of them gets
    the gradient, as with `torch.max`. (Stock pooling agrees for padded batches, up to scores which differ in their
    logits but not after rounding the logarithm; for flattened ones it splits the gradient evenly.) A sequence without
    tokens scores zero.

    Under autocast the matrix product, and so the result, is in the lower precision, as in a stock head; the gradient
    of the weight is accumulated in the precision of the weight.

    With max pooling, the backward pass keeps `hidden` and 4 bytes per sequence and term; nothing is kept when no
    gradient is asked for. With sum pooling every token gets gradient, so each tile's logits are computed again in the
    backward pass: one dense product more than stock, in bounded memory.

    Args:
        hidden: The decoder's inputs for the real tokens of all sequences, one after the other (see `unpad`), shape
            (tokens, dimension).
        cu_seqlens: Where each sequence begins and ends among the tokens: integers, shape (batch + 1,).
        weight: The decoder's matrix, shape (vocabulary, dimension).
        bias: The decoder's bias, shape (vocabulary,).
        activation: `"relu"` for `log1p(relu(x))`, or `"log1p_relu"` for `log1p(log1p(relu(x)))`.
        pooling: `"max"` or `"sum"` over the tokens of a sequence.
        tile: How many terms to score at a time. By default 1,024 on CPU, where the product runs at full speed and its
            result is pooled from the cache, but no more than fit in 64 MiB; on a GPU as many as fit in 256 MiB, unless
            the Triton kernel applies (`triton` installed, half precision or TF32, max pooling), which needs no tile.

    Returns:
        The scores, non-negative, shape (batch, vocabulary), in the precision of the product.

    Raises:
        ValueError: If shapes or precisions do not fit together, or an option is unknown.
        RuntimeError: If a second derivative is asked for, which the head does not offer.

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])  # two tokens, then one
        >>> splade_head(hidden, torch.tensor([0, 2, 3]), weight=torch.eye(2)).expm1()
        tensor([[1., 2.],
                [0., 0.]])
    """
    bounds = cu_seqlens.tolist()
    _check(hidden, bounds, weight, bias, activation, pooling, tile)
    tile = min(tile or _default_tile(hidden), len(weight))
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if pooling == "sum":
        return _SumOfScores.apply(hidden, weight, bias, bounds, tile, activation)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        best = _PositiveMax.apply(hidden, weight, bias, bounds, tile)
    else:
        best, _ = _positive_max(hidden, weight, bias, bounds, tile, with_positions=False)
    return _saturate(best, activation)


def _check(
    hidden: Tensor,
    bounds: list[int],
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    pooling: str,
    tile: int | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be (tokens, dimension) and weight (vocabulary, dimension) with the same dimension, got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}. Use unpad() for a padded batch."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have one value for each of {len(weight)} terms, got shape {tuple(bias.shape)}.")
    if bounds[0] != 0 or bounds[-1] != len(hidden) or any(stop < start for start, stop in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(hidden)} tokens, got {bounds}.")
    if activation not in ("relu", "log1p_relu"):
        raise ValueError(f"activation must be 'relu' or 'log1p_relu', got {activation!r}.")
    if pooling not in ("max", "sum"):
        raise ValueError(f"pooling must be 'max' or 'sum', got {pooling!r}.")
    if tile is not None and tile < 1:
        raise ValueError(f"tile must be a positive number of terms, or None to choose it, got {tile}.")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: convert one of them, or use torch.autocast."
        )


def _default_tile(hidden: Tensor) -> int:
    # On CPU, narrower tiles starve the matrix product and wider ones leave the cache: benchmarks/lm_head.py --tiles.
    # On a GPU a tile costs a launch per sequence, and only memory speaks against a wide one.
    most, budget = (1 << 30, 256 << 20) if hidden.is_cuda else (1024, 64 << 20)
    return max(64, min(most, budget // max(1, len(hidden) * hidden.element_size())))


def _saturate(logits: Tensor, activation: str) -> Tensor:
    log1p = torch.log1p if logits.requires_grad else torch.log1p_
    return log1p(log1p(logits)) if activation == "log1p_relu" else log1p(logits)


def _tiles(hidden: Tensor, weight: Tensor, bias: Tensor | None, tile: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Walk the vocabulary: which terms, their rows of the matrix, and their logits, (terms, tokens).

    The logits are valid until the next tile, which reuses their buffer: fresh ones would not only miss the cache but,
    interleaved with what outlives a tile, would scatter over the heap until it is as large as the full logits.
    """
    buffer = hidden.new_empty(tile * len(hidden))
    for first in range(0, len(weight), tile):
        columns = slice(first, first + tile)
        rows = weight[columns].to(hidden.dtype)
        # Terms by tokens rather than tokens by terms: a maximum with its index is quickest along the contiguous axis.
        logits = buffer[: len(rows) * len(hidden)].view(len(rows), len(hidden))
        if bias is None:
            torch.mm(rows, hidden.T, out=logits)
        else:
            torch.addmm(bias[columns, None].to(hidden.dtype), rows, hidden.T, out=logits)
        yield columns, rows, logits


def _positive_max(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int], tile: int, *, with_positions: bool
) -> tuple[Tensor, Tensor | None]:
    """relu(max over the tokens of the logits), (batch, vocabulary), and the winning tokens, (vocabulary, batch).

    A winner is an index into `hidden`, or -1 where no logit is positive.
    """
    if hidden.is_cuda and hidden.dtype in _tensor_core_dtypes() and (kernel := _triton_kernel()) is not None:
        return kernel(hidden, weight, bias, bounds, with_positions=with_positions)
    terms, batch = len(weight), len(bounds) - 1
    spans = [(i, start, stop) for i, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
    starts = torch.tensor(bounds[:-1], device=hidden.device)
    result = hidden.new_empty(batch, terms)
    positions = torch.empty(terms, batch, dtype=torch.int32, device=hidden.device) if with_positions else None
    for columns, rows, logits in _tiles(hidden, weight, bias, tile):
        best = logits.new_full((len(rows), batch), -torch.inf)
        winner = torch.zeros(len(rows), batch, dtype=torch.int64, device=hidden.device)
        for i, start, stop in spans:
            if with_positions:
                torch.max(logits[:, start:stop], dim=1, out=(best[:, i], winner[:, i]))
            else:  # several times quicker than max with its index
                torch.amax(logits[:, start:stop], dim=1, out=best[:, i])
        if positions is not None:
            positions[columns] = torch.where(best <= 0, -1, winner + starts)  # so worded that a NaN keeps its gradient
        result[:, columns] = best.T
    return result.relu_(), positions


def _tensor_core_dtypes() -> tuple[torch.dtype, ...]:
    exact = torch.get_float32_matmul_precision() == "highest"
    return (torch.bfloat16, torch.float16) if exact else (torch.bfloat16, torch.float16, torch.float32)


@cache
def _triton_kernel() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    if find_spec("triton") is None:
        return None
    from st_sparse_rescale.modules.fused_triton import positive_max

    return positive_max


def _refuse_second_derivative() -> None:
    # Not `once_differentiable`: that stays silent where the incoming gradient is a constant.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "splade_head has no second derivative, which create_graph=True asks for. "
            "Use a linear layer and sentence-transformers' SpladePooling for such a loss."
        )


class _PositiveMax(torch.autograd.Function):
    """`_positive_max` with the gradient flowing through the winning tokens only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int], tile: int) -> Tensor:
        result, positions = _positive_max(hidden, weight, bias, bounds, tile, with_positions=True)
        ctx.save_for_backward(hidden, weight, positions)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        hidden, weight, positions = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = grad_weight = grad_bias = None
        if need_bias:
            grad_bias = grad.T.where(positions >= 0, 0).sum(dim=1)
        # The gradient of the logits has one entry per sequence and active term; first in the order of the terms.
        term, sequence = (positions >= 0).nonzero(as_tuple=True)
        token, value = positions[term, sequence], grad[sequence, term].to(weight.dtype)
        term = term.int()
        if need_weight:
            grad_weight = _sparse_product(term, token, value, hidden.to(weight.dtype), len(weight))
        if need_hidden:
            token, order = token.sort(stable=True)
            grad_hidden = _sparse_product(token, term[order], value[order], weight, len(hidden)).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _sparse_product(row: Tensor, column: Tensor, value: Tensor, dense: Tensor, rows: int) -> Tensor:
    """A sparse matrix, given by its entries in the order of their rows, times a dense one.

    `embedding_bag` is this product: deterministic, in every precision, and on CPU quicker than that of `torch.sparse`.
    """
    offsets = torch.searchsorted(row, torch.arange(rows + 1, dtype=row.dtype, device=row.device), out_int32=True)
    return embedding_bag(column, dense, offsets, mode="sum", per_sample_weights=value, include_last_offset=True)


class _SumOfScores(torch.autograd.Function):
    """The sum over the tokens of the activated logits. Every token gets gradient, so a tile's logits are recomputed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int], tile: int, activation: str
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.options = bounds, tile, activation
        result = hidden.new_empty(len(bounds) - 1, len(weight))
        for columns, _, logits in _tiles(hidden, weight, bias, tile):
            result[:, columns] = _sum_over_tokens(logits, bounds, activation)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        hidden, weight, bias = ctx.saved_tensors
        bounds, tile, activation = ctx.options
        # Sums over many tiles: never in half precision.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        for columns, rows, logits in _tiles(hidden, weight, bias, tile):
            with torch.enable_grad():
                scores = _sum_over_tokens(logits.requires_grad_(), bounds, activation)
            (grad_logits,) = torch.autograd.grad(scores, logits, grad[:, columns])
            grad_hidden += grad_logits.T @ rows
            grad_weight[columns] = grad_logits @ hidden
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(dim=1)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def _sum_over_tokens(logits: Tensor, bounds: list[int], activation: str) -> Tensor:
    """(terms, tokens) to (batch, terms)."""
    scores = _saturate(logits.relu(), activation)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return torch.stack([sequence.sum(dim=1) for sequence in scores.split(lengths, dim=1)])
