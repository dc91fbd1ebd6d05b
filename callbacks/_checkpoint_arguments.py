"""The arguments of `ModelCheckpoint`: checks, and the template of a name: `"{epoch:02d}-{val_loss:.2f}"`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from string import Formatter
from typing import TYPE_CHECKING, Any

from trainkit.checks import whole_number
from trainkit.errors import ConfigurationError, MissingMetricError, UnsupportedArgumentError, nearest
from trainkit.module.monitors import how_to_log, not_logged
from trainkit.paths import local_path

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__: list[str] = []

COUNTERS = ("epoch", "step")
DEFAULT_TEMPLATE = "step-{step:08d}"
EQUALS = "="
_FIX = "Fix: ModelCheckpoint(filename='{epoch:02d}-{val_loss:.2f}')"


def check_template(template: Any) -> None:
    """Check that `template` can be filled, and that the result is a plain file name."""
    if not isinstance(template, str) or not template:
        raise ConfigurationError(f"ModelCheckpoint(filename=...) expected a template or None, got {template!r}. {_FIX}")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"ModelCheckpoint(filename={template!r}): {error}. {_FIX}") from error
    for literal, name, spec, conversion in parts:
        if "/" in literal or "\\" in literal or ".." in literal:
            raise ConfigurationError(
                f"ModelCheckpoint(filename={template!r}) expected a plain name, got a path. "
                f"The argument dirpath sets the folder. {_FIX}"
            )
        if name is not None:
            _check_field(template, name, spec or "", conversion)
    sample = fill(template, {name: 0 if name in COUNTERS else 0.5 for name in names_in(template)}, insert=False)
    if sample == "last" or sample.startswith("."):
        reason = "'last' is the pointer of save_last" if sample == "last" else "a name that starts with '.' is hidden"
        raise ConfigurationError(f"ModelCheckpoint(filename={template!r}): {reason}. {_FIX}")


def _check_field(template: str, name: str, spec: str, conversion: str | None) -> None:
    example: int | float = 0 if name in COUNTERS else 0.5
    kind = "a whole number" if name in COUNTERS else "a float"
    try:
        if not name or conversion or "{" in spec:
            raise ValueError("a field is a name and, after a colon, a format")
        format(example, spec)
    except ValueError as error:
        field = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        raise ConfigurationError(
            f"ModelCheckpoint(filename={template!r}): {{{field}}} cannot be filled with {kind}: {error}. {_FIX}"
        ) from error


def names_in(template: str) -> list[str]:
    """The metrics and counters in the template, each once."""
    return list(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name is not None))


def fill(template: str, values: Mapping[str, Any], *, insert: bool, known: Iterable[str] = (), equals: str = EQUALS) -> str:
    """Fill the template.

    Args:
        template: checked by `check_template`.
        values: numbers, or tensors of one element, by name.
        insert: insert `name=` before each value.
        known: other logged names, for the message.
        equals: the text between name and value.

    Raises:
        MissingMetricError: a value in the template is missing.
    """
    text = ""
    for literal, name, spec, _ in Formatter().parse(template):
        text += literal
        if name is None:
            continue
        if name not in values:
            logged = sorted({*values, *known})
            raise MissingMetricError(
                f"ModelCheckpoint(filename={template!r}) needs {name!r}, which was not logged. Known: "
                f"{', '.join(map(repr, logged)) or 'nothing'}.{nearest(name, logged)} Fix: log it, self.log({name!r}, value), "
                "or remove it from filename"
            )
        number = int(values[name]) if name in COUNTERS else float(values[name])
        text += (f"{name}{equals}" if insert else "") + format(number, spec or "")
    return "".join("_" if character in "/\\" or ord(character) < 32 else character for character in text)


def default_name(unknown: list[str], all_logged: bool, validates: bool) -> str:
    """The notice that a name is the default one.

    Args:
        unknown: the metrics in the template that were not logged.
        all_logged: whether all metrics have been logged.
        validates: whether the fit has validations.
    """
    text = f"ModelCheckpoint: {', '.join(unknown)} in filename was {'never logged' if all_logged else 'not logged yet'}"
    until = f" It must be logged by the end of the first epoch{' with a validation' if validates else ''}."
    return f"{text}, so the default name is used." + ("" if all_logged else until)


def missing(trainer: Trainer, monitor: str, logged: Iterable[str]) -> MissingMetricError:
    """The error for a monitor that was never logged."""
    return MissingMetricError(f"{not_logged(trainer, 'ModelCheckpoint', monitor, logged)} {how_to_log(monitor)}.")


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, or of the staging folder of a URL."""
    return os.path.abspath(local_path(path, "dirpath"))


def check_folder(dirpath: Any) -> None:
    """Check that `dirpath` is a folder, a URL or None."""
    is_path = isinstance(dirpath, str | os.PathLike) and os.fspath(dirpath) != ""
    if is_path:
        local_path(dirpath, "dirpath")
    elif dirpath is not None:
        raise ConfigurationError(
            f"ModelCheckpoint(dirpath=...) expected a folder, a URL or None, got {dirpath!r}. "
            "Fix: ModelCheckpoint(dirpath='runs/checkpoints')"
        )


def check_kept(monitor: Any, save_top_k: Any, keep_last: Any, save_last: Any) -> None:
    """Check the arguments that determine which checkpoints to keep."""
    if monitor is not None and (not isinstance(monitor, str) or not monitor):
        raise ConfigurationError(
            f"ModelCheckpoint(monitor=...) expected the name of a logged metric or None, got {monitor!r}. "
            "Fix: ModelCheckpoint(monitor='val_loss'), and in validation_step: self.log('val_loss', loss)"
        )
    whole_number(save_top_k, "ModelCheckpoint(save_top_k=)", -1)
    whole_number(keep_last, "ModelCheckpoint(keep_last=)", -1)
    if save_last not in (None, True, False, "link"):
        raise ConfigurationError(
            f"ModelCheckpoint(save_last=...) expected True, False, 'link' or None, got {save_last!r}. Fix: save_last=True; the "
            "file 'last' then contains the name of the newest checkpoint, and nothing is copied"
        )
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}) expected a monitor that ranks checkpoints. Fix: "
            f"monitor='val_loss' or, to keep the newest, keep_last={save_top_k}"
        )
    if keep_last == 0 and (save_top_k == 0 or (monitor is None and save_top_k != -1)):
        raise ConfigurationError(
            "ModelCheckpoint(keep_last=0) keeps only the best checkpoints, which need a monitor and save_top_k. Fix: "
            "keep_last=1 to keep the newest, or monitor='val_loss'"
        )


# Constants of Lightning's ModelCheckpoint that cannot be changed here: the value, and what to do instead.
_FIXED: dict[str, tuple[Any, str]] = {
    "CHECKPOINT_JOIN_CHAR": ("-", "write the characters in filename: filename='{epoch}_{step}'"),
    "CHECKPOINT_NAME_LAST": ("last", "remove it, and resume with ckpt_path='last', whatever the name of the checkpoint"),
    "FILE_EXTENSION": ("", "remove it: a checkpoint is a folder. Or write it in filename: filename='{epoch}.ckpt'"),
    "STARTING_VERSION": (1, "remove it"),
}


def check_constants(callback: object) -> None:
    """Check that no constant was changed that trainkit cannot follow, because it finds checkpoints by their names."""
    for name, (value, fix) in _FIXED.items():
        if (own := getattr(callback, name)) != value:
            raise UnsupportedArgumentError(
                f"{type(callback).__name__}.{name} is {own!r}, but names of checkpoints always have {value!r} here. Fix: {fix}"
            )


def check_interval(interval: Any) -> timedelta | None:
    """Check `train_time_interval`; 0 is None."""
    if interval is None or (type(interval) is int and interval == 0):
        return None
    if not isinstance(interval, timedelta) or interval < timedelta(0):
        raise ConfigurationError(
            f"ModelCheckpoint(train_time_interval=...) expected a timedelta that is not negative, or None, got {interval!r}. "
            "Fix: ModelCheckpoint(train_time_interval=timedelta(hours=1))"
        )
    return interval
