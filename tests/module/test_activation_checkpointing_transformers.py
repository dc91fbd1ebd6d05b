"""Models of `transformers` recompute their layers by their own implementation, which turns off the key-value cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from trainkit import TrainModule
from trainkit.errors import ConfigurationError
from trainkit.module.activation_checkpointing import CheckpointedModules, checkpoint_activations, checkpointing_choice


class Language(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=32,
            attention_dropout=0.2,
        )
        self.model = LlamaForCausalLM(config)
        self.calls = [0, 0, 0]
        for index, layer in enumerate(self.model.model.layers):
            layer.mlp.gate_proj.register_forward_pre_hook(lambda *given, index=index: self.count(index))

    def count(self, index: int) -> None:
        self.calls[index] += torch.is_grad_enabled()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def fit(choice: Any) -> Language:
    module = Language().train()
    make_trainer(max_epochs=1, activation_checkpointing=choice).fit(module, loader(), loader())
    return module


def on(model: nn.Module, value: Any = True) -> CheckpointedModules:
    chosen = checkpointing_choice(value)
    assert chosen is not None
    return checkpoint_activations(model, chosen)


@pytest.fixture(scope="module")
def expected() -> Language:
    return fit(None)


@pytest.mark.parametrize(
    "choice, calls",
    [
        (True, [4, 4, 4]),
        ("selective", [4, 4, 4]),
        ({"every": 2}, [4, 2, 4]),
        ("model.model.layers.1", [2, 4, 2]),
        ("LlamaMLP", [4, 4, 4]),  # not a layer, so its forward is replaced
    ],
)
def test_a_fit(choice: Any, calls: list[int], expected: Language) -> None:
    module = fit(choice)
    assert all(map(torch.equal, module.parameters(), expected.parameters()))
    assert module.calls == calls
    assert not module.model.is_activation_checkpointing
    assert all("forward" not in vars(part) for part in module.modules())
    assert not any(module.model.get_input_embeddings()._forward_hooks)


def test_the_layers_are_named() -> None:
    module = Language()
    result = on(module, {"every": 2})
    assert result.classes == dict.fromkeys(["model.model.layers.0", "model.model.layers.2"], "LlamaDecoderLayer")


def test_a_model_beside_blocks_of_the_user() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=9)
            self.text, self.extra = BertModel(config), nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 1))

        def forward(self, ids: Tensor) -> Tensor:
            return self.extra(self.text(ids).last_hidden_state)

    both = Both()
    result = on(both, ["BertLayer", "extra.0"])
    assert list(result.classes) == ["text.encoder.layer.0", "text.encoder.layer.1", "extra.0"]
    assert "forward" in vars(both.extra[0])
    assert both.text.is_activation_checkpointing
    assert "forward" not in vars(both.text.encoder.layer[0])
    both(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    result.restore()
    assert "forward" not in vars(both.extra[0])
    assert not both.text.is_activation_checkpointing


def test_a_model_that_recomputes_already() -> None:
    module = Language()
    module.model.activation_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM recomputes activations already. Remove one of the two"):
        on(module)


def test_an_error_in_the_second_model_restores_the_first() -> None:
    both = nn.ModuleList([Language().model, Language().model])
    both[1].activation_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="recomputes activations already"):
        on(both, "LlamaDecoderLayer")
    assert not both[0].is_activation_checkpointing
    assert both[1].is_activation_checkpointing


@pytest.mark.parametrize("by_peft", [False, True])
def test_hooks_of_inputs_that_the_user_has_enabled_stay(by_peft: bool) -> None:
    model: Any = Language().model
    model._hf_peft_config_loaded = by_peft  # then transformers removes such hooks when it stops recomputing
    model.enable_input_require_grads()
    (before,) = model.get_input_embeddings()._forward_hooks.values()
    attributes = set(vars(model))
    result = on(model)
    assert list(model.get_input_embeddings()._forward_hooks.values()) == [before]
    result.restore()
    assert list(model.get_input_embeddings()._forward_hooks.values()) == [before]
    assert set(vars(model)) == attributes
    model.disable_input_require_grads()
    assert not model.get_input_embeddings()._forward_hooks


def test_a_plan_counts_what_the_layers_keep_and_leaves_the_model_alone() -> None:
    module, peaks = Language(), []
    module.model.enable_input_require_grads()
    for choice in (None, True):
        made = make_trainer(activation_checkpointing=choice).plan(module, loader(), processes=(1,))
        assert made.untraced == ""
        peaks.append(made.rows[0].footprint.moments["backward"].device.activations)
    assert peaks[1] < 0.6 * peaks[0]
    assert not module.model.is_activation_checkpointing
    assert len(module.model.get_input_embeddings()._forward_hooks) == 1


@pytest.fixture
def _no_graphs_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("choice", [True, pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_no_graphs_left")
# torch's tracer reads .grad of the input of a block
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers(choice: Any) -> None:
    eager = Language().train()
    compiled = copy.deepcopy(eager)
    on(compiled, choice)
    for layer in compiled.model.model.layers:
        layer.mlp.gate_proj._forward_pre_hooks.clear()
        layer.compile(backend="aot_eager", fullgraph=True)
    for module in (eager, compiled):
        torch.manual_seed(2)
        module.training_step(next(iter(loader())), 0).backward()
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
