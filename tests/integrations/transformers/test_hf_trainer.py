"""transformers' `Trainer` over trainkit's: scripts that exchange an import, their numbers, and what a subclass overrides.

A script is a fresh Python, because it opens a process group of its own and is started by a launcher.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.hugging_face.training_arguments import arguments, model, rows
from helpers.support import TESTS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    default_data_collator,
)

from trainkit import Trainer as OwnTrainer
from trainkit.errors import CheckpointError, ConfigurationError, UnsupportedArgumentError
from trainkit.integrations.transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

SCRIPTS = TESTS / "helpers" / "hugging_face"
LAUNCH = ("-m", "trainkit", "launch", "--nproc-per-node", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
RUN = ("--use_cpu", "--train_sampling_strategy", "sequential", "--disable_tqdm", "True", "--logging_steps", "1")
GLUE = (
    *(*RUN, "--do_train", "--do_eval", "--do_predict", "--eval_strategy", "epoch", "--save_strategy", "epoch"),
    *("--label_smoothing_factor", "0.1", "--learning_rate", "5e-3", "--lr_scheduler_type", "cosine", "--warmup_steps", "2"),
    *("--weight_decay", "0.01", "--load_best_model_at_end", "--metric_for_best_model", "accuracy", "--save_total_limit", "2"),
)
CLM = (
    *(*RUN, "--per_device_train_batch_size", "4", "--num_train_epochs", "1.5", "--learning_rate", "1e-2"),
    *("--eval_strategy", "steps", "--eval_steps", "0.3", "--save_steps", "0.5", "--logging_steps", "3"),
)


def run(script: str, package: str, folder: str, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a script computes."""
    command = [sys.executable, "-W", "ignore", *launcher, str(SCRIPTS / script), "--output_dir", folder, *arguments]
    environment = {**os.environ, "TRAINER_OF": package, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"')))
    return found


@cache
def computed(script: str, package: str, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return run(script, package, folder, *arguments, launcher=launcher)


def glue(package: str, launcher: tuple[str, ...] = (), accumulate: int = 4) -> dict[str, Any]:
    sizes = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", str(accumulate))
    return computed("glue_script.py", package, *GLUE, *sizes, launcher=launcher)


def same_numbers(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The log, the results and the predictions are the same, but for times."""
    timed = ("_runtime", "_per_second", "preparation_time")

    def numbers(entry: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in entry.items() if not name.endswith(timed)}

    assert len(ours["history"]) == len(theirs["history"])
    for mine, other in zip(ours["history"], theirs["history"], strict=True):
        assert numbers(mine) == pytest.approx(numbers(other), rel=5e-6, abs=1e-7), (mine, other)
        assert mine.keys() == other.keys()


def test_a_script_like_run_glue_computes_what_it_computes_with_transformers() -> None:
    ours, theirs = glue("trainkit"), glue("transformers")
    same_numbers(ours, theirs)
    assert ours["train"] == pytest.approx(theirs["train"], rel=1e-6)
    assert np.array(ours["predictions"]) == pytest.approx(np.array(theirs["predictions"]), abs=1e-5)
    assert ours["reloaded"] == pytest.approx(theirs["reloaded"], rel=1e-6)
    assert ours["best"][:2] == pytest.approx(theirs["best"][:2])
    assert Path(ours["best"][2]).name == Path(theirs["best"][2]).name
    own = {".lock", "training_args.bin"}  # The one is ours, the other is a pickle of transformers.
    assert set(ours["files"]) - own == set(theirs["files"]) - own


@pytest.mark.parametrize(
    "launcher",
    [LAUNCH, TORCHRUN, (*LAUNCH, "--as", "accelerate")],
    ids=["trainkit launch", "torchrun", "behind the door"],
)
def test_the_script_on_two_processes_has_the_numbers_of_one(launcher: tuple[str, ...]) -> None:
    """Each process has half of the accumulation. The process group is that of the `TrainingArguments`."""
    two, one = glue("trainkit", launcher, accumulate=2), glue("trainkit")
    same_numbers(two, one)
    assert np.array(two["predictions"]) == pytest.approx(np.array(one["predictions"]), abs=1e-5)
    assert two["files"] == one["files"]


def test_a_script_is_resumed_from_its_last_checkpoint(tmp_path: Path) -> None:
    """As run_glue.py does it: `get_last_checkpoint` finds the folder, and the log continues."""
    whole = glue("trainkit")
    sizes = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4")
    folder = str(tmp_path / "out")
    first = run("glue_script.py", "trainkit", folder, *GLUE, *sizes, "--max_steps", "15", "--patience", "1")
    assert first["train"][0] == 10  # accuracy has not improved
    for name in ("checkpoint-10", "checkpoint-15"):
        assert (name in first["files"]) == (name == "checkpoint-10")
    again = run("glue_script.py", "trainkit", folder, *GLUE, *sizes)
    assert again["resumed"].endswith("checkpoint-10")
    losses = [[entry["loss"] for entry in found["history"] if "loss" in entry] for found in (again, whole)]
    assert losses[0][:10] == losses[1][:10]
    assert len(losses[0]) == 15


def clm(package: str, launcher: tuple[str, ...] = (), accumulate: int = 2) -> dict[str, Any]:
    return computed("clm_script.py", package, *CLM, "--gradient_accumulation_steps", str(accumulate), launcher=launcher)


def test_a_script_like_run_clm_computes_what_it_computes_with_transformers() -> None:
    """Rows have one length, so that means of batches weighted by rows, as transformers evaluates, are right too."""
    ours, theirs = clm("trainkit"), clm("transformers")
    same_numbers(ours, theirs)
    assert ours["eval"]["perplexity"] == pytest.approx(theirs["eval"]["perplexity"], rel=1e-5)
    assert ours["epoch"] == theirs["epoch"]


def test_that_script_on_two_processes_has_the_numbers_of_one() -> None:
    """Evaluations too, which transformers computes with a row twice: 17 rows do not divide by 2."""
    same_numbers(clm("trainkit", LAUNCH, accumulate=1), clm("trainkit"))


# ------------------------------------------------------------------------------------------------------ in this process


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_methods_of_a_subclass_are_called(tmp_path: Path) -> None:
    called: list[str] = []

    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            called.append(f"compute_loss {int(num_items_in_batch)}")
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            return (2 * loss, outputs) if return_outputs else 2 * loss

        def create_optimizer(self) -> Any:
            called.append("create_optimizer")
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            called.append(f"create_scheduler {num_training_steps}")
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
            return self.lr_scheduler

        def get_train_dataloader(self) -> Any:
            called.append("get_train_dataloader")
            return super().get_train_dataloader()

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            called.append("get_eval_dataloader")
            return super().get_eval_dataloader(eval_dataset)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0})

    plain = Trainer(model(), arguments(tmp_path), train_dataset=rows(), eval_dataset=rows())
    plain.train()
    trainer = Mine(model(), arguments(tmp_path), train_dataset=rows(), eval_dataset=rows())
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(2 * losses(plain)[0])
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == [0.1, 0.05]
    assert all(entry["mine"] == 1.0 for entry in trainer.state.log_history)
    before = plain.evaluate()["eval_loss"]
    plain.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"])
    assert before != pytest.approx(plain.evaluate()["eval_loss"], abs=1e-6)
    expected = ["get_train_dataloader", "create_optimizer", "create_scheduler 2", "compute_loss 4", "get_eval_dataloader"]
    assert [name for name in expected if name not in called] == []


def test_methods_that_would_never_be_called_are_an_error(tmp_path: Path) -> None:
    class Mine(Trainer):
        def training_step(self, *args: Any) -> Any: ...

        def _save_checkpoint(self, *args: Any) -> Any: ...

        def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...

        def my_own(self) -> None: ...

    args = arguments(tmp_path, eval_strategy="epoch")
    with pytest.raises(UnsupportedArgumentError, match="training_step: override compute_loss") as caught:
        Mine(model(), args, train_dataset=rows(), eval_dataset=rows())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "- _save_checkpoint",
        "- evaluate",
        "- training_step",
    ]

    class Evaluates(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return {"eval_mine": 1.0}

    assert Evaluates(model(), arguments(tmp_path), train_dataset=rows()).evaluate() == {"eval_mine": 1.0}


def test_a_loss_with_what_transformers_documents_for_it(tmp_path: Path) -> None:
    """`loss_is_scaled_for_ga` says how transformers divides it; here it is the mean over the window either way."""

    class Mine(Trainer):
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    args = arguments(tmp_path, gradient_accumulation_steps=2)
    mine, plain = (kind(model(), args, train_dataset=rows(11)) for kind in (Mine, Trainer))
    mine.model_accepts_loss_kwargs = False
    mine.train()
    plain.train()
    assert losses(mine) == pytest.approx(losses(plain), rel=1e-6)


def test_methods_that_are_assigned(tmp_path: Path) -> None:
    """They act if those of a subclass do, and are refused if not."""
    plain = Trainer(model(), arguments(tmp_path), train_dataset=rows())
    plain.train()
    trainer: Any = Trainer(model(), arguments(tmp_path), train_dataset=rows())
    entries: list[dict[str, float]] = []
    own = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, return_outputs=False: 3 * own(model, inputs)
    trainer.log = lambda logs, start_time=None: entries.append(logs)
    trainer.train()
    assert entries[0]["loss"] == pytest.approx(3 * losses(plain)[0])
    with pytest.raises(UnsupportedArgumentError, match="training_step = .* would never be called: override compute_loss"):
        trainer.training_step = lambda *args: None
    with pytest.raises(UnsupportedArgumentError, match=r"label_names = .* no effect. Use TrainingArguments\(label_names="):
        trainer.label_names = ["other"]
    trainer.evaluate = lambda: {"eval_mine": 1.0}
    assert trainer.evaluate() == {"eval_mine": 1.0}
    evaluating: Any = Trainer(model(), arguments(tmp_path, eval_strategy="epoch"), train_dataset=rows(), eval_dataset=rows())
    with pytest.raises(UnsupportedArgumentError, match="a run evaluates by itself"):
        evaluating.evaluate = dict


def test_attributes_that_are_assigned_act_from_the_next_call(tmp_path: Path) -> None:
    expected = Trainer(model(), arguments(tmp_path, learning_rate=0.1, max_steps=3), train_dataset=rows()[::-1])
    expected.train()
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=rows(), eval_dataset=rows())
    trainer.train_dataset, trainer.args.learning_rate, trainer.args.max_steps = rows()[::-1], 0.1, 3
    trainer.train()
    assert losses(trainer) == losses(expected)
    made = trainer.trainer
    trainer.compute_metrics = lambda found: {"rows": len(found.predictions)}
    trainer.eval_dataset = rows(7)
    assert trainer.evaluate()["eval_rows"] == 7
    own = trainer.data_collator
    trainer.data_collator = lambda few: {**own(few), "labels": torch.ones(len(few), dtype=torch.long)}
    assert trainer.predict(rows(5)).label_ids.tolist() == [1] * 5
    assert trainer.trainer is made  # what a fit leaves is not replaced by an evaluation


def test_the_model_gets_the_special_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    """As in transformers: a classifier that looks for the last token of a row needs to know what is padding."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, **{f"word{i}": i for i in range(2, 30)}}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>")
    sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    gpt2 = GPT2ForSequenceClassification(GPT2Config(pad_token_id=None, bos_token_id=9, eos_token_id=9, **sizes))
    trainer = Trainer(gpt2, arguments(tmp_path), train_dataset=rows(), processing_class=tokenizer)
    trainer.train()  # without a padding token the model refuses several rows
    assert (gpt2.config.pad_token_id, gpt2.config.bos_token_id, gpt2.config.eos_token_id) == (0, 1, 9)


def test_training_without_an_evaluation_says_nothing_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(model(), arguments(tmp_path), train_dataset=rows()).train()
    assert "fit ended" in caplog.text
    assert "validat" not in caplog.text


def test_the_loop_of_an_evaluation_is_called_by_a_subclass(tmp_path: Path) -> None:
    """As in transformers' examples of question answering."""

    class Answers(Trainer):
        def evaluate(self, eval_dataset: Any = None, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
            function, self.compute_metrics = self.compute_metrics, None
            loader = self.get_eval_dataloader(eval_dataset)
            found = self.evaluation_loop(loader, description="Evaluation", metric_key_prefix=metric_key_prefix)
            self.compute_metrics = function
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found.metrics)
            assert found.metrics is not None
            return {**found.metrics, "answers": float(found.predictions.sum()), "rows": found.num_samples}

    def refuse(found: Any) -> Any:
        raise AssertionError("metrics are computed by the subclass")

    trainer = Answers(model(), arguments(tmp_path), eval_dataset=rows(7), compute_metrics=refuse)
    plain = Trainer(model(), arguments(tmp_path), eval_dataset=rows(7))
    found = trainer.evaluate(metric_key_prefix="mine")
    assert set(found) == {"mine_loss", "answers", "rows"}
    assert found["mine_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    assert found["answers"] == pytest.approx(plain.predict(rows(7)).predictions.sum(), rel=1e-5)
    assert found["rows"] == 7
    only = plain.evaluation_loop(plain.get_eval_dataloader(), "", prediction_loss_only=True)
    assert only[:2] == (None, None)
    assert only.metrics == {"eval_loss": found["mine_loss"]}


def test_predictions_with_and_without_labels(tmp_path: Path) -> None:
    trainer = Trainer(
        model(),
        arguments(tmp_path, per_device_eval_batch_size=5),
        compute_metrics=lambda found: {"mean": float(found.predictions.mean())},
    )
    found = trainer.predict(rows())
    assert found.predictions.shape == (12, 2)
    assert found.label_ids.tolist() == [row["labels"] for row in rows()]
    assert found.metrics["test_mean"] == pytest.approx(found.predictions.mean())
    assert found.metrics["test_loss"] > 0
    unlabeled = [{"input_ids": row["input_ids"]} for row in rows()]
    alone = trainer.predict(unlabeled, metric_key_prefix="predict")
    assert alone.label_ids is None
    assert np.array_equal(alone.predictions, found.predictions)
    assert set(alone.metrics) == {"predict_runtime", "predict_samples_per_second", "predict_steps_per_second"}
    assert trainer.compute_metrics is trainer.module.compute_metrics


def test_several_evaluation_sets(tmp_path: Path) -> None:
    sets = {"short": rows(5), "long": rows(9)}
    trainer = Trainer(model(), arguments(tmp_path), eval_dataset=sets)
    both = trainer.evaluate()
    assert both["eval_short_loss"] == pytest.approx(trainer.evaluate(sets["short"])["eval_loss"])
    assert both["eval_long_loss"] == pytest.approx(trainer.evaluate("long", metric_key_prefix="x")["x_loss"])
    assert {"eval_short_runtime", "eval_long_runtime"} < set(both)
    assert {"y_new_loss"} < set(trainer.evaluate({"new": rows(3)}, metric_key_prefix="y"))


def test_it_resumes_where_it_stopped(tmp_path: Path) -> None:
    def trainer(folder: str, **options: Any) -> Trainer:
        args = arguments(tmp_path / folder, max_steps=6, save_strategy="steps", save_steps=2, **options)
        return Trainer(model(), args, train_dataset=rows())

    whole = trainer("whole")
    assert whole.train().global_step == 6

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    first = trainer("cut")
    first.add_callback(Stop())
    assert first.train().global_step == 3
    second = trainer("cut")
    assert second.train(resume_from_checkpoint=True).global_step == 6
    assert losses(second) == losses(whole)
    for one, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint=True: there is no checkpoint of trainkit in output_dir="):
        trainer("nothing").train(resume_from_checkpoint=True)


def test_the_optimizer_of_the_user(tmp_path: Path) -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.3)
    trainer = Trainer(own, arguments(tmp_path), train_dataset=rows(), optimizers=(optimizer, None))
    trainer.train()
    assert trainer.trainer.optimizers == [optimizer]
    assert trainer.state.log_history[1]["learning_rate"] == pytest.approx(0.15)  # the schedule of the arguments
    kinds = (torch.optim.SGD, {"lr": 0.2})
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=rows(), optimizer_cls_and_kwargs=kinds)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert len(trainer.optimizer.param_groups) == 2  # with weight decay, and without
    with pytest.raises(ConfigurationError, match="Give one of them"):
        Trainer(own, arguments(tmp_path), optimizers=(optimizer, None), optimizer_cls_and_kwargs=kinds)


def test_each_training_begins_with_the_model_of_model_init(tmp_path: Path) -> None:
    trainer = Trainer(args=arguments(tmp_path), train_dataset=rows(), model_init=model)
    trainer.train()
    first, trained = losses(trainer), trainer.model
    trainer.train()
    assert losses(trainer) == first
    assert trainer.model is not trained
    with pytest.raises(ConfigurationError, match="model or a model_init"):
        Trainer(args=arguments(tmp_path))


def test_unknown_attributes_say_what_to_use(tmp_path: Path) -> None:
    trainer = Trainer(model(), arguments(tmp_path))
    with pytest.raises(AttributeError, match=r"Use trainer\.trainer, which has device"):
        _ = trainer.accelerator
    with pytest.raises(AttributeError, match="Use a loop around train with model_init"):
        _ = trainer.hyperparameter_search
    with pytest.raises(AttributeError, match=r"trainer\.trainer, trainer\.module"):
        _ = trainer.floating_point_ops

    class Evaluates(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            training.evaluate(rows())

    training = Trainer(model(), arguments(tmp_path), train_dataset=rows(), callbacks=[Evaluates()])
    with pytest.raises(UnsupportedArgumentError, match="eval_dataset={'validation': validation, 'train': train}"):
        training.train()
    assert isinstance(trainer.trainer, OwnTrainer)
    with pytest.raises(UnsupportedArgumentError, match="Optuna"):
        trainer.train(trial=object())
    with pytest.raises(ConfigurationError, match="evaluate needs a dataset"):
        trainer.evaluate()


def test_seq2seq_generates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, pad_token_id=0, eos_token_id=1, **sizes))
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, predict_with_generate=True, generation_max_length=5, report_to="none"
    )
    pairs = [{"input_ids": row["input_ids"] % 20, "labels": row["input_ids"][:3] % 20} for row in rows(4)]
    trainer = Seq2SeqTrainer(t5, args, eval_dataset=pairs, compute_metrics=lambda found: {"n": found.predictions.shape[1]})
    assert trainer.evaluate()["eval_n"] <= 5
    longest = trainer.predict(pairs, min_new_tokens=8, max_length=10)
    assert longest.predictions.shape[1] > 5
    assert trainer.model.generation_config.min_new_tokens is None
    trainer._gen_kwargs = {"min_new_tokens": 8, "max_length": 10}  # as examples of question answering assign them
    found = trainer.evaluation_loop(trainer.get_eval_dataloader(), "", metric_key_prefix="x")
    assert np.array_equal(found.predictions, longest.predictions)


class FakeHub:
    """Takes the place of `huggingface_hub.HfApi`, and keeps what it is asked for."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, token: Any = None) -> None:
        self.calls.append(("token", token))

    def create_repo(self, name: str, private: Any = None, exist_ok: bool = False) -> Any:
        self.calls.append(("create", name, private))
        return type("Url", (), {"repo_id": f"me/{name}"})

    def create_branch(self, name: str, branch: str, exist_ok: bool) -> None:
        self.calls.append(("branch", name, branch))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, revision: Any, ignore_patterns: Any) -> str:
        files = sorted(path.name for path in Path(folder_path).iterdir() if path.is_file())
        self.calls.append(("upload", repo_id, commit_message, revision, "README.md" in files, "model.safetensors" in files))
        return "https://hub/commit"


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_hub_upload(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    FakeHub.calls.clear()
    hub = {"hub_model_id": "mine", "hub_token": "secret", "hub_private_repo": True, "hub_revision": "dev"}
    saves = {"save_strategy": "steps", "save_steps": 1}
    args = arguments(tmp_path, push_to_hub=True, hub_strategy=strategy, **hub, **saves)
    trainer = Trainer(model(), args, train_dataset=rows())
    trainer.train()
    uploads = [call[2] for call in FakeHub.calls if call[0] == "upload"]
    assert uploads == ([] if strategy == "end" else [f"Training in progress, step {step}" for step in (1, 2)])
    FakeHub.calls.clear()
    trainer.save_model(_internal_call=True)
    assert not FakeHub.calls
    trainer.save_model()
    assert FakeHub.calls == [
        ("token", "secret"),
        ("create", "mine", True),
        ("branch", "me/mine", "dev"),
        ("upload", "me/mine", "Model save", "dev", True, True),
    ]
    assert trainer.push_to_hub(tags="tiny") == "https://hub/commit"
    assert "- tiny" in (tmp_path / "README.md").read_text("utf-8")
    with pytest.raises(UnsupportedArgumentError, match="hub_strategy='checkpoint'"):
        Trainer(model(), arguments(tmp_path, push_to_hub=True, hub_strategy="checkpoint"))


def test_what_the_constructor_gets_is_used(tmp_path: Path) -> None:
    called: set[str] = set()

    def collate(batch: list[Any]) -> Any:
        called.add("collate")
        return default_data_collator(batch)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        called.add("loss")
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    def preprocess(logits: Any, labels: Any) -> Any:
        called.add("preprocess")
        return logits.argmax(-1)

    class Processor:
        def save_pretrained(self, folder: Any) -> None:
            (Path(folder) / "processor.txt").touch()

    class Saw(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
            called.add(type(processing_class).__name__)

    trainer = Trainer(
        model(),
        arguments(tmp_path, eval_strategy="steps", eval_steps=1),
        data_collator=collate,
        train_dataset=rows(),
        eval_dataset=rows(),
        processing_class=Processor(),
        compute_loss_func=loss,
        compute_metrics=lambda found: {"dimensions": found.predictions.ndim},
        callbacks=[Saw],
        preprocess_logits_for_metrics=preprocess,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert called == {"collate", "loss", "preprocess", "Processor"}
    assert trainer.evaluate()["eval_dimensions"] == 1
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"config.json", "model.safetensors", "processor.txt"}
    plain = Trainer(model(), arguments(tmp_path), train_dataset=rows())
    plain.train()
    assert losses(plain) == pytest.approx(losses(trainer))
    assert Trainer(model()).args.output_dir == "tmp_trainer"


def test_outputs_that_are_ignored_are_no_predictions(tmp_path: Path) -> None:
    shown: list[int] = []

    def count(found: Any) -> dict[str, float]:
        shown.append(len(found.predictions) if isinstance(found.predictions, tuple) else 1)
        return {}

    own = model()
    own.config.output_hidden_states = True
    args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1, max_steps=-1)
    trainer = Trainer(own, args, train_dataset=rows(), eval_dataset=rows(), compute_metrics=count)
    trainer.train(ignore_keys_for_eval=["hidden_states"])
    trainer.evaluate(ignore_keys=["hidden_states"])
    trainer.evaluate()
    assert shown == [1, 1, 2]  # logits and hidden states
    assert isinstance(trainer.predict(rows(), ignore_keys=["hidden_states"]).predictions, np.ndarray)


def test_metrics_are_saved_by_themselves_or_together(tmp_path: Path) -> None:
    trainer = Trainer(model(), arguments(tmp_path))
    trainer.save_metrics("train", {"a": 1.0})
    trainer.save_metrics("eval", {"b": 2.0}, combined=False)
    assert json.loads((tmp_path / "all_results.json").read_text("utf-8")) == {"a": 1.0}
    with pytest.raises(UnsupportedArgumentError, match="blocking=False"):
        trainer.push_to_hub(blocking=False)
