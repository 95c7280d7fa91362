"""Encode the shards of a corpus by Ray Data, on one machine or on a cluster."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers import SparseEncoder

from st_sparse_rescale.evaluation.index_files import ShardRecord

if TYPE_CHECKING:
    from st_sparse_rescale.serving.encode import EncodingJob

# Further trials of a shard whose actor dies; Ray itself would go on for ever.
RETRIES = 3


def ray_records(
    model: SparseEncoder,
    job: EncodingJob,
    folder: Path,
    numbers: Sequence[int],
    workers: int | None,
    on_encoded: Callable[[int], Any],
) -> Iterator[ShardRecord]:
    """Encode shards on a pool of Ray actors.

    The model is sent to each actor once; besides it only numbers and records travel: actors read the corpus and write
    the shards themselves.

    Args:
        model: The encoder.
        job: What there is to encode.
        folder: Folder for the files.
        numbers: Numbers of the shards, ascending.
        workers: Actors; by default one a GPU, or one a CPU where there is no GPU.
        on_encoded: Told how many further texts are done.

    Yields:
        The record of each shard, as it is done.

    Raises:
        ImportError: Ray is absent.
        ValueError: A shard cannot be encoded or written.
        ChildProcessError: Actors died with one shard, however often it was tried.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError('Encoding on Ray needs Ray: pip install "st-sparse-rescale[ray]"') from error
    began = not ray.is_initialized()
    if began:
        ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = False  # ours is shown
    try:
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        size = min(workers or gpus or int(resources["CPU"]), len(numbers))
        # A block a shard: that is the unit of the work.
        shards = ray.data.from_items([{"shard": number} for number in numbers], override_num_blocks=len(numbers))
        with _workshop(folder) as workshop:
            records = shards.map_batches(
                _ShardActor,
                fn_constructor_kwargs={"model": ray.put(model.cpu()), "job": job, "folder": workshop.resolve()},
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=size),
                num_cpus=1,
                num_gpus=1 if gpus else 0,
                ray_remote_args_fn=lambda: {"max_task_retries": RETRIES},
            )
            for row in records.iter_rows():
                if "error" in row:
                    raise ValueError(row["error"])
                record = ShardRecord(**row)
                (workshop / record.file).replace(folder / record.file)
                on_encoded(record.documents)
                yield record
    except ray.exceptions.RayActorError as error:
        raise ChildProcessError(
            f"A process of Ray that encoded died, with one shard {1 + RETRIES} times ({error}). What is finished is "
            "kept: repeat the command to go on. If memory ran out, take fewer processes or a smaller batch_size."
        ) from error
    finally:
        if began:
            ray.shutdown()


class _ShardActor:
    """Encodes the shard whose number it is given."""

    def __init__(self, model: Any, job: EncodingJob, folder: Path) -> None:
        import ray

        loaded: SparseEncoder = ray.get(model)
        self._encode = job.encoder(loaded.to("cuda" if torch.cuda.is_available() else "cpu"), folder)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (number,) = batch["shard"].tolist()
        try:
            row = asdict(self._encode(number))
        except (ValueError, OSError) as error:  # raised here, it would be buried in errors of Ray
            row = {"error": str(error)}
        return {name: np.array([value]) for name, value in row.items()}


@contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A folder for the files of the actors.

    A shard is moved out once its actor has reported it. An actor that outlives a killed command finds its folder gone,
    instead of writing over the shards of the next.
    """
    for left in folder.glob("workshop-*"):
        shutil.rmtree(left, ignore_errors=True)
    workshop = folder / f"workshop-{uuid.uuid4().hex}"
    workshop.mkdir()
    try:
        yield workshop
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
