"""Encode documents into the shards of an index on disk: in bounded memory, and to be resumed after a kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from st_sparse_rescale.evaluation.checksum import texts_crc32
from st_sparse_rescale.evaluation.encoding import encode_texts, encoding_settings
from st_sparse_rescale.evaluation.index_files import (
    Ids,
    IndexFileError,
    Manifest,
    Shard,
    begin_or_resume,
    write_manifest,
    write_shard,
)
from st_sparse_rescale.evaluation.top_k import invert

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder


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
    settings = {**encoding_settings(model, max_active_dims, **encode_kwargs), "shard_size": shard_size}
    manifest = begin_or_resume(folder, settings)
    pairs = iter(documents.items() if isinstance(documents, Mapping) else documents)
    total = len(documents) if isinstance(documents, Sized) else None
    done = 0
    with tqdm(total=total, desc="Indexing", unit=" documents", disable=not show_progress_bar) as progress:
        while batch := list(islice(pairs, shard_size)):
            ids, texts = Ids.of(id for id, _ in batch), [text for _, text in batch]
            checksum = texts_crc32(text for pair in batch for text in pair)
            if done < len(manifest.shards):
                if manifest.shards[done].texts_crc32 != checksum:
                    raise IndexFileError(
                        f"{folder} was built from other documents: they differ between {batch[0][0]!r} and "
                        f"{batch[-1][0]!r}. Delete the folder or choose another."
                    )
                progress.update(len(batch))
            else:
                vectors = encode_texts(
                    model,
                    texts,
                    batch_size=batch_size,
                    max_active_dims=max_active_dims,
                    on_encoded=progress.update,
                    **encode_kwargs,
                )
                manifest.dimension = vectors.shape[1]
                record = write_shard(folder, done, Shard(invert(vectors), ids), checksum)
                manifest.shards.append(record)
                write_manifest(folder, manifest)
            done += 1
    if done < len(manifest.shards):
        raise IndexFileError(f"{folder} was built from more documents than these: delete the folder or choose another.")
    if not done:
        raise ValueError("There are no documents to index.")
    return manifest
