"""The peak of resident memory over some steps, above what the imported modules hold, and the one
that is predicted. The model's modules are imported by a prediction before.
"""

from collections.abc import Callable
from typing import Any

from growth_point import Point
from worker import GIB, measured, serve

from retrain.config import config_from_mapping
from retrain.model.memory import predict_memory


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    predict_memory(config_from_mapping({"model": {"model": settings["model"], "dtype": "fp32"}}))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        with measured() as whole:
            point = Point(settings, request)
            for step in range(request["steps"]):
                rows = point.sample(point.requests(1, request["tokens"]))
                point.backend.train(rows, step)
        memory = predict_memory(point.backend.config, prompt_tokens=point.prompt_tokens)
        peak = round((whole.peak_gib - whole.before_gib) * GIB)
        parts = {part.name: part.bytes for part in memory.parts}
        return {"peak": peak, "predicted": memory.peak, "parts": parts}

    return answer


if __name__ == "__main__":
    serve(setup, ("retrain", "torch", "transformers", "peft"))
