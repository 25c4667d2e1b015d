"""The table of an evaluation that documents show."""

from __future__ import annotations

from dataclasses import replace

from sekv.evaluation.markdown import scores_markdown
from sekv.evaluation.records import summarise
from tests.evaluation.result_folders import make_records


def test_a_row_per_policy_and_a_column_per_task_and_budget():
    results = summarise(make_records(budgets=(0.2, 0.1)))
    title, blank, head, rule, *rows = scores_markdown(results).splitlines()
    assert "compressed before the question is known" in title
    assert blank == ""
    names = [name.strip() for name in head.strip("|").split("|")]
    assert names[:3] == ["policy", "niah:512, n = 5, 20%", "niah:512, n = 5, 10%"]
    assert names[-4:] == ["resident, 10%", "moved per token, 10%", "resident, 20%", "moved per token, 20%"]
    assert rule.count("---") == len(names)
    cells = {row[0].strip(): row[1:] for row in ([c.strip() for c in row.strip("|").split("|")] for row in rows)}
    assert list(cells) == ["`full`", "`nestedkv`", "`sekv[routing=mean]`"]
    assert cells["`full`"][0] == "100.0 ± 0"
    # Two of five samples at 10%; 0.1 rows of 512 and of 1,024 tokens at 23,040 bytes.
    assert cells["`nestedkv`"][1].startswith("40.0 ± ")
    assert cells["`nestedkv`"][4] == "1.77 MB"


def test_what_is_missing_stays_empty():
    results = summarise(make_records())
    partial = [r for r in results if (r.policy, r.task) != ("nestedkv", "niah:512")]
    partial = [replace(r, query_aware=True) for r in partial]
    text = scores_markdown(partial)
    assert "question compressed with the context" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| `nestedkv`"))
    assert row.split("|")[2:4] == ["  ", "  "]
