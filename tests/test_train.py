"""The training entry: from a recipe to a stock checkpoint, through kills, collapses and several processes."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder
from transformers import TrainerCallback

from st_sparse_rescale.losses import CachedSpladeLoss, DFFlopsLoss, FlopsLoss, JointFlopsLoss, L1Loss, SpladeLoss
from st_sparse_rescale.training import CollapseError, DataError, Recipe, RecipeError, train
from st_sparse_rescale.training.train import build_loss, build_model, last_complete_checkpoint, resolve
from tests.tiny_models import TEXTS, build_checkpoint

ROWS = [{"query": " ".join(text.split()[:4]), "positive": text} for text in TEXTS]
SCORED = [{**row, "negative": TEXTS[i - 1], "label": 3.0} for i, row in enumerate(ROWS)]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    """A tiny BERT without dropout, so that equal steps give equal numbers."""
    folder = tmp_path_factory.mktemp("backbone") / "bert"
    return build_checkpoint("bert", folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture
def recipe(backbone, tmp_path):
    def make(rows: list[dict] = ROWS, **settings) -> Recipe:
        defaults = {"model": str(backbone), "train": write(tmp_path / "train.jsonl", rows), "k": 2}
        defaults |= {"batch_size": 4, "max_seq_length": 24, "learning_rate": 1e-3, "logging_steps": 1}
        if "epochs" not in settings:
            defaults["max_steps"] = 6
        return Recipe.load("paper", **(defaults | settings))

    return make


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def losses_of(history: list[dict], name: str = "loss") -> list[float]:
    return [record[name] for record in history if name in record]


# --- the result ---


def test_a_training_leaves_a_stock_checkpoint_its_recipe_and_its_log(recipe, tmp_path):
    result = train(recipe(), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoints",
        "data.json",
        "model",
        "recipe.yaml",
    ]
    assert Recipe.load(result.folder / "recipe.yaml") == result.recipe == Recipe.load(tmp_path / "out" / "recipe.yaml")
    assert log_of(result.folder) == result.history
    assert [record["step"] for record in result.history if "loss" in record] == [1, 2, 3, 4, 5, 6]
    for record in result.history[:6]:
        assert record["loss"] == pytest.approx(
            record["base_loss"] + record["document_regularizer_loss"] + record["query_regularizer_loss"], abs=1e-3
        )
        assert 0 < record["query_active_dims"] < result.model.get_embedding_dimension()
    modules = json.loads((result.folder / "modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    loaded = SparseEncoder(str(result.folder))
    torch.testing.assert_close(
        loaded.encode(list(TEXTS)).to_dense(), result.model.encode(list(TEXTS)).to_dense(), rtol=0, atol=0
    )
    assert loaded.max_seq_length == 24


def test_what_is_trained_by_dot_product_is_served_by_dot_product(recipe, tmp_path):
    result = train(recipe(max_steps=2), tmp_path / "out")
    assert json.loads((result.folder / "config_sentence_transformers.json").read_text())["similarity_fn_name"] == "dot"
    loaded = SparseEncoder(str(result.folder))
    assert not any("Normalize" in type(module).__name__ for module in loaded.modules())
    embeddings = loaded.encode(list(TEXTS)).to_dense()
    torch.testing.assert_close(loaded.similarity(embeddings, embeddings), embeddings @ embeddings.T)
    assert (embeddings == 0).any(), "exact zeros, not small numbers"
    assert not torch.allclose(embeddings.norm(dim=1), torch.ones(len(TEXTS)))


def test_k_strategy_and_reason_are_in_the_config_the_card_and_the_recipe(recipe, tmp_path):
    result = train(recipe(max_steps=2, k=16), tmp_path / "out")
    record = json.loads((result.folder / "config.json").read_text())["mlm_head_rescale"]
    assert (record["k"], record["strategy"]) == (16.0, "weight")
    assert record["reason"]
    card = (result.folder / "README.md").read_text()
    assert "k = 16" in card
    assert "FlopsLoss" in card
    assert "k: 16.0" in (result.folder / "recipe.yaml").read_text()
    assert "16.0" in repr(result.model[0])


def test_a_finished_training_is_returned_as_it_is(recipe, tmp_path, caplog):
    first = train(recipe(max_steps=2), tmp_path / "out")
    before = (first.folder / "model.safetensors").stat().st_mtime_ns
    again = train(recipe(max_steps=2), tmp_path / "out")
    assert "returned as it is" in caplog.text
    assert again.history == first.history
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == before


def test_data_and_evaluator_can_be_objects(recipe, tmp_path):
    class Evaluator(stock_evaluator()):
        def __call__(self, model, output_path=None, epoch=-1, steps=-1):
            return {"steps": steps}

    made = recipe(max_steps=4, save_steps=2).override(train=None)
    result = train(made, tmp_path / "out", train_dataset=Dataset.from_list(ROWS), evaluator=Evaluator())
    assert losses_of(result.history, "eval_steps") == [2, 4]


def stock_evaluator():
    from sentence_transformers.base.evaluation import BaseEvaluator

    return BaseEvaluator


# --- losses and precision ---


@pytest.mark.parametrize("name", ["flops", "l1", "df_flops"])
@pytest.mark.parametrize("joint", [0.0, 0.1])
@pytest.mark.parametrize("mini_batch_size", [None, 3])
def test_the_loss_is_the_recipes(name, joint, mini_batch_size):
    model = torch.nn.Identity()
    settings = {"regularizer": name, "joint_flops_weight": joint, "mini_batch_size": mini_batch_size, "scale": 3.0}
    loss = build_loss(Recipe(document_regularizer_weight=0.3, query_regularizer_weight=0.2, **settings), model)
    assert type(loss) is (SpladeLoss if mini_batch_size is None else CachedSpladeLoss)
    kind = {"flops": FlopsLoss, "l1": L1Loss, "df_flops": DFFlopsLoss}[name]
    assert type(loss.document_regularizer) is type(loss.query_regularizer) is kind
    assert loss.document_regularizer is not loss.query_regularizer
    assert (loss.document_regularizer_weight, loss.query_regularizer_weight) == (0.3, 0.2)
    ranking = loss.loss.loss if joint else loss.loss
    assert isinstance(loss.loss, JointFlopsLoss) == bool(joint)
    assert ranking.scale == 3.0


def test_gradcache_trains_alike(recipe, tmp_path):
    plain = train(recipe(joint_flops_weight=1e-3), tmp_path / "plain").history
    cached = train(recipe(joint_flops_weight=1e-3, mini_batch_size=3), tmp_path / "cached").history
    for name in ("loss", "joint_flops_loss", "query_active_dims", "document_active_dims"):
        assert losses_of(cached, name) == pytest.approx(losses_of(plain, name), rel=2e-3, abs=2e-3)


def test_accumulated_batches_make_one_step(recipe, tmp_path):
    result = train(recipe(epochs=1, gradient_accumulation=2), tmp_path / "out")
    assert [record["step"] for record in result.history if "loss" in record] == [1, 2]  # 16 rows, 2 batches of 4 a step


def test_bf16_computes_in_half_precision_and_keeps_the_weights_in_full(recipe, tmp_path):
    full = train(recipe(max_steps=3), tmp_path / "fp32").history
    result = train(recipe(max_steps=3, precision="bf16"), tmp_path / "bf16")
    assert losses_of(result.history) != losses_of(full)
    assert losses_of(result.history) == pytest.approx(losses_of(full), rel=0.1)
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("loss", ["margin_mse", "kl_div"])
def test_distillation(recipe, tmp_path, loss):
    rows = SCORED if loss == "margin_mse" else [{**row, "label": [row["label"], 0.0]} for row in SCORED]
    history = train(recipe(rows, loss=loss, max_steps=12, save_steps=100), tmp_path / "out").history
    assert all(torch.isfinite(torch.tensor(losses_of(history))))
    assert sum(losses_of(history)[8:]) < sum(losses_of(history)[:4])  # the third pass against the first


def test_a_teacher_in_another_unit_is_warned_about_before_training(recipe, tmp_path, caplog):
    rows = [{**row, "label": 1e6 * row["label"]} for row in SCORED]
    train(recipe(rows, loss="margin_mse", max_steps=1), tmp_path / "out")
    assert "Multiply teacher_scale by about" in caplog.text
    caplog.clear()
    train(recipe(rows, loss="margin_mse", max_steps=1, teacher_scale=1e-6), tmp_path / "scaled")
    assert "teacher_scale" not in caplog.text


# --- kills and resumes ---


class Killed(BaseException):
    """What no handler catches."""


class Kill(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise Killed


def test_a_killed_training_goes_on_from_its_last_checkpoint_and_ends_alike(recipe, tmp_path):
    settings = {"max_steps": 8, "save_steps": 2, "regularizer_warmup": 1.0, "joint_flops_weight": 1e-3}
    whole = train(recipe(**settings), tmp_path / "whole")
    with pytest.raises(Killed):
        train(recipe(**settings), tmp_path / "out", callbacks=[Kill(at=5)])
    checkpoints = tmp_path / "out" / "checkpoints"
    assert not (tmp_path / "out" / "model").exists()
    # One that the kill cut off: everything but its last file.
    shutil.copytree(checkpoints / "checkpoint-4", checkpoints / "checkpoint-5")
    (checkpoints / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5, "log_hist')
    assert last_complete_checkpoint(checkpoints) == checkpoints / "checkpoint-4"

    seen = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    resumed = train(recipe(**settings), tmp_path / "out", callbacks=[Watch()])
    assert seen == [4, 5, 6, 7]
    for name in ("loss", "step", "document_regularizer_weight", "query_active_dims"):
        assert losses_of(resumed.history[:8], name) == losses_of(whole.history[:8], name)
    ramp = [(step / 8) ** 2 * 1e-4 for step in range(8)]
    assert losses_of(resumed.history[:8], "document_regularizer_weight") == pytest.approx(ramp)
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_resume_on_data_that_have_changed_is_refused(recipe, tmp_path):
    settings = {"max_steps": 4, "save_steps": 2}
    with pytest.raises(Killed):
        train(recipe(ROWS[2:], **settings), tmp_path / "out", callbacks=[Kill(at=1)])
    # There is no checkpoint, so nothing that was learnt from the old data is left, and others may take their place.
    with pytest.raises(Killed):
        train(recipe(**settings), tmp_path / "out", callbacks=[Kill(at=3)])
    for changed in (ROWS[1:], [*ROWS[:-1], {**ROWS[-1], "positive": "another"}]):
        with pytest.raises(
            DataError, match=r"the training data have changed since the run in .*out began \(16 rows then"
        ):
            train(recipe(changed, **settings), tmp_path / "out")
    assert train(recipe(**settings), tmp_path / "out").folder.exists()


def test_checkpoints_that_are_not_there():
    assert last_complete_checkpoint("/nowhere") is None


@pytest.mark.slow
def test_a_process_that_is_killed_for_real_loses_at_most_one_save_interval(recipe, tmp_path):
    made = resolve(recipe(max_steps=4000, save_steps=20, learning_rate=1e-5, logging_steps=1000))
    made.save(tmp_path / "recipe.yaml")
    command = [sys.executable, "-m", "st_sparse_rescale.cli", "train", "--config", "recipe.yaml", "--output", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "out" / "checkpoints"
    try:
        deadline = time.monotonic() + 120
        while last_complete_checkpoint(checkpoints) is None and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = last_complete_checkpoint(checkpoints)
    assert found is not None
    begun = []

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)
            raise Killed

    with pytest.raises(Killed):
        train(Recipe.load(tmp_path / "recipe.yaml"), tmp_path / "out", callbacks=[Stop()])
    assert begun == [int(found.name.removeprefix("checkpoint-"))]


# --- collapse ---


def test_a_collapse_stops_the_training_says_what_to_change_and_loses_nothing(recipe, tmp_path, backbone):
    dead = tmp_path / "dead"
    shutil.copytree(backbone, dead)
    model = build_model(resolve(recipe()))[0].model
    with torch.no_grad():
        model.cls.predictions.decoder.bias.fill_(-1e4)
    model.save_pretrained(dead)
    made = recipe(model=str(dead), k=2, guard_patience=3, save_steps=100)
    with pytest.raises(CollapseError, match="for 3 steps the queries were all zero") as caught:
        train(made, tmp_path / "out")
    assert "Lower query_regularizer_weight" in str(caught.value)
    assert not (tmp_path / "out" / "model").exists()
    checkpoint = last_complete_checkpoint(tmp_path / "out" / "checkpoints")
    assert checkpoint.name == "checkpoint-3"
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    assert len(losses_of(history)) == 3
    assert all(math.isfinite(loss) for loss in losses_of(history))
    for _ in range(2):  # and never gives the collapsed model for a finished one
        with pytest.raises(CollapseError, match="collapsed, and would again"):
            train(made, tmp_path / "out")

    short = made.override(max_steps=2)  # too short for a symptom to last
    with pytest.raises(CollapseError, match="the queries were all zero"):
        train(short, tmp_path / "short")
    assert not (tmp_path / "short" / "model").exists()


# --- refusals, each before any model is loaded ---


@pytest.fixture
def no_model(monkeypatch):
    def fail(recipe):
        raise AssertionError("the model was loaded before the refusal")

    monkeypatch.setattr(sys.modules["st_sparse_rescale.training.train"], "build_model", fail)


def test_a_folder_with_another_recipe_is_refused_and_says_what_differs(recipe, tmp_path, no_model):
    resolve(recipe(seed=1)).save(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"another recipe \(seed 1 against 2\): choose another folder"):
        train(recipe(seed=2), tmp_path)


def test_a_start_that_failed_does_not_claim_the_folder(recipe, tmp_path):
    good = recipe(max_steps=1)
    with pytest.raises(DataError, match="cannot be read"):
        train(good.override(train=str(tmp_path / "typo.jsonl")), tmp_path / "out")
    assert train(good, tmp_path / "out").recipe.train == good.train


def test_a_folder_with_something_else_is_refused(recipe, tmp_path, no_model):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(RecipeError, match="not empty and holds no run"):
        train(recipe(), tmp_path / "full")


def test_a_folder_that_cannot_be_written_is_refused(recipe, tmp_path, no_model):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/out cannot be written \(Not a directory\): choose another"):
        train(recipe(), tmp_path / "file" / "out")


def test_missing_parts_are_named(recipe, tmp_path, no_model):
    with pytest.raises(RecipeError, match="names no model"):
        train(recipe(model=None), tmp_path / "a")
    with pytest.raises(RecipeError, match="names no training data"):
        train(recipe(train=None), tmp_path / "b")
    with pytest.raises(RecipeError, match="'/no/such/model' cannot be loaded: it is no folder"):
        train(recipe(model="/no/such/model"), tmp_path / "c")
    with pytest.raises(DataError, match="cannot be read"):
        train(recipe(train=str(tmp_path / "none.jsonl")), tmp_path / "d")
    with pytest.raises(ValueError, match="neither a folder in BEIR's layout"):
        train(recipe(eval="nowhere"), tmp_path / "e")
    with pytest.raises(DataError, match="hold a single row: training needs at least 2"):
        train(recipe(ROWS[:1]), tmp_path / "f")
    with pytest.raises(DataError, match="no column of teacher scores, label or score"):
        train(recipe(loss="margin_mse", rows=[{**row, "negative": "x"} for row in ROWS]), tmp_path / "g")


# --- several processes ---


def environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # Its --cpu flag starts one process unless MPI is there; this is its way to start several, and without a GPU they
    # take the CPU.
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_train_as_one_with_the_whole_batch(recipe, tmp_path, launcher):
    shared = {"max_steps": 3, "save_steps": 2, "regularizer_warmup": 0.3, "query_regularizer_weight": 1e-2}
    extra = {"mini_batch_size": 3, "joint_flops_weight": 1e-2} if launcher == "accelerate" else {}
    one = train(recipe(batch_size=8, **shared, **extra), tmp_path / "one")
    recipe(batch_size=4, **shared, **extra).save(tmp_path / "two.yaml")
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "st_sparse_rescale.cli"]
    command += ["train", "--config", "two.yaml", "--output", "two"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Resolved recipe") == 1
    history = log_of(tmp_path / "two" / "model")
    for name in ("loss", "query_regularizer_loss", "document_regularizer_loss", "query_active_dims"):
        assert losses_of(history, name) == pytest.approx(losses_of(one.history, name), rel=1e-3, abs=2e-4)
    two = SparseEncoder(str(tmp_path / "two" / "model"))
    torch.testing.assert_close(
        two.encode(list(TEXTS)).to_dense(), one.model.encode(list(TEXTS)).to_dense(), rtol=1e-2, atol=1e-2
    )


logging.getLogger("st_sparse_rescale").setLevel(logging.INFO)
