"""The head is found by rule on every architecture, checked by numbers, and refused with a reason where it is odd."""

from __future__ import annotations

import copy
import doctest
import importlib.util
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
    ModernBertForMaskedLM,
    PerceiverConfig,
    PerceiverForMaskedLM,
    PreTrainedModel,
)

from st_sparse_rescale import heads
from st_sparse_rescale.heads import MLMHead, UnsupportedHeadError, agree, probe
from tests.tiny_models import ARCHITECTURES, HIDDEN_SIZE, build_model, randomize

BERT_LIKE = ("cls.predictions.decoder", "cls.predictions.decoder.bias", "cls.predictions.transform.LayerNorm")
ROBERTA_LIKE = ("lm_head.decoder", "lm_head.decoder.bias", "lm_head.layer_norm")
MODERNBERT_LIKE = ("decoder", "decoder.bias", "head.norm")
NAMES = {
    "bert": BERT_LIKE,
    "distilbert": ("vocab_projector", "vocab_projector.bias", "vocab_layer_norm"),
    "albert": ("predictions.decoder", "predictions.decoder.bias", "predictions.LayerNorm"),
    "roberta": ROBERTA_LIKE,
    "xlm-roberta": ROBERTA_LIKE,
    "camembert": ROBERTA_LIKE,
    "gte": ROBERTA_LIKE,
    "modernbert": MODERNBERT_LIKE,
    "ettin": MODERNBERT_LIKE,
    "mmbert": MODERNBERT_LIKE,
    "deberta-v2": BERT_LIKE,
    "mpnet": ROBERTA_LIKE,
    "electra": ("generator_lm_head", "generator_lm_head.bias", "generator_predictions.LayerNorm"),
    "nomic-bert": (*BERT_LIKE[:2], "cls.predictions.transform.layer_norm"),
    "eurobert": ("lm_head", None, "model.norm"),
    "esm": ("lm_head.decoder", "lm_head.bias", "lm_head.layer_norm"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_finds_the_head_of_every_architecture(name: str) -> None:
    model = build_model(name)
    head = MLMHead.of(model)
    assert (head.decoder_name, head.bias_name, head.norm_name) == NAMES[name]
    assert head.decoder is model.get_output_embeddings()
    assert head.bias is (model.get_parameter(head.bias_name) if head.bias_name else None)
    assert head.norm is model.get_submodule(head.norm_name)
    assert head.tied is (name != "eurobert")
    assert head.vocab_size == model.config.vocab_size
    assert len(repr(head)) < 250  # names, not a vocabulary of numbers
    assert head.hidden_size == (16 if name in ("albert", "electra") else HIDDEN_SIZE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_finds_the_same_head_in_other_precisions(name: str, dtype: torch.dtype) -> None:
    head = MLMHead.of(build_model(name).to(dtype))
    assert (head.decoder_name, head.bias_name, head.norm_name) == NAMES[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_head_computes_the_logits(name: str) -> None:
    model = build_model(name).double()
    head = MLMHead.of(model)
    seen: list[Tensor] = []
    ids = torch.randint(10, 200, (3, 17), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with head.decoder.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    expected = seen[0] @ head.decoder.weight.T + (0 if head.bias is None else head.bias)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.logits(seen[0]), expected, rtol=1e-12, atol=1e-12)


def test_leaves_the_model_as_it_was() -> None:
    model = build_model("bert").train()
    model.bert.eval()  # modes may be mixed
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # must not disturb the numbers either
        MLMHead.of(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(module, kind) for module in model.modules() for kind in hooks)


def test_is_left_alone_and_refused_when_its_forward_fails() -> None:
    model = build_model("bert").train()
    model.cls.forward = None  # not callable
    with pytest.raises(UnsupportedHeadError, match=r"BertForMaskedLM.*does not run on token ids alone"):
        MLMHead.of(model)
    assert model.training
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_finds_a_bias_of_zeros_outside_the_decoder() -> None:
    model = build_model("esm")
    with torch.no_grad():
        model.lm_head.bias.zero_()
    assert MLMHead.of(model).bias_name == "lm_head.bias"


def test_is_not_fooled_by_a_bias_that_nothing_adds() -> None:
    model = build_model("bert", tie_word_embeddings=False)
    unused, used = model.cls.predictions.bias, model.cls.predictions.decoder.bias
    assert unused is not used
    assert MLMHead.of(model).bias is used


def test_finds_no_bias_where_there_is_none() -> None:
    model = build_model("modernbert", decoder_bias=False)
    assert MLMHead.of(model).bias is None


def test_tied_is_a_matter_of_memory_not_of_config() -> None:
    model = build_model("bert")
    model.config.tie_word_embeddings = False
    assert MLMHead.of(model).tied
    decoder = model.get_output_embeddings()
    decoder.weight = nn.Parameter(decoder.weight.detach().clone())
    model.config.tie_word_embeddings = True
    assert not MLMHead.of(model).tied


class Scaled(nn.Module):
    """Multiply what comes out of a norm, between it and the decoder."""

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = norm, factor

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states) * self.factor


class OnePlusWeight(nn.Module):
    """A norm whose output is not proportional to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((HIDDEN_SIZE,), 0.3))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.rms_norm(states, (HIDDEN_SIZE,)) * (1 + self.weight)


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(HIDDEN_SIZE, elementwise_affine=False), OnePlusWeight(), Scaled(nn.LayerNorm(HIDDEN_SIZE), 1.5)],
    ids=["without a weight", "one plus weight", "scaled afterwards"],
)
def test_norms_that_do_not_scale_the_decoders_input_are_no_norms(norm: nn.Module) -> None:
    model = build_model("modernbert")
    model.head.norm = norm
    head = MLMHead.of(model)
    assert (head.norm, head.norm_name) == (None, None)
    assert head.decoder_name == "decoder"


def test_finds_the_norm_through_a_reshape_and_a_copy() -> None:
    class Roundabout(nn.LayerNorm):
        def forward(self, states: Tensor) -> Tensor:
            return super().forward(states).view(-1, HIDDEN_SIZE).clone()

    model = build_model("modernbert")
    model.head.norm = Roundabout(HIDDEN_SIZE)
    model.head.register_forward_hook(lambda module, args, output: output.reshape(args[0].shape).clone())
    assert MLMHead.of(model).norm_name == "head.norm"


# --- refusals


class LogitsScaled(BertForMaskedLM):
    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output


class LogitsCapped(BertForMaskedLM):
    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output


class BiasTwice(BertForMaskedLM):
    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.cls.predictions.bias
        return output


@pytest.mark.parametrize("odd", [LogitsScaled, LogitsCapped, BiasTwice])
def test_refuses_logits_that_are_not_the_decoders(odd: type[BertForMaskedLM]) -> None:
    model = randomize(odd(build_model("bert").config))
    with pytest.raises(
        UnsupportedHeadError, match=rf"{odd.__name__}.*logits are not what enters cls.predictions.decod"
    ):
        MLMHead.of(model)


def test_refuses_an_encoder_by_name() -> None:
    encoder = AutoModel.from_config(build_model("bert").config)
    with pytest.raises(UnsupportedHeadError, match=r"BertModel.*no MLM head.*Load a masked language model"):
        MLMHead.of(encoder)


SMALL = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: BartForConditionalGeneration(BartConfig(**SMALL)), "BartForConditionalGeneration.*encoder-decoder"),
        (
            lambda: MobileBertForMaskedLM(
                MobileBertConfig(
                    vocab_size=60,
                    hidden_size=32,
                    embedding_size=16,
                    intra_bottleneck_size=16,
                    intermediate_size=32,
                    num_hidden_layers=1,
                )
            ),
            "MobileBertForMaskedLM.*calls its output embeddings 0 times",
        ),
        (
            lambda: PerceiverForMaskedLM(
                PerceiverConfig(num_latents=4, d_latents=32, d_model=32, num_self_attends_per_block=1)
            ),
            "PerceiverForMaskedLM.*names none",
        ),
        (lambda: build_model("deberta-v2-new-head"), "DebertaV2ForMaskedLM.*lm_head.dense.*do not give its logits"),
        (lambda: build_model("bert").to("meta"), "BertForMaskedLM.*meta device"),
        (lambda: nn.Linear(3, 4), "Linear.*not a transformers model"),
    ],
    ids=["encoder-decoder", "mobilebert", "perceiver", "deberta-v2", "meta", "not transformers"],
)
def test_refuses_with_the_reason(build: object, reason: str) -> None:
    with pytest.raises(UnsupportedHeadError, match=reason):
        MLMHead.of(build())


def test_refuses_an_exported_graph() -> None:
    class ORTModelForMaskedLM:  # optimum's is no nn.Module either
        config = build_model("bert").config

    with pytest.raises(UnsupportedHeadError, match=r"ORTModelForMaskedLM.*not a PyTorch model.*export that"):
        MLMHead.of(ORTModelForMaskedLM())


def test_refuses_quantised_weights() -> None:
    model = build_model("bert")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(UnsupportedHeadError, match=r"BertForMaskedLM.*quantised.*unquantised checkpoint"):
        MLMHead.of(model)

    model = build_model("bert", tie_word_embeddings=False)  # quantised by other means: integers in the decoder
    decoder = model.get_output_embeddings()
    decoder.weight = nn.Parameter(decoder.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedHeadError, match=r"cls\.predictions\.decoder, is computed or quantised"):
        MLMHead.of(model)

    class PackedLinear(nn.Module):
        """Quantised matrices are often held by modules that are no Linear."""

    model = build_model("modernbert")
    model.set_output_embeddings(PackedLinear())
    with pytest.raises(UnsupportedHeadError, match="PackedLinear, not a Linear of the model"):
        MLMHead.of(model)


def test_refuses_a_computed_weight() -> None:
    model = build_model("bert", tie_word_embeddings=False)
    torch.nn.utils.parametrizations.weight_norm(model.get_output_embeddings())
    with pytest.raises(UnsupportedHeadError, match="is computed or quantised, not a float parameter"):
        MLMHead.of(model)


def test_refuses_an_adapter_on_the_decoder_but_not_on_the_backbone() -> None:
    peft = pytest.importorskip("peft")
    model = build_model("modernbert")
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["Wqkv"], r=2))
    assert MLMHead.of(wrapped.get_base_model()).norm_name == "head.norm"
    assert MLMHead.of(wrapped).norm_name == "base_model.model.head.norm"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["decoder"], r=2))
    with pytest.raises(UnsupportedHeadError, match="not a Linear of the model"):
        MLMHead.of(wrapped.get_base_model())


# --- code of the checkpoint's own

REMOTE_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput


class NewConfig(PretrainedConfig):
    model_type = "new"

    def __init__(self, vocab_size=80, hidden_size=32, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class NewLMHead(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states):
        return self.decoder(self.norm(nn.functional.gelu(self.dense(hidden_states))))


class NewForMaskedLM(PreTrainedModel):
    config_class = NewConfig
    base_model_prefix = "new"
    _tied_weights_keys = {"lm_head.decoder.weight": "embeddings.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixer = nn.Linear(config.hidden_size, config.hidden_size)
        self.lm_head = NewLMHead(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def get_output_embeddings(self):
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings):
        self.lm_head.decoder = new_embeddings

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embeddings(input_ids)
        hidden_states = hidden_states + self.mixer(hidden_states).mean(dim=1, keepdim=True)
        return MaskedLMOutput(logits=self.lm_head(hidden_states))
"""


@pytest.fixture
def remote_code_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A masked LM whose class comes with its checkpoint, as the GTE models of the hub do."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_new.py").write_text(textwrap.dedent(REMOTE_CODE))
    (folder / "config.json").write_text(
        '{"model_type": "new", "vocab_size": 80, "hidden_size": 32, "tie_word_embeddings": true, "auto_map": '
        '{"AutoConfig": "modeling_new.NewConfig", "AutoModelForMaskedLM": "modeling_new.NewForMaskedLM"}}'
    )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForMaskedLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)


def test_finds_the_head_of_a_checkpoint_with_its_own_code(remote_code_model: PreTrainedModel) -> None:
    assert type(remote_code_model).__module__.startswith("transformers_modules.")
    head = MLMHead.of(randomize(remote_code_model))
    assert (head.decoder_name, head.bias_name) == ("lm_head.decoder", "lm_head.decoder.bias")
    assert head.norm_name == "lm_head.norm"
    assert head.tied


# --- the probe


def test_the_probe_is_the_same_in_every_call_and_avoids_special_ids() -> None:
    model = build_model("esm")  # whose mask token changes the embeddings of all others
    seen: list[Tensor] = []
    with model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        first, second = (probe(model, model.get_output_embeddings()) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(seen[0], seen[1])
    config = model.config
    special = {config.pad_token_id, config.mask_token_id, config.bos_token_id, config.eos_token_id}
    assert not special & set(seen[0].flatten().tolist())
    assert len(seen[0].unique()) > 10


def test_agreement_is_never_with_nan() -> None:
    assert agree(torch.ones(3), torch.ones(3) + 1e-6)
    assert not agree(torch.ones(3), torch.ones(3) + 1e-2)
    assert not agree(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))


# --- the page


@pytest.fixture(scope="module")
def head_matrix() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "head_matrix.py"
    spec = importlib.util.spec_from_file_location("head_matrix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_for_deberta_keeps_the_logits(
    head_matrix: ModuleType, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = re.search(r"```python\n(.*?)```", head_matrix.DEBERTA, re.DOTALL)[1]
    here = {"microsoft/deberta-v3-base": checkpoint("deberta-v2-new-head"), "deberta-v3-base-legacy": tmp_path}
    for name, path in here.items():
        assert f'"{name}"' in recipe
        recipe = recipe.replace(f'"{name}"', f'"{path}"')
    exec(recipe, {})
    converted, report = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    ids = torch.randint(10, 200, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(
            converted.eval()(ids).logits, build_model("deberta-v2-new-head")(ids).logits, rtol=1e-5, atol=1e-5
        )
    assert MLMHead.of(converted).decoder_name == "cls.predictions.decoder"


@pytest.mark.slow
def test_the_page_of_architectures_is_what_the_code_says(head_matrix: ModuleType) -> None:
    committed = head_matrix.PAGE.read_text(encoding="utf-8")
    written_for = re.search(r"transformers ([\w.]+),", committed)[1]
    if written_for != transformers.__version__:
        pytest.skip(f"the page was written for transformers {written_for}; `make matrix` writes it anew")
    rows = list(head_matrix.rows())
    assert head_matrix.page(rows) == committed
    assert not [row for row in rows if row.weight == "not built"]


def test_the_matrix_reports_what_cannot_be_built(head_matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head_matrix.OVERRIDES, "modernbert", {"num_attention_heads": 5})
    row = head_matrix.try_class(ModernBertForMaskedLM.config_class)
    assert row.weight == row.norm == "not built"
    assert row.reason


def test_the_examples_run() -> None:
    results = doctest.testmod(heads)
    assert results.attempted > 3
    assert results.failed == 0
