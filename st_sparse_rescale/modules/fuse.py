"""Give any loaded SPLADE model the fused head, in place."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar, cast

from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder import modules as stock
from torch import nn

from st_sparse_rescale.modules.rescaled_mlm_transformer import RescaledMLMTransformer
from st_sparse_rescale.modules.splade_pooling import SpladePooling, special_tokens
from st_sparse_rescale.modules.stock_checkpoint import SavedAsStock, become_stock, set_children

Model = TypeVar("Model", bound=SparseEncoder)


def fuse(model: Model) -> Model:
    """Replace the stock modules of a SPLADE model by ours, so that its logits never exist.

    Vectors and gradients stay equal up to rounding, weights are not touched, and what is saved is stock as before.
    Calling it again changes nothing.

    Args:
        model: A SPLADE model: somewhere in it, also in a ``Router``, a ``Transformer`` with the task "fill-mask" is
            followed by a ``SpladePooling``.

    Returns:
        The same model.

    Raises:
        ValueError: If the model holds no such pair, or its transformer runs on another backend than torch.

    Example:
        >>> from sentence_transformers import SparseEncoder
        >>> model = fuse(SparseEncoder("naver/splade-cocondenser-ensembledistil"))  # doctest: +SKIP
        >>> model[0].hands_over  # doctest: +SKIP
        True
    """
    transformers = [m for m in model.modules() if isinstance(m, Transformer) and m.transformer_task == "fill-mask"]
    poolings = [m for m in model.modules() if isinstance(m, stock.SpladePooling)]
    if not (transformers and poolings):
        raise ValueError(
            f"There is nothing to fuse in {', '.join(type(m).__name__ for m in model.children())}: a SPLADE model has "
            'a Transformer with transformer_task="fill-mask", followed by a SpladePooling.'
        )
    if backends := {m.backend for m in transformers} - {"torch"}:
        raise ValueError(
            f"The transformer runs on {backends.pop()!r}: load the model with the torch backend to fuse it."
        )
    for transformer in transformers:
        if type(transformer) in (Transformer, stock.MLMTransformer):
            transformer.__class__ = RescaledMLMTransformer
    for pooling in poolings:
        if type(pooling) is stock.SpladePooling:
            pooling.__class__ = SpladePooling
            ours = cast(SpladePooling, pooling)
            ours.mask_special_tokens, ours.mask, ours.tile = False, None, None
    tokens = special_tokens(model)
    for sequence in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        _take_in_masks(sequence, tokens)
    for module in model.modules():
        if isinstance(module, SavedAsStock):
            module.on_model_ready(model)
    return model


def unfuse(model: Model) -> Model:
    """Turn a model back into stock modules, in place; the inverse of `fuse`.

    Args:
        model: Any ``SparseEncoder``, fused or built from our modules.

    Returns:
        The same model, as plain sentence-transformers would have loaded it.
    """
    become_stock(model)
    return model


def _take_in_masks(sequence: nn.Sequential, tokens: list[str]) -> None:
    """Put a mask of the special tokens that stands before a pooling into it, from where it came when it was saved."""
    children = dict(sequence.named_children())
    for name, after in pairwise(list(children)):
        mask, pooling = children[name], children[after]
        if (
            isinstance(mask, MultiVectorMask)
            and mask.skiplist_words == tokens
            and isinstance(pooling, SpladePooling)
            and pooling.mask is None
        ):
            pooling.mask_special_tokens, pooling.mask = True, mask
            del children[name]
    set_children(sequence, children)
