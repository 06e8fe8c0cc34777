"""What was changed between the runs and the verdict shows in `retrain compare`: each trick, and the
words that notice it.
"""

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from campaigns import EIGHT, manifest_of, modes_of, problems, seal, write_planned, write_run

from retrain.campaign import Manifest
from retrain.cli.main import main
from retrain.errors import RunFailed
from retrain.records.jsonl import encode_line
from tests.marks import first_of

BASE, BETTER = "grpo+none", "maxrl+none"
ALIKE = [51, 47, 53, 52, 48, 51, 51, 47]
"""Within two points of the baseline."""
Edit = Callable[[Path], Iterable[str] | None]
"""Changes a campaign; returns further arguments of compare."""


def run(campaign: Path, condition: str, seed: int) -> Path:
    return campaign / "runs" / f"{condition}_s{seed}"


TRICKS: dict[Edit, str] = {}
CHANGED = "the file was changed or the disk is damaged"
HASHED = "edited after it was hashed"


def noticed(words: str) -> Callable[[Edit], Edit]:
    """A trick, and the words of `compare` that notice it."""
    return lambda trick: TRICKS.setdefault(trick, words) and trick


def replace_in(path: Path, pattern: str, by: str) -> None:
    text = path.read_text()
    assert re.search(pattern, text), (path, pattern)
    path.write_text(re.sub(pattern, by, text))


# -- the tricks ------------------------------------------------------------------------------------


@noticed(
    r"Exploratory: .* its runs \(planned and not counted: seeds 3, 7 of grpo\+none; seeds"
    r" 3, 7 of maxrl\+none\)"
)
def strike_seeds(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["runs"] = [entry for entry in content["runs"] if entry["seed"] not in (3, 7)]
        content["seeds"] = [1, 2, 4, 5, 6, 8]
    for seed in (3, 7):
        for condition in (BASE, BETTER):
            shutil.rmtree(run(campaign, condition, seed))


@noticed(r"maxrl\+none_s3 is not listed in manifest\.json, so it is not counted")
def strike_seeds_and_leave_their_folders(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["runs"] = [entry for entry in content["runs"] if entry["seed"] != 3]
        del content["plan"]  # as if an earlier version had written it


@noticed(HASHED)
def strike_a_seed_and_forge_the_plan(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["runs"] = [entry for entry in content["runs"] if entry["seed"] != 3]
        content["seeds"].remove(3)
        content["plan"]["seeds"].remove(3)


@noticed(
    "Exploratory: the manifest holds no plan, which every campaign writes before its first run"
)
def remove_the_plan(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        del content["plan"]


@noticed(r"Exploratory: .* margin \(0\.1, none planned\)")
def choose_a_margin_afterwards(campaign: Path) -> list[str]:
    return ["--margin", "0.1"]


@noticed(HASHED)
def write_a_margin_into_the_plan(campaign: Path) -> list[str]:
    with manifest_of(campaign) as content:
        content["plan"]["margin"] = 0.1
    return ["--margin", "0.1"]


@noticed(
    r"metric \(grad_norm, planned pass@1\); direction \(lower is better, planned higher is better\)"
)
def turn_the_direction(campaign: Path) -> list[str]:
    return ["--metric", "grad_norm", "--lower-is-better"]


@noticed(r"direction \(neither direction is better, planned higher is better\)")
def ask_for_a_metric_of_no_direction(campaign: Path) -> list[str]:
    return ["--metric", "grad_norm"]


@noticed(HASHED)
def turn_the_direction_in_the_plan(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["plan"]["better"] = "lower"


@noticed(r"maxrl\+none_s3 holds a run of seed 4, and seed 3 is planned")
def put_another_seeds_run_into_a_folder(campaign: Path) -> None:
    shutil.rmtree(run(campaign, BETTER, 3))
    shutil.copytree(run(campaign, BETTER, 4), run(campaign, BETTER, 3))


@noticed(r"maxrl\+none_s3 holds a run of grpo\+none, and maxrl\+none is planned")
def put_another_conditions_run_into_a_folder(campaign: Path) -> None:
    shutil.rmtree(run(campaign, BETTER, 3))
    shutil.copytree(run(campaign, BASE, 3), run(campaign, BETTER, 3))


@noticed(r"grpo\+none_s1 holds a run of grpo\+none, and maxrl\+none is planned")
def swap_labels(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        for entry in content["runs"]:
            entry["condition"] = BETTER if entry["condition"] == BASE else BASE


@noticed(r"Exploratory: .* seed 3 of grpo\+none; seed 3 of maxrl\+none")
def swap_the_folders_of_two_runs(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        one, other = (entry for entry in content["runs"] if entry["seed"] == 3)
        one["dir"], other["dir"] = other["dir"], one["dir"]


@noticed(r"maxrl\+none_s9 holds a run of seed 1, and seed 9 is planned")
def copy_a_pair_as_a_new_seed(campaign: Path) -> None:
    for condition in (BASE, BETTER):
        shutil.copytree(run(campaign, condition, 1), run(campaign, condition, 9))
    add_seed(campaign, 9)


@noticed(r"has seed 9 in config\.toml and 1 in summary\.json")
def copy_a_pair_as_a_new_seed_and_edit_its_configuration(campaign: Path) -> None:
    copy_a_pair_as_a_new_seed(campaign)
    for condition in (BASE, BETTER):
        replace_in(run(campaign, condition, 9) / "config.toml", r"\nseed = 1\n", "\nseed = 9\n")


@noticed(r"maxrl\+none_s1 and maxrl\+none_s9 hold the same numbers in every step")
def copy_a_pair_as_a_new_seed_and_edit_every_seed(campaign: Path) -> None:
    copy_a_pair_as_a_new_seed_and_edit_its_configuration(campaign)
    for condition in (BASE, BETTER):
        for name in ("summary.json", "trainer_state.json"):
            replace_in(run(campaign, condition, 9) / name, '"seed": 1', '"seed": 9')


def add_seed(campaign: Path, seed: int) -> None:
    with manifest_of(campaign) as content:
        for condition in (BASE, BETTER):
            name = f"{condition}_s{seed}"
            entry = {"name": name, "condition": condition, "seed": seed, "status": "done"}
            content["runs"].append(entry | {"dir": f"runs/{name}"})
        content["seeds"].append(seed)


@noticed(r"maxrl\+none_s3 was trained with training\.lr = 0\.003, and 0\.001 is planned")
def train_one_run_otherwise(campaign: Path) -> None:
    replace_in(run(campaign, BETTER, 3) / "config.toml", r"\nlr = 0.001\n", "\nlr = 0.003\n")


@noticed(r's3 was trained with algorithm\.advantage_mode = "grpo", and "maxrl" is planned')
def relabel_a_run(campaign: Path) -> None:
    put_another_conditions_run_into_a_folder(campaign)
    for name in ("config.toml", "summary.json"):
        replace_in(run(campaign, BETTER, 3) / name, re.escape(BASE), BETTER)


@noticed(
    r"maxrl\+none_s3: evaluation\.jsonl differs from its sha256, as trainer_state\.json recorded it:"
    f" {CHANGED}"
)
def edit_an_answer(campaign: Path) -> None:
    replace_in(run(campaign, BETTER, 3) / "evaluation.jsonl", '"correct": 0', '"correct": 1')


@noticed(r"maxrl\+none_s3: trainer_state\.json differs from the one in step_000002")
def edit_an_answer_and_its_hash(campaign: Path) -> None:
    checkpoint = run(campaign, BETTER, 3) / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    shutil.copy(run(campaign, BETTER, 3) / "trainer_state.json", checkpoint)
    edit_an_answer(campaign)
    seal(run(campaign, BETTER, 3))


@noticed(rf"evaluation\.jsonl has \d+ bytes instead of \d+, as .*{CHANGED}")
def append_an_evaluation(campaign: Path) -> None:
    with (run(campaign, BETTER, 3) / "evaluation.jsonl").open("ab") as file:
        for record in problems([1] * 100):
            file.write(encode_line(record.to_json() | {"step": 3}))


@noticed(rf"evaluation\.jsonl has \d+ bytes instead of \d+, as .*{CHANGED}")
def cut_an_evaluation(campaign: Path) -> None:
    path = run(campaign, BETTER, 3) / "evaluation.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:60]))


@noticed(f"evaluation.jsonl differs from its sha256.*{CHANGED}")
def damage_a_byte(campaign: Path) -> None:
    path = run(campaign, BETTER, 3) / "evaluation.jsonl"
    path.write_text(path.read_text().replace('"samples": 1', '"samples": 2', 1))


@noticed(r"grpo\+none_s3: evaluation\.jsonl differs from its sha256")
def take_the_evaluation_of_another_run(campaign: Path) -> None:
    other, own = (run(campaign, *one) for one in ((BETTER, 4), (BASE, 3)))
    shutil.copy(other / "evaluation.jsonl", own / "evaluation.jsonl")


@noticed(rf"maxrl\+none_s3: metrics\.jsonl differs from its sha256, .*{CHANGED}")
def edit_the_training_metrics(campaign: Path) -> list[str]:
    metrics = run(campaign, BETTER, 3) / "metrics.jsonl"
    replace_in(metrics, '"correct_rate": 0.5', '"correct_rate": 0.9')
    return ["--metric", "correct_rate"]


@noticed(
    r"maxrl\+none_s3 failed, says manifest\.json, and is done, says its own summary\.json, so it is"
    " not counted"
)
def call_a_bad_run_failed(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["runs"][5].update(status="failed", reason="a bad one")


@noticed(r"Exploratory: .* its runs \(planned and not counted: seed 3 of maxrl\+none\)")
def call_a_bad_run_skipped(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["runs"][5]["status"] = "skipped"


@noticed(r"maxrl\+none_s3 \(3 attempts\)")
def try_a_run_again(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["runs"][5]["attempts"] = 3


@noticed(r"Added after the plan: seed 9\..*no longer exact")
def add_seeds_afterwards(campaign: Path) -> None:
    add_seed(campaign, 9)
    for condition in (BASE, BETTER):
        right, folder = problems([1] * 55 + [0] * 45), run(campaign, condition, 9)
        write_run(folder, 9, held_out=right, algorithm=modes_of(condition))
        seal(folder)


@noticed(r"max_steps \(4, planned 2\); the steps of the longest run \(4, planned 2\)")
def train_a_run_on(campaign: Path) -> None:
    answers, folder = problems([1] * 90 + [0] * 10), run(campaign, BETTER, 5)
    write_run(folder, 5, [0.5] * 4, held_out=answers, algorithm=modes_of(BETTER))
    seal(folder)
    with manifest_of(campaign) as content:
        content["max_steps"] = 4


@noticed(r"Exploratory: .* evaluation \(.* 4 samples, .*planned .* 1 sample, ")
def sample_more_answers(campaign: Path) -> None:
    for config in campaign.glob("runs/*/config.toml"):
        replace_in(config, r"\nsamples = 1", r"\nsamples = 4")


@noticed(r"Exploratory: .* held-out problems \(2222, planned 1111\)")
def change_the_held_out_file(campaign: Path) -> None:
    with manifest_of(campaign) as content:
        content["heldout_sha256"] = "2222"


@noticed(r"seeds 3, 7 of maxrl\+none")
def take_the_folders_of_good_seeds(campaign: Path) -> list[str]:
    ours, theirs = (
        [str(run(campaign, condition, seed)) for seed in (1, 2, 4, 5, 6, 8)]
        for condition in (BETTER, BASE)
    )
    return [*ours, "--baseline", *theirs]


@noticed(r"not one condition: training\.lr differs between seeds 1 to 4 and 5 to 8")
def mix_learning_rates_in_loose_folders(campaign: Path) -> list[str]:
    def loose(condition: str, seed: int) -> str:
        folder = campaign.parent / "loose" / f"{condition}{seed}"
        training = {"lr": 3e-4 if seed < 5 or condition == BASE else 1e-3}
        return str(write_run(folder, seed, algorithm=modes_of(condition), training=training))

    ours, theirs = ([loose(label, seed) for seed in range(1, 9)] for label in (BETTER, BASE))
    return [*ours, "--baseline", *theirs]


AS_PLANNED = (
    try_a_run_again,
    add_seeds_afterwards,
    copy_a_pair_as_a_new_seed,
    copy_a_pair_as_a_new_seed_and_edit_its_configuration,
)
"""Of these the planned seeds are whole; what was added is named."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight seeds of a condition that is clearly better, planned and sealed."""
    by = [7, 5, -12, 8, 6, 7, -9, 6]
    right = [base + more for base, more in zip(EIGHT, by, strict=True)]
    return write_planned(tmp_path_factory.mktemp("bent") / "campaign", {BASE: EIGHT, BETTER: right})


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    main(["compare", *map(str, arguments)])
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_what_was_not_bent_is_as_planned_and_nothing_is_left_out(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, campaign)
    assert re.search(
        r"Preregistered \(plan \w{8}\): held-out pass@1, higher is better, alpha 0\.05, 8 seeds, one test\.",
        text,
    )
    assert "Left out" not in text and "attempts" not in text and "Known limits" not in text


@pytest.mark.faults("tricks and accidents between runs and verdict")
@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.__name__)
def test_a_trick_is_noticed(
    trick: Edit, campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(campaign, tmp_path / "campaign"))
    arguments = list(trick(copy) or [])
    loose = bool(arguments) and not arguments[0].startswith("-")
    text = said(capsys, *arguments) if loose else said(capsys, copy, *arguments)
    assert re.search(TRICKS[trick], text), text
    assert "Preregistered" not in text or trick in AS_PLANNED


# -- what the other readers say, and what may be planned -------------------------------------------


def test_every_reader_of_an_evaluation_looks_at_its_seal(
    campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(campaign, tmp_path / "campaign"))
    edit_an_answer(copy)
    for command in ("compare", "power", "status", "report"):
        main([command, str(copy)])
        text = " ".join("".join(capsys.readouterr()).split())
        assert "evaluation.jsonl differs from its sha256" in text, command


def test_a_run_that_still_writes_may_be_longer_than_its_seal(
    campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(campaign, tmp_path / "campaign"))
    append_an_evaluation(copy)
    (run(copy, BETTER, 3) / "summary.json").unlink()
    main(["status", str(copy)])
    assert "sha256" not in capsys.readouterr().out


def test_a_manifest_that_was_cut_is_called_damaged_not_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text('{"runs": [')
    assert main(["compare", str(tmp_path)]) == 1
    assert "manifest.json is not valid JSON" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "section", [[], {"conditions": "x"}, {"grid": [1]}, {"conditions": [{"label": "a b"}]}]
)
def test_a_campaign_section_that_none_wrote_is_named(
    section: Any, campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(campaign, tmp_path / "campaign"))
    with manifest_of(copy) as content:
        content["config"]["campaign"] = section
    for command in ("compare", "status"):
        main([command, str(copy)])
        text = " ".join("".join(capsys.readouterr()).split())
        assert "manifest.json" in text and "cannot be read" in text


@pytest.mark.parametrize(
    ("place", "value"),
    first_of(
        [
            ("plan", []),
            ("plan.alpha", ...),
            ("looks", 5),
            ("plan.alpha", "x"),
            ("plan.alpha", 0),
            ("plan.margin", True),
            ("plan.seeds", [1, "2"]),
            ("plan.conditions", None),
            ("plan.metric", {}),
            ("looks", [{"seed": "1", "evidence": {}, "decided": {}}]),
            ("looks", [{"seed": 1, "evidence": [], "decided": {}}]),
            ("looks", [{"seed": 1, "evidence": {"maxrl+none": "x"}, "decided": {}}]),
            ("seeds", 8),
            ("seeds", ["1"]),
            ("max_steps", [2]),
        ],
        quick=3,
    ),
)
def test_a_value_of_the_manifest_that_no_campaign_wrote_is_named(
    place: str, value: Any, campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(campaign, tmp_path / "campaign"))
    *above, name = place.split(".")
    with manifest_of(copy) as content:
        holder = content[above[0]] if above else content
        holder[name] = value
        if value is ...:
            del holder[name]
    assert main(["compare", str(copy)]) == 1
    text = " ".join(capsys.readouterr().err.split())
    if value is ...:
        assert f"manifest.json has no {place}, which every campaign writes" in text
    else:
        assert f"manifest.json has {place}" in text and "which no campaign wrote" in text
    assert main(["status", str(copy)]) == 0
    with pytest.raises(RunFailed, match=place):  # as a resume does
        Manifest.read(copy)


def test_a_planned_margin_is_taken_and_hashed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_planned(tmp_path / "campaign", {BASE: EIGHT, BETTER: ALIKE}, margin=0.05)
    text = said(capsys, folder)
    assert "maxrl+none is equivalent to grpo+none within 5.0 pp" in text
    assert "alpha 0.05, equivalent within 0.05, 8 seeds" in text
    assert "margin (0.1, 0.05 planned)" in said(capsys, folder, "--margin", "0.1")
    assert "within 5.0 pp" in said(capsys, folder, "--metric", "accuracy")


def test_code_that_differs_within_an_arm_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(arm: str, seed: int) -> Path:
        late = arm == "new" and seed > 2
        files = "22" if late else "11"
        code = {"revision": "def" if late else "abc", "plugins": {"my_losses.sapo": files}}
        environment = {"code": code, "model_sha256": files}
        return write_run(tmp_path / f"{arm}{seed}", seed, environment=environment)

    ours, theirs = ([code(arm, seed) for seed in range(1, 5)] for arm in ("new", "base"))
    text = said(capsys, *ours, "--baseline", *theirs)
    for told in (
        "ran on different revisions of retrain",
        "started from different files of the model",
        "ran with different files of the plugin my_losses.sapo",
    ):
        assert f"new1 ... {told}: seeds 1, 2 and 3, 4 differ." in text
    assert "retrain's revision (def, abc), the plugin my_losses.sapo" in text
