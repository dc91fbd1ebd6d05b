"""`gather`, `reduce`, `broadcast` and similar functions without an `Accelerator` object, and `get_logger` on two processes."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Accelerator
from trainkit.accelerator import processes
from trainkit.errors import CollectiveError, ConfigurationError, UnsupportedArgumentError
from trainkit.logging import get_logger
from trainkit.utils import (
    broadcast,
    extract_model_from_parallel,
    gather,
    pad_across_processes,
    reduce,
    send_to_device,
    wait_for_everyone,
)


class Appending(logging.Handler):
    """Appends messages to a file that all processes write to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            file.write(f"{record.getMessage()} ({record.filename}:{record.funcName})\n")


class Odd:
    """A batch sampler whose batch cannot be split evenly between two processes."""

    batch_size = 5

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(5))])


def on_two(folder: str) -> dict[str, Any]:
    logger = get_logger("own", log_level="INFO")
    for name in ("early", "late", "ordered"):
        Path(folder, name).touch()
    early = Appending(Path(folder, "early"))
    logger.logger.addHandler(early)
    logger.info("before there is an Accelerator")
    with pytest.raises(ConfigurationError, match="has not joined them yet. Create the Accelerator"):
        logger.info("all", in_order=True)
    for function in (gather, reduce, broadcast, pad_across_processes):
        with pytest.raises(ConfigurationError, match="has not joined them yet. Create the Accelerator"):
            function(torch.ones(1))
    accelerator = Accelerator()
    rank = accelerator.process_index
    logger.logger.removeHandler(early)

    mine = torch.tensor([float(rank), 1.0])
    found: dict[str, Any] = {
        "gather": gather({"x": mine})["x"].tolist(),
        "mean": reduce(mine).tolist(),
        "sum": reduce([mine], "sum")[0].tolist(),
        "pad": pad_across_processes(torch.ones(rank + 1), pad_index=-1).tolist(),
        "broadcast": [one.tolist() for one in broadcast([mine, torch.tensor(rank)], from_process=1)],
        "given": mine.tolist(),
    }
    with pytest.raises(CollectiveError, match="gather: the tensors of the processes cannot be combined"):
        gather(torch.ones(1, rank + 1))
    with pytest.raises(CollectiveError, match="broadcast: the tensors of the processes"):
        broadcast(torch.ones(rank + 1))
    with pytest.raises(ConfigurationError, match="must be the same on all processes, but it is rank 0: 0, rank 1: 1"):
        broadcast(mine, from_process=rank)
    with pytest.raises(ConfigurationError, match=r"from_process=2\): expected a rank from 0 to 1"):
        broadcast(mine, from_process=2)

    ordered = Appending(Path(folder, "ordered"))
    logger.logger.addHandler(ordered)
    for turn in range(3):
        logger.info("turn %d", turn, in_order=True)
    logger.setLevel("WARNING" if rank else "INFO")  # a rank that does not log at this level is not waited for
    logger.info("one alone", in_order=True)
    logger.logger.removeHandler(ordered)
    with pytest.raises(CollectiveError, match=r"rank 0: in_order=True \(test_operations.py:\d+\); rank 1: wait_for_everyone"):
        wait_for_everyone() if rank else logger.error("for all", in_order=True)
    logger.logger.addHandler(Appending(Path(folder, "late")))
    for _ in range(2):
        logger.warning_once("the main process, once")
    wait_for_everyone()
    logger.warning("all of them", main_process_only=False)

    teacher = nn.Linear(2, 1)
    placed = accelerator.prepare_model(teacher, evaluation_mode=True)
    model, loader = accelerator.prepare(nn.Linear(2, 1), DataLoader(list(range(20)), batch_size=3))
    found["wrapped"] = [placed is teacher, accelerator.unwrap_model(model) is not model]
    found["bare"] = extract_model_from_parallel(model) is accelerator.unwrap_model(model)
    found["weights"] = placed.weight.tolist()
    placed(torch.ones(1, 2)).sum().backward()  # no gradients are exchanged for an evaluation model
    split, parts = Accelerator(split_batches=True).prepare(
        DataLoader(list(range(20)), 6), DataLoader([0] * 8, batch_sampler=Odd())
    )
    accelerator.save_state(f"{folder}/state")
    with torch.no_grad():
        teacher.weight.zero_()
    accelerator.load_state(f"{folder}/state")
    assert teacher.weight.tolist() == found["weights"], "a part of the checkpoint"
    found["sizes"] = [each.total_batch_size for each in (loader, split, parts)]
    return found


def test_on_two_processes(tmp_path: Path) -> None:
    first, second = run_world(2, on_two, str(tmp_path))
    assert first["weights"] == second.pop("weights"), "all begin with the main process's parameters"
    del first["weights"]
    assert (first.pop("given"), second.pop("given")) == ([0.0, 1.0], [1.0, 1.0])
    assert (first.pop("pad"), second.pop("pad")) == ([1.0, -1.0], [1.0, 1.0])
    assert first == second
    assert first == {
        "gather": [0.0, 1.0, 1.0, 1.0],
        "mean": [0.5, 1.0],
        "sum": [1.0, 2.0],
        "broadcast": [[1.0, 1.0], 1],
        "wrapped": [True, True],
        "bare": True,
        "sizes": [6, 6, 5],
    }
    here = "(test_operations.py:on_two)"
    assert (tmp_path / "early").read_text() == f"[RANK 0] before there is an Accelerator {here}\n"
    lines = [f"[RANK {rank}] turn {turn} {here}" for turn in range(3) for rank in (0, 1)]
    assert (tmp_path / "ordered").read_text().splitlines() == [*lines, f"[RANK 0] one alone {here}"]
    once, *rest = (tmp_path / "late").read_text().splitlines()
    assert once == f"[RANK 0] the main process, once {here}"
    assert sorted(rest) == [f"[RANK 0] all of them {here}", f"[RANK 1] all of them {here}"]


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_of_process", WeakValueDictionary())
    monkeypatch.setattr(processes, "_of_thread", processes._OfThread())


def test_a_process_that_is_alone_needs_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_all(monkeypatch)
    x = torch.tensor([1.0, 2.0])
    assert gather(x) is x
    assert broadcast((x,))[0] is x
    assert pad_across_processes(x) is x
    assert reduce(x).tolist() == reduce({"x": x}, "max")["x"].tolist() == [1.0, 2.0]
    assert reduce(x, "sum", 3.0).tolist() == [3.0, 6.0]
    wait_for_everyone()
    with pytest.raises(ConfigurationError, match="reduction must be one of"):
        reduce(x, "median")
    with pytest.raises(ConfigurationError, match=r"from_process=1\): expected a rank from 0 to 0"):
        broadcast(x, from_process=1)


def test_of_several_accelerators_the_one_that_is_worked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several accelerators, the functions use the one that was used last."""
    forget_all(monkeypatch)
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    assert processes.latest() is second
    first.prepare(nn.Linear(1, 1))
    assert Accelerator(cpu=True).process_index == 0  # created only to read an attribute
    assert processes.gathering("gather") is first._gathering
    second.prepare([1, 2])
    assert processes.latest() is second
    second.free_memory()
    assert processes.latest() is first
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(processes.latest()))
    thread.start()
    thread.join()
    assert seen.pop() is first
    del first, second
    gc.collect()
    assert processes.latest() is None, "none is kept from being forgotten"


@pytest.mark.parametrize("non_blocking", [False, True])
def test_whether_sending_waits_is_said_to_torch(non_blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`send_to_device` passes `non_blocking` to `Tensor.to`."""
    seen: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: seen.append(non_blocking) or self)
    send_to_device({"x": [torch.ones(2)]}, "meta", non_blocking=non_blocking)
    assert seen == [non_blocking]


def test_send_to_device() -> None:
    batch = {"x": torch.ones(2), "names": ["a"], "more": (torch.zeros(1),)}
    sent = send_to_device(batch, "meta")
    assert sent["x"].device.type == sent["more"][0].device.type == "meta"
    assert sent["names"] == ["a"]
    assert batch["x"].device.type == "cpu"
    with pytest.raises(UnsupportedArgumentError, match="Remove these keys from the batch first"):
        send_to_device(batch, "cpu", skip_keys="x")  # type: ignore[arg-type]
