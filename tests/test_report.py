"""`retrain report`: one page that holds everything, asks nobody for anything, and in which what a
model wrote is only text.
"""

import json
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from campaigns import write_campaign, write_manifest, write_planned, write_run
from runs import small
from showcase import HOSTILE, write_showcase

from retrain.analysis.runs import find_runs
from retrain.analysis.status import State
from retrain.cli.main import main
from retrain.install import install_hint
from retrain.records.terminal import visible
from retrain.report.data import (
    ConditionCurves,
    Curves,
    ReportRequest,
    curves_by_condition,
    read_report_data,
    smoothed,
)
from retrain.report.figures import draw_figures
from retrain.report.page import _campaign_tiles, build_page, turns
from tests.runs import small_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_showcase(tmp_path_factory.mktemp("logs") / "campaign")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, with tokens."""
    config = small(
        tmp_path_factory.mktemp("logs") / "run",
        algorithm={"transform_mode": "gtpo_sepa"},
        training={"max_steps": 2},
        evaluation={"at_start": True, "at_end": True, "max_examples": 4},
        logging={"tokens_every": 1},
    )
    return small_run(config, quiet=True).folder


@pytest.fixture(scope="module")
def campaign_page(campaign: Path) -> str:
    return build_page(ReportRequest(campaign))


@pytest.fixture(scope="module")
def run_page(run: Path) -> str:
    return build_page(ReportRequest(run, against=["gtpo_hicra"]))


class Page(HTMLParser):
    """Elements with their attributes, and the text of everything but script and style."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


ADDRESSES = "src href srcset action formaction data poster background xlink:href ping manifest"


@pytest.mark.parametrize("name", ["campaign_page", "run_page"])
def test_nothing_in_the_page_has_an_address_outside_it(
    name: str, request: pytest.FixtureRequest
) -> None:
    html: str = request.getfixturevalue(name)
    page = Page(html)
    given = [pair for _, attributes in page.elements for pair in attributes.items()]
    links = [value or "" for key, value in given if key in ADDRESSES.split()]
    assert links and all(link.startswith("#") or link == "data:," for link in links), links
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= set(re.findall(r"url\((#[^)]*)\)", html))
    tags = ("iframe", "object", "embed", "img")
    assert "@import" not in html and not any(map(page.count, tags))
    csp = "Content-Security-Policy"
    (policy,) = [keys["content"] for _, keys in page.elements if keys.get("http-equiv") == csp]
    assert policy and "connect-src" not in policy
    for part in ("default-src 'none'", "unsafe-inline'; script-src 'sha256-", "form-action 'none'"):
        assert part in policy


def test_what_a_model_wrote_is_only_text(campaign_page: str) -> None:
    page = Page(campaign_page)
    assert page.count("script") == 1 and page.count("img") == 0
    assert not any(key.startswith("on") for _, keys in page.elements for key in keys)
    for text in HOSTILE:
        assert visible(text) in page.text
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", campaign_page
    )
    assert "<b>lab-1</b>" in page.text and "{{ 7 * 191 }}" in page.text


def test_a_campaigns_page_has_its_figures_verdicts_and_completions(campaign_page: str) -> None:
    page = Page(campaign_page)
    named = {attributes["id"] for tag, attributes in page.elements if tag == "figure"}
    wanted = "differences held-out training entropy lengths signal sepa squeeze"
    assert named == {f"figure-{name}" for name in wanted.split()} and page.count("svg") == 8
    assert "Verdicts against maxrl+gtpo" in page.text and "percentage points" in page.text
    for label in ("maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"):
        assert page.text.count(label) > 5
    assert "18 of 18" in page.text and "1 of 6" not in page.text
    for step in (0, 23):
        assert f"Step {step}: 6 completions stored, 2 correct" in page.text


def test_the_verdicts_are_those_of_compare(
    campaign: Path, campaign_page: str, capsys: Captured
) -> None:
    assert main(["compare", str(campaign), "--json"]) == 0
    text = " ".join(Page(campaign_page).text.split())
    for contrast in json.loads(capsys.readouterr().out)["contrasts"]:
        assert " ".join(f"{contrast['condition']} {contrast['explanation']}".split()) in text


def test_a_runs_page_has_its_tokens_under_both_transforms(run_page: str) -> None:
    page = Page(run_page)
    assert "maxrl+gtpo_sepa" in page.text and "maxrl+gtpo_hicra" in page.text
    assert "Verdicts" not in page.text
    tokens = [
        attributes
        for tag, attributes in page.elements
        if tag == "span" and "surprisal" in (attributes.get("title") or "")
    ]
    assert len(tokens) > 100
    assert all(
        "episode" in (token["title"] or "") and "entropy" in (token["title"] or "")
        for token in tokens
    )
    assert any("plan" in (token["class"] or "").split() for token in tokens)
    assert any("a-" in (token["class"] or "") for token in tokens)
    assert "log-ratio" in (tokens[0]["title"] or "") or "log-ratio" in page.text
    assert "[training]" in page.text  # config.toml
    assert "Model lab, data lab, 2 prompts x 4 completions a step." in page.text


def test_ids_of_figures_do_not_collide(campaign_page: str) -> None:
    ids = [
        attributes["id"]
        for tag, attributes in Page(campaign_page).elements
        if "id" in attributes and tag in ("clippath", "path", "g")
    ]
    assert len(ids) == len(set(ids)) > 20
    sections = {"verdicts", "figures", "runs", "completions"}
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', campaign_page)) - sections <= set(ids)


def test_figures_take_their_colors_from_the_page(campaign_page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", campaign_page, re.DOTALL))
    assert not set(re.findall(r"#[0-9a-f]{6}\b", drawings))
    assert "var(--series-0)" in drawings
    assert "var(--ink)" in drawings
    style = re.search(r"<style>(.*?)</style>", campaign_page, re.DOTALL)
    assert style
    light, _, dark = style.group(1).partition("prefers-color-scheme: dark")
    for variable in set(re.findall(r"var\((--[\w-]+)\)", drawings)):
        assert f"{variable}:" in light and f"{variable}:" in dark


# -- the numbers behind the lines ------------------------------------------------------------------


def arm(*rates: list[float | None]) -> ConditionCurves:
    arrays = [np.array([np.nan if v is None else v for v in values]) for values in rates]
    curves = [Curves(np.arange(float(len(one))), {"correct_rate": one}) for one in arrays]
    return ConditionCurves("a", [], curves, [])


def test_a_band_is_mean_and_deviation_over_the_runs_step_by_step() -> None:
    band = arm([0.1, 0.2, None, 0.4], [0.3, 0.2, 0.5, 0.8]).band("correct_rate")
    assert band and band.sd is not None and band.steps.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(band.mean, [0.2, 0.2, 0.5, 0.6])
    np.testing.assert_allclose(
        band.sd, [np.std([0.1, 0.3], ddof=1), 0, 0, np.std([0.4, 0.8], ddof=1)], atol=1e-12
    )
    alone = arm([0.5, 0.6]).band("correct_rate")
    assert alone and alone.sd is None


def test_a_mean_ends_where_most_runs_have_not_come_to_yet() -> None:
    band = arm([0.1] * 9, [0.1] * 3, [0.1] * 3).band("correct_rate")
    assert band and band.steps.tolist() == [0, 1, 2]
    assert arm([None, None]).band("correct_rate") is None


def test_smoothing_skips_what_is_missing_and_changes_no_constant() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0, 7.0])
    np.testing.assert_allclose(smoothed(values, 2), [1.0, np.nan, 3.0, 4.0, 6.0])
    np.testing.assert_allclose(smoothed(np.full(9, 0.3), 4), np.full(9, 0.3))


def test_curves_are_the_files_numbers(campaign: Path) -> None:
    run = find_runs(campaign)[0]
    (found,) = curves_by_condition([("x", run)])
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    band = found.band("completion_tokens_mean")
    assert band and band.mean.tolist() == [line["completion_tokens_mean"] for line in lines]
    assert (found.band("plan_entropy_mean") is None) == (lines[0]["plan_entropy_mean"] is None)
    final = run.final_evaluation
    assert final
    assert found.held_out[0][-1].accuracy == final.pass_at[1]
    assert [p.step for p in found.held_out[0]] == [0, 12, 24]


def test_runs_of_several_campaigns_are_told_apart_and_not_compared(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_campaign(tmp_path / name, {"grpo+none": [5, 6], "maxrl+none": [7, 8]}, asked=10)
    data = read_report_data(ReportRequest(tmp_path))
    labels = [f"{name}: {mode}+none" for name in ("one", "two") for mode in ("grpo", "maxrl")]
    assert [arm.label for arm in data.arms] == labels
    assert data.comparison is None and "several campaigns" in data.notes[0]
    (tmp_path / "two" / "manifest.json").write_text('{"runs": [')
    for folder in (tmp_path, tmp_path / "two"):
        notes = read_report_data(ReportRequest(folder)).notes
        assert any("two/manifest.json is not valid JSON" in note for note in notes)


def test_loose_runs_are_compared_with_the_condition_that_is_named(tmp_path: Path) -> None:
    for mode, seed in (("grpo", 1), ("grpo", 2), ("maxrl", 1), ("maxrl", 2)):
        folder, algorithm = tmp_path / f"{mode}_{seed}", {"advantage_mode": mode}
        write_run(folder, seed, [0.1 * seed, 0.2], algorithm=algorithm)
    broken = write_run(tmp_path / "broken", 3, [0.1])
    (broken / "config.toml").write_text('[training]\nlr = "fast"\n')
    data = read_report_data(ReportRequest(tmp_path, baseline="maxrl+none"))
    assert data.comparison and data.comparison.baseline == "maxrl+none" and data.kind == "runs"
    assert "lr" in data.statuses[0].note and [len(arm.runs) for arm in data.arms] == [2, 2]


def test_runs_of_one_condition_and_several_configurations_are_said_to_be_mixed(
    tmp_path: Path,
) -> None:
    for seed, rate in ((1, 1e-3), (2, 1e-3), (3, 1e-4)):
        write_run(tmp_path / f"run_{seed}", seed, training={"lr": rate})
    (note,) = read_report_data(ReportRequest(tmp_path)).notes
    assert "The runs of maxrl+none differ in training.lr" in note
    shutil.rmtree(tmp_path / "run_3")
    assert read_report_data(ReportRequest(tmp_path)).notes == []


def test_what_is_missing_makes_no_figure(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1, [None, None], finished=False, max_steps=9)
    data = read_report_data(ReportRequest(tmp_path / "run"))
    assert draw_figures(data) == [] and "stopped" in build_page(ReportRequest(tmp_path / "run"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "0 of 9" in build_page(ReportRequest(tmp_path / "run"))


def test_a_campaign_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    pending = {"seed": 1, "status": "pending"}
    write_manifest(tmp_path, [pending | {"condition": f"{one}+none"} for one in ("grpo", "maxrl")])
    assert "0 of 2" in build_page(ReportRequest(tmp_path))
    folder, about = tmp_path / "runs" / "grpo+none_s1", {"finished": False, "max_steps": 3}
    write_run(folder, 1, [0.5], **about, algorithm={"advantage_mode": "grpo"})
    page = Page(build_page(ReportRequest(tmp_path)))
    assert "1/3" in page.text and "pending" in page.text and "No comparison" in page.text


def test_one_evaluation_a_run_is_a_row_for_each_condition(tmp_path: Path) -> None:
    campaign = write_campaign(tmp_path, {"grpo+none": [5, 6, 8], "maxrl+none": [7, 8, 9]}, asked=10)
    differences, held_out, *_ = draw_figures(read_report_data(ReportRequest(campaign)))
    (axes,) = held_out.figure.axes
    assert (differences.name, held_out.name) == ("differences", "held-out")
    assert "After 2 steps" in held_out.caption
    assert "95% interval" in held_out.caption
    assert {text.get_text() for text in axes.texts} == {"grpo+none: 63.3%", "maxrl+none: 80.0%"}
    dots = [sorted(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert np.allclose(dots, [[50, 60, 80], [70, 80, 90]])
    assert "margin" not in differences.caption


def test_the_planned_margin_is_drawn(tmp_path: Path) -> None:
    arms = {"grpo+none": [5] * 6, "maxrl+none": [7] * 6}
    write_planned(tmp_path, arms, asked=10, margin=0.05)
    differences, *_ = draw_figures(read_report_data(ReportRequest(tmp_path)))
    (axes,) = differences.figure.axes
    dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert sorted(dotted) == [-5, 5] and "Dotted: the margin" in differences.caption


def test_a_campaign_that_goes_on_says_so_and_counts_what_is_planned(tmp_path: Path) -> None:
    campaign = write_campaign(tmp_path, {"grpo+none": [5, 6], "maxrl+none": [7, 8]}, asked=10)
    manifest = json.loads((campaign / "manifest.json").read_text())
    manifest["runs"] += [
        {"name": f"{one}_s3", "condition": one, "seed": 3, "status": "pending"}
        for one in ("grpo+none", "maxrl+none")
    ]
    (campaign / "manifest.json").write_text(json.dumps(manifest))
    folder, about = campaign / "runs" / "grpo+none_s3", {"finished": False, "max_steps": 2}
    algorithm = {"advantage_mode": "grpo", "transform_mode": "none"}
    write_run(folder, 3, [0.1], **about, algorithm=algorithm)
    page = build_page(ReportRequest(campaign))
    assert "Still to come: 2 runs." in page
    assert "<dt>seeds</dt><dd>3</dd>" in page
    assert "<dt>steps</dt><dd>9 of 12</dd>" in page
    cells = (r"<i.*?></i>grpo\+none", "3", "2", "55.0%", "50.0%")
    # The run on its way is not in the training accuracy.
    assert re.search("<tr>" + "".join(f"<td[^>]*>{cell}</td>" for cell in cells), page)


# -- what a reader sees first ----------------------------------------------------------------------


def test_the_answer_and_the_differences_come_before_everything_else(campaign_page: str) -> None:
    ids = ("figure-differences", "figure-held-out", "details", "figures", "runs")
    marks = ("Model lab", 'class="answer"', *(f'id="{name}"' for name in ids))
    places = [campaign_page.index(mark) for mark in marks]
    assert places == sorted(places)
    verdicts = campaign_page[places[1] : places[4]]
    assert verdicts.count("<table>") == 1 and "sd between runs" in verdicts


def test_a_condition_has_one_color_in_figures_tables_and_headings(campaign_page: str) -> None:
    keys = re.findall(r'var\(--series-(\d)\)"></i>([\w+]+)', campaign_page)
    labels = ("maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa")
    assert set(keys) == {(str(place), label) for place, label in enumerate(labels)}
    for svg in re.findall(r"<svg.*?</svg>", campaign_page, re.DOTALL):
        for color, label in re.findall(r"<text[^>]*var\(--series-(\d)\)[^>]*>([\w+]+)<", svg):
            assert (color, label) in keys


def test_names_at_the_ends_of_lines_do_not_overlap(campaign: Path) -> None:
    for drawn in draw_figures(read_report_data(ReportRequest(campaign))):
        names = [text for text in drawn.figure.axes[0].texts if text.get_position() == (5, 0)]
        heights = sorted(text.xy[1] for text in names)  # type: ignore[attr-defined]
        assert np.all(np.diff(heights) > 0.07), drawn.name
        assert all(0 <= height <= 1 for height in heights), drawn.name


def test_a_band_of_rates_stays_between_0_and_1(tmp_path: Path) -> None:
    for seed, rate in ((1, 1.0), (2, 0.2), (3, 1.0)):
        write_run(tmp_path / f"run_{seed}", seed, [rate, rate])
    figures = {one.name: one for one in draw_figures(read_report_data(ReportRequest(tmp_path)))}
    (band,) = figures["training"].figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == 1.0 and 0 <= heights.min() < 0.4


def test_a_figure_that_says_nothing_is_left_out(tmp_path: Path) -> None:
    for share, drawn in (([0.5, 0.5], False), ([0.5, 0.75], True)):
        folder = write_run(tmp_path / str(drawn), 1, [0.0, 0.0])
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line, value in zip(lines, share, strict=True):
            line["informative_fraction"] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        names = [one.name for one in draw_figures(read_report_data(ReportRequest(folder)))]
        assert ("signal" in names) == drawn and "training" in names


def test_a_prompt_is_shown_as_a_chat() -> None:
    chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1=?<|im_end|>\n"
    begun = "<|im_start|>assistant\n"
    assert turns(chatml + begun) == [("system", "Be brief."), ("user", "1+1=?")]
    llama = "<|start_header_id|>user<|end_header_id|>\n\n1+1=?<|eot_id|>"
    assert turns(f"<|begin_of_text|>{llama}") == [("user", "1+1=?")]
    assert turns("<start_of_turn>user\n1+1=?<end_of_turn>\n") == [("user", "1+1=?")]
    assert turns("Q: 1+1=?\nA:") == [("", "Q: 1+1=?\nA:")]


def test_a_run_says_how_many_completions_it_stored_and_whether_it_was_evaluated(
    tmp_path: Path, run_page: str
) -> None:
    assert "Step 1: 8 of 8 completions stored" in run_page
    assert (
        "im_start"
        not in (run_page[run_page.index('id="completions"') : run_page.index('id="tokens"')])
    )
    prompts = re.findall("<h4>lab-[^<]*</h4>", run_page)
    assert len(prompts) == len(set(prompts)) == 4
    assert "<dt>held-out pass@1, step 2</dt>" in run_page
    write_run(tmp_path / "run", 1, [0.5])
    assert "<dd>not evaluated</dd>" in build_page(ReportRequest(tmp_path / "run"))


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_page_and_pictures(
    campaign: Path, tmp_path: Path, capsys: Captured
) -> None:
    page = tmp_path / "new" / "page.html"
    command = ["report", str(campaign), "--output", str(page), "--baseline", "maxrl+gtpo_sepa"]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"Report: {page}" and "Verdicts against maxrl+gtpo_sepa" in page.read_text()
    written = {path.name: path.read_bytes() for path in page.parent.iterdir()}
    pictures = {name for name in written if name != "page.html"}
    assert len(pictures) == 16 and len(said) == 17
    for form, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        drawn = [written[name] for name in pictures if name.endswith(form)]
        assert len(drawn) == 8
        assert all(each.startswith(start) and len(each) > 5000 for each in drawn)
    assert main(command) == 0
    assert all((page.parent / name).read_bytes() == written[name] for name in pictures)


def test_the_steps_of_a_run_that_is_skipped_are_not_waited_for() -> None:
    statuses = [
        SimpleNamespace(state=State.DONE, steps=4, max_steps=4),
        SimpleNamespace(state=State.SKIPPED, steps=0, max_steps=None),
    ]
    data = SimpleNamespace(folder=Path(), statuses=statuses, arms=[], seeds=2)
    assert dict(_campaign_tiles(data))["steps"] == "4"  # type: ignore[arg-type]


def test_every_axis_has_its_name_and_a_bar_is_a_95_percent_interval(
    campaign: Path, run: Path
) -> None:
    for folder in (campaign, run):
        for drawn in draw_figures(read_report_data(ReportRequest(folder))):
            for axes in drawn.figure.axes:
                assert axes.get_xlabel(), drawn.name
                assert axes.get_ylabel() or not axes.spines["left"].get_visible(), drawn.name
            if "standard deviation" in drawn.caption:  # a band, and never a bar
                assert "band: one standard deviation" in drawn.caption


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contrast", "a:b"], "retrain compare DIR --contrast A:B"),
        (["--baseline", "nobody"], "--baseline nobody is not a condition"),
        (["--metric", "luck"], "--metric luck is not a metric"),
        (["--against", "gtpo"], "--tokens-every 1"),
    ],
)
def test_a_mistake_is_one_sentence(
    campaign: Path, arguments: list[str], said: str, capsys: Captured
) -> None:
    assert main(["report", str(campaign), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_device_in_place_of_the_page_stays(
    campaign: Path, tmp_path: Path, capsys: Captured
) -> None:
    os.mkfifo(tmp_path / "null")
    assert main(["report", str(campaign), "--output", f"{tmp_path}/null"]) == 2
    assert "is a folder or a device" in capsys.readouterr().err
    assert (tmp_path / "null").is_fifo()


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_squeeze_that_no_campaign_wrote_is_named(tmp_path: Path, capsys: Captured) -> None:
    folder = write_campaign(tmp_path / "campaign", {"grpo+none": [50]})
    content = json.loads((folder / "manifest.json").read_text())
    table = [{"rank": 1, "mean": "x", "min": 0.1, "max": 0.9}]
    content["squeeze"] = {"table": table, "threshold": 0.9, "rule": "mean", "recommended_rank": 1}
    (folder / "manifest.json").write_text(json.dumps(content))
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 1
    assert "manifest.json has squeeze.table.0.mean = x, which no" in capsys.readouterr().err


def test_without_the_extra_one_sentence_names_it(
    campaign: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(campaign)]) == 3
    error = capsys.readouterr().err
    assert install_hint("report") in error and error.count("\n") == 1
