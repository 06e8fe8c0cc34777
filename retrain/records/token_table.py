"""Store tokens/step_N.safetensors: every sampled token of one step with its figures, for `retrain
inspect`.

Flat arrays over the step's completions; completion i owns the half-open range offsets[i] ..
offsets[i + 1].
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrain.errors import RunFailed, first_line
from retrain.records.disk import open_to_readers, replacing_file, safetensors_io
from retrain.system import Json
from retrain.types import Float32Array, Float64Array, Int32Array

_Int64 = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.uint8]
_STAGE = "advantages."
_TURNS = "turns."


@dataclass(frozen=True)
class TurnTable:
    """The m turns of the step's N trajectories, with the environment's tokens."""

    offsets: _Int64
    """[N + 1] trajectory i owns the turns offsets[i] .. offsets[i + 1]."""
    actions: Int32Array
    """[m] sampled tokens of each turn."""
    restarts: _Flags
    """[m] 1 if a rewrite of the history makes the whole prompt the turn's context."""
    context_offsets: _Int64
    """[m + 1] turn j read the tokens context_offsets[j] .. context_offsets[j + 1] before its
    reply.
    """
    context_token_ids: Int32Array


@dataclass(frozen=True)
class TokenTable:
    """N completions with n tokens in all."""

    offsets: _Int64
    """[N + 1], from 0 to n."""
    slot: Int32Array
    """[N] the prompt's place in the step."""
    sample: Int32Array
    """[N] sample index within the group."""
    token_ids: Int32Array
    """[n] sampled tokens."""
    logprobs: Float32Array
    """[n] log-probs as sampled, in nats."""
    entropies: Float32Array | None
    """[n] Shannon entropy in nats; None if the engine has none."""
    mask: _Flags | None
    """[n] 1 inside a planning phrase; None if the condition does not look for them."""
    advantages: Mapping[str, Float32Array]
    """Stage -> [n] token advantages after it, in the order of the stages."""
    rewards: Float64Array | None = None
    """[N] rewards; None, like all fields below, in files of versions without it."""
    truncated: _Flags | None = None
    """[N] 1 if a completion ended by length."""
    log_ratios: Float32Array | None = None
    """[n] learner - sampler log-prob before the step; NaN if the step did not train on the
    token.
    """
    prompt_offsets: _Int64 | None = None
    """[P + 1] offsets of the prompts, ordered by slot."""
    prompt_token_ids: Int32Array | None = None
    """[p] the prompts' tokens, each prompt once."""
    kept: Int32Array | None = None
    """[n] size of the truncated distribution of each token; None without truncation."""
    turns: TurnTable | None = None
    """The turns; None if every trajectory is one reply to its prompt."""


_TURN_FIELDS = tuple(item.name for item in fields(TurnTable))
_FIELDS = [item.name for item in fields(TokenTable) if item.name not in ("advantages", "turns")]


def write_tokens(path: Path, table: TokenTable, step: int) -> None:
    """Write one step's table, atomically."""
    from safetensors.numpy import save_file

    arrays = {name: getattr(table, name) for name in _FIELDS}
    if table.turns is not None:
        arrays |= {f"{_TURNS}{name}": getattr(table.turns, name) for name in _TURN_FIELDS}
    arrays |= {f"{_STAGE}{stage}": values for stage, values in table.advantages.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors keeps no order of its arrays, so the metadata lists the stages. They share one
    # entry, since safetensors orders entries at random.
    with safetensors_io(), replacing_file(path) as aside:
        save_file(
            {
                name: np.ascontiguousarray(values)
                for name, values in arrays.items()
                if values is not None
            },
            aside,
            metadata={"retrain": json.dumps({"step": step, "stages": list(table.advantages)})},
        )
        open_to_readers(aside)


def damage_of(path: Path) -> str:
    """Return the damage of a file of tokens, as a clause; "" if its header fits its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            json.loads((file.metadata() or {})["retrain"])["stages"]
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        return f"{path} is damaged ({type(error).__name__}: {first_line(error)})"
    return ""


def read_tokens(path: Path) -> TokenTable:
    """Read a file of tokens. Raises RunFailed, one sentence, for a damaged file."""
    from safetensors import safe_open

    if damage := damage_of(path):
        raise RunFailed(f"{damage}; put back a copy of it, or look at another step.")
    with safe_open(path, framework="numpy") as file:
        stages: list[str] = json.loads((file.metadata() or {})["retrain"])["stages"]
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a dict
    turns = None
    if f"{_TURNS}offsets" in arrays:
        turns = TurnTable(**{name: arrays[f"{_TURNS}{name}"] for name in _TURN_FIELDS})
    advantages = {stage: arrays[f"{_STAGE}{stage}"] for stage in stages}
    columns: Json = {name: arrays.get(name) for name in _FIELDS}
    return TokenTable(**columns, advantages=advantages, turns=turns)
