"""A `Trainer` without arguments uses the settings of the launch configuration; its own arguments override them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launch.configurations import MULTI_CPU, MULTI_GPU, ONE_CPU, ZERO2, accelerates
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.support import ROOT, STARTUP, run_python

from trainkit import Trainer
from trainkit.callbacks import GradientClipping
from trainkit.config.settings import carry
from trainkit.config.settings_file import check_settings, read_settings
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.strategies import DDPStrategy, ZeROStrategy
from trainkit.strategy import Strategy
from trainkit.trainer.arguments import with_settings

OPEN = {
    "accelerator": "auto",
    "devices": "auto",
    "num_nodes": None,
    "strategy": "auto",
    "precision": None,
    "compile": None,
    "accumulate_grad_batches": None,
    "global_batch_size": None,
    "gradient_clip_val": None,
    "callbacks": None,
}


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`configured(text)` makes this process look as if it had been launched with that configuration file."""

    def configure(text: str) -> None:
        Path("conf.yaml").write_text(text)
        for name, value in carry(check_settings(read_settings("conf.yaml"))).items():
            monkeypatch.setenv(name, value)

    return configure


def bare(**arguments: Any) -> Trainer:
    """A Trainer without arguments for device, strategy and precision, except those given here."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(**{**quiet, "num_sanity_val_steps": 0, "max_epochs": 1, "seed": 1, **arguments})


def shown(trainer: Trainer) -> tuple[Any, ...]:
    arguments = trainer._arguments
    return trainer.strategy.name, trainer.precision, trainer.accumulate_grad_batches, arguments.gradient_clip_val


def test_without_a_configuration() -> None:
    trainer = bare(accelerator="cpu")
    assert shown(trainer) == ("single", "32-true", 1, None)
    assert with_settings(dict(OPEN)) == ({**OPEN, "accumulate_grad_batches": 1}, "")


@pytest.mark.parametrize("text, expected", [
    (ONE_CPU, ("single", "32-true", 1, None)),
    (MULTI_CPU, ("ddp", "32-true", 1, None)),
    (accelerates(distributed_type="NO", mixed_precision="fp16", use_cpu=True), ("single", "16-mixed", 1, None)),
    ("distributed_type: MULTI_CPU\nmixed_precision: bf16\ngradient_accumulation_steps: 3", ("ddp", "bf16-mixed", 3, None)),
    (ZERO2, ("zero2", "bf16-true", 4, 1.0)),
])  # fmt: skip
def test_a_bare_trainer(configured: Any, text: str, expected: tuple[Any, ...], caplog: pytest.LogCaptureFixture) -> None:
    configured(text)
    trainer = bare()
    assert shown(trainer) == expected
    assert str(trainer.strategy.device) == "cpu"
    assert "settings of conf.yaml: " in caplog.text


def test_zero_is_what_it_says(configured: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The ZeRO stage and the offload device are those of the file, and the log lists them."""
    configured(ZERO2)
    strategy: Any = bare().strategy
    assert (strategy.stage, strategy.config.offload_optimizer, strategy.config.offload_params) == (2, "cpu", None)
    assert (
        "settings of conf.yaml: accumulate_grad_batches=4, gradient_clip_val=1.0, strategy='zero2', "
        "offload_optimizer_device='cpu', precision='bf16-true'."
    ) in caplog.text


def test_arguments_beat_the_file(configured: Any) -> None:
    configured(ZERO2)
    assert shown(bare(accumulate_grad_batches=1))[2] == 1  # the default value, given explicitly
    assert shown(bare(gradient_clip_val=0.5))[3] == 0.5
    assert shown(bare(precision="32-true"))[1] == "32-true"
    own = GradientClipping(2.0)
    trainer = bare(callbacks=[own], accelerator="cpu", global_batch_size=16)
    assert (trainer._arguments.gradient_clip_val, trainer.accumulate_grad_batches) == (None, 1)
    assert [callback for callback in trainer.callbacks if isinstance(callback, GradientClipping)] == [own]
    # bf16 in the file is bf16-true only for ZeRO, which keeps master parameters, and bf16-mixed otherwise
    assert shown(bare(strategy="ddp")) == ("ddp", "bf16-mixed", 4, 1.0)
    assert shown(bare(strategy=DDPStrategy(device="cpu", precision="64-true")))[:2] == ("ddp", "64-true")
    assert shown(bare(strategy=Strategy("cpu")))[:2] == ("single", "bf16-mixed")
    assert shown(bare(strategy=ZeROStrategy(stage=1, device="cpu")))[:2] == ("zero1", "bf16-mixed")


def test_a_place_beats_the_file(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that choose a device override the device and the strategy of the file."""

    def told(**given: Any) -> dict[str, Any]:
        complete, _ = with_settings({**OPEN, **given})
        return {name: complete[name] for name in ("accelerator", "strategy", "devices")}

    configured(MULTI_GPU)
    assert told() == {"accelerator": "gpu", "strategy": "ddp", "devices": "auto"}
    assert told(accelerator="cpu")["accelerator"] == "cpu"
    assert told(accelerator="tpu") == {"accelerator": "tpu", "strategy": "auto", "devices": "auto"}
    configured(ONE_CPU)
    assert told() == {"accelerator": "cpu", "strategy": "single", "devices": "auto"}
    assert told(devices=2) == {"accelerator": "cpu", "strategy": "auto", "devices": 2}
    configured(accelerates(distributed_type="XLA", num_processes=8))
    assert told() == {"accelerator": "auto", "strategy": "xla", "devices": 8}
    assert told(accelerator="gpu") == {"accelerator": "gpu", "strategy": "auto", "devices": "auto"}
    assert told(devices=1) == {"accelerator": "auto", "strategy": "xla", "devices": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there(configured: Any) -> None:
    configured(MULTI_GPU)
    with pytest.raises(ConfigurationError, match="accelerator='cpu'"):
        bare()


def test_a_deepspeed_configuration(configured: Any) -> None:
    """The Trainer reads the stage, accumulation and clipping from the DeepSpeed file; its own arguments override them."""
    zero = {"stage": 1, "reduce_bucket_size": 1000}
    Path("ds.json").write_text(
        json.dumps({"zero_optimization": zero, "gradient_clipping": 0.3, "gradient_accumulation_steps": 2})
    )
    configured(accelerates(distributed_type="DEEPSPEED", use_cpu=True, deepspeed_config={"deepspeed_config_file": "ds.json"}))
    trainer = bare()
    assert shown(trainer) == ("zero1", "32-true", 2, 0.3)
    config: Any = trainer.strategy
    assert config.config.reduce_bucket_size == 1000
    assert shown(bare(accumulate_grad_batches=1, gradient_clip_val=0.5)) == ("zero1", "32-true", 1, 0.5)
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1, "what": 1}}))
    with pytest.raises(
        ConfigurationError, match=r"^conf.yaml \(.*ds.json\): 'zero_optimization': 'what' is not a key that trainkit"
    ):
        bare()


def test_steps_are_compiled(configured: Any) -> None:
    configured("distributed_type: NO\nuse_cpu: true\ndynamo_config: {dynamo_backend: eager, dynamo_use_fullgraph: false}")
    trainer, module = bare(max_steps=1), TinyModule()
    trainer.fit(module, tiny_loader())
    assert trainer._run.compiler is not None
    assert trainer.lightning_module is module
    own = torch.compile(TinyModule(), backend="eager")
    trainer.fit(own, tiny_loader())
    assert trainer._run.compiler is own.dynamo_ctx
    with pytest.raises(Exception, match="expected a TrainModule, received Linear"):
        trainer.fit(torch.nn.Linear(1, 1), tiny_loader())
    torch.compiler.reset()
    configured(
        accelerates(distributed_type="DEEPSPEED", dynamo_config={"dynamo_backend": "eager", "use_regional_compilation": False})
    )
    text = r"^conf.yaml \(dynamo_backend: eager, distributed_type: DEEPSPEED, use_cpu: false\): dynamo_backend='eager' does not"
    with pytest.raises(UnsupportedArgumentError, match=text):
        bare()


SCRIPT = """\
import json, os, sys
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from trainkit import Trainer
from trainkit.strategies import ZeROStrategy

quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
quiet |= {"num_sanity_val_steps": 0, "max_steps": 3, "seed": 1}


def trained(**arguments):
    torch.manual_seed(3)
    trainer, module = Trainer(**quiet, **arguments), TinyModule()
    trainer.fit(module, tiny_loader(48, batch_size=2))
    window, clip = trainer.accumulate_grad_batches, trainer._arguments.gradient_clip_val
    facts = [trainer.strategy.name, trainer.precision, window, clip]
    return facts, {name: value.float().tolist() for name, value in module.state_dict().items()}


zero = ZeROStrategy(config={"zero_optimization": {"stage": 2}}, device="cpu", precision="bf16-true")
runs = {
    "bare": trained(),
    "the same by arguments": trained(strategy=zero, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=1.0),
    "other arguments": trained(accumulate_grad_batches=1, gradient_clip_val=0.01, precision="32-true"),
}
place = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "TRAINKIT_DEBUG_MODE")}
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump({"runs": runs, "place": place}, file)
"""


@pytest.mark.slow
def test_real_processes(tmp_path: Path) -> None:
    """A flag overrides the default file, and an argument overrides both. The same arguments give a bit-identical run."""
    Path("script.py").write_text(SCRIPT)
    Path("default.yaml").write_text(ZERO2.replace("offload_optimizer_device: cpu", "offload_optimizer_device: none"))
    found_there = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(STARTUP)])
    done = run_python(
        *("-m", "trainkit", "launch", "--gradient-accumulation-steps", "2", "--debug", "script.py"),
        env={"TRAINKIT_CONFIG_FILE": "default.yaml", "PYTHONPATH": found_there},
    )
    assert done.returncode == 0, done.stderr
    assert "trainkit: using the settings in default.yaml. For other settings: --config_file FILE; for none: " in done.stderr
    options = "accumulate_grad_batches=2, gradient_clip_val=1.0, strategy='zero2', precision="
    said = f"settings of the command line and default.yaml: {options}"
    assert done.stderr.count(said) == 1, "one process prints_here"
    found = [json.loads(Path(f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(found):
        assert one["place"] == {"RANK": str(rank), "WORLD_SIZE": "2", "TRAINKIT_DEBUG_MODE": "1"}
        runs = one["runs"]
        assert runs["bare"] == runs["the same by arguments"]
        assert runs["bare"][0] == ["zero2", "bf16-true", 2, 1.0]
        assert runs["other arguments"][0] == ["zero2", "32-true", 1, 0.01]
        assert runs["other arguments"][1] != runs["bare"][1]
    assert found[0]["runs"] == found[1]["runs"]
