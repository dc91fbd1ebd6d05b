"""``trainkit plan SCRIPT``: what the script's training takes of memory under each strategy, without training."""

from __future__ import annotations

import argparse
import functools
import inspect
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trainkit.accelerator import Accelerator
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.memory.inventory import contents_of, parse_bytes
from trainkit.memory.report import PROCESSES, MemoryPlan, plan_contents
from trainkit.trainer.memory_plan import make_plan
from trainkit.trainer.trainer import Trainer

__all__ = ["add_arguments", "run"]

_VERBS = ("fit", "validate", "test", "predict")
_GPU = ("gpu", "cuda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``trainkit plan``."""
    parser.usage = "trainkit plan [--processes 1,2,4,8] [--device-memory 80G] [--host-memory 512G] SCRIPT [ARGS …]"
    parser.epilog = (
        "The script runs unchanged until its first fit (or validate, test, predict, Accelerator.prepare), where the table is "
        "printed instead. On the way parameters are made without values, so that a model of any size is made in seconds; "
        "--real makes them as they are. The bytes are those of parameters, gradients, optimizer state, masters and buffers, "
        "not of activations."
    )
    numbers = "numbers of processes (default: 1,2,4,8)"
    parser.add_argument("--processes", metavar="N,…", type=_numbers, default=PROCESSES, help=numbers)
    parser.add_argument("--per-host", metavar="N", type=int, help="processes on one machine, at most (default: all)")
    parser.add_argument("--device-memory", metavar="SIZE", type=_size, help="of a GPU: 80G (default: what this machine's has)")
    parser.add_argument("--host-memory", metavar="SIZE", type=_size, help="of a machine (default: what this one has)")
    parser.add_argument("--real", action="store_true", help="make parameters with their values, as a run does")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains with a Trainer or an Accelerator")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers ≥ 1 such as 1,2,4,8, got {text!r}")
    return found


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Run the script up to where it trains, and print the plan."""
    script = Path(args.script)
    if not script.is_file():
        raise ConfigurationError(
            f"Expected a Python file, got {args.script!r}, which is {'a folder' if script.is_dir() else 'not there'}. "
            "Fix: trainkit plan --processes 1,8 train.py --its-own-arguments"
        )
    planning = _Planning(args)
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *args.args], [str(script.resolve().parent), *sys.path]
    try:
        with planning.installed():
            runpy.run_path(str(script), run_name="__main__")
    except _Planned as done:
        print(done.plan)
        return 0
    except SystemExit as ended:  # of the script itself
        if ended.code not in (None, 0):
            print(*([ended.code] if isinstance(ended.code, str) else []), "The script ended by itself.", file=sys.stderr)
            return ended.code if isinstance(ended.code, int) else 1
    except TrainkitError:
        raise
    except Exception as error:
        _show(error, str(script))
        hint = "" if args.real else " If it needs values of parameters on the way: trainkit plan --real …"
        raise ConfigurationError(f"The script failed by itself, see above.{hint}") from error
    finally:
        sys.argv, sys.path[:] = before
    raise ConfigurationError(
        "The script ended without a fit. Fix: name a script that trains with a Trainer, or prepares with an Accelerator, "
        "when it is run."
    )


def _show(error: Exception, script: str) -> None:
    """The traceback from the script on: the frames before say nothing to the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


class _Planned(SystemExit):
    """The plan is made; what the script does after it is not run."""

    def __init__(self, plan: MemoryPlan) -> None:
        super().__init__(0)
        self.plan = plan


class _Planning:
    """``Trainer`` and ``Accelerator`` as a plan wants them, as long as the script runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._real = args.real
        self._given = {"processes": args.processes, "per_host": args.per_host, "host_memory": args.host_memory}
        self._device_memory = args.device_memory
        self._gpu = False  # the script asks for one

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it a fit ends the script with the plan."""
        kept = [(owner, name, getattr(owner, name)) for owner, name in self._replaced()]
        try:
            _set(Trainer, "__init__", self._alone(Trainer.__init__))
            for verb in _VERBS:
                _set(Trainer, verb, self._instead(getattr(Trainer, verb)))
            _set(Accelerator, "prepare", self._prepare(Accelerator.prepare))
            if not self._real:
                _set(nn.Module, "register_parameter", _without_values(nn.Module.register_parameter))
            yield
        finally:
            for owner, name, original in kept:
                _set(owner, name, original)

    def _replaced(self) -> list[tuple[type, str]]:
        names = [(Trainer, name) for name in ("__init__", *_VERBS)]
        return [*names, (Accelerator, "prepare"), (nn.Module, "register_parameter")]

    def _alone(self, make: Any) -> Any:
        """One process, and here: no other is started, and no GPU has to be there to plan for one."""

        @functools.wraps(make)
        def make_one(trainer: Trainer, *args: Any, **given: Any) -> None:
            if given.get("accelerator") in _GPU:
                self._gpu = True
                given["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
            make(trainer, *args, **{**given, "devices": 1, "num_nodes": 1})

        return make_one

    def _instead(self, verb: Any) -> Any:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def plan(trainer: Trainer, *args: Any, **given: Any) -> NoReturn:
            bound = signature.bind(trainer, *args, **given).arguments
            module = bound.get("model")
            if module is None:
                module = trainer.lightning_module
            memory = self._memory(trainer.strategy.device)
            raise _Planned(make_plan(trainer, module, device_memory=memory, **self._given))

        return plan

    def _prepare(self, prepare: Any) -> Any:
        @functools.wraps(prepare)
        def plan(accelerator: Accelerator, *things: Any, **options: Any) -> Any:
            modules = [thing for thing in things if isinstance(thing, nn.Module)]
            if not modules:
                return prepare(accelerator, *things, **options)
            optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
            strategy = accelerator.strategy
            start = sum(p.nbytes for module in modules for p in module.parameters())
            for module in modules:
                strategy.precision.convert_module(module)
            contents = contents_of(modules, optimizers, accelerator.gradient_accumulation_steps)
            memory = self._memory(strategy.device)
            raise _Planned(plan_contents(strategy, contents, start, device_memory=memory, **self._given))

        return plan

    def _memory(self, device: torch.device) -> int | None:
        if self._gpu and self._device_memory is None and device.type != "cuda":
            raise ConfigurationError(
                "the script wants a GPU, and this machine has none to say how much memory that has. Give it: trainkit plan "
                "--device-memory 80G …"
            )
        memory: int | None = self._device_memory
        return memory


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _without_values(register: Any) -> Any:
    """``nn.Module.register_parameter`` that keeps shapes only; what a layer does to its parameters then costs nothing."""
    made: Any = WeakIdKeyDictionary()  # one that two layers are given stays one

    @functools.wraps(register)
    def shapes(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            given, kind = param, type(param)
            if given not in made:
                made[given] = kind(given.data.to("meta"), requires_grad=given.requires_grad)
                vars(made[given]).update(vars(given))
            param = made[given]
        register(module, name, param)

    return shapes
