"""What was measured of a head."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from st_sparse_rescale.calibration.logits import Logits
from st_sparse_rescale.calibration.start import Start
from st_sparse_rescale.rescaling import HeadRescale, Strategy


@dataclass(frozen=True)
class HeadReport:
    """What `measure_head` found, of plain values only.

    Attributes:
        name: The checkpoint.
        trained: Whether it is a SPLADE model, whose vectors are described as they are, rather than a backbone.
        rescaled: The rescale that its config records, if any.
        architecture: Class of the model.
        decoder: Dotted name of the head's matrix.
        bias: Dotted name of its bias.
        norm: Dotted name of the norm before it.
        tied: Whether the matrix is that of the input embeddings, too.
        parameters: Of the model, shared ones once.
        head_parameters: Of matrix and bias.
        vocab_size: V.
        hidden_size: D, the width of what enters the decoder.
        texts: How many texts were measured.
        tokens: How many tokens they have.
        row_norm_mean: Mean length of a row of the matrix.
        row_norm_std: Its standard deviation.
        frobenius: Length of the whole matrix.
        weight_rms: Root of the mean squared entry, |w|: Adam's steps of the size of the learning rate lr change the
            matrix by lr / |w|, relatively; divided by k, k times as much.
        norm_gain: Mean size of the weights of the norm.
        bias_range: Smallest and largest bias.
        state_norm: Mean length of what enters the decoder.
        logits: The raw logits.
        starts: The vectors as they are first; for a backbone that was not rescaled, of each k of `KS` and each strategy
            that the head allows.
    """

    name: str
    trained: bool
    rescaled: HeadRescale | None
    architecture: str
    decoder: str
    bias: str | None
    norm: str | None
    tied: bool
    parameters: int
    head_parameters: int
    vocab_size: int
    hidden_size: int
    texts: int
    tokens: int
    row_norm_mean: float
    row_norm_std: float
    frobenius: float
    weight_rms: float
    norm_gain: float | None
    bias_range: tuple[float, float] | None
    state_norm: float
    logits: Logits
    starts: tuple[Start, ...]

    @property
    def as_is(self) -> Start:
        """The vectors as they are."""
        return self.starts[0]

    @property
    def active_share(self) -> float:
        """The share of the vocabulary that is active in a text, as it is."""
        return self.as_is.active_dims / self.vocab_size

    def at(self, strategy: Strategy) -> dict[float, Start]:
        """The starts of a strategy, by k.

        Args:
            strategy: "weight" or "norm".

        Returns:
            In ascending order of k.
        """
        return {start.k: start for start in self.starts if start.strategy == strategy}

    def to_json(self) -> str:
        """Write as JSON; `from_json` reads it."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> HeadReport:
        """Read what `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            An equal report.
        """
        values: dict[str, Any] = json.loads(text)
        logits = values["logits"]
        values["logits"] = Logits(**logits | {"edges": tuple(logits["edges"]), "histogram": tuple(logits["histogram"])})
        values["starts"] = tuple(Start(**start) for start in values["starts"])
        values["rescaled"] = values["rescaled"] and HeadRescale(**values["rescaled"])
        values["bias_range"] = values["bias_range"] and tuple(values["bias_range"])
        return cls(**values)
