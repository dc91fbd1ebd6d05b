"""Loads hostile checkpoints at every entry point, and prints what that made the process do.

Run as a program in an empty directory, `python -m helpers.resume.hostile_loading each|together ENTRY ...`, since an audit hook
cannot be removed, and a module that was imported once is not imported again. At each entry point harmless checkpoints are
loaded first, so that what follows imports nothing of trainkit or jsonargparse. Each violation is a line of JSON.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers.resume.checkpoints import seal
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn

from trainkit import Accelerator, DataModule, TrainModule
from trainkit.checkpoint import open_checkpoint
from trainkit.cli import TrainkitCLI
from trainkit.cli.main import main
from trainkit.loggers import CSVLogger
from trainkit.utils import load_checkpoint_in_model

__all__ = ["ARGUMENTS", "ENTRIES", "VALUES", "Victim"]

# What a hostile checkpoint names. `planted_new` is never imported; `planted_old` is, before the first load.
PLANTED = """
import pathlib
from torch import nn
pathlib.Path("{0}-imported").touch()
def run(*args, **kwargs):
    pathlib.Path("{0}-called").touch()
    return args
class Thing(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        run()
"""
NAMES = ("planted_new.run", "planted_old.run", "planted_new.Thing", "planted_old.Thing", "os.system", "torch.nn.Identity")
VALUES: dict[str, Any] = {
    **{name: name for name in NAMES},
    "a module": "planted_new",
    "through a module": "helpers.resume.hostile_loading.os.system",
    **{f"class_path {name}": {"class_path": name} for name in NAMES},
    "init_args": {"class_path": "planted_old.Thing", "init_args": {"command": "touch ran"}},
    "dict_kwargs": {"class_path": "torch.nn.Sequential", "dict_kwargs": {"x": {"class_path": "planted_new.Thing"}}},
    "inner": {"class_path": "torch.nn.Sequential", "init_args": {"args": [{"class_path": "planted_old.Thing"}]}},
    "class of the default": {"class_path": "torch.optim.AdamW", "init_args": {"lr": {"class_path": "planted_old.Thing"}}},
    "arguments only": {"init_args": {"fn": "planted_old.run"}},
    "YAML": "{class_path: planted_old.Thing}",
    "YAML, escaped": '{"class\\x5fpath": "planted_old.Thing"}',
    "YAML block": "class_path: planted_new.Thing",
    "YAML list": "[planted_old.run]",
    "a file": "evil.yaml",
    "an address": "memory://evil.yaml",
    "list": ["planted_old.run", "os.system"],
    "list of specs": [{"class_path": "planted_new.Thing"}],
    "tuple": ("planted_old.run",),
    "dict": {"fn": "planted_old.run"},
    "dict in dict": {"x": {"class_path": "planted_old.Thing"}},
    "dotted": {"fn.class_path": "planted_old.Thing"},
    "path in a file": {"__path__": "evil.yaml", "fn": "planted_old.run"},
    "interpolation": "${boom:planted_old.run}",
    "variable": "${oc.env:HOME}",
    "interpolations": {"x": ["${boom:1}"], "y": "\\${boom:1}"},
    "a number": 5,
}


class Color(Enum):
    """A member holds a function."""

    RED = "red"
    RUN = os.getpid


@dataclass
class Settings:
    """A group of arguments."""

    fn: Callable[..., Any] = json.loads
    size: int = 1
    names: list[str] = field(default_factory=list)


def _reaches(value: Any, depth: int = 0) -> bool:
    """Whether a class got an object that it has neither asked for nor has as a default."""
    if isinstance(value, dict):
        return any(map(_reaches, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_reaches, value))
    if isinstance(value, Settings):
        return _reaches(value.fn)
    home = getattr(value, "__module__", None) or type(value).__module__
    return value is os.system or str(home).startswith("planted") or isinstance(value, nn.Identity)


class Victim(TinyModule):
    """A module with an argument of every type that jsonargparse resolves; the defaults are harmless."""

    def __init__(
        self,
        text: str = "x",
        reader: Callable[..., Any] = json.loads,
        readers: list[Callable[..., Any]] | None = None,
        table: dict[str, Callable[..., Any]] | None = None,
        either: str | Callable[..., Any] = "x",
        kind: type = dict,
        activation: type[nn.Module] = nn.ReLU,
        encoder: nn.Module | None = None,
        encoders: list[nn.Module] | None = None,
        pair: tuple[nn.Module, int] | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.AdamW,
        color: Color = Color.RED,
        file: Path = Path("x"),
        options: dict[str, Any] | None = None,
        plain: dict | None = None,  # type: ignore[type-arg]
        sizes: list[int] | None = None,
        settings: Settings = Settings(),  # noqa: B008
        more: Settings | None = None,
        each: list[Settings] | None = None,
        anything: Any = None,
        dtype: torch.dtype = torch.float32,
        untyped=None,  # type: ignore[no-untyped-def]
        layer=nn.ReLU,  # type: ignore[no-untyped-def]
        unknown: NotDefined = None,  # type: ignore[name-defined]  # noqa: F821
        **rest: Any,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.save_hyperparameters()
        if _reaches(given) or any(_reaches(resolved) for resolved in map(_read, given.values())):
            Path("reached").write_text(repr(given)[:1000])


def _read(value: Any) -> Any:
    """What a class gets that reads all items of a configuration of OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, omegaconf.Container):
        return value
    with suppress(omegaconf.errors.OmegaConfBaseException):
        return omegaconf.OmegaConf.to_container(value, resolve=True)


class VictimData(DataModule):
    """A data module with arguments that jsonargparse resolves."""

    def __init__(self, reader: Callable[..., Any] = json.loads, encoder: nn.Module | None = None, text: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()
        if _reaches([reader, encoder, text]):
            Path("reached").touch()

    def train_dataloader(self) -> Any:
        return tiny_loader(4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


ARGUMENTS = [name for name in Victim.__init__.__annotations__ if name not in ("return", "rest")] + ["untyped", "layer"]


class Line(TrainkitCLI):
    """A command line with two of the subcommands, since each takes time to build."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: skip for name, skip in TrainkitCLI.subcommands().items() if name in ("fit", "test")}


def _line(*arguments: str, **options: Any) -> Any:
    given = [*arguments, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    given += ["--trainer.fast_dev_run=true", "--trainer.enable_model_summary=false"]
    with mock.patch("sys.argv", ["train.py", *given]):
        return Line(**{"model_class": Victim, "datamodule_class": VictimData, **options})


def _by_accelerator(path: str) -> None:
    accelerator = Accelerator(cpu=True)
    module = Victim()
    accelerator.prepare(module, module.configure_optimizers())
    accelerator.load_state(path)


def _import(path: str) -> None:
    """Import a file of Lightning with the same values, which a process of its own reads."""
    state = json.loads(Path(path, "state.json").read_bytes())
    of_lightning = {"hyper_parameters": "hyper_parameters", "callbacks": "callbacks", "schedulers": "lr_schedulers"}
    values = {key: state[name] for name, key in of_lightning.items() if name in state}
    named = {"hparams_name": state.get("hyper_parameters_class"), "user": state.get("user"), "module": state["module"]}
    weights = {"pytorch-lightning_version": "2.0", "state_dict": {"layer.weight": torch.ones(1, 4)}}
    torch.save({**weights, **values, **named}, f"{path}.ckpt")
    main(["checkpoint", "import", f"{path}.ckpt", f"{path}-imported"])
    open_checkpoint(f"{path}-imported").read()


ENTRIES: dict[str, Callable[[str], Any]] = {
    "module": lambda path: Victim.load_from_checkpoint(path),
    "base": lambda path: TrainModule.load_from_checkpoint(path),
    "data": lambda path: VictimData.load_from_checkpoint(path),
    "base data": lambda path: DataModule.load_from_checkpoint(path),
    "cli": lambda path: _line("test", f"--ckpt_path={path}"),
    "cli fit": lambda path: _line("fit", f"--ckpt_path={path}"),
    "cli subclass": lambda path: _line("test", f"--ckpt_path={path}", "--model=Victim", subclass_mode_model=True),
    "cli class": lambda path: _line("test", f"--ckpt_path={path}", model_class=None),
    "fit": lambda path: make_trainer(max_steps=2, logger=CSVLogger("logs")).fit(
        Victim(), datamodule=VictimData(), ckpt_path=path
    ),
    "validate": lambda path: make_trainer().validate(Victim(), datamodule=VictimData(), ckpt_path=path),
    "test": lambda path: make_trainer().test(Victim(), datamodule=VictimData(), ckpt_path=path),
    "predict": lambda path: make_trainer().predict(Victim(), datamodule=VictimData(), ckpt_path=path),
    "accelerator": _by_accelerator,
    "reader": lambda path: open_checkpoint(path).read(),
    "weights": lambda path: load_checkpoint_in_model(Victim(), path),
    "ls": lambda path: main(["checkpoint", "ls", os.path.dirname(path) or "."]),
    "show": lambda path: main(["checkpoint", "show", path]),
    "verify": lambda path: main(["checkpoint", "verify", path]),
    "diff": lambda path: main(["checkpoint", "diff", path, "benign"]),
    "import": _import,
    "export": lambda path: main(["checkpoint", "export", path, f"out{len(os.listdir())}"]),
}

WITH_ARGUMENTS = ("module", "data", "cli", "cli subclass")  # the entry points that read hyper-parameters

_armed = False
_seen: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _armed:
        return
    where = ""
    if event == "import" and arguments[0] not in _absent:
        where = str(arguments[0])
    elif event == "subprocess.Popen" and "trainkit.checkpoint.restricted_load" in arguments[1]:
        return  # of trainkit; it finds the planted modules too
    elif event.startswith(("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "pty.spawn")):
        where = repr(arguments)
    elif event == "open" and isinstance(arguments[0], str | bytes):
        target, writes = os.path.abspath(os.fsdecode(arguments[0])), arguments[2] & (os.O_WRONLY | os.O_RDWR)
        where = target if (writes and not target.startswith((os.getcwd(), "/dev/"))) or target.endswith("evil.yaml") else ""
    elif event == "exec" and getattr(arguments[0], "co_filename", "").endswith(("planted_new.py", "planted_old.py")):
        where = arguments[0].co_filename
    if where:
        _seen.append(f"{event} {where}"[:300])


_absent: set[str] = set()  # modules that a harmless load looks for in vain


@contextmanager
def _watched() -> Iterator[None]:
    global _armed
    _armed = True
    try:
        yield
    finally:
        _armed = False


_armed = False


def _call(entry: str, path: str) -> str:
    """Call an entry point; returns how it ended."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ENTRIES[entry](path)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "returned"


def _hostile(change: Callable[[dict[str, Any]], object], number: int) -> str:
    """A copy of the harmless checkpoint with another state, and right digests."""
    from shutil import copytree

    target = Path("hostile", str(number))
    copytree("benign", target)
    state = json.loads((target / "state.json").read_bytes())
    change(state)
    (target / "state.json").write_text(json.dumps(state))
    seal(target)
    return str(target)


def _encoded(value: Any) -> Any:
    return {"$tuple": list(value)} if isinstance(value, tuple) else value


def _harmless() -> Iterator[Callable[[dict[str, Any]], object]]:
    """States after which nothing is imported any more: with a value for each way in which values are read."""
    for more in (
        {"hyper_parameters_class": f"{__name__}.Victim", "datamodule_hyper_parameters_class": f"{__name__}.VictimData"},
        {},
    ):
        values = {"text": "${x:1}", "options": {"x": "${text}"}, "either": "y z", "settings": {"size": 2}, "optimizer": {}}
        parts = {name: value for name, value in values.items() if more or name != "settings"}
        changes = {
            "hyper_parameters": parts,
            "datamodule_hyper_parameters": {"text": "y"},
            "hyper_parameters_omegaconf": ["options"],
        }
        for given in (changes, {**changes, "hyper_parameters": {"text": "y"}}):
            yield lambda state, given=given, more=more: state.update({**given, **more})


def _states(each: bool, entry: str) -> Iterator[tuple[str, Callable[[dict[str, Any]], object]]]:
    """Names of hostile states, and what makes them."""
    forms = {"configuration": {"hyper_parameters_class": f"{__name__}.Victim"}, "plain": {}}
    if entry.startswith("cli"):  # which reads both forms the same way
        del forms["plain"]
    for what, value in VALUES.items():
        for form, more in forms.items():
            names = [[name] for name in ARGUMENTS] if each else [ARGUMENTS]
            for given in [*names, ["rest", "encoder.class_path", "settings.fn", "reader+", "encoder.init_args.x"]]:
                values = {name: _encoded(value) for name in given}
                changes = {**more, "hyper_parameters": values, "datamodule_hyper_parameters": values}
                if form == "plain":
                    changes["hyper_parameters_omegaconf"] = list(given)
                else:
                    changes["datamodule_hyper_parameters_class"] = f"{__name__}.VictimData"
                yield f"{form}, {what}, {', '.join(given)[:40]}", lambda state, changes=changes: state.update(changes)
    yield from _parts()


def _parts() -> Iterator[tuple[str, Callable[[dict[str, Any]], object]]]:
    """Hostile names of classes, and hostile states of the parts of a run."""
    for name in NAMES:
        both = {"hyper_parameters_class": name, "datamodule_hyper_parameters_class": name, "module": name}
        yield f"class {name}", lambda state, both=both: state.update({**both, "hyper_parameters": {"command": "touch ran"}})
        yield f"module {name}", lambda state, name=name: state.update({"module": name, "hyper_parameters": {"x": name}})
        yield (
            f"parts {name}",
            lambda state, name=name: state.update(
                {
                    "callbacks": {key: {"class": name, "best_model_path": name} for key in state.get("callbacks", {})},
                    "schedulers": [{"class": name, "state": {"_step_count": name}, "inner": {"__class__": {}}}],
                    "metrics": {"class": name},
                    "datamodule": {"class_path": name},
                    "user": {"class_path": name},
                }
            ),
        )


def _prepare() -> None:
    for name in ("planted_new", "planted_old"):
        Path(f"{name}.py").write_text(PLANTED.format(name))
    Path("evil.yaml").write_text("class_path: planted_old.Thing\nfn: planted_old.run\n")
    sys.path.insert(0, os.getcwd())
    importlib.import_module("planted_old")
    Path("planted_old-imported").unlink()
    with suppress(ImportError):
        import omegaconf

        omegaconf.OmegaConf.register_resolver("boom", importlib.import_module("planted_old").run)
    trainer = make_trainer(max_steps=1, enable_checkpointing=True)
    trainer.fit(Victim(), datamodule=VictimData())
    trainer.save_checkpoint("benign")


def run(entries: Iterable[str], each: bool) -> None:
    """Load all hostile checkpoints at some entry points, and print what they did; the last line counts the loads."""
    with redirect_stdout(io.StringIO()):
        _prepare()
    sys.addaudithook(_audit)
    loads, ends = 0, {}
    for entry in entries:
        for number, change in enumerate(_harmless()):
            path = _hostile(change, 10**6 * (number + 1) + loads)
            with _watched():
                _call(entry, path)
            _absent.update(one.partition(" ")[2] for one in _seen if one.startswith("import "))
            _seen.clear()
        for what, change in _states(each, entry) if entry in WITH_ARGUMENTS else _parts():
            loads += 1
            path = _hostile(change, loads)
            with _watched():
                end = _call(entry, path)
            ends[end.partition(":")[0]] = ends.get(end.partition(":")[0], 0) + 1
            if os.environ.get("SHOW"):
                print(what, end)
            marks = ("planted_new-imported", "planted_new-called", "planted_old-called", "ran", "reached")
            done = [*_seen, *(name for name in marks if Path(name).exists())]
            if done:
                print(json.dumps({"entry": entry, "what": what, "did": done, "end": end}), flush=True)
            _seen.clear()
            for name in marks:
                Path(name).unlink(missing_ok=True)
            sys.modules.pop("planted_new", None)
    print(json.dumps({"loads": loads, "ends": ends}))


if __name__ == "__main__":
    run(sys.argv[2:] or ENTRIES, sys.argv[1] == "each")
