"""Secrets are masked, and ordinary text is left alone."""

import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config import config_from_mapping, config_from_toml, dump_toml
from retrain.records.redact import MASK, Redactor
from retrain.system import toml_value

PLAIN = Redactor({})


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "MY_SECRET",
        "db_password",
        "TINKER_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
    ],
)
def test_values_of_secret_variables_are_masked(name: str) -> None:
    assert Redactor({name: "wonderful-value"}).text("it is wonderful-value!") == f"it is {MASK}!"


def test_values_that_are_no_secret_stay() -> None:
    plain = {"TOKENIZERS_PARALLELISM": "false-ish", "SSH_KEY_PATH": "/home/me/.ssh"}
    for name, value in (plain | {"HOME": "/root/me", "A_KEY": "1"}).items():
        assert Redactor({name: value}).text(f"x {value} 1") == f"x {value} 1"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-proj-abcdefghijklmnop",
        "wandb_v1_abcdefghijklmnopqrst",
        "gsk_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuv",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.abcdef",
    ],
)
def test_tokens_of_known_shapes_are_masked(secret: str) -> None:
    assert PLAIN.text(f"used {secret} here") == f"used {MASK} here"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pa55@host:8000/v1", "https://***@host:8000/v1"),
        ("https://host/v1?api_key=abc&n=1", "https://host/v1?api_key=***&n=1"),
        ("Authorization: Bearer abc.def-123456", "Authorization: Bearer ***"),
        ("https://user:p@55@host:8000/v1", "https://***@host:8000/v1"),
        ('url = "http://user:pa/55@host"', 'url = "http://***@host"'),
        ('base_url = "user:pa55@host:80" is not', 'base_url = "***@host:80" is not'),
        ('api_key = "a-1" stands outside', 'api_key = "***" stands outside'),
        ('judge_api_key_env = "my-key" is not', 'judge_api_key_env = "***" is not'),
        ("https://host/cb#access_token=abc&n=1", "https://host/cb#access_token=***&n=1"),
        ("https://host/?x-auth=abc", "https://host/?x-auth=***"),
        (
            "next=https%3A%2F%2Fuser%3Apa55%40host%2F%3Fapi_key%3Dabc%26n%3D1",
            "next=https%3A%2F%2F***%40host%2F%3Fapi_key%3D***%26n%3D1",
        ),
    ],
)
def test_credentials_in_addresses_and_headers_are_masked(text: str, masked: str) -> None:
    assert PLAIN.text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "revision 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
        "Qwen/Qwen3-4B-Instruct-2507",
        "https://host:8000/v1",
        "http://host:8000/a@b and http://[::1]:8000/a@b",
        'judge_api_key_env = "OPENAI_API_KEY", eos_token = "</s>"',
        "max_tokens = 1024, key = value",
        "task-sk-1 and a risk-averse policy",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert PLAIN.text(text) == text


def test_a_secret_inside_a_longer_one_leaves_nothing_behind() -> None:
    assert Redactor({"A_TOKEN": "abcdef", "B_TOKEN": "abcdef-ghijkl"}).text("abcdef-ghijkl") == MASK


@given(
    st.recursive(
        st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_no_string_of_a_structure_keeps_the_secret(value: object) -> None:
    redactor = Redactor({"A_KEY": "sesame-open"})
    assert "sesame-open" not in str(
        redactor.json({"deep": [value, {"sesame-open": "x sesame-open"}]})
    )


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "hf_token",
        "Authorization",
        "judge_password",
        "passphrase",
        "session-cookie",
        "aws_credentials",
        "clientSecret",
    ],
)
def test_a_string_under_a_key_named_like_a_secret_is_masked_wherever_it_stands(name: str) -> None:
    assert PLAIN.json({"params": [{name: "abc", "deeper": {name: ["x", "y"]}}]}) == {
        "params": [{name: MASK, "deeper": {name: [MASK, MASK]}}]
    }
    assert (
        PLAIN.arguments(["--reward-params", f"{name}=abc=", f"--reward-params={name}=abc"])[-1]
        == f"--reward-params={name}={MASK}"
    )


def test_a_key_that_only_looks_like_a_secrets_keeps_its_value() -> None:
    plain = {"max_tokens": 8, "api_key": 8, "judge_api_key_env": "OPENAI_API_KEY"}
    plain |= {"eos_token": "<eos>", "answer_key": "gold", "tokenizer": "fast"}
    plain |= {"keyword": "maybe", "author": "Ada"}
    assert PLAIN.json(plain) == plain


@pytest.mark.parametrize(
    "write", [str, repr, json.dumps, quote, lambda value: toml_value({"a": value})]
)
def test_a_secret_is_masked_with_every_escape(write: Callable[[str], str]) -> None:
    secret = 'p"w\\n ü/+'
    text = Redactor({"A_KEY": secret}).text(f"it is {write(secret)}!")
    assert MASK in text and "p" not in text.replace("it is", "") and "w" not in text


def test_a_masked_configuration_loads_and_hides_every_secret() -> None:
    secret = 'quoted"\\secret'
    config = config_from_mapping(
        {
            "reward": {
                "type": "custom",
                "custom_module": "mine",
                "params": {"api_key": "abcdef", "note": secret, "max_tokens": 3},
            },
            "data": {"system_prompt": f"say {secret}"},
            "environment": {"args": {"auth": {"token": "tiny"}}},
        }
    )
    text = dump_toml(Redactor({"A_KEY": secret}).config(config))
    stored = config_from_toml(text)
    assert stored.reward.params == {"api_key": MASK, "note": MASK, "max_tokens": 3}
    assert stored.data.system_prompt == f"say {MASK}"
    assert "tiny" not in text and "quoted" not in text


@pytest.mark.parametrize("word", ["random", "sampler", "token_mean", "constant", "training"])
def test_a_secret_that_is_a_word_of_the_configuration_leaves_it_loadable(word: str) -> None:
    loss = {"old_logprobs": "sampler", "aggregation": "token_mean"}
    config = config_from_mapping({"reward": {"type": "random"}, "loss": loss})
    masked = dump_toml(Redactor({"A_TOKEN": word}).config(config))
    assert config_from_toml(masked).reward.type == "random"
