"""Libraries that import accelerate: peft, transformers, diffusers and trl. A LoRA model trains in a loop of one's own."""

import importlib
import json

import accelerate
import diffusers
import peft
import torch
import transformers

for name in (
    "transformers.modeling_utils",
    "transformers.trainer",
    "diffusers.models.modeling_utils",
    "trl",
    "trl.trainer.sft_trainer",
):
    importlib.import_module(name)

accelerate.utils.set_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
schedule = diffusers.optimization.get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=16)
loader = torch.utils.data.DataLoader([torch.arange(16) % 7 for _ in range(64)], batch_size=8)
accelerator = accelerate.Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for _ in range(2):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(json.dumps({"steps": [len(losses)], "losses": losses, "of": accelerate.Accelerator.__module__}))
