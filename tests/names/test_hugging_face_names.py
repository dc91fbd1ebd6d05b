"""Every name of the Hugging Face Trainer is a name of ours, or an error or a warning that says what to write."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from typing import Any

import pytest
from helpers import house
from helpers.runs.trainers import make_trainer

from trainkit import Callback, Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import HookError, UnsupportedArgumentError
from trainkit.module.hook_checks import REMOVED, WARNED, check_callback
from trainkit.module.hook_table import HOOKS
from trainkit.names import advice, table, use_instead

NAMES = table("hugging_face")
OURS = {*inspect.signature(Trainer).parameters} - {"unknown"}
transformers = pytest.importorskip("transformers")


def said_by(code: str) -> str:
    with pytest.raises(ImportError) as raised:
        exec(code)
    return str(raised.value)


# A new version of transformers shows here what is new.


@pytest.mark.parametrize("kind", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_all_training_arguments(kind: str) -> None:
    fields = {field.name for field in dataclasses.fields(getattr(transformers, kind))}
    assert fields - {*NAMES["arguments"], *NAMES["same"]} == set()


def test_all_arguments_of_the_trainer() -> None:
    parameters = {*inspect.signature(transformers.Trainer).parameters}
    assert parameters - {*NAMES["constructor"], *NAMES["same"]} == set()


def test_all_public_methods_of_the_trainer() -> None:
    """What a script calls; what the Trainer calls by itself is not here."""
    internal = """
        autocast_smart_context_manager call_model_init compute_loss_context_manager create_accelerator_and_postprocess end
        get_batch_samples get_cp_size get_num_trainable_parameters get_optimizer_group get_sp_size get_total_train_batch_size
        get_tp_size loss_is_scaled_for_ga metrics_format num_examples set_initial_training_values
    """.split()  # noqa: SIM905 - shorter than a list
    public = {name for name in dir(transformers.Trainer) if name[0] != "_"} - {*internal}
    assert public - {*NAMES["attributes"], *dir(Trainer)} == set()
    assert {*NAMES["attributes"]} & {*dir(Trainer)} == set()


def test_all_of_its_state() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainerState)}
    internal = {"eval_steps", "save_steps", "train_batch_size", "is_hyper_param_search", "trial_name", "trial_params"}
    assert fields - {*NAMES["state"], *internal, "stateful_callbacks"} == set()


def test_all_hooks() -> None:
    hooks = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert hooks - {*HOOKS} == {*NAMES["hooks"], *NAMES["unwarned_hooks"]}


def test_all_imports_that_belong_to_the_trainer() -> None:
    pattern = r"\w*(Callback|Trainer|TrainingArguments|TrainerControl|Collator\w*)"
    names = {name for name in dir(transformers) if re.fullmatch(pattern, name)}
    names |= {name for name in dir(transformers.integrations) if name.endswith("Callback")}
    assert {name for name in names if use_instead("trainkit", name) is None} == {"Trainer"}


def test_the_version_is_the_installed_one() -> None:
    assert NAMES["version"].split(".")[0] == transformers.__version__.split(".")[0]


# What is said.


@pytest.mark.parametrize("name", sorted({**NAMES["arguments"], **NAMES["constructor"]}))
def test_an_argument_says_what_to_write(name: str) -> None:
    assert name not in OURS
    use = advice("Trainer", name)
    assert use is not None
    with pytest.raises(UnsupportedArgumentError, match=rf"^Trainer\({name}=...\): {re.escape(use)}\.$"):
        make_trainer(**{name: object()})
    for argument in re.findall(r"^use (\w+)=", use):
        assert argument in OURS, use
    verbs = r"(apply|call|compute|pass|remove|return|set|use)\b"
    assert re.match(verbs, use), f"{use!r} is no advice"


@pytest.mark.parametrize("name", NAMES["same"])
def test_arguments_of_the_same_name(name: str) -> None:
    assert name in OURS
    assert advice("Trainer", name) is None


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        ({"num_train_epochs": 3}, "use max_epochs=3."),
        ({"gradient_accumulation_steps": 4}, "use accumulate_grad_batches=4, or global_batch_size=."),
        (
            {"per_device_train_batch_size": 8},
            "pass DataLoader(batch_size=8) to fit, or TransformersData(train_batch_size=...).",
        ),
        ({"learning_rate": 2e-5}, "use TransformersModule(learning_rate=2e-05), or configure_optimizers."),
        ({"metric_for_best_model": "eval_f1"}, "use restore_best='eval_f1'."),
        ({"load_best_model_at_end": True}, "use restore_best='val_loss'."),
        ({"output_dir": "out"}, "use default_root_dir='out'."),
        ({"gradient_checkpointing": True}, "use activation_checkpointing=True."),
        ({"bf16": True}, "use precision='bf16-mixed'."),
    ],
)
def test_the_users_value_is_in_the_advice(arguments: dict[str, Any], use: str) -> None:
    with pytest.raises(UnsupportedArgumentError) as raised:
        make_trainer(**arguments)
    assert str(raised.value).endswith(f": {use}")


@pytest.mark.parametrize("package", ["trainkit", "trainkit.callbacks"])
@pytest.mark.parametrize("name", sorted(NAMES["imports"]))
def test_an_import_says_what_to_use(package: str, name: str) -> None:
    use = NAMES["imports"][name]
    both = name == "TrainerState"  # Lightning has a class of this name too
    said = f"from trainkit.trainer.states import {name} (Lightning's). For that of transformers: {use}" if both else use
    assert said_by(f"from {package} import {name}") == f"{package} has no {name}. Use: {said}"
    assert "import ..." not in use
    for code in re.findall(r"from [\w.]+ import \w+", use):
        exec(code)


THERE = {"Seq2SeqTrainer", "Seq2SeqTrainingArguments", "TrainingArguments"}


@pytest.mark.parametrize("name", sorted({*NAMES["imports"]} - THERE))
def test_next_to_the_trainer_with_its_constructor_the_names_are_those_of_transformers(name: str) -> None:
    said = said_by(f"from trainkit.integrations.transformers import {name}")
    assert said == f"trainkit.integrations.transformers has no {name}. Use: from transformers import {name}: it works unchanged"


@pytest.mark.parametrize("name", ["TransformersData", "TransformersModule"])
def test_classes_of_ours_in_another_place(name: str) -> None:
    assert said_by(f"from trainkit import {name}").endswith(f"Use: from trainkit.integrations.transformers import {name}")


def test_the_argument_to_resume_is_one_of_fit() -> None:
    with pytest.raises(
        UnsupportedArgumentError, match="^Trainer.fit.*ckpt_path='auto' for the newest checkpoint, or its path.$"
    ):
        make_trainer().fit(None, resume_from_checkpoint=True)  # type: ignore[arg-type]


class OfTransformers(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class Patient(transformers.EarlyStoppingCallback):  # type: ignore[misc, name-defined]
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "fix"),
    [
        (OfTransformers(), r"not OfTransformers, .* on_step_end is on_train_batch_end, on_log is the method log_metrics"),
        (OfTransformers, r"on_step_end is on_train_batch_end"),
        (Patient(3), r"on_evaluate is on_validation_end"),
        (transformers.EarlyStoppingCallback(3), r"Use from trainkit.callbacks import EarlyStopping"),
        (transformers.PrinterCallback, r"Use from trainkit.callbacks import TQDMProgressBar"),
    ],
)
def test_a_callback_of_transformers_says_what_to_use(callback: Any, fix: str) -> None:
    with pytest.raises(HookError, match=f"{fix}.*Or keep it, with Trainer or TransformersModule.from_arguments"):
        Trainer(callbacks=[callback])


@pytest.mark.parametrize("name", sorted(NAMES["attributes"]))
def test_an_attribute_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^a Trainer has no '{name}'. Use {re.escape(NAMES['attributes'][name])}.$"):
        getattr(make_trainer(), name)


@pytest.mark.parametrize("name", sorted(NAMES["state"]))
def test_the_state_says_what_to_use(name: str) -> None:
    trainer = make_trainer()
    with pytest.raises(AttributeError, match=rf"^trainer.state has no '{name}'. Use {re.escape(NAMES['state'][name])}.$"):
        getattr(trainer.state, name)
    for owner, attribute in re.findall(r"\btrainer\.(checkpoint_callback\.)?(\w+)", NAMES["state"][name]):
        assert hasattr(ModelCheckpoint if owner else Trainer, attribute), NAMES["state"][name]
    assert not hasattr(trainer.state, "nothing")


def nothing(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("name", sorted(NAMES["hooks"]))
def test_a_hook_says_what_to_use(name: str) -> None:
    use = NAMES["hooks"][name]
    assert REMOVED[name] == use
    assert name in WARNED
    assert use.partition(",")[0] in HOOKS
    with pytest.warns(TrainkitWarning, match=f"Mine.{name} has the name of a hook of .*, use {use} instead"):
        check_callback(type("Mine", (Callback,), {name: nothing})())


@pytest.mark.parametrize("name", sorted(NAMES["unwarned_hooks"]))
def test_a_name_that_users_give_to_their_own_methods(name: str) -> None:
    assert name not in REMOVED
    check_callback(type("Mine", (Callback,), {name: nothing})())


# What the documentation says.


def test_the_page_of_names_has_every_table() -> None:
    page = (house.ROOT / "docs/moving-over/hugging-face-names.md").read_text("utf-8")
    shown = re.findall(r"<!-- hugging_face: (\w+) -->", page)
    assert shown == ["arguments", "constructor", "attributes", "state", "hooks", "imports"]
    assert {*shown} == {name for name, value in NAMES.items() if isinstance(value, dict)} - {
        *("carried", "training_arguments", "unwarned_hooks")
    }
    build: Any = import_module("docs.build_hooks")
    for group in shown:
        table_of = build.table_of_hugging_face(group)
        assert all(f"`{name}`" in table_of for name in NAMES[group])
    assert "`on_log`" in build.table_of_hugging_face("hooks")
