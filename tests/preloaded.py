"""What the server of tests/commands.py has before it forks the first command: what a run and the
other commands import, and what libraries would otherwise prepare anew in every process.
"""

import gc
import importlib

from tests.commands import IMPORTED
from tests.unwaited import wait_for_no_disk

_FOR_COMMANDS = [
    "retrain.cli.main", "retrain.cli.parameters", "retrain.explain", "retrain.model.memory",
    "retrain.report.page", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "peft.utils.transformers_weight_conversion",
]  # fmt: skip


def _prepare() -> None:
    """A million objects stay: the garbage collector of a command need not visit them."""
    gc.disable()
    for name in (*IMPORTED, *_FOR_COMMANDS):
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from retrain.config import TrainConfig

    TrainConfig.model_rebuild()  # pydantic waits for the first file
    get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand patterns
    gc.freeze()
    gc.enable()


_prepare()
wait_for_no_disk()
