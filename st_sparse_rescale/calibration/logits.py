"""The raw logits of a head: their distribution, and the largest of each text, without ever holding them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from st_sparse_rescale.heads import MLMHead

TILE = 1024  # terms at a time
BINS = 1 << 14  # of the histogram that quantiles are read from
SHOWN_BINS = 128  # of the one that is kept
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

# What a head that trains well looks like: bert-base-uncased on 512 queries of MS MARCO, as published.
BERT_MEAN, BERT_STD, BERT_NEGATIVE = -7.00, 3.68, 0.983
BERT_QUANTILES = {"0.5": -6.76, "0.95": -1.62, "0.99": 0.81}


@dataclass(frozen=True)
class Logits:
    """The distribution of raw logits over all tokens and terms.

    Attributes:
        count: How many.
        mean: Their mean.
        std: Their standard deviation.
        minimum: The smallest.
        maximum: The largest.
        negative: The share below zero.
        quantiles: By share ("0.5" is the median), read from a fine histogram.
        resolution: Width of its bins: no quantile is farther off than this.
        edges: Edges of the first and of the last bin of `histogram`.
        histogram: Counts in bins of equal width.
    """

    count: int
    mean: float
    std: float
    minimum: float
    maximum: float
    negative: float
    quantiles: dict[str, float]
    resolution: float
    edges: tuple[float, float]
    histogram: tuple[int, ...]


def describe(states: Tensor, head: MLMHead) -> Logits:
    """Describe the logits of tokens, tile by tile.

    Args:
        states: What enters the decoder, shape (tokens, D).
        head: The head.

    Returns:
        Their distribution.
    """
    bound = _bound(states, head)
    total = square = 0.0
    minimum, maximum, negative = math.inf, -math.inf, 0
    fine = torch.zeros(BINS, dtype=torch.int64)
    for logits in _tiles(states, head):
        total += logits.sum(dtype=torch.float64).item()
        square += logits.double().square().sum().item()
        minimum, maximum = min(minimum, logits.min().item()), max(maximum, logits.max().item())
        negative += int((logits < 0).sum())
        fine += torch.histc(logits, BINS, -bound, bound).cpu().long()
    count = int(fine.sum())
    mean = total / count
    edges, histogram = _coarse(fine, bound)
    return Logits(
        count=count,
        mean=mean,
        std=math.sqrt(max(square / count - mean**2, 0.0)),
        minimum=minimum,
        maximum=maximum,
        negative=negative / count,
        quantiles={str(share): _quantile(fine, bound, share) for share in QUANTILES},
        resolution=2 * bound / BINS,
        edges=edges,
        histogram=histogram,
    )


def maxima(states: Tensor, lengths: list[int], head: MLMHead) -> Tensor:
    """The largest logit of each text and term.

    Args:
        states: What enters the decoder for the tokens of all texts, one after the other, shape (tokens, D).
        lengths: Tokens of each text.
        head: The head.

    Returns:
        Shape (texts, V).
    """
    tiles = (torch.stack([text.amax(dim=0) for text in logits.split(lengths)]) for logits in _tiles(states, head))
    return torch.cat(list(tiles), dim=1)


def _tiles(states: Tensor, head: MLMHead) -> Iterator[Tensor]:
    """The logits, (tokens, terms) at a time."""
    for first in range(0, head.vocab_size, TILE):
        terms = slice(first, first + TILE)
        bias = None if head.bias is None else head.bias[terms].to(states.dtype)
        yield torch.nn.functional.linear(states, head.decoder.weight[terms].to(states.dtype), bias)


def _bound(states: Tensor, head: MLMHead) -> float:
    """What no logit exceeds in size (Cauchy-Schwarz), with some room for rounding."""
    row = head.decoder.weight.float().norm(dim=1).max().item()
    bias = 0.0 if head.bias is None else head.bias.abs().max().item()
    return 1.001 * (states.norm(dim=1).max().item() * row + bias) + 1e-6


def _quantile(fine: Tensor, bound: float, share: float) -> float:
    """Where a share of the counts lies below, evenly spread within a bin."""
    below = fine.cumsum(0)
    wanted = share * below[-1].item()
    index = int(torch.searchsorted(below, wanted))
    before = below[index].item() - fine[index].item()
    return -bound + 2 * bound / BINS * (index + (wanted - before) / fine[index].item())


def _coarse(fine: Tensor, bound: float) -> tuple[tuple[float, float], tuple[int, ...]]:
    """Merge bins, from the first that is not empty to the last, into at most `SHOWN_BINS`."""
    filled = fine.nonzero().flatten()
    first, last = int(filled[0]), int(filled[-1]) + 1
    merged = math.ceil((last - first) / SHOWN_BINS)
    count = math.ceil((last - first) / merged)
    kept = torch.zeros(count * merged, dtype=torch.int64)
    kept[: last - first] = fine[first:last]
    width = 2 * bound / BINS
    low = -bound + first * width
    return (low, low + count * merged * width), tuple(kept.view(count, merged).sum(dim=1).tolist())
