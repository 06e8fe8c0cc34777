"""The trajectories that a run recorded, as tokens and as conversations."""

import re
from pathlib import Path

import numpy as np

from retrain.model.text import TextModel
from retrain.records.token_table import TokenTable, read_tokens
from retrain.types import Int32Array


def sequences(table: TokenTable) -> list[list[tuple[Int32Array, Int32Array]]]:
    """For every trajectory the (context, actions) of its turns, the prompt in front of the
    first.
    """
    assert table.prompt_offsets is not None and table.prompt_token_ids is not None
    turns, slots = table.turns, list(dict.fromkeys(table.slot.tolist()))
    found = []
    for number, slot in enumerate(table.slot.tolist()):
        place, start, pairs = slots.index(slot), int(table.offsets[number]), []
        prompt = table.prompt_token_ids[
            table.prompt_offsets[place] : table.prompt_offsets[place + 1]
        ]
        if turns is None:  # every trajectory is one reply
            found.append([(prompt, table.token_ids[start : table.offsets[number + 1]])])
            continue
        for turn in range(turns.offsets[number], turns.offsets[number + 1]):
            context = turns.context_token_ids[
                turns.context_offsets[turn] : turns.context_offsets[turn + 1]
            ]
            if turn == turns.offsets[number]:
                context = np.concatenate([prompt, context])
            stop = start + int(turns.actions[turn])
            pairs.append((context, table.token_ids[start:stop]))
            start = stop
        found.append(pairs)
    return found


def conversation(
    text: TextModel, pairs: list[tuple[Int32Array, Int32Array]]
) -> list[dict[str, str]]:
    """The messages of a trajectory, read from its tokens."""
    messages = []
    for context, actions in pairs:
        said = re.findall(
            r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text.decode(context), re.DOTALL
        )
        messages += [{"role": role, "content": content} for role, content in said]
        messages.append(
            {"role": "assistant", "content": text.decode(actions).removesuffix("<|im_end|>")}
        )
    return messages


def replies_of_rendered(text: TextModel, file: Path) -> list[int]:
    """The number of replies of every trajectory in a token table; each must have the ids that the
    chat template renders.

    The lab's tokenizer has a token per byte, so the rendered text of a conversation has the ids of
    the trajectory.
    """
    replies = []
    for pairs in sequences(read_tokens(file)):
        ids = np.concatenate([piece for pair in pairs for piece in pair])
        rendered = text.tokenizer.apply_chat_template(conversation(text, pairs), tokenize=False)
        spoken = text.decode(ids)
        assert rendered.startswith(spoken) and rendered.removeprefix(spoken) in (
            "",
            "\n",
            "<|im_end|>\n",
        )
        replies.append(len(pairs))
    return replies
