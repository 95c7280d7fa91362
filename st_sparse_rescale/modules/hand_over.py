"""How the transformer hands the pooling the input of the decoder instead of its logits.

The decoder is the last and widest product of a masked LM. Asked to hand over, it returns its input, so that the model
runs as it always does and the (batch, length, vocabulary) logits never exist; the pooling multiplies, tile by tile
(see `fused_head`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

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


class HandedOver(dict[str, Any]):
    """Features without logits, which say so to a module that asks for them."""

    def __missing__(self, key: str) -> Any:
        if key != "token_embeddings":
            raise KeyError(key)
        raise KeyError(
            "token_embeddings (the logits) never exist in this model: when it was built, a SpladePooling of "
            "st_sparse_rescale followed its transformer. After replacing a module of a built model, call "
            "`transformer.on_model_ready(model)`, here `model[0].on_model_ready(model)`."
        )


# Of this thread only: a model that serves is called from several at once.
_handing_over: ContextVar[nn.Module | None] = ContextVar("handing_over", default=None)
_threads: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_count = threading.Lock()


class HandOverDecoder(nn.Linear):
    """What a decoder is while any thread lets it hand over its input. At rest it is a plain ``nn.Linear``.

    So whatever looks for the exact class, such as ``quantize_dynamic``, finds it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input while handing over, else the logits."""
        return input if _handing_over.get() is self else super().forward(input)


@contextmanager
def handing_over(decoder: nn.Module) -> Iterator[None]:
    """Let a decoder, one that `can_hand_over`, hand over its input for a while, in this thread."""
    with _count:
        _threads[decoder] = _threads.get(decoder, 0) + 1
        decoder.__class__ = HandOverDecoder
    token = _handing_over.set(decoder)
    try:
        yield
    finally:
        _handing_over.reset(token)
        with _count:
            _threads[decoder] -= 1
            if not _threads[decoder]:
                decoder.__class__ = nn.Linear


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
