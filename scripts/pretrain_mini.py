"""Pretrain mini backbones by masked language modelling on docstrings.

All share one tokenizer, one corpus and one schedule; they differ in architecture and in how the word embeddings start,
which the tied MLM head inherits. Two ship with the package, for the offline demo:

- ``bert-mini``: N(0, 0.02), BERT's usual initialisation.
- ``modernbert-mini``: N(0, 1), left alone by weight decay, as is usual for modern encoders.

The others are for sweeps over k, which need heads of other kinds and scales:

- ``roberta-mini``: N(0, 0.02), no token types.
- ``albert-mini``: N(0, 0.02), factorised embeddings, one layer used three times.
- ``modernbert-mini-usual``: ModernBERT with N(0, 0.02).
- ``bert-mini-large``: BERT with N(0, 0.3).

Only docstrings of modules in the training split of the demo corpus are read, so that the development and test splits
stay unseen.

    python scripts/pretrain_mini.py bert-mini
    python scripts/pretrain_mini.py modernbert-mini
    python scripts/pretrain_mini.py roberta-mini --steps 1500 --output build/backbones

An interrupted run continues from its last state in ``--work``. The finished checkpoint (float16 weights, loaded as
float32), its log and its card go to ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from torch.nn.functional import cross_entropy
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    get_linear_schedule_with_warmup,
)

from st_sparse_rescale.demo.corpus import all_docstrings, split_of

VOCABULARY, HIDDEN, LAYERS, HEADS, POSITIONS = 8192, 128, 3, 4, 512
BLOCK, BATCH, MASKED = 128, 32, 0.25
LEARNING_RATE, WEIGHT_DECAY, WARMUP = 1e-3, 0.01, 0.05
LOG_EVERY, SAVE_EVERY = 50, 500


class Backbone(NamedTuple):
    """A kind of masked language model, and how its word embeddings start."""

    model: type[PreTrainedModel]
    config: type[PretrainedConfig]
    settings: dict[str, Any]
    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]
    """Logits from the last hidden states, of masked positions only, which a whole forward pass would not spare."""
    embedding_std: float


BERT = (BertForMaskedLM, BertConfig, {"intermediate_size": 4 * HIDDEN}, lambda model, states: model.cls(states))
MODERNBERT = (
    ModernBertForMaskedLM,
    ModernBertConfig,
    {"intermediate_size": 2 * HIDDEN},
    lambda model, states: model.decoder(model.head(states)),
)
ROBERTA = (
    RobertaForMaskedLM,
    RobertaConfig,
    # Positions start behind the pad id, which is 0.
    {"intermediate_size": 4 * HIDDEN, "type_vocab_size": 1, "max_position_embeddings": POSITIONS + 1},
    lambda model, states: model.lm_head(states),
)
ALBERT = (
    AlbertForMaskedLM,
    AlbertConfig,
    {"intermediate_size": 4 * HIDDEN, "embedding_size": HIDDEN // 2},
    lambda model, states: model.predictions(states),
)
BACKBONES = {
    "bert-mini": Backbone(*BERT, embedding_std=0.02),
    "modernbert-mini": Backbone(*MODERNBERT, embedding_std=1.0),
    "roberta-mini": Backbone(*ROBERTA, embedding_std=0.02),
    "albert-mini": Backbone(*ALBERT, embedding_std=0.02),
    "modernbert-mini-usual": Backbone(*MODERNBERT, embedding_std=0.02),
    "bert-mini-large": Backbone(*BERT, embedding_std=0.3),
}


def texts(work: Path, split: str) -> list[str]:
    """The docstrings of a split, parsed once and kept in the work folder."""
    file = work / f"{split}.json"
    if not file.exists():
        by_split: dict[str, dict[str, None]] = {"train": {}, "dev": {}, "test": {}}
        for id, text in all_docstrings():
            by_split[split_of(id.partition(":")[0])].setdefault(" ".join(text.split()))
        for name, found in by_split.items():
            (work / f"{name}.json").write_text(json.dumps(list(found)))
    return json.loads(file.read_text())


def make_tokenizer(work: Path, corpus: list[str]) -> BertTokenizerFast:
    """A lower-cased WordPiece vocabulary trained on the corpus."""
    file = work / "vocab.txt"
    if not file.exists():
        trainer = BertWordPieceTokenizer(lowercase=True)
        trainer.train_from_iterator(corpus, vocab_size=VOCABULARY, min_frequency=2)
        trainer.save_model(str(work))
    return BertTokenizerFast(vocab=str(file), do_lower_case=True, model_max_length=POSITIONS)


def blocks(tokenizer: BertTokenizerFast, corpus: list[str]) -> np.ndarray:
    """Pack the texts, each closed by [SEP], into rows of BLOCK tokens that open with [CLS]: (rows, BLOCK)."""
    flat: list[int] = []
    for ids in tokenizer(corpus, add_special_tokens=False)["input_ids"]:
        flat += [*ids, tokenizer.sep_token_id]
    rows = len(flat) // (BLOCK - 1)
    body = np.array(flat[: rows * (BLOCK - 1)], dtype=np.int64).reshape(rows, BLOCK - 1)
    return np.concatenate([np.full((rows, 1), tokenizer.cls_token_id), body], axis=1)


def make_model(backbone: Backbone, tokenizer: BertTokenizerFast) -> PreTrainedModel:
    """A randomly initialised backbone."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": tokenizer.pad_token_id,
        "cls_token_id": tokenizer.cls_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
    model = backbone.model(backbone.config(**settings | backbone.settings))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=backbone.embedding_std)
    return model


def masked_loss(
    backbone: Backbone,
    model: PreTrainedModel,
    rows: torch.Tensor,
    tokenizer: BertTokenizerFast,
    rng: torch.Generator,
) -> torch.Tensor:
    """Cross-entropy over the masked positions only: 80 % become [MASK], 10 % a random token, 10 % stay."""
    special = (rows == tokenizer.cls_token_id) | (rows == tokenizer.sep_token_id)
    chosen = (torch.rand(rows.shape, generator=rng) < MASKED) & ~special
    roll = torch.rand(rows.shape, generator=rng)
    inputs = torch.where(chosen & (roll < 0.8), tokenizer.mask_token_id, rows)
    noise = torch.randint(len(tokenizer), rows.shape, generator=rng)
    inputs = torch.where(chosen & (roll >= 0.9), noise, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        states = model.base_model(inputs).last_hidden_state[chosen]
        logits = backbone.head(model, states)
    return cross_entropy(logits.float(), rows[chosen])


@torch.no_grad()
def held_out_loss(
    backbone: Backbone, model: PreTrainedModel, rows: torch.Tensor, tokenizer: BertTokenizerFast
) -> float:
    """Mean masked loss over the rows, with the same masks at every call."""
    model.eval()
    rng = torch.Generator().manual_seed(0)
    losses = [masked_loss(backbone, model, chunk, tokenizer, rng).item() for chunk in rows.split(BATCH)]
    model.train()
    return sum(losses) / len(losses)


def optimiser(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW; neither embeddings nor biases and norms decay."""
    embedding = model.get_input_embeddings().weight
    decay = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim == 1 or p is embedding]
    groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), eps=1e-6)


def save_atomically(state: dict, file: Path) -> None:
    torch.save(state, file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


def export(model: torch.nn.Module, tokenizer: BertTokenizerFast, output: Path) -> None:
    """Write the checkpoint with float16 weights, half the size, and a config that loads them as float32."""
    model.half().save_pretrained(output)
    tokenizer.save_pretrained(output)
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def card(name: str, model: torch.nn.Module, header: dict, log: list[dict]) -> str:
    """The model card, with every figure taken from the run."""
    last = log[-1]
    std = BACKBONES[name].embedding_std
    start = f"N(0, {std:g})" + {0.02: ", BERT's usual", 1.0: ", the large scale of some modern encoders'"}.get(std, "")
    kind = type(model).__name__
    return f"""---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: fill-mask
---

# {name}

A tiny masked language model for demonstrations and tests of learned sparse retrieval ({kind}: {LAYERS} layers,
{HIDDEN} wide, {HEADS} attention heads, {VOCABULARY:,} lower-cased word pieces,
{sum(p.numel() for p in model.parameters()):,} parameters). It knows the English of Python documentation, little else.

Its word embeddings, which the MLM head shares, started from {start} initialisation. After training a row of the head is
{last["mean_row_norm"]:.2f} long on average; nothing was multiplied afterwards.

- **Data**: the docstrings of the packages that st-sparse-rescale depends on, {header["tokens"]:,} tokens. Only modules
  of the training split of its demo corpus were read; the development and test splits are unseen. The docstrings stand
  under the permissive licences of their packages; the model holds no text of them.
- **Training**: {header["settings"]["steps"]:,} steps of {BATCH} blocks of {BLOCK} tokens, {MASKED:.0%} masked, AdamW at
  {LEARNING_RATE} with {WARMUP:.0%} warm-up and linear decay, weight decay {WEIGHT_DECAY} on the matrices but not on
  the embeddings, bfloat16 autocast, seed {header["settings"]["seed"]}.
- **Result**: masked-token loss {last["held_out_loss"]:.3f} nats on unseen modules after
  {last["seconds"] / 60:.0f} minutes on one shared CPU core. The whole course is in `pretraining.jsonl`.
- **Reproduce**: `python scripts/pretrain_mini.py {name}`

The weights are stored in half precision and load in single precision.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=BACKBONES)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("build/pretraining"))
    parser.add_argument("--output", type=Path, default=Path("st_sparse_rescale/demo/backbones"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)

    corpus = texts(args.work, "train")
    tokenizer = make_tokenizer(args.work, corpus)
    rows = torch.from_numpy(blocks(tokenizer, corpus))
    held_out = torch.from_numpy(blocks(tokenizer, texts(args.work, "dev")))[:512]
    print(f"{args.name}: {len(corpus):,} docstrings, {rows.numel():,} tokens, {len(tokenizer):,} pieces", flush=True)

    backbone = BACKBONES[args.name]
    model = make_model(backbone, tokenizer)
    optimizer = optimiser(model)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP * args.steps), args.steps)
    rng = torch.Generator().manual_seed(args.seed)
    state_file = args.work / f"{args.name}.pt"
    step, seconds, log = 0, 0.0, []
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        rng.set_state(state["rng"])
        step, seconds, log = state["step"], state["seconds"], state["log"]
        print(f"continuing at step {step}", flush=True)

    model.train()
    began, running = time.perf_counter() - seconds, []
    while step < args.steps:
        batch = rows[torch.randint(len(rows), (BATCH,), generator=rng)]
        loss = masked_loss(backbone, model, batch, tokenizer, rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        running.append(loss.item())
        if step % LOG_EVERY == 0:
            entry = {"step": step, "loss": round(sum(running) / len(running), 4)}
            running = []
            if step % SAVE_EVERY == 0 or step == args.steps:
                entry["held_out_loss"] = round(held_out_loss(backbone, model, held_out, tokenizer), 4)
                norms = model.get_output_embeddings().weight.norm(dim=1)
                entry["mean_row_norm"] = round(norms.mean().item(), 3)
            entry["seconds"] = round(time.perf_counter() - began, 1)
            log.append(entry)
            print(json.dumps(entry), flush=True)
        if step % SAVE_EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "rng": rng.get_state(),
                "step": step,
                "seconds": time.perf_counter() - began,
                "log": log,
            }
            save_atomically(state, state_file)

    output = args.output / args.name
    export(model, tokenizer, output)
    header = {
        "settings": {k: v for k, v in vars(args).items() if k in ("name", "steps", "seed", "threads")},
        "tokens": rows.numel(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    (output / "README.md").write_text(card(args.name, model, header, log))
    lines = [json.dumps(line) for line in (header, *log)]
    (output / "pretraining.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
