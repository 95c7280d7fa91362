"""How the transformer hands the pooling the input of the decoder instead of its logits.

The decoder is the last and widest product of a masked LM. Asked to hand over, it returns its input, so that the model
runs as it always does and the (batch, length, vocabulary) logits never exist; the pooling multiplies, tile by tile
(see `fused_head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

DECODER_INPUT = "decoder_input"
"""The feature that takes the place of ``token_embeddings``: a module that expects logits must fail, not go wrong."""


class DecoderInput(NamedTuple):
    """What the logits are the product of."""

    states: Tensor
    """(batch, length, dimension), or flattened (1, tokens, dimension)."""
    weight: Tensor
    """(vocabulary, dimension)."""
    bias: Tensor | None
    """(vocabulary,)."""


class HandOverDecoder(nn.Linear):
    """A decoder that can hand over its input. A plain ``nn.Linear`` in everything else, on disk above all."""

    hands_over: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the input while handing over, else the logits."""
        return input if self.hands_over else super().forward(input)


@contextmanager
def handing_over(decoder: nn.Module) -> Iterator[None]:
    """Let a decoder, one that `can_hand_over`, hand over its input for a while."""
    decoder.__class__ = HandOverDecoder
    vars(decoder)["hands_over"] = True
    try:
        yield
    finally:
        vars(decoder)["hands_over"] = False


def can_hand_over(decoder: nn.Module | None) -> bool:
    """Whether a decoder is a plain one: an adapter's wrapper or a quantised matrix does more than multiply."""
    return type(decoder) in (nn.Linear, HandOverDecoder)


def followers(model: nn.Module, module: nn.Module) -> list[nn.Module | None]:
    """What comes after a module, in each sequence of the model that holds it; None at an end."""
    found: list[nn.Module | None] = []
    for sequence in model.modules():
        if isinstance(sequence, nn.Sequential):
            children = [*sequence, None]
            found += [after for child, after in pairwise(children) if child is module]
    return found
