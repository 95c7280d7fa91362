"""Measure the head of a masked language model on texts, without changing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentence_transformers.util import batch_to_device, is_sentence_transformer_model
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from st_sparse_rescale.calibration import logits
from st_sparse_rescale.calibration.head_report import HeadReport
from st_sparse_rescale.calibration.start import Start, describe_logits, describe_vectors
from st_sparse_rescale.calibration.texts import sample, shipped_texts
from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError, undisturbed
from st_sparse_rescale.rescaling import recorded_rescale
from st_sparse_rescale.trained_head import require_trained_head

KS = (1, 2, 4, 8, 16, 32, 64)
MAX_TEXTS, MAX_TOKENS = 64, 64  # so many texts, cut at so many tokens: seconds for a model of BERT's size
MIN_TEXTS = 3
BATCH = 16


def measure_head(
    model_or_path: str | Path | SparseEncoder | Transformer, texts: Sequence[str] | None = None
) -> HeadReport:
    """Measure the head of a masked language model, or of a SPLADE model, on texts.

    A backbone is measured as it is and divided by each k of `KS`, under each strategy, as `rescale_mlm_head` would
    divide it: what a SPLADE training would start from. A tied matrix makes the encoder run again for each k. A SPLADE
    model, or a backbone that records a rescale, is measured as it is. The model is left as it was, to the byte, and the
    same texts give the same report.

    Args:
        model_or_path: Folder or hub name of a masked language model or of a SPLADE model; a loaded ``SparseEncoder``;
            or a ``Transformer`` module with the task "fill-mask", which counts as a backbone.
        texts: Texts such as those to be trained on, by default the shipped ones. Of more than 64, 64 are drawn, the
            same in every call; tokens beyond the 64th are cut off.

    Returns:
        The report, for `choose_k` or to look at.

    Raises:
        UnsupportedHeadError: If there is no trained MLM head, or none that is understood.
        ValueError: If there are fewer than three texts, one is blank, or the logits are not finite.
        TypeError: If a text is no string, or the model is of another kind.

    Example:
        >>> from st_sparse_rescale.demo import backbone_path
        >>> report = measure_head(backbone_path("bert-mini"))
        >>> report.decoder, report.tied
        ('cls.predictions.decoder', True)
        >>> round(report.logits.negative, 1)
        1.0
    """
    chosen = _checked(shipped_texts() if texts is None else texts)
    name, transformer, encoder = _loaded(model_or_path)
    model = transformer.model
    head = MLMHead.of(model)
    with undisturbed(model):
        tokens = _run(transformer, head, chosen)
        if not tokens.states.isfinite().all():
            raise ValueError(f"{name}: what enters the decoder is not finite, so there is nothing to measure.")
        distribution = logits.describe(tokens.states, head)
        rescaled = recorded_rescale(model)
        if encoder is not None:
            vectors = encoder.encode_document(chosen, convert_to_sparse_tensor=False, show_progress_bar=False)
            starts = [Start(1.0, "weight", 1.0, 1.0, **describe_vectors(vectors.float()))]
        else:
            starts = list(_starts(transformer, head, chosen, tokens, KS if rescaled is None else KS[:1]))
    rows = head.decoder.weight.detach().float().norm(dim=1).double()
    size = head.decoder.weight.numel()
    return HeadReport(
        name=name,
        trained=encoder is not None,
        rescaled=rescaled,
        architecture=type(model).__name__,
        decoder=head.decoder_name,
        bias=head.bias_name,
        norm=head.norm_name,
        tied=head.tied,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        head_parameters=size + (0 if head.bias is None else head.bias.numel()),
        vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        texts=len(chosen),
        tokens=len(tokens.states),
        row_norm_mean=rows.mean().item(),
        row_norm_std=rows.std(correction=0).item(),
        frobenius=rows.norm().item(),
        weight_rms=rows.norm().item() / size**0.5,
        norm_gain=None if head.norm is None else head.norm.get_parameter("weight").abs().mean().item(),
        bias_range=None if head.bias is None else (head.bias.min().item(), head.bias.max().item()),
        state_norm=tokens.states.norm(dim=1).mean().item(),
        logits=distribution,
        starts=tuple(starts),
    )


def _checked(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("texts is one string: give a list of texts.")
    if len(texts) < MIN_TEXTS:
        raise ValueError(f"{len(texts)} texts are too few to compare with each other: give at least {MIN_TEXTS}.")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"text {number} is a {type(text).__name__}, not a string.")
        if not text.strip():
            raise ValueError(f"text {number} is blank: leave it out.")
    return sorted(sample(texts, MAX_TEXTS), key=lambda text: len(text.encode()))  # little padding


def _loaded(source: Any) -> tuple[str, Transformer, SparseEncoder | None]:
    """Name and transformer, and the SPLADE model if it is one."""
    if isinstance(source, str | Path):
        name = str(source)
        if not is_sentence_transformer_model(name):
            require_trained_head(name)
            return name, Transformer(name, transformer_task="fill-mask"), None
        encoder = SparseEncoder(name)
        transformer = _transformer_of(encoder, name)
        require_trained_head(str(transformer.model.name_or_path))
        return name, transformer, encoder
    if isinstance(source, SparseEncoder):
        transformer = _transformer_of(source, "the model")
        return str(transformer.model.name_or_path), transformer, source
    if isinstance(source, Transformer):
        return str(source.model.name_or_path), source, None
    raise TypeError(
        f"A {type(source).__name__} cannot be measured, since its tokenizer is unknown: give a folder, a hub name, "
        "a SparseEncoder or its Transformer module."
    )


def _transformer_of(encoder: SparseEncoder, name: str) -> Transformer:
    """The masked LM of a SPLADE model."""
    found = [m for m in encoder.modules() if isinstance(m, Transformer) and m.transformer_task == "fill-mask"]
    if len(found) != 1 or not any(isinstance(module, SpladePooling) for module in encoder.modules()):
        raise UnsupportedHeadError(
            f"{name!r} is no SPLADE model: it holds {len(found)} masked language models, and needs one, pooled by a "
            "SpladePooling. Pass a SPLADE model or a masked language model; encoders and dense models have no MLM head."
        )
    return found[0]


class _Tokens(NamedTuple):
    """What a model makes of all texts, one after the other."""

    lengths: list[int]
    states: Tensor  # (tokens, D), what enters the decoder
    inputs: Tensor | None  # (tokens, width of the encoder), what enters the encoder


def _run(transformer: Transformer, head: MLMHead, texts: list[str], k: float = 1) -> _Tokens:
    """Run a model with its matrix divided by k, in batches, and without its logits."""
    replaced = {}
    if k != 1:
        weight = head.decoder.weight
        (name,) = (name for name, parameter in transformer.named_parameters() if parameter is weight)
        replaced = {name: (weight.detach().float() / k).to(weight.dtype)}
    limit = min(transformer.max_seq_length or MAX_TOKENS, MAX_TOKENS)
    lengths: list[int] = []
    states: list[Tensor] = []
    inputs: list[Tensor] = []
    with _watched(transformer, head) as seen:
        for first in range(0, len(texts), BATCH):
            features = transformer.preprocess(texts[first : first + BATCH], max_length=limit)
            features = batch_to_device(features, transformer.model.device)
            seen.clear()
            functional_call(transformer, replaced, (features,))
            counted = features["attention_mask"].bool()
            if seen["states"].shape[:-1] != counted.shape:
                raise UnsupportedHeadError(
                    f"The head of {type(transformer.model).__name__} cannot be measured: for texts of shape "
                    f"{tuple(counted.shape)} its decoder gets states of shape {tuple(seen['states'].shape)}."
                )
            lengths += counted.sum(dim=1).tolist()
            states.append(seen["states"][counted].float())
            if "inputs" in seen and seen["inputs"].shape[:-1] == counted.shape:  # some encoders pad for themselves
                inputs.append(seen["inputs"][counted].float())
    whole = sum(map(len, inputs)) == sum(lengths)
    return _Tokens(lengths, torch.cat(states), torch.cat(inputs) if whole else None)


@contextmanager
def _watched(transformer: Transformer, head: MLMHead) -> Iterator[dict[str, Tensor]]:
    """Catch what enters encoder and decoder, padded, and leave the decoder a single position to multiply.

    Not by ``output_hidden_states``, for which transformers hooks every layer for good: such a model cannot be pickled.
    """
    seen: dict[str, Tensor] = {}

    def before_layer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        seen.setdefault("inputs", next(v for v in values if isinstance(v, Tensor) and v.is_floating_point()))

    def before_decoder(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        seen["states"] = args[0]
        return (args[0][..., :1, :],)

    unpad_inputs = transformer.unpad_inputs
    with ExitStack() as hooks:
        hooks.callback(setattr, transformer, "unpad_inputs", unpad_inputs)
        transformer.unpad_inputs = False
        hooks.enter_context(head.decoder.register_forward_pre_hook(before_decoder))
        if (layer := _first_layer(transformer.model)) is not None:
            hooks.enter_context(layer.register_forward_pre_hook(before_layer, with_kwargs=True))
        yield seen


def _first_layer(model: PreTrainedModel) -> nn.Module | None:
    """The first of the encoder's layers: of its first list of modules."""
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList) and len(module))
    layer: nn.Module | None = next(lists, None)
    while isinstance(layer, nn.ModuleList):
        layer = layer[0]
    return layer


def _starts(
    transformer: Transformer, head: MLMHead, texts: list[str], tokens: _Tokens, ks: Sequence[int]
) -> Iterator[Start]:
    """Each k under each strategy; the first is k = 1, which is the same under both."""
    plain = logits.maxima(tokens.states, tokens.lengths, head)
    for k in ks:
        then = _run(transformer, head, texts, k) if head.tied and k != 1 else tokens
        # A row divided by k times a state is the row times a state divided by k.
        maxima = plain if k == 1 else logits.maxima(then.states / k, then.lengths, head)
        inputs = None if tokens.inputs is None or then.inputs is None else _cosine(tokens.inputs, then.inputs)
        yield Start(float(k), "weight", inputs, _cosine(tokens.states, then.states), **describe_logits(maxima))
    if head.norm is not None and len(ks) > 1:
        for k in ks:
            yield Start(float(k), "norm", 1.0, 1.0, **describe_logits(plain / k))


def _cosine(one: Tensor, other: Tensor) -> float:
    """Mean over the tokens, of what tells them apart: a direction that all share would hide any change."""
    if one is other:
        return 1.0
    return cosine_similarity(one - one.mean(dim=0), other - other.mean(dim=0), dim=1).mean().item()
