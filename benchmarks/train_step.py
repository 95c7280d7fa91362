"""Whole training steps and encoding: sentence-transformers' own SPLADE model beside the same model, fused.

    python benchmarks/train_step.py                          # BERT, ModernBERT and XLM-R shapes, random weights
    python benchmarks/train_step.py --backbone bert --rounds 5

A step is what a trainer does with a batch of texts: forward through the model, in-batch contrastive loss and FLOPS
terms, backward, clipping, AdamW. One model serves both contenders: it is fused and unfused in alternation, in one
process, and each ratio is the median of the ratios within a round. "rest" is the same step without a head, which no
head can make quicker: encoder forward and backward, clipping and AdamW. Encoding is `SparseEncoder.encode` of texts of
mixed length; its "rest" is the encoder alone over the same batches.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from machine import describe_machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    ModernBertConfig,
    ModernBertForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from st_sparse_rescale import fuse, unfuse
from st_sparse_rescale.heads import MLMHead

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IDS = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
BACKBONES: dict[str, Callable[[], torch.nn.Module]] = {
    "bert": lambda: BertForMaskedLM(BertConfig()),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**IDS)),
    "xlm-r": lambda: XLMRobertaForMaskedLM(
        XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1, **IDS)
    ),
}
SETTERS = {"stock": unfuse, "fused": fuse}


def build(backbone: str, folder: Path) -> SparseEncoder:
    """A stock SPLADE model of the backbone's shape with random weights."""
    torch.manual_seed(0)
    model = BACKBONES[backbone]()
    # Standard normal logits before the bias, and a bias that leaves about a tenth of the terms active in 128 tokens.
    head = MLMHead.of(model)
    with torch.no_grad():
        head.decoder.weight.normal_(std=head.hidden_size**-0.5)
        head.bias.fill_(torch.special.ndtri(torch.tensor(0.9 ** (1 / 128))).neg().item())
    model.save_pretrained(folder)
    words = [f"w{i}" for i in range(model.config.vocab_size - len(SPECIAL))]
    vocabulary = {word: i for i, word in enumerate(SPECIAL + words)}
    inputs = ["input_ids", "attention_mask"]
    BertTokenizerFast(vocab=vocabulary, model_max_length=512, model_input_names=inputs).save_pretrained(folder)
    transformer = Transformer(str(folder), transformer_task="fill-mask")
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")


def texts(lengths: list[int], vocabulary: int) -> list[str]:
    """Random texts of that many tokens, [CLS] and [SEP] included."""
    torch.manual_seed(1)
    return [" ".join(f"w{i}" for i in torch.randint(vocabulary - len(SPECIAL), (n - 2,)).tolist()) for n in lengths]


def step_lengths(batch: int, length: int, fill: float) -> list[int]:
    """Evenly spread, the longest `length`, on average `fill * length`."""
    return torch.linspace((2 * fill - 1) * length, length, batch).round().long().clamp(min=3).tolist()


class Step:
    """A training step on one batch, half of it queries and half their documents."""

    def __init__(self, model: SparseEncoder, batch: int, length: int, fill: float) -> None:
        made = texts(step_lengths(batch, length, fill), len(model.tokenizer))
        halves = made[::2], made[1::2]
        self.features = [dict(model.preprocess(half)) for half in halves]
        self.loss = SpladeLoss(
            model,
            SparseMultipleNegativesRankingLoss(model),
            document_regularizer_weight=3e-3,
            query_regularizer_weight=3e-3,
        )
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def run(self) -> None:
        """Take the step."""
        losses = self.loss([dict(features) for features in self.features], None)
        self.finish(sum(losses.values()) if isinstance(losses, dict) else losses)

    def run_rest(self) -> None:
        """Take it without a head."""
        encoder = self.model[0].model.base_model
        self.finish(sum(encoder(**features).last_hidden_state.mean() for features in self.features))

    def finish(self, loss: Tensor) -> None:
        """Go from the loss to the next weights."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Encoding:
    """Encoding texts whose lengths are spread evenly from 16 tokens to `length`."""

    def __init__(self, model: SparseEncoder, count: int, length: int) -> None:
        lengths = torch.linspace(16, length, count).round().long()
        order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
        self.texts = texts(lengths[order].tolist(), len(model.tokenizer))
        self.model = model.eval()

    def run(self) -> None:
        """Encode."""
        self.model.encode(self.texts, batch_size=16, show_progress_bar=False)

    @torch.inference_mode()
    def run_rest(self) -> None:
        """Run the encoder alone."""
        longest_first = sorted(self.texts, key=len, reverse=True)
        for start in range(0, len(longest_first), 16):
            self.model[0].model.base_model(**self.model.preprocess(longest_first[start : start + 16]))


def alternate(work: Step | Encoding, rounds: int) -> dict[str, list[float]]:
    """Seconds of stock, fused and rest in every round, after one round to warm up."""
    seconds: dict[str, list[float]] = {"stock": [], "fused": [], "rest": []}
    for _ in range(rounds + 1):
        for name in seconds:
            SETTERS.get(name, lambda model: model)(work.model)
            run = work.run_rest if name == "rest" else work.run
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def summarise(backbone: str, kind: str, shape: str, seconds: dict[str, list[float]]) -> dict[str, object]:
    return {
        "backbone": backbone,
        "kind": kind,
        "shape": shape,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "stock / fused": statistics.median(a / b for a, b in zip(seconds["stock"], seconds["fused"], strict=True)),
        "stock / rest": statistics.median(a / b for a, b in zip(seconds["stock"], seconds["rest"], strict=True)),
        "seconds": seconds,
    }


def table(results: list[dict]) -> Table:
    columns = ("stock s", "fused s", "rest s", "fused is faster", "with a free head")
    made = Table("backbone", "what", "shape", title="Training steps and encoding")
    for column in columns:
        made.add_column(column, justify="right")
    for r in results:
        seconds = [f"{r['median_seconds'][name]:.2f}" for name in ("stock", "fused", "rest")]
        made.add_row(
            r["backbone"], r["kind"], r["shape"], *seconds, f"{r['stock / fused']:.2f}x", f"{r['stock / rest']:.2f}x"
        )
    return made


def main(
    backbone: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(BACKBONES)}; repeatable.")] = None,
    batch: Annotated[int, typer.Option(help="Texts a step.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of the longest text.")] = 128,
    count: Annotated[int, typer.Option(help="Texts to encode.")] = 48,
    rounds: Annotated[int, typer.Option(help="Rounds of alternation.")] = 2,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path(__file__).parent
    / "results"
    / "train_step.json",
) -> None:
    """Compare whole training steps and encoding, stock and fused."""
    if threads:
        torch.set_num_threads(threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: list[dict] = []
    with Progress(console=console, transient=True) as progress, tempfile.TemporaryDirectory() as folder:
        for name in progress.track(backbone or list(BACKBONES), description="Measuring"):
            model = build(name, Path(folder) / name)
            for fill in (1.0, 0.5):
                seconds = alternate(Step(model, batch, length, fill), rounds)
                results.append(summarise(name, "step", f"{batch}x{length}, {fill:.0%} filled", seconds))
            seconds = alternate(Encoding(model, count, 2 * length), rounds)
            results.append(summarise(name, "encode", f"{count} texts of 16 to {2 * length}", seconds))
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")
    made = table(results)
    with output.with_suffix(".txt").open("w") as text:
        Console(file=text, width=140).print(made)
    console.print(made)
    console.print(f"Figures written to {output}")


if __name__ == "__main__":
    typer.run(main)
