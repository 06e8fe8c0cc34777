"""Problems with reference answers: their sources, their order, and their prompts."""

from retrain.data.load import NoHeldOutSplit, contamination_note, load_examples
from retrain.data.prompts import PromptSet, encode_prompts
from retrain.data.sources import ReadResult, register_source
from retrain.types import ChatMessage, Example, Prompt

__all__ = [
    "ChatMessage",
    "Example",
    "NoHeldOutSplit",
    "Prompt",
    "PromptSet",
    "ReadResult",
    "contamination_note",
    "encode_prompts",
    "load_examples",
    "register_source",
]
