"""`retrain backends`: one list of engines and backends, without importing what they run on."""

import json
from importlib.metadata import version

import pytest

from retrain.backends.base import BACKENDS
from retrain.backends.declared import catalog
from retrain.cli.main import main
from retrain.inference_engine.base import ENGINES


def test_the_catalog_has_every_engine_and_backend_once() -> None:
    named = [("backend", name) for name in BACKENDS] + [("engine", name) for name in ENGINES]
    assert sorted((entry.kind, entry.name) for entry in catalog()) == sorted(named)


def test_it_says_what_is_installed_what_is_not_and_what_each_was_verified_against(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["backends"]) == 0
    shown = capsys.readouterr().out
    assert f"torch {version('torch')}" in shown
    for entry in catalog():
        block = shown.partition(f"  {entry.name}: ")[2]
        assert entry.what in block.splitlines()[0] and entry.verified in block
        assert entry.words in block
        if entry.packages and not any(entry.installed.values()):
            assert f"install   {entry.install}" in block


def test_json_has_versions_capabilities_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    local = entries["local"]
    assert local["installed"]["torch"] == version("torch")
    assert local["capabilities"]["exact_resume"] is True
    because = "Tinker's losses have no KL term; leave it at 0"
    row = {"key": "loss.kl_coef", "use": "refused", "because": because}
    assert row in entries["tinker"]["keys"]


def test_one_of_them_shows_what_becomes_of_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "tinker"]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert "[optimizer] beta1 used" in lines
    assert "[backend] devices unused Tinker holds the model" in lines
    assert main(["backends", "tinkr"]) == 2
    assert "'tinkr' is not a built-in engine or backend" in capsys.readouterr().err
