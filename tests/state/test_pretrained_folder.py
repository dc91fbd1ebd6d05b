"""Checkpoints as folders that `from_pretrained` opens, with the trained weights, or for which it raises an error."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import differences
from helpers.runs.pretrained_modules import (
    Adapted,
    Classifier,
    Headed,
    Language,
    SaveAtEnd,
    Undeclared,
    batches,
    bert,
    fit,
    gpt2,
    lora,
)
from helpers.worlds.worlds import run_world
from safetensors.torch import load_file
from torch import Tensor, nn

import trainkit
from trainkit import Accelerator
from trainkit.callbacks import EMAWeightAveraging, ModelCheckpoint
from trainkit.checkpoint import open_checkpoint
from trainkit.cli.main import main
from trainkit.errors import ConfigurationError

transformers = pytest.importorskip("transformers")

# PEFT uses an attribute of transformers that has been renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It looks for a tokenizer on the Hub if there is none in the folder.
    pytest.mark.filterwarnings("ignore:Unable to fetch remote file:UserWarning"),
]


def opened(kind: Any, folder: Path | str) -> dict[str, Tensor]:
    """The weights that `from_pretrained` gives; all of them come from the folder."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    return dict(model.state_dict())


def inside(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------------ every strategy


def test_the_folder_opens_with_the_trained_weights(run_dir: Path) -> None:
    trained = fit(Headed, "auto", 3, "saved")
    auto = transformers.AutoModelForSequenceClassification
    assert equal(opened(auto, "saved"), inside(trained))
    assert type(auto.from_pretrained("saved")) is transformers.BertForSequenceClassification
    names = {"model.safetensors", "module.safetensors", "config.json"}
    assert names <= open_checkpoint("saved").manifest.files.keys()
    assert load_file("saved/module.safetensors").keys() == {"head.weight", "head.bias", "seen"}
    assert load_file("saved/model.safetensors").keys() == inside(trained).keys()
    assert equal(trainkit.load_state_dict("saved"), trained)
    assert open_checkpoint("saved").manifest.format_version == 4
    config = json.loads(Path("saved/config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["BertForSequenceClassification"], "float32")


ZERO3 = pytest.param("zero3", marks=pytest.mark.zero)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", ZERO3])
@pytest.mark.parametrize("make", [Headed, Language])
def test_it_does_so_under_every_strategy_and_moves_between_them(make: type[Classifier], kind: str, run_dir: Path) -> None:
    run_world(2, fit, make, kind, 3, "saved")
    weights = trainkit.load_state_dict("saved")
    kind_of_model = transformers.AutoModelForSequenceClassification if make is Headed else transformers.AutoModelForCausalLM
    assert equal(opened(kind_of_model, "saved"), inside(weights))
    config = json.loads(Path("saved/config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification" if make is Headed else "GPT2LMHeadModel"]
    assert config["dtype"] == "float32"
    loaded = open_checkpoint("saved").read()
    fit(make, "auto", 3, "moved", ckpt_path="saved")  # no further step
    run_world(2, fit, make, kind, 3, "back", "moved")
    for copy in ("moved", "back"):
        again = open_checkpoint(copy).read()
        assert differences(loaded.tensors["model"], again.tensors["model"]) == []
        assert differences(loaded.tensors["optimizer"], again.tensors["optimizer"]) == []


def in_bf16(kind: str) -> None:
    fit(Headed, kind, 2, "saved", precision="bf16-mixed")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", ZERO3])
def test_low_precision_models_are_saved_as_their_masters(kind: str, run_dir: Path) -> None:
    run_world(2, in_bf16, kind)
    model = opened(transformers.AutoModelForSequenceClassification, "saved")
    assert equal(model, inside(trainkit.load_state_dict("saved")))
    assert {str(tensor.dtype) for tensor in model.values() if tensor.is_floating_point()} == {"torch.float32"}


def test_the_dtype_in_the_configuration_is_that_of_the_file(run_dir: Path) -> None:
    fit(Classifier, "auto", 1, "saved", precision="bf16-true")
    stored = load_file("saved/model.safetensors")
    assert equal(opened(transformers.AutoModelForSequenceClassification, "saved"), stored)
    dtypes = {str(tensor.dtype) for tensor in stored.values() if tensor.is_floating_point()}
    assert dtypes == {f"torch.{json.loads(Path('saved/config.json').read_text())['dtype']}"}


def test_a_resumed_run_is_the_same_bit_for_bit(run_dir: Path) -> None:
    whole = fit(Headed, "auto", 6, "whole")
    fit(Headed, "auto", 3, "half")
    assert equal(fit(Headed, "auto", 6, "resumed", ckpt_path="half"), whole)
    half, resumed = (open_checkpoint(folder).read().tensors for folder in ("whole", "resumed"))
    assert differences(half["optimizer"], resumed["optimizer"]) == []


def sharded(folder: str) -> None:
    from trainkit.checkpoint import checkpoint_plan

    checkpoint_plan.SPLIT_ABOVE_BYTES = 2000
    fit(Headed, "ddp", 2, folder)


def test_a_folder_that_two_processes_write_has_an_index(run_dir: Path) -> None:
    run_world(2, sharded, "saved")
    index = json.loads(Path("saved/model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    model = opened(transformers.AutoModelForSequenceClassification, "saved")
    assert index.keys() == model.keys()
    assert equal(model, inside(trainkit.load_state_dict("saved")))
    open_checkpoint("saved").verify()


# ------------------------------------------------------------------------------------------------------- tied tensors


class Twice(Language):
    """Ties parameters that `transformers` does not tie, and one to a parameter outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        torch.manual_seed(4)
        self.before = nn.Linear(16, 16)
        self.model = gpt2()
        blocks = self.model.transformer.h
        blocks[1].ln_1.weight = blocks[0].ln_1.weight
        blocks[0].ln_2.bias = self.before.bias


def test_tied_tensors_are_stored_where_from_pretrained_needs_them(run_dir: Path) -> None:
    trained = fit(Twice, "auto", 3, "saved")
    stored, rest = load_file("saved/model.safetensors"), load_file("saved/module.safetensors")
    assert rest.keys() == {"before.weight"}
    assert "lm_head.weight" not in stored
    assert {"transformer.wte.weight", "transformer.h.0.ln_2.bias", "transformer.h.1.ln_1.weight"} <= stored.keys()
    assert equal(opened(transformers.AutoModelForCausalLM, "saved"), inside(trained))
    assert equal(trainkit.load_state_dict("saved"), trained)
    whole = fit(Twice, "auto", 6, "whole")
    assert equal(fit(Twice, "auto", 6, "resumed", ckpt_path="saved"), whole)


# --------------------------------------------------------------------------------------------------------------- PEFT


def adapted(folder: str, strategy: str = "auto", steps: int = 3, **options: Any) -> dict[str, Tensor]:
    return fit(Adapted, strategy, steps, folder, **options)


@pytest.mark.parametrize("kind", ["auto", "ddp", ZERO3])
def test_an_adapter_opens_with_peft(kind: str, run_dir: Path) -> None:
    peft = pytest.importorskip("peft")
    bert().save_pretrained("base")
    if kind == "auto":
        adapted("saved")
    else:
        run_world(2, adapted, "saved", kind)
    manifest = open_checkpoint("saved").manifest
    assert {"adapter_model.safetensors", "adapter_config.json"} <= manifest.files.keys()
    assert not {"model.safetensors", "module.safetensors", "config.json"} & manifest.files.keys()
    weights = inside(trainkit.load_state_dict("saved"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = peft.AutoPeftModel.from_pretrained("saved", num_labels=3)
        fresh = Adapted()
    assert type(found.get_base_model()) is transformers.BertForSequenceClassification
    assert equal({name: tensor for name, tensor in found.state_dict().items() if name in weights}, weights)
    fresh.load_state_dict(trainkit.load_state_dict("saved"), strict=False)
    tokens = torch.arange(6)[None]
    assert torch.equal(found.eval()(tokens).logits, fresh.eval().model(tokens).logits)


def test_an_adapter_is_resumed_bit_for_bit(run_dir: Path) -> None:
    pytest.importorskip("peft")
    bert().save_pretrained("base")
    whole = adapted("whole", steps=6)
    adapted("half")
    assert equal(adapted("resumed", steps=6, ckpt_path="half"), whole)


class Resized(Classifier):
    """Trains adapters of a model in a folder, to whose vocabulary it adds tokens, with values that no other process has."""

    def __init__(self) -> None:
        super().__init__()
        base = transformers.BertForSequenceClassification.from_pretrained("base")
        base.resize_token_embeddings(54, mean_resizing=False)
        self.model = lora(base, modules_to_save=["classifier"]).train()


@pytest.mark.parametrize("kind", ["auto", "fsdp", ZERO3])
def test_the_embeddings_of_added_tokens_are_part_of_the_adapter(kind: str, run_dir: Path) -> None:
    peft = pytest.importorskip("peft")
    bert().save_pretrained("base")
    if kind == "auto":
        fit(Resized, kind, 3, "saved")
    else:
        run_world(2, fit, Resized, kind, 3, "saved")
    stored = load_file("saved/adapter_model.safetensors")
    rows = stored["base_model.model.bert.embeddings.word_embeddings.weight"]
    assert rows.shape == (54, 16)
    fresh = transformers.BertForSequenceClassification.from_pretrained("base")
    fresh.resize_token_embeddings(54, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = peft.PeftModel.from_pretrained(fresh, "saved")
    weights = inside(trainkit.load_state_dict("saved"))
    assert equal({name: tensor for name, tensor in found.state_dict().items() if name in weights}, weights)
    resumed = inside(fit(Resized, "auto", 3, "again", ckpt_path="saved"))
    assert equal({name: tensor for name, tensor in resumed.items() if name in weights}, weights)
    assert main(["checkpoint", "export", "saved", "exported", "--attribute", "model"]) == 0
    assert equal(load_file("exported/adapter_model.safetensors"), stored)


def test_of_two_adapters_one_is_in_the_folder_itself(run_dir: Path) -> None:
    peft = pytest.importorskip("peft")
    base = bert()
    base.save_pretrained("base")
    accelerator = Accelerator(cpu=True)
    module = Classifier()
    module.model = lora(base)
    module.model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["query"]))
    module.model.base_model.set_adapter(["default", "other"])
    accelerator.prepare(module)
    accelerator.save_state("saved")
    stored = load_file("saved/adapter_model.safetensors")
    ours = peft.get_peft_model_state_dict(module.model)
    assert equal(stored, ours)
    assert all(".other." in name for name in load_file("saved/module.safetensors"))
    assert equal(trainkit.load_state_dict("saved"), {n: p.detach() for n, p in module.named_parameters() if p.requires_grad})


def test_a_model_that_was_given_an_adapter_opens_with_transformers(run_dir: Path) -> None:
    peft = pytest.importorskip("peft")
    bert().save_pretrained("base")
    module = Classifier()
    module.model = transformers.BertForSequenceClassification.from_pretrained("base")
    module.model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module)
    accelerator.save_state("saved")
    found = transformers.AutoModelForSequenceClassification.from_pretrained("saved")
    assert equal(dict(found.state_dict()), dict(module.model.state_dict()))


def test_a_frozen_adapter_is_not_in_the_folder_and_peft_says_so(run_dir: Path) -> None:
    peft = pytest.importorskip("peft")
    module = Headed()
    module.model = lora(bert())
    module.model.requires_grad_(False)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module)
    accelerator.save_state("saved")
    assert load_file("saved/module.safetensors").keys() == {"head.weight", "head.bias", "seen"}
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config\.json'"):
        peft.AutoPeftModel.from_pretrained("saved")


# ---------------------------------------------------------------------------------------- no weights that are random


def test_without_a_declaration_from_pretrained_raises_an_error(run_dir: Path) -> None:
    trained = fit(Undeclared, "auto", 1, "saved")
    with pytest.raises(ValueError, match="Unrecognized model in saved"):
        transformers.AutoModel.from_pretrained("saved")
    for options in ({}, {"config": bert().config}):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            transformers.BertForSequenceClassification.from_pretrained("saved", **options)
    assert equal(load_file("saved/module.safetensors"), trained)
    assert equal(trainkit.load_state_dict("saved"), trained)
    assert equal(fit(Undeclared, "auto", 3, "resumed", ckpt_path="saved"), fit(Undeclared, "auto", 3, "whole"))


class Frozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model.bert.requires_grad_(False)


def test_a_folder_without_the_frozen_weights_is_no_folder_for_from_pretrained(run_dir: Path) -> None:
    trainer = trainkit.Trainer(
        max_steps=2,
        callbacks=[ModelCheckpoint("saved", save="trainable", every_n_train_steps=2)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Frozen(), batches())
    (folder,) = [path for path in Path("saved").iterdir() if path.is_dir() and not path.is_symlink()]
    assert load_file(folder / "module.safetensors").keys() == {"model.classifier.weight", "model.classifier.bias"}
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.BertForSequenceClassification.from_pretrained(folder)
    trainer = trainkit.Trainer(max_steps=3, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Frozen(), batches(), ckpt_path=str(folder))


class Removing(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["model.classifier.bias"]


def test_a_hook_that_removes_weights_leaves_no_folder_for_from_pretrained(run_dir: Path) -> None:
    fit(Removing, "auto", 1, "saved")
    assert "model.safetensors" not in os.listdir("saved")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.BertForSequenceClassification.from_pretrained("saved")


class Wrong(Classifier):
    pretrained_attribute = "modle"


def test_an_attribute_that_is_no_such_model_is_named_at_the_start(run_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Wrong\.pretrained_attribute = 'modle'.*'model'.*Did you mean 'model'"):
        fit(Wrong, "auto", 1, "saved")


# -------------------------------------------------------------------------------------------------- processing classes


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


class Spoken(Classifier):
    def __init__(self, processing_class: Any = None) -> None:
        super().__init__()
        self.processing_class = tokenizer() if processing_class is None else processing_class


def test_the_files_of_the_tokenizer_are_part_of_the_checkpoint(run_dir: Path) -> None:
    fit(Spoken, "auto", 1, "saved")
    manifest = open_checkpoint("saved").manifest
    assert {"tokenizer.json", "tokenizer_config.json"} <= manifest.files.keys()
    assert transformers.AutoTokenizer.from_pretrained("saved")("a b a")["input_ids"] == [1, 2, 1]
    content = bytearray(Path("saved/tokenizer.json").read_bytes())
    content[-2] ^= 1
    Path("saved/tokenizer.json").write_bytes(content)
    with pytest.raises(trainkit.errors.CorruptCheckpointError, match=r"tokenizer\.json"):
        open_checkpoint("saved").verify()


def test_they_are_those_of_now(run_dir: Path) -> None:
    module = Spoken()
    module.processing_class.chat_template = {"default": "{{ messages }}", "tool": "{{ tools }}"}
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module)
    accelerator.save_state("first")
    module.processing_class.add_tokens(["c"])
    accelerator.save_state("second")
    lengths = [len(transformers.AutoTokenizer.from_pretrained(folder)) for folder in ("first", "second")]
    assert lengths == [3, 4]
    templates = transformers.AutoTokenizer.from_pretrained("second").chat_template
    assert templates == module.processing_class.chat_template


def test_a_processing_class_that_cannot_be_saved_is_refused(run_dir: Path) -> None:
    module = Spoken(processing_class="bert-base")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module)
    with pytest.raises(ConfigurationError, match=r"processing_class: expected a tokenizer.*got str"):
        accelerator.save_state("saved")


# ------------------------------------------------------------------------------------------------- everything that reads


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_commands_see_the_names_of_the_module(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = fit(Headed, "auto", 2, "saved")
    capsys.readouterr()
    assert main(["checkpoint", "show", "saved", "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in trained)
    assert f"model: {len(trained)} tensors" in shown
    assert [line.split()[3:5] for line in shown.splitlines() if line.startswith("module.safetensors ")] == [["3", "tensors"]]

    module = Headed()
    module.load_state_dict(trained)
    module.pretrained_attribute = None
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module)
    accelerator.save_state("apart")
    assert main(["checkpoint", "diff", "saved", "apart"]) == 1
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("model: ")]

    assert main(["checkpoint", "export", "saved", "head", "--attribute", "head"]) == 0
    assert load_file("head/model.safetensors").keys() == {"weight", "bias"}
    assert main(["checkpoint", "export", "saved", "weights.ckpt"]) == 0
    assert equal(trainkit.load_state_dict("weights.ckpt"), trained)
    assert main(["checkpoint", "verify", "saved"]) == 0
    flip(Path("saved/module.safetensors"))
    assert main(["checkpoint", "verify", "saved"]) == 1
    assert "module.safetensors" in capsys.readouterr().out


def test_an_export_of_the_model_is_a_folder_with_its_tokenizer(run_dir: Path) -> None:
    fit(Spoken, "auto", 2, "saved")
    fit(Undeclared, "auto", 2, "undeclared")
    for source, has_tokenizer in (("saved", True), ("undeclared", False)):
        assert main(["checkpoint", "export", source, "exported", "--attribute", "model"]) == 0
        weights = inside(trainkit.load_state_dict(source))
        assert equal(opened(transformers.AutoModelForSequenceClassification, "exported"), weights)
        assert Path("exported/tokenizer.json").exists() == has_tokenizer  # not that of the export before


def test_weights_only_checkpoints_are_such_folders_and_are_rotated(run_dir: Path) -> None:
    saves = ModelCheckpoint("saved", every_n_train_steps=1, keep_last=2, save_top_k=0, save_weights_only=True)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = trainkit.Trainer(max_steps=5, callbacks=[saves], **quiet)
    module = Headed()
    trainer.fit(module, batches())
    folders = sorted(path for path in Path("saved").iterdir() if (path / "manifest.json").exists())
    assert [path.name for path in folders] == ["step-00000004", "step-00000005"]
    assert equal(opened(transformers.AutoModelForSequenceClassification, folders[-1]), dict(module.model.state_dict()))
    again = Headed.load_from_checkpoint(folders[-1])
    assert equal(dict(again.state_dict()), dict(module.state_dict()))


def test_averaged_weights_are_those_that_open(run_dir: Path) -> None:
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = trainkit.Trainer(max_steps=4, callbacks=[EMAWeightAveraging(decay=0.5), SaveAtEnd("saved")], **quiet)
    trainer.fit(Language(), batches())
    loaded = open_checkpoint("saved").read()
    assert equal(opened(transformers.AutoModelForCausalLM, "saved"), inside(loaded.state_dict()))
    trained = loaded.state["user"]["current_model_state"]
    assert not torch.equal(trained["model.transformer.wte.weight"], loaded.tensors["model"]["model.transformer.wte.weight"])


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = bert()


def test_an_accelerator_says_that_another_module_does_not_open(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Wrapped())
    accelerator.save_state("first")
    accelerator.save_state("second")
    said = [line for line in caplog.messages if "from_pretrained" in line]
    assert len(said) == 1
    assert "trainkit checkpoint export first exported --attribute net" in said[0]
    assert main(["checkpoint", "export", "first", "exported", "--attribute", "net"]) == 0
    opened(transformers.AutoModelForSequenceClassification, "exported")
