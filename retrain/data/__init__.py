"""Problems with reference answers: their sources, their order, and their prompts."""

from retrain.data.prompts import PromptSet, contamination_note, encode_prompts, load_examples
from retrain.data.samplers import PromptSampler
from retrain.data.sources import NoHeldOutSplit, ReadResult, register_source
from retrain.types import ChatMessage, Example, Prompt

__all__ = [
    "ChatMessage",
    "Example",
    "NoHeldOutSplit",
    "Prompt",
    "PromptSampler",
    "PromptSet",
    "ReadResult",
    "contamination_note",
    "encode_prompts",
    "load_examples",
    "register_source",
]
