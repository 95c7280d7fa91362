"""Encoding a corpus into shards: any source, any number of processes, and kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from typer.testing import CliRunner

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.cli import app
from st_sparse_rescale.evaluation import IndexFileError, SparseIndex
from st_sparse_rescale.evaluation.csr import as_csr
from st_sparse_rescale.rows import DataError
from st_sparse_rescale.serving import Corpus, Shards, Vocabulary, encode_corpus
from st_sparse_rescale.serving import encode as encode_module
from st_sparse_rescale.serving.corpus import ShardReader
from st_sparse_rescale.training import idf_query_encoder
from tests.engines_here import RAY, RAY_ENVIRONMENT, hindrance
from tests.shard_files import make_shards
from tests.tiny_models import TEXTS

DOCUMENTS = {f"d{number}": f"{text} {text[: number % 37]}".strip() for number, text in enumerate(TEXTS * 3)}


@pytest.fixture(scope="module")
def model(checkpoint):
    return SparseEncoder(str(checkpoint("bert")))


def encode(model, corpus, output, **settings):
    return encode_corpus(model, corpus, output, **{"show_progress_bar": False, "batch_size": 8} | settings)


def contents(shards):
    """Ids and vectors, to be compared bit by bit."""
    return {
        id: (row.indices.tolist(), row.data.tolist())
        for batch in shards
        for id, row in zip(batch.ids, batch.vectors, strict=True)
    }


# Corpora


def written(folder, kind):
    rows = [{"_id": id, "title": "T" if n % 2 else "", "text": text} for n, (id, text) in enumerate(DOCUMENTS.items())]
    file = folder / f"corpus.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
        return folder  # BEIR's layout
    else:
        separator = {"csv": ",", "tsv": "\t"}[kind]
        lines = [separator.join(rows[0]), *(separator.join(f'"{value}"' for value in row.values()) for row in rows)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "tsv"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, kind):
    titled = [("d1", f"T {DOCUMENTS['d1']}"), ("d2", DOCUMENTS["d2"])]
    documents = list(Corpus(written(tmp_path, kind)))
    assert [(document.id, document.text) for document in documents[1:3]] == titled
    assert len(documents) == len(DOCUMENTS)


def test_columns_are_found_by_name_or_told(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"docid": 7, "contents": "text", "url": "http://x"}\n')
    assert list(Corpus(file)) == [("7", "text", None)]
    assert list(Corpus(file, id_column="url", text_column="url", parent_column="docid")) == [
        ("http://x", "http://x", "7")
    ]
    with pytest.raises(DataError, match=r"c\.jsonl: there is no column 'body'"):
        list(Corpus(file, text_column="body"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"_id": "a", "text": "x"}', '{"_id": "b", "text": "y"}', '{"_id": "a", "text": "z"}'],
         r"line 3: the id 'a' stands twice, before at line 1"),
        (['{"name": "a", "text": "x"}'], r"none of the columns \['name', 'text'\] is called _id or id.*--id-column"),
        (['{"_id": "a", "body": "x"}'], r"which holds the text \(--text-column\)"),
        (['{"_id": "a", "text": null}'], r"line 1: 'text' must be text, but is None"),
        (['{"_id": "", "text": "x"}'], r"line 1: '_id' must be an id"),
        (['{"_id": "a", "text": "x"}', "{"], "line 2: not valid JSON"),
        (['{"_id": "a", "text": "x \\ud800"}'], r"line 1: 'text' holds .* at position 2, half a surrogate pair"),
        (['{"_id": "a", "title": "\\ud800", "text": "x"}'], "line 1: 'title' holds .* half a surrogate pair"),
        ([], "there are no documents to encode"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_corpus_is_said_before_any_work(tmp_path, lines, message):
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"c\.jsonl.*{message}"):
        encode("no model is loaded", file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_title_is_not_lost_where_the_first_row_has_none(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"_id": "a", "text": "x"}\n{"_id": "b", "title": "T", "text": "y"}\n{"_id": "c", "text": ""}\n')
    assert [document.text for document in Corpus(file)] == ["x", "T y", ""]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.csv: cannot be read \(No such file"):
        encode("none", tmp_path / "gone.csv", tmp_path / "out")
    with pytest.raises(DataError, match=r"a folder without corpus\.jsonl"):
        encode("none", tmp_path, tmp_path / "out")


def test_a_corpus_is_read_once_going_forward():
    read = []

    class Counted(dict):
        def items(self):
            for item in super().items():
                read.append(item[0])
                yield item

    reader = ShardReader(Corpus(Counted(DOCUMENTS)), shard_size=10)
    assert [document.id for document in reader.read(1)] == [f"d{n}" for n in range(10, 20)]
    assert [document.id for document in reader.read(4)] == [f"d{n}" for n in range(40, 48)]
    assert len(read) == 48
    assert [document.id for document in reader.read(0)] == [f"d{n}" for n in range(10)]  # back: from the start
    assert len(read) == 58


# Encoding


def test_shards_hold_the_models_vectors_in_the_order_of_the_corpus(model, tmp_path):
    shards = encode(model, DOCUMENTS, tmp_path / "out", shard_size=20)
    assert [file.name for file in sorted((tmp_path / "out").glob("*.parquet"))] == [
        "shard-00000.parquet",
        "shard-00001.parquet",
        "shard-00002.parquet",
    ]
    assert list(contents(shards)) == list(DOCUMENTS)
    expected = as_csr(model.encode_document(list(DOCUMENTS.values())))
    for (terms, weights), row in zip(contents(shards).values(), expected, strict=True):
        dense = np.zeros(shards.dimension)
        dense[terms] = weights
        assert np.allclose(dense, row.toarray(), atol=1e-5)
        assert terms == sorted(terms)
        assert min(weights) > 0
    table = pq.read_table(tmp_path / "out" / "shard-00000.parquet")
    assert table.column_names == ["id", "indices", "values"]
    assert len(shards) == len(DOCUMENTS)


def test_shards_are_read_in_small_batches(tmp_path):
    dense = np.random.default_rng(0).random((2_500, 4)).astype(np.float32)
    shards = make_shards(tmp_path / "shards", dense, [f"d{n}" for n in range(2_500)], shard_size=2_100)
    assert [len(batch.ids) for batch in shards] == [1_024, 1_024, 52, 400]
    assert np.array_equal(np.vstack([batch.vectors.toarray() for batch in shards]), dense)


def test_exact_search_over_shards_equals_that_over_embeddings(model, tmp_path):
    shards = encode(model, DOCUMENTS, tmp_path / "out", shard_size=20)
    queries = model.encode_query(list(TEXTS))
    direct = SparseIndex.from_embeddings(model.encode_document(list(DOCUMENTS.values())), list(DOCUMENTS))
    for ours, theirs in zip(shards.index().search(queries, 48), direct.search(queries, 48), strict=True):
        assert dict(ours) == pytest.approx(dict(theirs), rel=1e-5)


def test_the_manifest_says_what_was_encoded_by_what(checkpoint, tmp_path):
    transformer = RescaledMLMTransformer(str(checkpoint("modernbert")), k=16)
    model = SparseEncoder(modules=[transformer, SpladePooling()])
    model.save_pretrained(str(tmp_path / "my-splade"))
    shards = encode(tmp_path / "my-splade", DOCUMENTS, tmp_path / "out", max_active_dims=9, max_length=12)
    settings = shards.settings
    assert settings["model"] == "my-splade"
    assert settings["rescale"] == [{"k": 16.0, "strategy": "weight"}]
    assert (settings["max_active_dims"], settings["max_seq_length"], settings["documents"]) == (9, 12, 48)
    assert settings["similarity"] == "dot"
    assert shards.dimension == len(shards.vocabulary) == model.get_embedding_dimension()
    assert max(len(terms) for terms, _ in contents(shards).values()) <= 9
    assert shards.vocabulary.tokens[: len(model.tokenizer)] == tuple(
        model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    )
    assert set(shards.vocabulary.tokens[len(model.tokenizer) :]) == {None}


def test_what_fills_up_a_static_query_side_is_no_token(checkpoint):
    transformer = RescaledMLMTransformer(str(checkpoint("modernbert")), k=4)
    dimension = transformer.get_embedding_dimension()
    static = idf_query_encoder(transformer.tokenizer, TEXTS, dimension)
    router = Router.for_query_document([static], [transformer, SpladePooling()])
    vocabulary = Vocabulary.of(SparseEncoder(modules=[router]))
    assert len(static.tokenizer.get_vocab()) == len(vocabulary) == dimension
    assert vocabulary.is_token.sum() == len(transformer.tokenizer) < dimension


def test_queries_are_encoded_as_queries_and_cosines_become_dot_products(checkpoint, tmp_path):
    model = SparseEncoder(str(checkpoint("bert")), prompts={"query": "search engine : ", "document": ""})
    model.similarity_fn_name = "cosine"
    queries = dict(zip("abc", TEXTS, strict=False))
    shards = encode(model, queries, tmp_path / "out", task="query")
    ours = next(iter(shards)).vectors
    asked = model.encode_query(list(queries.values()))
    cosines = model.similarity(asked, model.encode_document(list(TEXTS[:3])))
    documents = next(iter(encode(model, queries, tmp_path / "documents"))).vectors
    assert np.allclose((ours @ documents.T).toarray(), cosines, atol=1e-5)


def test_of_a_folder_in_beirs_layout_the_queries_are_encoded_as_queries(model, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "a river"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "what is a river?"}\n')
    assert list(contents(encode(model, tmp_path, tmp_path / "documents"))) == ["d"]
    assert list(contents(encode(model, Corpus(tmp_path), tmp_path / "queries", task="query"))) == ["q"]


def test_parents_travel_with_their_chunks(model, tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text(
        "".join(json.dumps({"_id": f"{n}", "text": t, "doc": f"D{n // 2}"}) + "\n" for n, t in enumerate(TEXTS))
    )
    shards = encode(model, Corpus(file, parent_column="doc"), tmp_path / "out", shard_size=5)
    assert [parent for batch in shards for parent in batch.parents] == [f"D{n // 2}" for n in range(16)]


# Kills and mistakes


def test_a_killed_command_goes_on_without_a_lost_or_doubled_document(checkpoint, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = {f"d{n}": f"{TEXTS[n % 16]} {n}" for n in range(240)}
    corpus.write_text("".join(json.dumps({"_id": id, "text": text}) + "\n" for id, text in texts.items()))
    command = [sys.executable, "-m", "st_sparse_rescale.cli", "encode", str(checkpoint("bert")), str(corpus)]
    options = ["--shard-size", "8", "--batch-size", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([*command, str(killed), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while not (killed / "shard-00002.parquet").exists():
        assert process.poll() is None, process.stdout.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (killed / "shard-00017.parquet.partial").write_bytes(b"half a shard")  # as a kill within a write leaves it
    before = {file.name: file.stat().st_mtime_ns for file in killed.glob("*.parquet")}
    assert 3 <= len(before) < 30, "killed too late"
    with pytest.raises(IndexFileError, match="unfinished"):
        Shards(killed)

    shards = encode(checkpoint("bert"), corpus, killed, shard_size=8, batch_size=2)
    kept = [name for name, written_at in before.items() if (killed / name).stat().st_mtime_ns == written_at]
    assert len(kept) >= len(before) - 1  # at most the one that was not yet in the manifest is encoded again
    assert [id for batch in shards for id in batch.ids] == list(texts)
    uninterrupted = encode(checkpoint("bert"), corpus, whole, shard_size=8, batch_size=2)
    assert contents(shards) == contents(uninterrupted)
    assert not list(killed.glob("*.partial"))


def test_what_is_done_is_not_done_again(model, tmp_path, monkeypatch):
    encoded = []
    encode_document = model.encode_document

    def counting(texts, **settings):
        encoded.extend(texts)
        return encode_document(texts, **settings)

    monkeypatch.setattr(model, "encode_document", counting)
    first = contents(encode(model, DOCUMENTS, tmp_path / "out", shard_size=20))
    encoded.clear()
    assert contents(encode(model, DOCUMENTS, tmp_path / "out", shard_size=20)) == first
    assert len(encoded) <= 1  # the text that shows the size of the vocabulary
    (tmp_path / "out" / "shard-00001.parquet").unlink()
    encoded.clear()
    assert contents(encode(model, DOCUMENTS, tmp_path / "out", shard_size=20)) == first
    assert set(list(DOCUMENTS.values())[20:40]) <= set(encoded)
    assert len(encoded) <= 21


def test_shards_of_another_model_corpus_or_setting_are_refused(model, checkpoint, tmp_path):
    out = tmp_path / "out"
    encode(model, DOCUMENTS, out, shard_size=20)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    other = SparseEncoder(str(checkpoint("bert")))
    with torch.no_grad():
        other[0].model.get_output_embeddings().bias.add_(0.5)
    changed = dict(DOCUMENTS) | {"d30": "another text"}
    for call, message in (
        (lambda: encode(other, DOCUMENTS, out, shard_size=20), "model_crc32 was"),
        (lambda: encode(model, changed, out, shard_size=20), "corpus_crc32 was"),
        (lambda: encode(model, DOCUMENTS, out, shard_size=20, max_active_dims=3), "max_active_dims was None, is 3"),
        (lambda: encode(model, DOCUMENTS, out, shard_size=20, task="query"), "task was 'document', is 'query'"),
        (lambda: encode(model, DOCUMENTS, out, shard_size=10), "shard_size was 20, is 10"),
    ):
        with pytest.raises(IndexFileError, match=rf"holds a folder of encoded texts made otherwise.*{message}"):
            call()
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    with pytest.raises(IndexFileError, match="is not a folder of encoded texts"):
        encode(model, DOCUMENTS, tmp_path / "foreign")
    index = SparseIndex.build(model, DOCUMENTS, tmp_path / "index", show_progress_bar=False)
    assert len(index) == 48
    with pytest.raises(IndexFileError, match="belongs to something else"):
        encode(model, DOCUMENTS, tmp_path / "index")


def test_damage_is_named(model, tmp_path):
    out = tmp_path / "out"
    encode(model, DOCUMENTS, out, shard_size=20)
    shard = out / "shard-00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + b"x" + whole[-8:])
    with pytest.raises(IndexFileError, match=r"shard-00001\.parquet is damaged .*checksum"):
        Shards(out)
    shard.write_bytes(whole[:100])
    with pytest.raises(IndexFileError, match=r"shard-00001\.parquet is damaged"):
        list(Shards(out, verify=False))
    shard.unlink()
    with pytest.raises(IndexFileError, match=r"shard-00001\.parquet is missing"):
        Shards(out)
    tokens = json.loads((out / "vocabulary.json").read_text())
    for wrong in (tokens[::-1], tokens[:-1]):
        (out / "vocabulary.json").write_text(json.dumps(wrong))
        with pytest.raises(IndexFileError, match=r"vocabulary\.json is not the one that the texts were encoded with"):
            Shards(out)
    (out / "vocabulary.json").write_text(json.dumps(dict.fromkeys(tokens)))
    with pytest.raises(IndexFileError, match="no list of tokens"):
        Shards(out)
    assert len(encode(model, DOCUMENTS, out, shard_size=20)) == 48  # which is how all of it is mended


def test_a_corpus_that_changes_while_it_is_encoded_is_an_error(model, tmp_path):
    class Changing(dict):
        readings = 0

        def items(self):
            self.readings += 1
            return ((id, f"{text} {self.readings}") for id, text in super().items())

    with pytest.raises(IndexFileError, match=r"is not what it was when its documents were counted: .* shard 0"):
        encode(model, Changing(DOCUMENTS), tmp_path / "out")


def test_numbers_that_make_no_sense_are_refused(model, tmp_path):
    for setting in ("processes", "batch_size", "shard_size"):
        with pytest.raises(ValueError, match=f"{setting} must be a positive whole number, got 0"):
            encode(model, DOCUMENTS, tmp_path / "out", **{setting: 0})
    with pytest.raises(ValueError, match="leave devices out"):
        encode(model, DOCUMENTS, tmp_path / "out", ray=True, devices=["cpu"])


def test_a_device_that_is_not_there_is_refused_before_any_work(tmp_path):
    for device in ("gpu", "cuda:99"):
        with pytest.raises(ValueError, match=f"There is no device '{device}' here"):
            encode("no model is loaded", DOCUMENTS, tmp_path / "out", devices=["cpu", device])


def test_a_weight_that_is_nan_is_placed(checkpoint, tmp_path):
    model = SparseEncoder(str(checkpoint("bert")))
    with torch.no_grad():
        model[0].model.get_output_embeddings().bias[5] = float("nan")
    with pytest.raises(ValueError, match=r"Of corpus, the documents 'd0' to 'd19' cannot be encoded: .* found nan"):
        encode(model, DOCUMENTS, tmp_path / "out", shard_size=20)


# More processes


@pytest.mark.slow
def test_two_processes_give_the_same_bits_as_one(model, tmp_path):
    one = encode(model, DOCUMENTS, tmp_path / "one", shard_size=30)
    two = encode(model, DOCUMENTS, tmp_path / "two", shard_size=30, devices=["cpu"], processes=2)
    assert contents(two) == contents(one)


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_from_which_the_call_goes_on(model, tmp_path, monkeypatch):
    write = encode_module.write_file

    def and_kill(*arguments):
        for process in multiprocessing.active_children():
            process.kill()
        return write(*arguments)

    monkeypatch.setattr(encode_module, "write_file", and_kill)
    with pytest.raises(ChildProcessError, match=r"exit code -9.*repeat the command to go on"):
        encode(model, DOCUMENTS, tmp_path / "out", shard_size=20, devices=["cpu"], processes=2)
    monkeypatch.undo()
    first = (tmp_path / "out" / "shard-00000.parquet").stat().st_mtime_ns
    assert list(contents(encode(model, DOCUMENTS, tmp_path / "out", shard_size=20))) == list(DOCUMENTS)
    assert (tmp_path / "out" / "shard-00000.parquet").stat().st_mtime_ns == first


@pytest.mark.slow
def test_a_process_ends_with_the_killed_command_that_started_it(tmp_path):
    command = """
import multiprocessing, time

def work():
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    from st_sparse_rescale.serving.pool import _EndsWithParent
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.ends_with_parent = _EndsWithParent()
    process.start()
    process.join()
"""
    (tmp_path / "command.py").write_text(command)
    process = subprocess.Popen([sys.executable, tmp_path / "command.py"], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    process.kill()
    process.communicate(timeout=60)  # comes back once nobody can write to the output any more


@pytest.fixture(scope="module")
def ray_environment():
    """The environment for commands that encode on Ray."""
    pytest.importorskip("ray", reason='needs Ray: pip install "st-sparse-rescale[ray]"')
    if (reason := hindrance(RAY)) is not None:
        pytest.skip(f"needs Ray, but {reason}")
    return {**os.environ, **RAY_ENVIRONMENT}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("ray")  # one finds out for both whether it runs here
def test_two_workers_of_ray_give_the_same_bits_as_one_process(checkpoint, tmp_path, ray_environment):
    folder, output = written(tmp_path, "jsonl"), tmp_path / "out"
    one = contents(encode(checkpoint("bert"), folder, output, shard_size=9))
    first, *others = sorted(output.glob("*.parquet"))
    untouched = first.stat().st_mtime_ns
    for file in others:
        file.unlink()
    # In a process of its own: Ray leaves threads behind, also after its shutdown.
    command = [sys.executable, "-m", "st_sparse_rescale.cli", "encode", str(checkpoint("bert")), str(folder)]
    options = ["--shard-size", "9", "--batch-size", "8", "--ray", "--processes", "2"]
    subprocess.run([*command, str(output), *options], env=ray_environment, check=True, timeout=240)
    assert contents(Shards(output)) == one
    assert first.stat().st_mtime_ns == untouched  # it goes on with what is there
    assert not list(output.glob("workshop-*"))


MISHAPS = """
import os, sys
from pathlib import Path
from sentence_transformers import SparseEncoder
from st_sparse_rescale.serving import Corpus, encode, ray_encode
import ray

class Mishap(encode.EncodingJob):
    kind = None

    def encoder(self, model, folder, **settings):
        whole = super().encoder(model, folder, **settings)

        def encode(number):
            if number == 1 and self.kind == "death":
                os._exit(1)
            if number == 1:
                raise ValueError("NaN in shard 1")
            return whole(number)

        return encode

ray.init(log_to_driver=False)
model, folder = SparseEncoder(sys.argv[1]), Path(sys.argv[2])
corpus = Corpus({str(number): "a river" for number in range(4)})
ray_encode.RETRIES = 0
for kind in ("error", "death"):
    job = Mishap(corpus, corpus.survey(2), 2, "document", 2, None)
    object.__setattr__(job, "kind", kind)
    try:
        print([record.file for record in ray_encode.ray_records(model, job, folder, [0, 1], 1, lambda count: None)])
    except (ValueError, ChildProcessError) as error:
        print(kind, type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("ray")  # one finds out for both whether it runs here
def test_on_ray_an_error_is_that_of_the_shard_and_a_dead_actor_is_one(checkpoint, tmp_path, ray_environment):
    (tmp_path / "mishaps.py").write_text(MISHAPS)
    command = [sys.executable, tmp_path / "mishaps.py", checkpoint("bert"), tmp_path]
    run = subprocess.run(command, env=ray_environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    error, death = [line for line in run.stdout.splitlines() if line.startswith(("error", "death"))]  # Ray prints, too
    assert error == "error ValueError NaN in shard 1"
    assert death.startswith("death ChildProcessError A process of Ray that encoded died, with one shard 1 times")
    assert not list(tmp_path.glob("workshop-*"))


def test_without_ray_the_install_line_is_given(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "st-sparse-rescale\[ray\]"'):
        encode(model, DOCUMENTS, tmp_path / "out", ray=True)


# The command


def test_the_command_encodes_and_says_where(checkpoint, tmp_path):
    file = tmp_path / "c.csv"
    file.write_text("key,body\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS)))
    arguments = ["encode", str(checkpoint("bert")), str(file), str(tmp_path / "out")]
    columns = ["--id-column", "key", "--text-column", "body", "--devices", "cpu"]
    result = CliRunner().invoke(app, arguments + columns, env=dict(os.environ))
    assert result.exit_code == 0, result.output
    assert "16 texts" in result.output
    assert list(contents(Shards(tmp_path / "out"))) == [str(n) for n in range(16)]
    mistake = CliRunner().invoke(app, arguments)
    assert mistake.exit_code == 2
    assert "--id-column" in mistake.stderr
