"""`trainkit config`: write a configuration file from flags or from answers to questions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.settings_flags import add_config_file, add_flags, allow_both_spellings, settings_from_flags, with_nearest
from trainkit.config.keys import BACKEND, CONFIG_FILE, DYNAMO, FSDP, KEYS, Key, convert_value
from trainkit.config.settings import Settings
from trainkit.config.settings_file import check_settings
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import DEVICE
from trainkit.registry import automatic_info

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit config`."""
    parser.epilog = (
        "Without flags it asks questions in a terminal. The file has Accelerate's format; an existing file is replaced. "
        "trainkit launch and trainkit test read the default file."
    )
    add_config_file(
        parser, "file to write (default: $TRAINKIT_CONFIG_FILE, else trainkit/default_config.yaml in the cache folder)"
    )
    add_flags(parser)
    allow_both_spellings(parser)
    parser.error = with_nearest(parser, parser.error)  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace) -> int:
    """Write the file; 0."""
    from trainkit.config.settings_file import default_file, write_settings

    settings, default = settings_from_flags(args), default_file()
    path = default if args.config_file is None else Path(args.config_file)
    if not settings:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigurationError(
                "Questions need a terminal, and this command does not run in one. Pass flags: trainkit config "
                "--num_processes 2 --mixed_precision bf16 ..."
            )
        if path.exists():
            print(f"{path} exists and will be replaced after the last answer. Press Ctrl-C to keep it.")
        settings = _settings_from_answers()
    check_settings(settings)  # raises for contradictions before anything is written
    replaced = path.exists()
    write_settings(settings, path)
    print(f"{'Replaced' if replaced else 'Wrote'} {path}")
    print("Use it with: trainkit launch " + ("" if path == default else f"--config_file {path} ") + "script.py")
    return 0


def _settings_from_answers() -> Settings:
    """The settings from the answers of the user."""
    try:
        return _Questions().ask_all()
    except EOFError:
        print()
        raise ConfigurationError(
            "The input ended before the last answer, so nothing was written. Run trainkit config again."
        ) from None


class _Questions:
    """Asks one question after the other, and keeps the answers."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._backend: dict[str, Any] = {}
        self._dynamo: dict[str, Any] = {}

    def ask_all(self) -> Settings:
        """Ask everything."""
        gpus, default = _devices()
        kind = self._choose("Run on cpu, gpu or tpu", ("cpu", "gpu", "tpu"), default)
        machines, processes = self._machines(), 1
        if kind != "tpu":
            processes = self._processes(machines, gpus if kind == "gpu" else 0)
            if kind == "gpu" and machines == 1:
                self._ask_key("gpu_ids", "GPUs to use, such as 0,1, or all", "all", fits=_at_least(processes))
            self._sharding()
        distributed_type = (
            automatic_info(DEVICE).distributed_type if kind == "tpu" else f"MULTI_{kind.upper()}" if processes > 1 else "NO"
        )
        self._values.setdefault("distributed_type", distributed_type)
        self._values["use_cpu"] = kind == "cpu"
        if CONFIG_FILE not in self._backend:  # it has the precision
            self._ask_key("mixed_precision", "Precision: no (float32), fp16, bf16 or fp8", "no")
        if kind != "tpu" and self._values["distributed_type"] != "DEEPSPEED":
            question = "Compile the model: no, or a backend of torch.compile such as inductor"
            backend = self._ask(question, "no", lambda text: convert_value("dynamo_backend", text, DYNAMO, "dynamo_backend"))
            if backend != "no":
                self._dynamo["dynamo_backend"] = backend
        return Settings(self._values, self._backend, self._dynamo, "your answers")

    def _machines(self) -> int:
        machines = int(self._ask_key("num_machines", "Number of nodes", 1))
        if machines > 1:
            last = machines - 1

            def below(rank: int) -> str | None:
                return None if rank <= last else f"the ranks are 0 to {last}"

            self._ask_key("machine_rank", "Rank of this node, from 0", 0, fits=below)
            self._ask_key("main_process_ip", "Host name or address of node 0, which the other nodes can reach", None)
            self._ask_key(
                "main_process_port",
                "A free port on node 0",
                29500,
                fits=lambda port: None if port else "all nodes need the port",
            )
        return machines

    def _processes(self, machines: int, gpus: int) -> int:
        def divisible(number: int) -> str | None:
            return None if number % machines == 0 else f"it must be divisible by the number of nodes, {machines}"

        return int(self._ask_key("num_processes", "Processes on all nodes together", machines * max(1, gpus), fits=divisible))

    def _sharding(self) -> None:
        question = "Shard the model: no, fsdp, stage 1, 2 or 3 of DeepSpeed's ZeRO, or the path of a DeepSpeed configuration"
        answer = self._ask(question, "no", _sharding)
        if answer == "fsdp":
            self._values["distributed_type"] = "FSDP"
            self._ask_key("fsdp_offload_params", "Keep parameters and optimizer state in host memory (yes or no)", False, FSDP)
            self._ask_key("fsdp_activation_checkpointing", "Recompute activations in the backward (yes or no)", False, FSDP)
        elif answer != "no":
            self._values["distributed_type"] = "DEEPSPEED"
            self._zero(answer)

    def _zero(self, stage: int | str) -> None:
        if not isinstance(stage, int):
            self._backend[CONFIG_FILE] = stage
            return
        self._backend["zero_stage"] = stage
        places = ("none", "cpu", "nvme") if stage == 3 else ("none", "cpu")
        parts = ("optimizer", "param") if stage == 3 else ("optimizer",)
        for part in parts:
            what = "the optimizer state" if part == "optimizer" else "the parameters"
            place = self._choose(f"Offload {what} to: {', '.join(places)} (none: keep on the device)", places, "none")
            self._backend[f"offload_{part}_device"] = place
            if place == "nvme":
                self._ask_key(f"offload_{part}_nvme_path", "A folder on a fast local disk", None, BACKEND)
        self._ask_key("gradient_accumulation_steps", "Micro-batches per optimizer step; auto: as in the script", "auto")
        self._ask_key("gradient_clipping", "Maximum gradient norm; auto: as in the script", "auto", BACKEND)
        if stage == 3:
            self._ask_key("zero3_init_flag", "Shard a transformers model while it is created (yes or no)", True, BACKEND)
            self._ask_key("zero3_save_16bit_model", "Let save_model write 16-bit parameters (yes or no)", False, BACKEND)

    def _ask_key(
        self,
        name: str,
        question: str,
        default: Any,
        table: Mapping[str, Key] = KEYS,
        fits: Callable[[Any], str | None] = lambda value: None,
    ) -> Any:
        """Ask for the value of a key, and keep the answer."""

        def read(text: str) -> Any:
            value = convert_value(name, text, table, name)
            problem = fits(value)
            if problem is not None:
                raise ConfigurationError(f"{name} cannot be {value}: {problem}.")
            return value

        answer = self._ask(question, default, read)
        if answer != "auto":
            (self._values if table is KEYS else self._backend)[name] = answer
        return answer

    def _choose(self, question: str, words: tuple[str, ...], default: str) -> str:
        def read(text: str) -> str:
            if text.lower() not in words:
                raise ConfigurationError(f"expected {', '.join(words[:-1])} or {words[-1]}, not {text!r}.")
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


def _sharding(text: str) -> int | str:
    if text.lower() in ("no", "fsdp"):
        return text.lower()
    if not text.isdigit():
        if os.path.isfile(text):
            return text
        raise ConfigurationError(f"expected no, fsdp, 1, 2, 3 or the path of a file, but there is no file {text!r}.")
    return int(convert_value("zero_stage", text, BACKEND, "the stage"))


def _at_least(processes: int) -> Callable[[str], str | None]:
    def fits(gpus: str) -> str | None:
        enough = gpus == "all" or len(gpus.split(",")) >= processes
        return None if enough else f"each of the {processes} processes needs a GPU"

    return fits


def _devices() -> tuple[int, str]:
    """The number of GPUs of this node, and the default kind of device."""
    import torch

    from trainkit.launch.environment import tpu_is_chosen

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus or torch.backends.mps.is_available():
        return gpus, "gpu"
    return 0, "tpu" if tpu_is_chosen() else "cpu"
