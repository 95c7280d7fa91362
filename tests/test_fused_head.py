"""The fused head against a linear layer followed by stock pooling, in values and in gradients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sentence_transformers.sparse_encoder.modules import SpladePooling as StockPooling
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint as checkpointed

from st_sparse_rescale.modules import fused_head
from st_sparse_rescale.modules.fused_head import splade_head, unpad

B, L, D, V = 3, 7, 8, 50
MASKS = {
    "full": torch.ones(B, L, dtype=torch.long),
    "right": torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6]),
    "left": torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] * 6 + [1]]),
    "holes": torch.tensor([[1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 0], [1] * 7]),
    "one empty": torch.tensor([[1] * 7, [0] * 7, [1] * 5 + [0] * 2]),
}


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32, batch: int = B, length: int = L) -> list[Tensor]:
    """Hidden states, weight and bias; a sixth of the terms is negative for every token, as most are for a real head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / 2
    bias = torch.randn(V, generator=generator) / 2
    bias[::6] = -100
    return [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]


def stock(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    activation: str = "relu",
    pooling: str = "max",
) -> Tensor:
    module = StockPooling(pooling, activation).train(hidden.requires_grad)
    logits = linear(hidden, weight, bias)
    return module({"token_embeddings": logits, "attention_mask": mask})["sentence_embedding"]


def stock_flattened(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, activation: str = "relu", pooling: str = "max"
) -> Tensor:
    tokens, cu_seqlens = unpad(hidden, mask)
    module = StockPooling(pooling, activation).train()
    features = {"token_embeddings": linear(tokens, weight, bias)[None], "cu_seq_lens_q": cu_seqlens.int()}
    return module(features)["sentence_embedding"]


def fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    activation: str = "relu",
    pooling: str = "max",
    tile: int | None = 16,  # not a divisor of V
) -> Tensor:
    return splade_head(*unpad(hidden, mask), weight, bias, activation=activation, pooling=pooling, tile=tile)


def value_and_gradients(head: Callable[..., Tensor], tensors: list[Tensor], **options: object) -> list[Tensor]:
    """The scores, and the gradients of a loss that weighs every score differently."""
    scores = head(*tensors, *([None] * (3 - len(tensors))), **options)
    weights = torch.linspace(-1, 2, scores.numel(), device=scores.device).view_as(scores)
    return [scores.detach(), *torch.autograd.grad((scores.float() * weights).sum(), tensors)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_equals_stock(activation: str, pooling: str, with_bias: bool, mask: str) -> None:
    tensors = inputs()[: 2 + with_bias]
    options = {"mask": MASKS[mask], "activation": activation, "pooling": pooling}
    ours, theirs = (value_and_gradients(head, tensors, **options) for head in (fused, stock))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-5)
    if with_bias:
        assert (ours[0][:, ::6] == 0).all(), "terms that are negative everywhere score exactly zero"
        assert (ours[2][::6] == 0).all(), "and get no gradient"


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_equals_stock_flattened(activation: str, pooling: str) -> None:
    options = {"mask": MASKS["right"], "activation": activation, "pooling": pooling}
    ours, theirs = (value_and_gradients(head, inputs(), **options) for head in (fused, stock_flattened))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (5, 1)])
def test_smallest_shapes(batch: int, length: int) -> None:
    options = {"mask": torch.ones(batch, length, dtype=torch.long)}
    ours, theirs = (value_and_gradients(head, inputs(batch=batch, length=length), **options) for head in (fused, stock))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 7, 16, V, 10 * V, None])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_tile_changes_nothing(pooling: str, tile: int | None) -> None:
    options = {"mask": MASKS["right"], "pooling": pooling}
    ours = value_and_gradients(fused, inputs(), **options, tile=tile)
    torch.testing.assert_close(ours, value_and_gradients(fused, inputs(), **options, tile=16), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_grad", [True, False])
def test_ties_go_to_the_first_token(with_grad: bool) -> None:
    hidden = torch.tensor([[[1.0], [2.0], [0.0], [2.0]]], requires_grad=True)  # tokens 1 and 3 tie
    weight, mask = torch.ones(V, 1), torch.ones(1, 4)
    scores = fused(hidden, weight, None, mask)
    torch.testing.assert_close(scores, torch.full((1, V), 3.0).log())
    ours, stock_padded, stock_flat = (
        torch.autograd.grad(head(hidden, weight, None, mask).sum(), hidden)[0].flatten()
        for head in (fused, stock, stock_flattened)
    )
    torch.testing.assert_close(ours, torch.tensor([0, V / 3, 0, 0]))
    torch.testing.assert_close(ours, stock_padded)
    torch.testing.assert_close(stock_flat, torch.tensor([0, V / 6, 0, V / 6]))  # the documented difference


def test_winner_in_every_place() -> None:
    """Token t wins term t: the gradient must find each position of each sequence."""
    hidden = torch.eye(D).expand(2, D, D).clone().requires_grad_()
    weight = torch.eye(D).requires_grad_()
    mask = torch.ones(2, D)
    fused(hidden, weight, None, mask, tile=3).sum().backward()
    torch.testing.assert_close(hidden.grad, torch.eye(D).expand(2, D, D) / 2)  # d log1p(x) = 1/2 at x = 1
    torch.testing.assert_close(weight.grad, torch.eye(D))


def test_padding_cannot_leak() -> None:
    """Stock pooling multiplies a padded logit by zero, so an infinite one becomes NaN; here it never enters."""
    hidden, weight, bias = inputs()
    mask = MASKS["right"]
    poisoned = hidden.detach().masked_fill(mask[..., None] == 0, torch.inf)
    assert stock(poisoned, weight, bias, mask).isnan().any()
    torch.testing.assert_close(fused(poisoned, weight, bias, mask), fused(hidden, weight, bias, mask))


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_nan_is_not_hidden(pooling: str) -> None:
    hidden, weight, bias = inputs()
    with torch.no_grad():
        hidden[0, 2] = torch.nan
    scores = fused(hidden, weight, bias, MASKS["full"], pooling=pooling)
    assert scores[0].isnan().all()
    assert not scores[1:].isnan().any()
    scores.sum().backward()
    assert hidden.grad[0].isnan().any()
    with torch.no_grad():
        assert fused(hidden, weight, bias, MASKS["full"], pooling=pooling)[0].isnan().all()


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_gradcheck(activation: str, pooling: str) -> None:
    tensors = inputs(dtype=torch.float64)
    tensors[2] = tensors[2].detach().clamp(min=-3).requires_grad_()
    tokens, cu_seqlens = unpad(tensors[0].detach(), MASKS["one empty"])
    options = {"activation": activation, "pooling": pooling, "tile": 16}
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: splade_head(hidden, cu_seqlens, weight, bias, **options),
        (tokens.requires_grad_(), *tensors[1:]),
        fast_mode=True,
    )


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_second_derivative_is_refused(pooling: str) -> None:
    hidden, weight, bias = inputs()
    scores = fused(hidden, weight, bias, MASKS["full"], pooling=pooling)
    for loss in (
        scores.sum(),
        scores.square().sum(),
    ):  # with a constant gradient and with one that depends on the scores
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1)])
def test_frozen_tensors_get_no_gradient(frozen: tuple[int, ...]) -> None:
    tensors, reference = inputs(), inputs()
    for i in frozen:
        tensors[i].requires_grad_(False)
    fused(*tensors, MASKS["right"]).sum().backward()
    stock(*reference, MASKS["right"]).sum().backward()
    for i, (tensor, expected) in enumerate(zip(tensors, reference, strict=True)):
        if i in frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected.grad)


def assert_close_in_norm(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    """Entry by entry would be too strict: two roundings of one logit can crown two different tokens."""
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine.float() - reference.float()).norm() <= tolerance * reference.float().norm()


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, pooling: str) -> None:
    options = {"mask": MASKS["right"], "pooling": pooling}
    ours, theirs = (value_and_gradients(head, inputs(dtype=dtype), **options) for head in (fused, stock))
    assert {t.dtype for t in ours} == {dtype}
    assert_close_in_norm(ours, theirs, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_autocast(pooling: str) -> None:
    options = {"mask": MASKS["right"], "pooling": pooling}
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (value_and_gradients(head, inputs(), **options) for head in (fused, stock))
    assert [t.dtype for t in ours] == [torch.bfloat16] + [torch.float32] * 3
    assert_close_in_norm(ours, theirs, 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_gpu(pooling: str, dtype: torch.dtype, with_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_triton:
        monkeypatch.setattr(fused_head, "_triton_kernel", lambda: None)
    tensors = [t.detach().cuda().requires_grad_() for t in inputs(dtype=dtype)]
    options = {"mask": MASKS["one empty"].cuda(), "pooling": pooling}
    ours, theirs = (value_and_gradients(head, tensors, **options) for head in (fused, stock))
    assert_close_in_norm(ours, theirs, 4 * max(torch.finfo(dtype).eps, 1e-6))


class TiedModel(nn.Module):
    """Embeds, mixes neighbouring tokens and scores with the embedding matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.mixer = nn.Conv1d(D, D, 3, padding=1)
        self.dropout = nn.Dropout(0.3)

    def encode(self, ids: Tensor) -> Tensor:
        return self.dropout(self.mixer(self.embedding(ids).mT).mT)

    def forward(self, ids: Tensor, head: Callable[..., Tensor]) -> Tensor:
        return head(self.encode(ids), self.embedding.weight, None, MASKS["right"])


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_tied_weights_get_gradient_from_both_ends() -> None:
    model, ids = TiedModel().eval(), torch.arange(B * L).view(B, L) % V
    ours, theirs = (gradients(model, model(ids, head).square().sum()) for head in (fused, stock))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    head_only = torch.autograd.grad(
        fused(model.encode(ids).detach(), model.embedding.weight, None, MASKS["right"]).square().sum(),
        model.embedding.weight,
    )[0]
    assert not torch.allclose(ours[0], head_only), "the embeddings' end must show"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_gradient_checkpointing(pooling: str, reentrant: bool) -> None:
    def head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused(hidden, weight, bias, MASKS["right"], pooling=pooling)

    plain = value_and_gradients(head, inputs())
    tensors = inputs()
    scores = checkpointed(head, *tensors, use_reentrant=reentrant)
    (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
    torch.testing.assert_close([scores.detach(), *(t.grad for t in tensors)], plain)


def test_gradient_cache_with_dropout() -> None:
    """Embed without graph, cache the scores' gradients, embed again with graph under the same random state."""
    model, ids = TiedModel().train(), torch.arange(B * L).view(B, L) % V
    torch.manual_seed(1)
    expected = gradients(model, model(ids, fused).square().sum())
    torch.manual_seed(1)
    with torch.no_grad():
        scores = model(ids, fused)
    torch.manual_seed(1)
    cached = gradients(model, (model(ids, fused) * (2 * scores)).sum())
    torch.testing.assert_close(cached, expected)


def test_gradients_accumulate_over_calls() -> None:
    """Queries and documents pass the head one after the other before the backward pass."""
    hidden, weight, bias = inputs()
    both = fused(hidden, weight, bias, MASKS["right"]).sum() + fused(2 * hidden, weight, bias, MASKS["left"]).sum()
    both.backward()
    other = inputs()
    (stock(*other, MASKS["right"]).sum() + stock(2 * other[0], *other[1:], MASKS["left"]).sum()).backward()
    torch.testing.assert_close([hidden.grad, weight.grad, bias.grad], [t.grad for t in other], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_inputs_are_unmodified_and_nothing_is_kept_without_gradient(pooling: str) -> None:
    tensors = inputs()
    before = [t.detach().clone() for t in tensors]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                scores = fused(*tensors, MASKS["right"], pooling=pooling)
            assert scores.grad_fn is None
        assert kept == []
        with_grad = fused(*tensors, MASKS["right"], pooling=pooling)
    torch.testing.assert_close(scores.clone(), with_grad.detach())
    torch.testing.assert_close([t.detach() for t in tensors], before, rtol=0, atol=0)


def test_max_keeps_one_index_per_sequence_and_term() -> None:
    kept: list[Tensor] = []
    tensors = inputs()
    tokens, cu_seqlens = unpad(tensors[0].detach().requires_grad_(), MASKS["full"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        splade_head(tokens, cu_seqlens, *tensors[1:])
    known = {t.data_ptr() for t in (tokens, *tensors)}
    fresh = [t for t in kept if t.data_ptr() not in known]
    assert sum(t.nbytes for t in fresh) <= 8 * B * V  # the indices, and the maxima for the derivative of log1p


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory from /proc")
def test_memory_is_bounded() -> None:
    """The (batch, length, vocabulary) logits alone would take 512 MB; a step of either pooling takes an eighth."""
    code = """
import pathlib, re, torch
from st_sparse_rescale.modules.fused_head import splade_head
torch.set_num_threads(1)
B, L, D, V = 16, 256, 8, 1 << 15
hidden, weight = torch.randn(B * L, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
def step(batch, pooling):
    tokens = batch * L
    splade_head(hidden[:tokens], torch.arange(0, tokens + 1, L), weight, pooling=pooling, tile=128).sum().backward()
def peak():  # not getrusage, which starts from the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) // 1024
for pooling in ("max", "sum"):
    step(1, pooling)  # what torch allocates once
before = peak()
for pooling in ("max", "sum"):
    step(B, pooling)
print(peak() - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < int(out) < 64, f"{out} MB"


def test_compiled_encoder_hands_over() -> None:
    """The head is left out of the graph: a compiled caller, and a change of lengths, give the same result."""
    traced = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        nonlocal traced
        traced += 1
        return graph.forward

    def head(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return fused(hidden.tanh(), weight, bias, mask).sin()

    compiled = torch.compile(head, backend=backend)
    for name in ("right", "holes", "one empty"):
        ours, theirs = (value_and_gradients(f, inputs(), mask=MASKS[name]) for f in (compiled, head))
        torch.testing.assert_close(ours, theirs)
    assert 0 < traced <= 6, "at most one graph before the head and one after it, and again for dynamic shapes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, D)}, r"unpad\(\)"),
        ({"hidden": torch.zeros(6, D + 1)}, "same dimension"),
        ({"bias": torch.zeros(V + 1)}, "one value for each of 50 terms"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, "from 0 to the 6 tokens"),
        ({"cu_seqlens": torch.tensor([1, 6])}, "from 0 to the 6 tokens"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, "rise"),
        ({"activation": "gelu"}, "'gelu'"),
        ({"pooling": "mean"}, "'mean'"),
        ({"tile": 0}, "got 0"),
        ({"weight": torch.zeros(V, D, dtype=torch.bfloat16)}, "autocast"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    arguments = {"hidden": torch.zeros(6, D), "cu_seqlens": torch.tensor([0, 6]), "weight": torch.zeros(V, D)}
    with pytest.raises(ValueError, match=message):
        splade_head(**{**arguments, **change})


def test_bad_mask() -> None:
    with pytest.raises(ValueError, match=r"need one of shape \(3, 7\)"):
        unpad(torch.zeros(B, L, D), torch.ones(B, L + 1))
