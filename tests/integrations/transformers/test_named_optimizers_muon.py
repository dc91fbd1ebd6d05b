"""`optim="muon"`: Muon for the matrices of hidden layers and AdamW for the rest, which step together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hugging_face.tiny_models import collate, loader, make_model, rows_for
from torch import nn

from trainkit import Trainer
from trainkit.errors import OptimizerError
from trainkit.integrations.transformers import TransformersModule

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.mark.parametrize(
    ("kind", "matrices"),
    [
        ("bert", {"query", "key", "value", "dense"}),  # the pooler is hidden, the classifier is the head
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("t5", {"q", "k", "v", "o", "wi", "wo"}),
    ],
)
def test_muon_has_the_hidden_matrices(kind: str, matrices: set[str]) -> None:
    model = make_model(kind)
    module = TransformersModule(model, optim="muon", optim_args="momentum=0.9", weight_decay=0.1, adam_beta2=0.95)
    muon, adamw = (each["optimizer"] for each in module.configure_optimizers())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owned = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in (muon, adamw)]
    assert {name.split(".")[-2] for name in owned[0]} == matrices
    assert sorted(owned[0] + owned[1]) == sorted(names.values())
    assert type(muon) is torch.optim.Muon
    assert (muon.defaults["momentum"], muon.defaults["adjust_lr_fn"]) == (0.9, "match_rms_adamw")
    assert (type(adamw), adamw.defaults["betas"]) == (torch.optim.AdamW, (0.9, 0.95))
    assert {group["weight_decay"] for group in muon.param_groups} == {0.1}


def test_muon_has_no_head_that_lies_in_the_body() -> None:
    """T5 is its own `base_model`, so that only `get_output_embeddings` tells its head."""
    model = make_model("t5")
    model.lm_head = nn.Linear(16, 37)
    assert model.base_model is model
    muon = TransformersModule(model, optim="muon").configure_optimizers()[0]["optimizer"]
    assert all(p is not model.lm_head.weight for group in muon.param_groups for p in group["params"])


def test_both_step_together_with_a_schedule_each() -> None:
    """Equal to the two optimizers by hand."""
    rows = rows_for("gpt2", 6)
    module = TransformersModule(make_model("gpt2"), optim="muon", learning_rate=1e-2, weight_decay=0.1)
    run = Trainer(**QUIET, max_epochs=1)
    run.fit(module, loader(rows, 2))
    assert run.global_step == 3
    model = make_model("gpt2").train()
    optimizers = [each["optimizer"] for each in TransformersModule(
        model, optim="muon", learning_rate=1e-2, weight_decay=0.1).configure_optimizers()]  # fmt: skip
    for step in range(3):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (3 - step) / 3
        model(**collate(rows[2 * step : 2 * step + 2])).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(module.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_muon_needs_hidden_matrices() -> None:
    model = make_model("llama").requires_grad_(False)
    model.lm_head = nn.Linear(16, 37)
    with pytest.raises(OptimizerError, match="needs trainable matrices in hidden layers"):
        TransformersModule(model, optim="muon").configure_optimizers()
