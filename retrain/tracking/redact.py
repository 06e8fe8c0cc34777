"""Secrets never leave the process: what is printed, written or sent passes through here.

Three things are masked: the values of environment variables named like a secret, tokens of known shapes, and credentials in URLs.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_HARMLESS_NAME = re.compile(r"TOKENIZERS_|_(?:PATH|FILE|DIR)$", re.IGNORECASE)
_MIN_LENGTH = 6
"""A shorter value stands in ordinary text by chance: masking "1" would eat every number."""

_SHAPES = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{16,}                                         # Hugging Face
  | \b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}                             # OpenAI and those that copied it
  | \btml-[A-Za-z0-9_-]{16,}                                      # Tinker
  | \bwandb_v\d_[A-Za-z0-9_]{16,}                                 # Weights & Biases, new form
  | (?<=api_key=)[0-9a-f]{40}\b | (?<=wandb_api_key:\s)[0-9a-f]{40}\b   # old form; bare, it looks like a git revision
  | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,} # GitHub
  | \bglpat-[A-Za-z0-9_-]{16,}                                    # GitLab
  | \bAKIA[0-9A-Z]{16}\b                                          # AWS
  | \bAIza[A-Za-z0-9_-]{30,}                                      # Google
  | \bxox[abprs]-[A-Za-z0-9-]{10,}                                # Slack
  | (?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+   # JSON web token
  | (?<=\bBearer\s)[A-Za-z0-9._~+/-]{8,}=*
    """,
    re.VERBOSE,
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_URL_PARAMETER = re.compile(r"(?<=[?&])((?:api_?key|key|token|access_token|secret|password)=)[^&\s'\"#]+", re.IGNORECASE)


class Redactor:
    """Masks by the environment as it was when this was made: make it after `.env` is loaded."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        values = {value for name, value in (os.environ if environment is None else environment).items() if _is_secret(name, value)}
        ordered = sorted(values, key=len, reverse=True)  # a secret that contains another goes first
        self._values = re.compile("|".join(re.escape(value) for value in ordered)) if ordered else None

    def text(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(MASK, text)
        text = _SHAPES.sub(MASK, text)
        text = _URL_CREDENTIALS.sub(f"{MASK}@", text)
        return _URL_PARAMETER.sub(rf"\g<1>{MASK}", text)

    def json(self, value: Any) -> Any:
        """The same value with every string in it masked, keys included."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {self.text(key): self.json(item) for key, item in value.items()}
            case list() | tuple():
                return [self.json(item) for item in value]
        return value


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name) and len(value) >= _MIN_LENGTH
