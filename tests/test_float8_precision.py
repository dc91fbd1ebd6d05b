"""`Float8Precision`: which layers compute in float8, what stays as it was, and runs in it, emulated on the CPU."""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.runs.trainers import make_trainer, parameters_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, DeepSpeedPlugin, Float8Precision, Precision, Strategy, Trainer, TrainModule
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MissingPackageError, UnknownNameError, UnsupportedArgumentError
from trainkit.strategies import DDPStrategy, XLAStrategy, ZeROStrategy
from trainkit.utils import AORecipeKwargs

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def not_the_head(name: str, layer: nn.Module) -> bool:
    return name != "net.4"


def emulated(recipe: Any = "tensorwise", **options: Any) -> Float8Precision:
    return Float8Precision(recipe=recipe, **{"filter": not_the_head, "emulate": True, **options})


class Classifier(TrainModule):
    """Three layers, of which the first two fit float8; records what each training step computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5))
        self.losses: list[float] = []
        self.kinds: set[str] = set()
        self.outputs: set[torch.dtype] = set()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.net[:4](batch[0])
        loss = nn.functional.cross_entropy(self.net[4](hidden), batch[1])
        self.losses.append(loss.item())
        self.kinds |= {type(layer).__name__ for layer in self.net}
        self.outputs.add(hidden.dtype)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches() -> DataLoader[Any]:
    """Seven batches; the last has 4 samples, which is no multiple of 16."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(100, 32, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(5, (100,), generator=generator)), batch_size=16)


def fitted(precision: Any, module: Any = None, *, ckpt_path: Any = None, **options: Any) -> Classifier:
    module = Classifier() if module is None else module
    make_trainer(precision=precision, **{"max_epochs": 2, **options}).fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return module


# Which layers


class Named(nn.Module):
    """A layer of each size without memory for its weight."""

    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, (n, k) in shapes.items():
            setattr(self, name, nn.Linear(k, n, device="meta"))


def converted(module: nn.Module, **options: Any) -> list[str]:
    """The names of the layers that compute in float8."""
    made = Float8Precision(**{"emulate": True, **options})
    made.setup(CPU)
    made.convert_layers(module)
    found = [name for name, layer in module.named_modules() if type(layer).__name__ == "Float8Linear"]
    made.restore_layers()
    return found


def test_the_default_filter_excludes_small_layers_odd_sizes_and_the_head() -> None:
    shapes = dict(
        narrow=(1024, 4096), wide=(1040, 64), deep=(1024, 4112), odd=(4104, 8192), large=(8192, 8192), head=(32000, 8192)
    )
    assert converted(Named(**shapes)) == ["wide", "deep", "large"]


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_the_default_filter_of_recipes_by_rows(recipe: str) -> None:
    shapes = dict(
        a=(2048, 8192), b=(8192, 1024), c=(4096, 2048), d=(4112, 2048), e=(4096, 2064), odd=(8200, 8192), head=(9600, 9600)
    )
    assert converted(Named(**shapes), recipe=recipe) == ["d", "e"]


def test_a_config_of_torchao_by_rows_has_the_filter_of_its_recipe() -> None:
    from torchao.float8 import Float8LinearConfig

    module = Named(a=(2048, 8192), b=(4112, 2048), head=(9600, 9600))
    assert converted(module, recipe=Float8LinearConfig.from_recipe_name("rowwise")) == ["b"]
    assert converted(module) == ["a", "b"]


def test_only_plain_linear_layers_are_converted() -> None:
    """The forward of a subclass may differ, and old-style weight norm computes the weight in each forward."""

    class Own(nn.Linear):
        pass

    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = nn.utils.weight_norm(nn.Linear(16, 16))
    module = nn.ModuleDict({"own": Own(16, 16), "normed": normed, "plain": nn.Linear(16, 16)})
    assert converted(module, filter=lambda name, layer: True) == ["plain"]


def test_the_filter_gets_names_without_the_wrapper_of_torch_compile() -> None:
    seen: list[str] = []
    compiled = torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="eager")
    converted(compiled, filter=lambda name, layer: seen.append(name) is None)  # type: ignore[arg-type]
    assert seen == ["0"]


def test_a_chosen_layer_of_an_odd_size() -> None:
    module = nn.ModuleDict({"fits": nn.Linear(16, 16), "odd": nn.Linear(16, 10)})
    with pytest.raises(ConfigurationError, match=r"chosen 'odd' of shape \(10, 16\), .*multiples of 16. Exclude it: filter="):
        converted(module, filter=lambda name, layer: True)
    assert type(module["fits"]) is nn.Linear  # nothing was changed


def test_a_model_without_a_layer_for_float8() -> None:
    with pytest.warns(
        TrainkitWarning, match="none of the 3 linear layers of Classifier was chosen.*same as precision='bf16-mixed'"
    ):
        assert converted(Classifier()) == []


def test_the_number_of_layers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    converted(Classifier(), filter=not_the_head)
    assert "2 of 3 linear layers of Classifier compute in float8." in caplog.messages


# What stays


def test_a_layer_stays_the_same_object_with_its_parameters_hooks_and_mode() -> None:
    """torchao's own conversion makes new layers, in training mode and without hooks."""
    layer = nn.Linear(16, 16).eval()
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    module = nn.ModuleDict({"first": nn.Sequential(layer), "again": layer})
    before, weight, keys = dict(vars(layer)), layer.weight, list(module.state_dict())
    made = emulated(filter=lambda name, layer: True)
    made.setup(CPU)
    made.convert_layers(module)
    assert module["first"][0] is layer is module["again"]
    assert (type(layer).__name__, layer.weight is weight, layer.training) == ("Float8Linear", True, False)
    assert list(module.state_dict()) == keys
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    layer(torch.randn(4, 16))
    assert calls == ["hook"]
    made.restore_layers()
    assert type(layer) is nn.Linear
    assert layer.weight is weight
    assert vars(layer) == before


def test_a_short_batch_is_padded() -> None:
    """The matrix multiplication of the GPU refuses a batch whose number of rows is not a multiple of 16."""
    made = emulated()
    made.setup(CPU)
    module = Classifier()
    made.convert_layers(module)
    assert module.net[0].config.pad_inner_dim
    made.restore_layers()


@pytest.mark.parametrize("fails", [False, True])
def test_layers_are_plain_again_after_a_run(fails: bool) -> None:
    class Failing(Classifier):
        def on_train_start(self) -> None:
            if fails:
                raise KeyError

    module = Failing()
    parameters = list(map(id, module.parameters()))
    trainer = make_trainer(precision=emulated(), max_epochs=1)
    if fails:
        with pytest.raises(KeyError):
            trainer.fit(module, batches())
    else:
        trainer.fit(module, batches())
        assert module.kinds == {"Float8Linear", "Linear", "ReLU"}
    assert {type(layer) for layer in module.net} == {nn.Linear, nn.ReLU}
    assert list(map(id, module.parameters())) == parameters


def test_settings_of_the_compiler_last_until_the_end_of_the_run() -> None:
    """Without the setting, compiled code with scales by rows differs from eager mode."""
    from torch._inductor import config

    for recipe, wanted in (("tensorwise", False), ("rowwise", True)):
        made = emulated(recipe)
        made.setup(CPU)
        made.convert_layers(Classifier())
        assert config.emulate_precision_casts is wanted
        made.restore_layers()
        assert not config.emulate_precision_casts


# Numbers


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_near_those_of_float32(recipe: str) -> None:
    exact, short, tested = fitted("32-true"), fitted("bf16-mixed"), fitted(emulated(recipe))
    assert tested.outputs == short.outputs == {torch.bfloat16}  # also on the CPU, where torchao ignores autocast
    assert tested.losses != short.losses
    assert tested.losses == pytest.approx(exact.losses, rel=2e-2)
    assert all(p.dtype is torch.float32 for p in tested.parameters())


def test_inference_mode() -> None:
    """torchao's own layer fails in `torch.inference_mode`."""
    module = nn.Sequential(nn.Linear(16, 16))
    made = emulated(filter=lambda name, layer: True)
    made.setup(CPU)
    made.convert_layers(module)
    inputs = torch.randn(4, 16)
    with torch.no_grad(), made.forward_context():
        expected = module(inputs)
    with torch.inference_mode(), made.forward_context():
        assert torch.equal(module(inputs), expected)
    made.restore_layers()


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    whole = fitted(emulated("rowwise"), enable_checkpointing=False)
    first = fitted(emulated("rowwise"), max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True)
    second = fitted(emulated("rowwise"), default_root_dir=tmp_path, enable_checkpointing=True, ckpt_path="last")
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(value, parameters_of(whole)[name]) for name, value in parameters_of(second).items())


@pytest.mark.parametrize("before, after", [(emulated, lambda: "bf16-mixed"), (lambda: "32-true", emulated)])
def test_a_checkpoint_continues_in_another_precision(before: Any, after: Any, tmp_path: Path) -> None:
    first = fitted(before(), max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True)
    saved = parameters_of(first)
    module = Classifier()
    seen: dict[str, Tensor] = {}
    module.on_train_start = lambda: seen.update(parameters_of(module))  # type: ignore[method-assign]
    fitted(after(), module, default_root_dir=tmp_path, enable_checkpointing=True, ckpt_path="last")
    assert all(torch.equal(value, saved[name]) for name, value in seen.items())
    assert len(seen) == 6


def test_your_own_training_loop() -> None:
    accelerator = Accelerator(cpu=True, precision=emulated(filter=lambda name, layer: name != "4"))
    net = Classifier().net
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), batches())
    losses = []
    for inputs, targets in loader:
        outputs = model(inputs)
        assert outputs.dtype is torch.float32
        loss = nn.functional.cross_entropy(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {type(layer).__name__ for layer in net} == {"Float8Linear", "Linear", "ReLU"}
    accelerator.free_memory()
    assert {type(layer) for layer in net} == {nn.Linear, nn.ReLU}
    assert losses == pytest.approx(fitted("32-true").losses[:7], rel=2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch, when it compiles
@pytest.mark.world_size(1)  # in a process of its own, because the compiler leaves threads behind
def test_compiled_layers() -> None:
    eager = fitted(emulated("rowwise"), max_epochs=1)
    module = Classifier()
    module.net[0].compile()
    compiled = fitted(emulated("rowwise"), module, max_epochs=1)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)


@pytest.mark.world_size(2)
def test_ddp() -> None:
    module = Classifier()
    trainer = make_trainer(precision=emulated(), strategy="ddp", devices=2, accelerator="cpu", max_epochs=1)
    trainer.fit(module, batches())
    assert module.kinds == {"Float8Linear", "Linear", "ReLU"}
    weight = module.net[0].weight.detach()
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight)
    assert torch.equal(both[0], both[1])
    assert {type(layer) for layer in module.net} == {nn.Linear, nn.ReLU}


# Sharded weights that are gathered in float8


def trained(precision: Float8Precision, *, sharded: bool, changed: bool = False) -> tuple[list[float], nn.Module]:
    """Losses of SGD on the same batch on each rank, and the model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48))
    precision.setup(CPU)
    precision.convert_layers(net)
    if sharded:
        for layer in (net[0], net[2], net):
            fully_shard(layer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, losses = torch.randn(16, 32), []
    for _ in range(4):
        with precision.forward_context():
            loss = net(inputs).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if changed:
            precision.weights_changed(net)
        losses.append(loss.item())
    return losses, net


@pytest.mark.world_size(2)
def test_weights_that_are_sharded() -> None:
    dist.init_process_group("gloo")
    whole, _ = trained(emulated(), sharded=False)
    assert trained(emulated(), sharded=True)[0] == pytest.approx(whole, rel=1e-6)
    for changed in (False, True):
        gathered = emulated(all_gather=True)
        losses, net = trained(gathered, sharded=True, changed=changed)
        assert losses == pytest.approx(whole, rel=1e-6)
        local = net[0].weight.to_local()
        assert type(local).__name__ == "WeightWithDynamicFloat8CastTensor"
        assert type(net[0].weight.full_tensor()) is Tensor
        assert (net[0].weight._local_tensor._precomputed_scale is not None) is changed
    dist.destroy_process_group()


@pytest.mark.world_size(2)
def test_scales_follow_weights_that_were_loaded() -> None:
    """With scales of earlier weights, larger ones would be cut off, without an error."""
    dist.init_process_group("gloo")
    precision = emulated(all_gather=True)
    _, net = trained(precision, sharded=True, changed=True)
    inputs = torch.ones(16, 32)
    with torch.no_grad(), precision.forward_context():
        for parameter in net.parameters():
            parameter.mul_(8.0)
        stale = net(inputs)
        precision.weights_changed(net)
        fresh = net(inputs)
        for layer in (net[0], net[2]):
            layer.weight._local_tensor._precomputed_scale = None  # computed in the forward then
        assert torch.equal(net(inputs), fresh)
    assert not torch.allclose(stale, fresh, rtol=0.5)
    dist.destroy_process_group()


def test_a_weight_that_is_not_sharded_after_all_is_the_same_again() -> None:
    module = Classifier()
    weight = module.net[0].weight
    made = emulated(all_gather=True)
    made.setup(CPU)
    made.convert_layers(module)
    assert module.net[0].weight is not weight
    made.restore_layers()
    assert module.net[0].weight is weight


def test_a_shared_weight_is_not_gathered_in_float8() -> None:
    module = nn.ModuleDict({"words": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    module["head"].weight = module["words"].weight
    with pytest.raises(ConfigurationError, match="the weight of 'head' is shared with another layer.*Exclude it: filter="):
        converted(module, filter=lambda name, layer: True, all_gather=True)
    assert converted(module, filter=lambda name, layer: True) == ["head"]


# What is refused


def test_names() -> None:
    made: Any = Precision("fp8-mixed")
    assert (type(made), made.name, made.parameter_dtype, made.autocast_dtype) == (
        Float8Precision,
        "fp8-mixed",
        torch.float32,
        torch.bfloat16,
    )
    assert type(copy.deepcopy(made)) is Float8Precision
    assert repr(made) == "Float8Precision(recipe='tensorwise')"
    assert repr(Float8Precision(all_gather=True, emulate=True)).endswith("'tensorwise', all_gather=True, emulate=True)")
    with pytest.raises(UnknownNameError, match="unknown recipe 'rowise'; known: tensorwise, .* Did you mean 'rowwise'"):
        Float8Precision(recipe="rowise")


def test_a_cpu_is_refused_unless_it_emulates() -> None:
    with pytest.raises(
        ConfigurationError, match=r"does not work on the CPU: float8 needs a GPU of CUDA capability 8\.9.*emulate=True"
    ):
        Trainer(precision="fp8-mixed", accelerator="cpu")
    assert Strategy("cpu", precision=emulated()).precision.name == "fp8-mixed"
    with pytest.raises(ConfigurationError, match="MPS, which has no float8"):
        emulated().setup(torch.device("mps"))


@pytest.mark.parametrize(
    "capability, hip, works",
    [((8, 6), None, False), ((8, 9), None, True), ((9, 0), None, True), ((9, 0), "6.4", False), ((9, 4), "6.4", True)],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, works: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    made = Float8Precision()
    if works:
        made.setup(torch.device("cuda:0"))
    else:
        with pytest.raises(ConfigurationError, match="does not work on NVIDIA Some GPU: float8 needs"):
            made.setup(torch.device("cuda:0"))


@pytest.mark.parametrize("strategy", [ZeROStrategy, XLAStrategy])
def test_other_backends_refuse_it(strategy: Any) -> None:
    assert "fp8-mixed" not in strategy.supported_precisions


@pytest.mark.parametrize("strategy", [Strategy, DDPStrategy])
def test_a_gather_in_float8_needs_sharded_weights(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"all_gather=True.*{strategy.__name__} does not. Remove all_gather=True"):
        strategy(device="cpu", precision=emulated(all_gather=True))


def test_a_gather_in_float8_needs_one_scale_for_a_weight() -> None:
    with pytest.raises(ConfigurationError, match="only if it has one scale. Use recipe='tensorwise', or all_gather=False"):
        emulated("rowwise", all_gather=True).setup(CPU)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingPackageError, match=r"needs the package 'torchao'.*pip install 'trainkit-torch\[fp8\]'"):
        emulated().setup(CPU)
    assert Precision("fp8-mixed").name == "fp8-mixed"  # the name alone needs no package


def test_nothing_keeps_a_module_after_its_run() -> None:
    from weakref import ref

    precision = emulated()
    module = fitted(precision, max_epochs=1)
    gone = ref(module.net[0])
    del module
    gc.collect()
    assert gone() is None


# Names of Accelerate and Lightning


def test_accelerates_names() -> None:
    from torchao.float8 import Float8LinearConfig

    seen: list[str] = []

    def chosen(layer: nn.Module, name: str) -> bool:
        seen.append(name)
        return isinstance(layer, nn.Linear) and name == "0"

    handler = AORecipeKwargs(config=Float8LinearConfig(emulate=True), module_filter_func=chosen)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    assert (accelerator.mixed_precision, accelerator.native_amp) == ("fp8", True)
    net = Classifier().net
    accelerator.prepare(net)
    assert seen == ["0", "2", "4"]
    assert [type(layer).__name__ for layer in net] == ["Float8Linear", "ReLU", "Linear", "ReLU", "Linear"]
    accelerator.free_memory()
    assert Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[handler]).mixed_precision == "bf16"


def test_accelerates_gather_in_float8_is_the_default_where_parameters_are_sharded() -> None:
    from torchao.float8 import Float8LinearConfig

    def gathers(sharded: bool = True, **options: Any) -> bool:
        return bool(AORecipeKwargs(**options).precision(sharded).all_gather)

    assert gathers()
    assert not gathers(sharded=False)
    assert not gathers(enable_fsdp_float8_all_gather=False)
    assert not gathers(config=Float8LinearConfig())
    assert gathers(config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    assert gathers(config=Float8LinearConfig(), enable_fsdp_float8_all_gather=True)
    assert gathers(pad_inner_dim=False)
    assert not gathers(sharded=False, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))


@pytest.mark.parametrize("name", ["transformer-engine", "transformer-engine-float16"])
def test_lightnings_names(name: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=f"precision='{name}': use precision='fp8-mixed', which .* with torchao"):
        Trainer(precision=name, accelerator="cpu")


def test_a_backend_with_its_own_masters_refuses_accelerates_name() -> None:
    with pytest.raises(ConfigurationError, match="precision='fp8-mixed' does not work with ZeROStrategy"):
        Accelerator(cpu=True, mixed_precision="fp8", deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
