"""`provider = "textarena"`: its games for one player, a game for each seed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrain.environments.base import Environment, Episode, Result, Split
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.plugins import describe
from retrain.types import ChatMessage, Example

if TYPE_CHECKING:
    from retrain.config.schema import Environment as Settings

_TRAIN, _EVALUATION = 256, 32
_EVALUATION_SEEDS = 1_000_000
"""Seeds of games from here on are held out."""
_PLAYER = 0
_GAME = "[GAME]"
"""Stands in front of what the game says."""


def load(settings: "Settings") -> Environment:
    """Build the games of one name; see `TextArena`."""
    return TextArena(settings.id, settings.args)


class TextArena(Environment):
    """The seed of the game is part of the problem, so that a group plays the same game."""

    def __init__(self, game: str, args: dict[str, Any]) -> None:
        """`args`: size, evaluation_size, and the parameters of the game itself. The game is started
        once, so that a game that needs a download, a second player or a missing file is refused
        here.
        """
        import textarena

        given = dict(args)
        self._sizes = {
            "train": int(given.pop("size", _TRAIN)),
            "evaluation": int(given.pop("evaluation_size", _EVALUATION)),
        }
        self._make: Callable[[], Any] = lambda: textarena.make(game, **given)
        self._game = game
        try:
            self._opening(0)
        except LookupError as error:
            raise EnvironmentFailure(
                f'[environment] id = "{game}" of textarena needs word lists of nltk that are not'
                f" here: {describe(error)}; download them where there is a network, or choose"
                " another game."
            ) from error
        # Games raise what they like; LookupError alone has a cause of its own.
        except Exception as error:
            raise ConfigurationError(
                f'[environment] id = "{game}" of textarena cannot be started for one player with'
                f" args {given}: {describe(error)}."
            ) from error

    def _opening(self, seed: int) -> str:
        game = self._make()
        game.reset(num_players=1, seed=seed)
        return str(game.get_observation()[1])

    def examples(self, split: Split) -> list[Example]:
        first = _EVALUATION_SEEDS if split == "evaluation" else 0
        return [self._example(first + index, split, index) for index in range(self._sizes[split])]

    def _example(self, seed: int, split: Split, index: int) -> Example:
        messages = [ChatMessage(role="user", content=self._opening(seed))]
        return Example(messages, "", self._game, {"seed": seed}, f"{self._game}-{split}-{index}")

    def episode(self) -> Episode:
        return _Game(self._make())


class _Game(Episode):
    def __init__(self, game: Any) -> None:
        self._game = game
        self._turns = 0
        self._done = False
        self._seen = ""
        """The game repeats its whole history in every observation."""

    def reset(self, example: Example, seed: int) -> list[ChatMessage]:
        assert example.info is not None
        self._game.reset(num_players=1, seed=example.info["seed"])
        self._seen = str(self._game.get_observation()[1])
        return [ChatMessage(role="user", content=self._seen)]

    def step(self, reply: str) -> list[ChatMessage] | None:
        self._turns += 1
        self._done, _ = self._game.step(action=reply)
        if self._done:
            return None
        whole = str(self._game.get_observation()[1])
        new, self._seen = whole.removeprefix(self._seen), whole
        _, mark, said = new.partition(_GAME)  # before it the reply is repeated
        return [ChatMessage(role="user", content=(mark + said if mark else new).strip())]

    def result(self) -> Result:
        """A game that is cut off before its end has a reward of 0."""
        if not self._done:
            return Result(0.0, {"turns": self._turns, "finished": 0.0})
        rewards, _ = self._game.close()
        return Result(float(rewards[_PLAYER]), {"turns": self._turns, "finished": 1.0})
