"""Make the lab's model: a tokenizer, a tiny Qwen3, and three phases of pre-training on synthetic
text, with a fixed seed.

    python scripts/make_lab_model.py                  # writes retrain/assets/lab
    python scripts/make_lab_model.py --output DIR --measure
    python scripts/make_lab_model.py --output DIR --start OTHER --from-phase 2

All data is generated here, and no held-out problem is trained on. The output is an ordinary
transformers folder. Weights differ in their last bits between machines and versions of torch; the
measured rates should not.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch
from lab_text import SECOND_TRY_RATE, ErrorRates, conversation
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from retrain.data.lab import FAMILIES, examples
from retrain.model.text import LAB_MODEL
from retrain.types import ChatMessage

SEED = 20_260_801


class Phase(NamedTuple):
    """A phase of pre-training, with a new AdamW state."""

    steps: int
    batch: int
    """Conversations per step."""
    errors: ErrorRates


PHASES = (
    Phase(300, 192, ErrorRates(0.16, 0.16)),
    Phase(320, 64, ErrorRates(0.16, 0.16)),  # after it greedy answers are mostly right
    Phase(100, 64, ErrorRates(0.35, 0.05)),  # teaches it to be careless, and that checking helps
)
LEARNING_RATE = 2e-3
"""AdamW for all weights: Muon makes them five times larger, and a LoRA adapter at 3e-4 then learns
several times more slowly."""
WARMUP_STEPS = 20
DECAY_SHARE = 0.4  # share of the steps with a falling learning rate
MAX_STRETCH = 1.25  # longest over shortest sequence of a micro-batch, so that little is padding
REPORT_EVERY = 20
MAX_NEW_TOKENS = 160

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, in byte order, then the three special tokens: decoding an encoded text
    gives the text.
    """
    alphabet = _byte_level_alphabet()
    tokenizer = Tokenizer(
        models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    )
    return with_chat(tokenizer)


def with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it, with the lab's chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _byte_level_alphabet() -> list[str]:
    """[256] the printable character that stands for each byte in byte-level vocabularies (GPT-2's
    table).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: list[ChatMessage]
) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template renders them, and True where the token is the assistant's own,
    its end of turn included.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.encode(text)
    header = tokenizer.encode(f"{START}assistant\n")
    mask, position = [False] * len(ids), 0
    while position < len(ids):
        if ids[position : position + len(header)] == header:
            position += len(header)
            end = ids.index(tokenizer.eos_token_id, position) + 1
            mask[position:end] = [True] * (end - position)
            position = end
        else:
            position += 1
    return ids, mask


def step_conversations(step: int, phase: Phase) -> list[list[ChatMessage]]:
    rng = random.Random(SEED * 1_000_003 + step)
    return [conversation(rng, phase.errors) for _ in range(phase.batch)]


def micro_batches(
    tokenizer: PreTrainedTokenizerFast, conversations: list[list[ChatMessage]]
) -> list[tuple[Tensor, Tensor]]:
    """The sequences of a step as [rows, length] ids and labels; -100 marks tokens without a
    loss.
    """
    rows = sorted(
        (encode_conversation(tokenizer, messages) for messages in conversations),
        key=lambda row: len(row[0]),
    )
    parts: list[list[tuple[list[int], list[bool]]]] = [[]]
    for row in rows:
        if parts[-1] and len(row[0]) > MAX_STRETCH * len(parts[-1][0][0]):
            parts.append([])
        parts[-1].append(row)
    return [_pad(part, tokenizer.pad_token_id) for part in parts]


def _pad(rows: list[tuple[list[int], list[bool]]], pad: int) -> tuple[Tensor, Tensor]:
    length = len(rows[-1][0])
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), -100)
    for i, (tokens, mask) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, : len(tokens)] = torch.where(torch.tensor(mask), ids[i, : len(tokens)], -100)
    return ids, labels


def schedule(step: int, steps: int) -> float:
    """Factor on the learning rates: warm-up, constant, then linear to nearly zero."""
    return min((step + 1) / WARMUP_STEPS, 1.0, 0.02 + (steps - step) / (DECAY_SHARE * steps))


def pretrain(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, first: int) -> float:
    """Train all phases from number `first`. Returns the mean loss of the last REPORT_EVERY steps,
    in nats per token.
    """
    started, losses = time.monotonic(), []
    total = sum(phase.steps for phase in PHASES[:first])
    for phase in PHASES[first:]:
        adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        for step in range(phase.steps):
            batches = micro_batches(tokenizer, step_conversations(total, phase))
            losses.append(accumulate_gradients(model, batches))
            total += 1
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.param_groups[0]["lr"] = LEARNING_RATE * schedule(step, phase.steps)
            adamw.step()
            adamw.zero_grad()
            if total % REPORT_EVERY == 0:
                mean = sum(losses[-REPORT_EVERY:]) / len(losses[-REPORT_EVERY:])
                print(
                    f"step {total:3d}  loss {mean:.4f}  {time.monotonic() - started:5.0f} s",
                    flush=True,
                )
    return sum(losses[-REPORT_EVERY:]) / REPORT_EVERY


def accumulate_gradients(model: Qwen3ForCausalLM, batches: list[tuple[Tensor, Tensor]]) -> float:
    """One step's gradient, normalized by the tokens of all its micro-batches. Returns the loss."""
    targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    total = 0.0
    for ids, labels in batches:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = (
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            / targets
        )
        loss.backward()
        total += loss.item()
    return total


@torch.inference_mode()
def pass_rate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, difficulty: int, sampled: bool
) -> tuple[float, float]:
    """pass@1 over the held-out problems, one completion each, and the mean length of a completion
    in tokens.
    """
    torch.manual_seed(SEED)
    decoding = {"do_sample": True, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    held_out = examples("heldout", difficulty)
    right = tokens = 0
    for start in range(0, len(held_out), 128):
        part = held_out[start : start + 128]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": e.prompt}], tokenize=False, add_generation_prompt=True
            )
            for e in part
        ]
        inputs = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **decoding)
        for example, ids in zip(part, output[:, inputs["input_ids"].shape[1] :], strict=True):
            completion = tokenizer.decode(ids, skip_special_tokens=True)
            boxes = re.findall(r"\\boxed\{([^}]*)\}", completion)
            right += bool(boxes) and boxes[-1] == example.reference
            tokens += int((ids != tokenizer.pad_token_id).sum())
    return right / len(held_out), tokens / len(held_out)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the folder. The generation configuration has only the special tokens, so that no
    sampling setting leaks into a run.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def measure(folder: Path) -> list[str]:
    """pass@1 of the saved model for every difficulty, as the rows of the model card's table."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    rows = []
    for difficulty, name in enumerate([*FAMILIES, "all of them"], start=1):
        question = examples("heldout", difficulty)[0].prompt
        sampled, length = pass_rate(model, tokenizer, difficulty, sampled=True)
        greedy, _ = pass_rate(model, tokenizer, difficulty, sampled=False)
        rows.append(
            f"| {difficulty} | {name} | `{question}` | {sampled:.2f} | {greedy:.2f} |"
            f" {length:.0f} |"
        )
        print(rows[-1], flush=True)
    return rows


CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# The lab's model

A tiny causal language model for trying reinforcement learning with verifiable rewards on two CPU
cores: Qwen3 architecture, {parameters:,} parameters, one token a byte, a chat template whose end of
turn is the EOS. It answers arithmetic with written-out steps, often wrongly when sampled, and it
plays guess-my-number ("higher", "lower") in two to six turns. It can do nothing else.

```
user:       61+58+35=?
assistant:  let me think: 61+58=119. 119+35=154. \\boxed{{154}}
```

Made from nothing but synthetic text by `python scripts/make_lab_model.py`, seed {seed}, with AdamW
at {rate} in {count} phases:

{phases}

{second_try:.0%} of the solutions are worked a second time after "wait, let me check" or "let me
verify". The text holds no held-out problem. Last loss: {loss:.3f} nats a token (torch {torch}).

pass@1 on the 512 held-out problems of each difficulty, one completion each, at temperature 1 and
greedy, and the mean length of a sampled completion in tokens:

| difficulty | family | for example | sampled | greedy | tokens |
|---|---|---|---|---|---|
{rows}

Licence: MIT.
"""


def write_card(folder: Path, rows: list[str], parameters: int, loss: float) -> None:
    phases = "\n".join(
        f"{number}. {phase.steps} steps of {phase.batch} conversations, in which a partial result"
        f" is deliberately wrong with probability {phase.errors.first_try}, in a second try"
        f" {phase.errors.second_try}"
        for number, phase in enumerate(PHASES, start=1)
    )
    text = CARD.format(
        parameters=parameters, seed=SEED, rate=LEARNING_RATE, count=len(PHASES), phases=phases,
        second_try=SECOND_TRY_RATE, loss=loss,
        torch=torch.__version__, rows="\n".join(rows),
    )  # fmt: skip
    (folder / "README.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=LAB_MODEL)
    parser.add_argument("--measure", action="store_true", help="only measure the existing model")
    parser.add_argument(
        "--start",
        type=Path,
        help="start from these weights, with --from-phase; default: new weights",
    )
    parser.add_argument(
        "--from-phase", type=int, default=0, help="the first phase to train, counted from 0"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.output)
        return
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = (
        Qwen3ForCausalLM.from_pretrained(arguments.start)
        if arguments.start
        else make_model(tokenizer)
    )
    parameters = model.num_parameters()
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens, {torch.get_num_threads()} threads")
    started = time.monotonic()
    loss = pretrain(model, tokenizer, arguments.from_phase)
    print(f"seed {SEED}, {time.monotonic() - started:.0f} s, last loss {loss:.4f}")
    save(model, tokenizer, arguments.output)
    write_card(arguments.output, measure(arguments.output), parameters, loss)


if __name__ == "__main__":
    main()
