"""A learning rate of its own for the matrix of the MLM head."""

from __future__ import annotations

import re

from sentence_transformers import SparseEncoder
from torch import nn

from st_sparse_rescale.heads import MLMHead
from st_sparse_rescale.modules import RescaledMLMTransformer
from st_sparse_rescale.rescaling import recorded_rescale
from st_sparse_rescale.training.recipe import RecipeError


def head_learning_rate(
    loss: nn.Module, model: SparseEncoder, factor: float | str, learning_rate: float
) -> dict[str, float]:
    r"""Say, as a ``learning_rate_mapping``, that the head's matrix learns faster or more slowly than the rest.

    Adam's step has a size that does not depend on the gradient's. A head whose matrix is divided by k (``weight``) thus
    takes steps that are k times larger relative to its weights; one whose logits are divided in the norm (``norm``)
    does not, unless its matrix gets k times the learning rate: a factor of ``"k"``. AdamW's weight decay is
    proportional to the learning rate, so it acts on the matrix by the same factor.

    Args:
        loss: What is trained: its parameters are the optimiser's.
        model: The model in the loss. Where its head is tied the matrix is that of the input embeddings, too, and both
            learn at this rate.
        factor: Of the learning rate; ``"k"`` is the k that the model's head was divided by.
        learning_rate: Of all other parameters.

    Returns:
        A pattern that matches the matrix's name in the loss, and its learning rate; empty where the factor is 1.

    Raises:
        RecipeError: The matrix is not among the parameters that are trained.
        UnsupportedHeadError: The model has no head that is understood.

    Example:
        ::

            args.learning_rate_mapping = head_learning_rate(loss, model, "k", args.learning_rate)
            # {"^model\\.0\\.model\\.bert\\.embeddings\\.word_embeddings\\.weight$": 0.008}
    """
    (masked_lm,) = (module.model for module in model.modules() if isinstance(module, RescaledMLMTransformer))
    if factor == "k":
        rescale = recorded_rescale(masked_lm)
        factor = 1.0 if rescale is None else rescale.k
    if factor == 1:
        return {}
    head = MLMHead.of(masked_lm)
    for name, parameter in loss.named_parameters():
        if parameter is head.decoder.weight and parameter.requires_grad:
            return {f"^{re.escape(name)}$": learning_rate * float(factor)}
    raise RecipeError(
        f"head_learning_rate_factor is {factor:g}, but the head's matrix ({head.decoder_name}.weight) is not trained: "
        "leave the factor at 1, or train the matrix (requires_grad)."
    )
