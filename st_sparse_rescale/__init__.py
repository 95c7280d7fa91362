"""Rescale the MLM head of any masked language model and train it as a SPLADE retriever with sentence-transformers."""

__version__ = "0.1.0"
