"""`DeepSpeedPlugin`: the options of ZeRO under Accelerate's names."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.console import warn
from trainkit.errors import ConfigurationError, UnsupportedArgumentError

__all__ = ["DeepSpeedPlugin"]

_PLACES = ("none", "cpu", "nvme")
_NOTHING = (None, "none")
# Argument → its path in DeepSpeed's configuration.
_KEYS = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}


@dataclass
class DeepSpeedPlugin:
    """ZeRO for `Accelerator(deepspeed_plugin=)`, under Accelerate's names; `ZeROStrategy` has more options.

    Args:
        hf_ds_config: A DeepSpeed configuration: a dict, or the path of a JSON file. The other arguments replace what is
            `"auto"` or missing in it.
        gradient_accumulation_steps: Micro-batches per optimizer step. Default: the argument of `Accelerator`.
        gradient_clipping: The largest norm of the gradients. They are clipped to it once per optimizer step, whatever the
            loop passes to `clip_grad_norm_`; a notice shows both if they differ. `"auto"` or `None`: the number of the
            loop.
        zero_stage: 1, 2 or 3. Default: 2.
        is_train_batch_min: Only `True`: sizes are compared with the first loader that `prepare` receives.
        offload_optimizer_device: `"cpu"`, or `"nvme"` (stage 3): where the optimizer state is kept; or `"none"`.
        offload_param_device: The same for the parameters (stage 3).
        offload_optimizer_nvme_path: The folder for the optimizer state.
        offload_param_nvme_path: The folder for the parameters; the same one.
        zero3_init_flag: Shard a `transformers` model while it is built. Default: in stage 3. For other models:
            `with accelerator.strategy.building(): model = Net()`.
        zero3_save_16bit_model: `save_model` writes 16-bit parameters (stage 3).
        transformer_moe_cls_names: Only `None`.
        enable_msamp: Only `False`.
        msamp_opt_level: No effect.

    Attributes:
        deepspeed_config: The configuration for `ZeROStrategy(config=)`, including the arguments above.
        divides_at_once: Whether `transformers` models are sharded while they are built.

    Raises:
        ConfigurationError: Arguments are wrong or contradict each other, or a file cannot be read.
        UnsupportedArgumentError: An argument is not supported; the message says what to use instead.

    Example:
        ```python
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu"))
        ```
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = False
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        has_config = self.hf_ds_config not in _NOTHING
        config = _read(self.hf_ds_config) if has_config else {}
        for name, keys in _KEYS.items():
            self._put(config, name, keys)
        if has_config and _value_at(config, _KEYS["zero_stage"]) is None:
            raise ConfigurationError(
                'DeepSpeedPlugin(hf_ds_config=): {"zero_optimization": {"stage": 1, 2 or 3}} is missing. Add it; or, to train '
                "without ZeRO, remove the plugin: several processes then use DDP."
            )
        zero = config.setdefault("zero_optimization", {})
        zero.setdefault("stage", 2)
        if zero["stage"] == 0 and not isinstance(zero["stage"], bool):
            raise ConfigurationError(
                "DeepSpeedPlugin: stage 0 of ZeRO shards nothing, which is DDP. Remove the plugin, or distributed_type: "
                "DEEPSPEED in the configuration file: several processes then use DDP."
            )
        if zero["stage"] not in (1, 2, 3) or isinstance(zero["stage"], bool):
            raise ConfigurationError(
                f"DeepSpeedPlugin: unknown ZeRO stage {zero['stage']!r}. Use 1, 2 or 3; or, to train without ZeRO, remove the "
                "plugin: several processes then use DDP."
            )
        self.deepspeed_config: dict[str, Any] = config
        for name, keys in _KEYS.items():
            setattr(self, name, _value_at(config, keys))
        self.offload_optimizer_device = self.offload_optimizer_device or "none"
        self.offload_param_device = self.offload_param_device or "none"
        self.zero3_save_16bit_model = self.zero3_save_16bit_model is True
        if self.zero3_init_flag and zero["stage"] != 3:
            warn(
                f"DeepSpeedPlugin(zero3_init_flag=True) has no effect in stage {zero['stage']}: only stage 3 shards "
                "parameters. Remove it, or use zero_stage=3."
            )
        self.zero3_init_flag = self.divides_at_once = zero["stage"] == 3 and self.zero3_init_flag is not False

    def _refuse_unsupported(self) -> None:
        for name in ("offload_optimizer_device", "offload_param_device"):
            if getattr(self, name) not in (None, *_PLACES):
                raise ConfigurationError(f"DeepSpeedPlugin({name}={getattr(self, name)!r}): use 'none', 'cpu' or 'nvme'.")
        steps, norm = self.gradient_accumulation_steps, self.gradient_clipping
        if steps not in (None, "auto") and (isinstance(steps, bool | str) or steps != int(steps) or steps < 1):
            raise ConfigurationError(
                f"DeepSpeedPlugin(gradient_accumulation_steps={steps!r}): expected a whole number ≥ 1, or 'auto'."
            )
        if norm not in (None, "auto") and (isinstance(norm, bool | str) or not 0 <= norm < math.inf):
            raise ConfigurationError(f"DeepSpeedPlugin(gradient_clipping={norm!r}): expected a number ≥ 0, or 'auto'.")
        if not self.is_train_batch_min:
            raise UnsupportedArgumentError(
                "DeepSpeedPlugin(is_train_batch_min=False) is not supported: batch sizes are those of the first loader that "
                "prepare receives. Remove it, and pass the training loader first."
            )
        if self.transformer_moe_cls_names is not None:
            raise UnsupportedArgumentError(
                "DeepSpeedPlugin(transformer_moe_cls_names=) is not supported. Call DeepSpeed yourself, before prepare: "
                "deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])"
            )
        if self.enable_msamp:
            raise UnsupportedArgumentError(
                "DeepSpeedPlugin(enable_msamp=True): FP8 under ZeRO is not supported. Use mixed_precision='bf16'."
            )

    @property
    def strategy(self) -> str:
        """The short name of the strategy: `"zero1"`, `"zero2"` or `"zero3"`."""
        return f"zero{self.zero_stage}"

    @property
    def source(self) -> str | None:
        """The file that `hf_ds_config` names."""
        return self.hf_ds_config if isinstance(self.hf_ds_config, str) else None

    def loop_option(self, name: str) -> Any:
        """Return the value of an option of the loop; `None` if it is missing or `"auto"`.

        The section "activation_checkpointing" is no such option: it configures DeepSpeed's own function, which a model calls.
        """
        value = self.deepspeed_config.get(name) if name in ("gradient_accumulation_steps", "gradient_clipping") else None
        return None if value == "auto" else value

    def describe(self) -> dict[str, Any]:
        """Return the strategy, the configuration file and the offload devices, if given."""
        options = {"strategy": self.strategy, "deepspeed_config_file": self.hf_ds_config}
        options |= {name: getattr(self, name) for name in ("offload_optimizer_device", "offload_param_device")}
        return {name: value for name, value in options.items() if value not in _NOTHING}

    def options_for(self, short: bool, processes: int, nodes: int | None, without: Collection[str]) -> dict[str, Any]:
        """Return the options of `ZeROStrategy` for a run.

        Args:
            short: Whether parameters have 16 bits; with float32, the option to save 16-bit parameters is skipped.
            processes: No effect: the number of processes of the run.
            nodes: No effect: the number of nodes of the run.
            without: Top-level keys of `deepspeed_config` to leave to the arguments of the loop.
        """
        zero = self.deepspeed_config["zero_optimization"]
        kept = {name: value for name, value in zero.items() if short or name != _KEYS["zero3_save_16bit_model"][-1]}
        rest = {name: value for name, value in self.deepspeed_config.items() if name not in without}
        return {"config": {**rest, "zero_optimization": kept}}

    def _put(self, config: dict[str, Any], name: str, keys: tuple[str, ...]) -> None:
        """Write an argument into the configuration, which must not have a different value for it."""
        value = getattr(self, name)
        if value is None or (
            value in (False, "none") and name.endswith(("_device", "_path", "_model")) and not _value_at(config, keys)
        ):
            return
        section = config
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ConfigurationError(f"DeepSpeedPlugin(hf_ds_config=): {key!r} must be a dict, not {section!r}.")
        known = section.get(keys[-1])
        if known not in (None, "auto", value):
            raise ConfigurationError(
                f"DeepSpeedPlugin({name}={value!r}) contradicts hf_ds_config, which has {'.'.join(keys)}: {known!r}. Remove "
                'one of them, or write "auto" into the configuration.'
            )
        section[keys[-1]] = value


def _read(value: Any) -> dict[str, Any]:
    """A copy of DeepSpeed's configuration, given as a mapping or a file."""
    value = getattr(value, "config", value)  # an HfDeepSpeedConfig
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError(f"DeepSpeedPlugin(hf_ds_config=): expected a dict or the path of a JSON file, not {value!r}.")
    try:
        content = json.loads(Path(value).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"DeepSpeedPlugin(hf_ds_config={str(value)!r}) cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigurationError(
            f"DeepSpeedPlugin(hf_ds_config={str(value)!r}) is not valid JSON: {error}. For a file with comments use "
            f"Accelerator(strategy=ZeROStrategy(config={str(value)!r}))"
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"DeepSpeedPlugin(hf_ds_config={str(value)!r}): the file must contain a JSON object, not {str(content)[:60]}."
        )
    return content


def _value_at(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value at a path in the configuration; `None` if there is none."""
    value: Any = config
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value
