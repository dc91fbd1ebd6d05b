"""What must not be shown as it is: secrets, and characters that control a terminal.

What may be a secret is replaced by `***` before it is printed, recorded, or made part of the name of a folder.

A value is hidden because of the name that it is given under (`--api-key S`, `{"password": "S"}`), or because of its own form (a
password or a signature in a URL, a header, a well-known kind of token). Messages are masked by form only: there, `key` and
`token` are ordinary words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["HIDDEN", "escape_controls", "is_secret_name", "mask_arguments", "mask_text", "mask_value", "without_password"]

HIDDEN = "***"


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words at the end of a name that make its value a secret, whatever stands before them.
_SECRET = _set(
    "auth authorization bearer connstr cookie cookies cred creds jwt oauth otp passkey passwords psw pw sas secrets userpass "
    "webhook"
)
_SECRET_END = re.compile(
    r"(?:password|passwd|passphrase|passcode|secret|credentials?|pwd|apikeys?"
    r"|(?:access|secret|private|auth|signing|encryption|license)keys?"
    r"|(?:access|auth|api|bearer|refresh|session|hf|github|gitlab|wandb|bot|sas|id)token|(?:db|smtp|ssh|ftp|root|admin)pass)$"
)
_PHRASES = ("access key id", "webhook url", "connection string", "conn string")
# Words before "token", "key" and "pass" that make it no secret.
_TOKENS = _set(
    "add additional audio begin blank bos cls cost decoder end eos eot first image input label last length mask max min new "
    "next num number output pad padding per prefix prompt sep separator single sos special start stop target text time trigger "
    "unk unknown value video word"
)
_KEYS = _set(
    "answer arg array attention audio batch best cache caption category check class column config context data dataset dict "
    "embedding feature features field foreign frame group hash head host hot id image index info input instruction item join "
    "json kv label log logits look lookup loss lr map mask max message metric min model monitor n name num number order output "
    "param parameter partition path per prefix primary prompt query question random response rng routing row sample score seed "
    "shared shuffle size sort source split src state stats step storage summary target task text tgt time track train "
    "unique val value video weight word x y"
)
_PASSES = _set("all band forward backward first high last low max min multi n num number one per second single third two")
_INNOCENT = {"token": _TOKENS, "key": _KEYS, "pass": _PASSES}
# Before a plural: "api keys" are secrets, "keys" are not.
_PLURAL = _set("access api auth bearer encryption hf license private refresh secret service session signing ssh")
_SWITCHES = _set("allow disable enable is need needs no require requires skip with without")
_SWITCHED = ("auth", "cookie", "cookies", "key", "oauth", "password", "passwords", "token")
# At the end of a name these words say nothing about its value.
_FORMS = _set("b64 base64 contents hex json plain raw str value")
_CONTAINERS = {"secret", "secrets", "credential", "credentials", "passwords"}  # These contain secrets under any names.
_LOGIN = {"account", "login", "u", "user", "username"}  # The value may be user:password.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_PLAIN = {"", "true", "false", "none", "null", "yes", "no", "on", "off", HIDDEN}  # values that are no secrets

# The user and the password in a URL. The password may contain "@", and "/" if it is not that of a port and a path.
_URL_USER = re.compile(
    r"""(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{1,30}:/{1,3})
    (?:[^\s/?#@:"'<>\[]{0,256}:(?!\d{1,5}(?:[/?#\s]|$))(?:[^\s/"'<>]{0,1024}|[^\s"'<>]{0,1024}?)|([^\s/?#@:"'<>\[]{1,1024}))@""",
    re.VERBOSE,
)
_TOKEN_USER = re.compile(r"(?:git\+)?https?:|wss?:", re.IGNORECASE)  # schemes of URLs whose user, alone, is a token
_QUERY = re.compile(r"""([?&;#](?:amp;)?([A-Za-z][\w.-]{0,100})=)([^\s&;#"'<>]+)""")
_SIGNED = {"sig", "signature", "xamzsignature", "xgoogsignature", "policy", "awsaccesskeyid", "keypairid", "hmac"}
_HOOK = re.compile(
    r"(https?://(?:hooks\.slack\.com/(?:services|workflows)|(?:\w+\.)?discord(?:app)?\.com/api/webhooks)/)[^\s\"'<>]+"
)
_HEADER = re.compile(
    r"""(?<![\w-])((?:proxy-)?authorization|(?:set-)?cookie|api-key|(?:private|job|deploy)-token
    |x-(?:[a-z0-9]{1,30}-){0,5}(?:key|token|secret|auth|authorization|password|signature|credential))
    (\\?["']?\s{0,9}[:=]\s{0,9}\\?["']?)([^\r\n"'\\]+)""",
    re.VERBOSE | re.IGNORECASE,
)
_KNOWN_SECRETS = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}
    |glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|npm_[A-Za-z0-9]{30,}|wandb_v1_\w{20,}
    |eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|-----BEGIN[A-Z ]{0,20}PRIVATE\ KEY-----.*)""",
    re.VERBOSE | re.DOTALL,
)

# In an argument: a name and its value, in JSON, YAML, Python or "name=value", perhaps with escaped quotes.
_NAME = re.compile(r"""(?<![\w.-])([A-Za-z_][\w.-]{0,200})\\{0,9}["']?\s{0,9}(?:=>|:=|=|:(?!//))\s{0,9}""")
_VALUE = re.compile(
    r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?P<quote>\\{1,9}["']).*?\\{1,9}["']|\\{0,9}["'\[{(].*|[^\s,;&}\])]+)""",
    re.DOTALL,
)
_OPTION = re.compile(r"(-{1,2}|\+{1,2}|~)?([A-Za-z_][\w.\-\[\]/]*)(?:(:?=|:(?!/)\s?)(.*))?", re.DOTALL)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+\S+")  # A header's value begins like this.
# user:password@host, without a scheme; but not image:tag@sha256:…
_USER_AT = re.compile(r"(?<![\w:/@.-])[\w.+-]{1,64}:[^\s/@:]{1,256}@(?!sha\d)(?=[\w.-])")


def is_secret_name(name: str, *, key: bool = False) -> bool:
    """Whether a value under this name may be a secret: an option, a variable or a key in any spelling.

    Args:
        name: such as `--hf-token`, `WANDB_API_KEY`, `trainer.logger.apiKey`.
        key: the word "key" alone names a secret too.
    """
    *outer, inner = re.split(r"[./:\[]+", name.strip("-+~/:.][ "))
    if any(set(_words(part)[-1:]) & _CONTAINERS for part in outer):
        return True
    words = _stem(inner)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if words[0] in _SWITCHES and last in _SWITCHED:
        return False
    if words == ["key"]:
        return key
    if last in _INNOCENT:
        return before not in _INNOCENT[last]
    if last in ("keys", "tokens"):
        return before in _PLURAL
    return last in _SECRET or _SECRET_END.search(last) is not None or " ".join(words).endswith(_PHRASES)


def _stem(name: str) -> list[str]:
    """The words of a name, without those at its end that say nothing about its value."""
    words = _words(name)
    while len(words) > 1 and (words[-1].isdigit() or (words[-1] in _FORMS and words[-2:] != ["key", "value"])):
        words.pop()
    return words


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def mask_text(text: str) -> str:
    """A text for a message, without passwords and signatures in URLs, values of headers, and well-known kinds of tokens."""
    text = _URL_USER.sub(_mask_user, text)
    text = _QUERY.sub(_mask_query, text)
    text = _HOOK.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    return _KNOWN_SECRETS.sub(HIDDEN, text)


def without_password(url: str) -> str:
    """A URL for the name of a folder: without the password, but with the user, since that may select the folder."""
    return _URL_USER.sub(_keep_user, url)


def _keep_user(match: re.Match[str]) -> str:
    if _mask_user(match) == match[0]:
        return match[0]
    user = match[0][len(match[1]) :].rpartition("@")[0].partition(":")[0]
    return match[1] + ("" if not user or match[2] is not None or _TOKEN_USER.match(match[1]) else f"{user}@")


def _mask_user(match: re.Match[str]) -> str:
    alone = match[2]
    if alone is not None and not _TOKEN_USER.match(match[1]) and not _KNOWN_SECRETS.match(alone):
        return match[0]  # Examples: ssh://git@host and abfs://container@account.
    return f"{match[1]}{HIDDEN}@"


def _mask_query(match: re.Match[str]) -> str:
    secret = "".join(_words(match[2])) in _SIGNED or is_secret_name(match[2], key=True)
    return match[1] + HIDDEN if secret and match[3].lower() not in _PLAIN else match[0]


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line in which what may be a secret is replaced by `***`, by the names of options and by the form of values."""
    shown: list[str] = []
    waiting = ""  # the option whose value may follow
    for argument in arguments:
        option = argument.startswith("--") or (argument.startswith("-") and len(argument) == 2)
        if waiting and not option:
            shown.append(_mask_value(waiting, argument))
            plural = _words(waiting)[-1:] and _words(waiting)[-1].endswith("s")
            waiting = waiting if plural else ""
            continue
        waiting = ""
        match = _OPTION.fullmatch(argument)
        if match is None or (match[3] and match[3][0] == ":" and not is_secret_name(match[2])):
            shown.append(_mask_argument(argument))
        elif match[3]:
            head = argument[: match.start(4)]
            shown.append(head + _mask_value(match[2], match[4], key=bool(match[1])))
        else:
            shown.append(_mask_argument(argument))
            waiting = match[2] if match[1] and _may_hide(match[2]) else ""
    return shown


def _may_hide(name: str) -> bool:
    return is_secret_name(name, key=True) or _words(name)[-1:] == ["u"] or bool(set(_words(name)[-1:]) & _LOGIN)


def _mask_value(name: str, value: str, *, key: bool = True) -> str:
    """The value of an option or a variable."""
    if value.lower() in _PLAIN:
        return value
    if is_secret_name(name, key=key):
        return HIDDEN
    user, colon, password = value.partition(":")
    if set(_words(name)[-1:]) & _LOGIN and colon and not (user + password).isdigit() and not password.startswith("//"):
        return HIDDEN
    return _mask_argument(value)


def _mask_argument(text: str) -> str:
    """An argument, which may be JSON, YAML or "name=value"."""
    if text[:1] in ("{", "["):
        try:
            values = json.loads(text)
            masked = mask_value("", values)
        except (ValueError, RecursionError):
            pass  # YAML, or Python
        else:
            return text if masked == values else json.dumps(masked, ensure_ascii=False)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", mask_text(text))
    return _USER_AT.sub(f"{HIDDEN}@", _mask_pairs(text))


def _mask_pairs(text: str) -> str:
    shown, at = "", 0
    while match := _NAME.search(text, at):
        shown += text[at : match.end()]
        at = match.end()
        value = _VALUE.match(text, at) if is_secret_name(match[1]) else None
        if value is not None:
            quote = value["quote"] or (value[0][0] if value[0][0] in "\"'" else "")
            inner = value[0].strip("\"'\\")
            shown += value[0] if inner.lower() in _PLAIN else quote + HIDDEN + quote
            at = value.end()
    return shown + text[at:]


def mask_value(name: str, value: Any) -> Any:
    """A value that is shown under a name, such as a hyper-parameter or an environment variable.

    Args:
        name: its name.
        value: any; texts in lists and dicts are masked too.
    """
    if is_secret_name(name) and not (value is None or isinstance(value, bool) or str(value).lower() in _PLAIN):
        return HIDDEN
    if isinstance(value, dict):
        return {each: mask_value(str(each), inner) for each, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value("", inner) for inner in value]
    return _mask_argument(value) if isinstance(value, str) else value


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """The text with characters that control a terminal escaped, but not those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text
    )
