"""Inspect the shipped backbones, and a trained SPLADE model where there is one, and write what is found for the docs.

python scripts/inspect_models.py
python scripts/inspect_models.py --model build/backbones/roberta-mini --output build/inspected
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from sentence_transformers import SparseEncoder
from transformers.utils import logging

from st_sparse_rescale import choose_k, measure_head
from st_sparse_rescale.calibration import HeadReport
from st_sparse_rescale.calibration.plot import plot_report
from st_sparse_rescale.calibration.show import show
from st_sparse_rescale.demo.backbones import BACKBONES, backbone_path

ROOT = Path(__file__).parent.parent
SPLADE = ROOT.parent / "shared" / "models" / "splade-tiny"
WIDTH = 100


def inspected() -> dict[str, HeadReport]:
    """The models of the docs, under names that hold everywhere."""
    os.chdir(ROOT)
    reports = {name: measure_head(Path(backbone_path(name)).relative_to(ROOT)) for name in BACKBONES}
    if SPLADE.exists():
        model = SparseEncoder(str(SPLADE), device="cpu")
        reports[SPLADE.name] = replace(measure_head(model), name=SPLADE.name)
    else:
        print(f"Skipped: {SPLADE} is not there.")
    return reports


def write(report: HeadReport, folder: Path) -> None:
    """Write what ``inspect`` prints, the plot, and the report as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / Path(report.name).name
    choice = choose_k(report)
    with open(f"{file}.txt", "w", encoding="utf-8") as lines:
        show(report, choice, Console(file=lines, width=WIDTH))
    plot_report(report, choice, f"{file}.png")
    Path(f"{file}.json").write_text(report.to_json() + "\n", encoding="utf-8")
    print(f"{report.name}: {choice.headline}")


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", help="checkpoints to inspect instead")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "choosing-k")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reports = {name: measure_head(name) for name in arguments.model} if arguments.model else inspected()
    for report in reports.values():
        write(report, arguments.output)


if __name__ == "__main__":
    main()
