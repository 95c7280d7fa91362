"""The engines that encoded documents can be exported to, each in a file of its own."""

from __future__ import annotations

from st_sparse_rescale.serving.targets.anserini import AnseriniTarget
from st_sparse_rescale.serving.targets.elasticsearch import ElasticsearchRankFeaturesTarget, ElasticsearchTarget
from st_sparse_rescale.serving.targets.milvus import MilvusTarget
from st_sparse_rescale.serving.targets.opensearch import OpenSearchTarget
from st_sparse_rescale.serving.targets.pgvector import PgvectorTarget
from st_sparse_rescale.serving.targets.qdrant import QdrantTarget
from st_sparse_rescale.serving.targets.seismic import SeismicTarget
from st_sparse_rescale.serving.targets.target import Target
from st_sparse_rescale.serving.targets.vespa import VespaTarget

TARGETS: dict[str, type[Target]] = {
    "anserini": AnseriniTarget,
    "elasticsearch": ElasticsearchTarget,
    "elasticsearch-rank-features": ElasticsearchRankFeaturesTarget,
    "milvus": MilvusTarget,
    "opensearch": OpenSearchTarget,
    "pgvector": PgvectorTarget,
    "qdrant": QdrantTarget,
    "seismic": SeismicTarget,
    "vespa": VespaTarget,
}
"""Targets by the names that ``export --to`` takes. Another engine is another subclass of :class:`Target` in here."""

__all__ = ["TARGETS", "Target"]
