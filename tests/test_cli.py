from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cli import main
from sekv.generation import ask, read_context
from sekv.policies.registry import build_policy
from sekv.prompt import split_prompt

CONTEXT = "Ann keeps bees. Bob keeps a goat. " * 6
GENERATE = ["--policy", "full", "--budget", "1.0", "--question", "Who keeps bees?", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: Backbone) -> str:
    path = tmp_path_factory.mktemp("backbone")
    tiny_backbone.model.save_pretrained(path)
    assert tiny_backbone.tokenizer is not None
    tiny_backbone.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(CONTEXT)
    return str(path)


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    sample = {"task": "t", "context": CONTEXT, "question": "Who keeps bees?", "answer_prefix": "", "answers": ["Ann"]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(sample | {"max_new_tokens": 4}) + "\n")
    return str(path)


def fails_with_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must end with code 2, no output, and one message, which is returned."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("sekv: error: ")
    return lines[0]


def test_evaluate_writes_results_samples_and_plot_and_prints_a_table(
    folder: str, task_file: str, tmp_path: Path, capsys
):
    out = tmp_path / "out"
    argv = ["evaluate", "--backbone", folder, "--policy", "full,sekv[routing=mean,max_span=16],keydiff", "--tasks"]
    assert main([*argv, f"{task_file},niah:512", "--budget", "0.5,100%,150", "--limit", "1", "--output", str(out)]) == 0
    names = ["results.csv", "results.json", "results.md", "run.json", "samples.jsonl", "scores.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    results = json.loads((out / "results.json").read_text())
    assert len(results) == 3 * 2 * 3
    assert {r["policy"] for r in results} == {"full", "sekv[routing=mean,max_span=16]", "keydiff"}
    assert {r["budget"] for r in results} == {0.5, 1.0, 150}
    captured = capsys.readouterr()
    assert "niah:512, n = 1, compressed before the question is known" in captured.out
    assert "keydiff" in captured.out
    assert "18/18" in captured.err


def test_generate_streams_the_answer_and_accounts_for_it(
    folder: str, text_file: str, capsys, tiny_backbone: Backbone
) -> None:
    options = ["--policy", "keydiff", "--budget", "0.5", "--question", "Who keeps bees?", "--max-new-tokens", "6"]
    assert (
        main(["generate", "--backbone", folder, "--context-file", text_file, *options, "--answer-prefix", "It is"]) == 0
    )
    captured = capsys.readouterr()
    policy = build_policy("keydiff")
    prompt = split_prompt(tiny_backbone.tokenizer, CONTEXT, "Who keeps bees?", "It is")
    context = read_context(tiny_backbone, prompt.context_ids, [policy])
    expected = ask(context, policy, Budget.parse(0.5), prompt, 6)
    assert captured.out.rstrip("\n") == expected.text.rstrip("\n")
    for part in ("rows", "resident", "host", "moved/token", "seconds", f"{expected.rows:.1f}"):
        assert part in captured.err


def test_generate_reads_standard_input_and_samples_by_seed(folder: str, monkeypatch, capsys) -> None:
    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(CONTEXT))
        assert main(["generate", "--backbone", folder, "--context-file", "-", *GENERATE, *options]) == 0
        return capsys.readouterr().out

    sampling = ("--sample", "--temperature", "3.0", "--query-aware")
    assert run(*sampling, "--seed", "1") == run(*sampling, "--seed", "1")
    assert run(*sampling, "--seed", "1") != run(*sampling, "--seed", "2")
    assert run() == run()


def test_a_trained_adapter_is_used_and_one_of_another_backbone_refused(
    folder: str, text_file: str, tmp_path: Path, capsys, tiny_backbone: Backbone, make_tiny_backbone
) -> None:
    config = SeKVConfig(routing_dim=8, max_span=16)
    mine = SeKVAdapter.create(tiny_backbone, config).save_pretrained(tmp_path / "mine")
    other = SeKVAdapter.create(make_tiny_backbone("qwen3"), config).save_pretrained(tmp_path / "other")
    argv = [
        "generate",
        "--backbone",
        folder,
        "--context-file",
        text_file,
        *GENERATE[4:],
        "--policy",
        "sekv",
        "--budget",
        "0.5",
    ]
    assert main([*argv, "--adapter", str(mine)]) == 0
    capsys.readouterr()
    assert "model_type: adapter qwen3, backbone llama" in fails_with_one_line([*argv, "--adapter", str(other)], capsys)
    weights = mine / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "adapter_model.safetensors" in fails_with_one_line([*argv, "--adapter", str(mine)], capsys)
    assert "--adapter" in fails_with_one_line(argv, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--policy": "full,nope"}, "unknown policy 'nope'"),
        ({"--policy": "keydiff[nope=1]"}, "no option 'nope'"),
        ({"--policy": "full,,keydiff"}, "empty policy spec"),
        ({"--policy": "sekv"}, "--adapter"),
        ({"--tasks": "nope"}, "unknown task 'nope'"),
        ({"--tasks": "nope.jsonl"}, "task file 'nope.jsonl' does not exist"),
        ({"--tasks": "niah:9999"}, "niah:9999 does not fit the backbone"),
        ({"--tasks": ","}, "no task given"),
        ({"--budget": "much"}, "budget 'much' is not a number"),
        ({"--budget": "1.5"}, "neither a share"),
        ({"--budget": "2", "--policy": "sekv[routing=mean]"}, "budget of 2 rows is too small"),
        ({"--limit": "0"}, "limit 0"),
        ({"--adapter": "nope"}, "does not exist"),
        ({"--backbone": "./nope"}, "backbone './nope'"),
        ({"--device": "nope"}, "unknown device 'nope'"),
        ({"--device": "meta"}, "device 'meta' does not exist here"),
        ({"--backbone": "[/x]"}, "backbone '[/x]'"),
        ({"--seed": "-1"}, "--seed -1 is out of range"),
        ({"--seed": str(2**64)}, "is out of range"),
        ({"--output": "/proc/x"}, "the output folder /proc/x cannot be written: No such file"),
        ({"--output": f"{__file__}/x"}, "test_cli.py is a file"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    folder: str, task_file: str, tmp_path: Path, capsys, change: dict[str, str], message: str
) -> None:
    out = tmp_path / "out"
    good = {"--backbone": folder, "--policy": "full", "--tasks": task_file, "--budget": "0.5", "--output": str(out)}
    argv = ["evaluate", *(part for pair in (good | change).items() for part in pair)]
    assert message in fails_with_one_line(argv, capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b" \n", [], "is empty"),
        (b"\xff\xfe", [], "is not UTF-8 text"),
        (None, [], "cannot be read"),
        (b"text", ["--budget", "x"], "budget 'x' is not a number"),
        (b"text", ["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (b"text", ["--temperature", "2"], "--temperature needs --sample"),
        (b"text", ["--sample", "--temperature", "0"], "--temperature needs --sample and a number above 0"),
        (b"text", ["--policy", "hubkv:nope"], "unknown policy 'nope'"),
        (b"text", ["--backbone", "[/x]"], "backbone '[/x]'"),
        (b"text", ["--sample", "--seed", str(2**64)], f"--seed {2**64} is out of range"),
        (b"text", ["--max-new-tokens", "4096"], "no room for the context"),
    ],
)
def test_a_mistake_in_generate_is_one_message(
    folder: str, tmp_path: Path, capsys, content: bytes | None, options: list[str], message: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    argv = ["generate", "--backbone", folder, "--context-file", str(path), *GENERATE, *options]
    assert message in fails_with_one_line(argv, capsys)


def test_a_context_that_had_to_be_shortened_is_reported(folder: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 1000)
    assert main(["generate", "--backbone", folder, "--context-file", str(path), *GENERATE]) == 0
    assert "tokens in its middle are left out" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nope"], ["evaluate"], ["generate", "--nope"], ["evaluate", "--dtype", "int8"]])
def test_unknown_commands_and_flags_end_as_argparse_does(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sekv")


def test_no_command_shows_the_help(capsys) -> None:
    assert main([]) == 2
    assert "evaluate" in capsys.readouterr().out


def test_help_lists_the_policies_and_gives_examples(capsys) -> None:
    for command in ("evaluate", "generate"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert f"examples:\n  sekv {command}" in shown
        for policy in ("full", "sekv", "nestedkv", "hubkv", "keydiff", "snapkv", "streaming_llm"):
            assert f"\n  {policy} " in shown


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom sekv.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(sorted({'torch', 'transformers', 'matplotlib', 'rich', 'lightning'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_train_hands_all_its_arguments_on(monkeypatch) -> None:
    seen: list[Any] = []
    fake = ModuleType("train.cli")
    fake.main = lambda argv: seen.append(argv) or 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "train.cli", fake)
    assert main(["train", "--config", "x.yaml", "--help", "--model.lr", "1"]) == 5
    assert seen == [["--config", "x.yaml", "--help", "--model.lr", "1"]]


@pytest.mark.parametrize("package", ["lightning", "jsonargparse", "wandb"])
def test_training_without_its_packages_names_the_extra(package: str, monkeypatch, capsys) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named '{package}.x'", name=f"{package}.x")

    monkeypatch.setattr("importlib.import_module", missing)
    message = fails_with_one_line(["train"], capsys)
    assert f"'{package}'" in message
    assert "pip install 'sekv[train]'" in message


def test_an_import_error_of_our_own_is_not_blamed_on_a_missing_extra(monkeypatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'sekv.nope'", name="sekv.nope")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"sekv\.nope"):
        main(["train"])


def test_export_reports_the_folder_and_refuses_a_missing_checkpoint(tmp_path: Path, monkeypatch, capsys) -> None:
    assert "nope.ckpt" in fails_with_one_line(["export", str(tmp_path / "nope.ckpt"), str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()
    fake = ModuleType("train.export")
    fake.export_checkpoint = lambda checkpoint, output, **_: output  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "train.export", fake)
    assert main(["export", "a.ckpt", "out"]) == 0
    assert capsys.readouterr().out == "adapter written to out\n"


def test_an_evaluation_goes_on_with_its_folder_and_a_restart_replaces_it(
    folder: str, task_file: str, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    argv = ["evaluate", "--backbone", folder, "--tasks", task_file, "--budget", "0.5", "--output", str(out)]

    def policies() -> list[str]:
        return [result["policy"] for result in json.loads((out / "results.json").read_text())]

    assert main([*argv, "--policy", "full"]) == 0
    assert main([*argv, "--policy", "keydiff,full", "--baseline", "full"]) == 0
    captured = capsys.readouterr()
    assert f"1 of 2 answers are in {out} already" in captured.err.replace("\n", "")
    assert "score minus that of full" in captured.out
    assert policies() == ["keydiff", "full"]
    assert "another run" in fails_with_one_line([*argv, "--policy", "full", "--query-aware"], capsys)
    assert main([*argv, "--policy", "full", "--query-aware", "--restart"]) == 0
    assert policies() == ["full"]


def test_lm_eval_gets_its_arguments_with_the_model_registered(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["sekv"])
    with pytest.raises(SystemExit) as stop:
        main(["lm-eval", "run", "--help"])
    assert stop.value.code == 0
    assert "--model" in capsys.readouterr().out
    from lm_eval.api.registry import get_model

    assert get_model("sekv").__name__ == "SeKVLM"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileExistsError(17, "File exists", "out"), "sekv: error: out: File exists"),
        (OSError("no space\nleft"), "sekv: error: no space left"),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, error: OSError, message: str) -> None:
    def refuse(options: object) -> int:
        raise error

    monkeypatch.setattr("sekv.cli._export", refuse)
    assert fails_with_one_line(["export", "a", "b"], capsys) == message


def test_letters_that_the_output_cannot_show_are_replaced() -> None:
    program = (
        "import sys, types\nfrom sekv.cli import main\nfake = types.ModuleType('train.export')\n"
        "fake.export_checkpoint = lambda checkpoint, output, **_: '\u00e4\u4e2d'\nsys.modules['train.export'] = fake\n"
        "sys.exit(main(['export', 'a', 'b']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "adapter written to ??\n", "")


def test_an_interrupt_ends_with_130(monkeypatch, capsys) -> None:
    def interrupt(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sekv.cli._export", interrupt)
    assert main(["export", "a", "b"]) == 130
    assert capsys.readouterr().err == "sekv: interrupted\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    program = (
        "import sys, types\nfrom sekv.cli import main\nfake = types.ModuleType('train.export')\n"
        "fake.export_checkpoint = lambda checkpoint, output, **_: output\nsys.modules['train.export'] = fake\n"
        "sys.exit(main(['export', 'a', 'b']))"
    )
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")
