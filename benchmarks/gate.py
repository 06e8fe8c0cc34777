"""How often the parity gate stops sound and faulty engines: `python benchmarks/gate.py` prints a
table and writes it to results/.

The engines are those of tests/faulty_engines.py, on the lab model, in float32 and with the
sampler's weights in bf16. With `--sound N` the sound engine alone passes N gates in mixed precision
(bf16 sampler, fp32 learner), and each seed's answer is kept in `--state`, so that a run can be
continued, or shared out by `--first`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from report import add_output, load_average, publish, table
from scipy import stats

from retrain.config import TrainConfig
from retrain.errors import RunFailed
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.run.parts import RunParts, load_parts, run_parity_gate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import faulty_engines
from runs import small

ENGINES = (
    "Served", "IgnoresTheAdapter", "HalvesTheScale", "DropsAProjection", "DropsAModule",
    "SwapsQAndK",
    "KeepsTheTrialAdapter", "KeepsOldKeysAndValues",
    "Hotter", "RawLogprobs", "TopPOfItsOwn", "PenaltyOfItsOwn",
    "StripsEOS", "CertainEOS", "OneSeed", "HidesTopP", "HidesPenalty",
)  # fmt: skip
PASSED = ("Served", "HidesTopP", "HidesPenalty")
"""The first is sound. The others draw from another distribution and report the policy's log-probs,
which are all that the gate compares."""
OPTIONS = {"auto": EngineOptions(), "bf16": EngineOptions(weights=torch.bfloat16)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2, help="[training] max_tokens")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--dtypes", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument(
        "--sound",
        type=int,
        default=0,
        help="count stops of so many sound gates in mixed precision instead",
    )
    parser.add_argument("--first", type=int, default=0, help="their first seed")
    parser.add_argument(
        "--state", type=Path, default=Path("gate-sound.jsonl"), help="where their answers are kept"
    )
    add_output(parser)
    given = parser.parse_args()
    load = load_average()
    if given.sound:
        sound_gates(given, load)
        return
    parts = load_parts(
        configuration(0, given.tokens, given.temperature, "auto"), None, log=lambda _: None
    )
    rows = []
    for name in given.engines:
        stopped = []
        for dtype in given.dtypes:
            settings = [
                configuration(seed, given.tokens, given.temperature, dtype)
                for seed in range(given.seeds)
            ]
            stopped.append(sum(bool(stopped_by(parts, name, config)) for config in settings))
        expected = 0 if name in PASSED else given.seeds
        rows.append([name, *(f"{count} of {given.seeds}" for count in [expected, *stopped])])
        print(rows[-1], flush=True)
    what = (
        f"Runs stopped, of {given.seeds} seeds, temperature {given.temperature}, max_tokens ="
        f" {given.tokens}; only Served is sound. TopPOfItsOwn and PenaltyOfItsOwn draw with a top_p of"
        " 0.8 and a repetition penalty of 1.1 of their own, and report log-probs of what they draw"
        " from. HidesTopP and HidesPenalty draw so too, and report the policy's log-probs, which is"
        " all that the gate compares: it passes them."
    )
    publish(
        "gate",
        "The parity gate and faulty engines",
        [what, table(["engine", "expected", *given.dtypes], rows)],
        load,
        given.output,
    )
    parts.close()


def sound_gates(given: argparse.Namespace, load: float) -> None:
    parts = load_parts(
        configuration(0, given.tokens, given.temperature, "bf16"), None, log=lambda _: None
    )
    done = {answer["seed"] for answer in kept_answers(given.state)}
    for seed in range(given.first, given.first + given.sound):
        if seed in done:
            continue
        told = stopped_by(
            parts, "InProcess", configuration(seed, given.tokens, given.temperature, "bf16")
        )
        with given.state.open("a", encoding="utf-8") as answers:
            answers.write(
                json.dumps(
                    {
                        "seed": seed,
                        "temperature": given.temperature,
                        "tokens": given.tokens,
                        "stopped": told,
                    }
                )
                + "\n"
            )
    answers = kept_answers(given.state)
    stops = [answer for answer in answers if answer["stopped"]]
    low, high = stats.binomtest(len(stops), len(answers)).proportion_ci(method="wilson")
    what = (
        f"{len(stops)} of {len(answers)} sound gates stopped, temperature {given.temperature},"
        f" max_tokens = {given.tokens}, bf16 sampler over an fp32 learner; Wilson interval (95%)"
        f" {100 * low:.2f}% to {100 * high:.2f}%."
    )
    named = [f"Seed {answer['seed']}: {answer['stopped']}" for answer in stops]
    publish("gate-sound", "Sound engines at the parity gate", [what, *named], load, given.output)
    parts.close()


def kept_answers(state: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in state.read_text(encoding="utf-8").splitlines()]
        if state.exists()
        else []
    )


def configuration(seed: int, tokens: int, temperature: float, dtype: str) -> TrainConfig:
    training = {"temperature": temperature, "seed": seed, "max_tokens": tokens}
    return small(Path("nowhere"), training=training, inference={"dtype": dtype})


def stopped_by(parts: RunParts, name: str, config: TrainConfig) -> str:
    """Return the sentence with which the gate stops the engine; "" if it passes."""
    backend: Any = parts.backend
    own, options = backend.engine, OPTIONS[config.inference.dtype]
    make = getattr(faulty_engines, name)
    model, eos_ids = backend._weights.peft_model, parts.text.eos_ids
    if issubclass(make, TorchEngine):
        engine = make.__new__(make)
        TorchEngine.__init__(engine, model, eos_ids, "cpu", options=options)
    else:
        engine = type(name, (make,), {"options": options})(
            config, model=model, eos_ids=eos_ids, device="cpu"
        )
    backend.engine = engine
    try:
        run_parity_gate(config, parts, 0)
    except RunFailed as error:
        return str(error)
    finally:
        backend.engine = own
    return ""


if __name__ == "__main__":
    main()
