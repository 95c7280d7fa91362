"""Whatever writes a checkpoint writes a stock one: it loads without this package, and gives the same vectors."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder import modules as stock
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from transformers import TrainerCallback

from st_sparse_rescale.modules import RescaledMLMTransformer, SpladePooling
from tests.tiny_models import TEXTS

pytestmark = pytest.mark.slow  # one fixture writes every checkpoint, and another process reads them all

K = 4.0
QUERIES, DOCUMENTS = list(TEXTS[:4]), list(TEXTS[4:9])
Checkpoint = Callable[[str], Path]

LOAD_ELSEWHERE = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "st_sparse_rescale":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.util import fullname

torch.set_num_threads(1)
texts, report = json.load(sys.stdin), {}
for path in sys.argv[1:]:
    model = SparseEncoder(path, device="cpu")
    queries, documents = texts["queries"], texts["documents"]
    vectors = [model.encode_query(queries), model.encode_document(documents), model.encode(documents)]
    torch.save([vector.to_dense() for vector in vectors], f"{path}/vectors.pt")
    model.save_pretrained(f"{path}/again")
    report[path] = [fullname(module) for module in model.modules() if type(module).__module__.startswith("sentence")]
assert "st_sparse_rescale" not in sys.modules
json.dump(report, sys.stdout)
"""


def splade(path: Path | str, *, k: float | None = K, **pooling: Any) -> SparseEncoder:
    return SparseEncoder(modules=[RescaledMLMTransformer(str(path), k=k), SpladePooling(**pooling)], device="cpu")


def vectors_of(model: SparseEncoder) -> list[torch.Tensor]:
    """Encode by way of the logits, as stock does: they are compared bit for bit, and the fused head rounds its way."""
    handing_over = [m for m in model.modules() if isinstance(m, RescaledMLMTransformer) and m.hands_over]
    for module in handing_over:
        module.hands_over = False
    try:
        return by_the_logits(model)
    finally:
        for module in handing_over:
            module.hands_over = True


def by_the_logits(model: SparseEncoder) -> list[torch.Tensor]:
    encoded = model.encode_query(QUERIES), model.encode_document(DOCUMENTS), model.encode(DOCUMENTS)
    return [vectors.to_dense() for vectors in encoded]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def trainer_of(model: SparseEncoder, folder: Path, **settings: Any) -> SparseEncoderTrainer:
    data = Dataset.from_dict({"query": list(TEXTS[:8]), "document": list(TEXTS[8:])})
    arguments = SparseEncoderTrainingArguments(
        output_dir=str(folder),
        **{"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": "none"}
        | {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}
        | settings,
    )
    loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), 1e-3, 1e-3)
    return SparseEncoderTrainer(model, arguments, train_dataset=data, eval_dataset=data, loss=loss)


@pytest.fixture(scope="module")
def trained(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A training of four steps that saved after two and four, and went back to the model of step two at the end."""
    folder = tmp_path_factory.mktemp("trained")
    model = splade(checkpoint("bert"), mask_special_tokens=True)
    at_save: dict[int, list[torch.Tensor]] = {}

    class Remember(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_save[state.global_step] = vectors_of(model)
            model.train()

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_of(model, folder, **best)  # the greater loss, so the earlier step, is best
    trainer.add_callback(Remember())
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    return SimpleNamespace(folder=folder, model=model, at_save=at_save)


class FakeHub:
    """Enough of `HfApi` for `push_to_hub`: a repository is a folder."""

    folder: Path
    commit_message: str

    def __init__(self, token: str | None = None) -> None: ...

    def create_repo(self, repo_id: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, folder_path: str, commit_message: str, **_: Any) -> SimpleNamespace:
        shutil.copytree(folder_path, FakeHub.folder)
        FakeHub.commit_message = commit_message
        return SimpleNamespace(commit_url="https://hub/commit")


class Loud(SparseEncoder):
    """A user's own class, which does something of its own on saving."""

    def save(self, path: str, *args: Any, **kwargs: Any) -> None:
        super().save(path, *args, **kwargs)
        (Path(path) / "loud.txt").write_text(type(self).__name__)


def every_checkpoint(checkpoint: Checkpoint, root: Path) -> dict[str, list[torch.Tensor]]:
    """Write a checkpoint in each way there is, to a folder of its name, and return the vectors of its writer."""
    written: dict[str, list[torch.Tensor]] = {}
    path = str(checkpoint("bert"))

    def save(name: str, *modules: Any, model_class: type[SparseEncoder] = SparseEncoder) -> SparseEncoder:
        return save_model(name, model_class(modules=list(modules), device="cpu"))

    def save_model(name: str, model: SparseEncoder) -> SparseEncoder:
        model.save_pretrained(str(root / name))
        written[name] = vectors_of(model)
        return model

    def rescaled(k: float = K, **arguments: Any) -> RescaledMLMTransformer:
        return RescaledMLMTransformer(path, k=k, **arguments)

    def masked() -> SpladePooling:
        return SpladePooling(mask_special_tokens=True)

    for name in ("bert", "distilbert", "albert", "gte", "roberta", "modernbert", "ettin"):
        save_model(name, splade(checkpoint(name), k=16))
    save("norm", rescaled(strategy="norm"), SpladePooling())
    save("sum", rescaled(), SpladePooling("sum", "log1p_relu"))
    save("masked", rescaled(), masked())
    save("stock pooling", rescaled(), stock.SpladePooling())
    save("bfloat16", rescaled(model_kwargs={"dtype": torch.bfloat16}), SpladePooling())
    save("user class", rescaled(), SpladePooling(), model_class=Loud)
    save("moved", *splade(path).children())
    save_model("deepcopied", copy.deepcopy(splade(path, mask_special_tokens=True)))
    save_model("copied", copy.copy(splade(path, mask_special_tokens=True)))
    save_model("pickled", pickle.loads(pickle.dumps(splade(path, mask_special_tokens=True))))

    prompted = splade(path)
    prompted.prompts |= {"query": "question: "}
    save_model("prompts", prompted)

    later = SparseEncoder(modules=[rescaled()], device="cpu")
    later.append(pooling := masked())
    pooling.on_model_ready(later)
    save_model("appended", later)

    tokenizer = splade(path).tokenizer
    static = stock.SparseStaticEmbedding(tokenizer, weight=torch.rand(len(tokenizer)))
    save("inference-free", Router.for_query_document([static], [rescaled(), masked()]))
    save("asymmetric", Router.for_query_document([rescaled(16), SpladePooling()], [rescaled(), masked()]))
    save("shared pooling", Router.for_query_document([rescaled(16)], [rescaled()]), masked())

    pushed = splade(path)
    FakeHub.folder = root / "pushed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentence_transformers.base.model.HfApi", FakeHub)
        pushed.push_to_hub("user/splade", replace_model_card=True)
    written["pushed"] = vectors_of(pushed)
    return written


@pytest.fixture(scope="module")
def saved(
    checkpoint: Checkpoint, trained: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, SimpleNamespace]:
    """Each checkpoint: its folder, the vectors of its writer, and those of its reader, who has not got this package."""
    root = tmp_path_factory.mktemp("saved")
    written = every_checkpoint(checkpoint, root)
    for step in (2, 4):
        shutil.copytree(trained.folder / f"checkpoint-{step}", root / f"checkpoint-{step}")
        written[f"checkpoint-{step}"] = trained.at_save[step]
    trained.model.save_pretrained(str(root / "best"))
    written["best"] = trained.at_save[2]

    read = subprocess.run(
        [sys.executable, "-c", LOAD_ELSEWHERE, *(str(root / name) for name in written)],
        input=json.dumps({"queries": QUERIES, "documents": DOCUMENTS}),
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    classes = json.loads(read.stdout)
    return {
        name: SimpleNamespace(
            path=root / name,
            writer=vectors,
            reader=torch.load(root / name / "vectors.pt"),
            classes=[class_.rsplit(".", 1)[1] for class_ in classes[str(root / name)]],
        )
        for name, vectors in written.items()
    }


PLAIN = ["SparseEncoder", "Transformer", "SpladePooling"]
MASKED = ["SparseEncoder", "Transformer", "MultiVectorMask", "SpladePooling"]
CLASSES = {
    "norm": PLAIN,
    "sum": PLAIN,
    "masked": MASKED,
    "stock pooling": PLAIN,
    "bfloat16": PLAIN,
    "user class": PLAIN,
    "moved": PLAIN,
    "deepcopied": MASKED,
    "copied": MASKED,
    "pickled": MASKED,
    "prompts": PLAIN,
    "appended": MASKED,
    "pushed": PLAIN,
    "checkpoint-2": MASKED,
    "checkpoint-4": MASKED,
    "best": MASKED,
    "inference-free": ["SparseEncoder", "Router", "SparseStaticEmbedding", *MASKED[1:]],
    "asymmetric": ["SparseEncoder", "Router", *PLAIN[1:], *MASKED[1:]],
    "shared pooling": ["SparseEncoder", "Router", "Transformer", "Transformer", "MultiVectorMask", "SpladePooling"],
} | dict.fromkeys(("bert", "distilbert", "albert", "gte", "roberta", "modernbert", "ettin"), PLAIN)


@pytest.mark.parametrize("name", CLASSES)
def test_it_loads_without_this_package_and_gives_the_same_vectors(saved: dict[str, Any], name: str) -> None:
    assert saved[name].writer[0].count_nonzero() > 0
    assert equal(saved[name].reader, saved[name].writer)
    assert saved[name].classes == CLASSES[name]


def test_every_checkpoint_was_looked_at(saved: dict[str, Any]) -> None:
    assert saved.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_no_file_names_us(saved: dict[str, Any], name: str) -> None:
    for file in saved[name].path.rglob("*"):
        if file.suffix in {".json", ".md"}:
            assert "st_sparse_rescale" not in file.read_text()
            assert "RescaledMLMTransformer" not in file.read_text()


def test_training_changed_the_model_and_ended_with_the_best_one(trained: SimpleNamespace) -> None:
    assert not equal(trained.at_save[2], trained.at_save[4])
    assert equal(vectors_of(trained.model), trained.at_save[2])


@pytest.mark.parametrize("name", ["bert", "modernbert", "norm", "bfloat16", "checkpoint-2", "best"])
def test_k_is_applied_once_whatever_the_path(saved: dict[str, Any], name: str) -> None:
    k = 16 if name in ("bert", "modernbert") else K
    arguments = {"strategy": "norm"} if name == "norm" else {}
    arguments |= {"model_kwargs": {"dtype": torch.bfloat16}} if name == "bfloat16" else {}
    mask = "MultiVectorMask" in CLASSES[name]
    for path in (saved[name].path, saved[name].path / "again"):  # saved by us; loaded and saved again without us
        for given in ({"k": k}, {"k": None}):
            transformer = RescaledMLMTransformer(str(path), **given | arguments)
            model = SparseEncoder(modules=[transformer, SpladePooling(mask_special_tokens=mask)], device="cpu")
            assert equal(vectors_of(model), saved[name].writer)


def test_a_resumed_training_ends_like_one_that_was_not_interrupted(
    checkpoint: Checkpoint, trained: SimpleNamespace, tmp_path: Path
) -> None:
    model = splade(checkpoint("bert"), mask_special_tokens=True)
    trainer = trainer_of(model, tmp_path)
    trainer.train(resume_from_checkpoint=str(trained.folder / "checkpoint-2"))
    assert equal(vectors_of(model), trained.at_save[4])


def test_at_k_1_every_file_is_the_file_of_stock(checkpoint: Checkpoint, tmp_path: Path) -> None:
    stocks = SparseEncoder(
        modules=[Transformer(str(checkpoint("bert")), transformer_task="fill-mask"), stock.SpladePooling()],
        similarity_fn_name="dot",
    )
    for name, model in {"stock": stocks, "ours": splade(checkpoint("bert"), k=1)}.items():
        vectors_of(model)  # stock learns its dimension, and both their padding
        model.save_pretrained(str(tmp_path / name))
    files = {file.relative_to(tmp_path / "stock") for file in (tmp_path / "stock").rglob("*") if file.is_file()}
    assert files == {file.relative_to(tmp_path / "ours") for file in (tmp_path / "ours").rglob("*") if file.is_file()}
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes()


@pytest.mark.parametrize("name", ["bert", "norm", "checkpoint-2", "best", "pushed"])
def test_the_card_tells_k_strategy_reason_and_source(saved: dict[str, Any], name: str) -> None:
    card = (saved[name].path / "README.md").read_text()
    k, strategy = 16 if name == "bert" else 4, "norm" if name == "norm" else "weight"
    assert f'MLM-head rescaling (k = {k}, strategy "{strategy}", reason: given)' in card
    assert "2606.18811" in card
    assert "- mlm-head-rescaling" in card
    assert "SPLADE Sparse Encoder" in card
    config = json.loads((saved[name].path / "config.json").read_text())
    assert config["mlm_head_rescale"] == {"k": k, "strategy": strategy, "reason": "given"}


def test_the_card_of_a_training_keeps_the_citations_of_its_losses(saved: dict[str, Any]) -> None:
    card = (saved["checkpoint-2"].path / "README.md").read_text()
    assert "SpladeLoss" in card.split("## Citation")[1]


# The promotion


def test_the_model_stays_what_it_was(checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
    model = splade(checkpoint("bert"))
    assert isinstance(model, SparseEncoder)
    assert type(model).__name__ == "SparseEncoder"
    assert FakeHub.commit_message == "Add new SparseEncoder model"
    loud = Loud(modules=list(model.children()))
    assert isinstance(loud, Loud)
    assert (saved["user class"].path / "loud.txt").read_text() == "Loud"
    assert type(pickle.loads(pickle.dumps(loud))) is type(loud)
    assert type(copy.deepcopy(loud)) is type(loud)
    assert type(splade(checkpoint("bert"))) is type(model)


def test_saving_leaves_the_model_as_it_was(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = splade(checkpoint("bert"), mask_special_tokens=True)
    before, vectors = repr(model), vectors_of(model)
    keys = list(model.state_dict())
    model.save_pretrained(str(tmp_path / "a"))
    assert repr(model) == before
    assert list(model.state_dict()) == keys
    assert equal(vectors_of(model), vectors)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock.SpladePooling, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            model.save_pretrained(str(tmp_path / "b"))
    assert repr(model) == before
    assert equal(vectors_of(model), vectors)


def test_a_module_put_in_later_asks_for_its_hook(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = SparseEncoder(modules=[Transformer(str(checkpoint("bert")), transformer_task="fill-mask")])
    model.append(SpladePooling())
    with pytest.raises(RuntimeError, match="on_model_ready"):
        model.save_pretrained(str(tmp_path))
    model[1].on_model_ready(model)
    model.save_pretrained(str(tmp_path))
    assert type(SparseEncoder(str(tmp_path))[1]) is stock.SpladePooling


def test_modules_with_names_of_their_own_keep_them(checkpoint: Checkpoint, tmp_path: Path) -> None:
    transformer = RescaledMLMTransformer(str(checkpoint("bert")), k=K)
    named = OrderedDict(encoder=transformer, pooling=SpladePooling(mask_special_tokens=True))
    model = SparseEncoder(modules=named, device="cpu")
    model.save_pretrained(str(tmp_path))
    assert [name for name, _ in model.named_children()] == ["encoder", "pooling"]
    reloaded = SparseEncoder(str(tmp_path), device="cpu")
    assert list(reloaded.state_dict()) == list(model.state_dict())
    assert equal(vectors_of(reloaded), vectors_of(model))
