"""The rule: from what was measured of a head to a verdict and a k."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from st_sparse_rescale.calibration.head_report import HeadReport
from st_sparse_rescale.calibration.logits import BERT_MEAN, BERT_NEGATIVE, BERT_STD
from st_sparse_rescale.calibration.start import Start
from st_sparse_rescale.rescaling import Strategy

# The constants of the rule, all of them.
MAX_RMS_WEIGHT = 0.14
"""Root mean square of the weights, over texts and vocabulary, that k brings a start down to."""
HEALTHY_RMS_WEIGHT = 0.5
"""What a head may have that is left as it is: BERT, which is best left so, has about 0.3."""
MIN_STATE_COSINE = 0.95
"""Cosine of the hidden states to those at k = 1 that dividing the shared input embeddings must leave."""
MIN_SCORE_STD = 0.1
"""Standard deviation of a text's scores below which a start is too small: the softmax is flat, whatever the text."""
MAX_EMPTY = 0.5
"""Share of texts without any active dimension above which a model is dead."""
MAX_COSINE = 0.99
"""Cosine of two texts above which a SPLADE model is dead: it says the same of every text."""
MAX_ACTIVE = 0.25
"""Share of the vocabulary active in a text above which a SPLADE model is dense."""
ALL_ACTIVE = 0.95
"""Share of the vocabulary active in a text from which on it is called all of it."""

Verdict = Literal["healthy", "scale problem", "too small", "dense", "dead"]


@dataclass(frozen=True)
class KChoice:
    """What to divide a head by, and why.

    Attributes:
        k: The divisor, relative to the pretrained head.
        verdict: What the head, or the SPLADE model, is.
        reason: Why, in one sentence: it goes into the model's config and card.
        evidence: The measurements behind it, a sentence each.
        strategy: How k is to be applied.
    """

    k: float
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...]
    strategy: Strategy = "weight"

    @property
    def headline(self) -> str:
        """Verdict, reason and advice in one line."""
        if self.verdict == "scale problem" and self.k != 1:
            return f"{self.verdict}: {self.reason}; use k={self.k:g}"
        if self.verdict in ("dense", "dead"):
            return f"{self.verdict}: {self.reason}"
        return f"{self.verdict}: leave k={self.k:g}; {self.reason}"


def choose_k(report: HeadReport, strategy: Strategy = "weight") -> KChoice:
    """Choose k from what was measured of a head. Nothing is loaded or run.

    **k is the smallest power of two that brings the weights of untrained texts down to a root mean square of
    `MAX_RMS_WEIGHT` over the vocabulary, but no larger than the encoder bears.** Where k divides its input embeddings,
    too ("weight", tied), it bears a k while its hidden states keep a cosine of `MIN_STATE_COSINE` to those at k = 1.

    A rescale that the checkpoint records is kept, and a SPLADE model is left alone; both are judged as they are.

    Args:
        report: What `measure_head` returned.
        strategy: How k will be applied.

    Returns:
        The choice with verdict, reason and evidence.

    Raises:
        ValueError: If the strategy cannot be used with this head.

    Example:
        >>> from st_sparse_rescale import measure_head
        >>> from st_sparse_rescale.demo import backbone_path
        >>> choose_k(measure_head(backbone_path("modernbert-mini"))).k
        16.0
    """
    now = report.as_is
    recorded = report.rescaled
    if recorded is not None:
        strategy = recorded.strategy
    if (ill := _ill(report)) is not None:
        return KChoice(1.0 if recorded is None else recorded.k, *ill, _evidence(report), strategy)
    size = f"a text's weights have a root mean square of {now.rms_weight:.2g} over the vocabulary"
    if recorded is not None:
        return KChoice(recorded.k, "healthy", f"the checkpoint records it, and {size}", _evidence(report), strategy)
    if report.trained:
        reason = f"{report.active_share:.1%} of the vocabulary is active in a text, and texts differ"
        return KChoice(1.0, "healthy", reason, _evidence(report))
    starts = report.at(strategy)
    if not starts:
        raise ValueError(f'strategy="{strategy}" needs a norm before the head, and there is none: use "weight".')

    bearable = list(takewhile(lambda k: starts[k].state_cosine >= MIN_STATE_COSINE, starts))
    enough = [k for k in bearable if starts[k].rms_weight <= MAX_RMS_WEIGHT]
    k = min(enough) if enough else max(bearable)
    reason = f"{size}, where {MAX_RMS_WEIGHT:g} is enough"
    if k != 1:
        reason += f", and of {starts[k].rms_weight:.2g} at k={k:g}"
    if not enough:
        reason += f"; {_hindrance(starts, k)}"
    healthy = k == 1 and now.rms_weight <= HEALTHY_RMS_WEIGHT
    verdict: Verdict = "healthy" if healthy else "scale problem"
    return KChoice(k, verdict, reason, _evidence(report, strategy, starts[k]), strategy)


def _ill(report: HeadReport) -> tuple[Verdict, str] | None:
    """What no k mends, and the sentence that says so."""
    now = report.as_is
    if now.empty > MAX_EMPTY:
        return "dead", f"{now.empty:.0%} of the texts have no active dimension"
    if report.trained and now.cosine > MAX_COSINE:
        return "dead", f"every text has the same vector (mean cosine of two: {now.cosine:.4f})"
    if report.trained and report.active_share > MAX_ACTIVE:
        return "dense", f"{report.active_share:.0%} of the vocabulary is active in a text"
    if not report.trained and now.score_std < MIN_SCORE_STD:
        return "too small", f"the scores of a text with others hardly differ (standard deviation {now.score_std:.2g})"
    return None


def _hindrance(starts: dict[float, Start], k: float) -> str:
    """Why k is no larger though more would be needed."""
    if (beyond := 2 * k) not in starts:
        return "no larger k is tried"
    cosine = starts[beyond].state_cosine
    return f"k={beyond:g} would disturb the encoder, whose hidden states keep a cosine of {cosine:.2f}"


def _evidence(report: HeadReport, strategy: Strategy = "weight", chosen: Start | None = None) -> tuple[str, ...]:
    """The measurements that matter, as the head is and with the chosen k."""
    logits = report.logits
    chance = math.log(report.texts - 1)
    lines = [
        f"{_vectors(report, report.as_is)}; the cosine of two texts is {report.as_is.cosine:.2f}",
        f"a contrastive loss would start from {report.as_is.loss:,.4g} (from {chance:.2f} if all scores were equal)",
        f"raw logits have mean {logits.mean:.2f} and standard deviation {logits.std:.2f}, {logits.negative:.1%} are "
        f"negative (BERT: {BERT_MEAN:.2f}, {BERT_STD:.2f}, {BERT_NEGATIVE:.1%})",
    ]
    if chosen is not None and chosen.k != 1:
        lines.append(f"at k={chosen.k:g}, {_vectors(report, chosen)}; the loss would start from {chosen.loss:,.4g}")
        if strategy == "weight":
            lines.append(
                f"the encoder's hidden states keep a cosine of {chosen.state_cosine:.3f}, and Adam's steps are "
                f"{chosen.k:g} times as large relative to the head's matrix"
            )
    large = report.as_is.rms_weight > HEALTHY_RMS_WEIGHT  # of a smaller head the encoder's bound is the better guide
    if large and chosen is not None and strategy == "weight" and report.at("norm"):
        free = choose_k(report, "norm").k
        if free > chosen.k and chosen.rms_weight > MAX_RMS_WEIGHT:
            lines.append(
                f'strategy="norm" would leave the encoder alone, and take k={free:g}, with '
                f"head_learning_rate_factor={free:g}"
            )
    return tuple(lines)


def _vectors(report: HeadReport, start: Start) -> str:
    share = start.active_dims / report.vocab_size
    count = "all" if share >= ALL_ACTIVE else f"{share:.1%}"
    return (
        f"{count} of the {report.vocab_size:,} dimensions are active in a text, with a mean weight of "
        f"{start.mean_weight:.2g} over all"
    )
