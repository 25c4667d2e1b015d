"""Two gloo processes train what one with the same global batch trains, the backbone whole or dealt to both."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.train.test_resume import ROOT, adapter, main, runs  # noqa: F401 - a fixture
from train.errors import ConfigError
from train.parallel import check_precision, shard_backbone

OPTIONS = ["--trainer.max_steps", "5", "--data.curriculum", "{3: 560}", "--trainer.val_check_interval", "5"]
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accumulate_grad_batches", "1"]


@pytest.fixture(scope="module")
def one(runs):  # noqa: F811
    """The adapter of one process with batches of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        batches = ["--data.batch_size", "4", "--trainer.accumulate_grad_batches", "1"]
        assert main(["--config", str(runs), "--name", "one", *OPTIONS, *batches]) == 0
    return adapter(runs, "one")


@pytest.mark.parametrize("shard", ["false", "true"])
def test_two_processes_train_what_one_trains(shard, runs, one):  # noqa: F811
    name = f"two-{shard}"
    arguments = [*OPTIONS, *TWO, "--data.batch_size", "2", "--model.shard", shard]
    process = subprocess.run(
        [sys.executable, "-m", "sekv", "train", "--config", str(runs), "--name", name, *arguments],
        env={**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)},
        cwd=runs.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    two = adapter(runs, name)
    fresh = [key for key in one if not torch.allclose(one[key], two[key], rtol=0, atol=1e-5)]
    assert not fresh
    content = torch.load(runs.parent / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)
    (place,) = content["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert [stream["index"] for stream in place["streams"]] == [8, 8]


def test_a_single_process_has_nobody_to_share_with(tiny_backbone):
    with pytest.raises(ConfigError, match="deals the backbone to several processes, and there is one"):
        shard_backbone(tiny_backbone, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", 16])
def test_half_precision_of_the_trainer_is_refused(precision):
    with pytest.raises(ConfigError, match=r"set model\.dtype bfloat16"):
        check_precision(precision)


def test_a_bfloat16_backbone_trains_a_float32_adapter(make_module, make_data, make_trainer):
    module, trainer = make_module(dtype="bfloat16"), make_trainer(max_steps=2)
    trainer.fit(module, datamodule=make_data())
    assert module.backbone.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in module.adapter.parameters())


def test_checkpointed_attention_gives_the_same_gradients(make_module, batch):
    from sekv.budget import Budget
    from train.module import Draw

    gradients, kept = [], []
    for checkpoint in (False, True):
        module = make_module(checkpoint_attention=checkpoint)
        module.configure_model()
        sizes: list[int] = []

        def keep(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outcome = module.evaluate(batch, Draw(Budget(share=0.3), torch.tensor([300, 240])))
        sum(value.mean() for value in outcome.losses.values()).backward()
        gradients.append({name: p.grad for name, p in module.adapter.named_parameters()})
        kept.append(sum(sizes))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert kept[1] < 0.7 * kept[0]


def test_accumulated_batches_equal_one_large_batch(make_module, make_data, make_trainer):
    """Of the same documents, cut at the same place."""

    def train(batch_size, accumulate):
        module = make_module(budgets=(0.3,))
        module._draw = lambda batch: module_draw(module, batch)
        trainer = make_trainer(max_steps=3, accumulate_grad_batches=accumulate)
        trainer.fit(module, datamodule=make_data(batch_size=batch_size))
        return {name: p.detach() for name, p in module.adapter.named_parameters()}

    def module_draw(module, batch):
        from train.module import Draw

        return Draw(module.budgets[0], batch["attention_mask"].sum(1) - module.query_window)

    whole, parts = train(4, 1), train(2, 2)
    assert all(torch.allclose(whole[name], parts[name], rtol=0, atol=1e-5) for name in whole)
