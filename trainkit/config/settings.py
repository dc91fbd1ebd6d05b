"""``Settings``: what a configuration says, and what that comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainkit.config.keys import CONFIG_FILE, HOSTFILE, MULTINODE_LAUNCHER
from trainkit.errors import ConfigurationError
from trainkit.registry import StrategyInfo, find_info_by_type, load

__all__ = ["Plugin", "Settings"]

_COMPILER = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "fullgraph": "dynamo_use_fullgraph",
    "dynamic": "dynamo_use_dynamic",
}
_NOT_OF_PLUGIN = (CONFIG_FILE, HOSTFILE, MULTINODE_LAUNCHER)


class Plugin(Protocol):
    """The options of a strategy with a backend of its own, as Accelerate's users give them."""

    @property
    def strategy(self) -> str:
        """The short name of the strategy."""

    @property
    def source(self) -> str | None:
        """The file that the options come from; ``None``: none."""

    @property
    def divides_at_once(self) -> bool:
        """Whether models of ``transformers`` are sharded while they are built."""

    def claimed(self, name: str) -> Any:
        """What the options say of accumulation or clipping; ``None``: nothing."""

    def config_for(self, short: bool) -> dict[str, Any]:
        """The strategy's argument ``config``, for parameters in 16 bits or not."""

    def described(self) -> dict[str, Any]:
        """The options that matter to a reader, by name."""


@dataclass(frozen=True)
class Settings:
    """What a configuration says; what it leaves open is not in the mappings.

    Attributes:
        values: of the keys in :data:`~trainkit.config.keys.KEYS`, but for ``dynamo_backend``.
        backend: of those in :data:`~trainkit.config.keys.BACKEND`, but for ``gradient_accumulation_steps``.
        dynamo: of those in :data:`~trainkit.config.keys.DYNAMO`.
        source: where it is from, for messages.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    backend: Mapping[str, Any] = field(default_factory=dict)
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def out_of(cls, values: dict[str, Any], backend: dict[str, Any], dynamo: dict[str, Any], source: str) -> Settings:
        """The same, with what may stand in two places in one.

        Raises:
            ConfigurationError: it stands in both, with two values.
        """
        for name, home, other in (("gradient_accumulation_steps", values, backend), ("dynamo_backend", dynamo, values)):
            if name in other:
                value = other.pop(name)
                if home.setdefault(name, value) != value:
                    raise ConfigurationError(f"{source} has {name} twice, {home[name]} and {value}. Give one of them.")
        return cls(values, backend, dynamo, source)

    def __bool__(self) -> bool:
        return bool(self.values or self.backend or self.dynamo)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, wherever it is."""
        for part in (self.values, self.backend, self.dynamo):
            if name in part:
                return part[name]
        return default

    def over(self, below: Settings) -> Settings:
        """These, and what they leave open as ``below`` says.

        Not its keys for a backend, where these ask for something else, nor the number of its machine, where these are of one.
        """
        theirs = below.backend if self.takes_section or "distributed_type" not in self.values else {}
        if self.values.get("num_machines") == 1:
            below = below.without("machine_rank")
        return Settings(
            {**below.values, **self.values},
            {**theirs, **self.backend},
            {**below.dynamo, **self.dynamo},
            " and ".join(settings.source for settings in (self, below) if settings),
        )

    def without(self, *names: str) -> Settings:
        """These, but for some keys."""
        parts = (self.values, self.backend, self.dynamo)
        values, backend, dynamo = ({name: part[name] for name in part if name not in names} for part in parts)
        return replace(self, values=values, backend=backend, dynamo=dynamo)

    @contextmanager
    def blamed(self, *names: str) -> Iterator[None]:
        """Within it an error says that what it is about is said here, and not by arguments that the user has written.

        Args:
            *names: the keys.
        """
        values = ((name, self.get(name)) for name in names)
        said = ", ".join(f"{name}: {_written(value)}" for name, value in values if value is not None)
        try:
            yield
        except ConfigurationError as error:
            if not said or str(error).startswith(self.source):
                raise
            raise type(error)(f"{self.source} ({said}): {str(error).removeprefix('config: ')}") from error

    @property
    def of_place(self) -> tuple[str, ...]:
        """The keys that say where and under what processes run."""
        return ("distributed_type", "use_cpu", *self.backend)

    @property
    def info(self) -> StrategyInfo | None:
        """The declaration of the strategy that ``distributed_type`` means; ``None`` where it is left open."""
        return find_info_by_type(self.values.get("distributed_type"))

    @property
    def takes_section(self) -> bool:
        """Whether the file has a section for the strategy."""
        return self.info is not None and self.info.plugin is not None

    @property
    def strategy(self) -> str | None:
        """What the strategy "auto" is by the configuration; ``None`` where it leaves that open or :meth:`plugin` says it."""
        info = self.info
        return None if info is None or self.takes_section else info.file_types[self.values["distributed_type"]]

    @property
    def devices(self) -> int | None:
        """The devices that a process of this machine drives, where there is one process for all of them."""
        if self.info is None or not self.info.one_process or "num_processes" not in self.values:
            return None
        return int(self.values["num_processes"]) // int(self.values.get("num_machines", 1))

    @property
    def compiling(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``; empty where nothing is said of it."""
        return {name: self.get(key) for name, key in _COMPILER.items() if self.get(key) not in (None, "default")}

    def plugin(self) -> Plugin | None:
        """The options of the section for the strategy; ``None`` where the strategy has no such section.

        Raises:
            ConfigurationError: keys that contradict each other, or a configuration file of the backend that cannot be read.
        """
        if self.info is None or self.info.plugin is None:
            return None
        told = {name: value for name, value in self.backend.items() if name not in _NOT_OF_PLUGIN and value != "auto"}
        file, steps = self.backend.get(CONFIG_FILE), self.values.get("gradient_accumulation_steps")
        if file is None and steps != "auto":
            told["gradient_accumulation_steps"] = steps
        plugin: Plugin = load(self.info.plugin)(file, **told)
        return plugin


def _written(value: Any) -> str:
    """As it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
