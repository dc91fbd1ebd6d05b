"""The attribute of a module or data module that a search sets, and the state of a callback before it is restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["FoundAttribute", "existing_attribute", "find_attribute", "read_saved_state", "starts_from_checkpoint"]


class FoundAttribute:
    """An attribute of the module, its `hparams`, the data module or its `hparams`; of all of them that have it.

    Args:
        name: the attribute.
        owners: the modules and data modules that have it as an attribute.
        hparams: the hyper-parameters that contain it.
    """

    def __init__(self, name: str, owners: list[Any], hparams: list[Any]) -> None:
        self.name = name
        self._owners = owners
        self._hparams = hparams

    @property
    def value(self) -> Any:
        """The value of the first owner."""
        return getattr(self._owners[0], self.name) if self._owners else self._hparams[0][self.name]

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Afterwards it has its values again, which may differ from place to place."""
        values = [getattr(owner, self.name) for owner in self._owners]
        saved = [parameters[self.name] for parameters in self._hparams]
        try:
            yield
        finally:
            for owner, value in zip(self._owners, values, strict=True):
                setattr(owner, self.name, value)
            for parameters, value in zip(self._hparams, saved, strict=True):
                parameters[self.name] = value

    def set(self, value: Any) -> None:
        """Set it in all places."""
        for owner in self._owners:
            setattr(owner, self.name, value)
        for parameters in self._hparams:
            parameters[self.name] = value


def find_attribute(names: tuple[str, ...], module: TrainModule, datamodule: DataModule | None, fix: str) -> FoundAttribute:
    """The first of these attributes that exists.

    Raises:
        ConfigurationError: none of them exists; `fix` is the end of the message.
    """
    attribute = existing_attribute(names, module, datamodule)
    if attribute is None:
        where = " and ".join(type(place).__name__ for place in (module, datamodule) if place is not None)
        raise ConfigurationError(
            f"the tuner sets an attribute, and {where} has none of these: {', '.join(names)}. Expected it as an attribute, or "
            f"as an argument of __init__ that save_hyperparameters() keeps. {fix}"
        )
    return attribute


def existing_attribute(names: tuple[str, ...], module: TrainModule, datamodule: DataModule | None) -> FoundAttribute | None:
    """The first of these attributes that exists; `None`: none of them does."""
    places = [place for place in (module, datamodule) if place is not None]
    for name in names:
        owners = [place for place in places if hasattr(place, name)]
        hparams = [place.hparams for place in places if name in place.hparams]
        if owners or hparams:
            return FoundAttribute(name, owners, hparams)
    return None


def starts_from_checkpoint(trainer: Trainer) -> bool:
    """Whether the fit that is being set up starts from a checkpoint."""
    return trainer._run.checkpoint is not None


def read_saved_state(trainer: Trainer, callback: Callback) -> Mapping[str, Any] | None:
    """The state of a callback in the checkpoint that the fit resumes from, before loaders and optimizers are created."""
    checkpoint = trainer._run.checkpoint
    if checkpoint is None or "callbacks" not in checkpoint.components:
        return None
    state: Mapping[str, Any] | None = checkpoint.loaded.state.get("callbacks", {}).get(callback.state_key)
    return state
