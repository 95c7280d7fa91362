"""Divide the logits of a masked language model by k, once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError, agree, probe

Strategy = Literal["weight", "norm"]

CONFIG_KEY = "mlm_head_rescale"

# Half precision cannot hold what is too small: more than this share of weights turned to zero is a loss.
NEGLIGIBLE_SHARE = 1e-3


@dataclass(frozen=True)
class HeadRescale:
    """What was done to a head, as its model's config records it under ``mlm_head_rescale``.

    Attributes:
        k: What the head was divided by, relative to the pretrained head.
        strategy: What was divided, see `rescale_mlm_head`.
        reason: How k was chosen.
    """

    k: float
    strategy: Strategy
    reason: str


def validate_k(k: Any) -> float | Literal["auto"]:
    """Check a rescaling constant.

    Args:
        k: A positive, finite number, or "auto".

    Returns:
        k as a float, or "auto".

    Raises:
        TypeError: If k is neither a number nor "auto" (a bool is no number).
        ValueError: If k is zero, negative, infinite, not a number, or another string.

    Example:
        >>> validate_k(16), validate_k("auto")
        (16.0, 'auto')
        >>> validate_k(0)
        Traceback (most recent call last):
        ValueError: k=0 is not positive: the logits are divided by k, so give a positive number, such as 16, or "auto".
    """
    mend = 'the logits are divided by k, so give a positive number, such as 16, or "auto".'
    if isinstance(k, str):
        if k == "auto":
            return "auto"
        raise ValueError(f"k={k!r} is a string: {mend}")
    if isinstance(k, bool) or not isinstance(k, Real):
        raise TypeError(f"k={k!r} is a {type(k).__name__}: {mend}")
    try:
        number = float(k)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"k={k!r} is not finite: {mend}")
    if number <= 0:
        raise ValueError(f"k={k!r} is not positive: {mend}")
    return number


def validate_strategy(strategy: Any) -> None:
    """Check the name of a strategy.

    Raises:
        ValueError: If it is none.
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f'strategy={strategy!r} is unknown: give "weight" or "norm".')


def recorded_rescale(config_or_model: PretrainedConfig | PreTrainedModel | SparseEncoder) -> HeadRescale | None:
    """Read from a config, or from a model's, how its head was rescaled.

    Args:
        config_or_model: A Hugging Face config, or a model that has one.

    Returns:
        The record, or None if there is none: the head is as it was pretrained.

    Raises:
        ValueError: If the record is not one that `rescale_mlm_head` wrote.

    Example:
        >>> from transformers import BertConfig
        >>> recorded_rescale(BertConfig(mlm_head_rescale={"k": 16.0, "strategy": "weight", "reason": "given"}))
        HeadRescale(k=16.0, strategy='weight', reason='given')
    """
    is_config = isinstance(config_or_model, PretrainedConfig)
    config = config_or_model if is_config else getattr(_masked_lm(config_or_model), "config", None)
    record = getattr(config, CONFIG_KEY, None)
    if record is None:
        return None
    try:
        rescale = HeadRescale(**record)
        valid = validate_k(rescale.k) != "auto" and rescale.strategy in get_args(Strategy)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"{CONFIG_KEY}={record!r} in the model's config is no record of a rescale, so it is unknown by what the "
            f"head was divided. Load the original checkpoint."
        )
    return rescale


def rescale_mlm_head(
    model: PreTrainedModel | SparseEncoder, k: float, strategy: Strategy = "weight", *, reason: str = "given"
) -> HeadRescale | None:
    """Divide the head of a masked language model by k, in place, and record it in the model's config.

    With the states h that enter the decoder, its matrix W and its bias b, the logits ``h @ W.T + b`` become

    - "weight": ``h @ (W / k).T + b``, the equation of arXiv:2606.18811. Where W is also the matrix of the input
      embeddings it is divided once, for both, and stays shared.
    - "norm": ``(h @ W.T + b) / k``, by dividing the bias and the weight and bias of the norm which gives h. W and
      the encoder's input are untouched.

    k is absolute, relative to the pretrained head: the same k and strategy again change nothing, and others are
    refused. So loading, resuming and copying can never divide twice. The result is checked by numbers before it is
    recorded; if the check fails, the head is restored.

    Args:
        model: A masked language model, or a ``SparseEncoder`` that holds one.
        k: A positive, finite number; 1 leaves every byte alone, and nothing is recorded.
        strategy: What is divided.
        reason: How k was chosen, for the record.

    Returns:
        What the config now records, None if nothing.

    Raises:
        TypeError: If k is no number.
        ValueError: If k is not usable, if the strategy is unknown, if another rescale is recorded, or if the weights
            are in half precision and too small to be divided by k.
        UnsupportedHeadError: If the head is not understood, or has no norm that the strategy "norm" can use.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = BertForMaskedLM(BertConfig(vocab_size=50, **size))
        >>> rescale_mlm_head(model, 16)
        HeadRescale(k=16.0, strategy='weight', reason='given')
    """
    number = validate_k(k)
    if number == "auto":
        raise ValueError('k="auto" is chosen by measuring the head on texts; to rescale it, give the number.')
    validate_strategy(strategy)
    model = _masked_lm(model)
    recorded = recorded_rescale(model)
    if recorded is not None:
        if (recorded.k, recorded.strategy) == (number, strategy):
            return recorded
        raise ValueError(
            f"The head was already divided by k={recorded.k:g} with strategy={recorded.strategy!r}, and k={number:g} "
            f"with strategy={strategy!r} is asked for. k is relative to the pretrained head: load the original "
            "checkpoint to use another, or ask for what is recorded."
        )
    if number == 1:
        return None

    head = MLMHead.of(model)
    parts = _divided_by(strategy, model, head)
    original = probe(model, head.decoder)
    with _all_or_nothing(parts) as copies:
        for part in parts:
            _divide(part, number)
        after = probe(model, head.decoder)
        if strategy == "weight":
            with torch.no_grad():
                expected = nn.functional.linear(after.states, copies[0]) / number
                expected += 0 if head.bias is None else head.bias
        else:
            expected = original.logits / number
        if not agree(after.logits, expected):
            raise UnsupportedHeadError(
                f"Dividing the head of {type(model).__name__} by k={number:g} with strategy={strategy!r} did not give "
                "the logits it should. The head was restored; use another model or strategy."
            )
    rescale = HeadRescale(number, strategy, reason)
    _record(model, rescale)
    return rescale


def _record(model: PreTrainedModel, rescale: HeadRescale) -> None:
    """Write the record into a config of the model's own, since other models may have been built from the same one."""
    shared = model.config
    own = deepcopy(shared)
    setattr(own, CONFIG_KEY, asdict(rescale))
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            setattr(module, "config", own)  # noqa: B010 (a Module's attribute has no type)


def _masked_lm(model: Any) -> PreTrainedModel:
    """The transformers model of a ``SparseEncoder``; any other model is returned as it is, for the head to judge."""
    if not isinstance(model, SparseEncoder):
        return model
    found = [module.model for module in model.modules() if isinstance(module, Transformer)]
    if len(found) != 1:
        raise ValueError(
            f"The SparseEncoder holds {len(found)} transformers, not one. Pass the transformers model itself, such as "
            "model[0].model."
        )
    return found[0]


def _divided_by(strategy: Strategy, model: PreTrainedModel, head: MLMHead) -> list[Tensor]:
    """What a strategy divides, each parameter once, however many names it has."""
    if strategy == "weight":
        return [head.decoder.weight]
    if head.norm is None:
        raise UnsupportedHeadError(
            f'The head of {type(model).__name__} cannot be rescaled with strategy="norm": no norm whose output scales '
            f'with its weight enters {head.decoder_name} directly. Use strategy="weight".'
        )
    return [*head.norm.parameters(), *([] if head.bias is None else [head.bias])]


@contextmanager
def _all_or_nothing(parts: list[Tensor]) -> Iterator[list[Tensor]]:
    """Give copies of parameters that are about to be changed, and put them back if anything fails."""
    copies = [part.detach().clone() for part in parts]
    try:
        yield copies
    except BaseException:
        with torch.no_grad():
            for part, copy in zip(parts, copies, strict=True):
                part.copy_(copy)
        raise


@torch.no_grad()
def _divide(part: Tensor, k: float) -> None:
    """Divide a parameter in place, so that whatever shares its memory follows, with one rounding."""
    nonzero = part != 0
    part.copy_(part.to(torch.promote_types(part.dtype, torch.float32)) / k)
    lost = ((part == 0) & nonzero).sum().item()
    share = lost / max(nonzero.sum().item(), 1)
    if share > NEGLIGIBLE_SHARE or not part.isfinite().all():
        what = f"{share:.1%} of the weights would become zero" if lost else "weights would become infinite"
        mend = "use a k closer to 1."
        if torch.finfo(part.dtype).bits < 32:
            mend = f"load the model in float32, rescale it, and convert it afterwards; or {mend}"
        raise ValueError(f"k={k:g} is out of the range of {str(part.dtype).removeprefix('torch.')}: {what}; {mend}")
