"""`sekv plan`: figures known by hand, what would not fit, one line for each mistake; nothing is downloaded."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from sekv.architecture import shipped_architectures
from sekv.cli import main as sekv
from train.footprint import TRAINING, moment_bytes, peak
from train.plan import main, make_plan

GIB = 2**30


@pytest.fixture
def config(tmp_path, monkeypatch, no_network):
    """Llama-3.1-8B on text of this machine, on eight accelerators of 80 GiB that are not here."""
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    content = {
        "model": {"backbone": "meta-llama/Llama-3.1-8B", "dtype": "bfloat16", "budgets": [0.1, 0.2]},
        "data": {"class_path": "train.data.BuiltinCorpus", "init_args": {"length": 8192, "min_length": 8192}},
        "trainer": {"max_steps": 3000, "accumulate_grad_batches": 4, "devices": 2, "accelerator": "gpu"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def plan_of(config, *arguments, device_memory=80 * GIB, host_memory=10**12):
    return make_plan(["--config", str(config), *arguments], device_memory, host_memory)


def test_parameters_tokens_and_steps_are_those_of_the_configuration(config):
    plan = plan_of(config)
    gate = (24 + 128) * 32 + 32 + 32 * 24 + 24
    # W, tau, scale, offset and two biases of 32 heads, projections of the keys of 8, in 32 layers; the gate.
    assert plan.trained_parameters == 32 * (32 * (16 * 128 + 5) + 8 * 16 * 128) + gate
    (stage,) = plan.stages
    assert (plan.steps_of(stage), plan.tokens_per_step(stage)) == (3000, 8192 * 4 * 2)
    assert plan.dtype == torch.bfloat16


def test_an_ablation_changes_the_count(config):
    assert plan_of(config, "--model.train_router", "false").trained_parameters == 5688
    whole, one = plan_of(config), plan_of(config, "--model.adapter.threshold", "global")
    assert whole.trained_parameters - one.trained_parameters == 32 * 32 - 1


def test_the_report_names_every_part(config, capsys):
    assert main(["--config", str(config), "--device-memory", "80GiB", "--host-memory", "1TB"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "meta-llama/Llama-3.1-8B, 8,030,261,248 parameters",
        "trainable parameters: 2,632,248, 0.0328% of the backbone",
        "196,608,000 tokens",
        "backbone weights 16.1 GB",
        "memory: bases and gates",
        "student: attention of the window over the rows",
        "teacher rows (Q x N)",
        "next-token logits",
        "adapter with gradient and optimiser",
        "Memory of one process on the host",
        "Everything fits.",
    ):
        assert part in printed
    assert not [path for path in config.parent.iterdir() if path != config]


def test_what_does_not_fit_is_named_with_its_remedy(config, capsys):
    arguments = ["--config", str(config), "--device-memory", "24GiB", "--host-memory", "8GB"]
    assert main([*arguments, "--data.length", "200000", "--data.min_length", "3000", "--model.val_budget", "0.01"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "sequences of 200,000 tokens, 1 at a time, need" in printed
    assert "on the device, which has 25.8 GB: set model.checkpoint_attention true" in printed
    assert "on the host, which has 8 GB" in printed
    assert "exceed the 131,072 positions of meta-llama/Llama-3.1-8B" in printed
    assert "a budget of 0.01 needs documents of at least" in printed
    assert "Everything fits" not in printed


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--data.batch_size", "4"], "lower data.batch_size and raise trainer.accumulate_grad_batches"),
        (["--model.checkpoint_attention", "true", "--data.length", "120000"], "lower data.length, data.curriculum"),
    ],
)
def test_a_step_that_does_not_fit_has_its_remedy(config, arguments, remedy):
    (problem,) = plan_of(config, *arguments).problems()
    assert remedy in problem


def test_attention_computed_again_needs_less(config):
    whole, again = plan_of(config), plan_of(config, "--model.checkpoint_attention", "true")
    assert peak(again.parts(again.stages[0])) < 0.7 * peak(whole.parts(whole.stages[0]))


def test_a_curriculum_keeps_the_tokens_of_a_step(config):
    plan = plan_of(config, "--data.curriculum", "{1000: 16384, 2000: 32768}")
    assert [(plan.steps_of(s), s.length, s.sequences) for s in plan.stages] == [
        (1000, 8192, 4),
        (1000, 16384, 2),
        (1000, 32768, 1),
    ]
    assert {plan.tokens_per_step(s) for s in plan.stages} == {65536}


def test_memory_decides_and_not_the_word(config):
    plan = plan_of(config)
    needed = peak(plan.parts(plan.stages[0]))
    assert plan_of(config, device_memory=needed).problems() == []
    assert len(plan_of(config, device_memory=needed - 1).problems()) == 1


def test_without_an_accelerator_everything_is_on_the_host(config):
    plan = plan_of(config, "--trainer.accelerator", "cpu", "--trainer.devices", "1", device_memory=None)
    assert not plan.machine.accelerator
    needed = peak(plan.parts(plan.stages[0])) + moment_bytes(plan.host_parts(), TRAINING)
    assert plan_of(config, "--trainer.accelerator", "cpu", device_memory=None, host_memory=needed).problems() == []
    (problem,) = plan_of(config, "--trainer.accelerator", "cpu", host_memory=needed - 1, device_memory=None).problems()
    assert "without an accelerator everything is here" in problem


def test_sharded_weights_are_split_over_the_processes(config):
    whole, split = plan_of(config), plan_of(config, "--model.shard", "true")
    first, second = (plan.parts(plan.stages[0])[0] for plan in (whole, split))
    assert second.name.endswith("of each layer 1/2")
    assert second.bytes < 0.6 * first.bytes


def test_layers_without_full_attention_do_not_fit(config, tmp_path):
    fields = {**shipped_architectures()["mistralai/Mistral-7B-Instruct-v0.2"], "sliding_window": 4096}
    fields = {**fields, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 16}
    (tmp_path / "sliding").mkdir()
    (tmp_path / "sliding" / "config.json").write_text(json.dumps(fields))
    problems = plan_of(config, "--model.backbone", str(tmp_path / "sliding")).problems()
    assert any("layers without full attention" in problem for problem in problems)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "much"], "'much' is no amount of memory"),
        (["--model.backbone", "/no/such"], "backbone '/no/such' is neither a folder"),
        (["--model.backbone", "org/other"], "'org/other' is not in the Hub's cache"),
        (["--model.routng", "3"], "model.routng"),
        (["--model.adapter.routing_dim", "200"], "routing_dim 200 exceeds the head dimension 128"),
        (["--data.batch_size", "0"], "need data.batch_size >= 1"),
        (["--trainer.max_steps", "-1"], "set trainer.max_steps"),
        (["--data.curriculum", "{10: 9000}"], "not a whole number of sequences"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_a_mistake_is_one_line(config, arguments, message, capsys):
    assert main(["--config", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert error.startswith("sekv plan: error:")


def test_it_is_a_command_of_sekv(config, capsys):
    assert sekv(["plan", "--config", str(config), "--device-memory", "80GiB", "--host-memory", "1TB"]) == 0
    assert "Everything fits." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sekv(["plan", "--help"])
    assert "--device-memory 80GiB" in capsys.readouterr().out
