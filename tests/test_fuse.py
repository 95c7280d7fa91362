"""The fused head inside models: equal to stock, wherever a model may be, and gone without a trace."""

from __future__ import annotations

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder import modules as stock
from sentence_transformers.sparse_encoder.losses import (
    CachedSpladeLoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from st_sparse_rescale import RescaledMLMTransformer, SpladePooling, fuse, unfuse
from st_sparse_rescale.modules.hand_over import DECODER_INPUT
from st_sparse_rescale.whole import written_whole
from tests.tiny_models import ARCHITECTURES, TEXTS
from tests.two_processes import leave_together

MIXED = [" ".join(text.split()[: 1 + i]) for i, text in enumerate(TEXTS)]


@pytest.fixture
def splade(checkpoint: Any, tmp_path: Path) -> Path:
    """A SPLADE checkpoint as anybody may have it: stock throughout."""
    model = stock_model(checkpoint("bert"))
    model.save_pretrained(str(tmp_path / "splade"))
    return tmp_path / "splade"


def stock_model(path: Path, **pooling: Any) -> SparseEncoder:
    return SparseEncoder(modules=[Transformer(str(path), transformer_task="fill-mask"), stock.SpladePooling(**pooling)])


def our_model(path: Path, **pooling: Any) -> SparseEncoder:
    return SparseEncoder(modules=[RescaledMLMTransformer(str(path)), SpladePooling(**pooling)])


def dense(model: SparseEncoder, texts: list[str]) -> torch.Tensor:
    return model.encode(texts, convert_to_sparse_tensor=False, batch_size=4, show_progress_bar=False)


def gradients(model: SparseEncoder, loss: nn.Module) -> dict[str, torch.Tensor]:
    columns = [model.preprocess(list(texts)) for texts in (MIXED[:8], TEXTS[8:])]
    total = sum(loss(columns, None).values())
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("pooling", [{}, {"activation_function": "log1p_relu"}, {"pooling_strategy": "sum"}], ids=str)
def test_every_architecture_gives_the_vectors_of_stock(checkpoint: Any, name: str, pooling: dict[str, str]) -> None:
    ours, theirs = our_model(checkpoint(name), **pooling), stock_model(checkpoint(name), **pooling)
    assert ours[0].hands_over is (name != "esm")  # its bias is added behind the decoder: the logits it is
    torch.testing.assert_close(dense(ours, MIXED), dense(theirs, MIXED), rtol=1e-5, atol=1e-6)


def test_the_logits_never_exist(checkpoint: Any) -> None:
    model = our_model(checkpoint("bert"))
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                shapes.append(tuple(result.shape))
            return result

    with Watch():
        features = model(model.preprocess(MIXED))
    length, width = features["input_ids"].shape[1], model.get_embedding_dimension()
    assert (len(MIXED), length, 32) in shapes  # the watch does see the model's tensors
    assert not [shape for shape in shapes if len(shape) == 3 and shape[-1] == width]
    assert DECODER_INPUT not in features
    assert "token_embeddings" not in features


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "GradCache"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "albert", "roberta"])
def test_a_training_step_has_the_gradients_of_stock(checkpoint: Any, name: str, cached: bool) -> None:
    found = []
    for model in (our_model(checkpoint(name)), stock_model(checkpoint(name))):
        kind, settings = (CachedSpladeLoss, {"mini_batch_size": 3}) if cached else (SpladeLoss, {})
        ranking = SparseMultipleNegativesRankingLoss(model, scale=0.1)
        model.train()
        torch.manual_seed(0)  # dropout is on: GradCache must see the same twice
        found.append(gradients(model, kind(model, ranking, 1e-3, 1e-3, **settings)))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=1e-6 * largest)


def test_gradient_checkpointing_changes_nothing(checkpoint: Any) -> None:
    found = []
    for checkpointed in (False, True):
        model = our_model(checkpoint("bert")).train()
        if checkpointed:
            model[0].model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        found.append(gradients(model, SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), 1e-3, 1e-3)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def squares(model: nn.Module, features: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(features)["sentence_embedding"].square().sum(dim=1).mean()


def half_of_a_step(rank: int, path: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = our_model(Path(path)).eval()
    assert model[0].hands_over
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # the second step too: the reducer is built anew after the first
        parallel.zero_grad()
        squares(parallel, model.preprocess(MIXED[4 * rank : 4 * rank + 4])).backward()
    with written_whole(Path(folder, f"{rank}.pt")) as file:
        torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, file)
    leave_together([Path(folder, f"{rank}.pt") for rank in range(2)])


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(checkpoint: Any, tmp_path: Path) -> None:
    mp.spawn(half_of_a_step, (str(checkpoint("bert")), str(tmp_path)), nprocs=2)
    model = stock_model(checkpoint("bert")).eval()
    model[1].train()  # stock pooling gives no gradient otherwise
    squares(model, model.preprocess(MIXED[:8])).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_tied_matrix_gets_gradient_from_both_ends(checkpoint: Any) -> None:
    model = our_model(checkpoint("bert"))
    matrix = model[0].model.get_input_embeddings().weight
    vectors = model(model.preprocess(["paris"]))["sentence_embedding"]
    term = int(vectors[0].argmax())
    (gradient,) = torch.autograd.grad(vectors[0, term], matrix)
    used = set(model.preprocess(["paris"])["input_ids"][0].tolist())
    assert gradient[term].abs().sum() > 0  # as decoder
    assert all(gradient[id_].abs().sum() > 0 for id_ in used)  # as embedding
    assert {i for i, row in enumerate(gradient) if row.abs().sum() > 0} == used | {term}


def test_copies_hand_over_on_their_own(checkpoint: Any) -> None:
    model = our_model(checkpoint("modernbert"))
    expected = dense(model, MIXED)  # the decoder has handed over before it is copied
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].hands_over
        torch.testing.assert_close(dense(twin, MIXED), expected)


def test_a_compiled_encoder_gives_the_same(checkpoint: Any) -> None:
    model = our_model(checkpoint("bert"))
    expected = dense(model, MIXED)
    for uncompiled in (True, False):  # compiled before and after the decoder has handed over for the first time
        compiled = copy.deepcopy(model) if uncompiled else our_model(checkpoint("bert"))
        compiled[0].model.compile(backend="eager")
        torch.testing.assert_close(dense(compiled, MIXED), expected, rtol=1e-5, atol=1e-6)
        logits = compiled[0].model(**compiled.preprocess(["paris"])).logits  # on its own it still gives logits
        assert logits.shape[-1] == model.get_embedding_dimension()


def test_new_tokens_are_handed_over_too(checkpoint: Any) -> None:
    model = our_model(checkpoint("bert"))
    before = dense(model, MIXED)
    model[0].model.resize_token_embeddings(before.shape[1] + 8)
    after = dense(model, MIXED)
    assert after.shape[1] == before.shape[1] + 8
    torch.testing.assert_close(after[:, :-8], before)


def test_a_stock_neighbour_gets_logits(checkpoint: Any) -> None:
    path = checkpoint("bert")
    expected = dense(stock_model(path), MIXED)
    ours_first = SparseEncoder(modules=[RescaledMLMTransformer(str(path)), stock.SpladePooling()])
    ours_last = SparseEncoder(modules=[Transformer(str(path), transformer_task="fill-mask"), SpladePooling()])
    assert not ours_first[0].hands_over
    for model in (ours_first, ours_last):
        assert torch.equal(dense(model, MIXED), expected)


def test_a_transformer_shared_with_a_stock_pooling_gives_logits(checkpoint: Any) -> None:
    transformer = RescaledMLMTransformer(str(checkpoint("bert")))
    router = Router.for_query_document([transformer, stock.SpladePooling()], [transformer, SpladePooling()])
    model = SparseEncoder(modules=[router])
    assert not transformer.hands_over
    query, document = (encode(MIXED).to_dense() for encode in (model.encode_query, model.encode_document))
    torch.testing.assert_close(query, document)


def test_a_module_put_in_between_fails_rather_than_going_wrong(checkpoint: Any) -> None:
    model = our_model(checkpoint("bert"))
    model[1] = stock.SpladePooling()
    with pytest.raises(
        KeyError, match=r"token_embeddings \(the logits\) never exist .* call .*model\[0\]\.on_model_ready"
    ):
        dense(model, MIXED)
    model[0].on_model_ready(model)
    torch.testing.assert_close(dense(model, MIXED), dense(stock_model(checkpoint("bert")), MIXED))


@pytest.mark.parametrize("masked", [False, True])
def test_fuse_and_unfuse_a_loaded_checkpoint(checkpoint: Any, tmp_path: Path, masked: bool) -> None:
    our_model(checkpoint("bert"), mask_special_tokens=masked).save_pretrained(str(tmp_path / "one"))
    model = SparseEncoder(str(tmp_path / "one"))
    expected, classes = dense(model, MIXED), [type(module) for module in model]
    weights = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}

    assert fuse(model) is model
    assert fuse(model)[0].hands_over
    assert [type(module) for module in model] == [RescaledMLMTransformer, SpladePooling]
    assert model[1].mask_special_tokens is masked
    torch.testing.assert_close(dense(model, MIXED), expected, rtol=1e-5, atol=1e-6)
    model.save_pretrained(str(tmp_path / "two"))
    for file in ("modules.json", "0_Transformer/config.json", "1_SpladePooling/config.json", "config.json"):
        if (tmp_path / "one" / file).exists():
            assert json.loads((tmp_path / "one" / file).read_text()) == json.loads(
                (tmp_path / "two" / file).read_text()
            )

    assert unfuse(model) is model
    assert [type(module) for module in model] == classes
    assert type(model) is SparseEncoder
    assert type(model[0].model.get_output_embeddings()) is nn.Linear
    assert torch.equal(dense(model, MIXED), expected)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == weights[name][0]
        assert torch.equal(value, weights[name][1])


def test_what_is_no_splade_model_is_not_fused(checkpoint: Any) -> None:
    model = SparseEncoder(modules=[stock.SparseStaticEmbedding(tokenizer=our_model(checkpoint("bert")).tokenizer)])
    with pytest.raises(ValueError, match="nothing to fuse in SparseStaticEmbedding"):
        fuse(model)


def test_bfloat16_and_autocast_give_the_precision_of_stock(checkpoint: Any) -> None:
    ours, theirs = our_model(checkpoint("bert")), stock_model(checkpoint("bert"))
    with torch.autocast("cpu", torch.bfloat16):
        one, other = (model(model.preprocess(MIXED))["sentence_embedding"] for model in (ours, theirs))
    assert one.dtype == other.dtype
    torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
    one, other = dense(ours.bfloat16(), MIXED), dense(theirs.bfloat16(), MIXED)
    torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_several_threads_may_encode_at_once(checkpoint: Any) -> None:
    model = our_model(checkpoint("modernbert"))
    expected = dense(model, MIXED[:1])
    with ThreadPoolExecutor(4) as pool:
        for vectors in pool.map(lambda _: dense(model, MIXED[:1]), range(40)):
            torch.testing.assert_close(vectors, expected)


@pytest.mark.slow
def test_order_is_kept_and_memory_does_not_grow(checkpoint: Any) -> None:
    model = our_model(checkpoint("bert"))
    texts = [MIXED[i % len(MIXED)] for i in range(3000)]
    model.encode(texts[:200])
    before = psutil.Process().memory_info().rss
    encoded = model.encode(texts, batch_size=32).coalesce()
    grown = psutil.Process().memory_info().rss - before
    kept = encoded.values().nbytes + encoded.indices().nbytes
    assert grown - kept < 100 * 2**20
    single = model.encode(MIXED).to_dense()
    torch.testing.assert_close(encoded.to_dense()[: len(MIXED)], single)
    torch.testing.assert_close(encoded.to_dense()[-len(MIXED) :], single.roll(-(3000 % len(MIXED)), 0))
