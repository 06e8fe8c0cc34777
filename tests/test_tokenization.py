"""Prompts as the model wants them, the tokens that end a turn, and loading that fails fast."""

import subprocess
import sys
from copy import deepcopy

import pytest
from tokenizers_for_tests import byte_level, characters, render_prompt, sentencepiece
from transformers import GenerationConfig, LlamaConfig, Qwen2Config

from retrain.config.schema import Data, Model
from retrain.data.chat import encode_texts
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.model.text import eos_token_ids, load_text_model, load_tokenizer
from retrain.types import ChatMessage, Example

EXAMPLE = Example("What is 12+30?", "42", example_id="one")


def conversation(*turns: tuple[str, str]) -> Example:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    return Example(messages, "42", example_id="talk")


def data(**keys) -> Data:
    return Data.model_validate({"source": "lab"} | keys)


# ---- prompts

TALK = [("user", "hello"), ("assistant", "hi"), ("user", "12+30?")]
OWN = [("system", "Own."), ("user", "12+30?")]
BOXED = "What is 12+30?\n\nReason step by step and put the final answer in \\boxed{}."
SET = {"source": "math", "prompt_template": r"Q: {prompt} Answer in \boxed{}"}


@pytest.mark.parametrize(
    ("talk", "keys", "rendered"),
    [
        ([("user", "What is 12+30?")], {"source": "math"}, [("user", BOXED)]),
        ([("user", "What is 12+30?")], {"source": "gsm8k"}, [("user", BOXED)]),
        ([("user", "a")], {}, [("user", "a")]),
        ([("user", "a")], SET, [("user", r"Q: a Answer in \boxed{}")]),
        ([("user", "a")], {"source": "math", "prompt_template": "{prompt}"}, [("user", "a")]),
        ([("user", "a{prompt}")], {"prompt_template": "<{prompt}>"}, [("user", "<a{prompt}>")]),
        (TALK, {"prompt_template": "Solve: {prompt}"}, [*TALK[:2], ("user", "Solve: 12+30?")]),
        (OWN, {"system_prompt": "Configured."}, OWN),
    ],
)
def test_a_prompt_has_its_instruction_and_ends_where_the_assistant_begins(talk, keys, rendered):
    """The source's instruction or the template goes around the last user message alone."""
    example = conversation(*talk) if len(talk) > 1 else Example(talk[0][1], "42")
    text, _ = render_prompt(byte_level(), example, data(**keys))
    turns = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in rendered)
    assert text == f"{turns}<|im_start|>assistant\n"


def test_the_ids_are_those_of_the_chat_template():
    tokenizer = byte_level()
    _, ids = render_prompt(tokenizer, EXAMPLE, data(system_prompt="Be brief."))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": EXAMPLE.prompt},
    ]
    own = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids.tolist() == own
    assert ids.dtype == "int32"


def test_chat_template_args_reach_the_template():
    text, _ = render_prompt(
        byte_level(), EXAMPLE, data(chat_template_args={"enable_thinking": False})
    )
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


DATED = (
    "{% set form = '%b %Y' %}{% if strftime_now is defined %}{{ strftime_now('%d ' ~ form) }}"
    "{% endif %}\n"
)


def test_a_template_that_asks_for_the_date_gets_that_of_the_first_start():
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = DATED + tokenizer.chat_template
    text, _ = render_prompt(
        tokenizer, EXAMPLE, data(chat_template_args={"strftime_now": "2020-02-03"})
    )
    assert text.startswith("03 Feb 2020<")
    assert "2020" not in render_prompt(tokenizer, EXAMPLE, data())[0]


def test_an_argument_that_retrain_sets_itself_is_refused():
    with pytest.raises(ConfigurationError, match="retrain itself sets add_generation_prompt"):
        render_prompt(
            byte_level(), EXAMPLE, data(chat_template_args={"add_generation_prompt": False})
        )


def test_a_chat_template_that_refuses_a_role_is_named_in_one_sentence():
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported')"
        " }}{% endif %}"
    )
    with pytest.raises(ConfigurationError, match="roles system, user: System role not supported"):
        render_prompt(tokenizer, EXAMPLE, data(system_prompt="Be brief."))


def test_a_conversation_that_ends_with_the_assistants_text_is_continued():
    talk = conversation(("user", "12+30?"), ("assistant", "Let me see: "))
    text, _ = render_prompt(byte_level(), talk, data())
    assert text.endswith("<|im_start|>assistant\nLet me see: ")


TOOLS_TEMPLATE = (
    "{{ tools | length }}{% for m in messages %}{{ m.role }}:{{ m.name }}{{ m.tool_call_id }}"
    "{{ m.tool_calls | length }}{{ m.content }};{% endfor %}"
)


def test_tools_reach_the_template_or_are_refused_by_name():
    calls = [{"function": {"name": "add"}}]
    turns = [
        {"role": "user", "content": "12+30?", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    talk = Example(turns, "42", info={"tools": tools}, example_id="talk")
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = TOOLS_TEMPLATE
    assert render_prompt(tokenizer, talk, data(prompt_template="<{prompt}>"))[0] == (
        "1user:me0<12+30?>;assistant:1;tool:a042;"
    )
    for key in ("tool_calls", "tools"):
        tokenizer.chat_template = TOOLS_TEMPLATE.replace(key, "other")
        with pytest.raises(ConfigurationError, match=rf"talk has {key}, which the chat template"):
            render_prompt(tokenizer, talk, data())


def test_without_a_chat_template_a_prompt_is_plain_text():
    text, ids = render_prompt(characters(), EXAMPLE, data(system_prompt="Add."))
    assert text == "Add.\n\nWhat is 12+30?"
    assert len(ids) == len(text)


def test_without_a_chat_template_a_conversation_is_refused():
    with pytest.raises(ConfigurationError, match="has no chat template"):
        render_prompt(
            characters(), conversation(("user", "a"), ("assistant", "b"), ("user", "c")), data()
        )


def test_a_plain_prompt_gets_one_bos_and_no_eos():
    tokenizer = sentencepiece()
    for text in ("Let me check", "<s>Let me check"):
        (ids,) = encode_texts(tokenizer, [text])
        assert ids.tolist().count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.eos_token_id not in ids


@pytest.mark.parametrize("bos", ["{{ bos_token }}", ""])
def test_a_template_decides_about_bos_alone(bos):
    tokenizer = deepcopy(sentencepiece())
    body = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = f"{bos}{body}"
    _, ids = render_prompt(tokenizer, EXAMPLE, data())
    assert ids.tolist().count(tokenizer.bos_token_id) == bool(bos)
    assert tokenizer.eos_token_id not in ids


# ---- the tokens that end a completion


def test_every_end_token_is_found_once():
    tokenizer = byte_level(
        eos="<|endoftext|>"
    )  # a base model's EOS: the template ends turns with another token
    end, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert eos_token_ids(tokenizer) == tuple(sorted((end, turn)))
    config = LlamaConfig(eos_token_id=7)
    assert eos_token_ids(tokenizer, config, GenerationConfig(eos_token_id=[turn, 9])) == tuple(
        sorted({end, turn, 7, 9})
    )


def test_a_turn_that_ends_with_ordinary_text_adds_no_end_token():
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }} The{% endfor %}"
    )
    assert eos_token_ids(tokenizer) == (tokenizer.eos_token_id,)


def test_a_model_without_any_end_token_is_refused():
    tokenizer = deepcopy(characters())
    tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="no completion could end"):
        eos_token_ids(tokenizer)


# ---- loading


def test_the_text_side_of_a_folder_needs_no_weights(tmp_path):
    byte_level().save_pretrained(tmp_path)
    LlamaConfig(vocab_size=512, max_position_embeddings=128, eos_token_id=2).save_pretrained(
        tmp_path
    )
    text = load_text_model(Model(model=str(tmp_path)))
    assert (len(text.vocabulary), text.context, text.eos_ids) == (512, 128, (2,))
    assert text.tokenizer("Let me")["input_ids"] == byte_level()("Let me")["input_ids"]


def test_a_missing_folder_or_one_without_a_tokenizer_is_one_sentence(tmp_path):
    Qwen2Config().save_pretrained(tmp_path / "qwen")
    for name, said in (
        ("nothing", r'is not a folder on this machine; name one, .* or "lab"'),
        ("", "did not load from the folder"),
        ("qwen", "holds no tokenizer; name a whole model"),
    ):
        with pytest.raises(EnvironmentFailure, match=said) as failure:
            load_tokenizer(str(tmp_path / name))
        assert "\n" not in str(failure.value)


OFFLINE = """
import time
from retrain.errors import EnvironmentFailure
from retrain.model.text import load_tokenizer
slept, sleep = [], time.sleep
time.sleep = lambda seconds: slept.append(seconds) or sleep(min(seconds, 0.1))
try:
    load_tokenizer("nobody/no-such-model")
except EnvironmentFailure as failure:
    print(failure)
assert sum(slept) < 5, f"unreachable hub was waited for: {slept}"
from huggingface_hub import is_offline_mode
assert is_offline_mode(), "the next user of the hub would wait again"
"""


def test_an_unreachable_hub_is_not_waited_for_and_says_what_works_offline(tmp_path):
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # a port that nothing listens on
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the hub (http://127.0.0.1:9) did not answer" in done.stdout
    assert 'model = "lab"' in done.stdout
