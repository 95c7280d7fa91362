"""The Triton kernel against the torch path, on CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from st_sparse_rescale.modules import fused_head

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Triton reads the variable when it is first imported, and torch may have done that already: run in a new process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_kernel in a process with TRITON_INTERPRET=1")

TERMS, DIMENSION = 150, 40  # more than one block of terms and of dimensions, and multiples of neither
LENGTHS = {"mixed": [70, 1, 0, 64, 33], "one": [1], "empty": [0, 0], "long": [200]}


@pytest.mark.skipif(INTERPRETED, reason="would start itself")
@pytest.mark.slow
def test_kernel() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


@pytest.mark.skipif(INTERPRETED, reason="compiles instead of interpreting")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_compiles(dtype: str) -> None:
    """For an H100, which need not be there. The interpreter accepts programs that the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from st_sparse_rescale.modules import fused_triton

    kernel = fused_triton._positive_max_kernel
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(("hidden", "weight", "bias", "result"), f"*{dtype}")
    signature |= dict.fromkeys(("cu_seqlens", "positions"), "*i32")
    signature |= dict.fromkeys(("terms", "batch", "dimension"), "i32")
    constants = {name: getattr(fused_triton, name) for name in kernel.arg_names if name.startswith("BLOCK")}
    constants |= {"HAS_BIAS": True, "WITH_POSITIONS": True}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert "mma" in compiled.asm["ptx"], "the product runs on tensor cores"


def inputs(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    torch.manual_seed(0)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    hidden, weight = torch.randn(bounds[-1], DIMENSION), torch.randn(TERMS, DIMENSION) / 4
    bias = torch.randn(TERMS)
    bias[::3] = -50  # never active
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), bounds


def both(hidden: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int], *, with_positions: bool = True):
    from st_sparse_rescale.modules import fused_triton

    ours = fused_triton.positive_max(hidden, weight, bias, bounds, with_positions=with_positions)
    return ours, fused_head._positive_max(hidden, weight, bias, bounds, 64, with_positions=with_positions)


@interpreted
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_equals_torch(lengths: str, with_bias: bool) -> None:
    hidden, weight, bias, bounds = inputs(LENGTHS[lengths])
    ours, torchs = both(hidden, weight, bias if with_bias else None, bounds)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    without, _ = both(hidden, weight, bias if with_bias else None, bounds, with_positions=False)
    torch.testing.assert_close(without[0], ours[0])
    assert without[1] is None


@interpreted
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(autocast: bool) -> None:
    """float16 only: the interpreter knows no bfloat16."""
    hidden, weight, bias, bounds = inputs(LENGTHS["mixed"])
    if not autocast:
        weight, bias = weight.half(), bias.half()
    (ours, winners), (torchs, _) = both(hidden.half(), weight, bias, bounds)
    torch.testing.assert_close(ours, torchs)
    assert ours.dtype == torch.float16
    assert ((ours > 0) == (winners >= 0).T).all()


@interpreted
def test_ties_go_to_the_first_token_also_across_blocks() -> None:
    hidden = torch.zeros(200, DIMENSION)
    hidden[[70, 75, 190]] = 1.0  # two in one block and one in a later one
    (_, ours), (_, torchs) = both(hidden, torch.ones(TERMS, DIMENSION), None, [0, 200])
    assert (ours == 70).all()
    torch.testing.assert_close(ours, torchs)


@interpreted
def test_nan_and_infinity() -> None:
    hidden, weight, bias, bounds = inputs(LENGTHS["mixed"])
    hidden[66], hidden[80] = torch.nan, torch.inf
    ours, torchs = both(hidden, weight.abs(), bias, bounds)
    torch.testing.assert_close(ours[0], torchs[0], equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], torchs[1])
    assert ours[0][0].isnan().all()
    assert ours[0][3].isinf().all()


@interpreted
def test_gradients_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernel's winners feed the backward pass."""
    from st_sparse_rescale.modules import fused_triton

    hidden, weight, bias, bounds = inputs(LENGTHS["mixed"])
    tensors = [t.requires_grad_() for t in (hidden, weight, bias)]

    def run() -> list[Tensor]:
        scores = fused_head.splade_head(hidden, torch.tensor(bounds), weight, bias)
        return [scores.detach(), *torch.autograd.grad(scores.square().sum(), tensors)]

    expected = run()
    calls = []
    monkeypatch.setattr(
        fused_head,
        "_positive_max",
        lambda *args, with_positions: (
            calls.append(1) or fused_triton.positive_max(*args[:4], with_positions=with_positions)
        ),
    )
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-5)
    assert calls
