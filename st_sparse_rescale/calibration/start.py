"""What a SPLADE training would start from: vectors of untrained texts, their scores, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from st_sparse_rescale.rescaling import Strategy


@dataclass(frozen=True)
class Start:
    """The vectors of B texts over V terms, and what their scores do to the contrastive loss at step 0.

    Scores are dot products between all pairs of different texts, ``S[i, j] = vectors[i] @ vectors[j]``.

    Attributes:
        k: What the head was divided by.
        strategy: What of it was divided.
        input_cosine: How alike the encoder's input (what enters its first layer) is to that at k = 1: mean over the
            tokens of the cosine of the two vectors, each less the mean vector of its k, which would hide any change;
            None where the encoder shows no such input of the text's length.
        state_cosine: The same of what enters the decoder, the last hidden states.
        active_dims: Terms of positive weight, mean over the texts.
        empty: Share of texts without any.
        mean_weight: Mean weight over all texts and terms, zeros included.
        rms_weight: Root of the mean squared weight over all texts and terms, so that ``V * rms_weight**2`` is the mean
            score of a text with itself.
        max_weight: Largest weight of a text, mean over the texts.
        cosine: Cosine of two texts, mean over the pairs; that with a text without weights is 0.
        self_score: Score of a text with itself, mean over the texts.
        pair_score: Score of two texts, mean over the pairs.
        score_std: Standard deviation of a row of S, mean over the rows.
        entropy: Entropy of the softmax of a row of S in nats, mean over the rows; ln(B - 1) if all scores are equal.
        loss: The contrastive loss if the right answer were any of the others with equal chance: mean over i of
            ``logsumexp_j S[i, j] - mean_j S[i, j]``. ln(B - 1) if all scores are equal; it grows with their spread.
        gradient_norm: Frobenius norm of the gradient of that loss by the raw logits (of which max pooling hands it to
            one of each text and term); None for vectors that are not pooled here.
        flops: The FLOPS regulariser, ``sum_t (mean_i vectors[i, t])**2``, before its weight.
    """

    k: float
    strategy: Strategy
    input_cosine: float | None
    state_cosine: float
    active_dims: float
    empty: float
    mean_weight: float
    rms_weight: float
    max_weight: float
    cosine: float
    self_score: float
    pair_score: float
    score_std: float
    entropy: float
    loss: float
    gradient_norm: float | None
    flops: float


def describe_logits(maxima: Tensor) -> dict[str, Any]:
    """Describe the SPLADE vectors of texts, ``log(1 + relu(maxima))``.

    Args:
        maxima: The largest logit of each text and term, shape (B, V).

    Returns:
        All of `Start` that depends on the vectors.
    """
    maxima = maxima.detach().requires_grad_()
    with torch.enable_grad():
        vectors = maxima.relu().log1p()
        (gradient,) = torch.autograd.grad(_blind_loss(_other_scores(vectors)), maxima)
    return describe_vectors(vectors.detach()) | {"gradient_norm": gradient.norm().item()}


def describe_vectors(vectors: Tensor) -> dict[str, Any]:
    """Describe SPLADE vectors, however they were pooled.

    Args:
        vectors: Shape (B, V), at least three.

    Returns:
        All of `Start` that depends on the vectors, without the gradient.
    """
    scores = _other_scores(vectors)
    shares = scores.log_softmax(dim=1)
    self_scores = vectors.square().sum(dim=1)
    return {
        "active_dims": (vectors > 0).sum(dim=1).double().mean().item(),
        "empty": (self_scores == 0).double().mean().item(),
        "mean_weight": vectors.mean().item(),
        "rms_weight": vectors.square().mean().sqrt().item(),
        "max_weight": vectors.amax(dim=1).mean().item(),
        "cosine": _other_scores(normalize(vectors, dim=1)).mean().item(),
        "self_score": self_scores.mean().item(),
        "pair_score": scores.mean().item(),
        "score_std": scores.std(dim=1, correction=0).mean().item(),
        "entropy": -(shares.exp() * shares).sum(dim=1).mean().item(),
        "loss": _blind_loss(scores).item(),
        "gradient_norm": None,
        "flops": vectors.mean(dim=0).square().sum().item(),
    }


def _other_scores(vectors: Tensor) -> Tensor:
    """The scores of each text with the others, (B, B - 1), in double precision for the differences of large ones."""
    count = len(vectors)
    others = ~torch.eye(count, dtype=torch.bool, device=vectors.device)
    return (vectors @ vectors.T).double()[others].view(count, count - 1)


def _blind_loss(scores: Tensor) -> Tensor:
    return (scores.logsumexp(dim=1) - scores.mean(dim=1)).mean()
