"""retrain: reinforcement learning with verifiable rewards for language models.

`load_config` reads a TOML, `train` runs it, `load_runs` gives the metrics of runs as a pandas
frame. All load on first use, so that `import retrain` is cheap.
"""

TYPE_CHECKING = False  # The entry of the command line imports this file before anything else.
if TYPE_CHECKING:
    from retrain.analysis.runs import load_runs
    from retrain.config import load_config
    from retrain.run.loop import Run, train

__version__ = "0.10.0"
__all__ = ["Run", "__version__", "load_config", "load_runs", "train"]

_HOMES = {
    "load_config": "config",
    "load_runs": "analysis.runs",
    "Run": "run.loop",
    "train": "run.loop",
}


def __getattr__(name: str) -> object:
    from retrain.system import lazy

    return lazy(__name__, _HOMES)(name)
