"""Training under Lightning: what learns, what is saved, how it resumes and how it stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file

from sekv.adapter import SeKVConfig
from sekv.budget import Budget
from sekv.errors import AdapterError, BudgetError, DataError
from tests.train.conftest import ADAPTER
from train import losses
from train.errors import ConfigError, DivergenceError
from train.losses import LossConfig
from train.module import Draw, SeKVModule
from train.warmstart import WarmStartConfig


class Curve(Callback):
    """Remembers the loss and the learning rate of every step; stops early when asked to."""

    def __init__(self, stop=None):
        self.losses, self.rates, self.stop = [], [], stop

    def on_train_batch_start(self, trainer, *args):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, *args):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        trainer.should_stop = trainer.global_step == self.stop


def weights(module):
    return {name: p.detach().clone() for name, p in module.adapter.named_parameters()}


def test_a_few_steps_lower_the_loss_and_move_only_the_adapter(make_module, make_data, make_trainer):
    module, data = make_module(budgets=(0.3,), lr=3e-2), make_data(max_documents=2, val_sequences=0)
    module.configure_model()
    data.tokenizer = module.backbone.tokenizer
    batch = next(iter(data.train_dataloader()))
    draw = Draw(Budget(share=0.3), batch["attention_mask"].sum(1) - module.query_window)

    @torch.no_grad()
    def loss():
        return float(losses.total(module.evaluate(batch, draw).losses, module.loss_config, anneal=1.0).mean())

    untrained, frozen = loss(), {name: p.clone() for name, p in module.backbone.model.named_parameters()}
    before = weights(module)
    make_trainer(max_steps=40).fit(module, datamodule=data)
    assert loss() < 0.99 * untrained
    assert all(not torch.equal(before[name], p) for name, p in weights(module).items())
    assert all(torch.equal(frozen[name], p) for name, p in module.backbone.model.named_parameters())


def test_three_steps_resume_and_three_more_equal_six(make_module, make_data, make_trainer, tmp_path):
    """Across an epoch boundary, with random cuts and budgets: samples, schedule and optimiser all continue."""

    def run(stop, ckpt=None, save=None):
        module, curve = make_module(), Curve(stop)
        trainer = make_trainer(max_steps=6, callbacks=[curve])
        data = make_data(max_documents=10)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
        if save:
            trainer.save_checkpoint(save)
        return weights(module), curve.losses, len(trainer.train_dataloader)

    whole, curve, epoch = run(6)
    assert epoch == 7  # the loader counts a batch more than the run has
    saved = tmp_path / "three.ckpt"
    _, first, _ = run(3, save=saved)
    resumed, second, _ = run(6, ckpt=saved)
    assert first + second == curve
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_is_a_few_adapters_in_size_and_nothing_but_data(make_module, make_data, make_trainer, tmp_path):
    module, trainer = make_module(), make_trainer(max_steps=2)
    trainer.fit(module, datamodule=make_data())
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert set(content["state_dict"]) == {f"adapter.{name}" for name in module.adapter.state_dict()}
    adapter_bytes = sum(p.numel() * 4 for p in weights(module).values())
    assert path.stat().st_size < 4 * adapter_bytes + 60_000  # and some bookkeeping, which does not grow


def test_load_from_checkpoint_restores_adapter_and_settings(make_module, make_data, make_trainer, tmp_path):
    module, trainer = make_module(), make_trainer(max_steps=2)
    trainer.fit(module, datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = SeKVModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert all(torch.equal(p, weights(loaded)[name]) for name, p in weights(module).items())
    assert loaded.adapter_config == module.adapter_config
    assert loaded.mining == module.mining
    assert dict(loaded.hparams) == dict(module.hparams)


def test_a_checkpoint_of_another_backbone_is_refused(
    make_module, make_data, make_trainer, make_tiny_backbone, tmp_path
):
    trainer = make_trainer(max_steps=1)
    trainer.fit(make_module(), datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    other = make_module()
    other.backbone = make_tiny_backbone("llama", seed=7)
    with pytest.raises(AdapterError, match=r"trained over another backbone.*weights of layer 0"):
        make_trainer(max_steps=2).fit(other, datamodule=make_data(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_router": False}, "train_router was True and is False"),
        ({"adapter": replace(ADAPTER, max_rank=6)}, "max_rank was 4 and is 6"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(change, message, make_module, make_data, make_trainer, tmp_path):
    trainer = make_trainer(max_steps=1)
    trainer.fit(make_module(), datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(AdapterError, match=message):
        make_trainer(max_steps=2).fit(
            make_module(**change), datamodule=make_data(), ckpt_path=tmp_path / "x.ckpt", weights_only=True
        )


def test_an_untrained_router_stays_as_it_is_made(make_module, make_data, make_trainer, capsys):
    """Although a warm start is asked for."""
    module = make_module(train_router=False, warm_start=WarmStartConfig(documents=2, steps=3), lr=3e-2)
    module.configure_model()
    before = weights(module)
    trainer = make_trainer(max_steps=3)
    trainer.fit(module, datamodule=make_data())
    moved = {name for name, p in weights(module).items() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if name.startswith("gate.")}
    gate = sum(p.numel() for p in module.adapter.gate.parameters())
    assert sum(p.numel() for group in trainer.optimizers[0].param_groups for p in group["params"]) == gate
    printed = capsys.readouterr().out
    assert f"trainable parameters: {gate:,} (" in printed
    assert "warm start" not in printed


def test_the_warm_start_reports_its_last_step_and_the_share_of_parameters(make_module, make_data, make_trainer, capsys):
    module = make_module(warm_start=WarmStartConfig(documents=1, retrieval=1, steps=3))
    make_trainer(max_steps=1).fit(module, datamodule=make_data())
    printed = capsys.readouterr().out
    assert "warm start: read document 2/2" in printed
    assert "warm start: step 3/3, zoom loss" in printed
    assert "step 0/3" not in printed
    share = module.adapter.parameter_share
    assert f"trainable parameters: {module.adapter.num_parameters:,} ({share:.2%} of the backbone)" in printed


def test_documents_longer_than_the_backbones_positions_are_refused(make_module, make_data, make_trainer, tiny_backbone):
    limit = tiny_backbone.geometry.max_positions
    with pytest.raises(DataError, match=rf"data\.length is {limit + 1} tokens, but .* at most {limit}"):
        make_trainer(max_steps=1).fit(make_module(), datamodule=make_data(length=limit + 1))


def test_validation_reports_losses_and_routers(make_module, make_data, make_trainer):
    module = make_module()
    trainer = make_trainer()
    figures = trainer.validate(module, datamodule=make_data(), verbose=False)[0]
    again = make_trainer().validate(module, datamodule=make_data(), verbose=False)[0]
    assert figures == again
    assert {"val/loss", "val/zoom", "val/recall_learned", "val/recall_mean", "val/recall_oracle", "val/rows"} <= set(
        figures
    )
    assert figures["val/recall_oracle"] >= figures["val/recall_learned"] > 0


def test_a_loss_that_is_not_finite_stops_with_step_and_batch(make_module, make_data, make_trainer, tmp_path):
    module = make_module()
    module.configure_model()
    with torch.no_grad():
        module.adapter.bias.fill_(math.nan)
    with pytest.raises(DivergenceError, match=r"step 0: the loss is not finite.*divergence-step-0\.safetensors"):
        make_trainer(max_steps=2).fit(module, datamodule=make_data())
    saved = load_file(tmp_path / "divergence-step-0.safetensors")
    assert saved["input_ids"].shape == saved["attention_mask"].shape
    assert saved["cuts"].shape == (2,)


def test_a_gradient_that_is_not_finite_stops_before_the_step(make_module, make_data, make_trainer):
    module = make_module()
    module.configure_model()
    module.adapter.bias.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DivergenceError, match="step 0: the gradient of bias is not finite"):
        make_trainer(max_steps=2).fit(module, datamodule=make_data())
    assert all(p.isfinite().all() for p in module.adapter.parameters())


def test_the_learning_rate_warms_up_and_falls_to_zero(make_module, make_data, make_trainer):
    curve = Curve()
    make_trainer(max_steps=10, callbacks=[curve]).fit(make_module(lr=0.1, warmup=0.2), datamodule=make_data())
    assert curve.rates[:3] == pytest.approx([0.0, 0.05, 0.1])
    assert curve.rates[3:] == sorted(curve.rates[3:], reverse=True)
    assert curve.rates[-1] < 0.01


def test_cuts_and_budgets_vary_and_depend_on_the_seed(make_module, make_data, make_trainer):
    def draws(seed):
        module, seen = make_module(seed=seed), []
        draw = module._draw
        module._draw = lambda batch: seen.append(draw(batch)) or seen[-1]
        make_trainer(max_steps=6).fit(module, datamodule=make_data())
        return [(d.budget, d.cuts.tolist()) for d in seen]

    first = draws(0)
    assert first == draws(0)
    assert first != draws(1)
    assert {budget for budget, _ in first} == {Budget(share=0.3), Budget(share=0.4)}
    assert len({cut for _, cuts in first for cut in cuts}) > 6


def test_documents_too_short_for_the_budget_are_refused_before_the_backbone_loads(make_module, make_data, make_trainer):
    module = make_module(backbone="nowhere/at-all", budgets=(0.15,))
    with pytest.raises(
        DataError, match=r"budget of 0\.15 needs documents of at least \d+ tokens.*data\.min_length is 260"
    ):
        make_trainer(max_steps=1).fit(module, datamodule=make_data())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budgets": ()}, BudgetError, "model.budgets is empty"),
        ({"budgets": (0.1, 1.0)}, BudgetError, "model.budgets holds 1.0"),
        ({"val_budget": 0.0}, BudgetError, "model.val_budget holds 0.0"),
        ({"query_window": 0}, ConfigError, "model.query_window must be at least 1"),
        ({"warmup": 1.0}, ConfigError, "model.warmup is a share"),
        ({"adapter": replace(ADAPTER, index="summary")}, ConfigError, "labels=share needs shares"),
        ({"lr": -1.0}, ConfigError, "model.lr must be a number above 0"),
        ({"lr": math.nan}, ConfigError, "model.lr must be a number above 0"),
        ({"weight_decay": -1.0}, ConfigError, "model.weight_decay must be 0 or more"),
    ],
)
def test_impossible_settings_are_refused(make_module, options, error, message):
    with pytest.raises(error, match=message):
        make_module(**options)


def test_endless_training_is_refused(make_module, make_data, make_trainer):
    with pytest.raises(ConfigError, match=r"set trainer\.max_steps"):
        make_trainer(max_epochs=-1).fit(make_module(), datamodule=make_data())


@pytest.mark.parametrize(
    "change",
    [
        {"segmentation": "fixed"},
        {"anchors": False},
        {"summary_weights": "uniform"},
        {"threshold": "global"},
        {"share_group": False, "summary_share": 1.0},
        {"summary_share": 1.0},
        {"index": "summary"},
        {"rope": "post"},
        {"zoom": False},
    ],
)
def test_every_ablation_trains(change, make_module, make_data, make_trainer):
    config = SeKVConfig(routing_dim=8, max_rank=4, gate_hidden=8, max_span=16, **change)
    labels = LossConfig(labels="share" if config.index == "tokens" else "mass")
    make_trainer(max_steps=1).fit(make_module(adapter=config, losses=labels), datamodule=make_data())
