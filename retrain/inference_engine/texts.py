"""Prompts as text, for servers that take no token ids: sent only where the text encodes to exactly
the ids of the prompt.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config.schema import Model


class Texts:
    """Between token ids and the text that a server of the same model makes them of."""

    def __init__(self, model: "Model", title: str) -> None:
        """`title` names the server in a sentence. The first use loads the tokenizer."""
        self._model, self._title = model, title
        # Every completion of a group asks for its prompt's.
        self.of = lru_cache(maxsize=4096)(self._of)
        """[P] ids to the text that the server's tokenizer turns into exactly these; it puts a BOS
        in front where the model wants one.

        Raises ConfigurationError where there is none.
        """

    @cached_property
    def _tokenizer(self) -> Any:
        from retrain.model.text import load_tokenizer

        return load_tokenizer(
            self._model.model, self._model.revision, self._model.trust_remote_code
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, with the special tokens."""
        from retrain.model.vocabulary import decode

        return decode(self._tokenizer, list(ids))

    def encode(self, text: str) -> list[int]:
        """Encode a text, without a BOS."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _of(self, ids: tuple[int, ...]) -> str:
        for text in (self.decode(ids), self.decode(ids[1:])):
            if self._tokenizer.encode(text) == list(ids):
                return text
        raise ConfigurationError(
            f"{self._title} takes prompts as text, and the prompt {self.decode(ids)[:60]!r}"
            f" ({len(ids)} tokens) encodes to other token ids, so the model would see another"
            ' prompt. Use [inference] engine = "pytorch" or "vllm".'
        )
