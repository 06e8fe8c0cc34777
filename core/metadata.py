"""What retrain-core takes from retrain's own pyproject.toml: everything but torch and what is of no
use without it.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LOCAL_TRAINER = {"torch", "peft"}
EXTRAS = {"tinker", "trackio", "report", "dev"}


class SharedMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        whole = tomllib.loads(
            (Path(self.root).parent / "pyproject.toml").read_text(encoding="utf-8")
        )["project"]
        metadata["version"] = whole["version"]
        metadata["scripts"] = whole["scripts"]
        metadata["dependencies"] = [
            one for one in whole["dependencies"] if _name(one) not in LOCAL_TRAINER
        ]
        extras = whole["optional-dependencies"]
        metadata["optional-dependencies"] = {
            name: extras[name] for name in sorted(EXTRAS & set(extras))
        }


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found.group()
