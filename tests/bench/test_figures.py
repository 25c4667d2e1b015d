"""The folder of figures: commands live beside one another, and what cannot be read is refused."""

from __future__ import annotations

import csv
import json

import pytest

from sekv.bench.figures import FIGURES, SETTINGS, TABLE, Figure, Folder, Setting, read_figures
from sekv.errors import DataError


@pytest.fixture
def setting(tiny_backbone):
    return Setting.here(tiny_backbone, repeats=3, steps=8, adapter="untrained")


def figure(what, seconds):
    return Figure(what, "sekv[a=1,b=2]", 4096, 0.1, seconds, 0.8, 10, 20, 1.5)


def test_a_command_replaces_its_own_figures_only(tmp_path, setting):
    Folder.open(tmp_path / "new").with_figures("decode", [figure("decode", 1.0)], setting).write()
    Folder.open(tmp_path / "new").with_figures("prefill", [figure("build", 2.0)], setting).write()
    Folder.open(tmp_path / "new").with_figures("decode", [figure("end_to_end", 3.0)], setting).write()
    found = Folder.open(tmp_path / "new")
    assert [(f.what, f.median_seconds) for f in found.figures] == [("build", 2.0), ("end_to_end", 3.0)]
    assert dict(found.settings) == {"decode": setting, "prefill": setting}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [TABLE, FIGURES, SETTINGS]


def test_the_files_hold_what_was_promised(tmp_path, setting):
    Folder.open(tmp_path).with_figures("decode", [figure("decode", 1.0)], setting).write()
    (entry,) = json.loads((tmp_path / FIGURES).read_text())
    promised = {"what", "policy", "length", "budget", "median_seconds", "ratio_to_full", "resident_bytes"}
    assert promised | {"host_bytes", "moved_bytes_per_token"} <= entry.keys()
    with (tmp_path / TABLE).open() as file:
        (row,) = csv.DictReader(file)
    assert (row["policy"], row["ratio_to_full"], row["peak_bytes"]) == ("sekv[a=1,b=2]", "0.8", "")
    stated = json.loads((tmp_path / SETTINGS).read_text())["decode"]
    assert {"device", "threads", "dtype", "versions", "date", "load"} <= stated.keys()
    assert stated["versions"].keys() == {"sekv", "torch", "transformers", "numpy", "python"}


@pytest.mark.parametrize("content", ["{", "[1]", '[{"what": "decode", "speed": 1}]'])
def test_what_is_no_figures_is_refused_before_anything_is_measured(tmp_path, content):
    (tmp_path / FIGURES).write_text(content)
    with pytest.raises(DataError, match=r"bench\.json"):
        Folder.open(tmp_path)
    with pytest.raises(DataError, match=r"bench\.json"):
        read_figures(tmp_path / FIGURES)


def test_settings_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / SETTINGS).write_text('{"decode": {"speed": 1}}')
    with pytest.raises(DataError, match="measured on"):
        Folder.open(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        Folder.open(tmp_path / "file")
