"""`trainkit plan SCRIPT`: the memory that a script's training needs under each strategy, without training."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trainkit.accelerator import Accelerator
from trainkit.cli.user_script import existing_script, run_script, script_traceback
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.memory.inventory import contents_of, parse_bytes
from trainkit.memory.report import PROCESSES, MemoryEstimate, estimate_contents
from trainkit.trainer.trainer import Trainer

__all__ = ["add_arguments", "run"]

_OWN_LOOP = "the step of your own training loop is unknown here. MemoryMonitor measures them in a run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit plan`."""
    parser.usage = "trainkit plan [--processes 1,2,4,8] [--device-memory 80G] [--host-memory 512G] SCRIPT [ARGS …]"
    parser.epilog = (
        "Runs the script unchanged until its first fit (or validate, test, predict, Accelerator.prepare) and prints the table "
        "instead of training. Parameters are created without values, so that a model of any size takes seconds; --real "
        "creates them with values. The table includes parameters, gradients, optimizer state, master weights and buffers, "
        "and the activations of a training step with the first batch of the loader, if it does not read values of tensors."
    )
    numbers = "numbers of processes to plan for (default: 1,2,4,8)"
    parser.add_argument("--processes", metavar="N,…", type=_numbers, default=PROCESSES, help=numbers)
    parser.add_argument("--per-host", metavar="N", type=int, help="maximum number of processes per node (default: all)")
    device = "memory of a GPU, such as 80G (default: the memory of this node's GPUs)"
    parser.add_argument("--device-memory", metavar="SIZE", type=_size, help=device)
    parser.add_argument(
        "--host-memory", metavar="SIZE", type=_size, help="memory of a node, such as 512G (default: this node's)"
    )
    parser.add_argument("--real", action="store_true", help="create parameters with their values, as in training")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains with a Trainer or an Accelerator")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers ≥ 1 such as 1,2,4,8, got {text!r}")
    return numbers


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Run the script until it would train, and print the estimate."""
    script = existing_script(args.script, "trainkit plan --processes 1,8 train.py --its-own-arguments")
    try:
        with _EstimatedRun(args).patch():
            run_script(script, args.args)
    except _Estimated as done:
        print(done.estimate)
        return 0
    except SystemExit as ended:  # raised by the script
        if ended.code not in (None, 0):
            print(
                *([ended.code] if isinstance(ended.code, str) else []), "The script exited before it trained.", file=sys.stderr
            )
            return ended.code if isinstance(ended.code, int) else 1
    except TrainkitError:
        raise
    except Exception as error:
        print(script_traceback(error, script), end="", file=sys.stderr)
        hint = "" if args.real else " If it reads values of parameters before it trains: trainkit plan --real …"
        raise ConfigurationError(f"The script raised an error, see above.{hint}") from error
    raise ConfigurationError(
        "The script ended without a call of Trainer.fit or Accelerator.prepare. Fix: pass a script that calls one of them when "
        "it is run."
    )


class _Estimated(SystemExit):
    """Ends the script when the estimate is complete."""

    def __init__(self, estimate: MemoryEstimate) -> None:
        super().__init__(0)
        self.estimate = estimate


class _EstimatedRun:
    """Replaces methods of `Trainer` and `Accelerator` while the script runs, so that no call of them trains."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._gpu = False  # whether the script requests one

    @contextmanager
    def patch(self) -> Iterator[None]:
        """A context in which a fit ends the script with the estimate."""
        patches: dict[tuple[Any, str], Any] = {
            (Trainer, "__init__"): self._one_process(Trainer.__init__),
            **{(Trainer, verb): self._estimate(getattr(Trainer, verb)) for verb in ("fit", "validate", "test", "predict")},
            (Accelerator, "prepare"): self._prepare(Accelerator.prepare),
        }
        if not self._args.real:
            patches[nn.Module, "register_parameter"] = _without_values(nn.Module.register_parameter)
        originals = {place: getattr(*place) for place in patches}
        try:
            for (owner, name), method in patches.items():
                setattr(owner, name, method)
            yield
        finally:
            for (owner, name), method in originals.items():
                setattr(owner, name, method)

    def _one_process(self, init: Any) -> Any:
        """Patch `Trainer.__init__`: start no other process, and estimate for GPUs also where there is no GPU."""

        @functools.wraps(init)
        def wrapper(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("accelerator") in ("gpu", "cuda"):
                self._gpu = True
                kwargs["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
            init(trainer, *args, **{**kwargs, "devices": 1, "num_nodes": 1})

        return wrapper

    def _estimate(self, verb: Any) -> Any:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def estimate(trainer: Trainer, *args: Any, **kwargs: Any) -> NoReturn:
            arguments = signature.bind(trainer, *args, **kwargs).arguments
            module = arguments.get("model")
            module = trainer.lightning_module if module is None else module
            data = arguments.get("train_dataloaders")  # Only fit has this argument.
            data = arguments.get("datamodule") if data is None else data
            raise _Estimated(trainer._memory_estimator().estimate(module, data, **self._hardware(trainer.strategy.device)))

        return estimate

    def _prepare(self, prepare: Any) -> Any:
        @functools.wraps(prepare)
        def estimate(accelerator: Accelerator, *things: Any, **options: Any) -> Any:
            modules = [thing for thing in things if isinstance(thing, nn.Module)]
            if not modules:
                return prepare(accelerator, *things, **options)
            optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
            strategy = accelerator.strategy
            start = sum(p.nbytes for module in modules for p in module.parameters())
            for module in modules:
                strategy.precision.convert_module(module)
            contents = contents_of(modules, optimizers, accelerator.gradient_accumulation_steps)
            limits = self._hardware(strategy.device)
            raise _Estimated(estimate_contents(strategy, contents, start, **limits, untraced=_OWN_LOOP))

        return estimate

    def _hardware(self, device: torch.device) -> dict[str, Any]:
        names = ("processes", "per_host", "device_memory", "host_memory")
        if self._gpu and self._args.device_memory is None and device.type != "cuda":
            raise ConfigurationError(
                "The script requests a GPU, but this node has none, so the memory of a GPU is unknown. Fix: trainkit plan "
                "--device-memory 80G …"
            )
        return {name: getattr(self._args, name) for name in names}


def _without_values(register: Any) -> Any:
    """`nn.Module.register_parameter` for parameters on the meta device, so that initializing them is free."""
    made: Any = WeakIdKeyDictionary()  # a parameter that two layers share stays one

    @functools.wraps(register)
    def shapes(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            original, kind = param, type(param)
            if original not in made:
                made[original] = kind(original.data.to("meta"), requires_grad=original.requires_grad)
                vars(made[original]).update(vars(original))
            param = made[original]
        register(module, name, param)

    return shapes
