"""`NullExperiment`: `logger.experiment` on processes that do not log."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["NullExperiment"]


class NullExperiment:
    """Placeholder for `logger.experiment` on other processes than the main process: all attributes and calls do nothing.

    So `logger.experiment.add_figure(...)` needs no `if`.
    """

    def __getattr__(self, name: str) -> NullExperiment:
        if name.startswith("__"):  # pickle, copy and inspect must not find these
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> NullExperiment:
        return self

    def __getitem__(self, key: object) -> NullExperiment:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __iter__(self) -> NullExperiment:
        return self

    def __next__(self) -> NoReturn:
        raise StopIteration

    def __enter__(self) -> NullExperiment:
        return self

    def __exit__(self, *error: object) -> None:
        pass
