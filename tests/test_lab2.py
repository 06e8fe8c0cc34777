"""The second lab model: the shape of its surprisal, and its hasty choices."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.advantages.planning import RegexDetector
from retrain.advantages.step import Float64Array
from retrain.cli.main import main
from retrain.data import lab
from retrain.model.text import LAB_MODELS

HASTY = re.compile("what if we|or we could")


class Sampled(NamedTuple):
    text: str
    reference: str
    pieces: list[str]
    surprisal: Float64Array
    """[T] of the tokens, the end of the turn included."""

    @property
    def is_right(self) -> bool:
        return f"\\boxed{{{self.reference}}}" in self.text


def sample(name: str, difficulty: int) -> list[Sampled]:
    """Two completions for each of 64 held-out problems, at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(LAB_MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(LAB_MODELS[name]).eval()
    held_out = [one for one in lab.examples("heldout", difficulty)[:64] for _ in range(2)]
    turns = [[{"role": "user", "content": one.prompt}] for one in held_out]
    prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        output = model.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=128, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    logprobs = torch.stack(output.logits, dim=1).double().log_softmax(-1)
    chosen = -logprobs.gather(2, new[..., None])[..., 0]
    found = []
    for example, ids, own in zip(held_out, new, chosen, strict=True):
        length = int((ids != tokenizer.pad_token_id).sum())
        pieces = [tokenizer.decode(token) for token in ids[:length]]
        found.append(Sampled("".join(pieces), str(example.reference), pieces, own[:length].numpy()))
    return found


@pytest.fixture(scope="module")
def sampled() -> list[Sampled]:
    return sample("lab2", 6)


def top_share(samples: list[Sampled]) -> float:
    """The share of (1 - p)^2, a log-prob's squared gradient at its logit, in 5% of the tokens."""
    energy = np.sort((1 - np.exp(-np.concatenate([one.surprisal for one in samples]))) ** 2)
    return float(energy[-(len(energy) // 20) :].sum() / energy.sum())


def test_five_percent_of_the_tokens_of_the_first_lab_carry_92_percent() -> None:
    """The warning of `retrain explain` and docs/lab.md have this figure."""
    assert top_share(sample("lab", 1)) == pytest.approx(0.92, abs=0.03)


def test_half_of_its_tokens_are_sure_and_a_fifth_are_not(sampled: list[Sampled]) -> None:
    surprisal = np.concatenate([one.surprisal for one in sampled])
    assert np.median(surprisal) < 0.01
    assert 0.15 < (surprisal > 0.1).mean() < 0.30
    assert top_share(sampled) < 0.5


def test_its_planning_tokens_are_found_by_the_default_phrases(sampled: list[Sampled]) -> None:
    masks = [RegexDetector(()).detect(one.pieces) for one in sampled]
    assert 0.05 < np.concatenate(masks).mean() < 0.30


def test_a_hasty_completion_is_nearly_always_wrong(sampled: list[Sampled]) -> None:
    hasty = [one.is_right for one in sampled if HASTY.search(one.text)]
    others = [one.is_right for one in sampled if not HASTY.search(one.text)]
    assert 0.25 < len(hasty) / len(sampled) < 0.6
    assert np.mean(others) > np.mean(hasty) + 0.15


def test_other_problems_than_its_own_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "examples/lab.toml", "--model", "lab2"]
    assert main(words) == 0
    assert "set [data] difficulty = 6" in capsys.readouterr().out
    assert main([*words, "--data-difficulty", "6"]) == 0
    assert "difficulty = 6." not in capsys.readouterr().out
