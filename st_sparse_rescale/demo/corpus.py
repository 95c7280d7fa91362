"""A retrieval corpus that every environment already holds: the docstrings of the installed packages.

The summary of a docstring is the query, the rest of it is the relevant document. Nothing is imported and nothing is
downloaded: the sources of the distributions that ``st-sparse-rescale`` depends on are parsed with :mod:`ast`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from st_sparse_rescale.jsonl import write_jsonl
from st_sparse_rescale.whole import written_whole

SPLITS = ("train", "dev", "test")
# Shares of the modules, in per cent of the hash space; the remainder is for training.
TEST_PERCENT, DEV_PERCENT = 15, 5
# Two documents of which more than half of the eight-word shingles agree are copies of each other: library authors
# paste docstrings between modules, so a split by module alone would leak.
SHINGLE_WORDS, MAX_OVERLAP = 8, 0.5


@dataclass(frozen=True)
class DocstringPair:
    """One docstring as a (query, document) pair."""

    id: str
    """Where it stands: ``module:qualified.name``."""
    query: str
    """The summary: the first paragraph, in one line."""
    document: str
    """The rest of the docstring, in one line."""

    @property
    def module(self) -> str:
        """The dotted module that holds the docstring."""
        return self.id.partition(":")[0]


@dataclass(frozen=True)
class DocstringCorpus:
    """The pairs of the three splits, disjoint by module and free of copies across splits."""

    train: list[DocstringPair] = field(default_factory=list)
    dev: list[DocstringPair] = field(default_factory=list)
    test: list[DocstringPair] = field(default_factory=list)


def dependency_closure(distribution: str) -> list[str]:
    """List the installed distributions that a distribution needs, itself excluded.

    Only what the base install pulls in counts, so that the corpus does not change with what else happens to be
    installed. Requirements behind extras are followed where a requirement asks for the extra.

    Args:
        distribution: Name of an installed distribution.

    Returns:
        Canonical names in alphabetical order.

    Raises:
        importlib.metadata.PackageNotFoundError: ``distribution`` is not installed.
    """
    root = canonicalize_name(distribution)
    metadata.distribution(root)
    seen: set[tuple[str, frozenset[str]]] = set()
    queue: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a requirement for another platform
        seen.add((name, extras))
        for line in requires:
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in (*extras, "")]
            if requirement.marker is None or any(requirement.marker.evaluate(e) for e in environments):
                queue.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return sorted({name for name, _ in seen} - {root})


def python_sources(distribution: str) -> Iterator[tuple[str, Path]]:
    """Yield (dotted module, file) of every Python source that an installed distribution brought, in order."""
    for file in sorted(metadata.files(distribution) or [], key=str):
        if file.suffix != ".py" or ".." in file.parts:
            continue
        parts = list(file.with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            yield ".".join(parts), Path(str(file.locate()))


def docstrings(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield (id, cleaned docstring) of a module and of every class and function in it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and files for another Python version
        return
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                stack.append((f"{prefix}.{child.name}".lstrip("."), child))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{module}:{prefix}", inspect.cleandoc(text)


def as_pair(id: str, docstring: str) -> DocstringPair | None:
    """Split a docstring into its summary and its body, or return None where it has no use as a pair.

    A summary of fewer than four words asks nothing; a body of fewer than ten words answers nothing.
    """
    summary, _, body = docstring.partition("\n\n")
    query, document = " ".join(summary.split()), " ".join(body.split())
    if not 4 <= len(query.split()) <= 64 or len(document.split()) < 10:
        return None
    return DocstringPair(id, query, document)


def split_of(module: str) -> str:
    """Assign a module to a split by a hash of its name, the same on every machine."""
    bucket = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big") % 100
    if bucket < TEST_PERCENT:
        return "test"
    return "dev" if bucket < TEST_PERCENT + DEV_PERCENT else "train"


def all_docstrings(
    distribution: str = "st-sparse-rescale", progress: Callable[[float], None] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (id, cleaned docstring) over the dependencies of a distribution, in a fixed order.

    Args:
        distribution: The distribution whose dependencies are read.
        progress: Called with the share of the sources that are read, from 0 to 1.
    """
    sources = [source for name in dependency_closure(distribution) for source in python_sources(name)]
    with ProcessPoolExecutor() as pool:  # parsing some hundred megabytes is what takes the time
        for done, found in enumerate(pool.map(_docstrings_of, sources, chunksize=64), start=1):
            yield from found
            if progress is not None:
                progress(done / len(sources))


def _docstrings_of(source: tuple[str, Path]) -> list[tuple[str, str]]:
    module, path = source
    return list(docstrings(module, path.read_text(encoding="utf-8", errors="replace"))) if path.is_file() else []


def docstring_corpus(
    distribution: str = "st-sparse-rescale", progress: Callable[[float], None] | None = None
) -> DocstringCorpus:
    """Build the corpus from the installed dependencies of a distribution.

    Args:
        distribution: The distribution whose dependencies are read; deterministic for given versions of these.
        progress: Called with the share of the sources that are read, from 0 to 1.

    Returns:
        The pairs by split. No query or document stands twice, no module is in two splits, and no document shares
        more than half of its eight-word shingles with an earlier split (train, then dev, then test).

    Raises:
        ValueError: Nothing was found, as when the sources were stripped from the environment.

    Example:
        ::

            from st_sparse_rescale.demo import docstring_corpus

            corpus = docstring_corpus()
            print(len(corpus.train), corpus.test[0].query)
    """
    pairs = [pair for id, text in all_docstrings(distribution, progress) if (pair := as_pair(id, text)) is not None]
    if not pairs:
        raise ValueError(
            f"No docstrings were found in the dependencies of {distribution!r}: the environment seems to hold no "
            "Python sources. Install the package with pip, without stripping the sources."
        )
    by_split: dict[str, list[DocstringPair]] = {split: [] for split in SPLITS}
    for pair in _unique(pairs):
        by_split[split_of(pair.module)].append(pair)
    seen: set[int] = set()
    for split in SPLITS:
        shingled = [(pair, _shingles(pair.document)) for pair in by_split[split]]
        kept = [(pair, shingles) for pair, shingles in shingled if len(shingles & seen) <= MAX_OVERLAP * len(shingles)]
        by_split[split] = [pair for pair, _ in kept]
        seen.update(*(shingles for _, shingles in kept))
    return DocstringCorpus(**by_split)


def write_corpus(corpus: DocstringCorpus, folder: str | Path, num_queries: int = 500, seed: int = 0) -> Path:
    """Write a corpus as files that the training and evaluation commands read.

    ``train.jsonl`` holds the training pairs; ``dev`` and ``test`` are collections in BEIR's layout, each with all of
    its documents and at most ``num_queries`` of its queries. The folder appears whole or not at all.

    Args:
        corpus: The pairs by split.
        folder: The folder to make; an existing one is replaced.
        num_queries: Queries a collection, drawn at random.
        seed: Seed of that draw.

    Returns:
        The folder.
    """
    folder = Path(folder)
    with written_whole(folder) as partial:
        partial.mkdir(parents=True)
        write_jsonl(partial / "train.jsonl", ({"query": p.query, "positive": p.document} for p in corpus.train))
        for split, pairs in (("dev", corpus.dev), ("test", corpus.test)):
            asked = random.Random(seed).sample(pairs, min(num_queries, len(pairs)))
            _write_collection(partial / split, pairs, asked)
    return folder


def _write_collection(folder: Path, pairs: list[DocstringPair], asked: list[DocstringPair]) -> None:
    (folder / "qrels").mkdir(parents=True)
    write_jsonl(folder / "corpus.jsonl", ({"_id": p.id, "title": "", "text": p.document} for p in pairs))
    write_jsonl(folder / "queries.jsonl", ({"_id": f"query:{p.id}", "text": p.query} for p in asked))
    judgements = ["query-id\tcorpus-id\tscore", *(f"query:{p.id}\t{p.id}\t1" for p in asked)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(judgements) + "\n", encoding="utf-8")


def _unique(pairs: Iterable[DocstringPair]) -> Iterator[DocstringPair]:
    """Drop every pair whose query or document, up to case and punctuation, stood before."""
    seen: set[str] = set()
    for pair in pairs:
        keys = {"q " + _normal(pair.query), "d " + _normal(pair.document)}
        if not keys & seen:
            seen |= keys
            yield pair


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _shingles(text: str) -> set[int]:
    words = _normal(text).split()
    count = max(1, len(words) - SHINGLE_WORDS + 1)
    # hash() of a tuple of str is salted per process; only membership within one call matters here.
    return {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(count)}
