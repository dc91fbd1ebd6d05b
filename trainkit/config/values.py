"""``Settings``: what a configuration says, and what that comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.config.deepspeed_plugin import DeepSpeedPlugin

__all__ = ["Settings"]

_STRATEGIES = {"NO": "single", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "XLA": "xla"}
_COMPILER = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "fullgraph": "dynamo_use_fullgraph",
    "dynamic": "dynamo_use_dynamic",
}
_NOT_OF_PLUGIN = ("deepspeed_config_file", "deepspeed_hostfile", "deepspeed_multinode_launcher")


@dataclass(frozen=True)
class Settings:
    """What a configuration says; what it leaves open is not in the mappings.

    Attributes:
        values: of the keys in :data:`~trainkit.config.keys.KEYS`, but for ``dynamo_backend``.
        deepspeed: of those in :data:`~trainkit.config.keys.DEEPSPEED`, but for ``gradient_accumulation_steps``.
        dynamo: of those in :data:`~trainkit.config.keys.DYNAMO`.
        source: where it is from, for messages.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def out_of(cls, values: dict[str, Any], deepspeed: dict[str, Any], dynamo: dict[str, Any], source: str) -> Settings:
        """The same, with what may stand in two places in one.

        Raises:
            ConfigurationError: it stands in both, with two values.
        """
        for name, home, other in (("gradient_accumulation_steps", values, deepspeed), ("dynamo_backend", dynamo, values)):
            if name in other:
                value = other.pop(name)
                if home.setdefault(name, value) != value:
                    raise ConfigurationError(f"{source} has {name} twice, {home[name]} and {value}. Give one of them.")
        return cls(values, deepspeed, dynamo, source)

    def __bool__(self) -> bool:
        return bool(self.values or self.deepspeed or self.dynamo)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, wherever it is."""
        for part in (self.values, self.deepspeed, self.dynamo):
            if name in part:
                return part[name]
        return default

    def over(self, below: Settings) -> Settings:
        """These, and what they leave open as ``below`` says.

        Not its keys for DeepSpeed, where these ask for something else, nor the number of its machine, where these are of one.
        """
        kind = self.values.get("distributed_type", "DEEPSPEED")
        theirs = below.deepspeed if kind == "DEEPSPEED" else {}
        if self.values.get("num_machines") == 1:
            below = below.without("machine_rank")
        return Settings(
            {**below.values, **self.values},
            {**theirs, **self.deepspeed},
            {**below.dynamo, **self.dynamo},
            " and ".join(settings.source for settings in (self, below) if settings),
        )

    def without(self, *names: str) -> Settings:
        """These, but for some keys."""
        parts = (self.values, self.deepspeed, self.dynamo)
        values, deepspeed, dynamo = ({name: part[name] for name in part if name not in names} for part in parts)
        return replace(self, values=values, deepspeed=deepspeed, dynamo=dynamo)

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
        return ("distributed_type", "use_cpu", *self.deepspeed)

    @property
    def strategy(self) -> str | None:
        """What the strategy "auto" is by the configuration; ``None`` where it leaves that open or :meth:`plugin` says it."""
        return _STRATEGIES.get(self.values.get("distributed_type", ""))

    @property
    def devices(self) -> int | None:
        """The devices that a process of this machine drives, where there is one process for all of them (XLA)."""
        if self.values.get("distributed_type") != "XLA" or "num_processes" not in self.values:
            return None
        return int(self.values["num_processes"]) // int(self.values.get("num_machines", 1))

    @property
    def compiling(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``; empty where nothing is said of it."""
        return {name: self.get(key) for name, key in _COMPILER.items() if self.get(key) not in (None, "default")}

    def plugin(self) -> DeepSpeedPlugin | None:
        """ZeRO as the configuration says it; ``None`` where it does not ask for DeepSpeed.

        Raises:
            ConfigurationError: keys that contradict each other, or a DeepSpeed configuration that cannot be read.
        """
        if self.values.get("distributed_type") != "DEEPSPEED":
            return None
        from trainkit.config.deepspeed_plugin import DeepSpeedPlugin

        told = {name: value for name, value in self.deepspeed.items() if name not in _NOT_OF_PLUGIN and value != "auto"}
        file = self.deepspeed.get("deepspeed_config_file")
        if file is not None:
            return DeepSpeedPlugin(hf_ds_config=file, **told)
        steps = self.values.get("gradient_accumulation_steps")
        return DeepSpeedPlugin(gradient_accumulation_steps=None if steps == "auto" else steps, **told)


def _written(value: Any) -> str:
    """As it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
