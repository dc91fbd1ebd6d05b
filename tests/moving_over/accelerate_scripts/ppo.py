"""Proximal policy optimization in the shape of TRL's PPOTrainer: generate, score, then several epochs over the same answers.

The policy is rewarded for the token that the query names. What is drawn depends on the query and the round only, so that any
number of processes generates the same answers.
"""

import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH, MICRO, TOKENS, LENGTH, ROUNDS, EPOCHS = 8, 2, 6, 4, 6, 3
CLIP, VALUE_WEIGHT, KL_WEIGHT = 0.2, 0.1, 0.05


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden), hidden


class PolicyAndValue(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy, self.value = policy, nn.Linear(32, 1)

    def forward(self, tokens):
        logits, hidden = self.policy(tokens)
        return logits, self.value(hidden).squeeze(-1)


def generate(policy, queries, numbers, round_index):
    """Sample an answer to each query, with noise that belongs to the query's number."""
    sequence = queries
    noise = [torch.Generator().manual_seed(1000 * round_index + int(number)) for number in numbers]
    for _ in range(LENGTH):
        logits = policy(sequence)[0][:, -1]
        gumbel = torch.stack([-torch.empty(TOKENS).exponential_(generator=one).log() for one in noise])
        sequence = torch.cat([sequence, (logits + gumbel).argmax(-1, keepdim=True)], dim=1)
    return sequence


def log_probabilities(logits, sequence):
    chosen = F.log_softmax(logits[:, :-1], dim=-1).gather(-1, sequence[:, 1:, None]).squeeze(-1)
    return chosen[:, -LENGTH:]


def advantages_of(rewards, values, gamma=1.0, lam=0.95):
    last, reversed_advantages = torch.zeros(len(rewards)), []
    for step in reversed(range(LENGTH)):
        following = values[:, step + 1] if step + 1 < LENGTH else 0.0
        last = rewards[:, step] + gamma * following - values[:, step] + gamma * lam * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def main():
    processes = int(os.environ.get("WORLD_SIZE", 1))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCH // (MICRO * processes))
    set_seed(1)
    model = PolicyAndValue(Policy())
    reference = Policy()
    reference.load_state_dict(model.policy.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-5)
    queries = [(number, torch.tensor([number % TOKENS])) for number in range((ROUNDS + 1) * BATCH)]
    loader = DataLoader(queries, batch_size=BATCH // processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def repeat():
        while True:
            yield from loader

    batches, found, steps = repeat(), {"scores": [], "kl": [], "losses": []}, 0
    for round_index in range(ROUNDS):
        numbers, batch = next(batches)
        with torch.no_grad():
            unwrapped = accelerator.unwrap_model(model)
            sequence = generate(unwrapped.policy, batch, numbers, round_index)
            logits, values = unwrapped(sequence)
            values = values[:, -LENGTH - 1 : -1]
            old = log_probabilities(logits, sequence)
            kl = old - log_probabilities(reference(sequence)[0], sequence)
            scores = (sequence[:, -LENGTH:] == batch).float().mean(1)
            rewards = -KL_WEIGHT * kl
            rewards[:, -1] += scores
            advantages, returns = advantages_of(rewards, values)
            everywhere = accelerator.gather(advantages)
            advantages = (advantages - everywhere.mean()) * torch.rsqrt(everywhere.var() + 1e-8)
        losses = []
        for _ in range(EPOCHS):
            for start in range(0, len(batch), MICRO):
                rows = slice(start, start + MICRO)
                with accelerator.accumulate(model):
                    logits, predicted = model(sequence[rows])
                    predicted = predicted[:, -LENGTH - 1 : -1]
                    ratio = (log_probabilities(logits, sequence[rows]) - old[rows]).exp()
                    unclipped, clipped = -advantages[rows] * ratio, -advantages[rows] * ratio.clamp(1 - CLIP, 1 + CLIP)
                    bounded = values[rows] + (predicted - values[rows]).clamp(-CLIP, CLIP)
                    errors = torch.max((predicted - returns[rows]) ** 2, (bounded - returns[rows]) ** 2)
                    loss = torch.max(unclipped, clipped).mean() + VALUE_WEIGHT * 0.5 * errors.mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                steps += accelerator.sync_gradients
        found["scores"].append(accelerator.gather_for_metrics(scores).mean().item())
        found["kl"].append(accelerator.gather_for_metrics(kl.sum(1)).mean().item())
        found["losses"].append(accelerator.gather(torch.stack(losses).mean()).mean().item())
    found["steps"] = steps
    found["norm"] = sum(float(p.detach().double().norm()) for p in accelerator.unwrap_model(model).parameters())
    if accelerator.is_main_process:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
