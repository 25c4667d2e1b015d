"""A loss that explodes or is not finite stops the run; the step it happened in can be computed again."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sekv.errors import DataError
from train import losses
from train.divergence import DivergenceGuard, replay
from train.errors import DivergenceError


def explode_at(module, step, factor, monkeypatch):
    """Makes the objective `factor` times as large at one step."""
    total = losses.total

    def objective(*args, **kwargs):
        loss = total(*args, **kwargs)
        return loss * factor if module._trainer is not None and module.global_step == step else loss

    monkeypatch.setattr(losses, "total", objective)


def test_an_exploding_loss_stops_before_its_gradient_is_used(
    make_module, make_data, make_trainer, monkeypatch, tmp_path
):
    monkeypatch.setattr("train.divergence._ENOUGH", 3)
    module = make_module(explosion=10.0)
    explode_at(module, 4, 100.0, monkeypatch)
    with pytest.raises(DivergenceError, match=r"step 4: the loss is .*, more than 10 times the usual .*logits"):
        make_trainer(max_steps=6).fit(module, datamodule=make_data())
    saved = load_file(tmp_path / "divergence-step-4.safetensors")
    assert torch.equal(saved["adapter.bias"], module.adapter.bias)


@pytest.mark.parametrize(("explosion", "factor"), [(0.0, 1000.0), (10.0, 3.0)])
def test_a_larger_loss_may_pass(explosion, factor, make_module, make_data, make_trainer, monkeypatch):
    monkeypatch.setattr("train.divergence._ENOUGH", 3)
    module = make_module(explosion=explosion)
    explode_at(module, 4, factor, monkeypatch)
    make_trainer(max_steps=5).fit(module, datamodule=make_data())


def test_the_usual_loss_is_part_of_a_checkpoint():
    guard = DivergenceGuard(10.0)
    guard._recent.extend([1.0, 2.0])
    other = DivergenceGuard(10.0)
    other.load_state_dict(guard.state_dict())
    assert list(other._recent) == [1.0, 2.0]


def test_a_saved_step_replays_to_the_very_same_losses(make_module, make_data, make_trainer, monkeypatch, tmp_path):
    """With an adapter of its own, as another process would."""
    module = make_module()
    explode_at(module, 3, math.nan, monkeypatch)
    with pytest.raises(DivergenceError, match="step 3: the loss is not finite"):
        make_trainer(max_steps=6).fit(module, datamodule=make_data())
    monkeypatch.undo()
    rows = replay(make_module(), tmp_path / "divergence-step-3.safetensors")
    for name, value in module.last_losses.items():
        assert rows[name] == value.tolist()
    assert len(rows["loss"]) == 2
    assert rows["gradient of projection"][0] > 0


def test_a_file_that_is_no_step_is_refused(make_module, tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_text("nothing")
    for path in (tmp_path / "x.safetensors", tmp_path / "y.safetensors", tmp_path / "gone.safetensors"):
        with pytest.raises(DataError, match=rf"{path.name} is not a step that this run's settings can replay"):
            replay(make_module(), path)


def test_the_batch_of_a_broken_gradient_is_saved_too(make_module, make_data, make_trainer, tmp_path):
    module = make_module()
    module.configure_model()
    module.adapter.bias.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DivergenceError, match=r"step 0: the gradient of bias is not finite.*divergence-step-0"):
        make_trainer(max_steps=2).fit(module, datamodule=make_data())
    with safe_open(tmp_path / "divergence-step-0.safetensors", "pt") as file:
        assert file.metadata()["step"] == "0"
