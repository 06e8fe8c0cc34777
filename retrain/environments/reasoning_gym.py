"""`provider = "reasoning_gym"`: its procedural tasks. Each is a data set with a verifier
that scores one reply.
"""

from typing import TYPE_CHECKING, Any

import regex

from retrain.config.names import nearest
from retrain.environments.base import Environment, Episode, Result, Split
from retrain.errors import ConfigurationError
from retrain.types import ChatMessage, Example

if TYPE_CHECKING:
    from retrain.config.schema import Environment as Settings

_INSTRUCTION = "Give the final answer inside <answer> and </answer>."
_ANSWER = r"(?s)<answer>(.*?)</answer>"
_SEARCH_S = 10.0
"""Maximum seconds for the answer in a reply: a pattern such as `(a+)+$` takes years for some."""
_TRAIN, _EVALUATION = 512, 64
"""Problems of a split unless `size` and `evaluation_size` say otherwise."""
_EVALUATION_SEEDS = 1_000_000
"""Distance of the evaluation seed. Problem i of a data set comes from its seed plus i, so near
seeds would share problems.
"""


def load(settings: "Settings") -> Environment:
    """Build the data sets of one task; see `ReasoningGym`."""
    return ReasoningGym(settings.id, settings.args)


class ReasoningGym(Environment):
    """Problems made from a seed; the evaluation set has another seed."""

    max_turns = 1

    def __init__(self, task: str, args: dict[str, Any]) -> None:
        """`args`: size, evaluation_size, seed, instruction, answer, and the parameters of the task
        itself. `answer` is a regular expression, and the task scores the first group of its last
        match.
        """
        import reasoning_gym

        given = dict(args)
        size, evaluation_size, seed = (
            int(given.pop(*pair))
            for pair in (("size", _TRAIN), ("evaluation_size", _EVALUATION), ("seed", 0))
        )
        self._instruction = str(given.pop("instruction", _INSTRUCTION))
        pattern = str(given.pop("answer", _ANSWER))
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ConfigurationError(
                f"[environment] args.answer = {pattern!r} is not a regular expression: {error}."
            ) from error
        if self._pattern.groups != 1:
            raise ConfigurationError(
                f"[environment] args.answer = {pattern!r} has {self._pattern.groups} groups; it "
                "needs one, the answer."
            )
        known = reasoning_gym.factory.DATASETS
        if task not in known:
            near = nearest(task, known)
            hint = f"it has {len(known)}, such as {', '.join(sorted(known)[:5])}."
            if near:
                hint = f'did you mean "{near}"?'
            raise ConfigurationError(
                f'[environment] id = "{task}" is not a task of reasoning_gym; {hint}'
            )
        try:
            self._sets = {
                "train": reasoning_gym.create_dataset(task, size=size, seed=seed, **given),
                "evaluation": reasoning_gym.create_dataset(
                    task, size=evaluation_size, seed=seed + _EVALUATION_SEEDS, **given
                ),
            }
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f'[environment] id = "{task}" of reasoning_gym refuses args {args}: {error}.'
            ) from error
        self._task = task

    def examples(self, split: Split) -> list[Example]:
        rows = self._sets[split]
        return [self._example(rows[index], split, index) for index in range(len(rows))]

    def _example(self, row: dict[str, Any], split: Split, index: int) -> Example:
        prompt = "\n\n".join(filter(None, (str(row["question"]), self._instruction)))
        info = {"split": split, "row": index}
        return Example(
            [ChatMessage(role="user", content=prompt)],
            str(row["answer"]),
            self._task,
            info,
            f"{self._task}-{split}-{index}",
        )

    def episode(self) -> Episode:
        return _OneAnswer(self._sets, self._pattern)

    def reference_replies(self, example: Example) -> list[str] | None:
        """Return the right reply; None for the tasks whose example has no single answer."""
        if example.reference in ("", "None"):
            return None
        for reply in (f"<answer>{example.reference}</answer>", example.reference):
            if self._pattern.findall(reply)[-1:] == [example.reference]:
                return [reply]
        return None


class _OneAnswer(Episode):
    def __init__(self, sets: dict[str, Any], pattern: Any) -> None:
        self._sets, self._pattern = sets, pattern

    def reset(self, example: Example, seed: int) -> None:
        assert example.info is not None
        self._set = self._sets[example.info["split"]]
        self._row = self._set[example.info["row"]]

    def step(self, reply: str) -> None:
        try:
            # `re` would hold the interpreter meanwhile, and no thread could stop the run.
            found = self._pattern.findall(reply, timeout=_SEARCH_S, concurrent=True)
        except TimeoutError:
            raise TimeoutError(
                f"args.answer = {self._pattern.pattern!r} searched longer than {_SEARCH_S:g} s"
            ) from None
        self._answer = None
        if found:
            self._answer = str(found[-1]).strip()

    def result(self) -> Result:
        reward = float(self._set.score_answer(answer=self._answer, entry=self._row))
        return Result(reward, {"answered": float(self._answer is not None)})
