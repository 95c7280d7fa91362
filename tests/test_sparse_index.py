"""Exact search over sparse embeddings: against brute force, on disk, and in bounded memory."""

import json

import numpy as np
import psutil
import pytest
import torch
from scipy import sparse
from sentence_transformers import SparseEncoder
from sentence_transformers.util import select_max_active_dims

from st_sparse_rescale.evaluation.checksum import model_crc32
from st_sparse_rescale.evaluation.csr import as_csr, csr_chunks, limit_active_dims, unit_rows
from st_sparse_rescale.evaluation.index_files import IndexFileError, read_manifest
from st_sparse_rescale.evaluation.sparse_index import SparseIndex
from st_sparse_rescale.evaluation.top_k import IdOrder, TopK
from tests.tiny_models import TEXTS

DOCUMENTS = {f"d{number}": text for number, text in enumerate(TEXTS)}


@pytest.fixture(scope="module")
def model(checkpoint):
    return SparseEncoder(str(checkpoint("bert")))


def tied(rng, rows, columns, density=0.25):
    """Weights that are multiples of a quarter: float32 sums are exact, and equal scores are everywhere."""
    return (rng.integers(1, 4, (rows, columns)) * (rng.random((rows, columns)) < density) / 4).astype(np.float32)


def brute_force(queries, documents, ids, top_k, zeros=False):
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    ranked = [sorted((-s, id) for s, id in zip(row, ids, strict=True) if s > 0 or zeros)[:top_k] for row in scores]
    return [[(id, -s) for s, id in row] for row in ranked]


@pytest.mark.parametrize("seed", range(20))
def test_search_equals_brute_force_whatever_the_chunks(seed):
    rng = np.random.default_rng(seed)
    count, vocabulary = int(rng.integers(1, 150)), int(rng.integers(2, 40))
    documents, queries = tied(rng, count, vocabulary), tied(rng, 9, vocabulary)
    queries[0] = 0  # an empty query finds nothing
    ids = [f"{i}" for i in rng.permutation(count)]  # "10" before "9": the order of texts, not of numbers
    top_k = int(rng.integers(1, count + 5))
    expected = brute_force(queries, documents, ids, top_k)
    padded = brute_force(queries, documents, ids, top_k, zeros=True)
    for shard_size in (1, 7, 64, 1000):
        index = SparseIndex.from_embeddings(documents, ids, shard_size=shard_size)
        for threads in (1, 2):
            assert index.search(queries, top_k, n_threads=threads) == expected
        assert index.search(queries, top_k, include_zeros=True) == padded
    one_by_one = [index.search(queries[i : i + 1], top_k)[0] for i in range(9)]
    assert one_by_one == expected


def test_one_score_for_all_documents_is_ranked_by_id():
    ids = [f"{i:03d}" for i in np.random.default_rng(0).permutation(500)]
    index = SparseIndex.from_embeddings(np.ones((500, 3), dtype=np.float32), ids, shard_size=99)
    assert [id for id, _ in index.search(np.ones((1, 3)), 20)[0]] == sorted(ids)[:20]


def test_real_weights_agree_with_float64():
    rng = np.random.default_rng(1)
    documents = sparse.random(2000, 300, density=0.05, random_state=1, dtype=np.float32, format="csr")
    queries = sparse.random(20, 300, density=0.05, random_state=2, dtype=np.float32, format="csr")
    ids = [f"{i}" for i in rng.permutation(2000)]
    exact = (queries.astype(np.float64) @ documents.astype(np.float64).T).toarray()
    position = {id: i for i, id in enumerate(ids)}
    for row, scores in zip(SparseIndex.from_embeddings(documents, ids).search(queries, 50), exact, strict=True):
        assert np.allclose([s for _, s in row], np.sort(scores)[::-1][:50], rtol=1e-6)
        assert np.allclose([scores[position[id]] for id, _ in row], [s for _, s in row], rtol=1e-6)


def test_every_form_of_embeddings_gives_the_same_index():
    rng = np.random.default_rng(2)
    dense = tied(rng, 30, 20)
    ids, queries = [f"d{i}" for i in range(30)], tied(rng, 4, 20)
    coo = torch.tensor(dense).to_sparse_coo()
    uncoalesced = torch.sparse_coo_tensor(
        torch.cat([coo.indices(), coo.indices()], dim=1), torch.cat([coo.values() / 2, coo.values() / 2]), coo.shape
    )
    explicit_zero = sparse.csr_matrix(dense)
    explicit_zero.data[0] = 0
    forms = [dense, torch.tensor(dense), coo, uncoalesced, torch.tensor(dense).to_sparse_csr(), coo.to(torch.bfloat16)]
    forms += [kind(dense) for kind in (sparse.csr_matrix, sparse.csc_matrix, sparse.coo_matrix, sparse.csr_array)]
    expected = SparseIndex.from_embeddings(dense, ids).search(queries, 10)
    for form in forms:
        assert SparseIndex.from_embeddings(form, ids, shard_size=7).search(queries, 10) == expected
    before = explicit_zero.copy()
    assert as_csr(explicit_zero).nnz == explicit_zero.nnz - 1
    assert (before.data == explicit_zero.data).all()  # the caller's matrix is untouched


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_ranked_are_refused(bad):
    with pytest.raises(ValueError, match=r"not negative, found .* in row 1"):
        SparseIndex.from_embeddings(np.array([[1.0, 0.0], [1.0, bad]]), ["a", "b"])


def test_bad_arguments_are_refused_by_name():
    index = SparseIndex.from_embeddings(np.eye(3), ["a", "b", "c"])
    with pytest.raises(ValueError, match="3 embeddings but 2 ids"):
        SparseIndex.from_embeddings(np.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match="'a' stands at positions 0 and 2"):
        SparseIndex.from_embeddings(np.eye(3), ["a", "b", "a"])
    with pytest.raises(TypeError, match=r"must be texts, got 1 \(int\)"):
        SparseIndex.from_embeddings(np.eye(3), ["a", 1, "c"])
    with pytest.raises(ValueError, match="two dimensions"):
        SparseIndex.from_embeddings(torch.ones(3), ["a"])
    with pytest.raises(TypeError, match="got list"):
        SparseIndex.from_embeddings([[1.0]], ["a"])
    with pytest.raises(ValueError, match="queries have 2 dimensions, the index 3"):
        index.search(np.eye(2))
    for top_k in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="top_k must be a positive integer"):
            index.search(np.eye(3), top_k)
    with pytest.raises(ValueError, match="3 queries but 1 query ids"):
        index.search(np.eye(3), 1, exclude_self=True, query_ids=["a"])
    with pytest.raises(ValueError, match="there are 2 queries and 3 documents: give query_ids"):
        index.search(np.ones((2, 3)), 1, exclude_self=True)
    with pytest.raises(ValueError, match="the new documents 2"):
        index.add(np.eye(2), ["d", "e"])
    with pytest.raises(ValueError, match="must be unique"):
        index.add(np.eye(3), ["d", "e", "a"])
    assert len(index) == 3  # as it was


def test_documents_added_later_are_found_like_those_from_the_start():
    rng = np.random.default_rng(3)
    documents, queries, ids = tied(rng, 40, 15), tied(rng, 5, 15), [f"{i}" for i in range(40)]
    grown = SparseIndex()
    for start in (0, 10, 11):
        end = {0: 10, 10: 11, 11: 40}[start]
        grown.add(documents[start:end], ids[start:end])
    assert grown.search(queries, 12) == SparseIndex.from_embeddings(documents, ids).search(queries, 12)
    assert list(grown.ids) == ids


def test_self_is_excluded_and_replaced_by_the_next():
    documents = np.array([[1.0, 0.0], [0.9, 0.0], [0.5, 0.5]], dtype=np.float32)
    index = SparseIndex.from_embeddings(documents, ["a", "b", "c"])
    assert [[id for id, _ in row] for row in index.search(documents, 2)] == [["a", "b"], ["a", "b"], ["a", "c"]]
    assert [[id for id, _ in row] for row in index.search(documents, 2, exclude_self=True)] == [
        ["b", "c"],
        ["a", "c"],
        ["a", "b"],
    ]
    named = index.search(documents[:2], 2, exclude_self=True, query_ids=["b", "elsewhere"])
    assert [[id for id, _ in row] for row in named] == [["a", "c"], ["a", "b"]]


def test_no_more_than_top_k_a_query_is_kept():
    rng = np.random.default_rng(4)
    documents, queries = sparse.csr_matrix(tied(rng, 5000, 30)), as_csr(tied(rng, 11, 30))
    best = TopK(queries, IdOrder([f"{i}" for i in range(5000)]), top_k=3)
    for start, chunk in csr_chunks(documents, 500):
        best.add(chunk, start)
        held = sum(array.nbytes for array in vars(best).values() if isinstance(array, np.ndarray))
        assert held <= 11 * 3 * 8 + 11 * 8  # 8 bytes a hit, 8 bytes a query


def test_limit_of_active_dimensions_equals_sentence_transformers():
    dense = torch.rand(20, 50) * (torch.rand(20, 50) < 0.4)
    for limit in (1, 5, 49, 50, 80):
        expected = select_max_active_dims(dense, limit)
        assert torch.equal(torch.tensor(limit_active_dims(as_csr(dense), limit).toarray()), expected)
    assert limit_active_dims(as_csr(dense), None).nnz == (dense != 0).sum()
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        limit_active_dims(as_csr(dense), 0)


def test_unit_rows_have_length_one_and_empty_rows_stay_empty():
    rows = unit_rows(as_csr(np.array([[3.0, 4.0], [0.0, 0.0]]))).toarray()
    assert rows.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]


# On disk


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(5)
    documents, ids = tied(rng, 50, 20), [f"dökument-{i}" for i in range(50)]
    index = SparseIndex.from_embeddings(documents, ids, shard_size=20)
    index.save(tmp_path / "index")
    return tmp_path / "index", index, tied(rng, 6, 20)


def test_a_saved_index_is_mapped_back_and_grows(saved, tmp_path):
    folder, index, queries = saved
    loaded = SparseIndex.load(folder)
    assert loaded.search(queries, 9) == index.search(queries, 9)
    assert list(loaded.ids) == list(index.ids)
    loaded.add(np.full((1, 20), 9.0), ["best"])
    assert [row[0][0] for row in loaded.search(queries, 1)] == ["best"] * 6
    loaded.save(tmp_path / "grown")
    assert len(SparseIndex.load(tmp_path / "grown")) == 51
    with pytest.raises(FileExistsError, match="not empty"):
        loaded.save(folder)
    with pytest.raises(ValueError, match="empty index"):
        SparseIndex().save(tmp_path / "none")


def test_damage_and_foreign_files_are_named(saved, tmp_path):
    folder, _, _ = saved
    shard = folder / "shard-00001.safetensors"
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for content, message in ((bytes(flipped), "checksum differs"), (whole[:-40], "checksum differs")):
        shard.write_bytes(content)
        with pytest.raises(IndexFileError, match=rf"shard-00001.* is damaged .*{message}"):
            SparseIndex.load(folder)
    with pytest.raises(IndexFileError, match="damaged"):  # cut short: found even without reading everything
        SparseIndex.load(folder, verify=False)
    shard.unlink()
    with pytest.raises(IndexFileError, match=r"shard-00001.* is missing"):
        SparseIndex.load(folder)
    shard.write_bytes(whole)
    manifest = json.loads((folder / "manifest.json").read_text())
    for change, message in (
        ({"format": "other"}, "belongs to something else"),
        ({"version": 99}, "has version 99"),
        ({"shards": [{}]}, "is damaged"),
        ({"complete": False}, "unfinished"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(IndexFileError, match=message):
            SparseIndex.load(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(IndexFileError, match="cannot be read"):
        SparseIndex.load(folder)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(IndexFileError, match="is not a sparse index"):
        SparseIndex.load(tmp_path / "elsewhere")


def test_a_built_index_equals_one_of_embeddings_in_the_order_of_the_input(model, tmp_path):
    # Encoding sorts texts by length; ids and vectors must still belong together.
    built = SparseIndex.build(model, DOCUMENTS, tmp_path / "index", shard_size=5, show_progress_bar=False)
    direct = SparseIndex.from_embeddings(model.encode_document(list(DOCUMENTS.values())), list(DOCUMENTS))
    queries = model.encode_query(list(TEXTS))
    for ours, theirs in zip(built.search(queries, 16), direct.search(queries, 16), strict=True):
        assert dict(ours) == pytest.approx(dict(theirs), rel=1e-5)
    assert list(built.ids) == list(DOCUMENTS)
    limited = SparseIndex.build(
        model, iter(DOCUMENTS.items()), tmp_path / "limited", max_active_dims=3, show_progress_bar=False
    )
    assert sum(shard.lists.nnz for shard in limited._shards) == 3 * len(DOCUMENTS)


def test_a_killed_build_goes_on_without_encoding_again(model, tmp_path, monkeypatch):
    class Kill(Exception):
        pass

    encoded = []
    encode = model.encode_document

    def dying(texts, **kwargs):
        if len(encoded) == 2:
            raise Kill
        encoded.append(texts)
        return encode(texts, **kwargs)

    build = {"folder": tmp_path / "index", "shard_size": 5, "show_progress_bar": False}
    monkeypatch.setattr(model, "encode_document", dying)
    with pytest.raises(Kill):
        SparseIndex.build(model, DOCUMENTS, **build)
    with pytest.raises(IndexFileError, match="unfinished"):
        SparseIndex.load(tmp_path / "index")
    assert len(read_manifest(tmp_path / "index").shards) == 2

    seen = []
    monkeypatch.setattr(model, "encode_document", lambda texts, **kw: seen.extend(texts) or encode(texts, **kw))
    resumed = SparseIndex.build(model, DOCUMENTS, **build)
    assert seen == list(TEXTS[10:])
    seen.clear()
    SparseIndex.build(model, DOCUMENTS, **build)
    assert seen == []  # a finished build is left alone
    monkeypatch.undo()
    whole = SparseIndex.build(model, DOCUMENTS, tmp_path / "whole", shard_size=5, show_progress_bar=False)
    queries = model.encode_query(list(TEXTS[:4]))
    assert resumed.search(queries, 16) == whole.search(queries, 16)


def test_a_build_is_only_continued_with_the_same_model_texts_and_settings(model, checkpoint, tmp_path):
    build = {"folder": tmp_path / "index", "shard_size": 5, "show_progress_bar": False}
    SparseIndex.build(model, DOCUMENTS, **build)
    with pytest.raises(IndexFileError, match="built from other documents: they differ between 'd5' and 'd9'"):
        SparseIndex.build(model, DOCUMENTS | {"d7": "changed"}, **build)
    with pytest.raises(IndexFileError, match="built from more documents"):
        SparseIndex.build(model, dict(list(DOCUMENTS.items())[:5]), **build)
    with pytest.raises(IndexFileError, match="max_active_dims was None, is 4"):
        SparseIndex.build(model, DOCUMENTS, max_active_dims=4, **build)
    other = SparseEncoder(str(checkpoint("electra")))
    with pytest.raises(IndexFileError, match="model_crc32 was"):
        SparseIndex.build(other, DOCUMENTS, **build)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    with pytest.raises(IndexFileError, match="not a sparse index"):
        SparseIndex.build(model, DOCUMENTS, tmp_path / "foreign")
    with pytest.raises(ValueError, match="no documents"):
        SparseIndex.build(model, {}, tmp_path / "none", show_progress_bar=False)
    with pytest.raises(ValueError, match="must be unique"):
        SparseIndex.build(model, [("a", "x"), ("a", "y")], tmp_path / "twice", show_progress_bar=False)


def test_a_build_refuses_what_it_could_not_find_again(model, tmp_path):
    for documents, message in (
        ({1: "x"}, "ids must be texts, got 1"),
        ({"d": None}, "Texts must be strings, got None"),
    ):
        with pytest.raises(TypeError, match=message):
            SparseIndex.build(model, documents, tmp_path / "index", show_progress_bar=False)
    SparseIndex.build(model, DOCUMENTS, tmp_path / "index", shard_size=5, show_progress_bar=False)
    shard = tmp_path / "index" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(IndexFileError, match=r"shard-00000.* is damaged"):
        SparseIndex.build(model, DOCUMENTS, tmp_path / "index", shard_size=5, show_progress_bar=False)


def test_the_settings_of_a_model_tell_it_from_another_of_the_same_weights(checkpoint):
    def changed(**settings):
        model = SparseEncoder(str(checkpoint("bert")))
        for name, value in settings.items():
            setattr(model[1] if hasattr(model[1], name) else model, name, value)
        return model_crc32(model)

    first = SparseEncoder(str(checkpoint("bert")))
    before = model_crc32(first)
    first.encode_document(["what the pooling learns from its first input does not count"])
    others = [
        changed(prompts={"query": "q: "}),
        changed(max_seq_length=7),
        changed(similarity_fn_name="cosine"),
        changed(max_active_dims=5),
        changed(activation_function="log1p_relu"),
    ]
    assert before == model_crc32(first) == changed()
    assert len({before, *others}) == 6


def test_search_of_a_mapped_index_takes_no_memory_for_the_documents(tmp_path):
    """40 MB of lists, of which a query of one term touches 1/500."""
    rng = np.random.default_rng(6)
    rows, terms = 50_000, 100
    columns = np.sort(rng.integers(0, 500, (rows, terms)) + 500 * np.arange(terms), axis=1).astype(np.int32)
    matrix = sparse.csr_matrix(
        (np.ones(rows * terms, dtype=np.float32), columns.ravel(), np.arange(rows + 1) * terms),
        shape=(rows, 500 * terms),
    )
    SparseIndex.from_embeddings(matrix, [f"{i}" for i in range(rows)]).save(tmp_path / "index")
    index = SparseIndex.load(tmp_path / "index", verify=False)
    list(index.ids)
    query = sparse.csr_matrix(([1.0], ([0], [7])), shape=(1, 500 * terms))
    before = psutil.Process().memory_info().rss
    assert len(index.search(query, 10)[0]) == 10
    assert psutil.Process().memory_info().rss - before < 15e6
