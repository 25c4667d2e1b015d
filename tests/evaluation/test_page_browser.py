"""The report page in a real browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sekv.evaluation.page import write_page
from sekv.evaluation.records import Key
from tests.evaluation.result_folders import HOSTILE, make_record, make_records, make_trace, write_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--allow-file-access-from-files",
    "--virtual-time-budget=5000", "--dump-dom",
]  # fmt: skip
KEY = Key("niah:512", 0, 1, "sekv[routing=mean]", 0.1)
LAYERS, HEADS = 3, 2
NARROW = """<!doctype html><iframe src="PAGE" style="width:360px;height:900px;border:0"></iframe><script>
onload = () => { const root = frames[0].document.documentElement;
  document.body.append(`${root.scrollWidth - root.clientWidth} too wide, ready: ${root.dataset.ready}`); };</script>"""


class Dom(HTMLParser):
    """The attributes of all elements after the page's script has run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def browse(address: str, profile: Path) -> str:
    """The page's elements after its script has run; fails when the script reports anything."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not said
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [*make_records(), make_record("t", 0, "full", 0.1, 0.0, output=HOSTILE, depth=None)]
    traces = {KEY._replace(number=i): make_trace(LAYERS, HEADS, seed=i) for i in range(2)}
    return write_page(write_folder(tmp_path_factory.mktemp("results"), records, traces))


@pytest.mark.parametrize(("address", "number", "layer", "head", "step"), [
    ("", 0, None, None, None),
    ("#trace=1&layer=2&head=1&step=3", 1, 2, 1, 3),
])  # fmt: skip
def test_the_viewer_counts_the_zooms_of_what_is_chosen(page, tmp_path, address, number, layer, head, step) -> None:
    text = browse(page.as_uri() + address, tmp_path)
    dom = Dom(text)
    assert dom.elements[0][1]["data-ready"] == "true"
    counts = [int(told["data-zooms"] or 0) for tag, told in dom.elements if tag == "span" and "data-zooms" in told]
    zooms = make_trace(LAYERS, HEADS, seed=number).answer_zooms
    chosen = tuple(slice(None) if i is None else slice(i, i + 1) for i in (layer, head, step))
    assert counts == zooms[chosen].sum(axis=(0, 1, 2)).tolist()
    assert np.sum(counts) > 0
    if step is not None:
        assert f"Token {step + 1} of 4" in text


def test_charts_are_drawn_and_hostile_text_does_nothing(page: Path, tmp_path: Path) -> None:
    text = browse(page.as_uri(), tmp_path)
    dom = Dom(text)
    charts = [told["data-chart"] for tag, told in dom.elements if tag == "figure" and "data-chart" in told]
    assert charts[:3] == ["niah:512 (n = 5)", "niah:1024 (n = 5)", "t (n = 1)"]
    assert len(charts) == 3 + 6
    assert sum(tag == "svg" and told.get("role") == "img" for tag, told in dom.elements) == len(charts)
    assert re.search(r"<title>[^<]*: sekv report</title>", text)
    regions = [told for _, told in dom.elements if told.get("role") == "region"]
    assert len(regions) > len(charts)  # whatever scrolls can be reached by keyboard and has a name
    assert all(told["tabindex"] == "0" and (told.get("aria-label") or told.get("aria-labelledby")) for told in regions)


def test_nothing_is_wider_than_a_phone(page: Path, tmp_path: Path) -> None:
    frame = page.parent / "narrow.html"
    frame.write_text(NARROW.replace("PAGE", page.name))
    assert ">0 too wide, ready: true" in browse(frame.as_uri(), tmp_path).replace("\n", "")
