"""`TransformersModule`: its losses, evaluations and parameters are those of a loop by hand, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hugging_face.tiny_models import (
    KINDS,
    Rows,
    collate,
    evaluate_by_hand,
    loader,
    make_model,
    rows_for,
    train_by_hand,
)
from helpers.runs.trainers import Memory
from torch import Tensor

from trainkit import Callback, DataModule, Trainer
from trainkit.errors import (
    ConfigurationError,
    DataError,
    HookError,
    LossError,
    MetricError,
    OptimizerError,
    UnknownNameError,
    UnsupportedArgumentError,
)
from trainkit.integrations.transformers import TransformersModule

EPOCHS, BATCH, ACCUMULATE = 2, 2, 4
TRAIN_ROWS, VAL_ROWS = 21, 11  # 11 micro-batches, the last of one row; windows of 4, 4 and 3


def trainer(accumulate: int = 1, **options: Any) -> tuple[Trainer, Memory]:
    memory = Memory()
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    settings |= {"num_sanity_val_steps": 0, "accumulate_grad_batches": accumulate, "logger": memory}
    return Trainer(**{**settings, **options}), memory


def truth(kind: str, epsilon: float, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[float], Any]:
    """The losses of the windows, the evaluation after each epoch, and the trained model, by hand."""
    from transformers import get_scheduler

    model = make_model(kind).to(dtype)
    batches = list(loader(rows_for(kind, TRAIN_ROWS), BATCH))
    validation = list(loader(rows_for(kind, VAL_ROWS, seed=1), BATCH))
    norms = ("bias", "LayerNorm", "ln_", "norm.")
    decayed = [p for name, p in model.named_parameters() if not any(n in name for n in norms) and "layernorm" not in name]
    others = [p for p in model.parameters() if not any(p is one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=5e-3)
    schedule = get_scheduler("cosine", optimizer, 2, EPOCHS * 3)
    losses, evaluations = [], []
    for _ in range(EPOCHS):
        losses += train_by_hand(model, batches, ACCUMULATE, optimizer, schedule, epsilon)
        evaluations.append(evaluate_by_hand(model, validation, epsilon))
    return losses, evaluations, model


def check_training(kind: str, epsilon: float, accumulate: int, **options: Any) -> None:
    double = options.get("precision") == "64-true"
    losses, evaluations, model = truth(kind, epsilon, torch.float64 if double else torch.float32)
    module = TransformersModule(
        make_model(kind),
        learning_rate=5e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        label_smoothing_factor=epsilon,
    )
    run, memory = trainer(accumulate, max_epochs=EPOCHS, gradient_clip_val=1.0, **options)
    run.fit(module, loader(rows_for(kind, TRAIN_ROWS), BATCH), loader(rows_for(kind, VAL_ROWS, seed=1), BATCH))
    if not run.is_global_zero:
        return
    for name in ("train_loss", "loss"):
        assert list(memory.of(name).values()) == pytest.approx(losses, abs=1e-6)
    assert list(memory.of("eval_loss").values()) == pytest.approx(evaluations, abs=2e-6)
    if double:
        for (name, ours), theirs in zip(module.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_means_over_the_window(kind: str, epsilon: float) -> None:
    check_training(kind, epsilon, ACCUMULATE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_are_those_of_a_loop_by_hand(kind: str) -> None:
    check_training(kind, 0.1, ACCUMULATE, precision="64-true")


@pytest.mark.world_size(2)
def test_two_processes_train_as_a_loop_by_hand() -> None:
    """All in one test: a process takes seconds to import the models."""
    for kind in KINDS:
        check_training(kind, 0.1, ACCUMULATE // 2, strategy="ddp", precision="64-true")
        check_training(kind, 0.0, ACCUMULATE // 2, strategy="ddp")
    check_training("gpt2", 0.1, ACCUMULATE // 2, strategy="fsdp")


def test_the_model_is_trained_in_training_mode() -> None:
    """`from_pretrained` returns it in eval mode, in which nothing would be dropped."""
    module = TransformersModule(make_model("bert", dropout=0.5))
    modes: list[bool] = []
    module.model.register_forward_pre_hook(lambda model, inputs: modes.append(model.training))
    run, _ = trainer(max_steps=1)
    run.fit(module, loader(rows_for("bert", 4), 4), loader(rows_for("bert", 4), 4))
    assert modes == [True, False]


def test_a_batch_without_counted_labels_counts_nothing() -> None:
    rows = rows_for("llama", 6)
    for row in rows[:2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    model = make_model("llama")
    expected = evaluate_by_hand(model, [collate(rows[2:4]), collate(rows[4:])])
    module = TransformersModule(model, learning_rate=0.0)
    run, memory = trainer(3, max_epochs=1)
    run.fit(module, loader(rows, 2), loader(rows, 2))
    assert list(memory.of("train_loss").values()) == pytest.approx([expected], abs=1e-6)
    assert list(memory.of("eval_loss").values()) == pytest.approx([expected], abs=2e-6)
    assert all(p.isfinite().all() for p in module.parameters())


def regression(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 37, (5,)), "labels": torch.randn((), generator=generator)} for _ in range(count)]


def test_regression_counts_samples() -> None:
    rows, model = regression(5), make_model("bert", problem_type="regression")
    model.classifier, model.num_labels = torch.nn.Linear(16, 1), 1
    losses = [model(**collate([row])).loss.item() for row in rows]
    run, _ = trainer()
    (results,) = run.validate(TransformersModule(model), loader(rows, 2))
    assert results["eval_loss"] == pytest.approx(sum(losses) / 5, abs=2e-6)


def test_a_loss_function_gets_the_number_of_counted_labels() -> None:
    """As in transformers, it gets the labels apart from the model, and divides by the count."""
    seen: list[int] = []

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        seen.append(int(num_items_in_batch))
        assert "loss" not in outputs
        shifted = labels[:, 1:]
        return (
            torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), shifted.flatten(), reduction="sum")
            / num_items_in_batch
        )

    model, rows = make_model("gpt2"), rows_for("gpt2", 5)
    expected = evaluate_by_hand(model, list(loader(rows, 2)))
    (results,) = trainer()[0].validate(TransformersModule(model, compute_loss_func=loss_of), loader(rows, 2))
    assert results["eval_loss"] == pytest.approx(expected, abs=2e-6)
    assert seen == [int((batch["labels"][:, 1:] != -100).sum()) for batch in loader(rows, 2)]


def questions(count: int) -> list[dict[str, Tensor]]:
    """Answers within a text, for a model with two labels."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 37, (count, 6), generator=generator)
    places = torch.randint(0, 6, (count, 2), generator=generator)
    return [{"input_ids": t, "start_positions": p.min(), "end_positions": p.max()} for t, p in zip(tokens, places, strict=True)]


@pytest.mark.parametrize("names", [None, ["start_positions"]])
def test_several_labels_count_samples(names: list[str] | None) -> None:
    from transformers import BertForQuestionAnswering

    seen: list[Any] = []

    def look(prediction: Any) -> dict[str, float]:
        seen.append(prediction.label_ids)
        return {}

    config = make_model("bert").config
    config.num_labels = 2  # The start and the end of an answer.
    model, rows = BertForQuestionAnswering(config).eval(), questions(5)
    losses = [model(**{key: value[None] for key, value in row.items()}).loss.item() for row in rows]
    module = TransformersModule(model, label_names=names, compute_metrics=look)
    (results,) = trainer()[0].validate(module, torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert results["eval_loss"] == pytest.approx(sum(losses) / 5, abs=2e-6)
    starts, ends = ([int(row[key]) for row in rows] for key in ("start_positions", "end_positions"))
    found = [part.tolist() for part in seen[0]] if names is None else [seen[0].tolist()]
    assert found == ([starts, ends] if names is None else [starts])


# ------------------------------------------------------------------------------------------------------------ compute_metrics


class Metrics:
    """Keeps a copy of what it gets."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.maps: list[bool] = []

    def __call__(self, prediction: Any) -> dict[str, Any]:
        self.maps.append(isinstance(prediction.predictions, np.memmap))
        self.calls.append(tuple(np.array(each) for each in prediction))
        return {"rows": len(prediction.label_ids), "eval_sum": prediction.label_ids.sum()}  # has the prefix already


def padded(arrays: list[Any]) -> Any:
    """All rows, padded on the right with -100."""
    width = max(array.shape[1] for array in arrays)
    return np.concatenate(
        [np.pad(a, [(0, 0), (0, width - a.shape[1]), *[(0, 0)] * (a.ndim - 2)], constant_values=-100) for a in arrays]
    )


def check_metrics(**options: Any) -> None:
    """Uneven: five batches, and each of another length."""
    model, rows, metrics = make_model("gpt2"), rows_for("gpt2", 9), Metrics()
    batches = list(loader(rows, 2))
    with torch.no_grad():
        outputs = [model(**batch) for batch in batches]
    logits = padded([each.logits.numpy() for each in outputs])
    means = np.concatenate(
        [np.full(len(batch["labels"]), float(each.loss)) for batch, each in zip(batches, outputs, strict=True)]
    )
    labels = padded([batch["labels"].numpy() for batch in batches])
    module = TransformersModule(model, compute_metrics=metrics, include_for_metrics=["inputs", "loss"])
    run, _ = trainer(**options)
    (results,) = run.validate(module, loader(rows, 2))
    assert results["eval_rows"] == 9
    assert results["eval_sum"] == labels.sum()
    assert len(metrics.calls) == (1 if run.is_global_zero else 0)  # computed once
    for predictions, label_ids, inputs, losses in metrics.calls:
        np.testing.assert_allclose(predictions, logits, atol=1e-6)
        np.testing.assert_array_equal(label_ids, labels)
        np.testing.assert_array_equal(inputs, padded([batch["input_ids"].numpy() for batch in batches]))
        np.testing.assert_allclose(losses, means, atol=1e-6)


def test_metrics_of_all_predictions() -> None:
    check_metrics()


@pytest.mark.world_size(2)
def test_metrics_of_all_predictions_of_two_processes() -> None:
    check_metrics(strategy="ddp")


@pytest.mark.world_size(3)
def test_metrics_of_a_rank_without_data() -> None:
    metrics = Metrics()
    run, _ = trainer(strategy="ddp")
    (results,) = run.validate(TransformersModule(make_model("bert"), compute_metrics=metrics), loader(rows_for("bert", 2), 1))
    assert results["eval_rows"] == 2


def fail(prediction: Any) -> dict[str, float]:
    raise KeyError("no such class")


def test_an_error_in_compute_metrics() -> None:
    module = TransformersModule(make_model("bert"), compute_metrics=fail)
    with pytest.raises(KeyError, match="no such class"):
        trainer()[0].validate(module, loader(rows_for("bert", 4), 2))


@pytest.mark.world_size(2)
def test_an_error_in_compute_metrics_is_raised_on_every_rank() -> None:
    run, _ = trainer(strategy="ddp")
    module = TransformersModule(make_model("bert"), compute_metrics=fail)
    error, words = (KeyError, "no such class") if run.is_global_zero else (MetricError, "on the main process: KeyError")
    with pytest.raises(error, match=words):
        run.validate(module, loader(rows_for("bert", 4), 2))


def test_logits_are_reduced_per_batch() -> None:
    metrics = Metrics()
    module = TransformersModule(
        make_model("gpt2"), compute_metrics=metrics, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)
    )
    trainer()[0].validate(module, loader(rows_for("gpt2", 4), 2))
    assert metrics.calls[0][0].dtype == np.int64
    assert metrics.calls[0][0].shape == metrics.calls[0][1].shape


def test_several_outputs_are_a_tuple() -> None:
    """T5 returns the states of its encoder too."""
    seen: list[Any] = []

    def look(prediction: Any) -> dict[str, float]:
        seen.append([part.shape for part in prediction.predictions])
        return {}

    rows = rows_for("t5", 4)
    trainer()[0].validate(TransformersModule(make_model("t5"), compute_metrics=look), loader(rows, 4))
    longest, answer = (max(len(row[key]) for row in rows) for key in ("input_ids", "labels"))
    assert seen == [[(4, answer, 37), (4, longest, 16)]]


def test_metrics_are_not_logged_in_the_sanity_check() -> None:
    metrics = Metrics()
    run, memory = trainer(max_epochs=1, num_sanity_val_steps=1)
    run.fit(TransformersModule(make_model("bert"), compute_metrics=metrics), *[loader(rows_for("bert", 4), 2)] * 2)
    assert [len(call[1]) for call in metrics.calls] == [2, 4]
    assert list(memory.of("eval_rows").values()) == [4]


@pytest.mark.parametrize("returned", [3.0, {"confusion": [[1, 2], [3, 4]]}])
def test_metrics_must_be_numbers(returned: Any) -> None:
    module = TransformersModule(make_model("bert"), compute_metrics=lambda prediction: returned)
    with pytest.raises(MetricError, match="must return a dict of names and numbers"):
        trainer()[0].validate(module, loader(rows_for("bert", 4), 2))


class Named(DataModule):
    """Two validation sets with names."""

    def __init__(self, names: list[str] | None) -> None:
        super().__init__()
        self.val_names = names

    def val_dataloader(self) -> Any:
        return [loader(rows_for("bert", 4), 2), loader(rows_for("bert", 3, seed=1), 2)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["matched", "other"], [{"eval_matched_loss", "eval_matched_rows"}, {"eval_other_loss", "eval_other_rows"}]),
        (None, [{f"eval_{each}/dataloader_idx_{index}" for each in ("loss", "rows")} for index in range(2)]),
    ],
)
def test_several_sets(names: list[str] | None, expected: list[set[str]]) -> None:
    def count(prediction: Any) -> dict[str, int]:
        return {"rows": len(prediction.label_ids)}

    run, _ = trainer()
    run.validate(TransformersModule(make_model("bert"), compute_metrics=count), Named(names))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    assert set(metrics) == expected[0] | expected[1]
    assert [metrics[name] for name in sorted(metrics) if "rows" in name] == [4, 3]


def test_test_and_predict() -> None:
    run, _ = trainer()
    module = TransformersModule(make_model("bert"), compute_metrics=Metrics())
    (results,) = run.test(module, loader(rows_for("bert", 5), 2))
    assert {"test_loss", "test_rows", "test_eval_sum"} == set(results)  # the name has the prefix of another stage
    outputs = run.predict(module, loader(rows_for("bert", 5), 2))
    assert [tuple(each.shape) for each in outputs] == [(2, 3), (2, 3), (1, 3)]


# ---------------------------------------------------------------------------------------------------------------- generation


def test_generated_tokens_for_metrics() -> None:
    seen: list[Any] = []

    def look(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {}

    model, rows = make_model("t5"), rows_for("t5", 5)
    model.generation_config.eos_token_id = 5  # so that some end early
    module = TransformersModule(
        model, compute_metrics=look, predict_with_generate=True, generation_max_length=7, generation_num_beams=2
    )
    trainer()[0].validate(module, loader(rows, 2))
    expected = []
    for batch in loader(rows, 2):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        expected.append(model.generate(**inputs, max_length=7, num_beams=2).numpy())
    width = max(each.shape[1] for each in expected)
    whole = np.concatenate([np.pad(each, [(0, 0), (0, width - each.shape[1])], constant_values=0) for each in expected])
    np.testing.assert_array_equal(seen[0][0], whole)
    assert seen[0][1].shape == (5, max(len(row["labels"]) for row in rows))


def test_a_causal_model_generates_in_predict() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    module = TransformersModule(make_model("gpt2"), predict_with_generate=True, generation_config=config)
    rows = [{"input_ids": torch.arange(3, 8), "labels": torch.arange(3, 8)} for _ in range(2)]
    (tokens,) = trainer()[0].predict(module, loader(rows, 2))
    assert tokens.shape == (2, 8)
    assert tokens[0, :5].tolist() == [3, 4, 5, 6, 7]


@pytest.mark.world_size(2)
def test_sharded_models_generate_together() -> None:
    """One of two ranks has no second batch, and takes part in the forwards of the other."""
    metrics = Metrics()
    module = TransformersModule(make_model("t5"), compute_metrics=metrics, predict_with_generate=True, generation_max_length=5)
    run, _ = trainer(max_steps=1, strategy="fsdp")
    run.fit(module, loader(rows_for("t5", 4), 2), loader(rows_for("t5", 5), 2))
    assert run.callback_metrics["eval_rows"] == 5


# --------------------------------------------------------------------------------------------------- noise, recomputation, PEFT


class Inputs(Callback):
    """The embeddings in training and in evaluation."""

    def __init__(self) -> None:
        self.seen: dict[bool, Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.model.get_input_embeddings().register_forward_hook(self.keep)

    def keep(self, layer: Any, inputs: Any, output: Tensor) -> None:
        self.seen.setdefault(layer.training, output.detach())


def test_noise_is_added_in_training_only() -> None:
    model, rows, inputs = make_model("llama"), rows_for("llama", 2), Inputs()
    plain = model.get_input_embeddings()(collate(rows)["input_ids"]).detach()
    run, _ = trainer(max_steps=1, callbacks=[inputs])
    run.fit(TransformersModule(model, learning_rate=0.0, neftune_noise_alpha=5.0), *[loader(rows, 2)] * 2)
    noise = (inputs.seen[True] - plain).abs()
    bound = 5.0 / (plain.shape[1] * plain.shape[2]) ** 0.5
    assert 0.9 * bound < noise.max() <= bound * (1 + 1e-5)
    assert torch.equal(inputs.seen[False], plain)
    model.train()
    assert torch.equal(model.get_input_embeddings()(collate(rows)["input_ids"]), plain)  # removed after the fit


def test_recomputation_has_the_same_losses() -> None:
    losses = []
    for recomputes in (False, True):
        module = TransformersModule(make_model("llama"), gradient_checkpointing=recomputes, learning_rate=1e-2)
        assert module.model.model.layers[0].gradient_checkpointing is recomputes
        run, memory = trainer(max_epochs=1)
        run.fit(module, loader(rows_for("llama", 6), 2))
        losses.append(list(memory.of("loss").values()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_arguments_of_recomputation() -> None:
    options = {"use_reentrant": False, "preserve_rng_state": False}
    module = TransformersModule(make_model("llama"), gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    assert module.model.model.layers[0]._gradient_checkpointing_func.keywords == options


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("recomputes", [False, True])
def test_an_adapter_is_trained(recomputes: bool) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    module = TransformersModule(model, learning_rate=1e-2, gradient_checkpointing=recomputes, neftune_noise_alpha=1.0)
    rows = rows_for("llama", 6)
    run, _ = trainer(max_epochs=1)
    run.fit(module, loader(rows, 2), loader(rows, 2))
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    expected = evaluate_by_hand(model, list(loader(rows, 2)))
    assert float(run.callback_metrics["eval_loss"]) == pytest.approx(expected, abs=2e-6)


# -------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"optim": "adamw_torchh"}, OptimizerError, "Did you mean 'adamw_torch'"),
        ({"label_smoothing_factor": -0.1}, ConfigurationError, "label_smoothing_factor"),
        ({"include_for_metrics": ["input"]}, ConfigurationError, "Did you mean 'inputs'"),
        ({"compute_metrics": "accuracy"}, ConfigurationError, "compute_metrics must be a function"),
        ({"processing_class": "bert-base-uncased"}, ConfigurationError, "must be a tokenizer, .* not str.*AutoTokenizer"),
        ({"processing_class": torch.nn.ReLU()}, ConfigurationError, "must be a tokenizer, .* not ReLU"),
        ({"learning_rate": "2e-5"}, ConfigurationError, "learning_rate must be .* not '2e-5'"),  # so YAML reads 2e-5
        ({"weight_decay": -0.1}, ConfigurationError, "weight_decay must be"),
        ({"warmup_steps": "10"}, ConfigurationError, "warmup_steps must be"),
        ({"learning_rat": 1e-3}, UnknownNameError, "no argument 'learning_rat'. Did you mean 'learning_rate'"),
        ({"max_grad_norm": 1.0}, UnsupportedArgumentError, r"use gradient_clip_val=.*\(an argument of Trainer"),
        ({"tokenizer": None}, UnsupportedArgumentError, r"TransformersModule\(processing_class=...\)"),
        ({"seed": 1}, UnsupportedArgumentError, r"use Trainer\(seed=...\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TransformersModule(make_model("bert"), **arguments)


def test_training_arguments_instead_of_a_tokenizer(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(ConfigurationError, match="not TrainingArguments.*TransformersModule.from_arguments"):
        TransformersModule(make_model("bert"), TrainingArguments(str(tmp_path), use_cpu=True))


class WithLoss(TransformersModule):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any: ...


class WithOptimizer(TransformersModule):
    def create_optimizer_and_scheduler(self) -> Any: ...


class WithMethods(TransformersModule):
    """Its own code calls the method, so it is the user's."""

    def create_optimizer(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.create_optimizer()


@pytest.mark.parametrize(("kind", "use"), [(WithLoss, "compute_loss_func="), (WithOptimizer, "configure_optimizers")])
def test_a_method_that_the_hugging_face_trainer_would_call(kind: type[TransformersModule], use: str) -> None:
    with pytest.raises(HookError, match=f"is never called by trainkit. Use .*{use}"):
        kind(make_model("bert"))


def test_a_method_of_the_user_with_such_a_name() -> None:
    module = WithMethods(make_model("bert"))
    run, _ = trainer(max_steps=1)
    run.fit(module, loader(rows_for("bert", 2), 2))
    assert isinstance(run.optimizers[0], torch.optim.SGD)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bert", r"rename_column\('target', 'labels'\).*label_names=\[\.\.\.\]\.$"),
        ("gpt2", r"DataCollatorForLanguageModeling\(tokenizer, mlm=False\)"),
        ("llama", r"DataCollatorForLanguageModeling\(tokenizer, mlm=False\)"),
    ],
)
def test_rows_without_labels(kind: str, words: str) -> None:
    data = torch.utils.data.DataLoader(rows_for(kind, 4), batch_size=2, collate_fn=without_labels)  # type: ignore[arg-type]
    with pytest.raises(LossError, match=words):
        trainer(max_steps=1)[0].fit(TransformersModule(make_model(kind)), data)


@pytest.mark.parametrize("metrics", [None, lambda prediction: {"a": 1.0}])
def test_an_evaluation_without_labels_is_told_once(metrics: Any, caplog: pytest.LogCaptureFixture) -> None:
    data = torch.utils.data.DataLoader(rows_for("bert", 6), batch_size=2, collate_fn=without_labels)  # type: ignore[arg-type]
    run, _ = trainer(max_epochs=2)
    run.fit(TransformersModule(make_model("bert"), compute_metrics=metrics), loader(rows_for("bert", 4), 2), data)
    told = [message for message in caplog.messages if "has no labels" in message]
    assert len(told) == 1
    assert "of the validation set" in told[0]
    assert "no eval_loss" in told[0]
    assert ("compute_metrics is not called" in told[0]) == (metrics is not None)


def test_predictions_without_labels_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    data = torch.utils.data.DataLoader(rows_for("bert", 4), batch_size=2, collate_fn=without_labels)  # type: ignore[arg-type]
    assert len(trainer()[0].predict(TransformersModule(make_model("bert")), data)) == 2
    assert not [message for message in caplog.messages if "has no labels" in message]


def test_rows_instead_of_batches() -> None:
    rows = [{"input_ids": [3, 4], "attention_mask": [1, 1], "label": 1}] * 2
    with pytest.raises(DataError, match=r"input_ids, attention_mask of the batch is a list.*TransformersData\(train, val"):
        trainer(max_steps=1)[0].fit(TransformersModule(make_model("bert")), rows)


@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_a_metric_with_the_name_of_the_loss(name: str) -> None:
    module = TransformersModule(make_model("bert"), compute_metrics=lambda prediction: {name: 1.0})
    with pytest.raises(MetricError, match=f"returned '{name}', the name of the loss of the model"):
        trainer()[0].validate(module, loader(rows_for("bert", 4), 2))


# ------------------------------------------------------------------------------------------------------------ special tokens


def tokenizer_with(**tokens: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<end>": 4, "<pad>": 5}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), **tokens)


def test_a_model_gets_the_padding_token_of_its_tokenizer(tmp_path: Path) -> None:
    """A classifier of GPT-2 reads the position of the last token from it, and without it refuses batches."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, num_labels=2, eos_token_id=1, bos_token_id=1)
    module = TransformersModule(GPT2ForSequenceClassification(config), tokenizer_with(pad_token="<pad>", eos_token="<end>"))
    rows = {"input_ids": torch.tensor([[2, 3, 5], [3, 2, 2]]), "labels": torch.tensor([0, 1])}
    run, _ = trainer(max_steps=1)
    run.fit(module, [rows], [rows])
    assert (config.pad_token_id, config.eos_token_id) == (5, 4)
    module.model.eval()
    alone = [module.model(rows["input_ids"][row : row + 1, :end]).logits for row, end in ((0, 2), (1, 3))]
    torch.testing.assert_close(module.model(rows["input_ids"]).logits, torch.cat(alone))
    module.save_pretrained(tmp_path)
    assert GPT2Config.from_pretrained(tmp_path).pad_token_id == 5


def test_a_model_generates_up_to_the_end_of_its_tokenizer() -> None:
    model = make_model("llama")
    module = TransformersModule(model, tokenizer_with(eos_token="<end>", pad_token="<pad>"))
    run, _ = trainer(max_steps=1)
    run.fit(module, loader(rows_for("llama", 2), 2))
    ends = model.generation_config.eos_token_id
    assert 4 in (ends if isinstance(ends, list) else [ends])
    assert model.generation_config.pad_token_id == 5


def test_a_name_instead_of_a_model() -> None:
    with pytest.raises(ConfigurationError, match="from_pretrained"):
        TransformersModule("bert-base-uncased")  # type: ignore[arg-type]


def without_labels(rows: Rows) -> Any:
    return {key: value for key, value in collate(rows).items() if key != "labels"}


@pytest.mark.parametrize(
    ("collate_fn", "error", "words"),
    [
        (without_labels, LossError, "returned no loss"),
        (lambda rows: list(collate(rows).values()), DataError, "expected a batch that is a dict"),
    ],
)
def test_wrong_batches(collate_fn: Any, error: type[Exception], words: str) -> None:
    data = torch.utils.data.DataLoader(rows_for("bert", 4), batch_size=2, collate_fn=collate_fn)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        trainer(max_steps=1)[0].fit(TransformersModule(make_model("bert")), data)


def test_smoothing_needs_classes() -> None:
    model = make_model("bert", problem_type="regression")
    model.num_labels = 1
    with pytest.raises(ConfigurationError, match="needs labels that are classes"):
        trainer()[0].validate(TransformersModule(model, label_smoothing_factor=0.1), loader(regression(2), 2))


class Passes(TransformersModule):
    """Passes its arguments through."""

    def __init__(self, model: Any, more: int = 0, **options: Any) -> None:
        super().__init__(model, **options)


class Doubles(TransformersModule):
    """Passes another learning rate than it gets."""

    def __init__(self, model: Any, learning_rate: float = 1e-3) -> None:
        super().__init__(model, learning_rate=2 * learning_rate)


def test_the_arguments_of_a_subclass_are_read_as_those_of_the_class(tmp_path: Any) -> None:
    """hparams has the values before they are read, and those are what the optimizer is created from."""
    from transformers import SchedulerType

    given: list[dict[str, Any]] = [{"optim_args": None}, {"optim": "sgd", "optim_args": "momentum=0.9"}]
    for index, options in enumerate(given):
        options |= {"lr_scheduler_type": SchedulerType.COSINE, "include_for_metrics": ["loss"]}
        module, same = Passes(make_model("bert"), more=3, **options), TransformersModule(make_model("bert"), **options)
        assert module.hparams == {**same.hparams, "more": 3}
        run, _ = trainer(max_steps=1)
        run.fit(module, loader(rows_for("bert", 4), 2))
        run.save_checkpoint(tmp_path / str(index))
        loaded = Passes.load_from_checkpoint(tmp_path / str(index), model=make_model("bert"))
        trainer(max_steps=1)[0].fit(loaded, loader(rows_for("bert", 4), 2))
        optimizer = loaded.trainer.optimizers[0]
        assert type(optimizer) is (torch.optim.SGD if index else torch.optim.AdamW)
        assert optimizer.param_groups[0].get("momentum", 0.9) == 0.9


def test_a_subclass_that_passes_another_value_than_it_got() -> None:
    with pytest.raises(ConfigurationError, match="Doubles got learning_rate=0.001, but passes learning_rate=0.002"):
        Doubles(make_model("bert"))


def test_an_epoch_without_a_counted_label_is_an_error() -> None:
    """No step would ever be made, so with max_steps alone the fit would not end."""
    rows = rows_for("llama", 4)
    for row in rows:
        row["labels"] = torch.full_like(row["labels"], -100)
    with pytest.raises(LossError, match="batch_weight returned 0, as for labels that are all -100"):
        trainer(max_steps=2)[0].fit(TransformersModule(make_model("llama")), loader(rows, 2))


def test_a_model_with_frozen_parameters_alone() -> None:
    with pytest.raises(OptimizerError, match="no parameter to train"):
        trainer(max_steps=1)[0].fit(
            TransformersModule(make_model("bert").requires_grad_(False)), loader(rows_for("bert", 4), 2)
        )


def test_a_compiled_model() -> None:
    with pytest.raises(ConfigurationError, match=r"Trainer\(compile=True\)"):
        TransformersModule(torch.compile(make_model("bert"), backend="eager"))  # type: ignore[arg-type]


def test_a_quantized_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("bert")
    monkeypatch.setattr(model, "is_quantized", True, raising=False)
    with pytest.raises(ConfigurationError, match="purely quantized models(.|\n)*get_peft_model"):
        TransformersModule(model)


class Plain(torch.nn.Module):
    """Neither of transformers nor with a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Embedding(37, 3)

    def forward(self, input_ids: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.layer(input_ids).mean(1)
        return {"loss": torch.nn.functional.cross_entropy(logits, target), "logits": logits}


def test_any_module_that_returns_a_dict() -> None:
    rows = [{"input_ids": torch.arange(5), "target": torch.tensor(index % 3)} for index in range(5)]
    metrics = Metrics()
    module = TransformersModule(Plain(), label_names=["target"], compute_metrics=metrics)
    trainer()[0].validate(module, torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert metrics.calls[0][0].shape == (5, 3)


def test_a_model_that_computes_a_loss_if_asked() -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text, vision = (
        {"vocab_size": 37, "bos_token_id": 1, "eos_token_id": 2, **sizes},
        {"image_size": 32, "patch_size": 16, **sizes},
    )
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    rows = [{"input_ids": torch.arange(3, 8), "pixel_values": torch.randn(3, 32, 32)} for _ in range(4)]
    with pytest.raises(LossError, match="'return_loss': True"):
        trainer(max_steps=1)[0].fit(TransformersModule(model), torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]


def test_labels_under_a_name_that_the_model_does_not_have() -> None:
    rows = [{"input_ids": row["input_ids"][:3], "target": row["labels"]} for row in rows_for("bert", 4)]
    module = TransformersModule(make_model("bert"), label_names=["target"])
    with pytest.raises(LossError, match=r"rename \['target'\] to \['labels'\]"):
        trainer(max_steps=1)[0].fit(module, torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
