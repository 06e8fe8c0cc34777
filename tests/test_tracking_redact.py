"""Secrets are masked, and ordinary text is left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.tracking.redact import MASK, Redactor

PLAIN = Redactor({})


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "db_password", "TINKER_API_KEY", "AWS_SECRET_ACCESS_KEY"])
def test_values_of_secret_variables_are_masked(name: str) -> None:
    assert Redactor({name: "wonderful-value"}).text("it is wonderful-value!") == f"it is {MASK}!"


@pytest.mark.parametrize(
    ("name", "value"), [("TOKENIZERS_PARALLELISM", "false-ish"), ("SSH_KEY_PATH", "/home/me/.ssh"), ("HOME", "/root/me"), ("A_KEY", "1")]
)
def test_values_that_are_no_secret_stay(name: str, value: str) -> None:
    assert Redactor({name: value}).text(f"x {value} 1") == f"x {value} 1"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-proj-abcdefghijklmnop",
        "wandb_v1_abcdefghijklmnopqrst",
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
    ],
)
def test_credentials_in_urls_and_headers_are_masked(text: str, masked: str) -> None:
    assert PLAIN.text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "revision 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
        "Qwen/Qwen3-4B-Instruct-2507",
        "https://host:8000/v1",
        "max_tokens = 1024, key = value",
        "task-sk-1 and a risk-averse policy",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert PLAIN.text(text) == text


def test_a_secret_inside_a_longer_one_leaves_nothing_behind() -> None:
    assert Redactor({"A_TOKEN": "abcdef", "B_TOKEN": "abcdef-ghijkl"}).text("abcdef-ghijkl") == MASK


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
def test_no_string_of_a_structure_keeps_the_secret(value: object) -> None:
    redactor = Redactor({"A_KEY": "sesame-open"})
    assert "sesame-open" not in str(redactor.json({"deep": [value, {"sesame-open": "x sesame-open"}]}))
