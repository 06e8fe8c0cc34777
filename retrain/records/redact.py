"""Mask secrets in everything that retrain prints, writes or sends.

It masks the values of environment variables and table keys with a secret's name, tokens of known
shapes, and credentials in URLs. It masks a configuration value by value, before the configuration
becomes text, so that the result still loads.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from retrain.errors import ConfigurationError
from retrain.records.terminal import clean

if TYPE_CHECKING:
    from retrain.config import TrainConfig

MASK = "***"
MAX_REASON = 300

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CRED|COOKIE", re.IGNORECASE)
_HARMLESS_NAME = re.compile(
    r"TOKENS|TOKENI[ZS]|(?:EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|END|START)_TOKEN|(?:ANSWER|PROMPT|QUESTION|LABEL|TEXT|SORT)_KEY"
    r"|KEYWORD|KEYBOARD|KEYMAP|MONKEY|PASSAGE|COMPASS|BYPASS|PASS@|AUTHOR(?!I)|.*_(?:PATH|FILE|DIR|SOCK|ENV|COLUMN)$",
    re.IGNORECASE,
)
"""Parts of names that only look like a secret's name: max_tokens, or judge_api_key_env, which names
a variable.
"""
_MIN_LENGTH = 6
"""A shorter value occurs in ordinary text by chance: masking "1" would destroy every number."""
_MIN_NOTED_LENGTH = 8
"""Minimum length for the values of a configuration, which may be a word of the task, such as a
token that ends an answer.
"""

_SHAPES = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{16,}                                         # Hugging Face
  | \b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}                             # OpenAI, and others in its form
  | \btml-[A-Za-z0-9_-]{16,}                                      # Tinker
  | \bwandb_v\d_[A-Za-z0-9_]{16,}                                 # Weights & Biases, new form
  | (?<=api_key=)[0-9a-f]{40}\b | (?<=wandb_api_key:\s)[0-9a-f]{40}\b   # old form; bare, it looks like a git revision
  | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,} # GitHub
  | \bglpat-[A-Za-z0-9_-]{16,}                                    # GitLab
  | \b(?:gsk_|xai-|nvapi-|r8_|tgp_v1_)[A-Za-z0-9]{20,}            # Groq, xAI, NVIDIA, Replicate, Together
  | \bAKIA[0-9A-Z]{16}\b                                          # AWS
  | \bAIza[A-Za-z0-9_-]{30,}                                      # Google
  | \bxox[abprs]-[A-Za-z0-9-]{10,}                                # Slack
  | (?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+   # JSON web token
  | (?<=\bBearer\s)[A-Za-z0-9._~+/-]{8,}=*
  | (?<=\bBasic\s)[A-Za-z0-9+/]{8,}=*                             # user and password in base 64
    """,
    re.VERBOSE,
)
_MARKS = (
    "hf_", "sk-", "rk-", "pk-", "tml-", "wandb_", "api_key=", "ghp_", "gho_", "ghu_", "ghs_",
    "ghr_", "github_pat_", "glpat-", "AKIA", "AIza", "xox", "eyJ", "Bearer", "Basic",
    "gsk_", "xai-", "nvapi-", "r8_", "tgp_v1_",
)  # fmt: skip
"""Each token of a known shape contains a string of this list."""
_URL_CREDENTIALS = re.compile(
    r"""
    (?<=://)[^/\s'"]+@
  | (?<=://)[^/\s:'"\[]*:(?!\d+(?:[/?\#,;)\s]|$))[^\s'"]+@            # a password with a slash; not a port
  | (?<=url\ =\ ")(?!\w+://)[^\s'"]+@                                # a refused address without http://
  | (?<=%3A%2F%2F)(?:[^\s/@&'"%]|%(?!2F|40))+%40
    """,
    re.IGNORECASE | re.VERBOSE,
)
_URL_PARAMETER = re.compile(
    r"((?:[?&#;]|%3F|%26|%23)[\w.-]{0,40}?(?:key|token|secret|pass|auth|cred|cookie|sig)[\w.-]{0,40}(?:=|%3D))"
    r"(?:[^&;\s'\"#%]|%(?!26|23))+"
    r"|(\b\w*(?:api_?key|(?:auth|access)_token|secret|password)(?:_env\s?=\s?\"(?=\w*[^\w\"])|\s?=\s?\"))[^\"`\n]+",
    re.IGNORECASE,
)
"""A parameter of a URL, or a line of TOML with a secret where none belongs."""


_noted: set[str] = set()
"""Secrets of the configurations that this process has used; the environment has other secrets."""


def note_secrets(config: "TrainConfig") -> None:
    """Have every new Redactor mask the configuration's own secrets. These are strings under keys
    with a secret's name, such as `[reward] params = { api_key = "..." }`, and the variables that
    its `*_api_key_env` name.
    """
    from retrain.config.load import given_values

    rewards = (table.get("reward", {}) for table in config.data.mix)
    variables = [config.reward.judge_api_key_env, config.inference.api_key_env]
    variables += [reward.get("judge_api_key_env", "") for reward in rewards]
    values = [os.environ.get(name, "").strip() for name in variables]

    def note(text: str, name: str) -> str:
        values.extend([text] * is_secret_name(name))
        return text

    _each_text(given_values(config), note)
    note_values(values)


def note_values(values: Iterable[str]) -> None:
    """Have every Redactor made from now on mask these values."""
    _noted.update(value for value in values if len(value) >= _MIN_NOTED_LENGTH)


def _each_text(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """Return the value with `change` of all its strings, keys included, and of the key that each
    one stands under.
    """
    match value:
        case str():
            return change(value, name)
        case Mapping():
            return {
                change(key, ""): _each_text(
                    item, change, key if isinstance(item, str | list | tuple) else ""
                )
                for key, item in value.items()
            }
        case list() | tuple():
            return [_each_text(item, change, name) for item in value]
    return value


def secret_values(environment: Mapping[str, str] | None = None) -> set[str]:
    """Return the secrets of the environment, unmasked; by default the secrets of this process and
    the noted ones.
    """
    given, noted = (os.environ, _noted) if environment is None else (environment, set())
    return noted | {
        value for name, value in given.items() if is_secret_name(name) and len(value) >= _MIN_LENGTH
    }


def harmless(text: str) -> str:
    """Return text that is safe to print or store: without escape sequences and, after that, without
    secrets.
    """
    return Redactor().text(clean(text))


def reason_of(text: str) -> str:
    """Return `text`, the reason why a judgment failed, as one line that is safe to print or store,
    of at most MAX_REASON characters.

    It masks the text of a user's code or a server before it cuts the line, since half a secret has
    no known shape.
    """
    line = " ".join(harmless(text).split())
    if len(line) <= MAX_REASON:
        return line
    return line[: MAX_REASON - 3] + "..."


class Redactor:
    """Masks the noted secrets, and the secrets of the environment at construction, so construct it
    after loading `.env`.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        forms = set[str]()
        for value in secret_values(environment):
            # A secret may have the escapes of JSON, TOML, Python or a URL.
            escaped = (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value))
            forms.update(form[1:-1] for form in escaped)
            forms |= {value, quote(value), quote(value, safe=""), quote_plus(value)}
        ordered = sorted(forms, key=len, reverse=True)  # A secret that contains another goes first.
        self._values = re.compile("|".join(map(re.escape, ordered)))

    def text(self, text: str) -> str:
        if self._values.pattern:
            text = self._values.sub(MASK, text)
        # Most texts hold none of these, and a search for them costs a hundredth.
        if any(mark in text for mark in _MARKS):
            text = _SHAPES.sub(MASK, text)
        if "@" in text or "%40" in text:
            text = _URL_CREDENTIALS.sub(
                lambda match: MASK + ("@" if match.group().endswith("@") else "%40"), text
            )
        if "=" in text or "%3" in text:
            text = _URL_PARAMETER.sub(rf"\g<1>\g<2>{MASK}", text)
        return text

    def json(self, value: Any, name: str = "") -> Any:
        """Return the value with masks in all its strings, keys included; a string whose `name` is a
        secret's name becomes the mask.
        """
        return _each_text(
            value,
            lambda text, key: MASK if text and is_secret_name(key) else self.text(text),
            name,
        )

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """Mask a command line, in which a secret may follow its key: `--reward-params
        api_key=...`.
        """
        masked = []
        for argument in arguments:
            name, sign, value = argument.rpartition("=")
            masked.append(self.text(name) + sign + self.json(value, name))
        return masked

    def config(self, config: "TrainConfig") -> "TrainConfig":
        """Return the configuration with masked secrets, in a form that a file may hold.

        A value whose masked form the schema refuses, such as a word of a fixed set, is not a secret
        and stays.
        """
        from retrain.config.load import given_values, replaced
        from retrain.config.names import by_path

        for path, value in by_path(given_values(config)).items():
            masked = self.json(value, path)
            if masked != value:
                with suppress(ConfigurationError):
                    config = replaced(config, {path: masked}, config.origins[path])
        return config


def is_secret_name(name: str) -> bool:
    """True if the name of a variable, a table's key or a command line's key is a secret's name."""
    return bool(_SECRET_NAME.search(_HARMLESS_NAME.sub("", name)))
