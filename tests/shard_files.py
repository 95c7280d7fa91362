"""Shards made by hand, of any vectors and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from st_sparse_rescale.evaluation.csr import Embeddings, as_csr
from st_sparse_rescale.evaluation.index_files import Manifest, write_manifest
from st_sparse_rescale.serving import Batch, Shards, Vocabulary
from st_sparse_rescale.serving.shards import ENCODED, VOCABULARY, file_name, write_file


def make_shards(
    folder: Path,
    vectors: Embeddings,
    ids: Sequence[str],
    tokens: Sequence[str | None] | None = None,
    *,
    parents: Sequence[str] | None = None,
    shard_size: int = 1_000,
) -> Shards:
    """Write vectors as if a model had given them; by default the tokens are ``t0``, ``t1``..."""
    folder.mkdir()
    matrix = as_csr(vectors)
    records = []
    for number, start in enumerate(range(0, len(ids), shard_size)):
        part = slice(start, start + shard_size)
        batch = Batch(list(ids[part]), matrix[part], None if parents is None else list(parents[part]))
        records.append(write_file(folder / file_name(number), batch, 0))
    dimension = matrix.shape[1]
    vocabulary = Vocabulary(tuple(tokens or [f"t{i}" for i in range(dimension)]))
    vocabulary.write(folder / VOCABULARY)
    settings = {"model": "by-hand", "weights_crc32": 0, "vocabulary_crc32": vocabulary.crc32()}
    write_manifest(folder, Manifest(dimension, complete=True, built_with=settings, shards=records), ENCODED)
    return Shards(folder)
