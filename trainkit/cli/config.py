"""`trainkit config`: write a configuration file from flags or from answers to questions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.settings_flags import add_config_file, add_flags, flagged, in_either_spelling, with_nearest
from trainkit.config.checked import checked_settings
from trainkit.config.keys import BACKEND, CONFIG_FILE, DYNAMO, KEYS, Key, checked
from trainkit.config.settings import Settings
from trainkit.errors import ConfigurationError
from trainkit.launch.tpu import DEVICE
from trainkit.registry import automatic_info

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit config`."""
    parser.epilog = (
        "Without flags it asks questions on a terminal. The file has Accelerate's format; an existing file is replaced. "
        "trainkit launch and trainkit test read the default file."
    )
    add_config_file(parser, "the file; default: trainkit/default_config.yaml in the cache folder ($TRAINKIT_CONFIG_FILE)")
    add_flags(parser)
    in_either_spelling(parser)
    parser.error = with_nearest(parser, parser.error)  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace) -> int:
    """Write the file; 0."""
    from trainkit.config.read import default_file
    from trainkit.config.write import write_settings

    settings, default = flagged(args), default_file()
    path = default if args.config_file is None else Path(args.config_file)
    if not settings:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigurationError(
                "There is no terminal to ask questions on. Pass flags: trainkit config --num_processes 2 --mixed_precision "
                "bf16 ..."
            )
        if path.exists():
            print(f"{path} exists, and is replaced after the last answer. Ctrl-C keeps it.")
        settings = _asked()
    checked_settings(settings)  # raises for contradictions before anything is written
    replaced = path.exists()
    write_settings(settings, path)
    print(f"written: {path}" + (", which replaces the old one" if replaced else ""))
    print("used by: trainkit launch " + ("" if path == default else f"--config_file {path} ") + "script.py")
    return 0


def _asked() -> Settings:
    """The settings from the answers of the user."""
    try:
        return _Questions().all()
    except EOFError:
        print()
        raise ConfigurationError("The input ended before the last answer. Nothing was written.") from None


class _Questions:
    """Asks one question after the other, and keeps the answers."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._backend: dict[str, Any] = {}
        self._dynamo: dict[str, Any] = {}

    def all(self) -> Settings:
        """Ask everything."""
        gpus, default = _devices()
        kind = self._choose("Run on cpu, gpu or tpu", ("cpu", "gpu", "tpu"), default)
        machines, processes = self._machines(), 1
        if kind != "tpu":
            processes = self._processes(machines, gpus if kind == "gpu" else 0)
            if kind == "gpu" and machines == 1:
                self._keep("gpu_ids", "GPUs that may be used, by number, or all", "all", fits=_at_least(processes))
            self._zero()
        several = (
            automatic_info(DEVICE).distributed_type if kind == "tpu" else f"MULTI_{kind.upper()}" if processes > 1 else "NO"
        )
        self._values["distributed_type"] = "DEEPSPEED" if self._backend else several
        self._values["use_cpu"] = kind == "cpu"
        if CONFIG_FILE not in self._backend:  # it has the precision
            self._keep("mixed_precision", "Precision: no (float32), fp16 or bf16", "no")
        if kind != "tpu" and not self._backend:
            question = "Compile the model: no, or a backend of torch.compile such as inductor"
            backend = self._ask(question, "no", lambda text: checked("dynamo_backend", text, DYNAMO, "dynamo_backend"))
            if backend != "no":
                self._dynamo["dynamo_backend"] = backend
        return Settings(self._values, self._backend, self._dynamo, "what was answered")

    def _machines(self) -> int:
        machines = int(self._keep("num_machines", "Machines", 1))
        if machines > 1:
            last = machines - 1

            def below(rank: int) -> str | None:
                return None if rank <= last else f"the numbers go from 0 to {last}"

            self._keep("machine_rank", "The number of this machine, from 0", 0, fits=below)
            self._keep("main_process_ip", "Name or address of machine 0, reachable from the others", None)
            self._keep("main_process_port", "A free port there", 29500, fits=lambda port: None if port else "it must be known")
        return machines

    def _processes(self, machines: int, gpus: int) -> int:
        def divisible(number: int) -> str | None:
            return None if number % machines == 0 else f"it is the total of all {machines} machines, with equally many on each"

        return int(self._keep("num_processes", "Processes of all machines together", machines * max(1, gpus), fits=divisible))

    def _zero(self) -> None:
        question = "Shard with DeepSpeed's ZeRO: no, stage 1, 2 or 3, or the path of a DeepSpeed configuration"
        stage = self._ask(question, "no", _stage)
        if stage == "no":
            return
        if not isinstance(stage, int):
            self._backend[CONFIG_FILE] = stage
            return
        self._backend["zero_stage"] = stage
        places = ("none", "cpu", "nvme") if stage == 3 else ("none", "cpu")
        parts = ("optimizer", "param") if stage == 3 else ("optimizer",)
        for part in parts:
            what = "the optimizer's state" if part == "optimizer" else "the parameters"
            place = self._choose(f"Keep {what} on: {', '.join(places)} (none: the device)", places, "none")
            self._backend[f"offload_{part}_device"] = place
            if place == "nvme":
                self._keep(f"offload_{part}_nvme_path", "A folder on a fast disk", None, BACKEND)
        self._keep("gradient_accumulation_steps", "Micro-batches per optimizer step; auto: as in the script", "auto")
        self._keep("gradient_clipping", "Largest norm of the gradients; auto: as in the script", "auto", BACKEND)
        if stage == 3:
            self._keep("zero3_init_flag", "Shard a transformers model while it is built (yes or no)", True, BACKEND)
            self._keep("zero3_save_16bit_model", "Let save_model write 16-bit parameters (yes or no)", False, BACKEND)

    def _keep(
        self,
        name: str,
        question: str,
        default: Any,
        table: Mapping[str, Key] = KEYS,
        fits: Callable[[Any], str | None] = lambda value: None,
    ) -> Any:
        """Ask for the value of a key, and keep the answer."""

        def read(text: str) -> Any:
            value = checked(name, text, table, name)
            problem = fits(value)
            if problem is not None:
                raise ConfigurationError(f"{name} cannot be {value}: {problem}.")
            return value

        answer = self._ask(question, default, read)
        if answer != "auto":
            (self._backend if table is BACKEND else self._values)[name] = answer
        return answer

    def _choose(self, question: str, words: tuple[str, ...], default: str) -> str:
        def read(text: str) -> str:
            if text.lower() not in words:
                raise ConfigurationError(f"one of {', '.join(words)}, not {text!r}.")
            return text.lower()

        return str(self._ask(question, default, read))

    def _ask(self, question: str, default: Any, read: Callable[[str], Any]) -> Any:
        words = {True: "yes", False: "no"} if isinstance(default, bool) else {}
        shown = "" if default is None else f" [{words.get(default, default)}]"
        while True:
            text = input(f"{question}{shown}: ").strip()
            if not text and default is not None:
                return default
            try:
                return read(text)
            except ConfigurationError as error:
                print(f"  {error}")


def _stage(text: str) -> int | str:
    if text.lower() == "no":
        return "no"
    if not text.isdigit():
        if os.path.isfile(text):
            return text
        raise ConfigurationError(f"expected no, 1, 2, 3 or a file, and there is no file {text!r}.")
    return int(checked("zero_stage", text, BACKEND, "the stage"))


def _at_least(processes: int) -> Callable[[str], str | None]:
    def fits(gpus: str) -> str | None:
        enough = gpus == "all" or len(gpus.split(",")) >= processes
        return None if enough else f"each of the {processes} processes needs one"

    return fits


def _devices() -> tuple[int, str]:
    """The number of GPUs of this machine, and the default kind of device."""
    import torch

    from trainkit.launch.tpu import tpu_is_chosen

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus or torch.backends.mps.is_available():
        return gpus, "gpu"
    return 0, "tpu" if tpu_is_chosen() else "cpu"
