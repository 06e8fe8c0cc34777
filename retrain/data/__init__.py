"""Problems with reference answers: their sources, their order, and their prompts. Names that need a
tokenizer load on first use, because a configuration asks only for the names of the sources.
"""

from typing import TYPE_CHECKING

from retrain.data.sources import NoHeldOutSplit, ReadResult, register_source
from retrain.system import lazy
from retrain.types import ChatMessage, Example, Prompt

if TYPE_CHECKING:
    from retrain.data.prompts import PromptSet, contamination_note, encode_prompts, load_examples
    from retrain.data.samplers import PromptSampler

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

__getattr__ = lazy(__name__, dict.fromkeys(__all__, "prompts") | {"PromptSampler": "samplers"})
