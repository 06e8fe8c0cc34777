"""Problems with reference answers: where they come from, in which order, and as the model sees them."""

from retrain.data.load import LoadedExamples, NoHeldOutSplit, contamination_note, load_examples
from retrain.data.prompts import PromptSet, encode_prompts
from retrain.data.sources import register_source
from retrain.types import ChatMessage, Example, Prompt

__all__ = [
    "ChatMessage",
    "Example",
    "LoadedExamples",
    "NoHeldOutSplit",
    "Prompt",
    "PromptSet",
    "contamination_note",
    "encode_prompts",
    "load_examples",
    "register_source",
]
