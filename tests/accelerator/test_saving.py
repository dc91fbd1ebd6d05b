"""`Accelerator.save`, `get_state_dict` and `save_model`. `tests/checkpoint/test_plain_files.py` tests the file format."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.trainers import same
from helpers.worlds.worlds import run_world, start_world
from safetensors.torch import load_file
from torch import nn

from trainkit import Accelerator, Strategy
from trainkit.accelerator.checkpointing import Saving
from trainkit.errors import CollectiveError, ConfigurationError, UnsavableError
from trainkit.strategies import ZeROStrategy
from trainkit.utils import load, load_checkpoint_in_model


def test_save() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save(model.state_dict(), "weights.safetensors")
    assert same(load_file("weights.safetensors"), model.state_dict())
    accelerator.save({"epoch": 3, "best": (0.5, "a")}, Path("folder/best.json"), True)
    assert load("folder/best.json") == {"epoch": 3, "best": (0.5, "a")}
    with pytest.raises(UnsavableError, match="it is a module .*store its state_dict"):
        accelerator.save({"model": model}, "model")
    with pytest.raises(ConfigurationError, match=r"safe_serialization=False\) writes torch's format, and one.safetensors"):
        accelerator.save(1, "one.safetensors", safe_serialization=False)
    with pytest.raises(ConfigurationError, match="f must be the path of a file, not <_io.BytesIO"):
        accelerator.save(1, io.BytesIO())  # type: ignore[arg-type]
    assert sorted(os.listdir()) == ["folder", "weights.safetensors"]


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.ckpt", "model", "best.pth.tar", "MODEL.PT"])
def test_a_name_of_torch_gets_its_format(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A training script saves so, and its own next run loads it: `torch.load("state.pt")["optimizer"]`."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": (0.5, None)}
    Accelerator().save(state, name, False if name == "model" else None)
    read = torch.load(name, weights_only=True)
    assert same(read["model"], model.state_dict())
    assert (read["epoch"], read["best"]) == (3, (0.5, None))
    again = torch.optim.AdamW(model.parameters(), lr=1.0)
    again.load_state_dict(read["optimizer"])
    for parameter in model.parameters():
        assert same(again.state[parameter], optimizer.state[parameter])
    assert same(load(name)["model"], model.state_dict())
    assert not caplog.text
    with pytest.raises(UnsavableError, match=r"object\['model'\] cannot be stored in torch's format: it is a Linear"):
        Accelerator().save({"model": model}, "other.pt")


@pytest.mark.parametrize("name", ["x.pt", "x.json"])
def test_a_url_is_no_path_in_the_current_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_STAGING", str(tmp_path))
    Accelerator().save({"epoch": 3}, f"file://{tmp_path}/{name}")
    assert load(f"file://{tmp_path}/{name}") == load(tmp_path / name) == {"epoch": 3}
    with pytest.raises(ConfigurationError, match=f"a file on a disk, got 'memory://x/{name}'"):
        Accelerator().save({"epoch": 3}, f"memory://x/{name}")
    assert os.listdir(tmp_path) == [name]
    assert not Path("file:").exists()


@pytest.mark.parametrize("name", ["array.pkl", "model.bin", "model.safetensors", "state"])
def test_a_name_like_that_of_a_pickle_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A file name such as model.pkl is no error, so that a long run does not lose its results: a notice says so."""
    Accelerator().save({"x": torch.ones(1)}, name, True)
    assert torch.equal(load_file(name)["x"], torch.ones(1))
    assert (f"{name} is not a pickle file, despite its name" in caplog.text) == (name in ("array.pkl", "model.bin"))


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": (1, 2)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_get_state_dict(precision: str) -> None:
    accelerator = Accelerator(precision=precision)
    inner = nn.Sequential(Extra(2, 2), nn.BatchNorm1d(2))
    inner.add_module("tied", nn.Linear(2, 2, bias=False))
    inner.tied.weight = inner[0].weight
    model, _ = accelerator.prepare(torch.compile(inner, backend="eager"), torch.optim.SGD(inner.parameters(), lr=0.1))
    for unwrap in (True, False):
        found = accelerator.get_state_dict(model, unwrap)
        assert list(found) == list(inner.state_dict())
        assert found["0._extra_state"] == {"seen": (1, 2)}
        assert found["tied.weight"].data_ptr() == inner[0].weight.data_ptr(), "nothing is copied"
        inner.load_state_dict(found)
    accelerator.save(found, "state")
    inner.load_state_dict(load("state"))


def saved_by_transformers(folder: str) -> None:
    for kind in ("ddp", "zero3"):
        documented(kind, f"{folder}/{kind}")


def documented(kind: str, folder: str) -> None:
    """Save a `transformers` model with the code of Accelerate's documentation."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    strategy: Any = kind if kind == "ddp" else ZeROStrategy(stage=3, param_persistence_threshold=0)
    accelerator = Accelerator(strategy=strategy)
    model = transformers.GPT2LMHeadModel(config)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(8).reshape(1, 8)
    accelerator.backward(model(tokens, labels=tokens).loss)
    optimizer.step()
    state = accelerator.get_state_dict(model)
    assert bool(state) == (kind == "ddp" or accelerator.is_main_process)
    accelerator.save(state, f"{folder}/state.safetensors")
    if kind == "zero3" and accelerator.is_main_process:
        with pytest.raises(ConfigurationError, match=r"has no values in this state dict.*accelerator.get_state_dict\(model\)"):
            accelerator.save(model.state_dict(), f"{folder}/nothing")
        assert not Path(folder, "nothing").exists()
    accelerator.save(accelerator.strategy.rank, f"{folder}/rank.json")
    accelerator.unwrap_model(model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.save_model(model, f"{folder}/ours")
    accelerator.free_memory()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_transformers_model(run_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run_world(2, saved_by_transformers, str(run_dir))
    for kind in ("ddp", "zero3"):
        opened = transformers.GPT2LMHeadModel.from_pretrained(kind)
        ours = transformers.GPT2LMHeadModel.from_pretrained(f"{kind}/ours")
        other = transformers.GPT2LMHeadModel(opened.config)
        load_checkpoint_in_model(other, f"{kind}/state.safetensors", strict=True)
        assert load(f"{kind}/rank.json") == 0
        for model in (ours, other):
            assert same(model.state_dict(), opened.state_dict())
            assert model.lm_head.weight is model.transformer.wte.weight
        assert "lm_head.weight" not in load_file(f"{kind}/state.safetensors"), "which is tied"
        assert "lm_head.weight" in load(f"{kind}/state.safetensors")


def test_save_pretrained_alone() -> None:
    """`save_function=accelerator.save` works with the installed version of transformers and as version 4 calls it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=20, max_position_embeddings=8
    )
    model = transformers.BertForMaskedLM(config)
    accelerator = Accelerator()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = accelerator.get_state_dict(prepared)
    accelerator.unwrap_model(prepared).save_pretrained(
        "theirs", save_function=accelerator.save, state_dict=dict(state), is_main_process=accelerator.is_main_process
    )
    os.mkdir("called")
    Path("called/config.json").write_bytes(Path("theirs/config.json").read_bytes())
    accelerator.save(load_file("theirs/model.safetensors"), "called/model.safetensors")  # as transformers 4 calls it
    for folder in ("theirs", "called"):
        assert same(transformers.BertForMaskedLM.from_pretrained(folder).state_dict(), model.state_dict())


def on_the_main_process(verb: str) -> None:
    accelerator = Accelerator(strategy=ZeROStrategy(stage=3))
    inner = nn.Linear(2, 2)
    model, _ = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    if accelerator.is_main_process:
        getattr(accelerator, verb)(*{"save_model": (model, "there"), "get_state_dict": (model,)}.get(verb, ("there",)))
    accelerator.load_state("elsewhere") if verb != "load_state" else accelerator.save_state("elsewhere")


@pytest.mark.parametrize("verb", ["save_model", "get_state_dict", "save_state", "load_state"])
def test_on_the_main_process_alone(verb: str, run_dir: Path) -> None:
    """If only the main process calls a collective method, an error names it."""
    ends = start_world(2, on_the_main_process, verb).ends(60)
    assert not any(fine for fine, _ in ends)
    assert any(CollectiveError.__name__ in text and f"rank 0: {verb} (test_saving.py:" in text for _, text in ends), ends
    assert not Path("there").exists()


def alone_under_ddp(folder: str) -> list[Any]:
    """Under DDP the main process may call `get_state_dict` and `save` alone, as scripts do: they exchange nothing."""
    accelerator = Accelerator()
    inner = nn.Linear(2, 2)
    model, _ = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    if accelerator.is_main_process:
        accelerator.save(accelerator.get_state_dict(model), f"{folder}/state.safetensors")
    accelerator.save({"rank": accelerator.strategy.rank}, f"{folder}/rank.json")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.wait_for_everyone()
    return [sorted(os.listdir(folder)), {n: t.tolist() for n, t in load(f"{folder}/state.safetensors").items()}]


def test_under_ddp(run_dir: Path) -> None:
    first, second = run_world(2, alone_under_ddp, str(run_dir / "folder"))
    assert first == second, "what the main process has written is there for all after wait_for_everyone"
    assert first[0] == ["model", "rank.json", "state.safetensors"]
    assert load("folder/rank.json") == {"rank": 0}
    assert {name: tensor.tolist() for name, tensor in load_file("folder/model/model.safetensors").items()} == first[1]


def test_the_part_needs_no_accelerator() -> None:
    """`Saving` can be used without an `Accelerator`."""
    part, model = Saving(Strategy("cpu")), Extra(1, 2)
    assert list(part.state_dict(model)) == list(model.state_dict())
    part.save({"epoch": 1}, "epoch.json")
    part.write_model(model, Path("folder"), 4)
    assert load("epoch.json") == {"epoch": 1}
    assert len([name for name in os.listdir("folder") if name.endswith(".safetensors")]) > 1
