"""`trainkit.fabric.Fabric`: the numbers of a hand-written loop, on one process and under DDP, and files that come back."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fabric import pretrain
from helpers.worlds.worlds import run_world
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

import trainkit
from trainkit.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    NonFiniteError,
    StateMismatchError,
    UnsavableError,
    UnsupportedArgumentError,
)
from trainkit.fabric import Fabric, seed_everything
from trainkit.loggers import CSVLogger

Losses = list[float]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    seed_everything(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    data = torch.randn(22, 5, generator=torch.Generator().manual_seed(1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), TensorDataset(data[:, :4], data[:, 4:])


def with_fabric(epochs: int = 2, file: Path | None = None, strategy: str = "auto") -> tuple[Losses, list[Any]]:
    """Two micro-batches per step, clipped; saves to the file."""
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model, optimizer, data = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=3, shuffle=True))
    losses: Losses = []
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader):
            inside = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=inside):
                loss = mse_loss(model(x), y)
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if not inside:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    if file is not None:
        fabric.save(file, {"model": model, "optimizer": optimizer, "losses": losses, "place": (1, "a")})
    return losses, [value.tolist() for value in model.state_dict().values()]


def by_hand(size: int, epochs: int = 2) -> tuple[Losses, list[Any]]:
    model, optimizer, data = parts()
    trained: Any = model
    loader = DataLoader(data, batch_size=3, shuffle=True)
    if size > 1:
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(model)
        loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, shuffle=True, seed=5))
    losses: Losses = []
    for epoch in range(epochs):
        if size > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for index, (x, y) in enumerate(loader):
            if size > 1:
                trained.require_backward_grad_sync = index % 2 == 1
            loss = mse_loss(trained(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
            if index % 2 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return losses, [value.tolist() for value in model.state_dict().values()]


def test_one_process_has_the_numbers_of_a_plain_loop() -> None:
    assert with_fabric() == by_hand(1)


def test_two_processes_have_the_numbers_of_ddp() -> None:
    assert run_world(2, with_fabric) == run_world(2, by_hand, 2)


def test_saved_by_two_processes_and_loaded_by_one(tmp_path: Path) -> None:
    (losses, weights), _ = run_world(2, with_fabric, 2, tmp_path / "state.ckpt")
    fabric = Fabric(accelerator="cpu")
    model, optimizer, _ = parts()
    model, optimizer = fabric.setup(model, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "losses": None}
    assert fabric.load(tmp_path / "state.ckpt", state) == {"place": (1, "a")}
    assert [value.tolist() for value in model.state_dict().values()] == weights
    assert state["losses"] == losses
    assert {slots["step"].item() for slots in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_saved_as_shards_and_loaded_as_a_whole(strategy: str, tmp_path: Path) -> None:
    (_, weights), _ = run_world(2, sharded, tmp_path / "state.ckpt", strategy)
    fabric = Fabric(accelerator="cpu")
    model, optimizer, _ = parts()
    model, optimizer = fabric.setup(model, optimizer)
    fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    assert [value.tolist() for value in model.state_dict().values()] == weights
    assert {slots["step"].item() for slots in optimizer.state.values()} == {3.0}


def sharded(file: Path, strategy: str) -> tuple[None, list[Any]]:
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    model, optimizer, data = parts()
    if strategy == "fsdp":
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
    else:
        wrapped, optimizer = fabric.setup(model, optimizer)
    x, y = fabric.to_device(data[:6])
    for _ in range(3):
        fabric.backward(mse_loss(wrapped(x), y))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(file, {"model": wrapped, "optimizer": optimizer})
    saved = fabric.load(file)["model"]
    fabric.load(file, {"model": wrapped, "optimizer": optimizer})
    return None, [value.tolist() for value in saved.values()]


@pytest.mark.parametrize("name, pair", [("state", [1, 2]), ("state.safetensors", {1, 2})])
def test_the_dict_comes_back(name: str, pair: Any, tmp_path: Path) -> None:
    """From a file of torch's format, or one of safetensors, which also stores a set."""
    file = tmp_path / "a" / name
    fabric = Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(nn.Linear(2, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))[0], None
    assert optimizer is None
    counter = Counter(3)
    saved = {"model": model, "counter": counter, "steps": 7, "nested": {"t": torch.arange(3), "s": pair, "f": math.inf}}
    fabric.save(file, saved, filter={"model": lambda name, value: name == "weight"})
    back = fabric.load(file)
    assert list(back) == list(saved)
    assert list(back["model"]) == ["weight"]
    assert back["nested"]["t"].tolist() == [0, 1, 2]
    assert (back["nested"]["s"], back["nested"]["f"], back["steps"], back["counter"]) == (pair, math.inf, 7, {"value": 3})
    state: dict[str, Any] = {"counter": Counter(0), "steps": 0}
    assert list(fabric.load(file, state)) == ["model", "nested"]
    assert (state["counter"].value, state["steps"]) == (3, 7)


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    fabric.save(tmp_path / "small", {"model": nn.Linear(2, 1), "steps": 7})
    model = fabric.setup(nn.Linear(3, 1))
    before = model.weight.tolist()
    state: dict[str, Any] = {"model": model, "steps": 0}
    with pytest.raises(StateMismatchError, match="'model' does not fit Linear"):
        fabric.load(tmp_path / "small", state)
    with pytest.raises(StateMismatchError, match="has no 'epoch', which the state dict asks for; it has model, steps"):
        fabric.load(tmp_path / "small", {"steps": 0, "epoch": 0})
    assert (state["steps"], model.weight.tolist()) == (0, before)
    partly: dict[str, Any] = {"steps": 0, "epoch": 1}
    fabric.load(tmp_path / "small", partly, strict=False)
    assert partly == {"steps": 7, "epoch": 1}
    with pytest.raises(UnsavableError, match="odd"):
        fabric.save(tmp_path / "small", {"odd": object()})
    assert fabric.load(tmp_path / "small")["steps"] == 7
    with pytest.raises(CheckpointNotFoundError):
        fabric.load(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["raw.safetensors", "lit_model.pth", "model.ckpt"])
def test_a_raw_state_dict_is_loaded(name: str, tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    source, model = nn.Linear(2, 1), fabric.setup(nn.Linear(2, 1))
    fabric.accelerator.save(source.state_dict(), tmp_path / name)
    fabric.load_raw(tmp_path / name, model)
    assert torch.equal(model.weight, source.weight)


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    """They call torch.load, whatever its name, as litgpt does to merge LoRA weights."""
    fabric, net = Fabric(accelerator="cpu"), nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    fabric.save(tmp_path / "lit_model.pth.lora", {"model": model, "optimizer": optimizer, "steps": 7})
    found = torch.load(tmp_path / "lit_model.pth.lora", mmap=True, weights_only=True)
    assert torch.equal(found["model"]["weight"], net.weight)
    assert found["steps"] == 7


def test_a_file_of_the_other_fabric_is_loaded(tmp_path: Path) -> None:
    """It is one of torch.save; the optimizer's own state dict in it has no names."""
    fabric = Fabric(accelerator="cpu")
    source, model = nn.Linear(2, 1), fabric.setup(nn.Linear(2, 1))
    torch.save({"model": source.state_dict(), "steps": 3}, tmp_path / "state.ckpt")
    state = {"model": model, "steps": 0}
    assert fabric.load(tmp_path / "state.ckpt", state) == {}
    assert state["steps"] == 3
    assert torch.equal(model.weight, source.weight)


def test_two_models_with_an_optimizer_each(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    nets = {}
    for name in ("b", "a"):
        net = nn.Linear(2, 1)
        nets[name], nets[f"{name}_optimizer"] = fabric.setup(net, torch.optim.Adam(net.parameters()))
    fabric.backward(nets["a"](torch.ones(1, 2)).sum())
    nets["a_optimizer"].step()
    fabric.save(tmp_path / "gan", nets)
    expected = {name: nets[name].weight.tolist() for name in ("a", "b")}
    other = Fabric(accelerator="cpu")
    again = {}
    for name in ("a", "b"):  # set up in another order
        net = nn.Linear(2, 1)
        again[name], again[f"{name}_optimizer"] = other.setup(net, torch.optim.Adam(net.parameters()))
    assert other.load(tmp_path / "gan", again) == {}
    assert {name: again[name].weight.tolist() for name in ("a", "b")} == expected
    assert (len(again["a_optimizer"].state), len(again["b_optimizer"].state)) == (2, 0)


def verbs(folder: Path) -> tuple[Any, ...]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=CSVLogger(folder, name="logs"))
    rank = fabric.global_rank
    gathered = fabric.all_gather({"rank": torch.tensor([rank])})["rank"].tolist()
    reduced = [fabric.all_reduce(float(rank), reduce_op=op).item() for op in ("mean", "sum")]
    with fabric.rank_zero_first():
        pass
    fabric.barrier()
    fabric.log_dict({"loss": torch.tensor(0.5 + rank), "step": 9}, step=3)
    fabric.log("other", 2, step=4)
    fabric.logger.finalize("success")
    return gathered, reduced, fabric.broadcast({"from": rank}, src=1), fabric.is_global_zero, fabric.world_size


def test_collectives_and_logging_on_two_processes(tmp_path: Path) -> None:
    first, second = run_world(2, verbs, tmp_path)
    assert first == ([[0], [1]], [0.5, 1.0], {"from": 1}, True, 2)
    assert second == (*first[:3], False, 2)
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["other"]) for row in rows] == [("3", "0.5", ""), ("4", "", "2")]


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_after_setup(self, module: nn.Module) -> None:
        self.calls.append(type(module).__name__)

    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("step")

    def on_end(self, place: int, *, value: int = 0) -> None:
        self.calls.append((place, value))


def test_callbacks_get_the_keywords_that_they_take() -> None:
    recorder = Recorder()
    fabric = Fabric(accelerator="cpu", callbacks=[recorder, object()])
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    fabric.call("on_end", 1, value=2, unknown=3)
    fabric.call("on_nothing")
    assert recorder.calls == ["Linear", "step", (1, 2)]


def test_parameters_are_not_initialized_with_empty_init() -> None:
    fabric = Fabric(accelerator="cpu")
    seed_everything(1)
    before = torch.get_rng_state()
    with fabric.init_module(empty_init=True):
        nn.Linear(3, 3)
    assert torch.equal(torch.get_rng_state(), before)
    with fabric.init_module(empty_init=False):
        model = nn.Linear(3, 3)
    seed_everything(1)
    assert torch.equal(model.weight, nn.Linear(3, 3).weight)


def test_arguments_that_cannot_work_say_what_to_use() -> None:
    with pytest.raises(
        ConfigurationError, match=r"needs 2 processes, found 1. Start them: trainkit launch --nproc-per-node 2 "
    ):
        Fabric(accelerator="cpu", devices=2)
    with pytest.raises(UnsupportedArgumentError, match=r"plugins=.*pass precision="):
        Fabric(plugins=[1])
    with pytest.raises(ConfigurationError, match="loggers='csv'"):
        Fabric(accelerator="cpu", loggers=object())
    fabric = Fabric(accelerator="cpu")
    assert fabric.launch(lambda given, one: (given is fabric, one), 5) == (True, 5)
    with pytest.raises(AttributeError, match="a Fabric has no 'setup_dataloader'. Did you mean 'setup_dataloaders'"):
        fabric.setup_dataloader(1)
    with pytest.raises(ConfigurationError, match="needs a model that was set up"):
        fabric.no_backward_sync(nn.Linear(1, 1))
    model, optimizer, _ = parts()
    model, optimizer = fabric.setup(model, optimizer)
    with pytest.raises(ConfigurationError, match="clip_val= or max_norm="):
        fabric.clip_gradients(model, optimizer)
    fabric.backward(model(torch.full((1, 4), math.nan)).sum())
    with pytest.raises(NonFiniteError, match="error_if_nonfinite=False"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(ConfigurationError, match="needs DataLoader objects"):
        fabric.setup_dataloaders([1, 2])


def test_options_of_verbs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed", num_nodes=1)
    assert fabric.autocast().fast_dtype is torch.bfloat16
    net = nn.Linear(4, 1)
    model = fabric.setup_module(net, move_to_device=False)
    optimizer, other = fabric.setup_optimizers(torch.optim.SGD([net.weight], lr=0.1), torch.optim.SGD([net.bias], lr=0.1))
    assert optimizer is not other
    with fabric.no_backward_sync(model, enabled=True):
        fabric.backward(model(torch.full((1, 4), 3.0)), torch.full((1, 1), 2.0), retain_graph=True, model=model)
    assert net.weight.grad.tolist() == [[6.0] * 4]
    assert fabric.clip_gradients(model, optimizer, max_norm=100.0, norm_type=1.0) == 24.0
    assert fabric.clip_gradients(model, optimizer, clip_val=0.5) is None
    assert net.weight.grad.tolist() == [[0.5] * 4]
    net.weight.grad.fill_(math.inf)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isinf()
    first, second = fabric.setup_dataloaders(
        DataLoader(torch.arange(4)), DataLoader(torch.arange(2)), use_distributed_sampler=False, move_to_device=False
    )
    assert (len(first), len(second)) == (4, 2)
    with fabric.rank_zero_first(local=True):
        fabric.print("a", "b", sep="-")
    assert fabric.launch(lambda given, one, two: one + two, 1, two=2) == 3
    assert fabric.seed_everything(7, workers=True, verbose=True) == 7
    assert "a-b" in capsys.readouterr().out
    value = torch.ones(2, requires_grad=True)
    assert fabric.all_gather(value, sync_grads=True).requires_grad
    with pytest.raises(UnsupportedArgumentError, match=r"all_reduce\(group=...\) is not supported"):
        fabric.all_reduce(value, group=1)
    with pytest.raises(UnsupportedArgumentError, match=r"all_gather\(group=...\) is not supported"):
        fabric.all_gather(value, group=1)
    fabric.barrier("here")
    fabric.accelerator.save({"weight": torch.ones(1, 4)}, tmp_path / "raw.safetensors")
    fabric.load_raw(tmp_path / "raw.safetensors", model, strict=False, weights_only=True)
    assert net.weight.tolist() == [[1.0] * 4]


def weighted() -> str:
    fabric = Fabric(accelerator="cpu")
    data = TensorDataset(torch.arange(4.0))
    with pytest.raises(ConfigurationError) as error:
        fabric.setup_dataloaders(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4)))
    return str(error.value)


def test_a_sampler_that_does_not_shard_is_refused() -> None:
    assert "WeightedRandomSampler, which yields the same samples on each process" in run_world(2, weighted)[0]


def test_a_pretraining_script_resumes_where_it_was(tmp_path: Path) -> None:
    pretrain.setup(str(tmp_path / "whole"), "8")
    pretrain.setup(str(tmp_path / "again"), "8", str(tmp_path / "whole" / "step-00000004" / "lit_model.pth"))
    final = [trainkit.utils.load(tmp_path / run / "final" / "lit_model.pth")["model"] for run in ("whole", "again")]
    assert {name: value.tolist() for name, value in final[0].items()} == {n: v.tolist() for n, v in final[1].items()}
    rows = []
    for run in ("whole", "again"):
        with (tmp_path / run / "logs" / "version_0" / "metrics.csv").open() as file:
            rows.append([(row["step"], row["loss"], row["val_loss"]) for row in csv.DictReader(file)])
    assert rows[0][9:] == rows[1]
    assert (len(rows[0]), len(rows[1])) == (18, 9)  # each of 16 micro-batches, and an evaluation every 8
