"""Token ids as the text of each token, for reading."""

from typing import TYPE_CHECKING

from retrain.model.text import load_tokenizer
from retrain.model.vocabulary import TokenIds, VocabularyTable

if TYPE_CHECKING:
    from retrain.config.schema import Model


class Pieces:
    """The vocabulary of a run's model. Raises EnvironmentFailure where its tokenizer cannot be had."""

    def __init__(self, model: "Model") -> None:
        self._tokenizer = load_tokenizer(model.model, model.revision)  # whoever looks at a run trusts no code that it names
        self.vocabulary = VocabularyTable(self._tokenizer)

    def of(self, token_ids: TokenIds) -> list[str]:
        """[T] one string a token. A special token, which adds nothing to a text, is its name; an unfinished code point is ""."""
        pieces = self.vocabulary.pieces(token_ids)
        return [piece or self._name(int(token)) for piece, token in zip(pieces, token_ids, strict=True)]

    def _name(self, token: int) -> str:
        if self.vocabulary.token_bytes(token):
            return ""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return str(name) if name else f"<{token}>"
