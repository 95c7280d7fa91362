"""Evaluation of sparse retrieval."""
