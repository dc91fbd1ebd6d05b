"""`DeepSpeedPlugin`: the configuration of ZeRO, and training with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Noisy, RegressionModule
from helpers.worlds.worlds import run_world
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import trainkit
from trainkit import Accelerator
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.strategies import ZeROStrategy
from trainkit.utils import DeepSpeedPlugin


def strategy(plugin: DeepSpeedPlugin) -> ZeROStrategy:
    return ZeROStrategy(config=plugin.deepspeed_config)


def test_the_default_is_stage_2() -> None:
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config == {"zero_optimization": {"stage": 2}}
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.offload_param_device) == (2, "none", "none")
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (None, None)
    assert not any((plugin.zero3_init_flag, plugin.divides_at_once, plugin.zero3_save_16bit_model))
    assert repr(strategy(plugin).config) == repr(ZeROStrategy(stage=2).config)


def test_every_argument_is_in_the_configuration() -> None:
    """The arguments are like those of `examples/zero3_offload.yaml`."""
    plugin = DeepSpeedPlugin(
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        zero_stage=3,
        offload_optimizer_device="cpu",
        offload_param_device="cpu",
        zero3_init_flag=True,
        zero3_save_16bit_model=True,
    )
    made = strategy(plugin)
    assert (made.stage, made.config.offload_optimizer, made.config.offload_params) == (3, "cpu", "cpu")
    assert made.config.zero3_save_16bit_model
    assert made.run_settings.clip == 1.0
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps"):
        made.check_batches(2, 3)
    made.check_batches(2, 4)
    assert plugin.divides_at_once
    assert not DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False).divides_at_once


def test_the_folder_of_a_disk(run_dir: Path) -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path=str(run_dir))
    section = plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]
    assert section == {"device": "nvme", "nvme_path": str(run_dir)}
    assert "offload_param" not in plugin.deepspeed_config["zero_optimization"]
    ignored = DeepSpeedPlugin(offload_param_device="none", offload_param_nvme_path="none")
    assert ignored.deepspeed_config == {"zero_optimization": {"stage": 2}}


GIVEN: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": False},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
}


def test_a_configuration(run_dir: Path) -> None:
    before = json.dumps(GIVEN)
    Path("ds.json").write_text(before)

    class OfTransformers:
        config = GIVEN

    for given in (GIVEN, "ds.json", Path("ds.json"), OfTransformers()):
        plugin = DeepSpeedPlugin(given)
        assert plugin.deepspeed_config == GIVEN
        assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (3, "cpu", "auto")
        assert plugin.divides_at_once
        made = strategy(plugin)
        assert (made.stage, made.config.offload_params, made.config.overlap_comm) == (3, "cpu", False)
        assert made.run_settings.clip is None
    filled = DeepSpeedPlugin(GIVEN, gradient_clipping=0.5, zero_stage=3, offload_optimizer_device="cpu")
    assert strategy(filled).run_settings.clip == 0.5, "which is 'auto' in it"
    assert strategy(filled).config.offload_optimizer == "cpu", "which it says nothing of"
    assert json.dumps(GIVEN) == before, "what the user has is not changed"
    assert DeepSpeedPlugin({"gradient_clipping": 1.0}, zero_stage=1).zero_stage == 1


def test_an_init_flag_of_another_stage() -> None:
    """`zero3_init_flag` has no effect in stage 2, as in Accelerate, whose files contain it; a warning says so."""
    with pytest.warns(UserWarning, match="zero3_init_flag=True.* has no effect in stage 2: only stage 3 shards"):
        plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)
    assert not plugin.divides_at_once
    assert not plugin.zero3_init_flag


def test_16_bits_of_another_stage(caplog: pytest.LogCaptureFixture) -> None:
    assert not strategy(DeepSpeedPlugin(zero_stage=2, zero3_save_16bit_model=True)).config.zero3_save_16bit_model
    assert "these keys of config have no effect: zero3_save_16bit_model" in caplog.text


def test_offloaded_parameters_of_another_stage(caplog: pytest.LogCaptureFixture) -> None:
    """`accelerate config` writes it for stage 2, where DeepSpeed ignores it."""
    made = strategy(DeepSpeedPlugin(zero_stage=2, offload_param_device="cpu", offload_optimizer_device="cpu"))
    assert (made.config.offload_optimizer, made.config.offload_params) == ("cpu", None)
    assert "these keys of config have no effect: offload_param." in caplog.text


def test_the_section_for_activation_checkpointing() -> None:
    """It is of DeepSpeed's own function, which a model calls, and no argument of `Accelerator` or `Trainer`."""
    section = {"partition_activations": False, "cpu_checkpointing": True}
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "activation_checkpointing": section})
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True)
    assert isinstance(accelerator.strategy, ZeROStrategy)
    assert accelerator.strategy.config.activation_checkpointing == section
    assert plugin.loop_option("activation_checkpointing") is None


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (
            lambda: DeepSpeedPlugin(zero_stage=0),
            ConfigurationError,
            "stage 0 .* is DDP. Remove the plugin",
        ),
        (lambda: DeepSpeedPlugin(zero_stage=4), ConfigurationError, "ZeRO stage 4. Use 1, 2 or 3"),
        (lambda: DeepSpeedPlugin({"zero_optimization": {"stage": 0}}), ConfigurationError, "stage 0"),
        (lambda: DeepSpeedPlugin({"gradient_clipping": 1.0}), ConfigurationError, '"zero_optimization": .* is missing'),
        (lambda: DeepSpeedPlugin({"zero_optimization": 3}), ConfigurationError, '"zero_optimization": .* is missing'),
        (lambda: DeepSpeedPlugin({"zero_optimization": 3}, zero_stage=1), ConfigurationError, "must be a dict, not 3"),
        (lambda: DeepSpeedPlugin(GIVEN, zero_stage=2), ConfigurationError, "zero_optimization.stage: 3. Remove one of them"),
        (lambda: DeepSpeedPlugin(7), ConfigurationError, "a dict or the path of a JSON file, not 7"),
        (lambda: DeepSpeedPlugin("nowhere.json"), ConfigurationError, "'nowhere.json'. cannot be read: No such file"),
        (lambda: DeepSpeedPlugin(offload_optimizer_device="disk"), ConfigurationError, "'none', 'cpu' or 'nvme'"),
        (lambda: DeepSpeedPlugin(gradient_clipping=-1.0), ConfigurationError, "a number ≥ 0, or 'auto'"),
        (lambda: DeepSpeedPlugin(gradient_clipping="1.0"), ConfigurationError, "a number ≥ 0, or 'auto'"),
        (lambda: DeepSpeedPlugin(gradient_accumulation_steps=0), ConfigurationError, "a whole number ≥ 1, or 'auto'"),
        (lambda: DeepSpeedPlugin(is_train_batch_min=False), UnsupportedArgumentError, "pass the training loader first"),
        (lambda: DeepSpeedPlugin(transformer_moe_cls_names="A"), UnsupportedArgumentError, "set_z3_leaf_modules"),
        (lambda: DeepSpeedPlugin(enable_msamp=True), UnsupportedArgumentError, "mixed_precision='bf16'"),
        (
            lambda: strategy(DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme")),
            ConfigurationError,
            "needs a folder on a fast local disk",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_invalid_configuration_files() -> None:
    Path("comments.json").write_text("// ours\n{}")
    with pytest.raises(ConfigurationError, match=r"is not valid JSON: .*strategy=ZeROStrategy\(config='comments.json'\)"):
        DeepSpeedPlugin("comments.json")
    Path("list.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"must contain a JSON object, not \[1\]"):
        DeepSpeedPlugin("list.json")


def trained(plugin: dict[str, Any] | None, options: dict[str, Any], clip: float | None, folder: str) -> list[float]:
    """The losses of a loop under ZeRO. The loop clips the gradients itself (`clip`), or the configuration does."""
    trainkit.seed_everything(5)
    given = {"config": DeepSpeedPlugin(**plugin).deepspeed_config} if plugin is not None else options
    accelerator = Accelerator(strategy=ZeROStrategy(**given), precision="bf16-true")
    net = RegressionModule().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, prepared, loader = accelerator.prepare(net, optimizer, DataLoader(Noisy(12), 3))
    losses = []
    for batch in loader:
        loss = (model(batch["x"].bfloat16()).float() - batch["y"].float()).square().mean()
        accelerator.backward(loss)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        prepared.step()
        prepared.zero_grad()
        losses.append(float(loss))
    accelerator.save_model(model, folder)
    accelerator.free_memory()
    return losses


def all_trained() -> dict[str, list[float]]:
    plugin = {"zero_stage": 3, "gradient_clipping": 0.05, "offload_optimizer_device": "cpu", "zero3_save_16bit_model": True}
    options = {"stage": 3, "offload_optimizer": "cpu", "zero3_save_16bit_model": True}
    return {
        "plugin": trained(plugin, {}, None, "of-plugin"),
        "clipped": trained(None, options, 0.05, "clipped"),
        "unclipped": trained(None, options, None, "unclipped"),
    }


def test_training_uses_the_configuration(run_dir: Path) -> None:
    [losses] = run_world(1, all_trained)
    assert losses["plugin"] == losses["clipped"]
    assert losses["plugin"] != losses["unclipped"]
    weights = {name: load_file(Path(name, "model.safetensors")) for name in ("of-plugin", "clipped")}
    assert {tensor.dtype for tensor in weights["of-plugin"].values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, weights["clipped"][name]) for name, tensor in weights["of-plugin"].items())
