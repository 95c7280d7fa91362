"""mteb's own evaluation, with exact sparse search in place of a score matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from st_sparse_rescale.evaluation.collection import Collection
from st_sparse_rescale.evaluation.csr import Embeddings, as_csr, csr_chunks
from st_sparse_rescale.evaluation.index_files import Ids
from st_sparse_rescale.evaluation.retrieval import similarity_scale
from st_sparse_rescale.evaluation.top_k import CHUNK_SIZE, IdOrder, TopK, invert

try:
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models.search_wrappers import SearchEncoderWrapper
    from mteb.models.sentence_transformer_wrapper import SparseEncoderWrapper
except ImportError as error:
    raise ImportError('mteb is absent: pip install "st-sparse-rescale[eval]"') from error


class SparseSearchModel(SparseEncoderWrapper):
    """A sparse model for ``mteb.evaluate`` that searches exactly and sparsely.

    It is mteb's own wrapper for sparse models, whose choice of prompts and whose encoding it keeps, with mteb's search
    protocol on top: retrieval tasks encode the corpus chunk by chunk into inverted lists and search those. All other
    tasks, reranking among them, run as with mteb's wrapper. Scores are equal to those of mteb's wrapper, which
    ``mteb.evaluate`` takes for a bare ``SparseEncoder``.

    Args:
        model: The model, or its name or path; its similarity is dot product or cosine.
        *args: As for mteb's ``SparseEncoderWrapper``.
        corpus_chunk_size: Documents encoded at a time.
        **kwargs: As for mteb's ``SparseEncoderWrapper``.

    Example:
        ::

            import mteb
            from sentence_transformers import SparseEncoder
            from st_sparse_rescale.evaluation.mteb_search import SparseSearchModel

            model = SparseSearchModel(SparseEncoder("my-splade"))
            results = mteb.evaluate(model, mteb.get_tasks(tasks=["SciFact", "NFCorpus"]))
    """

    def __init__(self, model: Any, *args: Any, corpus_chunk_size: int = 50_000, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.corpus_chunk_size = corpus_chunk_size
        self._search: SearchEncoderWrapper | None = None

    def index(self, corpus: Dataset, *, task_metadata: TaskMetadata, **kwargs: Any) -> None:
        """Encode and index a corpus: see mteb's ``SearchProtocol``."""
        if "Reranking" in task_metadata.type:  # scores given candidates, and searches nothing
            self._search = SearchEncoderWrapper(self)
            self._search.index(corpus, task_metadata=task_metadata, **kwargs)
            return
        self._search = SearchEncoderWrapper(self, index_backend=_InvertedLists(self))
        for start in range(0, len(corpus), self.corpus_chunk_size):
            chunk = corpus.select(range(start, min(start + self.corpus_chunk_size, len(corpus))))
            self._search.index(chunk, task_metadata=task_metadata, **kwargs)
        # All that the search still needs of the corpus; a column of the data set would be read hit by hit.
        self._search.task_corpus = {"id": corpus["id"][:]}

    def search(self, queries: Dataset, **kwargs: Any) -> dict[str, dict[str, float]]:
        """Search the indexed corpus: see mteb's ``SearchProtocol``."""
        if self._search is None:
            raise ValueError("Index a corpus before searching it.")
        return self._search.search(queries, **kwargs)


class _InvertedLists:
    """mteb's protocol of a search index."""

    def __init__(self, wrapper: SparseEncoderWrapper) -> None:
        self.scale = similarity_scale(wrapper.model)
        self.clear()

    def add_documents(self, embeddings: Embeddings, idxs: Sequence[str]) -> None:
        self.lists += [invert(self.scale(chunk)) for _, chunk in csr_chunks(embeddings, CHUNK_SIZE)]
        self.ids.extend(idxs[:])  # a column of a data set gives all of its rows far sooner than one by one

    def search(self, embeddings: Embeddings, top_k: int, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        best = TopK(self.scale(as_csr(embeddings)), IdOrder(Ids.of(self.ids)), top_k)
        start = 0
        for lists in self.lists:
            best.add_inverted(lists, start)
            start += lists.shape[1]
        scores, positions = best.result(include_zeros=True)
        counts = (positions >= 0).sum(axis=1)
        rows = list(zip(scores, positions, counts, strict=True))
        return [row[:n].tolist() for row, _, n in rows], [row[:n].tolist() for _, row, n in rows]

    def clear(self) -> None:
        self.lists: list[Any] = []
        self.ids: list[str] = []


def mteb_task(collection: Collection) -> AbsTaskRetrieval:
    """Make an mteb task of a collection, so that mteb can be run on local data.

    Args:
        collection: Such as ``load_beir_folder`` reads.

    Returns:
        A retrieval task with one split, ``test``.

    Example:
        ::

            mteb.evaluate(SparseSearchModel(model), mteb_task(load_beir_folder("scifact")))
    """
    metadata = TaskMetadata(
        name=collection.name,
        description=f"The collection {collection.name}, from local data.",
        type="Retrieval",
        category="t2t",
        modalities=["text"],
        dataset={"path": collection.name, "revision": "local"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )

    class CollectionTask(AbsTaskRetrieval):
        ignore_identical_ids = collection.exclude_self

        def load_data(self, *args: Any, **kwargs: Any) -> None:
            corpus, queries = (
                Dataset.from_dict({"id": list(texts), "text": list(texts.values())})
                for texts in (collection.corpus, collection.queries)
            )
            qrels = {query: dict(grades) for query, grades in collection.qrels.items()}
            split = RetrievalSplitData(corpus=corpus, queries=queries, relevant_docs=qrels, top_ranked=None)
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    CollectionTask.metadata = metadata
    return CollectionTask()
