"""Make the second lab model: a tokenizer of words, a tiny Qwen3, and one phase of pre-training on
synthetic text, with a fixed seed.

    python scripts/make_lab2_model.py                  # writes retrain/assets/lab2
    python scripts/make_lab2_model.py --output DIR

scripts/lab2_text.py makes the text, and no held-out problem is in it. The rest is as in
scripts/make_lab_model.py.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from lab2_text import conversation
from make_lab_model import (
    END,
    PAD,
    START,
    accumulate_gradients,
    make_model,
    micro_batches,
    pass_rate,
    save,
    schedule,
    with_chat,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from retrain.data.lab import MAX_DIFFICULTY
from retrain.model.text import LAB_MODELS

SEED = 20_261_125
STEPS, BATCH = 420, 96
LEARNING_RATE = 3e-3
TOKENIZER_TEXTS = 3_000
REPORT_EVERY = 20


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which a frequent word is a token and a digit always one of its own. It
    holds all bytes, so any text can be encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=20,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(SEED)
    texts = (message["content"] for _ in range(TOKENIZER_TEXTS) for message in conversation(rng))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    )
    return with_chat(tokenizer)


def pretrain(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Train on fresh texts. Returns the mean loss of the last REPORT_EVERY steps, in nats."""
    started, losses = time.monotonic(), []
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(STEPS):
        rng = random.Random(SEED * 1_000_003 + step)
        batches = micro_batches(tokenizer, [conversation(rng) for _ in range(BATCH)])
        losses.append(accumulate_gradients(model, batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.param_groups[0]["lr"] = LEARNING_RATE * schedule(step, STEPS)
        adamw.step()
        adamw.zero_grad()
        if step % REPORT_EVERY == REPORT_EVERY - 1:
            mean = sum(losses[-REPORT_EVERY:]) / REPORT_EVERY
            print(
                f"step {step + 1}  loss {mean:.4f}  {time.monotonic() - started:.0f} s", flush=True
            )
    return sum(losses[-REPORT_EVERY:]) / REPORT_EVERY


CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# The second lab model

A tiny causal language model for trying reinforcement learning with verifiable rewards on two CPU
cores: Qwen3 architecture, {parameters:,} parameters, words as tokens, a chat template whose end of
turn is the EOS. It adds four numbers step by step; a phrase before each step decides whether the
step is careful, plain, or a hasty guess, which is nearly always wrong. It can do nothing else.

```
user:       47+8+6+2=?
assistant:  ok. let me think: add 47+8=55. what if we just add 55+6+2=66. so \\boxed{{66}}
```

Made from nothing but synthetic text (`scripts/lab2_text.py`) by `python
scripts/make_lab2_model.py`, seed {seed}: {steps} steps of {batch} conversations, AdamW at {rate}.
The text holds no held-out problem. Last loss: {loss:.3f} nats a token (torch {torch}).

pass@1 on the 512 held-out problems (`[data] difficulty = {difficulty}`), one completion each: {sampled:.2f}
sampled at temperature 1, {greedy:.2f} greedy, {length:.0f} tokens a completion.

Licence: MIT.
"""


def write_card(folder: Path, loss: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    sampled, length = pass_rate(model, tokenizer, MAX_DIFFICULTY, sampled=True)
    greedy, _ = pass_rate(model, tokenizer, MAX_DIFFICULTY, sampled=False)
    text = CARD.format(
        parameters=model.num_parameters(), seed=SEED, steps=STEPS, batch=BATCH, rate=LEARNING_RATE,
        loss=loss, torch=torch.__version__, difficulty=MAX_DIFFICULTY, sampled=sampled,
        greedy=greedy, length=length,
    )  # fmt: skip
    (folder / "README.md").write_text(text)
    print(f"pass@1 {sampled:.3f} sampled, {greedy:.3f} greedy, {length:.1f} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=LAB_MODELS["lab2"])
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    loss = pretrain(model, tokenizer)
    save(model, tokenizer, arguments.output)
    write_card(arguments.output, loss)


if __name__ == "__main__":
    main()
