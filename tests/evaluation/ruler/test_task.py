from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from sekv.errors import DataError
from sekv.evaluation.metrics import METRICS
from sekv.evaluation.ruler.task import RULER_TASKS
from sekv.evaluation.tasks import parse_tasks
from sekv.prompt import split_prompt

LENGTH = 12_288  # one token per byte
ANSWER_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
FIELDS = {"task", "index", "context", "question", "answer_prefix", "answers"}


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Fact {a}.{p}: " + f"river {a} town {p}. " * random.Random(20 * a + p).randrange(5, 40),
                    "qas": [
                        {"question": f"Which fact is {a}.{p}?", "answers": [{"text": f"{a}.{p}"}, {"text": "it"}]},
                        {"question": "Unanswerable?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(12)
            ]
        }
        for a in range(6)
    ]
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps({"data": articles}))
    return path


@pytest.fixture
def hotpot(tmp_path: Path) -> Path:
    entries = [
        {
            "question": f"Who is {q}?",
            "answer": f"End {q}",
            "context": [
                [f"Title {q}-{i}", [f"Sentence {q} {i}. " * random.Random(q * 10 + i).randrange(3, 25), f"End {q}."]]
                for i in range(10)
            ],
        }
        for q in range(20)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def spec(squad: Path, hotpot: Path):
    files = {"qa_1": squad, "qa_2": hotpot}

    def make(name: str, length: int = LENGTH) -> str:
        return f"ruler:{name}:{length}" + (f"[data={files[name]}]" if name in files else "")

    return make


def samples(spec: str, tokenizer, n: int = 2, seed: int = 0):
    (task,) = parse_tasks([spec])
    return task.samples(tokenizer, 1 << 20, n, seed)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_prompt_and_answer_fill_the_length_within_one_percent(name: str, spec, tokenizer) -> None:
    for sample in samples(spec(name), tokenizer):
        prompt = split_prompt(tokenizer, sample.context, sample.question, sample.answer_prefix)
        assert sample.max_new_tokens == ANSWER_TOKENS.get(name, 128)
        assert 0.99 * LENGTH <= len(prompt.ids) + sample.max_new_tokens <= LENGTH


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_sample_has_the_published_fields_and_the_seed_fixes_it(name: str, spec, tokenizer) -> None:
    first, second = samples(spec(name, 8192), tokenizer)
    assert asdict(first).keys() >= FIELDS
    assert (first.task, first.index, second.index) == (f"ruler:{name}:8192", 0, 1)
    assert first.context != second.context
    assert samples(spec(name, 8192), tokenizer) == [first, second]
    assert samples(spec(name, 8192), tokenizer, seed=1)[0].context != first.context
    for text in (first.question, first.answer_prefix, *first.answers):
        assert text == text.strip() != ""


# (needles in the text, answers, plural wording, value, lines of the haystack)
NIAH = {
    "niah_single_1": (1, 1, False, r"\d{7}", "noise"),
    "niah_single_2": (1, 1, False, r"\d{7}", "essay"),
    "niah_single_3": (1, 1, False, r"[0-9a-f-]{36}", "essay"),
    "niah_multikey_1": (4, 1, False, r"\d{7}", "essay"),
    "niah_multikey_2": (None, 1, False, r"\d{7}", "needle"),
    "niah_multikey_3": (None, 1, False, r"[0-9a-f-]{36}", "needle"),
    "niah_multivalue": (4, 4, True, r"\d{7}", "essay"),
    "niah_multiquery": (4, 4, True, r"\d{7}", "essay"),
}


@pytest.mark.parametrize("name", NIAH)
def test_needle_tasks_hide_what_they_ask_for(name: str, spec, tokenizer) -> None:
    needles, answers, plural, value, haystack = NIAH[name]
    kind = "uuid" if "[0-9a-f" in value else "number"
    for sample in samples(spec(name, 8192), tokenizer):
        found = re.findall(rf"One of the special magic {kind}s for (.+?) is: ({value})\.", sample.context)
        assert len(found) == needles if needles else len(found) > 20
        assert len(set(found)) == len(found) == len({v for _, v in found})
        assert len(sample.answers) == answers
        asked = [key for answer in sample.answers for key, v in found if v == answer]
        assert len(asked) == answers
        for key in asked:
            assert key in sample.question
            assert key in sample.answer_prefix
        intro, body = sample.context.split("\n", 1)
        noun = kind + "s" * plural
        hidden = f"Some special magic {noun} are" if plural else f"A special magic {noun} is"
        assert intro == (
            f"{hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {noun} afterwards."
        )
        assert (body.count("The grass is green.") > 20) == (haystack == "noise")
        if haystack == "essay":
            assert "\n" not in body
        assert (sample.depth is not None) == (needles in (1, None))


def test_an_essay_can_be_given_and_a_short_one_is_repeated(tmp_path: Path, tokenizer) -> None:
    essay = tmp_path / "essay.txt"
    essay.write_text("One  sentence here.\nAnother follows it. " * 3, encoding="utf-8")
    (sample,) = samples(f"ruler:niah_single_2:2048[haystack={essay}]", tokenizer, 1)
    assert sample.context.count("One sentence here. Another follows it.") > 20


def test_variable_tracking_follows_one_chain_after_a_worked_example(spec, tokenizer) -> None:
    for sample in samples(spec("vt"), tokenizer):
        example, main = sample.context.split("\n\n\n\n")
        names = re.findall(r"VAR ([A-Z]+) = ", main)
        assert tuple(names) == sample.answers
        assert {len(name) for name in names} == {5}
        value = re.search(rf"VAR {names[0]} = (\d{{5}}) ", main)
        assert value is not None
        assert f"assigned the value {value[1]} in the text above." in sample.question
        assert re.findall(r"= VAR ([A-Z]+) ", main) == names[:-1]
        assert example.endswith("they are:  " + " ".join(re.findall(r"VAR ([A-Z]{3}) =", example)))
        assert main.endswith("again.\n")


@pytest.mark.parametrize(("length", "often", "seldom"), [(LENGTH, 30, 3), (4000, 6, 1)])
def test_common_words_are_the_ten_most_frequent(spec, tokenizer, length: int, often: int, seldom: int) -> None:
    (sample,) = samples(spec("cwe", length), tokenizer, 1)
    main = sample.context.rsplit("\n", 1)[1]
    words = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", main)
    counts = {word: words.count(word) for word in set(words)}
    assert {word for word, n in counts.items() if n == often} == set(sample.answers)
    assert set(counts.values()) == {often, seldom}
    assert len(sample.answers) == 10
    assert sample.context.count("Memorize the ones that appear most often.") == 2


def test_frequent_words_are_the_three_after_the_dots(spec, tokenizer) -> None:
    (sample,) = samples(spec("fwe"), tokenizer, 1)
    words = sample.context.removeprefix(sample.context.split("coded words. ")[0] + "coded words. ").split()
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert ranked[0] == "..."
    assert tuple(ranked[1:4]) == sample.answers
    # alpha = 2: the k-th word is there 1/k^2 times as often as the first
    assert words.count(ranked[1]) / words.count("...") == pytest.approx(1 / 4, rel=0.02)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_documents_hold_the_answer_and_alternatives_are_scored_as_such(name: str, spec, tokenizer) -> None:
    for sample in samples(spec(name), tokenizer):
        assert sample.answers[0] in sample.context
        assert sample.context.startswith("Answer the question based on the given documents. Only give me")
        assert sample.context.endswith("do not output any other words.\n")
        documents = re.findall(r"^Document (\d+):$", sample.context, re.M)
        assert documents == [str(i + 1) for i in range(len(documents))]
        assert len(documents) > 10
        assert METRICS[sample.metric](f"perhaps {sample.answers[0]}", sample.answers) == 100.0
    with pytest.raises(DataError, match=f"ruler:{name}:4096 needs the file of"):
        parse_tasks([f"ruler:{name}:4096"])


def test_a_data_file_of_another_form_is_refused(hotpot: Path, squad: Path, tmp_path: Path) -> None:
    for text in (f"qa_1:4096[data={hotpot}]", f"qa_2:4096[data={squad}]"):
        with pytest.raises(DataError, match="JSON as published"):
            parse_tasks([f"ruler:{text}"])
    with pytest.raises(DataError, match="cannot be read"):
        parse_tasks([f"ruler:qa_1:4096[data={tmp_path}/gone]"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ruler", "is malformed"),
        ("ruler:vt", "is malformed"),
        ("ruler:vt:4096[", "is malformed"),
        ("ruler:nope:4096", "unknown RULER task 'nope'; known: niah_single_1"),
        ("ruler:vt:100", "at least 256"),
        ("ruler:vt:4096[haystack=x]", "has no option 'haystack'; its options: none"),
        ("ruler:niah_single_2:4096[hay=x]", "has no option 'hay'; its options: haystack"),
        ("ruler:niah_single_2:4096[haystack]", "option 'haystack' of task .* is malformed"),
        ("ruler:niah_single_2:4096[haystack=gone.txt]", "haystack file 'gone.txt' cannot be read"),
    ],
)
def test_a_mistake_is_named(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_tasks([spec])


def test_a_length_beyond_the_backbone_or_below_the_example_is_refused(spec, tokenizer) -> None:
    (task,) = parse_tasks(["ruler:vt:8192"])
    with pytest.raises(DataError, match="does not fit the backbone: it reads at most 4096"):
        task.samples(tokenizer, 4096, 1, 0)
    with pytest.raises(DataError, match="ruler:vt:512 is too short"):
        samples("ruler:vt:512", tokenizer)
