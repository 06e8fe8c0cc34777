"""The command that a sentence names to install an extra."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from retrain import install
from retrain.cli.main import main
from retrain.install import install_hint

ROOT = Path(__file__).resolve().parents[1]


def installed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    origin: dict[str, object] | None,
    extras: str = "",
) -> None:
    """Make `folder` the only place of distributions, and put one there as pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-0.9.0.dist-info"
    info.mkdir()
    provided = "".join(f"Provides-Extra: {extra}\n" for extra in extras.split())
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.0\n{provided}"
    )
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr("sys.path", [str(folder)])
    monkeypatch.setattr(install, "_SOURCE", folder)


def test_in_a_checkout_the_hint_installs_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert install_hint("report") == 'pip install -e ".[report]"'
    assert install_hint() == "pip install -e ."
    monkeypatch.chdir(tmp_path)
    assert install_hint("report") == f'pip install -e "{ROOT}[report]"'


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        # an index: never a version before this one, which is another program
        (None, 'pip install "retrain[ray]==0.9.0"'),
        ({"url": "file:///some/where", "dir_info": {}}, 'pip install "/some/where[ray]"'),
        (
            {"url": "https://host/retrain", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            'pip install "retrain[ray] @ git+https://host/retrain@abc"',
        ),
        ({"url": "file:///w/retrain-0.9.0-py3-none-any.whl", "archive_info": {}},
         'pip install "retrain[ray] @ file:///w/retrain-0.9.0-py3-none-any.whl"'),
    ],
    ids=["index", "folder", "repository", "wheel"],
)  # fmt: skip
def test_an_installed_package_is_taken_from_where_it_came(
    origin: dict[str, object] | None, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "retrain", origin)
    assert install_hint("ray") == hint


def test_uv_installs_into_a_tool_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "retrain", {"url": "file:///some/where", "dir_info": {}})
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert install_hint("ray") == 'pip install "/some/where[ray]"'
    (tmp_path / "uv-receipt.toml").touch()
    python = f"uv pip install --python {sys.executable}"
    assert install_hint("ray") == f'{python} "/some/where[ray]"'


def test_the_core_gets_its_own_extras_and_gives_way_to_retrain_for_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin: dict[str, object] = {"url": "file:///some/where/core", "dir_info": {}}
    installed(tmp_path, monkeypatch, "retrain-core", origin, "tinker report")
    assert install_hint("tinker") == 'pip install "/some/where/core[tinker]"'
    instead = "pip uninstall --yes retrain-core && pip install"
    assert install_hint() == f"{instead} /some/where"
    assert install_hint("ray") == f'{instead} "/some/where[ray]"'


def test_no_page_and_no_message_installs_another_program_of_the_index() -> None:
    wrong = re.compile(r"""(pip install|install it with|, or) ["']?retrain\b""")
    files = [
        *(ROOT / "retrain").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.toml"),
        *(ROOT / "examples").rglob("*.py"),
    ]
    found = [
        path.name
        for path in files
        if path.name != "install.py" and wrong.search(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_a_folder_named_torch_is_not_taken_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ModuleType("torch")
    folder.__path__ = [str(tmp_path / "torch")]
    monkeypatch.setitem(sys.modules, "torch", folder)

    def uses_torch(_: list[str]) -> int:
        raise AttributeError("module 'torch' has no attribute 'float32'")

    monkeypatch.setattr("retrain.cli.main._dispatch", uses_torch)
    assert main(["run.toml"]) == 3
    assert (
        f"this needs torch (the folder {folder.__path__[0]} is not it)" in capsys.readouterr().err
    )
