"""What a `TransformersModule` leaves: folders for `from_pretrained`, the Hub, checkpoints, and exact resumes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.hugging_face.tiny_models import loader, make_model, rows_for
from helpers.runs.trainers import Memory

from trainkit import Trainer
from trainkit.integrations.transformers import TransformersModule

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def fitted(kind: str, **options: Any) -> TransformersModule:
    module = TransformersModule(make_model(kind), tokenizer(), learning_rate=1e-2)
    Trainer(**{**QUIET, "max_steps": 2, "logger": False, **options}).fit(module, loader(rows_for(kind, 4), 2))
    return module


def check_folder(module: TransformersModule, folder: Path) -> None:
    """It opens with the weights of the module, and with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<pad>"
    expected = module.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_saved_model_opens_with_from_pretrained() -> None:
    before = TransformersModule(make_model("gpt2"), tokenizer())
    before.save_pretrained("before")
    check_folder(before, Path("before"))
    after = fitted("gpt2")
    after.save_pretrained("after")
    check_folder(after, Path("after"))
    assert not torch.equal(before.model.lm_head.weight, after.model.lm_head.weight)
    for module, folder in ((before, "before/parts"), (after, "after/parts")):
        module.save_pretrained(folder, max_shard_size="4KB")
        assert Path(folder, "model.safetensors.index.json").exists()
        check_folder(module, Path(folder))


@pytest.mark.world_size(2)
def test_sharded_models_are_saved_whole() -> None:
    module = fitted("llama", strategy="fsdp")
    whole = module.trainer.accelerator.get_state_dict(module.model)
    module.save_pretrained("saved")
    module.trainer.strategy.barrier()
    if module.global_rank == 0:
        from transformers import AutoModelForCausalLM

        opened = AutoModelForCausalLM.from_pretrained("saved").state_dict()
        assert opened.keys() == whole.keys()
        assert all(torch.equal(opened[name], whole[name]) for name in whole)
        assert Path("saved/tokenizer.json").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_is_saved_as_one() -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    module = TransformersModule(get_peft_model(make_model("llama"), config), learning_rate=1e-2)
    Trainer(**QUIET, max_steps=2, logger=False).fit(module, loader(rows_for("llama", 4), 2))  # type: ignore[arg-type]
    module.save_pretrained("adapter")
    assert not Path("adapter/model.safetensors").exists()
    opened = PeftModel.from_pretrained(make_model("llama"), "adapter").state_dict()
    assert all(torch.equal(opened[name], value) for name, value in module.model.state_dict().items() if "lora_" in name)


class Hub(BaseHTTPRequestHandler):
    """Answers what `huggingface_hub` asks, and keeps it."""

    requests: ClassVar[list[tuple[str, str, Any]]] = []
    status = 200

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        self.requests.append((self.path, self.headers.get("Authorization", ""), lines))
        address = f"http://127.0.0.1:{self.server.server_address[1]}/me/tiny"  # type: ignore[index]
        answer: dict[str, Any] = {"url": address}
        if "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in lines[0]["files"]]
            answer = {"files": files}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{address}/commit/0123456789abcdef", "commitOid": "0123456789abcdef"}
        self.reply(answer)

    def do_GET(self) -> None:
        self.requests.append((self.path, "", []))
        self.reply({"id": "me/tiny", "sha": "0" * 40, "siblings": [], "private": False})

    def reply(self, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A Hub on this machine; `huggingface_hub` reads its address when it is imported, so its constants are replaced."""
    import huggingface_hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(Hub, "requests", [])
    monkeypatch.setattr(Hub, "status", 200)
    yield Hub
    huggingface_hub.utils.close_session()
    server.shutdown()
    thread.join()
    server.server_close()


def test_push_to_hub(hub: type[Hub]) -> None:
    module = fitted("gpt2")
    address = module.push_to_hub("me/tiny", token="hf_secret", private=True, commit_message="Trained", revision="next")
    assert address.endswith("/me/tiny/commit/0123456789abcdef")
    posts = {path: (header, lines) for path, header, lines in hub.requests if lines}
    create, branch = posts["/api/repos/create"], posts["/api/models/me/tiny/branch/next"]
    assert create[0] == branch[0] == "Bearer hf_secret"
    assert create[1][0]["name"] == "tiny"
    assert "private" in json.dumps(create[1])
    _, lines = posts["/api/models/me/tiny/commit/next"]
    assert lines[0]["value"]["summary"] == "Trained"
    paths = {line["value"]["path"] for line in lines[1:]}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= paths


def test_a_refused_push_is_an_error(hub: type[Hub]) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    hub.status = 403
    with pytest.raises(HfHubHTTPError):
        TransformersModule(make_model("bert")).push_to_hub("me/tiny", token="hf_secret")


def test_load_from_checkpoint() -> None:
    options = {
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"num_cycles": 1},
    }
    module = TransformersModule(make_model("bert"), compute_metrics=lambda prediction: {}, **options)  # type: ignore[arg-type]
    run = Trainer(**QUIET, max_steps=1, logger=False)  # type: ignore[arg-type]
    run.fit(module, loader(rows_for("bert", 4), 2))
    run.save_checkpoint("saved")
    loaded = TransformersModule.load_from_checkpoint("saved", model=make_model("bert"))
    assert (loaded.hparams.optim, loaded.hparams.optim_args) == ("sgd", {"momentum": 0.9})
    assert loaded.hparams == module.hparams
    assert "model" not in loaded.hparams
    for name, value in module.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])


def test_a_resumed_fit_is_the_same_bit_for_bit() -> None:
    """With dropout and noise, in the middle of an epoch."""

    def run(folder: str, max_steps: int, **fit: Any) -> tuple[TransformersModule, dict[int, float]]:
        memory = Memory()
        module = TransformersModule(
            make_model("gpt2", dropout=0.1), learning_rate=1e-2, neftune_noise_alpha=5.0, lr_scheduler_type="constant"
        )
        options = {**QUIET, "default_root_dir": folder, "logger": memory, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
        Trainer(**options, max_steps=max_steps).fit(module, loader(rows_for("gpt2", 12), 2), **fit)
        return module, memory.of("loss")

    whole, losses = run("whole", 5)
    run("part", 2)
    resumed, rest = run("part", 5, ckpt_path="last")
    assert rest == {step: loss for step, loss in losses.items() if step in rest}
    assert len(rest) == 3
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
