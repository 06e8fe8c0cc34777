"""The lab: its problems, its packaged model, and the text that the model was made from."""

import itertools
import json
import random
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

from retrain.data import lab
from retrain.model.text import LAB_MODELS

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
DIFFICULTIES = range(1, lab.MAX_DIFFICULTY + 1)


@pytest.fixture(scope="module", params=LAB_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(LAB_MODELS[name])


@pytest.fixture(scope="module")
def model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(LAB_MODELS[name]).eval()


# ---- problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_heldout_problem_is_a_training_problem_even_with_reordered_terms(
    difficulty: int,
) -> None:
    def unordered(prompt: str) -> tuple[str, ...]:
        return tuple(sorted(re.findall(r"[-+*]?\d+", f"+{prompt}")))

    train, held_out = lab.examples("train", difficulty), lab.examples("heldout", difficulty)
    sums = [
        {unordered(e.prompt) for e in part if e.task == "lab/sum3"} for part in (train, held_out)
    ]
    assert not sums[0] & sums[1]
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_a_split_holds_each_problem_once(difficulty: int) -> None:
    for split, count in lab.NUM_EXAMPLES.items():
        part = lab.examples(split, difficulty)
        assert (
            len(part) == len({e.prompt for e in part}) == len({e.example_id for e in part}) == count
        )


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_a_reference_is_the_value_of_its_expression(difficulty: int) -> None:
    for example in [*lab.examples("train", difficulty), *lab.examples("heldout", difficulty)]:
        expression = str(example.prompt).removesuffix("=?")
        assert set(expression) <= set("0123456789+-*()")
        assert str(eval(expression)) == example.reference


def test_the_fifth_difficulty_mixes_the_four_families_in_equal_parts() -> None:
    tasks = [example.task for example in lab.examples("heldout", lab.MIXED)]
    assert {tasks.count(f"lab/{family}") for family in lab.FAMILIES} == {
        len(tasks) // len(lab.FAMILIES)
    }


def test_the_sixth_has_one_number_of_two_digits_and_often_two_digits_that_make_ten() -> None:
    tens = 0
    for example in lab.examples("train", 6):
        numbers = sorted(int(text) for text in re.findall(r"\d+", str(example.prompt)))
        digits, large = numbers[:3], numbers[3:]
        assert digits[0] >= 1 and digits[2] <= 9 and 10 <= large[0] <= 59
        tens += any(a + b == 10 for a, b in itertools.combinations(digits, 2))
    assert 0.6 < tens / lab.NUM_EXAMPLES["train"] < 0.7


def test_every_process_makes_the_same_examples() -> None:
    code = (
        "import json; from retrain.data.lab import examples; print(json.dumps([[e.example_id,"
        " e.reference] for e in examples('train', 5)]))"
    )
    command, env = [sys.executable, "-c", code], {"PYTHONHASHSEED": "7"}
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    expected = [[e.example_id, e.reference] for e in lab.examples("train", 5)]
    assert json.loads(other.stdout) == expected


def test_the_problems_never_change() -> None:
    """Measured rates, and comparisons between versions, hold only for the same problems."""
    first = [lab.examples("heldout", difficulty)[0].prompt for difficulty in DIFFICULTIES]
    assert first[:3] == ["37+45+54=?", "88-58+84-11=?", "39*4+45=?"]
    assert first[3:] == ["(47+28)*7-76=?", "37+45+54=?", "8+4+6+46=?"]


def test_the_problem_generator_imports_no_torch() -> None:
    code = (
        "import sys, retrain.data.lab; sys.exit('torch' in sys.modules or 'transformers' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- the packaged model --------------------------------------------------------------------------


def test_every_printable_character_survives_encoding_and_decoding(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for text in [
        *string.printable,
        string.printable,
        " a  b \n\n c ",
        "don't , . !",
        "ünïcødé 数学 🎉",
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_turn_in_the_chat_template_is_the_eos(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    turns = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert prompt == "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    assert whole.startswith(prompt)
    assert tokenizer.encode(whole[len(prompt) + 1 :])[0] == tokenizer.eos_token_id


def test_the_model_folder_loads_as_a_neutral_qwen3(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 2048
    assert (
        model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    )
    generation = json.loads((LAB_MODELS[name] / "generation_config.json").read_text())
    assert set(generation) == {"eos_token_id", "pad_token_id"}, (
        "a sampling setting would leak into other programs"
    )


def test_the_model_folder_is_a_few_megabytes_and_names_no_machine(name: str) -> None:
    files = list(LAB_MODELS[name].iterdir())
    assert sum(file.stat().st_size for file in files) < 4_000_000
    for file in files:
        if file.suffix in {".json", ".md", ".jinja"}:
            assert not re.search(r"/(work|home|tmp|root)/", file.read_text()), file.name


@pytest.mark.slow
@torch.inference_mode()
def test_the_model_is_mostly_right_when_greedy_and_often_wrong_when_sampled(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The gap is what reinforcement learning closes; the bounds are three standard errors around
    the card's figures.
    """
    held_out = lab.examples("heldout", {"lab": 1, "lab2": 6}[name])[:128]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": e.prompt}], tokenize=False, add_generation_prompt=True
        )
        for e in held_out
    ]
    padding = {"padding": True, "padding_side": "left", "return_token_type_ids": False}
    inputs = tokenizer(prompts, return_tensors="pt", **padding)
    rates = {}
    for sampled in (False, True):
        torch.manual_seed(0)
        output = model.generate(**inputs, do_sample=sampled, max_new_tokens=128)
        texts = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        rates[sampled] = sum(
            f"\\boxed{{{e.reference}}}" in text for e, text in zip(held_out, texts, strict=True)
        ) / len(held_out)
    low, high = {"lab": (0.30, 0.48), "lab2": (0.20, 0.44)}[name]
    assert low < rates[True] < high
    assert rates[False] > rates[True] + 0.2


# ---- the text it was made from -------------------------------------------------------------------


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
def test_pretraining_never_sees_a_heldout_problem() -> None:
    import lab_text

    rng = random.Random(0)
    for family in lab.FAMILIES:
        assert all(lab_text.training_problem(family, rng).split == "train" for _ in range(300))


@pytest.mark.usefixtures("scripts")
def test_the_model_is_trained_on_its_own_turns_as_the_chat_template_renders_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    import make_lab_model

    errors = make_lab_model.PHASES[-1].errors
    for seed in range(20):
        messages = make_lab_model.conversation(random.Random(seed), errors)
        ids, mask = make_lab_model.encode_conversation(tokenizer, messages)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
        learned = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own])
        assert learned == "".join(
            m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"
        )
