"""`trainkit tpu-config`: the gcloud command that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.main import main

NAMED = ["tpu-config", "--tpu_name", "one", "--tpu_zone", "here"]


def test_the_line_to_run_instead(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--use_alpha", "--install_accelerate", "--command", "pip list", "--command", "ls"]
    line = (
        "gcloud alpha compute tpus tpu-vm ssh one --zone here "
        "--command 'cd /usr/share; pip install trainkit-torch; pip list; ls' --worker all\n"
    )
    assert main([*NAMED, *command]) == 2
    assert capsys.readouterr().err == f"trainkit: tpu-config: trainkit starts nothing on other machines. Run instead: {line}"
    assert main([*NAMED, *command, "--debug"]) == 0
    assert capsys.readouterr().out == line


def test_values_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, commands = tmp_path / "config.yaml", tmp_path / "commands"
    config.write_text("tpu_name: two\ntpu_zone: there\ncommands: [pwd, [date]]\n")
    commands.write_text("echo 1\necho 2\n")
    debug = ["tpu-config", "--debug", "--config_file", str(config)]
    assert main(debug) == 0
    assert main([*debug, "--tpu_zone", "here", "--command_file", str(commands)]) == 0
    config.write_text(f"tpu_name: two\ntpu_zone: there\ncommand_file: {commands}\n")
    assert main(debug) == 0
    ssh = "gcloud compute tpus tpu-vm ssh two --zone"
    assert capsys.readouterr().out.splitlines() == [
        f"{ssh} there --command 'cd /usr/share; pwd; date' --worker all",
        f"{ssh} here --command 'cd /usr/share; echo 1; echo 2' --worker all",
        f"{ssh} there --command 'cd /usr/share; echo 1; echo 2' --worker all",
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--command", "ls"], "tpu-config: expected --tpu_name, --tpu_zone. Fix:"),
        (NAMED[1:], "tpu-config: expected --command. Fix:"),
        ([*NAMED[1:], "--command_file", "nowhere"], "--command_file nowhere cannot be read"),
        ([*NAMED[1:], "--command", "ls", "--accelerate_version", "1.0"], "--accelerate_version is not supported. Fix:"),
    ],
)
def test_what_is_missing(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpu-config", *arguments]) == 2
    assert words in capsys.readouterr().err
