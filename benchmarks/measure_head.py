"""How long it takes to measure a head of BERT's size: what `inspect` and `k="auto"` cost.

    python benchmarks/measure_head.py --threads 2

A random model of bert-base's shape (12 layers, 768 wide, 30,522 terms) is measured on 64 texts of 8 to 64 tokens, under
both strategies and at every k: the most that a call looks at.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from machine import describe_machine
from train_step import build, texts

from st_sparse_rescale import measure_head


def main(
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path(__file__).parent
    / "results"
    / "measure_head.json",
) -> None:
    """Time `measure_head`."""
    if threads:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = build("bert", Path(folder) / "bert")
        lengths = torch.linspace(8, 64, 64).round().long().tolist()
        began = time.perf_counter()
        report = measure_head(model[0], texts(lengths, len(model.tokenizer)))
        seconds = time.perf_counter() - began
    figures = {"seconds": round(seconds, 1), "texts": report.texts, "tokens": report.tokens}
    output.write_text(json.dumps({"machine": describe_machine(), **figures}, indent=1) + "\n")
    print(f"{seconds:.1f} seconds for {report.texts} texts with {report.tokens:,} tokens. Figures written to {output}")


if __name__ == "__main__":
    typer.run(main)
