"""Write docs/sweeps from the committed runs, and hold the rule for k against them.

Called by ``make sweep``. The heads' measurements are kept in ``experiments/results/heads``; those of backbones that are
at hand and have none are made first (``scripts/pretrain_mini.py`` makes the backbones).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from st_sparse_rescale.calibration.choice import choose_k
from st_sparse_rescale.calibration.head_report import HeadReport
from st_sparse_rescale.calibration.measure import measure_head
from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.experiments.report import write_report
from st_sparse_rescale.experiments.results import read_results
from st_sparse_rescale.rescaling import Strategy

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


def heads() -> dict[str, HeadReport]:
    """The measured head of every backbone, by name."""
    shipped = [Path(backbone_path(name)) for name in ("bert-mini", "modernbert-mini")]
    made = sorted(config.parent for config in (ROOT / "build" / "backbones").glob("*/config.json"))
    (RESULTS / "heads").mkdir(exist_ok=True)
    for folder in (*shipped, *made):
        file = RESULTS / "heads" / f"{folder.name}.json"
        if not file.exists():
            report = replace(measure_head(folder), name=folder.name)
            file.write_text(report.to_json() + "\n", encoding="utf-8")
    return {
        file.stem: HeadReport.from_json(file.read_text(encoding="utf-8"))
        for file in sorted((RESULTS / "heads").glob("*.json"))
    }


def main() -> None:
    measured = heads()
    choices = {
        strategy: {name: choose_k(report, strategy).k for name, report in measured.items()}
        for strategy in get_args(Strategy)
    }
    results = [result for file in sorted(RESULTS.glob("*.jsonl")) for result in read_results(file)]
    page = write_report(ROOT / "docs" / "sweeps", results, choices)
    Console().print(f"{len(results)} runs: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
