"""Names of parameters do not contain the prefixes of `torch.compile` and of wrappers such as `DataParallel`."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.resume.saved_state import differences, restore_model
from helpers.support import run_python, without_gloo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DataParallel
from torch.nn.utils import prune

from trainkit.errors import UnsavableError
from trainkit.optim.parameter_names import clean_names, parameter_names
from trainkit.state.model import capture_model


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


class Named(nn.Module):
    """Has submodules with the names that wrappers use for the wrapped module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self._orig_mod = nn.Linear(2, 2, bias=False)


def test_a_plain_module_keeps_its_names() -> None:
    assert clean_names(Named()) == {"module.weight": "module.weight", "_orig_mod.weight": "_orig_mod.weight"}


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        DataParallel,
        lambda m: DataParallel(compiled(m)),
        lambda m: compiled(DataParallel(m)),
        lambda m: DataParallel(DataParallel(m)),
        checkpoint_wrapper,
        offload_wrapper,
        lambda m: checkpoint_wrapper(offload_wrapper(m)),
        lambda m: compiled(checkpoint_wrapper(m)),
        lambda m: checkpoint_wrapper(compiled(m)),
        lambda m: DataParallel(checkpoint_wrapper(compiled(checkpoint_wrapper(DataParallel(m))))),
    ],
)
def test_wrappers_leave_no_trace_at_their_place_only(wrap: object) -> None:
    # only the wrapper's own prefix is removed, not the same names inside of the wrapped module
    assert callable(wrap)
    assert list(clean_names(wrap(Named())).values()) == ["module.weight", "_orig_mod.weight"]
    outer = nn.Sequential(nn.Linear(2, 2), wrap(Named()))
    assert list(clean_names(outer).values()) == ["0.weight", "0.bias", "1.module.weight", "1._orig_mod.weight"]
    plain = nn.Sequential(nn.Linear(2, 2), Named())
    assert restore_model(plain, capture_model(outer), what="checkpoint") == []
    fresh = nn.Sequential(nn.Linear(2, 2), wrap(Named()))
    assert restore_model(fresh, capture_model(plain), what="checkpoint") == []
    assert differences(capture_model(fresh).tensors, capture_model(outer).tensors) == []
    expected = ["0.weight", "0.bias", "1.module.weight", "1._orig_mod.weight"]
    assert list(parameter_names([outer]).values()) == list(capture_model(outer).trained) == expected


def test_a_compiled_module_runs_what_was_loaded() -> None:
    module, other = compiled(nn.Linear(2, 2)), compiled(nn.Linear(2, 2))
    inputs = torch.ones(1, 2)
    expected = module(inputs)
    assert not torch.equal(other(inputs), expected)
    restore_model(other, capture_model(module), what="checkpoint")
    assert torch.equal(other(inputs), expected)


def test_a_module_that_is_there_compiled_too_is_tied() -> None:
    # a submodule and its compiled version share parameters, which are saved once
    module = nn.Module()
    module.net = nn.Linear(2, 2, bias=False)
    module.fast = compiled(module.net)
    state = capture_model(module)
    assert state.aliases == {"fast.weight": "net.weight"}


def test_two_names_that_become_one_are_refused() -> None:
    wrapped = DataParallel(nn.Linear(2, 2))
    wrapped.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsavableError, match="'weight' and 'module.weight', which are both 'weight'"):
        clean_names(wrapped)


def test_names_of_parameters_of_several_modules() -> None:
    first, second = compiled(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    second.again = first
    names = parameter_names([first, second])
    assert list(names.values()) == ["weight", "bias", "model_1/0.weight", "model_1/0.bias"]
    assert names[id(second[0].weight)] == "model_1/0.weight"
    assert names.parameters["bias"] is first._orig_mod.bias


def test_a_pruned_parameter_keeps_its_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [list(parameter_names([module]).values()), {name: id(p) for name, p in module.named_parameters()}]
    prune.identity(module[0], "weight")
    module[1].bias_orig = nn.Parameter(torch.ones(2))  # of the user
    names = parameter_names([compiled(module)])
    assert [name for name in before[0] if name in names.values()] == before[0]
    assert {name: id(p) for name, p in names.parameters.items() if name != "1.bias_orig"} == before[1]


def test_distributed_data_parallel() -> None:
    done = run_python(
        "import torch, torch.distributed as d; from trainkit.state.model import capture_model; "
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1); "
        "wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)); "
        "print(list(wrapped.state_dict()), list(capture_model(wrapped).tensors)); d.destroy_process_group()"
    )
    assert without_gloo(done.stdout).strip() == "['module.weight', 'module.bias'] ['weight', 'bias']", done.stderr


def test_names_do_not_load_the_compiler() -> None:
    done = run_python(
        "import sys, torch; from trainkit.state.model import capture_model; capture_model(torch.nn.Linear(1, 1)); "
        "print('torch._dynamo.eval_frame' in sys.modules)",
        bare=True,
    )
    assert done.stdout.strip() == "False", done.stderr
    assert "torch" in sys.modules
