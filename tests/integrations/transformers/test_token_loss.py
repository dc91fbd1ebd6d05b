"""The labels that are counted are those that the model's own loss is the mean of."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.hugging_face.tiny_models import Rows, evaluate_by_hand, loader, make_model, rows_for
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit import Trainer
from trainkit.errors import ConfigurationError
from trainkit.integrations.transformers import TransformersModule
from trainkit.integrations.transformers.token_loss import UNSHIFTED, LabelCount, smoothed_loss

IGNORED = -100
SMALL: dict[str, Any] = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
SMALL |= {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "dropout": 0.0}


def evaluate(model: Any, batches: Any, **options: Any) -> float:
    run = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (results,) = run.validate(TransformersModule(model, **options), batches)
    return float(results["eval_loss"])


def smoothed_by_hand(logits: Tensor, labels: Tensor, epsilon: float) -> tuple[float, int]:
    counted = labels != IGNORED
    likely = logits.double().log_softmax(-1)[counted]
    losses = (epsilon - 1) * likely.gather(1, labels[counted, None]).squeeze(1) - epsilon * likely.mean(-1)
    return float(losses.sum()), int(counted.sum())


def mean_by_hand(model: Any, rows: Rows, epsilon: float) -> float:
    """Of a model whose outputs are compared with the labels at their places, row by row, without padding."""
    with torch.no_grad():
        logits = [model(**{key: value[None] for key, value in row.items()}).logits[0] for row in rows]
    sums = [smoothed_by_hand(each, row["labels"], epsilon) for each, row in zip(logits, rows, strict=True)]
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


# ------------------------------------------------------------------------------------------------------------ shifted labels


def causal_classes() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted({kind for entry in NAMES.values() for kind in ((entry,) if isinstance(entry, str) else entry)})


def test_the_causal_classes_that_do_not_shift_are_known() -> None:
    """The others call `loss_function`, which shifts; so a class of a new version that computes its own loss is found here."""
    import transformers

    found = set()
    for name in causal_classes():
        forward = inspect.unwrap(getattr(transformers, name).forward)
        if "loss_function" not in forward.__code__.co_names and "labels" in forward.__code__.co_varnames:
            found.add(name)
    assert found | {"FlaubertWithLMHeadModel"} == UNSHIFTED  # Flaubert inherits the forward of XLM's head


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_labels_that_are_shifted_already(epsilon: float) -> None:
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.BartForCausalLM(transformers.BartConfig(vocab_size=37, **SMALL)).eval()
    rows = rows_for("llama", 7)
    measured = evaluate(model, loader(rows, 3), label_smoothing_factor=epsilon)
    assert measured == pytest.approx(mean_by_hand(model, rows, epsilon), abs=2e-6)


def test_a_subclass_shifts_as_its_base() -> None:
    import transformers

    class Mine(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Whole(transformers.BartForCausalLM):  # type: ignore[misc]
        pass

    model = Mine(make_model("gpt2").config).eval()
    rows = rows_for("gpt2", 7)
    measured = evaluate(model, loader(rows, 3), label_names=["labels"])
    assert measured == pytest.approx(evaluate_by_hand(model, [*loader(rows, 3)]), abs=2e-6)
    assert not LabelCount(Whole(transformers.BartConfig(vocab_size=37, **SMALL)), ["labels"]).shifts


# ------------------------------------------------------------------------------------------------------- sums, ignored labels


def make_speech(reduction: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
    layers: dict[str, Any] = {"conv_dim": (16,), "conv_stride": (20,), "conv_kernel": (20,), "num_feat_extract_layers": 1}
    layers |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    config = transformers.Wav2Vec2Config(ctc_loss_reduction=reduction, **sizes, **layers)
    return transformers.Wav2Vec2ForCTC(config).eval()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_that_is_a_sum_becomes_a_mean(reduction: str) -> None:
    """Of a batch of two and one of one, a mean of sums would count the former's rows twice."""
    model, generator = make_speech(reduction), torch.Generator().manual_seed(1)
    rows = []
    for index in range(3):
        labels = torch.randint(5, 30, (4,), generator=generator)
        labels[2 + index % 2 :] = IGNORED
        rows.append({"input_values": torch.randn(400, generator=generator), "labels": labels})
    with torch.no_grad():
        losses = [float(model(**{key: value[None] for key, value in row.items()}).loss) for row in rows]
    measured = evaluate(model, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert measured == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_the_ignored_label_of_a_segmentation() -> None:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    config = transformers.SegformerConfig(num_labels=3, decoder_hidden_size=8, classifier_dropout_prob=0.0, **sizes)
    model: Any = transformers.SegformerForSemanticSegmentation(config).eval()
    rows, losses = [], []
    for index in range(3):
        labels = torch.randint(0, 3, (32, 32))
        labels[: 10 * index] = config.semantic_loss_ignore_index
        rows.append({"pixel_values": torch.randn(3, 32, 32), "labels": labels})
        with torch.no_grad():
            losses.append(float(model(**{key: value[None] for key, value in rows[-1].items()}).loss) * (32 - 10 * index))
    measured = evaluate(model, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert measured == pytest.approx(sum(losses) / (3 * 32 - 30), abs=2e-6)


# ------------------------------------------------------------------------------------------------------------------ smoothing


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
@pytest.mark.parametrize("kind", ["EncoderDecoderModel", "BlenderbotForConditionalGeneration"])
def test_smoothing_runs_the_decoder_as_the_model_does(kind: str) -> None:
    """The one adds a mask to the decoder's inputs that it makes of labels, the other has no method that makes them."""
    import transformers

    torch.manual_seed(0)
    if kind == "EncoderDecoderModel":
        config = make_model("bert").config
        both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, config)
        both.decoder_start_token_id, both.pad_token_id = 1, 0
        model: Any = transformers.EncoderDecoderModel(both).eval()
    else:
        ends = {"decoder_start_token_id": 1, "pad_token_id": 0, "vocab_size": 37}
        model = transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig(**SMALL, **ends)).eval()
    rows = rows_for("t5", 7)
    measured = evaluate(model, loader(rows, 3), label_smoothing_factor=0.1)
    assert measured == pytest.approx(mean_by_hand(model, rows, 0.1), abs=2e-6)


@pytest.mark.parametrize(("shape", "labels"), [((3, 1), (3,)), ((2, 3, 8, 8), (2, 32, 32))])
def test_outputs_that_are_no_classes(shape: tuple[int, ...], labels: tuple[int, ...]) -> None:
    """With one output, a regression with integer labels, each loss would be 0."""
    with pytest.raises(ConfigurationError, match="for all classes of each label"):
        smoothed_loss(torch.randn(shape), torch.zeros(labels, dtype=torch.long), 0.1, False)
