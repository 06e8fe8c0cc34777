"""docs/api.md: what Python code may import, made from signatures and docstrings."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from scripts.docs_metrics import field_docs

MODULES = {
    "retrain": "Runs",
    "retrain.config": "Configurations",
    "retrain.campaign": "Campaigns",
    "retrain.squeeze": "LoRA-Squeeze",
    "retrain.xray": "X-ray",
    "retrain.advantages": "Plugins: advantages, algorithms, transforms",
    "retrain.data": "Plugins: data",
    "retrain.rewards": "Plugins: rewards",
    "retrain.environments": "Plugins: environments",
    "retrain.inference_engine.base": "Plugins: engines",
    "retrain.backends": "Plugins: backends",
    "retrain.types": "Nouns that plugins meet",
}
"""Module -> its heading. A module without `__all__` gives the public names that it defines."""

INTRODUCTION = """\
# API reference

Look up the signatures for Python and for plugins. You can import everything on this page; anything else
may change without notice.

```python
import retrain

config = retrain.load_config("examples/lab.toml", ["--max-steps", "2"])
print(config.training.lr)
```

[Write your own method](plugins.md) shows whole examples. `make docs` writes this page from the
docstrings.
"""


def api_document() -> str:
    """The text of docs/api.md."""
    parts = [INTRODUCTION.rstrip()]
    shown: set[str] = set()
    for module, heading in MODULES.items():
        parts += [f"## {heading}: `{module}`", *_module(module, shown)]
    return "\n\n".join(parts) + "\n"


def _module(name: str, shown: set[str]) -> Iterator[str]:
    module = import_module(name)
    for public in getattr(module, "__all__", None) or _defined_in(module):
        value = getattr(module, public)
        if public in shown:
            continue
        shown.add(public)
        if inspect.isclass(value):
            yield from _class(public, value)
        elif inspect.isfunction(value):
            yield f"### {public}\n\n`{public}{_signature(value)}`\n\n{_doc(value)}"


def _defined_in(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _class(name: str, value: type) -> Iterator[str]:
    yield f"### {name}\n\n{_doc(value)}"
    if dataclasses.is_dataclass(value):
        docs = field_docs(value)
        rows = [
            f"| `{field.name}` | `{_cell(_plain(field.type))}` | {_cell(docs.get(field.name, ''))} |"
            for field in dataclasses.fields(value)
            if not field.name.startswith("_")
        ]
        if rows:
            yield "\n".join(["| field | type | what it is |", "|---|---|---|", *rows])
    methods = list(_methods(value))
    if methods:
        yield "\n".join(methods)


def _methods(value: type) -> Iterator[str]:
    """A line for each method and each property of a class; a field's default may be a function."""
    for name, member in vars(value).items():
        if name.startswith(("_", "model_")) or name in getattr(value, "__dataclass_fields__", {}):
            continue
        if inspect.isfunction(member):
            yield _entry(f"{name}{_signature(member)}", member)
        elif isinstance(member, property):
            returned = inspect.signature(member.fget).return_annotation
            yield _entry(f"{name}: {_plain(returned)}", member)


def _entry(written: str, member: Any) -> str:
    return ": ".join(filter(None, [f"- `{written}`", _doc(member)]))


def _signature(function: Any) -> str:
    return _plain(str(inspect.signature(function)))


def _plain(annotation: object) -> str:
    """An annotation without the modules of its names, and without addresses."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z]\w)", "", text.replace("''", '""').replace("'", ""))
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)


def _doc(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split()) if value.__doc__ else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
