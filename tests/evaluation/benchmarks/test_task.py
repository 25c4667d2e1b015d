from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sekv.errors import DataError
from sekv.evaluation.benchmarks import infinitebench, longbench, loogle
from sekv.evaluation.benchmarks.task import BENCHMARKS
from sekv.evaluation.metrics import METRICS
from sekv.evaluation.runner import evaluate
from sekv.evaluation.tasks import parse_tasks

TEXT = "Ann keeps bees. Bob keeps a goat.\n"


def write(folder: Path, name: str, *rows: dict[str, Any]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def samples(spec: str, tokenizer, limit: int | None = None):
    (task,) = parse_tasks([spec])
    return task.samples(tokenizer, 4096, limit, 0)


@pytest.mark.parametrize("name", longbench.KINDS)
def test_longbench_asks_the_published_prompt(name: str, tmp_path: Path, tokenizer) -> None:
    row = {"context": TEXT, "input": "Who?", "answers": ["Ann", "A."], "all_classes": ["x", "y"], "length": 4000}
    (sample,) = samples(f"longbench:{name}[data={write(tmp_path, name, row)}]", tokenizer)
    prompt = sample.context + sample.separator + sample.question
    assert prompt == longbench.KINDS[name].template.replace("{context}", TEXT).replace("{input}", "Who?")
    assert sample.context.endswith(TEXT)
    assert (sample.answers, sample.classes) == (("Ann", "A."), ("x", "y"))
    assert sample.metric in METRICS
    assert sample.chat == (name not in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"))


def test_longbench_e_is_grouped_by_length(tmp_path: Path, tokenizer) -> None:
    rows = [
        {"context": TEXT, "input": "q", "answers": ["a"], "all_classes": None, "length": n}
        for n in (10, 3999, 4000, 7999, 8000)
    ]
    made = samples(f"longbench_e:2wikimqa[data={write(tmp_path, '2wikimqa_e', *rows)}]", tokenizer)
    groups = [sample.task.removeprefix("longbench_e:2wikimqa/") for sample in made]
    assert groups == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert sum(kind.extended for kind in longbench.KINDS.values()) == 13


@pytest.mark.parametrize("name", infinitebench.KINDS)
def test_infinitebench_fills_every_place_of_its_prompt(name: str, tmp_path: Path, tokenizer) -> None:
    call = "Please give me the exact number of the return value of func_7(3). Be concise."
    options = ["one", "two", "three", "four"]
    choice = infinitebench.KINDS[name].metric == "choice"
    row = {
        "id": 0,
        "context": TEXT,
        "input": call if name == "code_run" else "Who is it?",
        "answer": ["three"] if choice else [4, 5] if name == "math_calc" else 4,
        "options": options if choice else [],
    }
    (sample,) = samples(f"infinitebench:{name}[data={write(tmp_path, name, row)}]", tokenizer)
    assert not re.search(r"\{\w+\}", sample.context + sample.question)
    assert sample.context.endswith(TEXT)
    assert sample.answers == (("C",) if choice else ("4", "5") if name == "math_calc" else ("4",))
    if choice:
        assert "A. one\nB. two\nC. three\nD. four" in sample.question
    if name == "code_run":
        assert sample.question.endswith("Please compute the exact value of func_7(3). The value of func_7(3) is")


@pytest.mark.parametrize("name", loogle.KINDS)
def test_loogle_asks_every_question_of_a_document_in_both_schemas(name: str, tmp_path: Path, tokenizer) -> None:
    old = {"input": TEXT, "qa_pairs": str([{"Q": "Who?", "A": "Ann"}, {"Q": "What?", "A": {"<mask-0>": "bees"}}])}
    new = {"context": TEXT, "question": "Where?", "answer": "here"}
    summary = {"input": TEXT, "qa_pairs": "none", "output": "Bees and goats."}
    made = samples(f"loogle:{name}[data={write(tmp_path, name, old, new, summary)}]", tokenizer)
    assert [sample.answers for sample in made] == [("Ann",), ('{"<mask-0>": "bees"}',), ("here",), ("Bees and goats.",)]
    assert len({sample.context for sample in made}) == 1
    assert [sample.index for sample in made] == [0, 1, 2, 3]


def test_gsm8k_has_fifty_shots_before_every_question(tmp_path: Path, tokenizer) -> None:
    rows = [{"question": f"What is {i} + 1000?", "answer": f"Add.\n#### {i + 1000:,}"} for i in range(60)]
    write(write(tmp_path, "train", *rows), "test", *rows[-2:])
    one, two = samples(f"gsm8k[data={tmp_path}]", tokenizer)
    assert one.context == two.context
    assert one.context.count("Question: ") == one.context.count("#### ") == 50
    assert (one.context + one.question).endswith("#### 1,049\n\nQuestion: What is 58 + 1000?\nAnswer:")
    assert one.answers == ("1058",)
    assert not one.chat


def test_mmlu_pro_has_five_shots_of_its_category(tmp_path: Path, tokenizer) -> None:
    rows = [
        {
            "question": f"{category} {i}?",
            "options": ["no", "yes", "maybe"],
            "answer": "B",
            "cot_content": "A: Let's think step by step. It is so. The answer is (B).",
            "category": category,
        }
        for i in range(7)
        for category in ("law", "math")
    ]
    write(write(tmp_path, "validation", *rows), "test", *rows)
    (sample,) = samples(f"mmlu_pro:math[data={tmp_path}]", tokenizer, 1)
    assert "about math" in sample.context
    assert "law" not in sample.context
    assert sample.context.count("The answer is (B).") == 5
    end = "Question:\nmath 0?\nOptions:\nA. no\nB. yes\nC. maybe\nAnswer: Let's think step by step."
    assert sample.question.endswith(end)
    assert len(samples(f"mmlu_pro[data={tmp_path}]", tokenizer)) == 14
    with pytest.raises(DataError, match="no question of category 'art'"):
        samples(f"mmlu_pro:art[data={tmp_path}]", tokenizer)


def test_a_prompt_too_long_loses_its_middle_to_the_token(tiny_backbone, tmp_path: Path) -> None:
    row = {"context": TEXT * 40, "input": "Who?", "answers": ["Ann"], "all_classes": None, "length": 1}
    folder = write(tmp_path, "trec", row)
    spec = f"longbench:trec[data={folder},max_length=500,max_new_tokens=5]"
    evaluate(tiny_backbone, ["full"], [spec], [1.0], tmp_path / "out")
    (record,) = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    asked = len("\nWho?")  # one token per byte
    assert record["context_tokens"] + asked == 500
    whole = len("Please determine the type of the question below. Here are some examples of questions.\n\n" + TEXT * 40)
    bos = 0
    assert record["truncated"] == whole + bos + asked - 500
    assert record["new_tokens"] <= 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("longbench:nope", "unknown task 'longbench:nope'; longbench has: narrativeqa, qasper"),
        ("longbench", "unknown task 'longbench'"),
        ("longbench_e:musique", "unknown task 'longbench_e:musique'"),
        ("gsm8k:x", "gsm8k is one data set"),
        ("gsm8k[shots=8]", "has no option 'shots'; its options: data, max_length"),
        ("loogle:longdep_qa[max_length=0]", "max_length=0 is not a whole number"),
        ("mmlu_pro[data", "is malformed"),
    ],
)
def test_a_mistake_is_named(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        parse_tasks([spec])


def test_files_that_are_missing_or_of_another_schema_are_named(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(DataError, match=r"no trec.jsonl or test.jsonl .* in .*copy the published file"):
        samples(f"longbench:trec[data={tmp_path}]", tokenizer)
    write(tmp_path, "trec", {"text": "x"})
    with pytest.raises(DataError, match=r"not in the published schema .KeyError: 'context'"):
        samples(f"longbench:trec[data={tmp_path}]", tokenizer)
    (tmp_path / "trec.jsonl").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        samples(f"longbench:trec[data={tmp_path}]", tokenizer)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_published_files_are_asked_for(tokenizer, monkeypatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    for benchmark in BENCHMARKS:
        name = {"longbench": ":trec", "longbench_e": ":trec", "infinitebench": ":passkey", "loogle": ":longdep_qa"}
        spec = benchmark + name.get(benchmark, "")
        with pytest.raises(DataError, match=rf"{spec}: .* cannot be had from the Hub .*\[data=FOLDER\]"):
            samples(spec, tokenizer)
