"""Find the head of a masked language model, and make sure of it by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

# How far two ways to compute the same logits may differ, as a share of the largest: rounding, TF32 for float32.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}

PROBE_SHAPE = (2, 12)


class UnsupportedHeadError(ValueError):
    """A head that is not understood, and is therefore left alone.

    The message names the architecture, what was found, and what to do.
    """


@dataclass(frozen=True, eq=False)
class MLMHead:
    """The head of a masked language model: ``logits = states @ decoder.weight.T + bias``.

    Attributes:
        decoder: The output embeddings, weight of shape (V, D).
        bias: Shape (V,), the decoder's own or one that is added outside it; None if there is none.
        norm: The norm whose output enters the decoder, and scales with its own weight and bias; None if there is none.
        decoder_name: Dotted name of the decoder in the model.
        bias_name: Dotted name of the bias.
        norm_name: Dotted name of the norm.
        tied: Whether the decoder shares its memory with the input embeddings, whatever the config says.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> head = MLMHead.of(BertForMaskedLM(BertConfig(vocab_size=50, **size)))
        >>> head.decoder_name, head.bias_name, head.tied
        ('cls.predictions.decoder', 'cls.predictions.decoder.bias', True)
        >>> head.vocab_size, head.hidden_size
        (50, 8)
    """

    decoder: nn.Linear = field(repr=False)
    bias: nn.Parameter | None = field(repr=False)
    norm: nn.Module | None = field(repr=False)
    decoder_name: str
    bias_name: str | None
    norm_name: str | None
    tied: bool

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.decoder.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """D, the width of the states that enter the decoder: not the encoder's where the head is factorised."""
        return self.decoder.weight.shape[1]

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits, shape (..., V), from the states that enter the decoder, shape (..., D)."""
        return nn.functional.linear(states, self.decoder.weight, self.bias)

    @classmethod
    def of(cls, model: PreTrainedModel) -> MLMHead:
        """Find the head of a model, by rule and not by name, and check it by numbers.

        The decoder is ``get_output_embeddings()``. Which of the vectors of length V beside it is added to the logits,
        and which norm feeds it, is found on a small random input: with noise in the place of the biases and half of
        the norm, the logits must come out as the head that was found says. The model is left as it was: parameters,
        gradients, modes and the state of the random number generators.

        Args:
            model: A masked language model, such as ``AutoModelForMaskedLM`` loads.

        Returns:
            The head, whose modules and parameters are those of the model.

        Raises:
            UnsupportedHeadError: If there is no head, or none that computes the model's logits.
        """
        decoder, decoder_name = _decoder(model)
        weight = decoder.weight
        plain = probe(model, decoder)
        if plain.logits.shape != (*plain.states.shape[:-1], weight.shape[0]):
            _refuse(
                model,
                f"its output embeddings, {decoder_name} of shape {tuple(weight.shape)}, get states of shape "
                f"{tuple(plain.states.shape)} and do not give its logits of shape {tuple(plain.logits.shape)}",
            )
        norm_name, norm = plain.norm_name, model.get_submodule(plain.norm_name) if plain.norm_name else None
        biases = _bias_candidates(model, decoder, decoder_name)

        # Second pass: noise instead of every vector that may be the bias, and half of the norm.
        generator = torch.Generator().manual_seed(0)
        size = max(plain.logits.abs().max().item(), 1)
        noises = {
            name: (torch.randn(bias.shape, generator=generator) * size).to(bias.device, bias.dtype)
            for name, bias in biases.items()
        }
        halves = {f"{norm_name}.{name}": p / 2 for name, p in norm.named_parameters()} if norm is not None else {}
        noisy = probe(model, decoder, noises | halves)
        if not agree(noisy.states, plain.states / 2):
            norm_name = norm = None
        products = nn.functional.linear(noisy.states, weight)
        added = [name for name, noise in noises.items() if agree(noisy.logits, products + noise)]
        bias_name = added[0] if added else None

        head = cls(
            decoder=decoder,
            bias=biases[bias_name] if bias_name else None,
            norm=norm,
            decoder_name=decoder_name,
            bias_name=bias_name,
            norm_name=norm_name,
            tied=_input_embeddings(model).data_ptr() == weight.data_ptr(),
        )
        understood = bool(added) or agree(noisy.logits, products)
        if not understood or not agree(plain.logits, head.logits(plain.states)):
            _refuse(
                model,
                f"its logits are not what enters {decoder_name} times its weight"
                + (f", with or without {' or '.join(biases)} added" if biases else ""),
            )
        return head


class Probe(NamedTuple):
    """What one pass of a model over a small random input shows of its head."""

    states: Tensor  # (rows, length, D), what enters the decoder
    logits: Tensor  # (rows, length, V)
    norm_name: str | None  # dotted name of the norm whose output is the states


def probe(model: PreTrainedModel, decoder: nn.Linear, replaced: dict[str, Tensor] | None = None) -> Probe:
    """Run a model on a small random input, the same in every call, and watch its decoder.

    Args:
        model: The model, which is left as it was.
        decoder: Its output embeddings.
        replaced: Parameters to put in the place of the model's for this pass, by dotted name.

    Returns:
        What entered the decoder, and the logits.

    Raises:
        UnsupportedHeadError: If the model cannot run on token ids alone, or calls its decoder not exactly once.
    """
    width = decoder.weight.shape[1]
    ids = _probe_ids(model, decoder)
    entered: list[Tensor] = []
    left: list[tuple[str, Any]] = []

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args, output: left.append((name, output))

    hooks = [
        module.register_forward_hook(watch(name)) for name, module in model.named_modules() if _is_norm(module, width)
    ]
    hooks.append(decoder.register_forward_pre_hook(lambda module, args: entered.append(args[0])))
    try:
        with undisturbed(model):
            output = functional_call(model, replaced or {}, kwargs={"input_ids": ids})
    except Exception as error:  # whatever a model's code may raise
        _refuse(model, f"it does not run on token ids alone ({type(error).__name__}: {error})", cause=error)
    finally:
        for hook in hooks:
            hook.remove()

    if (logits := getattr(output, "logits", None)) is None:
        _refuse(model, f"its output, {type(output).__name__}, has no logits")
    if len(entered) != 1:
        _refuse(model, f"it calls its output embeddings {len(entered)} times on the way to its logits, not once")
    norms = [name for name, output in left if _same_values(output, entered[0])]
    return Probe(entered[0], logits, norms[-1] if norms else None)


def agree(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest value; never true for NaN."""
    difference = (one.double() - other.double()).abs().max()
    tolerance = max(TOLERANCE[one.dtype], TOLERANCE[other.dtype])
    return bool(difference <= tolerance * one.abs().max().double())


def _decoder(model: PreTrainedModel) -> tuple[nn.Linear, str]:
    """The output embeddings and their name, of a model whose weights are all here and may be changed."""
    if not isinstance(model, nn.Module):
        _refuse(
            model,
            "it is not a PyTorch model, and the head of an exported graph cannot be changed",
            mend="rescale the PyTorch checkpoint, save it, and export that",
        )
    if not hasattr(model, "get_output_embeddings"):
        _refuse(model, "it is not a transformers model", mend="pass the transformers model, not what wraps it")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        _refuse(
            model,
            "its weights are quantised, and cannot be divided without loss",
            mend="rescale the unquantised checkpoint, save it, and quantise that",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        _refuse(
            model, "it is an encoder-decoder: its logits belong to the positions of what it generates, not to the text"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        _refuse(
            model,
            "its weights are on the meta device, so there is nothing to rescale",
            mend="load them first, without offloading",
        )
    decoder = model.get_output_embeddings()
    if decoder is None:
        _refuse(
            model,
            "it has no MLM head, or names none (get_output_embeddings() is None)",
            mend="load a masked language model with AutoModelForMaskedLM; an encoder or a dense model holds no head",
        )
    name = next((name for name, module in model.named_modules() if module is decoder), None)
    if not isinstance(decoder, nn.Linear) or name is None:
        _refuse(model, f"its output embeddings are a {type(decoder).__name__}, not a Linear of the model")
    if "weight" not in dict(decoder.named_parameters(recurse=False)) or decoder.weight.dtype not in TOLERANCE:
        _refuse(model, f"the weight of its output embeddings, {name}, is computed or quantised, not a float parameter")
    return decoder, name


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients or autocast, and leave modes and random number generators as they were."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.random.fork_rng(devices):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _input_embeddings(model: Any) -> Tensor:
    try:
        return model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError) as error:
        _refuse(model, "its input embeddings are unknown, so whether they are the decoder's is too", cause=error)


def _bias_candidates(model: nn.Module, decoder: nn.Linear, decoder_name: str) -> dict[str, nn.Parameter]:
    """The decoder's own bias and all vectors of its length beside it, each once, by dotted name."""
    parent = decoder_name.rpartition(".")[0]
    siblings = model.get_submodule(parent).named_parameters(parent, recurse=False)
    candidates: dict[str, nn.Parameter] = {}
    for name, vector in ((f"{decoder_name}.bias", decoder.bias), *siblings):
        new = vector is not None and not any(vector is other for other in candidates.values())
        if new and vector.shape == decoder.weight.shape[:1]:
            candidates[name] = vector
    return candidates


def _is_norm(module: nn.Module, width: int) -> bool:
    """Whether all that a module holds itself is a weight, and maybe a bias, of the given length."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own.keys() <= {"weight", "bias"} and all(p.shape == (width,) for p in own.values())


def _probe_ids(model: PreTrainedModel, decoder: nn.Linear) -> Tensor:
    """Random token ids without the special ones, to which some models give a meaning of their own."""
    embeddings = _input_embeddings(model)
    ids = torch.arange(min(len(embeddings), len(decoder.weight)))
    ordinary = ids[~torch.isin(ids, torch.tensor(sorted(_special_ids(model.config.to_dict())), dtype=ids.dtype))]
    choice = torch.randint(len(ordinary), PROBE_SHAPE, generator=torch.Generator().manual_seed(0))
    return ordinary[choice].to(embeddings.device)


def _special_ids(config: dict[Any, Any]) -> set[int]:
    """All ids that a config and its parts name, such as pad_token_id."""
    special: set[int] = set()
    for key, value in config.items():
        if isinstance(value, dict):
            special |= _special_ids(value)
        elif str(key).endswith("token_id"):
            special.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return special


def _same_values(output: Any, states: Tensor) -> bool:
    """Whether a module's output is the states, however reshaped."""
    return (
        isinstance(output, Tensor)
        and output.numel() == states.numel()
        and torch.equal(output.reshape(-1).to(states), states.reshape(-1))
    )


def _refuse(
    model: Any,
    found: str,
    *,
    mend: str = "use another model, or k=1, which changes nothing; docs/architectures.md lists what is supported",
    cause: Exception | None = None,
) -> NoReturn:
    raise UnsupportedHeadError(
        f"The head of {type(model).__name__} is not supported: {found}. {mend[0].upper()}{mend[1:]}."
    ) from cause
