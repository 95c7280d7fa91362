"""Encode a corpus into sharded Parquet files: in bounded memory, on any number of processes, resumed after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from tqdm.auto import tqdm

from st_sparse_rescale.evaluation.checksum import weights_crc32
from st_sparse_rescale.evaluation.encoding import Task, encode_texts, encoding_settings
from st_sparse_rescale.evaluation.index_files import IndexFileError, ShardRecord, begin_or_resume, write_manifest
from st_sparse_rescale.evaluation.retrieval import similarity_scale
from st_sparse_rescale.evaluation.systems import Systems
from st_sparse_rescale.rescaling import recorded_rescale
from st_sparse_rescale.serving.corpus import Corpus, ShardReader, Survey, crc32_of
from st_sparse_rescale.serving.pool import encoding_pool
from st_sparse_rescale.serving.shards import ENCODED, VOCABULARY, Batch, Shards, file_name, write_file
from st_sparse_rescale.serving.vocabulary import Vocabulary

# Documents a shard: what is held in memory, and what a kill can lose.
SHARD_SIZE = 16_384


def encode_corpus(
    model: str | Path | SparseEncoder,
    corpus: str | Path | Mapping[str, str] | Corpus,
    output: str | Path,
    *,
    task: Task = "document",
    devices: Sequence[str] = (),
    processes: int | None = None,
    ray: bool = False,
    batch_size: int = 32,
    shard_size: int = SHARD_SIZE,
    max_active_dims: int | None = None,
    max_length: int | None = None,
    show_progress_bar: bool = True,
) -> Shards:
    """Encode a corpus, or go on with a killed encoding: the same call again resumes it.

    Each shard is written whole or not at all and holds the same documents whatever the number of processes, so that no
    document is lost or doubled. Vectors are such that their dot product is the model's similarity.

    Args:
        model: A checkpoint or a loaded model.
        corpus: A file, a folder in BEIR's layout, a name of the hub, texts by id, or a :class:`Corpus`.
        output: Folder for the shards; made if absent.
        task: Encode as ``document`` or as ``query``.
        devices: Such as ``cuda:0``, ``cuda:1``; by default the model's own.
        processes: Processes a device, by the pool of sentence-transformers; by default one. With ``ray``, workers in
            all; by default one a GPU of the cluster, or one a CPU where it has none.
        ray: Encode by Ray Data on this machine, or on the cluster that ``RAY_ADDRESS`` names. Every node must see
            corpus and output by the same paths.
        batch_size: Texts encoded at once.
        shard_size: Documents a shard: what a process holds, and what a kill can lose.
        max_active_dims: Terms kept a text; ``None`` takes the model's own setting.
        max_length: Tokens a text, instead of the model's own limit.
        show_progress_bar: Show the documents done.

    Returns:
        The encoded texts.

    Raises:
        DataError: The corpus cannot be read, a document is malformed, or an id stands twice.
        IndexFileError: The folder holds something else, or texts of another corpus, model or setting.
        ValueError: A number is not positive, the model's similarity is neither dot product nor cosine, or a weight is
            NaN, or a device is not there.
        ChildProcessError: One of several processes died; the call can be repeated.
        ImportError: Ray is asked for and absent.

    Example:
        ::

            shards = encode_corpus("my-splade/model", "scifact", "encoded", devices=["cuda:0", "cuda:1"])
            print(len(shards), shards.dimension)
    """
    for name, number in (("processes", processes), ("batch_size", batch_size), ("shard_size", shard_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be a positive whole number, got {number}.")
    if ray and devices:
        raise ValueError("Ray places the work itself, a GPU a worker where the cluster has any: leave devices out.")
    for device in devices:
        _require_device(device)
    corpus = (corpus if isinstance(corpus, Corpus) else Corpus(corpus)).of(task)
    folder = Path(output)
    survey = corpus.survey(shard_size)
    ((name, loaded),) = Systems([model], max_length=max_length).sparse.items()
    vocabulary = Vocabulary.of(loaded)
    job = EncodingJob(corpus, survey, shard_size, task, batch_size, max_active_dims)

    manifest = begin_or_resume(folder, {**job.settings(loaded), "vocabulary_crc32": vocabulary.crc32()}, ENCODED)
    manifest.dimension = len(vocabulary)
    manifest.built_with.setdefault("model", name)
    vocabulary.write(folder / VOCABULARY)
    with tqdm(total=survey.documents, desc="Encoding", unit=" texts", disable=not show_progress_bar) as progress:
        done = {record.file: record for record in manifest.shards if (folder / record.file).exists()}
        progress.update(sum(record.documents for record in done.values()))
        names = [file_name(number) for number in range(len(survey.shards))]
        missing = [number for number, file in enumerate(names) if file not in done]
        if not missing:
            records: Iterator[ShardRecord] = iter(())
        elif ray:
            from st_sparse_rescale.serving.ray_encode import ray_records

            records = ray_records(loaded, job, folder, missing, processes, progress.update)
        else:
            targets = [device for device in devices or [str(loaded.device)] for _ in range(processes or 1)]
            records = _records(loaded, job, folder, missing, targets, progress.update)
        for record in records:
            done[record.file] = record
            manifest.shards = [done[file] for file in names if file in done]
            write_manifest(folder, manifest, ENCODED)
    manifest.complete = True
    write_manifest(folder, manifest, ENCODED)
    return Shards(folder)


def _require_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # how torch says that it was built without CUDA
        raise ValueError(f"There is no device {device!r} here ({error}): choose another, such as cpu.") from error


@dataclass(frozen=True)
class EncodingJob:
    """What there is to encode, and how; any process can do a part of it."""

    corpus: Corpus
    survey: Survey
    shard_size: int
    task: Task
    batch_size: int
    max_active_dims: int | None

    def settings(self, model: SparseEncoder) -> dict[str, Any]:
        """What the shards depend on, as JSON holds it."""
        transformers = [module for module in model.modules() if isinstance(module, Transformer)]
        rescales = [rescale for module in transformers if (rescale := recorded_rescale(module.model.config))]
        return {
            "rescale": [{"k": rescale.k, "strategy": rescale.strategy} for rescale in rescales],
            "weights_crc32": weights_crc32(model),
            "task": self.task,
            "similarity": model.similarity_fn_name,
            **encoding_settings(model, self.max_active_dims),
            "shard_size": self.shard_size,
            "documents": self.survey.documents,
            "corpus_crc32": self.survey.crc32,
        }

    def encoder(
        self,
        model: SparseEncoder,
        folder: Path,
        *,
        pool: Any = None,
        on_encoded: Callable[[int], Any] | None = None,
    ) -> Callable[[int], ShardRecord]:
        """Return the function that encodes the shard of a number into a file of the folder."""
        reader, scale = ShardReader(self.corpus, self.shard_size), similarity_scale(model)

        def encode(number: int) -> ShardRecord:
            documents = reader.read(number)
            checksum = crc32_of(documents)
            if checksum != self.survey.shards[number]:
                raise IndexFileError(
                    f"{self.corpus.name} is not what it was when its documents were counted: they differ in shard "
                    f"{number}. Do not write to it while it is encoded, and let every node see the same."
                )
            try:
                vectors = encode_texts(
                    model,
                    [document.text for document in documents],
                    task=self.task,
                    batch_size=self.batch_size,
                    max_active_dims=self.max_active_dims,
                    pool=pool,
                    on_encoded=on_encoded,
                )
            except ValueError as error:
                ends = f"{documents[0].id!r} to {documents[-1].id!r}"
                raise ValueError(f"Of {self.corpus.name}, the documents {ends} cannot be encoded: {error}") from error
            parents = [document.parent for document in documents if document.parent is not None]
            batch = Batch([document.id for document in documents], scale(vectors), parents or None)
            return write_file(folder / file_name(number), batch, checksum)

        return encode


def _records(
    model: SparseEncoder,
    job: EncodingJob,
    folder: Path,
    numbers: Sequence[int],
    targets: list[str],
    on_encoded: Callable[[int], Any],
) -> Iterator[ShardRecord]:
    """Encode shards in this process on a single target, else by sentence-transformers' pool, a process a target."""
    if len(targets) == 1:
        model.to(targets[0])
        yield from map(job.encoder(model, folder, on_encoded=on_encoded), numbers)
        return
    with encoding_pool(model, targets) as pool:
        yield from map(job.encoder(model, folder, pool=pool, on_encoded=on_encoded), numbers)
