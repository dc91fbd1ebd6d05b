"""`TorchDynamoPlugin`, `dynamo_backend` and the keys of `dynamo_config` → `Compilation`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.config.compiling import Compilation, TorchDynamoPlugin, compilation_of
from trainkit.config.settings import Settings
from trainkit.errors import ConfigurationError
from trainkit.utils import DynamoBackend

NONE = Settings()
FILE = Settings(dynamo={"dynamo_backend": "eager", "dynamo_use_fullgraph": True, "dynamo_use_regional_compilation": False})


@pytest.mark.parametrize(
    "arguments, options",
    [
        ({"backend": "EAGER"}, {"backend": "eager"}),
        ({"backend": DynamoBackend.AOT_EAGER}, {"backend": "aot_eager"}),
        ({"backend": "inductor", "mode": "reduce-overhead"}, {"backend": "inductor", "mode": "reduce-overhead"}),
        ({"backend": "inductor", "mode": "default"}, {"backend": "inductor"}),
        ({"backend": "eager", "fullgraph": True, "dynamic": False}, {"backend": "eager", "fullgraph": True, "dynamic": False}),
        (
            {"backend": "inductor", "options": {"trace.enabled": True}},
            {"backend": "inductor", "options": {"trace.enabled": True}},
        ),
    ],
)
@pytest.mark.parametrize("use_regional_compilation", [True, False, None])
def test_arguments(arguments: dict[str, Any], options: dict[str, Any], use_regional_compilation: bool | None) -> None:
    plugin = TorchDynamoPlugin(**arguments, use_regional_compilation=use_regional_compilation)
    found = compilation_of(None, plugin, NONE)
    assert found is not None
    assert (found.options, found.regional) == (options, use_regional_compilation)


@pytest.mark.parametrize("plugin", [None, TorchDynamoPlugin("no"), TorchDynamoPlugin("eager", disable=True)])
def test_nothing_is_compiled(plugin: Any) -> None:
    assert compilation_of(None, plugin, NONE) is None
    assert compilation_of("no", None, FILE) is None


def test_the_settings_complete_it() -> None:
    expected = Compilation({"backend": "eager", "fullgraph": True}, False, source="dynamo_backend='eager'")
    assert compilation_of(None, None, FILE) == expected
    assert compilation_of(None, TorchDynamoPlugin(), FILE) == expected
    found = compilation_of(None, TorchDynamoPlugin("aot_eager", use_regional_compilation=True), FILE)
    assert found is not None
    assert (found.options, found.regional) == ({"backend": "aot_eager", "fullgraph": True}, True)


@pytest.mark.parametrize(
    "backend, plugin, message",
    [
        (None, {"backend": "eager"}, r"dynamo_plugin must be a TorchDynamoPlugin, not \{.*import TorchDynamoPlugin"),
        ("eager", TorchDynamoPlugin("eager"), r"dynamo_backend= and dynamo_plugin= were given\. Give one of them"),
        (None, TorchDynamoPlugin(), r"without a backend compiles nothing\. .*TorchDynamoPlugin\(backend='inductor'\)"),
        (None, TorchDynamoPlugin("inducter"), "dynamo_backend='inducter': .*Did you mean 'inductor'"),
        (None, TorchDynamoPlugin("inductor", mode="fastest"), r"torch\.compile does not accept these arguments: .*fastest"),
    ],
)
def test_errors(backend: Any, plugin: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compilation_of(backend, plugin, NONE)


def test_wrong_values() -> None:
    with pytest.raises(ConfigurationError, match=r"TorchDynamoPlugin\(dynamic=\.\.\.\) must be True or False, not 'auto'"):
        TorchDynamoPlugin("eager", dynamic="auto")  # type: ignore[arg-type]


def test_every_argument_of_torch_is_known() -> None:
    """`torch.compile` has no argument that `Trainer(compile={...})` refuses; `model` is the module itself."""
    for name in ("fullgraph", "dynamic", "backend", "mode", "options"):
        assert name in torch.compile.__code__.co_varnames
        assert Compilation.of_trainer({name: None}) is not None
