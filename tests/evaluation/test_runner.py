from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sekv import memory_cache
from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.errors import AdapterError, BudgetError, DataError, PolicyError
from sekv.evaluation import asking
from sekv.evaluation.runner import Evaluation, evaluate
from sekv.evaluation.shards import Shard
from sekv.prompt import split_prompt

POLICIES = ["full", "keydiff", "streaming_llm"]
RESULT_FIELDS = {
    "policy", "task", "budget", "query_aware", "n", "score", "rows", "resident_bytes", "host_bytes",
    "moved_bytes_per_token", "seconds",
}  # fmt: skip
SENTENCES = [f"Room {i} has the key number {1000 + 37 * i}." for i in range(12)]


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    lines = [
        {
            "task": "rooms",
            "context": " ".join(SENTENCES[i:] + SENTENCES[:i]),
            "question": f"What is the number of room {i}?",
            "answer_prefix": "It is",
            "answers": [str(1000 + 37 * i)],
            "max_new_tokens": 8,
        }
        for i in range(3)
    ]
    path = tmp_path / "rooms.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluation_end_to_end(tiny_backbone, task_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen = []
    evaluation = Evaluation.plan(POLICIES, [str(task_file), "niah:512"], [0.3, "1.0"], out, limit=2)
    questions = evaluation.prepare(tiny_backbone)
    assert not out.exists()
    journal = evaluation.journal(tiny_backbone, questions)
    results = evaluation.run(tiny_backbone, questions, journal, on_record=seen.append)
    assert not [path for path in out.rglob("*") if path.suffix == ".lock"]
    assert len(seen) == len(evaluation.keys(questions)) == 4 * 3 * 2
    names = ["results.csv", "results.json", "results.md", "run.json", "samples.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == names
    written = json.loads((out / "results.json").read_text())
    assert {(r["policy"], r["task"], r["budget"]) for r in written} == {
        (policy, task, budget) for policy in POLICIES for task in ("rooms", "niah:512") for budget in (0.3, 1.0)
    }
    assert len(written) == len(results) == 12
    for result in written:
        assert result.keys() >= RESULT_FIELDS
        assert result["n"] == 2
        assert 0 <= result["score"] <= 100
        whole = result["policy"] == "full" or result["budget"] == 1.0
        assert result["rows"] == pytest.approx(result["context_tokens"] * (1.0 if whole else 0.3), abs=1.0)
        assert result["moved_bytes_per_token"] == result["host_bytes"] == 0
        assert result["query_aware"] is False
    by_key = {(r["policy"], r["task"], r["budget"]): r for r in written}
    full, small = by_key["full", "rooms", 0.3], by_key["keydiff", "rooms", 0.3]
    assert small["resident_bytes"] < 0.5 * full["resident_bytes"]


@pytest.mark.parametrize("query_aware", [False, True])
def test_budget_one_gives_the_text_of_plain_generate(tiny_backbone, task_file: Path, tmp_path: Path, query_aware: bool):
    policies = [*POLICIES, "snapkv", "nestedkv", "hubkv:keydiff", "sekv[routing=mean]"]
    evaluate(tiny_backbone, policies, [str(task_file)], [1.0], tmp_path / "out", query_aware=query_aware)
    expected = []
    for line in load(task_file):
        ids = split_prompt(tiny_backbone.tokenizer, line["context"], line["question"], line["answer_prefix"]).ids
        row = torch.tensor([ids])
        output = tiny_backbone.model.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=8, pad_token_id=0
        )
        expected.append(tiny_backbone.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
    samples = load(tmp_path / "out" / "samples.jsonl")
    assert {sample["query_aware"] for sample in samples} == {query_aware}
    for policy in policies:
        assert [sample["output"] for sample in samples if sample["policy"] == policy] == expected


def test_the_question_is_compressed_only_when_query_aware(tiny_backbone, task_file: Path, tmp_path: Path) -> None:
    lengths = {}
    for aware in (False, True):
        evaluate(tiny_backbone, ["full"], [str(task_file)], [1.0], tmp_path / str(aware), query_aware=aware, limit=1)
        (lengths[aware],) = [sample["context_tokens"] for sample in load(tmp_path / str(aware) / "samples.jsonl")]
    line = load(task_file)[0]
    prompt = split_prompt(tiny_backbone.tokenizer, line["context"], line["question"], line["answer_prefix"])
    assert lengths == {False: len(prompt.context_ids), True: len(prompt.ids) - 1}


def test_two_runs_with_one_seed_agree_and_a_restart_replaces_the_old(tiny_backbone, tmp_path: Path) -> None:
    def run(folder: str, seed: int) -> list[dict[str, Any]]:
        out = tmp_path / folder
        evaluate(tiny_backbone, ["keydiff"], ["niah:400"], [0.2], out, limit=2, seeds=[seed], restart=True)
        return [
            {key: value for key, value in sample.items() if "seconds" not in key and key != "seed"}
            for sample in load(tmp_path / folder / "samples.jsonl")
        ]

    first = run("a", 1)
    assert first == run("b", 1)
    assert run("a", 2) != first
    assert len(load(tmp_path / "a" / "samples.jsonl")) == 2


def test_each_context_is_read_once(tiny_backbone, task_file: Path, tmp_path: Path, monkeypatch) -> None:
    reads = []
    real = asking.read_context
    monkeypatch.setattr(asking, "read_context", lambda *args: reads.append(args) or real(*args))
    evaluate(tiny_backbone, POLICIES, [str(task_file)], [0.3, 0.6], tmp_path / "out")
    assert len(reads) == 3


def test_a_long_context_is_shortened_by_whole_ids_and_counted(
    make_tiny_backbone, task_file: Path, tmp_path: Path
) -> None:
    backbone = make_tiny_backbone("llama", max_position_embeddings=256)
    (result,) = evaluate(backbone, ["full"], [str(task_file)], [1.0], tmp_path / "out", limit=1)
    (sample,) = load(tmp_path / "out" / "samples.jsonl")
    line = load(task_file)[0]
    prompt = split_prompt(backbone.tokenizer, line["context"], line["question"], line["answer_prefix"])
    assert sample["context_tokens"] == 256 - 8 - len(prompt.question_ids)
    assert sample["truncated"] == len(prompt.context_ids) - sample["context_tokens"] > 0
    assert result.truncated == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policies": ["full", "nope"]}, PolicyError, "unknown policy 'nope'"),
        ({"policies": ["keydiff[nope=1]"]}, PolicyError, "no option 'nope'"),
        ({"policies": []}, PolicyError, "no policy given"),
        ({"policies": ["sekv"]}, PolicyError, "adapter"),
        ({"tasks": ["nope"]}, DataError, "unknown task 'nope'"),
        ({"budgets": ["much"]}, BudgetError, "budget 'much' is not a number"),
        ({"budgets": [0.0]}, BudgetError, "outside"),
        ({"budgets": []}, BudgetError, "no budget given"),
        ({"limit": 0}, DataError, "limit 0"),
        ({"adapter": "no/such/folder"}, AdapterError, "does not exist"),
    ],
)
def test_a_mistake_is_found_without_a_backbone(
    task_file: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {
        "policies": ["full"],
        "tasks": [str(task_file)],
        "budgets": [0.5],
        "output": tmp_path / "out",
    }
    with pytest.raises(error, match=message):
        Evaluation.plan(**(good | change))
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(task_file: Path, tmp_path: Path) -> None:
    for output in (task_file, task_file / "below"):
        with pytest.raises(DataError, match="is a file"):
            Evaluation.plan(["full"], [str(task_file)], [0.5], output)


@pytest.mark.parametrize("output", ["/proc/x", "/proc/x/y", "x" * 300])
def test_an_output_that_cannot_be_made_is_refused(task_file: Path, tmp_path: Path, monkeypatch, output: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"the output folder .* cannot be written: "):
        Evaluation.plan(["full"], [str(task_file)], [0.5], output)
    assert sorted(tmp_path.iterdir()) == before


def test_trying_the_output_leaves_nothing_new_and_nothing_old_out(task_file: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("x")
    for output in (tmp_path / "old", tmp_path / "old" / "a" / "b", tmp_path / "new" / "c"):
        Evaluation.plan(["full"], [str(task_file)], [0.5], output)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["file"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lengths", [(3, 200, 2000), (2000, 200, 3)])
def test_a_budget_too_small_for_a_context_of_middle_length_is_found_before_any_is_read(
    tiny_backbone, tmp_path: Path, monkeypatch, lengths: tuple[int, ...]
) -> None:
    line = {"task": "t", "question": "q", "answer_prefix": "", "answers": ["a"], "max_new_tokens": 4}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line | {"context": "a" * n}) + "\n" for n in lengths))
    monkeypatch.setattr(asking, "read_context", lambda *args: pytest.fail("a context was read"))
    with pytest.raises(BudgetError, match="needs at least"):
        evaluate(tiny_backbone, ["full", "sekv[routing=mean]"], [str(path)], [0.2], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_policy_that_ignores_the_budget_answers_once_for_all_budgets(
    tiny_backbone, task_file: Path, tmp_path: Path, monkeypatch
) -> None:
    asked = []
    real = asking.Context.memory
    monkeypatch.setattr(
        asking.Context, "memory", lambda context, policy, *a: asked.append(policy) or real(context, policy, *a)
    )
    evaluation = Evaluation.plan(["full", "keydiff"], [str(task_file)], [0.2, 0.5, 64], tmp_path / "out", limit=2)
    seen: list[Any] = []
    questions = evaluation.prepare(tiny_backbone)
    journal = evaluation.journal(tiny_backbone, questions)
    results = evaluation.run(tiny_backbone, questions, journal, on_record=seen.append)
    assert [policy.name for policy in asked] == 2 * ["full", "keydiff", "keydiff", "keydiff"]
    assert [(r.policy, r.budget) for r in results] == [(p, b) for p in ("full", "keydiff") for b in (0.2, 0.5, 64)]
    assert len(seen) == len(evaluation.keys(questions))
    first, *others = [vars(record) for record in seen[:3]]
    assert [other | {"budget": 0.2} for other in others] == [first, first]


@pytest.mark.parametrize("budget", [8, 0.01])
def test_a_budget_too_small_is_found_before_the_first_context_is_read(
    tiny_backbone, task_file: Path, tmp_path: Path, monkeypatch, budget: float
) -> None:
    monkeypatch.setattr(asking, "read_context", lambda *args: pytest.fail("a context was read"))
    with pytest.raises(BudgetError, match="needs at least"):
        evaluate(tiny_backbone, ["keydiff", "sekv[routing=mean]"], [str(task_file)], [0.5, budget], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_backbone_is_refused(make_tiny_backbone, tiny_backbone, task_file: Path, tmp_path: Path):
    other = make_tiny_backbone("llama", num_hidden_layers=3)
    config = SeKVConfig(routing_dim=8)
    folder = SeKVAdapter.create(other, config).save_pretrained(tmp_path / "adapter")
    evaluation = Evaluation.plan(["full", "sekv"], [str(task_file)], [0.5], tmp_path / "out", adapter=folder)
    with pytest.raises(AdapterError, match="num_layers: adapter 3, backbone 2"):
        evaluation.prepare(tiny_backbone)
    assert len(evaluation.prepare(other)) == 3
    assert not (tmp_path / "out").exists()


def stopping_after(n: int):
    """A callback that ends the run after `n` answers."""
    left = [n]

    def stop(record: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return stop


def plain(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in load(path)]


def test_a_run_stopped_twice_gives_the_records_of_an_uninterrupted_one(
    tiny_backbone, task_file: Path, tmp_path: Path, monkeypatch
) -> None:
    reads = []
    real = asking.read_context
    monkeypatch.setattr(asking, "read_context", lambda *args: reads.append(args[1]) or real(*args))

    def run(folder: str, after: int | None) -> None:
        evaluation = Evaluation.plan(POLICIES, [str(task_file), "niah:400"], [0.3, 64], tmp_path / folder, limit=2)
        questions = evaluation.prepare(tiny_backbone)
        journal = evaluation.journal(tiny_backbone, questions)
        if after is None:
            assert evaluation.run(tiny_backbone, questions, journal)
            return
        with pytest.raises(KeyboardInterrupt):
            evaluation.run(tiny_backbone, questions, journal, on_record=stopping_after(after))

    run("whole", None)
    for after in (5, 8, None, None):
        run("parts", after)
    assert plain(tmp_path / "parts" / "samples.jsonl") == plain(tmp_path / "whole" / "samples.jsonl")
    # 4 contexts in one go; then 4, and one more for each that was left half done; the last run reads nothing.
    assert len(reads) == 4 + 4 + 2


def test_shards_give_the_records_of_one_process(tiny_backbone, task_file: Path, tmp_path: Path) -> None:
    results = {}
    for world in (1, 2):
        for rank in range(world):
            evaluation = Evaluation.plan(["full", "keydiff"], [str(task_file)], [0.3], tmp_path / str(world))
            questions = evaluation.prepare(tiny_backbone)
            journal = evaluation.journal(tiny_backbone, questions, Shard(rank, world))
            results[rank, world] = evaluation.run(tiny_backbone, questions, journal)
    assert results[0, 2] is None
    assert plain(tmp_path / "2" / "samples.jsonl") == plain(tmp_path / "1" / "samples.jsonl")


def test_more_policies_budgets_and_tasks_join_the_same_folder(tiny_backbone, task_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluate(tiny_backbone, ["full"], [str(task_file)], [0.3], out, limit=1)
    results = evaluate(tiny_backbone, ["keydiff"], [str(task_file)], [0.3, 0.5], out, limit=2)
    assert [(r.policy, r.budget, r.n) for r in results] == [("keydiff", 0.3, 2), ("keydiff", 0.5, 2), ("full", 0.3, 1)]


def test_a_folder_of_another_run_is_refused_before_a_context_is_read(
    tiny_backbone, make_tiny_backbone, task_file: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"
    evaluate(tiny_backbone, ["full"], ["niah:1200"], [1.0], out, limit=1)
    monkeypatch.setattr(asking, "read_context", lambda *args: pytest.fail("a context was read"))
    other = make_tiny_backbone("llama", seed=7)
    for backbone, change, message in (
        (other, {}, "another run .backbone"),
        (tiny_backbone, {"query_aware": True}, "query_aware: false there, true here"),
        (tiny_backbone, {"limit": 3}, "another sample 0 of niah:1200"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate(backbone, ["full"], ["niah:1200"], [1.0], out, **({"limit": 1} | change))


def test_seeds_multiply_generated_samples_only(tiny_backbone, task_file: Path, tmp_path: Path) -> None:
    tasks = [str(task_file), "niah:400"]
    results = evaluate(tiny_backbone, ["full"], tasks, [1.0], tmp_path / "out", limit=2, seeds=[3, 4])
    assert {result.task: result.n for result in results} == {"rooms": 2, "niah:400": 4}


def test_a_baseline_is_compared_with_per_sample(tiny_backbone, task_file: Path, tmp_path: Path) -> None:
    evaluate(tiny_backbone, ["full", "keydiff"], [str(task_file)], [0.3], tmp_path / "out", baseline="full")
    (row,) = json.loads((tmp_path / "out" / "paired.json").read_text())
    assert (row["policy"], row["baseline"], row["n"]) == ("keydiff", "full", 3)
    with pytest.raises(PolicyError, match="baseline 'snapkv' is not among the policies: full"):
        Evaluation.plan(["full"], [str(task_file)], [0.3], tmp_path / "out", baseline="snapkv")


def test_questions_about_one_context_compress_it_once_and_a_cache_keeps_it(
    tiny_backbone, tmp_path: Path, monkeypatch
) -> None:
    line = {"task": "t", "context": " ".join(SENTENCES), "answer_prefix": "", "answers": ["1"], "max_new_tokens": 4}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line | {"question": f"Room {i}?"}) + "\n" for i in range(3)))
    reads = []
    real = asking.read_context
    monkeypatch.setattr(asking, "read_context", lambda *args: reads.append(args) or real(*args))
    made = []
    compress = memory_cache.compress
    monkeypatch.setattr(memory_cache, "compress", lambda *args: made.append(args[1].name) or compress(*args))
    evaluate(tiny_backbone, POLICIES, [str(path)], [0.3], tmp_path / "plain")
    assert len(reads) == 1
    assert made == [policy.partition("[")[0] for policy in POLICIES]
    for folder in ("one", "two"):
        made.clear()
        evaluate(tiny_backbone, POLICIES, [str(path)], [0.3], tmp_path / folder, cache=tmp_path / "cache")
        assert plain(tmp_path / folder / "samples.jsonl") == plain(tmp_path / "plain" / "samples.jsonl")
    assert made == ["full"]  # the others come from the folder
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "cache" / "memories").glob("*.safetensors"))) == len(POLICIES) - 1
