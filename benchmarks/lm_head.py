"""The LM head of SPLADE: sentence-transformers' own beside the fused one, in time and in memory.

    python benchmarks/lm_head.py                                       # the default grid
    python benchmarks/lm_head.py --head bert --shape 16x128 --tiles    # one shape, and how the tile size matters

Both heads get the same random hidden states and decoder, in one process, in alternation; each ratio is the median of
the ratios within a round, so that a machine that slows down slows both. With `--threads 1` it is the time that the
thread really ran, which a busy machine disturbs less; otherwise the time on the wall. "product" is the bare matrix
product over the real tokens, `torch.nn.functional.linear`: the floor for any exact head. Memory is the growth of a
fresh process's peak over what its inputs take, one process per head (Linux only).

`--active` is the share of (sequence, term) pairs with a positive score. 1.0 is a large, freshly rescaled head, 0.1 a
raw BERT (about 3,000 of 30,522 terms a text), 0.01 a trained SPLADE model. `--fill` is the share of real tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from machine import describe_machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor
from torch.nn.functional import linear

from st_sparse_rescale.modules.fused_head import splade_head, unpad

VOCABULARY = {"bert": 30_522, "modernbert": 50_368, "xlm-r": 250_002}
DIMENSION = 768
TILES = (128, 256, 512, 1024, 2048, 4096, 8192)
# What is measured when nothing is asked for: a quarter of an hour on two cores. Every other combination is an option.
DEFAULT_SHAPES = {"bert": ("16x128", "32x256", "64x64"), "modernbert": ("16x128",), "xlm-r": ("16x64",)}


@dataclass(frozen=True)
class Case:
    """One head, batch and state of training."""

    head: str
    batch: int
    length: int
    fill: float
    active: float

    def lengths(self) -> Tensor:
        """Evenly spread, the longest `length`, on average `fill * length` (from a half upwards)."""
        return torch.linspace((2 * self.fill - 1) * self.length, self.length, self.batch).round().long().clamp(min=1)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, mask, weight and bias, with standard normal logits before the bias."""
        torch.manual_seed(0)
        hidden = torch.randn(self.batch, self.length, DIMENSION)
        mask = (torch.arange(self.length) < self.lengths()[:, None]).long()
        weight = torch.randn(VOCABULARY[self.head], DIMENSION).div_(DIMENSION**0.5)
        bias = torch.zeros(len(weight))
        if self.active < 1:
            negative = torch.tensor(1 - self.active, dtype=torch.float64) ** (1 / mask.sum(1).double().mean())
            bias -= torch.special.ndtri(negative).float()
        return hidden.requires_grad_(), mask, weight.requires_grad_(), bias.requires_grad_()

    def logits_bytes(self) -> int:
        """What one copy of a stock head's logits takes."""
        return 4 * self.batch * self.length * VOCABULARY[self.head]


def fused_head(hidden: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, tile: int | None = None) -> Tensor:
    return splade_head(*unpad(hidden, mask), weight, bias, tile=tile)


def stock_head(hidden: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    pooling = SpladePooling().train(torch.is_grad_enabled())
    return pooling({"token_embeddings": linear(hidden, weight, bias), "attention_mask": mask})["sentence_embedding"]


HEADS = {"fused": fused_head, "stock": stock_head}


def step(head: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """A forward and a backward pass."""
    scores = head(*inputs)
    torch.autograd.backward(scores, torch.ones_like(scores))
    for tensor in inputs:
        tensor.grad = None


def measure_time(case: Case, rounds: int, *, with_stock: bool, tiles: bool) -> dict[str, list[float]]:
    """Seconds of every contender in every round, after one round to warm up."""
    inputs = case.inputs()
    hidden, mask, weight, bias = inputs
    tokens, _ = unpad(hidden.detach(), mask)
    contenders: dict[str, Callable[[], object]] = {"product": torch.no_grad()(partial(linear, tokens, weight, bias))}
    for name, head in HEADS.items():
        if name == "stock" and not with_stock:
            continue
        contenders[f"{name} encode"] = torch.no_grad()(partial(head, *inputs))
        contenders[f"{name} forward"] = partial(head, *inputs)
        contenders[f"{name} step"] = partial(step, head, inputs)
    if tiles:
        for tile in TILES:
            contenders[f"tile {tile} encode"] = torch.no_grad()(partial(fused_head, *inputs, tile=tile))
            contenders[f"tile {tile} forward"] = partial(fused_head, *inputs, tile=tile)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: values[1:] for name, values in seconds.items()}


def peak_bytes() -> int:
    # Not getrusage: Linux hands a parent's peak on to its children.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


def measure_memory(case: Case, head: str, *, with_grad: bool) -> int:
    """Bytes by which the peak of a fresh process grows in one pass. Called in that process."""
    with torch.set_grad_enabled(with_grad):
        hidden, mask, weight, bias = case.inputs()
        warm_up = (hidden[:1, :8].detach().requires_grad_(), mask[:1, :8], weight[:8].detach(), bias[:8].detach())
        run = (lambda inputs: step(HEADS[head], inputs)) if with_grad else (lambda inputs: HEADS[head](*inputs))
        run(warm_up)  # loads what torch loads once
        before = peak_bytes()
        run((hidden, mask, weight, bias))
    return peak_bytes() - before


def in_fresh_process(case: Case, head: str, *, with_grad: bool) -> int:
    threads = torch.get_num_threads()
    arguments = json.dumps({"case": asdict(case), "head": head, "with_grad": with_grad, "threads": threads})
    command = [sys.executable, __file__, "--measure-memory-of", arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))


def summarise(case: Case, seconds: dict[str, list[float]], memory: dict[str, int]) -> dict[str, object]:
    ratios = {f"{name} / product": ratio(seconds, name, "product") for name in seconds if name != "product"}
    for phase in ("encode", "forward", "step"):
        if f"stock {phase}" in seconds:
            ratios[f"stock / fused {phase}"] = ratio(seconds, f"stock {phase}", f"fused {phase}")
    for phase in ("encode", "step"):
        if f"stock {phase}" in memory:
            ratios[f"stock / fused {phase} memory"] = memory[f"stock {phase}"] / max(1, memory[f"fused {phase}"])
    return {
        **asdict(case),
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratios": ratios,
        "seconds": seconds,
        "peak_bytes": memory,
    }


def tables(results: list[dict]) -> list[Table]:
    def times(result: dict, name: str) -> str:
        value = result["ratios"].get(name)
        return "-" if value is None else f"{value:.2f}x"

    def table(title: str, *columns: str) -> Table:
        made = Table("head", "B x L", "fill", "active", title=title)
        for column in columns:
            made.add_column(column, justify="right")
        return made

    def case(result: dict) -> list[str]:
        return [result["head"], f"{result['batch']}x{result['length']}", f"{result['fill']:g}", f"{result['active']:g}"]

    made = [table("Seconds: the product, and the fused head (times the product, times quicker than stock)", "product")]
    for phase in ("encode", "forward", "step"):
        made[0].add_column(phase, justify="right")
    for r in results:
        row = [f"{r['median_seconds']['product']:.3f}"]
        for phase in ("encode", "forward", "step"):
            seconds = r["median_seconds"][f"fused {phase}"]
            ratios = f"{times(r, f'fused {phase} / product')}, {times(r, f'stock / fused {phase}')}"
            row.append(f"{seconds:.3f} ({ratios})")
        made[0].add_row(*case(r), *row)
    if any(r["peak_bytes"] for r in results):
        phases = ("encode", "step")
        made.append(table("Growth of the peak, MB", *(f"{p} {h}" for p in phases for h in ("fused", "stock", "ratio"))))
        for r in results:
            row = []
            for phase in phases:
                sizes = (r["peak_bytes"].get(f"{head} {phase}") for head in HEADS)
                row += ["-" if size is None else f"{size / 1e6:,.0f}" for size in sizes]
                row.append(times(r, f"stock / fused {phase} memory"))
            made[-1].add_row(*case(r), *row)
    if any(name.startswith("tile") for r in results for name in r["median_seconds"]):
        made.append(table("Tile size: encode / forward, times the product", *(f"{tile:,}" for tile in TILES)))
        for r in results:
            row = [" / ".join(times(r, f"tile {t} {p} / product") for p in ("encode", "forward")) for t in TILES]
            made[-1].add_row(*case(r), *row)
    return made


def main(
    head: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(VOCABULARY)}; repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="BATCHxLENGTH, repeatable.")] = None,
    fill: Annotated[list[float] | None, typer.Option(help="Share of real tokens, 0.5 to 1; repeatable.")] = None,
    active: Annotated[list[float] | None, typer.Option(help="Share of positive scores; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of alternation.")] = 3,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.")] = 0,
    memory: Annotated[bool, typer.Option(help="Measure memory too.")] = True,
    tiles: Annotated[bool, typer.Option(help="Compare tile sizes too.")] = False,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path(__file__).parent
    / "results"
    / "lm_head.json",
    measure_memory_of: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare the stock SPLADE head with the fused one."""
    if measure_memory_of is not None:
        job = json.loads(measure_memory_of)
        torch.set_num_threads(job["threads"])
        print(measure_memory(Case(**job["case"]), job["head"], with_grad=job["with_grad"]))
        return
    if threads:
        torch.set_num_threads(threads)
    cases = [
        Case(name, int(text.split("x")[0]), int(text.split("x")[1]), share, positive)
        for name in head or list(VOCABULARY)
        for text in shape or DEFAULT_SHAPES[name]
        for share in fill or [1.0, 0.5]
        for positive in active or [0.1]
    ]
    console = Console(width=None if sys.stdout.isatty() else 160)
    results = []
    with Progress(console=console, transient=True) as progress:
        for case in progress.track(cases, description="Measuring"):
            # Stock keeps about five copies of the logits in a step.
            fits = 6 * case.logits_bytes() < available_bytes()
            if not fits:
                need, have = 6 * case.logits_bytes() / 1e9, available_bytes() / 1e9
                console.print(f"{case}: stock left out, its step needs about {need:.0f} GB and {have:.0f} are free")
            seconds = measure_time(case, rounds, with_stock=fits, tiles=tiles)
            growth = {
                f"{name} {'step' if with_grad else 'encode'}": in_fresh_process(case, name, with_grad=with_grad)
                for name in HEADS
                for with_grad in (False, True)
                if memory and (fits or name == "fused")
            }
            results.append(summarise(case, seconds, growth))
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")
    made = tables(results)
    with output.with_suffix(".txt").open("w") as text:
        Console(file=text, width=140).print(*made)
    console.print(*made)
    console.print(f"Figures written to {output}")


if __name__ == "__main__":
    typer.run(main)
