"""What a run tells the outside: one event, many sinks.

`record` holds the shapes of the files, `run_folder` their places, `tracker` the events; each other module is one sink or one
thing that every sink needs (`jsonl`, `redact`). Optional sinks are imported only by the run that asks for them.
"""

from retrain.records.entries import EvaluationRecord, GenerationRecord, RunSummary, StepRecord
from retrain.records.jsonl import read_jsonl
from retrain.records.run_folder import RunFolder
from retrain.records.token_table import TokenTable
from retrain.tracking.base import Tracker, build_tracker

__all__ = [
    "EvaluationRecord",
    "GenerationRecord",
    "RunFolder",
    "RunSummary",
    "StepRecord",
    "TokenTable",
    "Tracker",
    "build_tracker",
    "read_jsonl",
]
