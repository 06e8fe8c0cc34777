"""How often the parity gate stops sound and faulty engines: `python benchmarks/gate.py` prints a table and writes it to results/.

The engines are those of tests/faulty_engines.py, on the lab model, in float32 and with the sampler's weights in bf16.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from report import add_output, load_average, publish, table

from retrain.config import TrainConfig
from retrain.errors import RunFailed
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.run.parts import Parts, load_parts, run_parity_gate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import faulty_engines
from runs import small

ENGINES = (
    "Served", "IgnoresTheAdapter", "HalvesTheScale", "DropsAProjection", "SwapsQAndK", "KeepsTheTrialAdapter", "KeepsOldKeysAndValues",
)  # fmt: skip
OPTIONS = {"auto": EngineOptions(), "bf16": EngineOptions(weights=torch.bfloat16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2, help="[training] max_tokens")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtypes", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    add_output(parser)
    given = parser.parse_args()
    load, rows = load_average(), []
    parts = load_parts(configuration(0, given.tokens, given.temperature, "auto"), None, say=lambda _: None)
    for name in ENGINES:
        stopped = []
        for dtype in given.dtypes:
            settings = [configuration(seed, given.tokens, given.temperature, dtype) for seed in range(given.seeds)]
            stopped.append(sum(is_stopped(parts, name, config) for config in settings))
        rows.append([name, *(f"{count} of {given.seeds}" for count in stopped)])
        print(rows[-1], flush=True)
    what = f"Runs stopped, of {given.seeds} seeds, temperature {given.temperature}, max_tokens = {given.tokens}; only Served is sound."
    publish("gate", "The parity gate and faulty engines", [what, table(["engine", *given.dtypes], rows)], load, given.output)
    parts.close()


def configuration(seed: int, tokens: int, temperature: float, dtype: str) -> TrainConfig:
    training = {"temperature": temperature, "seed": seed, "max_tokens": tokens}
    return small(Path("nowhere"), training=training, inference={"dtype": dtype})


def is_stopped(parts: Parts, name: str, config: TrainConfig) -> bool:
    backend: Any = parts.backend
    own, make, options = backend.engine, getattr(faulty_engines, name), OPTIONS[config.inference.dtype]
    model, eos_ids = backend._adapter.peft_model, parts.text.eos_ids
    if issubclass(make, TorchEngine):
        engine = make.__new__(make)
        TorchEngine.__init__(engine, model, eos_ids, "cpu", options=options)
    else:
        engine = type(name, (make,), {"options": options})(config, model=model, eos_ids=eos_ids, device="cpu")
    backend.engine = engine
    try:
        run_parity_gate(config, parts, 0)
    except RunFailed:
        return True
    finally:
        backend.engine = own
    return False


if __name__ == "__main__":
    main()
