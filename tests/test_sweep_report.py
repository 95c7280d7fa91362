"""What a sweep found: seeds taken together, the rule for k held against the best, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from st_sparse_rescale.experiments.experiment import CURVE, key_in, key_of
from st_sparse_rescale.experiments.outcomes import Setting, line, outcomes_of
from st_sparse_rescale.experiments.report import write_report
from st_sparse_rescale.experiments.validation import validate
from st_sparse_rescale.training import Recipe

SOURCES = {"docstrings": "anywhere"}


def result(ndcg: float | None, collapse: str | None = None, first: float | None = 7.0, **settings) -> dict:
    """A recorded run, with the nDCG@10 at equal cost; None leaves no model."""
    recipe = Recipe.load("sweep", **{"model": "some/tiny", **settings})
    metrics = {"ndcg@10": 0.9, "query_active_dims": 10.0, "corpus_active_dims": 20.0, "flops": 1.5}
    evaluation = None if ndcg is None else {**metrics, "ndcg@10_at_flops": {"10": 0.0, "20": ndcg, "50": 0.8}}
    return {
        **key_of(recipe, SOURCES),
        "curve": {"step": [1, 10], **{name: [first, 2.0] for name in CURVE}},
        "collapse": collapse,
        "evaluations": {"docstrings": evaluation},
        "versions": {"torch": "2"},
    }


def test_runs_are_told_apart_by_what_was_varied_and_seeds_taken_together():
    outcomes = outcomes_of(
        [result(0.2, k=4), result(0.4, k=4, seed=1), result(0.5, k=4, strategy="norm"), result(0.1, warmup=0.5)]
    )
    assert list(outcomes) == [
        Setting("tiny", 4.0),
        Setting("tiny", 4.0, "norm"),
        Setting("tiny", 1.0, others=(("warmup", 0.5),)),
    ]
    both = outcomes[Setting("tiny", 4.0)]
    assert both.ndcg("docstrings") == pytest.approx(0.3)
    assert both.ndcgs("docstrings") == [0.2, 0.4]
    assert both.ndcg("docstrings", cost=None) == pytest.approx(0.9)


def test_settings_that_recipes_did_not_have_yet_are_as_by_default():
    old = result(0.2)
    del old["settings"]["head_learning_rate_factor"]
    assert key_in(old) == key_of(Recipe.load("sweep", model="some/tiny"), SOURCES)
    assert list(outcomes_of([old])) == [Setting("tiny", 1.0)]


def test_a_collapse_that_left_nothing_counts_as_0():
    (dead,) = outcomes_of([result(None, collapse="Training stopped", first=None)]).values()
    assert dead.ndcg("docstrings") == dead.metric("flops", "docstrings") == 0
    assert dead.first("base_loss") == float("inf")
    assert dead.stopped == 1


def test_a_line_along_k_begins_with_the_run_that_belongs_to_both_strategies():
    runs = [result(0.1), result(0.2, k=4, strategy="norm", head_learning_rate_factor=4), result(0.3, k=4)]
    outcomes = outcomes_of(runs)
    assert [outcome.ndcg("docstrings") for outcome in line(outcomes, "tiny", "norm", (1, 4, 16))] == [0.1]
    assert [outcome.ndcg("docstrings") for outcome in line(outcomes, "tiny", "norm", (1, 4, 16), True)] == [0.1, 0.2]
    assert [outcome.ndcg("docstrings") for outcome in line(outcomes, "tiny", "weight", (1, 4, 16))] == [0.1, 0.3]


def test_the_rule_is_measured_against_the_best_of_the_sweep():
    outcomes = outcomes_of([result(0.40), result(0.50, k=4), result(0.45, k=16, collapse="Training stopped")])
    (found,) = validate(outcomes, {"tiny": 16, "other": 1}, "weight", "docstrings")
    assert (found.chosen, found.best) == (16, 4)
    assert found.loss == pytest.approx(0.1)
    assert found.stopped
    assert validate(outcomes, {"tiny": 3}, "weight", "docstrings") == []  # not tried


def test_longer_trainings_are_compared_with_their_like():
    runs = [result(0.4), result(0.5, k=4), result(0.8, max_steps=600), result(0.7, k=4, max_steps=600)]
    outcomes = outcomes_of(runs)
    (short,) = validate(outcomes, {"tiny": 1}, "weight", "docstrings")
    (long,) = validate(outcomes, {"tiny": 1}, "weight", "docstrings", steps=600)
    assert (short.best, short.ndcg, short.steps) == (4, 0.4, 120)
    assert (long.best, long.ndcg, long.steps) == (1, 0.8, 600)


def test_the_page_shows_every_run_and_its_figures(tmp_path):
    results = [
        result(0.40),
        result(0.50, k=4),
        result(0.60, k=4, seed=1),
        result(0.30, k=4, strategy="norm"),
        result(0.45, k=4, strategy="norm", head_learning_rate_factor=16),
        result(None, warmup=0.5, collapse="Training stopped"),
    ]
    page = write_report(tmp_path / "sweeps", results, {"weight": {"tiny": 1}, "norm": {"tiny": 4}})
    text = page.read_text(encoding="utf-8")
    assert "| 4 | weight | x 1 |  | 2 | 7.0 | 7.0 | 0.550 (0.500 to 0.600) |" in text
    assert "| 1 | weight | x 1 | warmup 0.5 | 1 | 7.0 | 7.0 | 0.000 |" in text
    assert "| weight | 120 | tiny | docstrings | 20 | 1 | 0.400 | 4 | 0.550 | 27.3% |  |" in text
    shown = {Path(part.split(")")[0]).name for part in text.split("](")[1:]}
    assert shown == {file.name for file in page.parent.glob("*.png")}
    assert all((page.parent / name).stat().st_size > 5_000 for name in shown)


def test_no_results_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="run a sweep first"):
        write_report(tmp_path, [], {})
