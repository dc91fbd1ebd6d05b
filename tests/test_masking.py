"""What is hidden in command lines, values and messages, and what is not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from trainkit.masking import HIDDEN, is_secret_name, mask_arguments, mask_text, mask_value

S = "S3cr-t"  # what must not be seen

# Command lines with S in them.
HIDES: list[list[str]] = [
    # options with a space
    *([option, S] for option in (
        "--secret-key", "--wandb_key", "--pwd", "--auth", "--bearer", "--db-pass", "--api-key", "--apikey", "--apiKey",
        "--API_KEY",
        "--hf-token", "--hfToken", "--token", "--access_token", "--password", "--passwd", "--passphrase", "--db_password",
        "--secret",
        "--client-secret", "--credentials", "--private-key", "--ssh_key", "--encryption_key", "--aws_secret_access_key",
        "--aws_access_key_id", "--azure-storage-account-key", "--openai_key", "--key", "--cookie", "--jwt", "--sas_token",
        "--authorization", "--PGPASSWORD", "--userpass", "--authtoken", "--new-password", "--password2", "--token_value",
        "--connection-string", "--webhook-url", "--use_auth_token", "--logger.init_args.api_key", "--model.secrets.hf",
        "--pass", "--smtp-pass",
    )),
    # options with one dash, and short ones
    *([option, S] for option in ("-password", "-token", "-pw", "-apikey")),
    ["-u", f"me:{S}"], ["--login", f"u:{S}"], ["--user", f"me:{S}"], [f"--proxy-user=me:{S}"],
    ["-H", f"Authorization: Bearer {S}"],
    # a value that begins with a dash, and several values
    ["--password", f"-{S}"], ["--api-keys", S, S], ["--credentials", "me", S],
    # with "="
    *([f"{name}={S}"] for name in (
        "--api-key", "--password", "--wandb_key", "wandb.api_key", "+logger.token", "++db.pwd", "WANDB_API_KEY", "HF_TOKEN",
        "MYSQL_PWD", "db_password", "--env.AWS_SECRET_ACCESS_KEY", "-password", "--key", "--X-API-KEY", "~secrets.a",
        "a[token]",
    )),
    [f"--password=my {S} words"], ["--export", f"WANDB_API_KEY={S}"], ["-e", f"A=1,HF_TOKEN={S}"], [f"--env=HF_TOKEN={S}"],
    [f"api_key:={S}"], [f"api_key:{S}"], [f"--opts=lr=0.1;token={S};seed=1"],
    # JSON, YAML and Python
    [json.dumps({"api_key": S})], ["--config", json.dumps({"a": [{"dbPassword": S, "lr": 1}]})],
    ["--config=" + json.dumps({"credentials": {"user": "me", "x": S}})], [json.dumps(json.dumps({"token": S}))],
    [f"{{'api_key': '{S}', 'lr': 1}}"], [f"{{api_key: {S}, lr: 1}}"], [f"{{'auth': ['me', '{S}']}}"],
    [f"dict(password='{S}', lr=1)"], [json.dumps({"url": f"https://me:{S}@host/x"})], [f'{{"token": "{S}'],
    [json.dumps({"headers": {"Authorization": f"Bearer {S}"}})], [f'{{\\"token\\": \\"{S}\\"}}'],
    # headers
    *([f"--header={header}"] for header in (
        f"Authorization: Bearer {S}", f"authorization:Basic {S}", f"X-Api-Key: {S}", f"X-Auth-Token: {S}",
        f"Cookie: session={S}; a=b",
        f"Proxy-Authorization: {S}", f"PRIVATE-TOKEN: {S}", f"Bearer {S}",
    )),
    # URLs
    *([url] for url in (
        f"https://me:{S}@host/x", f"s3://key:{S}@bucket/run", f"s3:/key:{S}@bucket/run", f"ftp://me:{S}@ss@host/x", f"redis://:{S}@host",
        f"ftp://me:a/{S}@host/x", f"postgresql+psycopg2://me:{S}@host:5432/db", f"https://{S}@github.com/a/b", f"git+https://{S}@host/a",
        f"https://h/x?X-Amz-Algorithm=A&X-Amz-Signature={S}&X-Amz-Date=1", f"https://h/x?X-Amz-Security-Token={S}",
        f"https://h/x?X-Amz-Credential={S}", f"https://a.blob.core.windows.net/c/b?sp=r&sig={S}", f"https://h/x?X-Goog-Signature={S}",
        f"https://h/x?Expires=1&Signature={S}&Key-Pair-Id=K", f"https://h/x?AWSAccessKeyId={S}", f"https://h/x?access_token={S}#a",
        f"https://h/x?key={S}", f"https://h/#access_token={S}", f"https://hooks.slack.com/services/T0/B0/{S}",
    )),
    *(["--db", f"mysql://me:{S}@h/d"], [f"--root=sftp://me:{S}@h/d"], ["scp", f"me:{S}@host"]),
]  # fmt: skip

# Arguments that stay as they are.
STAYS: list[list[str]] = [
    ["--tokenizer", "gpt2"], ["--max_tokens", "512"], ["--key_size", "64"], ["--author", "me"], ["--passes", "3"],
    ["--monkey", "see"], ["--keyboard=us"], ["--pad_token", "<pad>"], ["--eos-token=</s>"], ["--tokens-per-batch", "9"],
    ["--token_type_ids", "a"], ["--num_keys", "3"], ["--key-dim", "64"], ["--sort_key", "loss"], ["--monitor-key", "val_loss"],
    ["--image_key=jpg"], ["--bypass", "all"], ["--compass", "north"], ["--num-passes", "2"], ["--num_pass", "2"],
    ["--forward-pass", "twice"], ["--passthrough", "a"], ["--pass_rate", "0.9"], ["--secretary", "me"], ["--authors", "me"],
    ["--no-auth", "train.py"], ["--use_auth_token", "true"], ["--token", "--lr", "1"], ["--auth-type", "basic"],
    ["--password-file", "/run/x"], ["--api_key_file=/run/x"], ["--pin_memory", "1"], ["--donkey", "x"], ["--hotkeys", "a"],
    ["--username", "me"], ["--user", "1000:1000"], ["--login", "me"], ["--logins", "3"], ["--signature", "f(x)"],
    ["--cookiecutter", "x"], ["--keyframes", "3"], ["--author=A. Key: B"], ["--keys", "a", "b"], ["--tokens", "3"],
    ["--stop_token_id", "2"], ["--max-new-tokens=3"], ["--key_value_heads", "8"], ["key"], ["token", "S"], ["a:b"],
    ["ssh://git@github.com/a"], ["abfs://container@account/x"], ["hdfs://me@host/x"], ["https://host:8080/a@b"],
    ["https://h/x?page=2&sort_key=a&tokens=3"], ["me@host.org"], ["image:tag@sha256:abc"], ["C:/a:b@c"],
    ['{"tokenizer": "gpt2", "max_tokens": 5, "key": "loss", "lr": 1e-3}'], ["{tokenizer: gpt2, num_keys: 2}"],
    ["model.num_tokens=3"], ["--config", "a=1,b=2"], ["--precision=bf16-mixed"], ["-u", "train.py"], ["--lr", "-1e-3"],
]  # fmt: skip


def test_the_tables_are_large_enough() -> None:
    assert len(HIDES) >= 40
    assert len(STAYS) >= 20


@pytest.mark.parametrize("given", HIDES, ids=" ".join)
def test_a_secret_in_a_command_line(given: list[str]) -> None:
    shown = mask_arguments(["train.py", *given, "--lr", "0.1"])
    assert S not in " ".join(shown)
    assert HIDDEN in " ".join(shown)
    assert shown[0] == "train.py"
    assert shown[-2:] == ["--lr", "0.1"]
    assert len(shown) == len(given) + 3
    assert mask_arguments(shown) == shown


@pytest.mark.parametrize("given", STAYS, ids=" ".join)
def test_no_secret_in_a_command_line(given: list[str]) -> None:
    assert mask_arguments([*given, "--lr", "0.1"]) == [*given, "--lr", "0.1"]


def test_what_is_shown_of_an_argument() -> None:
    """The name stays, so that a reader knows what to fill in."""
    assert mask_arguments(["--api-key=a", "--token", "b", "x.pwd=c", '{"api_key": "d", "lr": 1}']) == [
        "--api-key=***", "--token", "***", "x.pwd=***", '{"api_key": "***", "lr": 1}',
    ]  # fmt: skip
    assert mask_arguments(["postgres://me:a@host/x", "https://h/x?a=1&sig=b&c=2", "{'token': 'a', 'lr': 1}"]) == [
        "postgres://***@host/x", "https://h/x?a=1&sig=***&c=2", "{'token': '***', 'lr': 1}",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [
    f"could not open ftp://me:{S}@host/x: refused", f"'https://h/x?X-Amz-Signature={S}'", f"sent Authorization: Bearer {S}",
    f"(s3://a:{S}@b)", f"x-api-key={S}", "hf_" + 34 * "a", "ghp_" + 36 * "b", "AKIA" + 16 * "C", "sk-" + 40 * "d",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc", "-----BEGIN RSA PRIVATE KEY-----\nabc",
])  # fmt: skip
def test_a_secret_in_a_message(text: str) -> None:
    masked = mask_text(text)
    assert HIDDEN in masked
    assert S not in masked
    assert not any(part in masked for part in ("aaaa", "bbbb", "CCCC", "dddd", "eyJz", "\nabc"))


@pytest.mark.parametrize("text", [
    "trainkit: fit on cpu, 32-true, seed 0.", "token: expected a text, got 3. Fix: token='a'",
    "the key 'loss' is missing: key=...",
    "HookError: on_train_batch_end(self, outputs)", "http://127.0.0.1:8000/a and https://h/x?a=1", "hf_hub and sk-learn",
    "pass=True", "the bearer of the basic training", "the cookie was eaten",
    "2026-11-28T15:07:48.123456Z", "git@github.com:a/b.git",
])  # fmt: skip
def test_a_message_without_a_secret(text: str) -> None:
    assert mask_text(text) == text


def test_values_by_name() -> None:
    given: dict[str, Any] = {
        "lr": 0.1,
        "api_key": S,
        "nested": {"token": S, "n": [1, f"ftp://a:{S}@h"]},
        "use_token": True,
        "t": (1,),
    }
    assert mask_value("", given) == {
        "lr": 0.1, "api_key": "***", "nested": {"token": "***", "n": [1, "ftp://***@h"]}, "use_token": True, "t": [1],
    }  # fmt: skip
    assert mask_value("WANDB_API_KEY", S) == mask_value("pin_password", 1234) == "***"
    assert [mask_value("token", value) for value in (None, True, "", "none")] == [None, True, "", "none"]


@pytest.mark.parametrize("name", ["", "-", "é", "--", "123", ".", "[", "key", "keys", "tokens"])
def test_odd_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("piece", [
    *("a", "a:", "a://a:", "?a=", "x-", "x-a-", "{", "'a':", "\\", "token=", "authorization:", " ", "@", "a.b-", '"'),
    *('a="', "a=[a={", "a='\\", '\\"a', "a:a@", "bearer ", "http://", "&amp;"),
])  # fmt: skip
def test_time_grows_with_the_length(piece: str) -> None:
    """No text, however it repeats, takes a time that grows much faster than its length."""

    def seconds(length: int) -> float:
        text, times = piece * (length // len(piece)), []
        for _ in range(3):
            start = time.process_time()
            mask_arguments([text])
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(40_000) < 64 * max(seconds(5_000), 0.002)
