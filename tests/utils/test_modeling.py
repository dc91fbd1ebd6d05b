"""`load_checkpoint_in_model`: which files it reads, where tensors are put, and that a mismatch changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from safetensors.torch import save_file
from torch import nn

from trainkit import Accelerator
from trainkit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
    UnknownNameError,
    UnsupportedArgumentError,
)
from trainkit.utils import load_checkpoint_in_model


class Net(nn.Module):
    """A model with a tied weight, persistent buffers and a non-persistent one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embedding(tokens)) * self.scale)
        return out


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    made = Net()
    with torch.no_grad():
        made.body[1].running_mean.fill_(float(seed))  # type: ignore[operator, union-attr]
    return made


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def folder() -> Path:
    """A folder that `save_model` has written, with a file for each tensor."""
    accelerator = Accelerator()
    accelerator.save_model(accelerator.prepare(net()), "weights", max_shard_size="80B")
    assert len(list(Path("weights").glob("model-*.safetensors"))) == 8
    return Path("weights")


def test_files(folder: Path) -> None:
    """Loads from a folder or its index file, and from a single file, given by its folder or by its path."""
    expected = state(net())
    accelerator = Accelerator()
    accelerator.save_model(net(), "one")
    accelerator.save(net().state_dict(), "saved/mine.safetensors")
    save_file({name: tensor for name, tensor in net().state_dict().items() if name != "head.weight"}, "theirs.safetensors")
    places = ["one", "one/model.safetensors", "saved/mine.safetensors", "theirs.safetensors"]
    for place in (folder, folder / "model.safetensors.index.json", *places):
        model = net(2)
        kept = dict(model.named_parameters())
        load_checkpoint_in_model(model, place, strict=True)
        assert same(state(model), expected)
        assert model.head.weight is model.embedding.weight
        assert all(parameter is kept[name] for name, parameter in model.named_parameters()), "an optimizer stays valid"
        assert model.embedding.weight.requires_grad
    shutil.rmtree("one")  # the files are no longer needed
    model(torch.arange(4))


def test_a_model_without_values(folder: Path) -> None:
    for device_map in (None, {"": "cpu"}, {"": torch.device("cpu")}):
        with torch.device("meta"):
            model = Net()
        model.scale = torch.full((4,), 2.0)  # checkpoints do not contain it
        model.embedding.weight.requires_grad_(False)
        model.body.weight_decay = 0.1  # type: ignore[assignment]
        model.body[0].weight.mark = "mine"  # type: ignore[union-attr]
        load_checkpoint_in_model(model, folder, device_map=device_map, strict=True)
        assert same(state(model), state(net()))
        assert model.head.weight is model.embedding.weight
        assert not model.embedding.weight.requires_grad
        assert model.body[0].weight.requires_grad
        assert model.body[0].weight.mark == "mine"  # type: ignore[union-attr]
        assert torch.equal(model.eval()(torch.arange(6)), net().eval()(torch.arange(6)))


def test_what_is_left_without_values() -> None:
    save_file({"0.weight": torch.ones(2, 2)}, "half.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(
        UserWarning, match="3 tensors of the model are still on the meta device, without values: 0.bias, 1.bias, 1.weight. Init"
    ):
        load_checkpoint_in_model(model, "half.safetensors")
    assert torch.equal(model[0].weight, torch.ones(2, 2))
    assert model[1].weight.is_meta


@pytest.mark.parametrize("on_meta", [False, True])
def test_dtypes(on_meta: bool, folder: Path) -> None:
    def loaded(**options: Any) -> Net:
        with torch.device("meta" if on_meta else "cpu"):
            model = Net()
        model.scale = torch.full((4,), 2.0)
        if not on_meta:
            model.half()
        load_checkpoint_in_model(model, folder, strict=True, **options)
        return model

    expected = state(net())
    for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        model = loaded(dtype=dtype)
        for name, tensor in state(model).items():
            wanted = expected[name]
            assert torch.equal(tensor, wanted.bfloat16() if wanted.is_floating_point() else wanted), name
        assert model.scale.dtype == (torch.float32 if on_meta else torch.float16), "which the checkpoint has not"
    model = loaded(dtype=torch.float16, keep_in_fp32_modules=["body", "head.weight"])
    assert {name for name, tensor in state(model).items() if tensor.dtype == torch.float32} == {
        name for name in expected if name.startswith("body") and "num" not in name
    }
    assert torch.equal(loaded(dtype="float32").embedding.weight, expected["embedding.weight"]), "never by way of half precision"


def test_a_device_for_each_module(folder: Path) -> None:
    """A device map may name each module. Devices other than the CPU are tested in `test_cuda.py`."""
    model = net(2)
    load_checkpoint_in_model(model, folder, device_map={"embedding": "cpu", "head": "cpu", "body": "cpu", "scale": "cpu"})
    assert same(state(model), state(net()))


@pytest.mark.parametrize(
    "device_map, kind, said",
    [
        ("auto", UnsupportedArgumentError, r"device_map='auto'\): models are not split automatically.*strategy='zero3'"),
        ({"": "disk"}, UnsupportedArgumentError, "weights are not offloaded here"),
        ({"": "auto"}, UnsupportedArgumentError, "name the device"),
        ({"": None}, ConfigurationError, "expected a device"),
        ({"": True}, ConfigurationError, "expected a device"),
        ({"": 99}, ConfigurationError, "cuda"),
        (["cpu"], ConfigurationError, "must be a dict of names to devices"),
        ({"": "cpu", "bdy": "cpu"}, UnknownNameError, "Net has no 'bdy'. Did you mean 'body'?"),
        ({"body": "cpu"}, ConfigurationError, "no device for '(scale|embedding.weight)'"),
    ],
)
def test_device_maps_that_are_refused(device_map: Any, kind: type[Exception], said: str, folder: Path) -> None:
    model = net(2)
    with pytest.raises(kind, match=said):
        load_checkpoint_in_model(model, folder, device_map=device_map)
    assert same(state(model), state(net(2)))


def test_tied_tensors_on_two_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.compat.accelerate_names.modeling.find_device", torch.device)  # as if there were a GPU
    with pytest.raises(ConfigurationError, match=r"'embedding.weight' and 'head.weight' are one tensor.*to cpu and cuda:0"):
        load_checkpoint_in_model(net(), folder, device_map={"": 0, "embedding": "cpu"})


@pytest.mark.parametrize("on_meta", [False, True])
def test_what_does_not_fit_changes_nothing(on_meta: bool, folder: Path) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = Net()
        model.body[0] = nn.Linear(4, 5)
        model.extra = nn.Linear(1, 1)
    before = None if on_meta else state(model)
    for strict in (False, True):
        with pytest.raises(StateMismatchError) as caught:
            load_checkpoint_in_model(model, folder, dtype=torch.bfloat16, device_map={"": "cpu"}, strict=strict)
        assert r"body.0.weight: shape (4, 4) in the checkpoint, (5, 4) in the model" in str(caught.value)
        assert ("missing in the checkpoint (2): extra.weight, extra.bias" in str(caught.value)) == strict
        assert all(parameter.is_meta == on_meta for parameter in model.parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert before is None or same(state(model), before)


def test_names_that_are_missing_or_unexpected(caplog: pytest.LogCaptureFixture) -> None:
    save_file({"0.weight": torch.ones(2, 2), "9.weight": torch.ones(1)}, "other.safetensors")
    model = nn.Sequential(nn.Linear(2, 2))
    bias = model[0].bias.detach().clone()
    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint \(1\): 0.bias\n  unexpected.*: 9.weight"):
        load_checkpoint_in_model(model, "other.safetensors", strict=True)
    load_checkpoint_in_model(model, "other.safetensors")
    assert torch.equal(model[0].weight, torch.ones(2, 2))
    assert torch.equal(model[0].bias, bias)
    assert "not in the checkpoint, so left unchanged: 0.bias" in caplog.text
    assert "not in the model, so not loaded: 9.weight" in caplog.text


def test_not_one_name_in_common() -> None:
    save_file({"module.0.weight": torch.ones(2, 2)}, "other.safetensors")
    with pytest.raises(
        StateMismatchError, match="no tensor with a name of Sequential: the file has module.0.weight, and the model has 0"
    ):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(2, 2)), "other.safetensors")


def test_checkpoints_of_trainkit() -> None:
    trainer = make_trainer()
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint("trained")
    module = TinyModule()
    load_checkpoint_in_model(module, "trained", strict=True)
    assert same(parameters_of(module), parameters_of(trainer.model))
    accelerator = Accelerator()
    model, _ = accelerator.prepare(net(), nn.Linear(1, 1))
    accelerator.save_state("two")
    with pytest.raises(CheckpointError, match=r"two contains 2 models \(model, model_1\).*load_state\('two', restore="):
        load_checkpoint_in_model(net(), "two")
    load_checkpoint_in_model(other := net(2), "two/model.safetensors", strict=True)
    assert same(state(other), state(model))
    data = bytearray(Path("trained/model.safetensors").read_bytes())
    data[-1] ^= 1
    Path("trained/model.safetensors").write_bytes(data)
    before = parameters_of(module)
    with pytest.raises(CorruptCheckpointError, match="model.safetensors: its XXH3-128 is"):
        load_checkpoint_in_model(module, "trained")
    assert same(parameters_of(module), before)


def test_a_checkpoint_with_extra_state() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    first, second = Counting(2, 2), Counting(2, 2)
    accelerator = Accelerator()
    accelerator.prepare(first)
    first.seen = 7
    accelerator.save_state("there")
    load_checkpoint_in_model(second, "there", strict=True)
    assert second.seen == 7
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_prepared_model(precision: str, folder: Path) -> None:
    accelerator = Accelerator(precision=precision)
    model, optimizer = accelerator.prepare(inner := net(2), torch.optim.SGD(inner.parameters(), lr=0.1))
    load_checkpoint_in_model(model, folder, device_map={"": accelerator.device}, strict=True)
    assert same(state(inner), state(net()))
    assert optimizer.param_groups[0]["params"][0] is inner.embedding.weight


def test_a_compiled_model(folder: Path) -> None:
    model = net(2)
    load_checkpoint_in_model(torch.compile(model, backend="eager"), folder, strict=True)  # type: ignore[arg-type]
    assert same(state(model), state(net()))


def broken(change: Callable[[Path], Any]) -> Path:
    """A damaged copy of the folder: `change` modifies it."""
    shutil.copytree("weights", "broken")
    change(Path("broken"))
    return Path("broken")


def another_index(**places: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **places}}))

    return change


@pytest.mark.parametrize(
    "change, kind, said",
    [
        (another_index(x="../secret.safetensors"), CorruptCheckpointError, "'../secret.safetensors' is not the name of a file"),
        (
            another_index(x="nowhere.safetensors"),
            CheckpointNotFoundError,
            "nowhere.safetensors cannot be read: there is no such",
        ),
        (
            another_index(x="model-00001-of-00008.safetensors"),
            CorruptCheckpointError,
            "'x' is in the index, but not in the file",
        ),
        (another_index(x="pytorch_model-1.bin"), CheckpointError, "pytorch_model-1.bin is a pickle"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), CorruptCheckpointError, "it has no weight_map"),
        (lambda f: (f / "other.safetensors.index.json").write_text("{}"), CheckpointError, "has several indices: model"),
        (lambda f: os.truncate(f / "model-00002-of-00008.safetensors", 70), CorruptCheckpointError, "00002-of-00008"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), CheckpointNotFoundError, "expected model.safetensors, or"),
    ],
)
def test_damage(change: Callable[[Path], Any], kind: type[Exception], said: str, folder: Path) -> None:
    model = net(2)
    with pytest.raises(kind, match=said):
        load_checkpoint_in_model(model, broken(change))
    assert same(state(model), state(net(2)))


def test_nothing_to_read() -> None:
    os.mkdir("empty")
    with pytest.raises(CheckpointNotFoundError, match="it contains nothing"):
        load_checkpoint_in_model(net(), "empty")
    with pytest.raises(CheckpointNotFoundError, match="nowhere cannot be read: there is no such file"):
        load_checkpoint_in_model(net(), "nowhere")
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere.safetensors.index.json cannot be read"):
        load_checkpoint_in_model(net(), "nowhere.safetensors.index.json")
    Path("empty/adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointNotFoundError, match=r"PEFT adapters, not a whole model.*PeftModel.from_pretrained\(base, 'empty'\)"
    ):
        load_checkpoint_in_model(net(), "empty")
    Path("empty/adapter_model.safetensors").rename("empty/vae.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="Name the file: 'empty/vae.safetensors'"):
        load_checkpoint_in_model(net(), "empty")
    torch.save(net().state_dict(), "empty/pytorch_model.bin")
    for path in ("empty", "empty/pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle.*save_file\(torch.load"):
            load_checkpoint_in_model(net(), path)
    Path("empty/pytorch_model.bin").rename("weights.safetensors")
    with pytest.raises(CorruptCheckpointError, match="looks like a pickle"):
        load_checkpoint_in_model(net(), "weights.safetensors")


@pytest.mark.parametrize(
    "options, kind, said",
    [
        ({"offload_8bit_bnb": True}, UnsupportedArgumentError, "BitsAndBytesConfig"),
        ({"full_state_dict": False}, UnsupportedArgumentError, "tensors are not sharded"),
        ({"broadcast_from_rank0": True}, UnsupportedArgumentError, "each process reads the files"),
        ({"dtype": "int8"}, UnknownNameError, "floating-point dtype, not 'int8'"),
        ({"dtype": "bfloat"}, UnknownNameError, "Did you mean 'bfloat16'"),
        ({"dtype": torch.int64}, UnknownNameError, "floating-point dtype"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], kind: type[Exception], said: str, folder: Path) -> None:
    with pytest.raises(kind, match=said):
        load_checkpoint_in_model(net(), folder, **options)


def test_arguments_without_effect(folder: Path) -> None:
    model = net(2)
    load_checkpoint_in_model(model, folder, {"": "cpu"}, "offload", None, True, True)
    assert same(state(model), state(net()))
    assert not Path("offload").exists()


def test_a_large_file_is_not_brought_into_memory(folder: Path) -> None:
    """Tensors that the model does not have are not read: this sparse file is larger than the memory."""
    shape = [2**42]
    header = json.dumps(
        {
            "0.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "huge": {"dtype": "U8", "shape": shape, "data_offsets": [16, 16 + 2**42]},
        }
    ).encode()
    with open("huge.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + torch.ones(4).numpy().tobytes())
        file.truncate(8 + len(header) + 16 + 2**42)
    model = nn.Sequential(nn.Linear(2, 2))
    load_checkpoint_in_model(model, "huge.safetensors")
    assert torch.equal(model[0].weight, torch.ones(2, 2))


def quick_tour(folder: str) -> list[Any]:
    """Save a model in shards and load it into the model in training. A model that was prepared under ZeRO is an error."""
    accelerator = Accelerator()
    inner = net(3)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    accelerator.save_model(model, folder, max_shard_size="80B")
    accelerator.wait_for_everyone()  # the main process writes
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.zero_()
    load_checkpoint_in_model(accelerator.unwrap_model(model), folder, device_map={"": accelerator.device})
    loaded = same(state(inner), state(net(3)))
    accelerator.backward(model(torch.arange(6)).square().mean())
    optimizer.step()
    accelerator.free_memory()
    for strategy in ("zero1", "zero3"):
        divided = Accelerator(strategy=strategy)
        third = net(3)
        prepared, _ = divided.prepare(third, torch.optim.SGD(third.parameters(), lr=0.1))
        with pytest.raises(ConfigurationError, match="prepared under ZeRO.*Load the weights before prepare"):
            load_checkpoint_in_model(prepared, folder)
        divided.free_memory()
        load_checkpoint_in_model(third, folder, strict=True)
    return [loaded, float(inner.head.weight.detach().sum())]


def test_on_two_processes(run_dir: Path) -> None:
    first, second = run_world(2, quick_tour, str(run_dir / "weights"))
    assert first == second
    assert first[0]
