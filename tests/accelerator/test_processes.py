"""Methods for ranks, the order of processes, and splitting inputs.

Calls on only some of the ranks are tested in `test_collective_checks.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.worlds.threaded import run_threads
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit import Accelerator, Strategy
from trainkit.accelerator.processes import only_where, run_first, share_of
from trainkit.config.kwargs_handlers import DistributedType
from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.registry import find_info


class Placed(Strategy):
    """A CPU strategy of one process of a given world."""

    def __init__(self, world: World, devices: int = 1) -> None:
        super().__init__("cpu")
        self.world, self._devices = world, devices

    @property
    def data_world(self) -> World:
        return World(devices=self._devices) if self._devices > 1 else self.world


def everywhere(size: int, work: Any) -> list[Any]:
    """What `work(accelerator)` returns on each process. A node has two processes."""

    def run(world: World) -> Any:
        world.local_rank = world.rank % 2
        return work(Accelerator(strategy=Placed(world)))

    return run_threads(size, run)


def split(size: int, inputs: Any, apply_padding: bool = False) -> list[Any]:
    def work(accelerator: Accelerator) -> Any:
        with accelerator.split_between_processes(inputs, apply_padding=apply_padding) as part:
            return part

    return everywhere(size, work)


# --------------------------------------------------------------------------------------------------------------- ranks


def test_who_is_who() -> None:
    """Ranks, and which process is the main, local main and last one, on two nodes of two processes."""

    def work(accelerator: Accelerator) -> list[Any]:
        places = [accelerator.process_index, accelerator.local_process_index]
        flags = [accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process]
        return [*places, *flags]

    assert everywhere(4, work) == [
        [0, 0, True, True, False],
        [1, 1, False, False, False],
        [2, 0, False, True, False],
        [3, 1, False, False, True],
    ]


def test_one_process_is_first_and_last() -> None:
    accelerator = Accelerator(strategy=Strategy("cpu"))
    assert (accelerator.num_processes, accelerator.use_distributed, accelerator.device) == (1, False, torch.device("cpu"))
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert accelerator.distributed_type is DistributedType.NO
    accelerator.wait_for_everyone()
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pass
    with accelerator.split_between_processes("what has no parts need not") as part:
        assert part == "what has no parts need not"
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]


def test_one_process_that_drives_several_devices() -> None:
    """With SPMD under XLA, `num_processes` is the number of devices, although there is one process."""
    accelerator = Accelerator(strategy=Placed(World(), devices=8))
    assert (accelerator.num_processes, accelerator.process_index, accelerator.use_distributed) == (8, 0, True)
    assert accelerator.is_main_process
    assert accelerator.is_last_process
    assert accelerator.on_process(lambda: "called", process_index=5)() == "called"
    with accelerator.split_between_processes([1, 2, 3]) as part:
        assert part == [1, 2, 3]


def test_what_distributes() -> None:
    """`distributed_type` for strategies and devices."""

    def kind(strategy: Strategy) -> str:
        return str(Accelerator(strategy=strategy).distributed_type)

    class OfXLA(Strategy):
        info = find_info("xla") or Strategy.info

    class OfZeRO(Strategy):
        info = find_info("zero2") or Strategy.info

    assert [kind(OfXLA("cpu")), kind(OfZeRO("cpu"))] == ["XLA", "DEEPSPEED"]
    assert everywhere(2, lambda accelerator: accelerator.distributed_type) == [DistributedType.MULTI_CPU] * 2
    assert DistributedType.TPU is DistributedType.XLA

    def on_a_gpu(accelerator: Accelerator) -> Any:
        accelerator.strategy.device = torch.device("cuda", 0)
        return accelerator.distributed_type

    assert everywhere(2, on_a_gpu) == [DistributedType.MULTI_GPU] * 2


# ------------------------------------------------------------------------------------------- functions for one process


def test_functions_of_one_process() -> None:
    def work(accelerator: Accelerator) -> list[Any]:
        def function(number: int, *, more: int = 0) -> int:
            "What it is."
            return number + more

        decorated = [
            accelerator.on_main_process(function),
            accelerator.on_local_main_process(function),
            accelerator.on_last_process(function),
            accelerator.on_process(process_index=1)(function),
            accelerator.on_process(function, 2),
            accelerator.on_local_process(local_process_index=1)(function),
            accelerator.on_local_process(function, 0),
        ]
        assert {one.__doc__ for one in decorated} == {"What it is."}
        return [one(4, more=1) for one in decorated]

    none = None
    assert everywhere(4, work) == [
        [5, 5, none, none, none, none, 5],
        [none, none, none, 5, none, 5, none],
        [none, 5, none, none, 5, none, 5],
        [none, none, 5, none, none, 5, none],
    ]


def test_a_single_process_does_it_all() -> None:
    """A single process runs the functions for any process, as in Accelerate, so that a script for several can be tried."""
    accelerator = Accelerator(strategy=Strategy("cpu"))
    assert accelerator.on_process(lambda: 1, process_index=3)() == 1
    assert accelerator.on_local_process(lambda: 1, local_process_index=3)() == 1
    assert accelerator.on_last_process(lambda: 1)() == 1


def test_decorators_that_lack_something() -> None:
    accelerator = Accelerator(strategy=Strategy("cpu"))
    with pytest.raises(ConfigurationError, match=r"@accelerator\.on_process\(process_index=1\)"):
        accelerator.on_process(lambda: 1)
    with pytest.raises(ConfigurationError, match=r"@accelerator\.on_local_process\(local_process_index=1\)"):
        accelerator.on_local_process(lambda: 1)
    with pytest.raises(ConfigurationError, match="on_main_process is a decorator: it needs a function, not None"):
        accelerator.on_main_process(None)  # type: ignore[type-var]


def test_one_line_a_machine_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """One process of each node prints. Each line is one write, because these processes are threads."""
    everywhere(4, lambda accelerator: accelerator.print(f"of rank {accelerator.process_index}\n", end=""))
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "of rank 0", "of rank 2"]


# ------------------------------------------------------------------------------------- splitting inputs between processes


@pytest.mark.parametrize("padded", [False, True])
def test_parts(padded: bool) -> None:
    """`split_between_processes` returns the same parts as Accelerate."""
    letters = list("ABCDE")
    assert split(2, letters, padded) == [["A", "B", "C"], ["D", "E", *("E" * padded)]]
    assert split(3, letters, padded) == [["A", "B"], ["C", "D"], ["E", *("E" * padded)]]
    assert split(2, letters[:4], padded) == [["A", "B"], ["C", "D"]]
    # more processes than samples
    assert split(4, ["A", "B"], padded) == [["A"], ["B"], ["B"] * padded, ["B"] * padded]
    assert split(3, [], padded) == [[], [], []]
    assert split(2, ("A", "B", "C"), padded) == [("A", "B"), ("C", *("C" * padded))]


def test_parts_of_tensors_arrays_and_dicts() -> None:
    def same(found: Any, expected: Any) -> bool:
        return type(found) is type(expected) and bool((found == expected).all())

    rows = torch.arange(6.0).reshape(3, 2)
    for padded, last in ((False, rows[2:]), (True, rows[[2, 2]])):
        first, second = split(2, rows, padded)
        assert same(first, rows[:2])
        assert same(second, last)
        first, second = split(2, rows.numpy(), padded)
        assert same(second, last.numpy())
    given = OrderedDict(text=["a", "b", "c"], ids=rows, inner={"x": np.arange(3), "y": (1, 2, 3)})
    first, second = split(2, given, True)
    assert type(second) is OrderedDict
    assert (second["text"], second["inner"]["y"]) == (["c", "c"], (3, 3))
    assert same(second["ids"], rows[[2, 2]])
    assert same(second["inner"]["x"], np.array([2, 2]))
    assert given["text"] == ["a", "b", "c"]  # the input is not modified
    assert list(split(4, given, True)[3]["text"]) == ["c"]
    assert split(3, {}, True) == [{}] * 3


def test_padded_tensors_come_on_the_device() -> None:
    """With `apply_padding=True` tensors are moved to the device, as in Accelerate, so that results can be gathered."""

    def work(accelerator: Accelerator) -> list[str]:
        accelerator.strategy.device = torch.device("meta")
        kinds = []
        for padded in (False, True):
            with accelerator.split_between_processes({"x": torch.ones(3)}, apply_padding=padded) as part:
                kinds.append(part["x"].device.type)
        return kinds

    assert everywhere(2, work) == [["cpu", "meta"]] * 2


class Table:
    """The part of `datasets.Dataset` that `split_between_processes` uses."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: list[int]) -> Table:
        return Table([self.rows[place] for place in places])


def test_parts_of_a_dataset() -> None:
    assert [part.rows for part in split(3, Table([5, 6, 7, 8]))] == [[5, 6], [7], [8]]
    assert [part.rows for part in split(3, Table([5, 6, 7, 8]), True)] == [[5, 6], [7, 8], [8, 8]]


@pytest.mark.parametrize(
    "inputs, text",
    [
        ("a string", "not a str"),
        (torch.ones(()), "not a Tensor"),
        (iter([1, 2]), "not a list_iterator"),
        ({"a": [1, 2], "b": [1]}, r"must have the same length, but they have 2 \('a'\), 1 \('b'\)"),
        ({"a": {"b": [1, 2]}, "c": torch.ones(3)}, r"2 \('a'\), 3 \('c'\)"),
    ],
)
def test_what_has_no_parts(inputs: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"split_between_processes.*{text}"):
        split(2, inputs)


# ---------------------------------------------------------------------------------------------------- real processes


def together(folder: str) -> list[Any]:
    """Run all collective methods on real processes."""
    accelerator = Accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    log = Path(folder, "log")
    for first in (accelerator.main_process_first, accelerator.local_main_process_first):
        with first(), log.open("a") as file:
            file.write(f"{rank}")
        accelerator.wait_for_everyone()
    triggers = []
    for turn in range(3):
        if turn == 1 and accelerator.is_last_process:
            accelerator.set_trigger()
        triggers.append(accelerator.check_trigger())
    with accelerator.split_between_processes(torch.arange(7), apply_padding=True) as part:
        padded: Tensor = accelerator.strategy.all_gather(part)
    return [size, str(accelerator.distributed_type), triggers, padded.flatten().tolist()]


def test_several_processes(run_dir: Path) -> None:
    found = run_world(3, together, str(run_dir))
    assert found == [[3, "MULTI_CPU", [False, True, False], [0, 1, 2, 3, 4, 6, 5, 6, 6]]] * 3
    log = Path(run_dir, "log").read_text()
    assert [log[0], log[3]] == ["0", "0"]  # the main process was the first one in both blocks
    assert sorted(log) == list("001122")


# ------------------------------------------------------------------------------------------------ without an Accelerator


def test_the_part_needs_no_accelerator() -> None:
    """The order of processes and their shares of work do not need an `Accelerator`."""
    order: list[int] = []

    def work(world: World) -> list[Any]:
        with run_first(CollectiveChecks.of(world), "main_process_first", world.is_main):
            order.append(world.rank)
        mine: list[int] = share_of([1, 2, 3], world, torch.device("cpu"), apply_padding=True)
        return mine

    assert run_threads(2, work) == [[1, 2], [3, 3]]
    assert order == [0, 1]


def test_the_verbs_need_no_training() -> None:
    """An `Accelerator` can exchange values between processes where nothing is trained."""

    def work(world: World) -> list[Any]:
        verbs = Accelerator(strategy=Placed(world))
        verbs.wait_for_everyone()
        if world.rank == 1:
            verbs.set_trigger()
        assert [verbs.check_trigger(), verbs.check_trigger()] == [True, False]
        return [verbs.process_index, verbs.num_processes, verbs.is_last_process, verbs.state.use_distributed]

    assert run_threads(2, work) == [[0, 2, False, True], [1, 2, True, True]]


def test_where_a_function_runs_is_asked_when_it_is_called() -> None:
    """The condition of a decorated function is evaluated at each call, not at decoration."""
    here = [False]
    function = only_where(lambda: here[0], lambda x: x + 1, "on_process")
    assert function(1) is None
    here[0] = True
    assert function(1) == 2
