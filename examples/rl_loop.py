r"""Reinforcement learning with verifiable rewards on one page: GRPO on the lab model, in plain
PyTorch.

    python examples/rl_loop.py --steps 30

A tiny language model adds three numbers. Each step samples a group of completions per problem,
scores each against the known answer, centers the rewards within the group (that is GRPO's advantage
without its division by the standard deviation: arXiv 2503.20783), and takes one optimizer step on a
LoRA adapter. Four properties make it right, and each is one line below:

1. the sampled end-of-sequence token is an action and is trained; nothing after it exists;
2. sampler and learner compute the same policy, softmax(logits / T) over the whole vocabulary, so
the ratio is 1 on policy;
3. the loss is normalized once, by the action tokens of the whole batch, whatever the micro-batches
are;
4. masks come from lengths, never from comparing token ids with a pad token.

Left out, and what `retrain` adds: token-level credit, a shared prefix cache, a decode batch that
refills, counter-based noise, exact resume, evaluation, reward workers that can be killed,
statistics over seeds. Only the lab's problems and model come from the package.
"""

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

from retrain.data.lab import examples
from retrain.model.text import LAB_MODEL

TEMPERATURE = 1.0
MAX_TOKENS = 96
MICRO_BATCH = 1024  # tokens per forward and backward pass; attention costs its square


@dataclass
class Episode:
    """One completion with everything that learning needs."""

    prompt: list[int]
    actions: list[int]
    """Sampled token ids, the end-of-sequence token included."""
    logprobs: list[float]
    """log softmax(logits / T) of each action, as the sampler computed it."""
    advantage: float = 0.0


# -- sample ----------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(
    model: nn.Module, prompts: list[list[int]], group_size: int, eos: int, rng: torch.Generator
) -> list[list[Episode]]:
    """`group_size` completions per prompt, all rows in one batch; a row that has ended leaves
    it.
    """
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    episodes = [Episode(prompt, [], []) for prompt in rows]
    width = max(map(len, rows))
    padding = torch.tensor([width - len(row) for row in rows])
    tokens = torch.tensor(
        [[0] * (width - len(row)) + row for row in rows]
    )  # padded on the left; any id will do, the mask hides it
    mask = torch.arange(width)[None, :] >= padding[:, None]
    positions = (torch.arange(width)[None, :] - padding[:, None]).clamp(min=0)
    alive = torch.arange(len(rows))
    cache = DynamicCache()
    for _ in range(MAX_TOKENS):
        output = model(
            tokens,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logprobs = F.log_softmax(
            output.logits[:, -1].float() / TEMPERATURE, dim=-1
        )  # property 2: whole vocabulary, at T
        actions = torch.multinomial(logprobs.exp(), 1, generator=rng)
        chosen = logprobs.gather(1, actions)[:, 0].tolist()
        for row, action, logprob in zip(
            alive.tolist(), actions[:, 0].tolist(), chosen, strict=True
        ):
            episodes[row].actions.append(action)  # property 1: the end-of-sequence token too
            episodes[row].logprobs.append(logprob)
        keep = (actions[:, 0] != eos).nonzero()[:, 0]
        if not len(keep):
            break
        if len(keep) < len(alive):
            cache.batch_select_indices(keep)
        alive, tokens, mask = alive[keep], actions[keep], F.pad(mask[keep], (0, 1), value=True)
        positions = positions[keep, -1:] + 1
    return [episodes[start : start + group_size] for start in range(0, len(episodes), group_size)]


# -- score -----------------------------------------------------------------------------------------


def reward(completion: str, answer: str) -> float:
    r"""1 if the last \boxed{...} of the completion is the answer, character by character."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    return float(bool(boxes) and boxes[-1].strip() == answer)


def grpo(rewards: list[float]) -> list[float]:
    """A_i = r_i - mean(r), for one group."""
    mean = sum(rewards) / len(rewards)
    return [value - mean for value in rewards]


# -- learn -----------------------------------------------------------------------------------------


def micro_batches(episodes: list[Episode]) -> Iterator[list[Episode]]:
    """Episodes in runs of at most MICRO_BATCH tokens."""
    batch: list[Episode] = []
    for episode in episodes:
        size = len(episode.prompt) + len(episode.actions)
        if (
            batch
            and size + sum(len(item.prompt) + len(item.actions) for item in batch) > MICRO_BATCH
        ):
            yield batch
            batch = []
        batch.append(episode)
    yield batch


def action_logprobs(model: nn.Module, batch: list[Episode]) -> Tensor:
    """Log-probs of all actions of the batch, packed into one row without padding.

    Positions that start again at 0 tell transformers where one episode ends, so that no token sees
    another episode.
    """
    tokens = [episode.prompt + episode.actions for episode in batch]
    packed = torch.tensor([[token for row in tokens for token in row]])
    positions = torch.cat([torch.arange(len(row)) for row in tokens])[None]
    predicts, start = [], 0
    for episode in batch:
        first = (
            start + len(episode.prompt) - 1
        )  # the last prompt token predicts the first action: the shift by one, done once
        predicts.append(torch.arange(first, first + len(episode.actions)))
        start += len(episode.prompt) + len(episode.actions)
    where = torch.cat(predicts)  # property 4: from lengths
    logits = model(packed, position_ids=positions, use_cache=False, logits_to_keep=where).logits[0]
    logprobs = F.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    return logprobs.gather(1, packed[0, where + 1, None])[:, 0]


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Episode]]
) -> tuple[float, float]:
    """One policy-gradient step. Returns the loss and the largest |ratio - 1|, which is rounding
    only on policy.
    """
    episodes = [episode for group in groups for episode in group if episode.advantage != 0]
    if not episodes:
        return 0.0, 0.0  # all groups all right or all wrong: there is nothing to compare
    total = sum(
        len(episode.actions) for episode in episodes
    )  # property 3: the whole batch, before the first backward pass
    loss_sum = worst = 0.0
    optimizer.zero_grad()
    for batch in micro_batches(episodes):
        old = torch.tensor([logprob for episode in batch for logprob in episode.logprobs])
        advantages = torch.tensor([episode.advantage for episode in batch for _ in episode.actions])
        ratio = (action_logprobs(model, batch) - old).exp()
        loss = -(ratio * advantages).sum() / total
        loss.backward()
        loss_sum += loss.item()
        worst = max(worst, (ratio.detach() - 1).abs().max().item())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss_sum, worst


# -- the loop --------------------------------------------------------------------------------------


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The problem as a user's turn, up to where the assistant begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def main(
    steps: int = 30, batch_size: int = 32, group_size: int = 4, lr: float = 1e-3, seed: int = 0
) -> list[float]:
    """Train, print one line per step, and return the mean reward of each."""
    torch.manual_seed(
        seed
    )  # the adapter's initial A; B is 0, so the first step samples from the base model
    rng = torch.Generator().manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(LAB_MODEL)
    base = AutoModelForCausalLM.from_pretrained(LAB_MODEL, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    ).eval()
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=lr, weight_decay=0.0
    )
    problems = examples("train")
    history = []
    for step in range(steps):
        began = time.monotonic()
        batch = [problems[(step * batch_size + i) % len(problems)] for i in range(batch_size)]
        groups = rollout(
            model,
            [encode(tokenizer, str(problem.prompt)) for problem in batch],
            group_size,
            tokenizer.eos_token_id,
            rng,
        )
        rewards = [
            [
                reward(
                    tokenizer.decode(episode.actions, skip_special_tokens=True), problem.reference
                )
                for episode in group
            ]
            for group, problem in zip(groups, batch, strict=True)
        ]
        for group, values in zip(groups, rewards, strict=True):
            for episode, advantage in zip(group, grpo(values), strict=True):
                episode.advantage = advantage
        loss, worst = learn(model, optimizer, groups)
        history.append(sum(map(sum, rewards)) / (batch_size * group_size))
        seconds = time.monotonic() - began
        print(
            f"Step {step} | reward={history[-1]:.3f} | loss={loss:.4f} | |ratio-1|<={worst:.1e} |"
            f" time={seconds:.1f}s",
            flush=True,
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="GRPO on the lab model, the whole algorithm on one page."
    )
    for name, kind, default in (
        ("steps", int, 30),
        ("batch-size", int, 32),
        ("group-size", int, 4),
        ("lr", float, 1e-3),
        ("seed", int, 0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    main(**vars(parser.parse_args()))
