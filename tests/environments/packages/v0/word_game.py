"""Multi-turn with a parser: a Wordle-style game with its own short word list. G: right place, Y:
elsewhere in the word, X: not in it.
"""

import verifiers as vf
from datasets import Dataset

WORDS = ("crane", "slate", "pride", "money", "house", "light", "storm", "bread", "plant", "chair")


def feedback(guess: str, word: str) -> str:
    left = [letter for letter, other in zip(word, guess, strict=False) if letter != other]
    marks = []
    for letter, other in zip(guess, word, strict=False):
        if letter == other:
            marks.append("G")
        elif letter in left:
            left.remove(letter)
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


class WordGame(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = []
        return state

    async def env_response(self, messages, state, **_):
        guess = (self.parser.parse_answer(messages[-1:]) or "").strip().lower()
        state["guesses"].append(guess)
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "GGGGG"}]
            return state["final_env_response"]
        return [
            {
                "role": "user",
                "content": (
                    feedback(guess, state["answer"])
                    if len(guess) == 5
                    else "Give a word of five letters."
                ),
            }
        ]


def load_environment(max_turns: int = 6) -> vf.Environment:
    parser = vf.XMLParser(["guess"], answer_field="guess")
    system = "Guess the word of five letters. Answer with <guess>word</guess>."

    def solved(parser, completion, answer, **_) -> float:
        return float((parser.parse_answer(completion) or "").strip().lower() == answer)

    def speed(state, **_) -> float:
        return 1.0 / max(1, len(state["trajectory"]))

    rubric = vf.Rubric(funcs=[solved, speed], weights=[1.0, 0.2], parser=parser)
    rows = Dataset.from_list([{"question": "Begin.", "answer": word} for word in WORDS])
    return WordGame(
        dataset=rows, system_prompt=system, parser=parser, rubric=rubric, max_turns=max_turns
    )
