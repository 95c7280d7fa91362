"""What each dimension of a sparse vector stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

from st_sparse_rescale.evaluation.checksum import texts_crc32
from st_sparse_rescale.whole import written_whole

_NUMBER = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Vocabulary:
    """The token of each dimension.

    A model's vocabulary may be larger than its tokenizer's: ModernBERT's has 83 ids that are no tokens. They stand for
    nothing that a query could ask for by name, and are never exported.

    Args:
        tokens: (dimensions,): tokens, ``None`` where the id is none.
    """

    tokens: tuple[str | None, ...]

    @classmethod
    def of(cls, model: SparseEncoder) -> Vocabulary:
        """Read the vocabulary of a model.

        The dimensions of a sparse auto-encoder are no tokens; they are called by their numbers.

        Args:
            model: The model.

        Example:
            ::

                Vocabulary.of(SparseEncoder("naver/splade-v3")).tokens[2054]  # "what"
        """
        dimension = model.encode_document(["a"], show_progress_bar=False).shape[1]
        if any(isinstance(module, SparseAutoEncoder) for module in model.modules()):
            return cls(tuple(map(str, range(dimension))))
        # Of a router, the side that has a model: the tokenizer of a static side may be filled up with what is no token.
        sides = (module.tokenizer for module in model.modules() if isinstance(module, Transformer))
        tokenizer: Any = next(sides, model.tokenizer)
        tokens: list[str | None] = [None] * dimension
        for token, id in tokenizer.get_vocab().items():
            if id < dimension:
                tokens[id] = token
        return cls(tuple(tokens))

    @classmethod
    def read(cls, file: str | Path) -> Vocabulary:
        """Read what :meth:`write` wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: It holds something else.
        """
        tokens = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(tokens, list):
            raise ValueError("it holds no list of tokens")
        return cls(tuple(tokens))

    def write(self, file: str | Path) -> None:
        """Write a JSON list, in one step."""
        with written_whole(file) as partial:
            partial.write_text(json.dumps(self.tokens, ensure_ascii=False), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_token(self) -> np.ndarray:
        """(dimensions,) of bool."""
        return np.array([token is not None for token in self.tokens])

    def crc32(self) -> int:
        """Checksum, by which the vocabulary is known again."""
        return texts_crc32(map(str, self.tokens))

    def names(self, usable: Callable[[str], bool]) -> list[str]:
        """Give each dimension a name that an engine takes.

        Args:
            usable: Whether the engine takes a token as a name; one that it does not take is called ``[id]``, and so is
                a token that looks like such a name.

        Returns:
            (dimensions,): the names, all different, as tokens are.

        Example:
            ::

                Vocabulary(("the", "U.S.")).names(lambda token: "." not in token)  # ["the", "[1]"]
        """
        return [
            token if token is not None and usable(token) and not _NUMBER.fullmatch(token) else f"[{id}]"
            for id, token in enumerate(self.tokens)
        ]
