"""Calls of tools in a reply, in the form that Qwen and Hermes models are trained to write: <tool_call>{"name": ..., "arguments": ...}."""

import json
import re
from dataclasses import dataclass

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""


def tool_calls(reply: str) -> list[ToolCall]:
    """Return the calls in the order of the reply; anything but a JSON object with a name is left out and stays text."""
    found = []
    for text in _CALL.findall(reply):
        try:
            call = json.loads(text)
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            found.append(ToolCall(call["name"], json.dumps(call.get("arguments", {}))))
    return found
