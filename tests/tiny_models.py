"""Tiny random masked-LM checkpoints, one per architecture, each with a real little tokenizer.

Biases and norm parameters are random (and seeded): with the zeros and ones of a fresh model, a test that forgets the
bias or the norm would pass by accident.
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

HIDDEN_SIZE = 32
MAX_LENGTH = 512

TEXTS = (
    "The quick brown fox jumps over the lazy dog while the farmer sleeps in the barn.",
    "Sparse retrieval maps every query and every document to a weighted bag of words.",
    "A masked language model predicts the hidden word from the words around it.",
    "The river flooded the valley in spring, and the bridge was closed for two weeks.",
    "She opened the window to hear the rain falling on the roof of the old house.",
    "Search engines store an inverted index from each term to the documents which hold it.",
    "The capital of France is Paris, a city on the banks of the river Seine.",
    "Doctors recommend drinking water and sleeping eight hours every night.",
    "Large embeddings produce large scores, and large scores make training unstable.",
    "Bread is baked from flour, water, salt and yeast, and cooled on a wooden board.",
    "The train to Berlin leaves at seven and arrives shortly before midnight.",
    "Children learn to read by sounding out letters and guessing words from pictures.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar and oxygen.",
    "He repaired the engine of the boat with a hammer, some wire and much patience.",
    "The museum shows paintings, drawings and sculptures of the nineteenth century.",
    "Python functions return a value, and raise an exception when the input is wrong.",
)


class _Architecture(NamedTuple):
    """What makes one tiny checkpoint: a model type, a kind of tokenizer, special tokens and config settings."""

    model_type: str
    tokenizer: str
    special: tuple[str, str, str, str, str]  # begin, pad, end, unknown, mask
    order: str  # their ids from 0 on, by initial: (b)egin, (p)ad, (e)nd, (u)nknown, (m)ask
    config: dict[str, Any]
    vocabulary: int | None = None  # tokens of the tokenizer, filled up with unused ones; None: as trained
    multiple: int = 1  # the model's vocabulary is rounded up to a multiple of this


_BERT = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_OFFSET = {"max_position_embeddings": MAX_LENGTH + 2}  # positions start behind the pad id

_ARCHITECTURES = {
    "bert": _Architecture("bert", "wordpiece", _BERT, "pubem", {}),
    "distilbert": _Architecture(
        "distilbert", "wordpiece", _BERT, "pubem", {"dim": HIDDEN_SIZE, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    ),
    "albert": _Architecture("albert", "unigram", _BERT, "pubem", {"embedding_size": 16}),
    "roberta": _Architecture("roberta", "bytes", _ROBERTA, "bpeum", _OFFSET),
    "xlm-roberta": _Architecture("xlm-roberta", "unigram", _ROBERTA, "bpeum", _OFFSET),
    "camembert": _Architecture("camembert", "unigram", _ROBERTA, "bpeum", _OFFSET),
    "gte": _Architecture("gte", "unigram", _ROBERTA, "bpeum", {}),
    "modernbert": _Architecture("modernbert", "bytes", _BERT, "ubepm", {}, multiple=64),
    "ettin": _Architecture("modernbert", "lower-bytes", _BERT, "ubepm", {}, multiple=64),
    "mmbert": _Architecture("modernbert", "bytes", ("<bos>", "<pad>", "<eos>", "<unk>", "<mask>"), "pebum", {}, 2048),
    "deberta-v2": _Architecture("deberta-v2", "unigram", _BERT, "pbeum", {"legacy": True}),
    "deberta-v2-new-head": _Architecture("deberta-v2", "unigram", _BERT, "pbeum", {"legacy": False}),
    "mpnet": _Architecture("mpnet", "wordpiece", _ROBERTA, "bpeum", _OFFSET),
    "electra": _Architecture("electra", "wordpiece", _BERT, "pubem", {"embedding_size": 16}),
    "nomic-bert": _Architecture("nomic_bert", "wordpiece", _BERT, "pubem", {}),
    "eurobert": _Architecture(
        "eurobert",
        "bytes",
        ("<|begin_of_text|>", "<|pad|>", "<|end_of_text|>", "<|unk|>", "<|mask|>"),
        "bepum",
        {},
    ),
    "esm": _Architecture(
        "esm", "wordpiece", ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>"), "bpeum", {"token_dropout": True, **_OFFSET}
    ),
}

UNSUPPORTED_ARCHITECTURES: tuple[str, ...] = ("deberta-v2-new-head",)  # built to be refused
ARCHITECTURES: tuple[str, ...] = tuple(name for name in _ARCHITECTURES if name not in UNSUPPORTED_ARCHITECTURES)


def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Make the tokenizer of an architecture from ``TEXTS``.

    WordPiece and Unigram vocabularies are written down, not trained: their trainers break ties by chance.
    """
    architecture = _ARCHITECTURES[name]
    begin, pad, end, unknown, mask = architecture.special
    initials = dict(zip("bpeum", architecture.special, strict=True))
    special = [initials[initial] for initial in architecture.order]

    words = sorted({word for text in TEXTS for word in re.findall(r"\w{2,}", text)})
    letters = string.ascii_letters + string.digits + string.punctuation
    if architecture.tokenizer == "wordpiece":
        pieces = [*letters, *(f"##{letter}" for letter in letters), "##ed", "##ing", *words]
        vocabulary = dict.fromkeys([*special, *(piece.lower() for piece in pieces)])
        tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    elif architecture.tokenizer == "unigram":
        scores = [(token, 0.0) for token in special]
        scores += [(letter, -10.0) for letter in f"▁{letters}"] + [(f"▁{word}", -8.0) for word in words]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=special.index(unknown)))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=unknown))
        if architecture.tokenizer == "lower-bytes":
            tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(
            TEXTS,
            trainers.BpeTrainer(vocab_size=450, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
        )
    tokenizer.add_special_tokens(special)

    if architecture.vocabulary is not None:
        tokenizer.add_tokens([f"<unused{i}>" for i in range(architecture.vocabulary - tokenizer.get_vocab_size())])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0",
        pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    types = ["token_type_ids"] if name in ("bert", "albert", "electra", "nomic-bert", "deberta-v2") else []
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        cls_token=begin,
        eos_token=end,
        sep_token=end,
        pad_token=pad,
        unk_token=unknown,
        mask_token=mask,
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", *types, "attention_mask"],
    )


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draw every parameter anew: matrices around 0, norm weights around 1, all biases well away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_((0.5 if parameter.dim() == 1 else 0.2) * noise)
    return model


def build_model(name: str, *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """Build the tiny random masked LM of an architecture, in evaluation mode."""
    architecture = _ARCHITECTURES[name]
    tokenizer = build_tokenizer(name)
    settings: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // architecture.multiple) * architecture.multiple,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "mask_token_id": tokenizer.mask_token_id,
    }
    if architecture.model_type == "distilbert":  # names its sizes otherwise, and maps the usual names to them
        settings = {key: value for key, value in settings.items() if not key.startswith(("hidden", "num", "inter"))}
    config = AutoConfig.for_model(architecture.model_type, **(settings | architecture.config | config_overrides))
    return randomize(AutoModelForMaskedLM.from_config(config).eval(), seed)


def build_checkpoint(name: str, folder: str | Path, **config_overrides: Any) -> Path:
    """Write config, safetensors and tokenizer of a tiny random masked LM.

    Args:
        name: One of ``ARCHITECTURES`` or ``UNSUPPORTED_ARCHITECTURES``.
        folder: Where to write; made if absent.
        **config_overrides: Settings of the config, such as ``tie_word_embeddings=False``.

    Returns:
        The folder.
    """
    folder = Path(folder)
    build_model(name, **config_overrides).save_pretrained(folder)
    build_tokenizer(name).save_pretrained(folder)
    return folder
