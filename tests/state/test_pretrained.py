"""transformers and PEFT models: the configuration saved with their weights, and adapters saved without the base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import differences, restore_model, restore_optimizer, stored, through_json, unchanged
from torch import Tensor, nn

from trainkit.errors import StateMismatchError, UnsavableError
from trainkit.optim.parameter_names import parameter_names
from trainkit.state.model import capture_model, fingerprint_frozen
from trainkit.state.optimizer import capture_optimizer
from trainkit.state.pretrained import has_adapters

WHAT = "the checkpoint step-4"

# PEFT uses an attribute of transformers that has been renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[1, 2, 3, 4]])


def gpt2(seed: int = 0, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config).eval()


def lora(seed: int = 0, base: int = 0, name: str = "default") -> Any:
    peft = pytest.importorskip("peft")
    model = gpt2(base)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(model, config, adapter_name=name)


class Holder(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


# -------------------------------------------------------------------------------------------------------- transformers


def test_a_checkpoint_of_a_transformers_model_opens_with_from_pretrained(run_dir: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = gpt2()
    state = capture_model(model)
    assert state.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert list(state.configs) == [""]
    assert state.configs[""]["kind"] == "transformers"
    safetensors.save_file(state.tensors, run_dir / "model.safetensors", metadata={"format": "pt"})
    (run_dir / "config.json").write_text(json.dumps(state.configs[""]["config"]))
    (run_dir / "generation_config.json").write_text(json.dumps(state.configs[""]["generation_config"]))
    opened, info = type(model).from_pretrained(run_dir, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert differences(dict(model.state_dict()), dict(opened.state_dict())) == []
    assert torch.equal(model(IDS).logits, opened.eval()(IDS).logits)
    automatic = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(run_dir)
    assert type(automatic) is type(model)


def test_its_configuration_is_what_save_pretrained_writes(run_dir: Path) -> None:
    model = gpt2()
    described = capture_model(model).configs[""]
    model.save_pretrained(run_dir)
    written = json.loads((run_dir / "config.json").read_text())
    assert described["config"] == written
    assert described["generation_config"] == json.loads((run_dir / "generation_config.json").read_text())


def test_a_model_in_a_module_and_one_compiled_have_their_path() -> None:
    # the key of a configuration is the path of the model in the module, without the prefix of torch.compile
    module = Holder(torch.compile(gpt2(), backend="eager"))
    state = capture_model(module)
    assert list(state.configs) == ["net"]
    assert "net.transformer.wte.weight" in state.tensors
    other = Holder(gpt2(1))
    assert restore_model(other, stored(module), what=WHAT) == []
    assert torch.equal(other.net(IDS).logits, module.net(IDS).logits)


def test_a_configuration_that_is_not_json_is_named() -> None:
    model = gpt2()
    model.config.helper = object()
    with pytest.raises(UnsavableError, match=r"net \(GPT2LMHeadModel\) cannot be written as JSON"):
        capture_model(Holder(model))


def test_an_untied_model_gets_both_values() -> None:
    state = stored(gpt2())
    other = gpt2(1, tie_word_embeddings=False)
    notices = restore_model(other, state, what=WHAT)
    assert notices == [
        "lm_head.weight was tied to transformer.wte.weight when saved, but is not tied in this model: both got the same values"
    ]
    assert torch.equal(other.lm_head.weight, state.tensors["transformer.wte.weight"])


def test_other_modules_have_no_configuration() -> None:
    module = nn.Linear(1, 1)
    module.config = {"to_dict": 1}  # type: ignore[assignment]
    assert capture_model(Holder(module)).configs == {}
    assert not has_adapters(Holder(module))


# ---------------------------------------------------------------------------------------------------------------- PEFT


def test_adapters_are_found() -> None:
    assert not has_adapters(gpt2())
    assert has_adapters(lora())
    assert has_adapters(Holder(lora()))
    model = gpt2()
    model.add_adapter(pytest.importorskip("peft").LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert has_adapters(model)
    described = capture_model(model).configs[""]
    assert described["kind"] == "transformers"
    assert described["adapters"]["default"]["target_modules"] == ["c_attn"]


def test_only_trained_parameters_are_stored_and_restored() -> None:
    module = Holder(lora(name="mine"))
    state = stored(module, "trainable")
    assert state.tensors
    assert all("lora_" in name for name in state.tensors)
    assert len(state.trained) > len(state.tensors)
    assert state.configs["net"]["kind"] == "peft"
    assert state.configs["net"]["config"]["mine"]["r"] == 2
    assert state.configs["net.base_model.model"]["kind"] == "transformers"
    json.dumps(state.configs, allow_nan=False)
    other = Holder(lora(seed=1, name="mine"))
    assert not torch.equal(other.net(IDS).logits, module.net(IDS).logits)
    assert restore_model(other, state, what=WHAT) == []
    assert torch.equal(other.net(IDS).logits, module.net(IDS).logits)


def test_its_configuration_opens_with_peft(run_dir: Path) -> None:
    module = lora()
    config = capture_model(module).configs[""]["config"]["default"]
    (run_dir / "adapter_config.json").write_text(json.dumps(config))
    opened = pytest.importorskip("peft").PeftConfig.from_pretrained(str(run_dir))
    assert opened.r == 2
    assert set(opened.target_modules) == {"c_attn"}


def test_a_mixed_model_is_described_and_restored() -> None:
    peft = pytest.importorskip("peft")

    def mixed(seed: int) -> Any:
        model = gpt2()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        return peft.PeftMixedModel(model, config)

    state, other = stored(mixed(0), "trainable"), mixed(1)
    assert state.configs[""]["config"]["default"]["r"] == 2
    assert restore_model(other, state, what=WHAT) == []
    assert torch.equal(other(IDS).logits, mixed(0)(IDS).logits)


def test_another_base_is_refused() -> None:
    state = stored(lora(), "trainable")
    other = lora(base=1)
    with unchanged(other), pytest.raises(StateMismatchError, match="of a model with another base"):
        restore_model(other, state, what=WHAT)
    half = lora().to(torch.bfloat16)
    with unchanged(half), pytest.raises(StateMismatchError, match=r"another base: .*\(dtype bfloat16\).*in the same dtype"):
        restore_model(half, state, what=WHAT)
    assert restore_model(other, stored(lora(), "all"), what=WHAT) == []


def test_trained_parameters_must_exist() -> None:
    state = stored(lora(), "trainable")
    gone = next(iter(state.tensors))
    del state.tensors[gone]
    other = lora(seed=1)
    with unchanged(other), pytest.raises(StateMismatchError) as caught:
        restore_model(other, state, what=WHAT)
    assert f"missing in the checkpoint (1): {gone}" in str(caught.value)
    with unchanged(other), pytest.raises(StateMismatchError, match="unexpected in the checkpoint"):
        restore_model(other, stored(lora(name="second"), "trainable"), what=WHAT)


def test_optimizer_state_of_adapters() -> None:
    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = lora(seed)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    (model, optimizer), (other, resumed) = make(0), make(1)
    step(model, optimizer)
    state, own = stored(model, "trainable"), capture_optimizer(optimizer, 0, parameter_names([model]))
    restore_model(other, state, what=WHAT)
    dtypes = {name: t.dtype for name, t in state.tensors.items()}
    described, names = through_json(own.described), parameter_names([other])
    restore_optimizer(resumed, 0, names, {k: t.clone() for k, t in own.tensors.items()}, described, dtypes, WHAT)
    assert [step(model, optimizer) for _ in range(2)] == [step(other, resumed) for _ in range(2)]


# -------------------------------------------------------------------------------------------------------- frozen bases


def frozen(value: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    module[0].requires_grad_(False)
    module[0].weight.data.fill_(value)
    return module


def test_buffers_of_a_frozen_base_are_stored() -> None:
    names = set(stored(frozen(), "trainable").tensors)
    assert names == {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias"}


def test_a_fingerprint_tells_names_dtypes_shapes_and_bits_apart() -> None:
    def of(**tensors: Tensor) -> str:
        return fingerprint_frozen(nn.ParameterDict(tensors).requires_grad_(False))

    base = of(a=torch.zeros(2, 3), b=torch.ones(()))
    assert base == of(b=torch.ones(()), a=torch.zeros(3, 2).t())
    different = [
        of(a=torch.zeros(3, 2), b=torch.ones(())),
        of(a=torch.zeros(2, 3, dtype=torch.int32).view(torch.float32), b=-torch.ones(())),
        of(a=torch.zeros(2, 3).to(torch.float64), b=torch.ones(())),
        of(c=torch.zeros(2, 3), b=torch.ones(())),
        of(a=torch.zeros(2, 3)),
        of(),
    ]
    assert len({base, *different}) == 7
    trained = frozen()
    before = fingerprint_frozen(trained)
    trained[2].weight.data.fill_(9.0)
    assert fingerprint_frozen(trained) == before == fingerprint_frozen(torch.nn.parallel.DataParallel(frozen()))
    assert fingerprint_frozen(frozen(2.0)) != before


def test_a_known_fingerprint_is_not_computed_again() -> None:
    assert capture_model(frozen(), "trainable", fingerprint="known").fingerprint == "known"
    assert capture_model(frozen()).fingerprint is None


def test_what_was_unfrozen_is_stored_and_unfrozen_again() -> None:
    module, other = frozen(), frozen()
    for parameter in module[0].parameters():
        parameter.requires_grad_(True)
    module[0].weight.data.fill_(5.0)
    module[2].bias.requires_grad_(False)
    state = stored(module, "trainable")
    assert "0.weight" in state.tensors
    assert "2.bias" not in state.tensors
    assert set(restore_model(other, state, what=WHAT)) == {
        "requires_grad of 2 parameters was set to True, as in the checkpoint",
        "requires_grad of 1 parameter was set to False, as in the checkpoint",
    }
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in module.parameters()]
    assert torch.equal(other[0].weight, module[0].weight)
