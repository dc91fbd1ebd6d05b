"""Paths that users pass: `~` is expanded, and a URL such as `s3://bucket/run` becomes a local staging folder.

Everything is written to the staging folder, as to any other folder, and `trainkit.checkpoint.urls` copies it to the URL.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainkit.errors import ConfigurationError
from trainkit.masking import mask_text, without_password

__all__ = ["disk_path", "local_path", "remote_url", "url_of"]

_URL = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)"
)  # at least two letters, unlike a Windows drive; Path("s3://x") has one slash
_STAGING = "trainkit_remote"  # below the working directory, unless TRAINKIT_STAGING names another folder

# RemoteSync folder of a scheme → the scheme. Filled when a URL is first used: the working directory may change later.
_schemes: dict[Path, str] = {}
# URL of a host as messages and the name of its staging folder show it → the same with the password, kept in memory only.
_passwords: dict[str, str] = {}


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """A path with `~` expanded, or the staging folder of a URL.

    Args:
        path: The path or the URL of the user.
        argument: The name of the argument, for the message.

    Raises:
        ConfigurationError: fsspec does not know the scheme of the URL, or a package for it is missing.
    """
    text = os.fsdecode(path)
    match = _URL.fullmatch(text)
    if match is None:
        return Path(os.path.expanduser(text))
    scheme, rest = match[1].lower(), _without_password(text, match, argument)
    if scheme in ("file", "local"):
        return Path("/", rest)
    if ".." in rest.split("/") or not rest.strip("/"):
        raise ConfigurationError(
            f"{argument}: expected a URL with a folder and without '..', such as {scheme}://bucket/run, got {text!r}."
        )
    folder = next((folder for folder, known in _schemes.items() if known == scheme), None)
    if folder is None:
        _check_scheme(scheme, text, argument)
        folder = Path(os.path.abspath(os.environ.get("TRAINKIT_STAGING") or _STAGING), scheme)
        _schemes[folder] = scheme
    return folder / rest.rstrip("/")


def disk_path(path: str | os.PathLike[str], argument: str, fix: str) -> Path:
    """A path with `~` expanded.

    Args:
        path: The path of the user.
        argument: The name of the argument, for the message.
        fix: What to use instead of a URL.

    Raises:
        ConfigurationError: It is a URL.
    """
    text = os.fsdecode(path)
    if _URL.fullmatch(text):
        raise ConfigurationError(f"{argument}: expected a folder on a disk, got the URL {text!r}. Fix: {fix}")
    return Path(os.path.expanduser(text))


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL that a path in a staging folder stands for, without a password, for messages; `None` for any other path."""
    absolute = Path(os.path.abspath(path))
    for folder, scheme in _schemes.items():
        if absolute != folder and absolute.is_relative_to(folder):
            return f"{scheme}://{absolute.relative_to(folder).as_posix()}"
    return None


def remote_url(path: str | os.PathLike[str]) -> str | None:
    """Like `url_of`, with the password that the user has given, to open it."""
    url = url_of(path)
    host = next((host for host in _passwords if url is not None and f"{url}/".startswith(f"{host}/")), None)
    return url if url is None or host is None else _passwords[host] + url.removeprefix(host)


def _without_password(text: str, match: re.Match[str], argument: str) -> str:
    """The part of a URL after the scheme without a password, which is kept in memory."""
    scheme, rest = match[1].lower(), match[2]
    _, question, query = rest.partition("?")
    if mask_text(question + query) != question + query and "@" not in query:  # With an "@" it may be part of a password.
        raise ConfigurationError(
            f"{argument}: expected the URL of a folder, got {text!r}, which is signed for one file. Fix: pass the URL without "
            "the part after '?', and the credentials as the package of its file system reads them, such as by variables"
        )
    shown = without_password(f"{scheme}://{rest}").removeprefix(f"{scheme}://")
    if shown != rest:
        path = "/" + shown.partition("/")[2]
        _passwords[f"{scheme}://{shown.partition('/')[0]}"] = f"{scheme}://{rest.removesuffix(path)}"
    return shown


def _check_scheme(scheme: str, text: str, argument: str) -> None:
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except ValueError:
        raise ConfigurationError(
            f"{argument}: expected a folder, or a URL that fsspec can open, such as s3://bucket/run; got {text!r}, whose "
            f"scheme {scheme!r} it does not know. To register a file system of your own: fsspec.register_implementation"
        ) from None
    except ImportError as error:
        raise ConfigurationError(f"{argument}={text!r} needs a package that is not installed: {error}.") from error
