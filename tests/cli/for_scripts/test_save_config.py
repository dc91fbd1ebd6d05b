"""`SaveConfigCallback`: the configuration is in the folder of the run, and another run's is not replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.runs.command_lines import Numbers, command_line, config_files
from helpers.runs.tiny import tiny_loader

from trainkit.cli import SaveConfigCallback, TrainkitCLI
from trainkit.errors import ConfigurationError, TrainkitError

PLACE = "--trainer.default_root_dir=runs"
BARE = ("--trainer.logger=false", "--trainer.enable_checkpointing=false", PLACE)


def fit(*arguments: str, **options: Any) -> TrainkitCLI:
    return command_line("fit", "--trainer.max_steps=2", "--trainer.log_every_n_steps=1", *arguments, **options)


@pytest.mark.slow
def test_the_saved_file_starts_the_same_run() -> None:
    first = fit("--model.dropout=0.3", PLACE)
    (path,) = Path("runs").rglob("config.yaml")
    assert path.absolute().parent == Path(first.trainer.checkpoint_callback.dirpath).parent
    assert path.read_text().startswith("# trainkit==")
    assert yaml.safe_load(path.read_text())["trainer"]["max_epochs"] is None
    again = command_line("fit", f"--config={path}", quiet=False)
    assert again.model.hparams == first.model.hparams
    assert again.trainer.callback_metrics == first.trainer.callback_metrics
    assert config_files("runs") == ["config.yaml", "config.yaml"], "each run has its own"


def test_a_resumed_run_keeps_the_first_file() -> None:
    fit(PLACE)
    fit(PLACE, "--ckpt_path=auto")
    assert config_files() == ["config.yaml"], "only ckpt_path differs"
    fit(PLACE, "--ckpt_path=auto", "--trainer.max_steps=3")
    assert config_files() == ["config-from-step-00000002.yaml", "config.yaml"]
    steps = {path.name: yaml.safe_load(path.read_text())["trainer"]["max_steps"] for path in Path("runs").rglob("config*.yaml")}
    assert steps == {"config.yaml": 2, "config-from-step-00000002.yaml": 3}


def test_the_file_of_another_run_is_not_replaced() -> None:
    fit(*BARE)
    fit(*BARE)  # the same configuration
    with pytest.raises(ConfigurationError, match=r"config.yaml is the configuration of another run.*overwrite"):
        fit(*BARE, "--data.samples=8")
    fit(*BARE, "--data.samples=8", save_config_kwargs={"overwrite": True, "config_filename": "config-of-fit.yaml"})
    fit(*BARE, "--data.samples=12", save_config_kwargs={"overwrite": True, "config_filename": "config-of-fit.yaml"})
    assert config_files() == ["config-of-fit.yaml", "config.yaml"]
    assert yaml.safe_load(Path("runs/config-of-fit.yaml").read_text())["data"]["samples"] == 12


@pytest.mark.slow
def test_evaluations() -> None:
    fit(PLACE)
    newest = next(Path("runs").rglob("step-*"))
    evaluation = ("test", PLACE, f"--ckpt_path={newest}")
    command_line(*evaluation, "--trainer.logger=false")
    assert config_files() == ["config.yaml"], "an evaluation without a folder has no file"
    command_line(*evaluation)
    assert config_files() == ["config.yaml", "config.yaml"]


@pytest.mark.slow
def test_several_files() -> None:
    """`multifile` writes what was read from a file of its own to a file again."""
    Path("model.yaml").write_text(yaml.dump({"dropout": 0.3}))
    fit(PLACE, "--model=model.yaml", save_config_kwargs={"multifile": True})
    folder = next(Path("runs").rglob("config.yaml")).parent
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"] == "model.yaml"
    assert yaml.safe_load((folder / "model.yaml").read_text())["dropout"] == 0.3


class Remote(Numbers):
    """Data that needs secrets.

    Args:
        url: An address.
        mirrors: More addresses.
        api_key: A key.
        eot_token: A number.
    """

    def __init__(self, url: str = "", mirrors: list[str] | None = None, api_key: str | None = None, eot_token: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_secrets_are_masked_and_needed_again(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = ("--data.url=https://u:S3cr-t@h/x?a=1", '--data.mirrors=["ftp://u:S3cr-t@h","***"]', "--data.api_key=S3cr-t")
    first = fit(PLACE, *secrets, "--data.eot_token=3", datamodule_class=Remote)
    assert first.datamodule.hparams.api_key == "S3cr-t"
    (path,) = Path("runs").rglob("config.yaml")
    assert yaml.safe_load(path.read_text())["data"] == {
        "url": "https://***masked***@h/x?a=1",
        "mirrors": ["ftp://***masked***@h", "***"],
        "api_key": "***masked***",
        "eot_token": 3,
    }
    assert "S3cr-t" not in "".join(one.read_text() for one in Path("runs").rglob("*.*") if one.suffix in (".yaml", ".jsonl"))
    fit(PLACE, *secrets, "--data.eot_token=3", "--ckpt_path=auto", datamodule_class=Remote)
    assert config_files() == ["config.yaml"], "the same configuration"

    again = (f"--config={path}", secrets[0])
    with pytest.raises(SystemExit):
        fit(*again, datamodule_class=Remote)
    assert (
        "data.mirrors[0], data.api_key: found '***masked***', which a saved configuration has in place of a password or key. "
        'Expected the value, such as that of an environment variable. Fix: --data.api_key="$SECRET"'
    ) in capsys.readouterr().err
    path.write_text(path.read_text().replace("eot_token: 3", "eot_token: '***masked***'"))
    with pytest.raises(SystemExit):
        fit(*again, datamodule_class=Remote)
    assert "Got value: ***masked***. A saved configuration has" in capsys.readouterr().err
    path.write_text(path.read_text().replace("eot_token: '***masked***'", "eot_token: 3"))
    assert fit(*again, *secrets[1:], datamodule_class=Remote).datamodule.hparams == first.datamodule.hparams


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_what_is_no_file_is_not_written_to(kind: str) -> None:
    """The folder of a run may be from elsewhere."""
    config, target = Path("runs/config.yaml"), Path("target")
    config.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(config)
    else:
        config.symlink_to(target.absolute())
    if kind == "link":
        target.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(TrainkitError, match=r"config.yaml.*(another run|expected a regular file, found a (link|pipe))"):
            fit(*BARE, save_config_kwargs={"overwrite": overwrite})
    assert (target.read_text() if target.exists() else "") == ("mine" if kind == "link" else "")


class Elsewhere(SaveConfigCallback):
    """Notes what it saves."""

    def save_config(self, trainer: Any, module: Any, stage: str) -> None:
        with Path("elsewhere.txt").open("a") as file:
            file.write(f"{stage} {yaml.safe_load(self.parser.dump(self.config))['data']['batch_size']}\n")


def test_save_config_is_called_once(capsys: pytest.CaptureFixture[str]) -> None:
    cli = fit(PLACE, save_config_callback=Elsewhere, save_config_kwargs={"save_to_log_dir": False})
    assert config_files() == []
    cli.trainer.validate(cli.model, tiny_loader(), verbose=False)
    assert Path("elsewhere.txt").read_text() == "fit 4\n"
    with pytest.raises(SystemExit):
        fit(PLACE, save_config_kwargs={"save_to_log_dir": False})
    assert "saves nothing: expected a subclass" in capsys.readouterr().err
