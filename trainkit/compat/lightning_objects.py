"""Adapters of objects of the real Lightning: callbacks and loggers, such as those of another vendor, in a run of trainkit.

`trainkit.registry.adapt` loads this module when such an object comes, so it is loaded only where Lightning is too. An adapter
calls the methods of the object by name. It looks like the object: `isinstance` is true for its class and for trainkit's, and
attributes are read from and written to the object. So `trainer.callbacks` and `trainer.logger` are what a user has passed.

What Lightning itself implements over its own loops, such as its `EarlyStopping`, and its modules cannot run here; the errors
say what to import instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any, NoReturn

from trainkit.callback import Callback
from trainkit.console import notice
from trainkit.errors import ConfigurationError, DataError, HookError, ModuleError
from trainkit.loggers.base import Logger, NullExperiment
from trainkit.module.hook_table import HOOKS, STATE_METHODS
from trainkit.module.overridable_hooks import is_overridden
from trainkit.names import home_of, use_instead
from trainkit.registry import adapt

__all__ = [
    "adapt_callback",
    "adapt_logger",
    "refuse_datamodule",
    "refuse_module",
    "refuse_other",
]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


def _package_of(kind: type) -> str | None:
    """The package of Lightning that a class belongs to; `None` for a class of others."""
    return next((package for package in _PACKAGES if kind.__module__.startswith(f"{package}.")), None)


def _mix_up(value: object, kind: type, group: str, why: str) -> str:
    """What is wrong with an object of a class of the real Lightning, and the two ways out.

    Args:
        value: The object.
        kind: The class of Lightning.
        group: Its module below `lightning.pytorch`.
        why: A sentence.
    """
    package, name = _package_of(kind), kind.__name__
    what = f"this is {package}'s class" if type(value) is kind else f"its base class {name} is {package}'s"
    use = _import_of(group, name)
    return (
        f"{type(value).__name__}: {what}, not trainkit's. {why} Fix: {'' if use is None else f'{use}; or '}let {package} be "
        "trainkit in the whole program: trainkit launch --as lightning script.py, or import trainkit.compat.lightning before "
        "all other imports."
    )


def _import_of(group: str, name: str) -> str | None:
    """The line that imports our class in place of one of Lightning; `None` if there is none."""
    home = home_of(f"trainkit.{group}", name)
    use = use_instead(f"trainkit.{group}", name) or ""
    return f"from {home} import {name}" if home is not None else use if use.startswith("from ") else None


class _Adapter:
    """What looks like another object: its class, its attributes, equality with it."""

    _adapted: Any

    @property
    def __class__(self) -> Any:
        """The class of the object, for `isinstance`; `type()` is that of the adapter."""
        return type(self._adapted)

    @__class__.setter
    def __class__(self, kind: Any) -> NoReturn:
        raise TypeError(f"the class of {self!r} cannot be changed")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_adapted"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._adapted, name, value)

    def __eq__(self, other: object) -> bool:
        """True for the object itself too, so that `trainer.callbacks.remove(mine)` finds it."""
        return self._adapted is (other._adapted if isinstance(other, _Adapter) else other)

    def __hash__(self) -> int:
        return id(self._adapted)

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self._adapted,)

    def __repr__(self) -> str:
        return repr(self._adapted)


@cache
def _class_like(kind: Any, adapted: Any) -> Any:
    """An adapter class with the name of the object's class, for messages and checkpoints; a command line does not list it."""
    names = {
        "__module__": adapted.__module__,
        "__qualname__": f"_class_like.<locals>.{adapted.__name__}",
        "__doc__": adapted.__doc__,
    }
    return type(adapted.__name__, (kind,), names)


class _AdaptedCallback(_Adapter, Callback):
    """A callback that calls the hooks of a callback of the real Lightning.

    Args:
        callback: The callback.
        base: Lightning's base class.
    """

    def __init__(self, callback: Any, base: type) -> None:
        own = vars(self)
        own["_adapted"] = callback
        for name in (*HOOKS, *STATE_METHODS):
            if is_overridden(callback, name, base):
                own[name] = getattr(callback, name) if name in STATE_METHODS else _hook(callback, name)
        # Lightning calls these after the hook of the module.
        own["runs_last"] = any(kind.__name__ == "Checkpoint" and _package_of(kind) for kind in type(callback).__mro__)

    @property
    def state_key(self) -> str:
        """The key of the callback."""
        return str(self._adapted.state_key)


def _hook(callback: Any, name: str) -> Callable[..., Any]:
    """A hook of a callback, as the hook table calls it."""
    method: Callable[..., Any] = getattr(callback, name)
    if name in ("setup", "teardown"):  # Lightning passes the stage by name.
        return lambda trainer, module, stage: _call(callback, name, partial(method, stage=stage), trainer, module)

    @wraps(method)
    def call(*args: Any) -> Any:
        return _call(callback, name, method, *args)

    return call


def _call(callback: Any, name: str, method: Callable[..., Any], trainer: Any, *args: Any) -> Any:
    try:
        return method(trainer, *args)
    except AttributeError as error:
        if error.name is None or f"a Trainer has no {error.name!r}" not in str(error):
            raise
        raise HookError(
            f"{type(callback).__name__}.{name} was written for Lightning's Trainer, and reads what trainkit's does not have: "
            f"{error} Expected a callback that reads public attributes. Fix: a callback of your own: class "
            f"Mine(trainkit.Callback): def {name}(self, trainer, module, ...)"
        ) from error


def adapt_callback(callback: Any, base: type) -> _AdaptedCallback:
    """A callback of the real Lightning as one of trainkit.

    Args:
        callback: The callback.
        base: Lightning's base class.

    Raises:
        HookError: It is, or derives from, a callback that Lightning implements over its own loops.
    """
    for kind in type(callback).__mro__:
        if issubclass(kind, base) and kind.__name__ not in ("Callback", "Checkpoint") and _package_of(kind) is not None:
            raise HookError(_mix_up(callback, kind, "callbacks", "It reads the inside of Lightning's Trainer."))
    adapted: _AdaptedCallback = _class_like(_AdaptedCallback, callback.__class__)(callback, base)
    return adapted


# The attribute of Lightning's own loggers that says to store checkpoints → the argument.
_STORE_CHECKPOINTS = {"_log_model": "log_model", "_log_model_checkpoints": "log_model_checkpoints"}


class _AdaptedLogger(_Adapter, Logger):
    """A logger that passes everything to a logger of the real Lightning, on the main process.

    As in Lightning, a run that is resumed begins a new log, unless the logger itself continues one. Checkpoints are in the
    folder of the run, `<default_root_dir>/version_N`, and not in that of the logger.

    Args:
        logger: The logger.
        base: Lightning's base class.
    """

    _in_run_folder = False
    _takes_all_values = True
    _on_main: tuple[Any, Any] = (None, None)
    """The version and the folder, as the main process has told this one."""

    def __init__(self, logger: Any, base: type) -> None:
        own = vars(self)
        own["_adapted"] = logger
        for name in ("log_image", "log_text", "log_histogram"):
            if hasattr(logger, name):
                own[name] = getattr(logger, name)
        if hasattr(base, "after_save_checkpoint") and is_overridden(logger, "after_save_checkpoint", base):
            own["after_save_checkpoint"] = logger.after_save_checkpoint

    @property
    def name(self) -> str:
        """The name of the experiment; `None` if the logger has none."""
        name: str = self._adapted.name
        return name

    @property
    def version(self) -> int | str | None:
        """The run. Other processes have that of the main process, and `None` before a run begins."""
        version: int | str | None = self._adapted.version if self.is_main_process else self._on_main[0]
        return version

    @property
    def save_dir(self) -> str:
        """The folder of all experiments; `None` if the logger has none, as Fabric's loggers do not."""
        folder: Any = getattr(self._adapted, "save_dir", None)
        return folder  # type: ignore[no-any-return]

    @property
    def root_dir(self) -> str:
        """The folder of this experiment; `""` if the logger has none."""
        return str(self._adapted.root_dir or "")

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, as `version`."""
        folder = self._adapted.log_dir if self.is_main_process else self._on_main[1]
        return None if folder is None else str(folder)

    def _folder_values(self) -> list[Any]:
        return [self.version, self.log_dir]

    def _use_folder(self, values: list[Any]) -> None:
        self._on_main = (values[0], values[1])

    def _open_early(self) -> None:
        """Open the experiment before the first hook of a run, so that the logger knows its version; as Lightning does."""
        if self.is_main_process:
            getattr(self._adapted, "experiment", None)  # Some loggers have none.

    @property
    def experiment(self) -> Any:
        """That of the logger; on other processes an object that does nothing."""
        return self._adapted.experiment if self.is_main_process else NullExperiment()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass the metrics of one step to the logger, and let it save."""
        if self.is_main_process:
            self._last_step = self._last_step + 1 if step is None else step
            with self._surviving(f"write the metrics of step {self._last_step}"):
                self._adapted.log_metrics(metrics=dict(metrics), step=step)
                self._adapted.save()
                self._failing = False

    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Pass hyper-parameters to the logger, and let it save."""
        if self.is_main_process and params is not None:
            with self._surviving("write the hyper-parameters"):
                try:
                    self._adapted.log_hyperparams(params, *args, **kwargs)
                except NotImplementedError as error:
                    notice(f"{type(self._adapted).__name__} does not store hyper-parameters: {error}")
                self._adapted.save()

    def _log_module(self, module: Any) -> None:
        self.log_graph(module)
        self.save()

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Let the logger draw the module."""
        if self.is_main_process:
            self._adapted.log_graph(model, input_array)

    def save(self) -> None:
        """Let the logger save."""
        if self.is_main_process:
            self._adapted.save()

    def finalize(self, status: str = "success") -> None:
        """End the log."""
        if self.is_main_process:
            with self._surviving("write to its end"):
                self._adapted.finalize(status)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning's loggers have no state in a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def adapt_logger(logger: Any, base: type) -> _AdaptedLogger:
    """A logger of the real Lightning as one of trainkit.

    Args:
        logger: The logger.
        base: Lightning's base class.

    Raises:
        ConfigurationError: A logger of Lightning's own that is to store checkpoints, which it would not find.
    """
    theirs = next((kind for kind in type(logger).__mro__ if kind.__name__ != "Logger" and _package_of(kind)), None)
    use = None if theirs is None else _import_of("loggers", theirs.__name__)
    for attribute, argument in _STORE_CHECKPOINTS.items():
        if theirs is not None and getattr(logger, attribute, False):
            raise ConfigurationError(
                f"{type(logger).__name__}({argument}={getattr(logger, attribute)!r}): this is {_package_of(theirs)}'s logger, "
                "not trainkit's. It looks for checkpoints that are files, and would store none of ours, which are folders. "
                f"Fix: {argument}=False{'' if use is None else f', or {use}'}"
            )
    adapted: _AdaptedLogger = _class_like(_AdaptedLogger, logger.__class__)(logger, base)
    if theirs is not None and adapted.is_main_process:
        notice(
            f"{type(logger).__name__} is a logger of {_package_of(theirs)}: a run that is resumed begins a new log"
            + ("." if use is None else f". trainkit's continues the log: {use}")
        )
    return adapted


def refuse_module(module: Any, base: type) -> NoReturn:
    """Raise a `ModuleError` for a module of the real Lightning."""
    raise ModuleError(_mix_up(module, base, "", "Its self.log and its hooks work only with Lightning's Trainer."))


def refuse_datamodule(datamodule: Any, base: type) -> NoReturn:
    """Raise a `DataError` for a data module of the real Lightning."""
    raise DataError(_mix_up(datamodule, base, "", "trainkit's has the same methods."))


def refuse_other(value: Any, base: type) -> NoReturn:
    """Raise a `ConfigurationError` for a strategy or profiler of the real Lightning."""
    kind = next(kind for kind in type(value).__mro__ if _package_of(kind) is not None)
    group = base.__module__.removeprefix(f"{_package_of(base)}.").partition(".")[0]
    raise ConfigurationError(_mix_up(value, kind, group, "It works only with Lightning's Trainer."))
