"""Encode documents into the shards of an index on disk: in bounded memory, and to be resumed after a kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy import sparse
from tqdm.auto import tqdm

from st_sparse_rescale.evaluation.checksum import model_crc32, texts_crc32
from st_sparse_rescale.evaluation.csr import as_csr
from st_sparse_rescale.evaluation.index_files import (
    Ids,
    IndexFileError,
    Manifest,
    Shard,
    read_manifest,
    write_manifest,
    write_shard,
)
from st_sparse_rescale.evaluation.top_k import invert

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

# Texts handed to the encoder at a time: enough to sort by length, few enough to show progress.
ENCODE_CHUNK = 1_024


def build_shards(
    model: SparseEncoder,
    documents: Mapping[str, str] | Iterable[tuple[str, str]],
    folder: Path,
    *,
    batch_size: int,
    shard_size: int,
    max_active_dims: int | None,
    show_progress_bar: bool,
    **encode_kwargs: Any,
) -> Manifest:
    """Write the shards that are not there yet; the arguments are those of ``SparseIndex.build``.

    Returns:
        The manifest of all shards, not marked as complete.

    Raises:
        IndexFileError: The folder holds something else, or an index of other texts, settings or another model.
        ValueError: There are no documents.
    """
    settings = {
        "model_crc32": model_crc32(model),
        "prompts": dict(model.prompts),
        "max_seq_length": model.max_seq_length,
        "max_active_dims": model.max_active_dims if max_active_dims is None else max_active_dims,
        "shard_size": shard_size,
        **{name: encode_kwargs.get(name) for name in ("prompt", "prompt_name")},
    }
    manifest = _begin_or_resume(folder, settings)
    pairs = iter(documents.items() if isinstance(documents, Mapping) else documents)
    total = len(documents) if isinstance(documents, Sized) else None
    done = 0
    with tqdm(total=total, desc="Indexing", unit=" documents", disable=not show_progress_bar) as progress:
        while batch := list(islice(pairs, shard_size)):
            checksum = texts_crc32(text for pair in batch for text in pair)
            if done < len(manifest.shards):
                if manifest.shards[done].texts_crc32 != checksum:
                    raise IndexFileError(
                        f"{folder} was built from other documents: they differ between {batch[0][0]!r} and "
                        f"{batch[-1][0]!r}. Delete the folder or choose another."
                    )
                progress.update(len(batch))
            else:
                parts = []
                for start in range(0, len(batch), ENCODE_CHUNK):
                    texts = [text for _, text in batch[start : start + ENCODE_CHUNK]]
                    parts.append(
                        as_csr(
                            model.encode_document(
                                texts,
                                batch_size=batch_size,
                                max_active_dims=max_active_dims,
                                show_progress_bar=False,
                                save_to_cpu=True,
                                **encode_kwargs,
                            )
                        )
                    )
                    progress.update(len(texts))
                lists = invert(sparse.vstack(parts, format="csr"))
                manifest.dimension = lists.shape[0]
                record = write_shard(folder, done, Shard(lists, Ids.of(id for id, _ in batch)), checksum)
                manifest.shards.append(record)
                write_manifest(folder, manifest)
            done += 1
    if done < len(manifest.shards):
        raise IndexFileError(f"{folder} was built from more documents than these: delete the folder or choose another.")
    if not done:
        raise ValueError("There are no documents to index.")
    return manifest


def _begin_or_resume(folder: Path, settings: dict[str, Any]) -> Manifest:
    """Take up a build where it was left, or begin one."""
    folder.mkdir(parents=True, exist_ok=True)
    if all(file.suffix == ".partial" for file in folder.iterdir()):  # new, or killed before anything was written
        write_manifest(folder, Manifest(built_with=settings))
    manifest = read_manifest(folder)
    differing = [
        f"{name} was {manifest.built_with.get(name)!r}, is {value!r}"
        for name, value in settings.items()
        if manifest.built_with.get(name) != value
    ]
    if differing:
        raise IndexFileError(
            f"{folder} holds an index built otherwise ({'; '.join(differing)}): delete the folder or choose another."
        )
    return manifest
