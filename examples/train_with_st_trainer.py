"""Train a rescaled SPLADE model with sentence-transformers' own trainer, on a file of (query, positive) pairs.

    python examples/train_with_st_trainer.py pairs.jsonl my-splade --steps 200

Without a model it trains the mini backbone that ships with the package; `st-sparse-rescale demo` leaves a file of pairs
in `demo-out/corpus/train.jsonl`.
"""

import argparse

from datasets import load_dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling
from st_sparse_rescale.demo import backbone_path
from st_sparse_rescale.losses import FlopsLoss, SparseMultipleNegativesRankingLoss, SpladeLoss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help="JSON lines with the texts query and positive")
    parser.add_argument("output", help="folder for the checkpoints and the model")
    parser.add_argument("--model", default=backbone_path("modernbert-mini"))
    parser.add_argument("--k", type=float, default=16)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    transformer = RescaledMLMTransformer(args.model, k=args.k, max_seq_length=96)
    model = SparseEncoder(modules=[transformer, SpladePooling()])
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-3,
        query_regularizer_weight=3e-3,
        document_regularizer=FlopsLoss(model),
        query_regularizer=FlopsLoss(model),
    )
    settings = SparseEncoderTrainingArguments(
        output_dir=f"{args.output}/checkpoints",
        max_steps=args.steps,
        per_device_train_batch_size=32,
        learning_rate=5e-4,
        warmup_steps=args.steps // 10,
        logging_steps=10,
        report_to="none",
    )
    pairs = load_dataset("json", data_files=args.pairs, split="train")
    SparseEncoderTrainer(model=model, args=settings, train_dataset=pairs, loss=loss).train()
    model.save_pretrained(f"{args.output}/model")

    # What was saved is a stock model: it loads anywhere, without this package.
    stock = SparseEncoder(f"{args.output}/model")
    query = stock.encode_query("split a string at every comma")
    print(stock.decode(query, top_k=10))


if __name__ == "__main__":
    main()
