"""The offline default: a corpus made of installed docstrings, two mini backbones and a demonstration of the package."""

from __future__ import annotations

from st_sparse_rescale.demo.backbones import backbone_path
from st_sparse_rescale.demo.corpus import DocstringCorpus, DocstringPair, docstring_corpus, write_corpus

__all__ = ["DocstringCorpus", "DocstringPair", "backbone_path", "docstring_corpus", "write_corpus"]
