"""Checkpoints: used only if every byte matches, and a crash at any instant leaves the last good
one.
"""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.errors import EnvironmentFailure, RunFailed
from retrain.records.checkpoint import MANIFEST, CheckpointStore, commit_folder, verify
from retrain.records.state import TrainerState
from retrain.types import MachineChoices


def _state(step: int) -> TrainerState:
    about: Any = {"cursor": 4 * step, "sepa": {"gate_open": True}}
    about["choices"] = MachineChoices(2, 8, 1024, 2048, False)
    return TrainerState(seed=7, config_hash="c0ffee", step=step, **about)


def _write(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(random.Random(0).randbytes(2000))
    (folder / "adapter_config.json").write_text("{}")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 4):
        store.save(_state(step), _write)
    return store


def test_state_survives_the_round_trip(store: CheckpointStore) -> None:
    newest = store.newest(print)
    assert newest is not None
    assert newest.state() == _state(4)


def test_a_choice_that_another_version_has_stored_is_left_out() -> None:
    stored = json.loads(_state(4).to_json())
    stored["choices"]["offload_activations"] = True
    assert TrainerState.from_json(json.dumps(stored), Path("state.json")) == _state(4)


@pytest.mark.faults("checkpoints: bits flipped, and crashes at each write")
def test_every_flipped_bit_is_noticed_and_the_one_before_is_used(store: CheckpointStore) -> None:
    newest = store.folder / "step_000004"
    rng = random.Random(1)
    for path in sorted(newest.iterdir()):
        original = path.read_bytes()
        for _ in range(20):
            damaged = bytearray(original)
            place = rng.choice(
                [index for index, byte in enumerate(original) if not chr(byte).isspace()]
            )
            damaged[place] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            said: list[str] = []
            found = store.newest(said.append)
            assert found is not None
            assert found.step == 2
            assert path.name in said[0]
        path.write_bytes(original)
    assert verify(newest) == ""


def test_a_missing_or_shortened_file_is_named(store: CheckpointStore) -> None:
    folder = store.folder / "step_000004"
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json has 1 bytes instead of 2" in verify(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json is missing" in verify(folder)
    with pytest.raises(RunFailed, match="checkpoints here: 2, 4"):
        store.at(4)
    (store.folder / "step_000006").symlink_to("lost")
    with pytest.raises(RunFailed, match="step_000006 cannot be used"):
        store.at(6)


@pytest.mark.faults("checkpoints: bits flipped, and crashes at each write")
def test_a_crash_at_any_write_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fsync and every rename is a place where the machine may stop."""
    real_fsync, real_rename = os.fsync, Path.rename

    class Crash(BaseException):
        pass

    for stop in range(1, 12):
        store = CheckpointStore(tmp_path / str(stop))
        store.save(_state(1), _write)
        left = stop

        def maybe(call):  # type: ignore[no-untyped-def]
            def wrapped(*args):  # type: ignore[no-untyped-def]
                nonlocal left
                left -= 1
                if left == 0:
                    raise Crash
                return call(*args)

            return wrapped

        monkeypatch.setattr(os, "fsync", maybe(real_fsync))
        monkeypatch.setattr(Path, "rename", maybe(real_rename))
        try:
            store.save(_state(2), _write)
            finished = True
        except Crash:
            finished = False
        monkeypatch.undo()
        newest = store.newest(print)
        assert newest is not None
        assert newest.step in ({2} if finished else {1, 2})
        assert verify(newest.folder) == ""
        store.make_room_after(newest.state(), print)
        assert not list(store.folder.glob(".tmp-*"))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(5):
        store.save(_state(step), _write)
    assert store.steps() == [3, 4]


def test_final_is_replaced_whole(store: CheckpointStore) -> None:
    store.save_final(_state(4), _write)
    store.save_final(_state(6), lambda folder: (folder / "other").write_text("new") and None)
    final = store.folder / "final"
    assert sorted(path.name for path in final.iterdir()) == [MANIFEST, "other"]
    assert json.loads((final / MANIFEST).read_text())["step"] == 6
    assert store.steps() == [2, 4]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "part").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        commit_folder(tmp_path / "step_000001", full, step=1, config_hash="")
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_says_of_tensors_is_the_oserror_that_it_is_of_any_file(
    tmp_path: Path, small_files: None
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    with pytest.raises(OSError, match="File too large"):
        commit_folder(
            tmp_path / "step_000001",
            lambda folder: save_file({"a": np.zeros(10**6)}, folder / "a"),
            step=1,
            config_hash="",
        )
    assert list(tmp_path.iterdir()) == []


def test_a_volume_that_cannot_hold_a_checkpoint_is_found_before_step_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match="adapter_path"):
        CheckpointStore(tmp_path / "file" / "checkpoints").rehearse(1 << 20)
    CheckpointStore(tmp_path / "checkpoints").rehearse(3_000_000)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_state_in_the_middle_of_a_step_is_never_sealed(store: CheckpointStore) -> None:
    state = replace(_state(6), learning=True)
    with pytest.raises(ValueError, match="is unfinished"):
        store.save(state, _write)
    assert store.steps() == [2, 4]


def test_a_folder_whose_replacement_fails_returns(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save_final(_state(4), _write)
    real = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.name == "final" and "replaced" not in path.name:
            raise OSError(5, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        store.save_final(_state(6), _write)
    assert verify(store.folder / "final") == ""
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "final",
        "step_000002",
        "step_000004",
    ]


def test_a_state_of_another_version_is_refused(store: CheckpointStore) -> None:
    newest = store.newest(print)
    assert newest is not None
    text = (newest.folder / "trainer_state.json").read_text()
    with pytest.raises(RunFailed, match="version 99"):
        TrainerState.from_json(
            text.replace('"schema_version": 1', '"schema_version": 99'), newest.folder
        )
