"""`trainkit checkpoint export`: folders that transformers and PEFT open, compared with those that they write themselves."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.trainers import same
from safetensors.torch import load_file
from torch import nn

from trainkit import TrainModule
from trainkit.cli.main import main

transformers = pytest.importorskip("transformers")

# PEFT still uses the old name of an attribute of transformers
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type .*RMSNorm:UserWarning"),
]


class Held(TrainModule):
    """A module whose attribute is a model of another library."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.probe = nn.Linear(2, 2)
        self.net = net


def gpt2(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1, pad_token_id=2, **options
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def t5(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **options
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def bert() -> Any:
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return transformers.BertForSequenceClassification(config).eval()


MODELS = {
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama": lambda: llama(tie_word_embeddings=False),
    "t5": t5,
    "bert": bert,
}


def export(*arguments: object) -> int:
    return main(["checkpoint", "export", *map(str, arguments)])


def opened(model: Any, folder: Path, **options: Any) -> Any:
    """Load the model from a folder, which must contain all of its weights."""
    again, about = type(model).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), about
    return again.eval()


def equal(first: nn.Module, second: nn.Module) -> bool:
    return same(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_held_as_an_attribute(name: str, save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = MODELS[name](), tmp_path / "out"
    assert export(save(Held(model)), out, "--attribute", "net") == 0
    assert f"Wrote {out}: transformers, " in capsys.readouterr().out
    again = opened(model, out)
    assert equal(again, model)
    assert type(transformers.AutoConfig.from_pretrained(out)) is type(model.config)
    model.save_pretrained(tmp_path / "theirs")
    # tied tensors are written once, as in transformers
    assert set(load_file(out / "model.safetensors")) == set(load_file(tmp_path / "theirs" / "model.safetensors"))
    generates = model.can_generate()
    assert (out / "generation_config.json").exists() == generates
    if generates and "t5" not in name:
        tokens = torch.tensor([[3, 4, 5]])
        assert again.generate(tokens, max_new_tokens=4, do_sample=False).equal(
            model.generate(tokens, max_new_tokens=4, do_sample=False)
        )


def test_the_format_of_a_model_is_detected(save: Any, tmp_path: Path) -> None:
    model = gpt2()
    assert export(save(model), tmp_path / "out") == 0
    assert equal(opened(model, tmp_path / "out"), model)
    assert export(save(model, name="again"), tmp_path / "plain", "--format", "safetensors") == 0
    assert sorted(os.listdir(tmp_path / "plain")) == ["model.safetensors", "trainkit_export.json"]


def test_a_module_with_a_model_is_exported_as_safetensors_with_a_hint(
    save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(save(Held(gpt2())), tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "net is a transformers model; to export it in that format: --attribute net" in shown
    assert "probe.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert export(save(Held(gpt2()), name="b"), tmp_path / "b-out", "--format", "transformers") == 2
    assert "it contains net. Fix: --attribute net" in capsys.readouterr().err


def test_tied_parameters_of_the_user(save: Any, tmp_path: Path) -> None:
    """transformers does not know of these ties, so the tensor must be written under each of its names."""
    model = gpt2(tie_word_embeddings=False)
    model.lm_head.weight = model.transformer.wte.weight
    assert export(save(Held(model)), tmp_path / "a", "--attribute", "net") == 0
    assert equal(opened(model, tmp_path / "a"), model)
    held = Held(gpt2())
    held.probe = nn.Linear(16, 64, bias=False)  # comes first, so the checkpoint stores the embedding under this name
    held.probe.weight = held.net.transformer.wte.weight
    assert export(save(held, name="b"), tmp_path / "b-out", "--attribute", "net") == 0
    assert equal(opened(held.net, tmp_path / "b-out"), held.net)


def test_without_transformers_nothing_is_lost(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    path = save(Held(model))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert export(path, tmp_path / "out", "--attribute", "net") == 0
    monkeypatch.undo()
    assert equal(opened(model, tmp_path / "out"), model)


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_another_dtype(save: Any, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = gpt2()
    assert export(save(Held(model)), tmp_path / "out", "--attribute", "net", "--dtype", name) == 0
    again = opened(model, tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    assert equal(again, model.to(dtype))


def test_several_files(save: Any, tmp_path: Path) -> None:
    model = gpt2()
    assert export(save(Held(model)), tmp_path / "out", "--attribute", "net", "--max-shard-size", "8KB") == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert equal(opened(model, tmp_path / "out"), model)


def test_missing_weights(save: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    assert export(save(Held(model), save="trainable"), tmp_path / "out", "--attribute", "net") == 2
    assert "transformers would initialize them at random. Fix:" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["ck"]


# ----------------------------------------------------------------------------------------------------------------- PEFT


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def adapted(peft: Any, method: str, base: Any = llama, **options: Any) -> Any:
    """A PEFT model in which every adapter parameter has its own value."""
    torch.manual_seed(2)
    targets = {} if method in ("LNTuningConfig", "TrainableTokensConfig") else {"target_modules": ["q_proj", "v_proj"]}
    config = getattr(peft, method)(**{"task_type": "CAUSAL_LM", **targets, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base(), config)
    _change(model)
    return model


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("LoraConfig", {}),
    ("LoraConfig", {"bias": "all"}),
    ("LoraConfig", {"bias": "lora_only"}),
    ("LoraConfig", {"use_dora": True}),
    ("LoraConfig", {"modules_to_save": ["lm_head", "norm"]}),
    ("LoraConfig", {"trainable_token_indices": [1, 5]}),
    ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("LoHaConfig", {}),
    ("LoKrConfig", {}),
    ("OFTConfig", {"oft_block_size": 4, "r": 0}),
    ("HRAConfig", {"r": 2}),
    ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    ("FourierFTConfig", {"n_frequency": 10}),
    ("C3AConfig", {"block_size": 8}),
    ("RoadConfig", {"variant": "road_1", "group_size": 2}),
    ("MissConfig", {"r": 2}),
    ("TrainableTokensConfig", {"token_indices": [1, 5], "target_modules": ["embed_tokens"]}),
]


@pytest.mark.parametrize("method, options", METHODS, ids=[f"{m}-{'-'.join(o)}" for m, o in METHODS])
@pytest.mark.parametrize("mode", ["all", "trainable"])
def test_an_adapter_is_what_peft_writes(
    method: str, options: dict[str, Any], mode: str, save: Any, tmp_path: Path, peft: Any
) -> None:
    biased = "bias" in options
    base = (lambda: llama(attention_bias=True, mlp_bias=True)) if biased else llama
    model, out = adapted(peft, method, base, **options), tmp_path / "out"
    assert export(save(Held(model), save=mode), out, "--attribute", "net") == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, tmp_path / "theirs"))
    assert same(dict(sorted(ours.items())), dict(sorted(theirs.items())))
    config, reference = (json.loads((f / "adapter_config.json").read_text()) for f in (out, tmp_path / "theirs"))
    for values in (config, reference):  # sets, which have no order
        values.update({key: sorted(value) for key, value in values.items() if isinstance(value, list)})
    assert config == reference
    again = peft.PeftModel.from_pretrained(base(), out)  # warns if a key is missing
    assert equal(again.eval(), model.eval())


def test_an_adapter_of_a_plain_module(save: Any, tmp_path: Path, peft: Any) -> None:
    def base() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    model = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["0"], modules_to_save=["2"]))
    _change(model)
    assert export(save(Held(model), save="trainable"), tmp_path / "out", "--attribute", "net") == 0
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "out")
    assert equal(again, model)


def test_several_adapters_have_the_folders_of_peft(
    save: Any, tmp_path: Path, peft: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = adapted(peft, "LoraConfig"), tmp_path / "out"
    model.add_adapter("other", peft.LoraConfig(target_modules=["k_proj"], r=2, task_type="CAUSAL_LM"))
    model.set_adapter("other")
    _change(model)
    assert export(save(Held(model)), out, "--attribute", "net") == 0
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        "adapter_config.json", "adapter_model.safetensors", "other/adapter_config.json", "other/adapter_model.safetensors",
        "trainkit_export.json",
    ]  # fmt: skip
    again = peft.PeftModel.from_pretrained(llama(), out)
    again.load_adapter(out / "other", "other")
    assert equal(again, model)
    # if only trained parameters are saved, the other adapter is missing
    capsys.readouterr()
    assert export(save(Held(model), save="trainable", name="b"), tmp_path / "b-out", "--attribute", "net") == 0
    assert "the adapter 'default' was frozen and is not in the checkpoint" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "b-out")) == ["other", "trainkit_export.json"]


def test_adapters_added_by_transformers(save: Any, tmp_path: Path, peft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    _change(model)
    path = save(Held(model))
    assert export(path, tmp_path / "out", "--attribute", "net") == 0
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    tokens = torch.tensor([[3, 4, 5]])
    assert again.eval()(tokens).logits.equal(model.eval()(tokens).logits)
    assert export(path, tmp_path / "base", "--attribute", "net", "--format", "transformers") == 2
    assert "has PEFT adapters, which the transformers format does not support. Fix: --format peft" in capsys.readouterr().err


def test_the_base_model_inside_a_peft_model(save: Any, tmp_path: Path, peft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers does not know the parameter names inside a PEFT model, and would initialize them at random."""
    path = save(Held(adapted(peft, "LoraConfig")))
    inner = ["--attribute", "net.base_model.model"]
    assert export(path, tmp_path / "out", *inner, "--format", "transformers") == 2
    assert "the base model inside a PEFT model (net), which contains adapters. Fix:" in capsys.readouterr().err
    assert export(path, tmp_path / "out", *inner) == 0
    assert capsys.readouterr().out.startswith(f"Wrote {tmp_path / 'out'}: safetensors")
    path = save(adapted(peft, "LoraConfig"), name="own")
    assert export(path, tmp_path / "own-out", "--attribute", "base_model.model", "--format", "transformers") == 2
    assert export(path, tmp_path / "own-out") == 0
    assert (tmp_path / "own-out" / "adapter_config.json").exists()


def test_an_incomplete_adapter(save: Any, tmp_path: Path, peft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted(peft, "LoraConfig")
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    assert export(save(Held(model), save="trainable"), tmp_path / "out", "--attribute", "net") == 2
    assert "2 frozen ones of the adapter 'default' are missing (" in capsys.readouterr().err
    assert export(save(Held(model), name="whole"), tmp_path / "out", "--attribute", "net") == 0


def test_a_method_that_only_peft_knows(save: Any, tmp_path: Path, peft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert export(save(Held(model)), tmp_path / "out", "--attribute", "net") == 2
    assert "PROMPT_TUNING cannot be exported" in capsys.readouterr().err
    assert export(save(Held(llama()), name="plain"), tmp_path / "out", "--attribute", "net", "--format", "peft") == 2
    assert "expected a PEFT model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
