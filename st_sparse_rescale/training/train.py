"""Train a rescaled SPLADE model from a recipe."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.base.modules import Module, Router
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sparse_encoder.callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.util import get_device_name
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from st_sparse_rescale.calibration import MAX_TEXTS, choose_k, measure_head, sample
from st_sparse_rescale.evaluation.beir import load_evaluator
from st_sparse_rescale.jsonl import read_jsonl, write_jsonl
from st_sparse_rescale.losses import (
    CachedSpladeLoss,
    DFFlopsLoss,
    FlopsLoss,
    JointFlopsLoss,
    L1Loss,
    SparseDistillKLDivLoss,
    SparseMarginMSELoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from st_sparse_rescale.modules import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.training.callbacks import CollapseError, CollapseGuard, JointFlopsScheduler
from st_sparse_rescale.training.data import (
    DataError,
    TeacherScores,
    dataset_crc32,
    load_training_data,
    teacher_scale_warning,
)
from st_sparse_rescale.training.head_learning_rate import head_learning_rate
from st_sparse_rescale.training.inference_free import QUERY_WEIGHTS, NonNegativeQueries, idf_query_encoder
from st_sparse_rescale.training.recipe import Recipe, RecipeError
from st_sparse_rescale.whole import written_whole

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # in the output folder
TEACHER_SCORES: dict[str, TeacherScores] = {"contrastive": "none", "margin_mse": "margins", "kl_div": "scores"}
REGULARIZERS = {"flops": FlopsLoss, "l1": L1Loss, "df_flops": DFFlopsLoss}


@dataclass(frozen=True)
class TrainResult:
    """A finished training.

    Attributes:
        model: The trained model.
        folder: Where it is saved; it loads with ``SparseEncoder(folder)``.
        recipe: The resolved recipe.
        history: One record for each log line: step, loss and its parts, active dimensions, evaluation metrics.
    """

    model: SparseEncoder
    folder: Path
    recipe: Recipe
    history: list[dict[str, Any]]


def train(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    train_dataset: Dataset | None = None,
    evaluator: BaseEvaluator | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    progress_bar: bool = True,
) -> TrainResult:
    """Train a SPLADE model, or go on where an earlier, killed call with the same recipe stopped.

    The output folder receives ``recipe.yaml`` (resolved), ``checkpoints/`` and, once training is complete, ``model/``
    with the final model, the recipe and ``training_log.jsonl``. The model is the one of the last step: early steps,
    when the regularisers are still weak, often retrieve better with far denser vectors, so the best nDCG would choose
    against sparsity.

    Every process of a ``torchrun`` or ``accelerate launch`` calls this function alike.

    Args:
        recipe: All settings; ``model`` must be set, and ``train`` unless a dataset is given.
        output_dir: An empty or new folder, or one of the same recipe.
        train_dataset: Instead of ``recipe.train``; the same columns and checks.
        evaluator: Instead of ``recipe.eval``; runs at every checkpoint.
        callbacks: Added to the trainer's.
        progress_bar: Whether the trainer shows its progress bar and log lines.

    Returns:
        The trained model, its folder and its history.

    Raises:
        RecipeError: If the recipe lacks a model, training data or k, or the output folder holds another run.
        DataError: If the training data cannot be trained on.
        CollapseError: If the model collapsed; a checkpoint is saved.
        ValueError: If the checkpoint has no head that can be rescaled, or the output folder cannot be written.

    Example::

        from st_sparse_rescale.training import Recipe, train

        recipe = Recipe.load("paper", model="answerdotai/ModernBERT-base", train="triplets.jsonl", k=16)
        result = train(recipe, "my-splade")
        result.model.encode(["sparse retrieval"])
    """
    recipe = resolve(recipe, train_dataset)
    output = Path(output_dir)
    args = _arguments(recipe, output, evaluate=evaluator is not None or recipe.eval is not None)
    with args.main_process_first(local=False, desc="claiming the output folder"):
        _claim(output, recipe)
    collapsed = output / "collapsed.txt"
    if collapsed.exists():
        raise CollapseError(
            f"The training in {output} collapsed, and would again. {collapsed.read_text(encoding='utf-8')} Use another "
            f"folder (--output) for another recipe, or delete {collapsed} to go on from the last checkpoint."
        )
    finished = output / "model"
    if finished.exists():
        logger.warning("%s holds the finished model of this recipe: it is returned as it is.", finished)
        history = [row for _, row in read_jsonl(finished / "training_log.jsonl")]
        return TrainResult(SparseEncoder(str(finished)), finished, recipe, history)

    dataset = _dataset(recipe, train_dataset, processes=args.world_size)
    if evaluator is None and recipe.eval is not None:
        evaluator = load_evaluator(recipe.eval, batch_size=recipe.batch_size)

    model = build_model(recipe, _documents(dataset))
    if recipe.query_encoder == "idf":
        args.router_mapping = {name: "query" if name == "query" else "document" for name in dataset.column_names}
    if recipe.loss != "contrastive" and args.should_log and (warning := teacher_scale_warning(model, dataset)):
        logger.warning(warning)
    loss = build_loss(recipe, model)
    args.learning_rate_mapping = head_learning_rate(loss, model, recipe.head_learning_rate_factor, recipe.learning_rate)
    if recipe.query_learning_rate:
        args.learning_rate_mapping[QUERY_WEIGHTS] = recipe.query_learning_rate
    guard = CollapseGuard(
        loss, patience=recipe.guard_patience, dense_after=recipe.regularizer_warmup, k=_plain(recipe.k)
    )
    trainer = SparseEncoderTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        loss=loss,
        evaluator=evaluator,
        callbacks=[*_callbacks(recipe, loss), guard, *callbacks],
    )
    if not progress_bar:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
    checkpoint = last_complete_checkpoint(output / CHECKPOINTS)
    if checkpoint is not None:
        logger.info("Going on from %s.", checkpoint)
    _note_data(output / "data.json", dataset, begun=checkpoint is not None, writes=args.should_save)
    rows_a_step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    logger.info("Training on %d rows, %d a step.", len(dataset), rows_a_step)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if guard.message is not None:
        message = f"{guard.message} Checkpoints are in {output / CHECKPOINTS}."
        if args.should_save:
            with written_whole(collapsed) as partial:
                partial.write_text(message, encoding="utf-8")
        raise CollapseError(message)
    if args.should_save:
        _save(model, finished, recipe, trainer.state.log_history)
    trainer.accelerator.wait_for_everyone()
    return TrainResult(model, finished, recipe, trainer.state.log_history)


def collapsed_result(output_dir: str | Path) -> tuple[SparseEncoder | None, list[dict[str, Any]]]:
    """Load what a training that collapsed left, to look at it.

    Args:
        output_dir: The folder of a training that raised `CollapseError`.

    Returns:
        The model of the last checkpoint, or None if none with finite weights was written, and the history.

    Example::

        try:
            train(recipe, "out")
        except CollapseError:
            model, history = collapsed_result("out")
    """
    checkpoint = last_complete_checkpoint(Path(output_dir) / CHECKPOINTS)
    if checkpoint is None:
        return None, []
    return SparseEncoder(str(checkpoint)), TrainerState.load_from_json(
        str(checkpoint / "trainer_state.json")
    ).log_history


def resolve(recipe: Recipe, train_dataset: Dataset | None = None) -> Recipe:
    """Settle what a recipe leaves to the checkpoint, the data and the machine.

    Weights are loaded for ``k: auto`` only, to measure the head on a sample of the training texts.

    Args:
        recipe: A recipe with a model.
        train_dataset: Instead of ``recipe.train``.

    Returns:
        The recipe with plain numbers; resolving it again changes nothing.

    Raises:
        RecipeError: If there is no model, its configuration cannot be read, or no k is known for it.
        DataError: If k is to be measured and the training data cannot be trained on.
    """
    if recipe.model is None:
        raise RecipeError("the recipe names no model: give a checkpoint (--model), a folder or a hub name.")
    try:
        config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code)
    except (OSError, ValueError) as error:
        absent = "" if Path(recipe.model).exists() else "it is no folder, and "
        raise RecipeError(f"the model {recipe.model!r} cannot be loaded: {absent}{error}") from error
    resolved = recipe.resolved(config)
    return _with_measured_k(resolved, train_dataset) if resolved.k == "auto" else resolved


def _with_measured_k(recipe: Recipe, train_dataset: Dataset | None) -> Recipe:
    dataset = _dataset(recipe, train_dataset, processes=1)
    rows = dataset.select(sample(range(len(dataset)), MAX_TEXTS // 2))
    report = measure_head(_transformer(recipe, k=None), [*rows["query"], *rows["positive"]])
    choice = choose_k(report, recipe.strategy)
    logger.info("%s", "\n- ".join([choice.headline, *choice.evidence]))
    return recipe.override(k=choice.k, k_source=choice.reason)


def build_model(recipe: Recipe, documents: Iterable[str] = ()) -> SparseEncoder:
    """Build the untrained model of a resolved recipe: the rescaled masked LM and SPLADE's max pooling.

    Args:
        recipe: A resolved recipe.
        documents: Texts that the IDF of a static query side is counted in, where the recipe has one.

    Returns:
        A model in float32 (bf16 training keeps its weights in float32), compared by dot product.
    """
    transformer = _transformer(recipe, _plain(recipe.k))
    modules: list[Module] = [transformer, SpladePooling()]
    if recipe.query_encoder == "idf":
        tokenizer, width = cast(PreTrainedTokenizerBase, transformer.tokenizer), transformer.get_embedding_dimension()
        queries = idf_query_encoder(tokenizer, documents, width, trained=recipe.query_learning_rate > 0)
        modules = [Router.for_query_document([queries], modules)]
    return SparseEncoder(modules=[*modules], similarity_fn_name="dot")


def _transformer(recipe: Recipe, k: float | None) -> RescaledMLMTransformer:
    trust = {"trust_remote_code": recipe.trust_remote_code}
    return RescaledMLMTransformer(
        str(recipe.model),
        k=k,
        strategy=recipe.strategy,
        reason=recipe.k_source or "given",
        max_seq_length=recipe.max_seq_length,
        model_kwargs={"dtype": "float32", **trust},
        processor_kwargs=dict(trust),
        config_kwargs=dict(trust),
    )


def build_loss(recipe: Recipe, model: SparseEncoder) -> SpladeLoss:
    """Build the loss of a recipe.

    Args:
        recipe: A recipe.
        model: The model to train.

    Returns:
        A ``SpladeLoss`` (a ``CachedSpladeLoss`` with ``mini_batch_size``), both sides regularised.
    """
    ranking: nn.Module
    if recipe.loss == "contrastive":
        several = dist.is_available() and dist.is_initialized()
        ranking = SparseMultipleNegativesRankingLoss(model, scale=recipe.scale, gather_across_devices=several)
    elif recipe.loss == "margin_mse":
        ranking = SparseMarginMSELoss(model)
    else:
        ranking = SparseDistillKLDivLoss(model, temperature=recipe.temperature)
    if recipe.joint_flops_weight:
        ranking = JointFlopsLoss(model, ranking, recipe.joint_flops_weight)
    regularizer = REGULARIZERS[recipe.regularizer]
    settings: dict[str, Any] = {
        "document_regularizer_weight": recipe.document_regularizer_weight,
        "query_regularizer_weight": recipe.query_regularizer_weight,
        "document_regularizer": regularizer(model),
        "query_regularizer": regularizer(model),
    }
    if recipe.mini_batch_size is not None:
        return CachedSpladeLoss(model, ranking, **settings, mini_batch_size=recipe.mini_batch_size)
    return SpladeLoss(model, ranking, **settings)


def last_complete_checkpoint(folder: str | Path) -> Path | None:
    """Find the newest checkpoint that was written to its end.

    The trainer writes ``trainer_state.json`` last, so a checkpoint that was being written when its process was killed
    has none, or one that is cut off.

    Args:
        folder: Holds ``checkpoint-STEP`` folders; it need not exist.

    Returns:
        The checkpoint's folder, or None if there is none.
    """
    matches = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in Path(folder).glob("*"))
    found = {int(match[1]): Path(folder) / match[0] for match in matches if match}
    for step in sorted(found, reverse=True):
        try:
            state = json.loads((found[step] / "trainer_state.json").read_bytes())
        except (OSError, ValueError):
            logger.warning("%s is incomplete and is passed over.", found[step])
            continue
        if state.get("global_step") == step:
            return found[step]
    return None


def _arguments(recipe: Recipe, output: Path, evaluate: bool) -> SparseEncoderTrainingArguments:
    contrastive = recipe.loss == "contrastive"
    return SparseEncoderTrainingArguments(
        output_dir=str(output / CHECKPOINTS),
        num_train_epochs=recipe.epochs or 1,
        max_steps=recipe.max_steps or -1,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        # Two copies of one document in a batch would be each other's negatives.
        batch_sampler=BatchSamplers.NO_DUPLICATES if contrastive else BatchSamplers.BATCH_SAMPLER,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        bf16=recipe.precision == "bf16",
        use_cpu=get_device_name() == "cpu",  # bf16 on a CPU wants to be asked for
        seed=recipe.seed,
        logging_steps=recipe.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_steps=recipe.save_steps,
        save_total_limit=recipe.save_total_limit,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=recipe.save_steps,
        dataloader_pin_memory=torch.cuda.is_available(),
        # A static query side is trained in a forward pass of its own, in which all others would count as unused.
        ddp_find_unused_parameters=False if recipe.query_learning_rate else None,
        report_to="none",
    )


def _claim(output: Path, recipe: Recipe) -> None:
    """Take an empty folder, or the one of a run with this very recipe."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ValueError(
            f"the output folder {output} cannot be written ({error.strerror}): choose another (--output)."
        ) from error
    saved = output / "recipe.yaml"
    if all(file.name.startswith(saved.name) for file in output.iterdir()):
        recipe.save(saved)  # empty, or of a run that never began to train
    elif not saved.exists():
        raise RecipeError(f"{output} is not empty and holds no run: choose another folder (--output).")
    elif differences := Recipe.load(saved).differences(recipe):
        raise RecipeError(
            f"{output} holds a run with another recipe ({', '.join(differences)}): "
            "choose another folder (--output), or delete this one."
        )


def _dataset(recipe: Recipe, given: Dataset | None, processes: int) -> Dataset:
    source = recipe.train if given is None else given
    if source is None:
        raise RecipeError("the recipe names no training data: give a file or a hub name (--train).")
    dataset = load_training_data(
        source,
        columns=recipe.columns,
        num_negatives=recipe.num_negatives,
        teacher_scores=TEACHER_SCORES[recipe.loss],
        teacher_scale=recipe.teacher_scale,
    )
    if len(dataset) < 2:
        raise DataError("the training data hold a single row: training needs at least 2.")
    if processes > 1 and len(dataset) < (needed := processes * recipe.batch_size):
        raise DataError(
            f"the training data hold {len(dataset)} rows, but {processes} processes with a batch_size of "
            f"{recipe.batch_size} need {needed}: lower batch_size, or train on more."
        )
    return dataset


def _documents(dataset: Dataset) -> Iterator[str]:
    """Each document of the training data once."""
    names = [name for name in dataset.column_names if name not in ("query", "label")]
    yield from dict.fromkeys(text for name in names for text in dataset[name])


def _note_data(file: Path, dataset: Dataset, *, begun: bool, writes: bool) -> None:
    """Note what a run trains on, or see that a run which was begun goes on with the same data."""
    now = {"rows": len(dataset), "crc32": dataset_crc32(dataset)}
    if begun and file.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
        if known != now:
            raise DataError(
                f"the training data have changed since the run in {file.parent} began ({known['rows']} rows then, "
                f"{now['rows']} now): bring back the old data, or choose another folder (--output)."
            )
    elif writes:
        with written_whole(file) as partial:
            partial.write_text(json.dumps(now), encoding="utf-8")


def _callbacks(recipe: Recipe, loss: SpladeLoss) -> list[TrainerCallback]:
    """The ramps of all regulariser weights; left to itself the trainer adds the first, but with its own length."""
    schedules: list[TrainerCallback] = [
        SpladeRegularizerWeightSchedulerCallback(loss, "quadratic", recipe.regularizer_warmup)
    ]
    if isinstance(loss.loss, JointFlopsLoss):
        schedules.append(JointFlopsScheduler(loss.loss, recipe.regularizer_warmup))
    if recipe.query_learning_rate:
        schedules.append(NonNegativeQueries())
    return schedules


def _save(model: SparseEncoder, folder: Path, recipe: Recipe, history: list[dict[str, Any]]) -> None:
    with written_whole(folder) as partial:
        model.save_pretrained(str(partial))
        recipe.save(partial / "recipe.yaml")
        write_jsonl(partial / "training_log.jsonl", history)


def _plain(k: Any) -> Any:
    if isinstance(k, dict):
        raise RecipeError("the recipe holds a k for each model_type: resolve it first.")
    return k
