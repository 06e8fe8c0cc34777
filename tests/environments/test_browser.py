"""The pages as a browser shows them: the report and the site, on a desktop and a
phone, light and dark, by keyboard and as a screen reader hears them.

`make test-environments` installs Chromium where it can, and mkdocs-material.
"""

import functools
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from retrain.report.data import ReportRequest
from retrain.report.page import build_page
from tests.browser import CHROMIUM, Browser
from tests.runs import small, small_run
from tests.showcase import write_showcase

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.environments,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium is installed: no page was looked at in a browser"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_showcase(tmp_path_factory.mktemp("logs") / "campaign")


@pytest.fixture(scope="module")
def pages(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a campaign, and of a real run with tokens."""
    folder = tmp_path_factory.mktemp("pages")
    config = small(
        folder / "run",
        algorithm={"transform_mode": "gtpo_sepa"},
        training={"max_steps": 2},
        evaluation={"at_start": True, "at_end": True, "max_examples": 4},
        logging={"tokens_every": 1},
    )
    run = small_run(config, quiet=True).folder
    requests = {
        "campaign": ReportRequest(campaign),
        "run": ReportRequest(run, against=["gtpo_hicra"]),
    }
    for name, request in requests.items():
        (folder / f"{name}.html").write_text(build_page(request), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in requests}


TOO_WIDE = """[...document.querySelectorAll("body *")]
    .filter(e => !e.closest(".wide") && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + "." + e.className).slice(0, 5)"""
OVERLAPS = """[...document.querySelectorAll("figure svg")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text")]
        .map(t => [t.textContent, t.getBoundingClientRect()]);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
        && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4)
        .map(([b]) => a + " / " + b));
})"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("name", ["campaign", "run"])
def test_a_report_looks_right(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.said.clear()
    browser.requested.clear()
    browser.open(pages[name].as_uri(), width, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    assert browser.evaluate(OVERLAPS) == []
    assert browser.evaluate("document.title") == f"{name} - retrain"
    assert browser.requested == [pages[name].as_uri()] and browser.said == []
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")


def test_a_token_that_is_touched_shows_its_numbers(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["run"].as_uri(), 375)
    color = "getComputedStyle(document.querySelector('.flow span')).backgroundColor"
    by_advantage = browser.evaluate(color)
    browser.evaluate("document.querySelector('.flow span').click()")
    assert "surprisal" in browser.evaluate("document.querySelector('.numbers').textContent")
    browser.evaluate("document.querySelector('input[value=s]').click()")
    assert browser.evaluate("document.querySelector('.view').dataset.by") == "s"
    assert browser.evaluate(color) != by_advantage


def test_the_tokens_are_read_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    """Tab stops once at each completion, arrows go from token to token, and a screen reader hears
    the text of the token and then its numbers.
    """
    browser.open(pages["run"].as_uri(), 1280)
    reached = []
    for _ in range(200):
        browser.press("Tab")
        reached.append(browser.evaluate("document.activeElement.className.split(' ')[0]"))
        if browser.evaluate("!!document.activeElement.closest('.flow')"):
            break
    first = browser.evaluate(
        "[...document.querySelectorAll('.flow span')].slice(0, 2).map(token => token.textContent)"
    )
    assert browser.evaluate("document.activeElement.textContent") == first[0], reached
    browser.press("ArrowRight")
    assert browser.evaluate("document.activeElement.textContent") == first[1]
    assert "surprisal" in browser.evaluate("document.querySelector('.numbers').textContent")
    browser.press("Tab")
    assert not browser.evaluate(
        "document.activeElement.closest('.flow') === document.querySelector('.flow')"
    )
    named = browser.accessible()
    (listed, *_) = [node for node in named if node["role"] == "listbox"]
    assert listed["name"] == "Tokens"
    options = [node for node in named if node["role"] == "option"]
    assert options[0]["name"] and "surprisal" in options[0]["description"]
    # Every picture and every thing that takes a key has a name.
    spoken = {"image", "img", "link", "radio", "button", "DisclosureTriangle"}
    assert not [node for node in named if node["role"] in spoken and not node["name"]]


# -- the site --------------------------------------------------------------------------------------

SITE_PAGES = (
    "", "getting-started/", "configuration/", "comparing/", "papers/", "inference-engines/", "reliability/",
    "rewards/", "campaigns/", "capacity-planning/", "resuming/", "coming-from/", "reading-a-run/", "plugins/",
    "models/", "lab/", "dev/engines/", "replications/",
)  # fmt: skip
SIDEWAYS = """[...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText.slice(0, 40))"""
BROKEN_WORDS = r"""[...document.querySelectorAll(".md-typeset__scrollwrap :is(th, td)")].flatMap(cell => {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), range = new Range(), out = [];
    while (texts.nextNode()) {
        const text = texts.currentNode;
        if (text.parentElement.closest(cell.cellIndex || innerWidth < 720 ? "code, a" : "a")) continue;
        for (const word of text.data.matchAll(/\b[a-z_]{3,20}\b/gi)) {
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1)
                out.push(word[0]);
        }
    }
    return out;
})"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: the site was not looked at in a browser")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_site_looks_right(browser: Browser, site: str, width: int, dark: bool) -> None:
    for page in SITE_PAGES:
        browser.said.clear()
        browser.requested.clear()
        browser.open(site + page, width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, page
        assert browser.evaluate(SIDEWAYS) == [], page
        assert browser.evaluate(BROKEN_WORDS) == [], page
        assert browser.said == [], (page, browser.requested)
        outside = [
            address
            for address in browser.requested
            if not address.startswith((site, "data:", "blob:"))
        ]
        assert not outside
        scheme = browser.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if dark else "default")


def test_the_search_of_the_site_finds_a_key(browser: Browser, site: str) -> None:
    browser.open(site, 1280)
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.write("max_grad_norm")
    browser.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
