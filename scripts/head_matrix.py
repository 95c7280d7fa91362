"""Try every masked-LM class of transformers on a tiny random model, and write docs/architectures.md.

Run it again when transformers is updated: ``make matrix``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError
from st_sparse_rescale.rescaling import rescale_mlm_head
from tests.tiny_models import randomize

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
K = 3.0  # no power of two, which would hide rounding

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
TEXT_AND_IMAGE: dict[str, Any] = {
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64},
    "image_token_id": 3,
}
# What the sizes above leave large or inconsistent; None takes a setting away.
OVERRIDES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bart": {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "esm": {"mask_token_id": 4, "token_dropout": True},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "d_head": 8, "d_inner": 64},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "modernvbert": {"text_config": SIZES, **TEXT_AND_IMAGE},
    "perceiver": {"num_latents": 4, "d_latents": 32, "d_model": 32, "num_self_attends_per_block": 1},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "num_buckets": 4,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {
        "pronunciation_vocab_size": 9,
        "shape_vocab_size": 9,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "squeezebert": {"embedding_size": 32},
    "ultravbert": {"text_config": SIZES, **TEXT_AND_IMAGE},
    "xmod": {"default_language": "en_XX"},
}
OVERRIDES["mbart"] = OVERRIDES["mvp"] = OVERRIDES["bart"]
DTYPES = {"mra": (torch.float32, 1e-5)}  # all others: float64, compared up to 1e-9
# Heads that a setting changes: the same class, twice.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "deberta": {"legacy=False": {"legacy": False}},
    "deberta-v2": {"legacy=False": {"legacy": False}},
}

DEBERTA = r"""
## DeBERTa

The published checkpoints hold their heads under the names of `legacy=False`, which multiplies with the input embeddings
and has no decoder. The legacy head computes the same under other names. Convert a checkpoint once, and use the folder:

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

checkpoint, folder = "microsoft/deberta-v3-base", "deberta-v3-base-legacy"
names = {
    r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.": r"cls.predictions.transform.\1.",
    r"^lm_predictions\.lm_head\.bias": "cls.predictions.bias",
}
model = AutoModelForMaskedLM.from_pretrained(checkpoint, legacy=True, key_mapping=names)
model.save_pretrained(folder, save_original_format=False)
AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
```
"""


class Row(NamedTuple):
    """What the matrix says of one class."""

    model_type: str
    architecture: str
    tied: str
    weight: str
    norm: str
    reason: str


def build(config_class: type[PretrainedConfig], **overrides: Any) -> PreTrainedModel:
    """Build a tiny random model, with random biases and norms."""
    settings = SIZES | OVERRIDES.get(config_class.model_type, {}) | overrides
    config = config_class(**{key: value for key, value in settings.items() if value is not None})
    model = MODEL_FOR_MASKED_LM_MAPPING[config_class](config)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > 5_000_000:
        raise ValueError(f"its smallest build has {size:,} parameters")
    dtype, _ = DTYPES.get(config_class.model_type, (torch.float64, 0))
    return randomize(model.to(dtype).eval())


def states_and_logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Run two texts, and return what enters the decoder and the logits, independently of the code on trial."""
    entered = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    ids = torch.randint(10, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    with hook, torch.no_grad(), torch.random.fork_rng():
        logits = model(input_ids=ids).logits
    return entered[0], logits


def reason(error: UnsupportedHeadError) -> str:
    """The middle of the message: what was found, without the architecture before it and the mend behind."""
    return str(error).split(": ", 1)[1].split(". ")[0]


def try_strategy(model: PreTrainedModel, strategy: str) -> str:
    """Rescale a copy and compare its logits with the equation; return the reason if it is refused, else nothing."""
    states, logits = states_and_logits(model)
    matrix = model.get_output_embeddings().weight.detach().clone()
    bias = (logits - states @ matrix.T)[0, 0]
    rescaled = copy.deepcopy(model)
    try:
        rescale_mlm_head(rescaled, K, strategy)
    except UnsupportedHeadError as error:
        return reason(error)
    states, now = states_and_logits(rescaled)
    expected = states @ (matrix / K).T + bias if strategy == "weight" else logits / K
    _, tolerance = DTYPES.get(model.config.model_type, (torch.float64, 1e-9))
    torch.testing.assert_close(now, expected, rtol=tolerance, atol=tolerance)
    return ""


def try_class(config_class: type[PretrainedConfig], variant: str = "", **overrides: Any) -> Row:
    """Fill in the row of one class."""
    model_type = config_class.model_type + (f" ({variant})" if variant else "")
    architecture = MODEL_FOR_MASKED_LM_MAPPING[config_class].__name__
    try:
        model = build(config_class, **overrides)
    except Exception as error:  # whatever a config or a model may raise
        return Row(model_type, architecture, "", "not built", "not built", f"{type(error).__name__}: {error}")
    try:
        tied = "yes" if MLMHead.of(model).tied else "no"
    except UnsupportedHeadError as error:
        return Row(model_type, architecture, "", "refused", "refused", reason(error))
    refusals = {strategy: try_strategy(model, strategy) for strategy in ("weight", "norm")}
    verdicts = {strategy: "refused" if refusal else "verified" for strategy, refusal in refusals.items()}
    return Row(model_type, architecture, tied, **verdicts, reason=" ".join(filter(None, refusals.values())))


def rows() -> Iterator[Row]:
    """Fill in all rows."""
    for config_class in MODEL_FOR_MASKED_LM_MAPPING:
        if not config_class.__module__.startswith("transformers.models."):
            continue  # registered by a checkpoint with its own code
        yield try_class(config_class)
        for variant, overrides in VARIANTS.get(config_class.model_type, {}).items():
            yield try_class(config_class, variant, **overrides)


def page(rows: list[Row]) -> str:
    """Write the rows as a Markdown page."""
    counts = Counter(row.weight for row in rows)
    table = [("model type", "class", "tied", '`"weight"`', '`"norm"`', "why refused"), ("---",) * 6, *rows]
    lines = [
        "# Architectures",
        "",
        "<!-- Written by scripts/head_matrix.py; `make matrix` writes it anew. -->",
        "",
        f"Every class in the masked-LM mapping of transformers {transformers.__version__}, tried on a tiny random one:",
        f"{counts['verified']} heads can be rescaled, {counts['refused']} are refused, {counts['not built']} could not "
        "be built.",
        "",
        "- *verified*: rescaled by k = 3, and the logits agree with the equation, in float64 and with random biases.",
        "- *refused*: `UnsupportedHeadError`, with the reason in the last column. Nothing is rescaled on a guess.",
        "- *tied*: whether the decoder shares its memory with the input embeddings, as the class is built by default.",
        "",
        "A checkpoint with code of its own goes through the same rule; `MLMHead.of(model)` says what it finds.",
        "",
    ]
    lines += [f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |" for row in table]
    return "\n".join(lines) + "\n" + DEBERTA


def main() -> None:
    """Write the page."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(page(list(rows())), encoding="utf-8")


if __name__ == "__main__":
    main()
