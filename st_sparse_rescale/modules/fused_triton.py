"""The forward pass of the fused head as one Triton kernel: on a GPU the logits never leave the chip.

Used for CUDA tensors where `triton` is installed and tensor cores may do the products; everywhere else `fused_head`
does the same in plain torch, whose exact float32 product is the quicker one.
The backward pass is the same sparse products on both, so the kernel has none of its own. The idea of reducing each
logit tile before it reaches memory is that of Sparton (https://arxiv.org/abs/2603.25011).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Terms, tokens and dimensions of a block. Not autotuned: a batch has a new shape at every step.
BLOCK_TERMS, BLOCK_TOKENS, BLOCK_DIMENSION = 128, 64, 32


@triton.jit
def _positive_max_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    bias,
    cu_seqlens,
    result,
    positions,
    terms,
    batch,
    dimension,
    HAS_BIAS: tl.constexpr,
    WITH_POSITIONS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIMENSION: tl.constexpr,
):
    # One program per sequence and block of terms. Sequences vary first, so that concurrent programs share the block's
    # rows of the matrix in the L2 cache.
    sequence = tl.program_id(0)
    term = tl.program_id(1) * BLOCK_TERMS + tl.arange(0, BLOCK_TERMS)
    is_term = term < terms
    weight_rows = weight + term.to(tl.int64)[None, :] * dimension
    dtype = hidden.dtype.element_ty
    start = tl.load(cu_seqlens + sequence)
    stop = tl.load(cu_seqlens + sequence + 1)

    best = tl.full((BLOCK_TERMS,), -float("inf"), tl.float32)
    winner = tl.full((BLOCK_TERMS,), -1, tl.int32)
    is_nan = tl.zeros((BLOCK_TERMS,), tl.int1)
    for first in range(start, stop, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        is_token = token < stop
        hidden_rows = hidden + token.to(tl.int64)[:, None] * dimension
        logits = tl.zeros((BLOCK_TOKENS, BLOCK_TERMS), tl.float32)
        for offset in range(0, dimension, BLOCK_DIMENSION):
            d = offset + tl.arange(0, BLOCK_DIMENSION)
            is_d = d < dimension
            h = tl.load(hidden_rows + d[None, :], mask=is_token[:, None] & is_d[None, :], other=0.0)
            w = tl.load(weight_rows + d[:, None], mask=is_d[:, None] & is_term[None, :], other=0.0)
            logits = tl.dot(h, w.to(dtype), logits)
        if HAS_BIAS:
            b = tl.load(bias + term, mask=is_term, other=0.0).to(dtype)
            logits += b.to(tl.float32)[None, :]
        # Rounded as a stock head rounds, so that the same tokens tie.
        logits = logits.to(dtype).to(tl.float32)
        # A comparison would lose a NaN: let it win as infinity, and remember it.
        is_nan = is_nan | (tl.max(((logits != logits) & is_token[:, None]).to(tl.int32), axis=0) > 0)
        logits = tl.where(logits != logits, float("inf"), logits)
        logits = tl.where(is_token[:, None], logits, -float("inf"))
        value, place = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
        better = value > best  # strictly: the first of equals stays
        best = tl.where(better, value, best)
        winner = tl.where(better, first + place, winner)

    is_active = is_nan | (best > 0)
    best = tl.where(is_nan, float("nan"), tl.where(is_active, best, 0.0))
    tl.store(result + sequence.to(tl.int64) * terms + term, best, mask=is_term)
    if WITH_POSITIONS:
        at = positions + term.to(tl.int64) * batch + sequence
        tl.store(at, tl.where(is_active, winner, -1), mask=is_term)


def positive_max(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int], *, with_positions: bool
) -> tuple[Tensor, Tensor | None]:
    """relu(max over the tokens of the logits), (batch, vocabulary), and the winning tokens, (vocabulary, batch).

    The same as `fused_head._positive_max`, in half precision, or in float32 with products in TF32.

    Args:
        hidden: The real tokens' hidden states, shape (tokens, dimension).
        weight: The decoder's matrix, shape (vocabulary, dimension); converted block by block if its precision is
            another.
        bias: The decoder's bias, shape (vocabulary,).
        bounds: Where each sequence begins and ends among the tokens: batch + 1 numbers.
        with_positions: Whether to return the winners, for a backward pass.

    Returns:
        The maxima in the precision of `hidden`, and the winners as int32 indices into `hidden`, -1 where no logit is
        positive, or None.
    """
    terms, batch = len(weight), len(bounds) - 1
    hidden, weight = hidden.contiguous(), weight.contiguous()
    result = hidden.new_empty(batch, terms)
    positions = torch.empty(terms, batch, dtype=torch.int32, device=hidden.device) if with_positions else None
    _positive_max_kernel[(batch, triton.cdiv(terms, BLOCK_TERMS))](
        hidden,
        weight,
        weight if bias is None else bias.contiguous(),
        torch.tensor(bounds, dtype=torch.int32, device=hidden.device),
        result,
        result if positions is None else positions,
        terms,
        batch,
        hidden.shape[1],
        HAS_BIAS=bias is not None,
        WITH_POSITIONS=with_positions,
        BLOCK_TERMS=BLOCK_TERMS,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_DIMENSION=BLOCK_DIMENSION,
        num_warps=4,
    )
    return result, positions
