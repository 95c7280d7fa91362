"""From a checkpoint to production: encode a corpus, prune it, export it to search engines."""

from __future__ import annotations

from st_sparse_rescale.serving.chunks import combine_chunks
from st_sparse_rescale.serving.corpus import Corpus, Document
from st_sparse_rescale.serving.encode import encode_corpus
from st_sparse_rescale.serving.export import Export, export, load_target
from st_sparse_rescale.serving.overlap import overlap
from st_sparse_rescale.serving.pruning import prune
from st_sparse_rescale.serving.shards import Batch, Shards
from st_sparse_rescale.serving.targets import TARGETS, Target
from st_sparse_rescale.serving.vocabulary import Vocabulary

__all__ = [
    "TARGETS",
    "Batch",
    "Corpus",
    "Document",
    "Export",
    "Shards",
    "Target",
    "Vocabulary",
    "combine_chunks",
    "encode_corpus",
    "export",
    "load_target",
    "overlap",
    "prune",
]
