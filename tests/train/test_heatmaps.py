"""Zoom rates against plain loops, and the pictures of a validation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from matplotlib.image import imread

from sekv.budget import Budget
from train.heatmaps import ZoomHeatmaps, draw_zoom
from train.objective import read_document, run_student
from train.recall import ASKED, ZOOMED, zoom_rates


@pytest.fixture
def traces(ready_module, batch):
    mask = batch["attention_mask"].bool()
    document = read_document(ready_module.backbone, batch["input_ids"], mask, 16)
    return run_student(document, ready_module.adapter, Budget(share=0.4), 16).traces


def test_rates_equal_a_count_by_hand(traces):
    rates = zoom_rates(traces)
    assert rates[ASKED].shape == (2, 2, 4)
    assert rates[ZOOMED].shape == (2, 2, 2)
    for layer, trace in enumerate(traces):
        for row in range(2):
            spans = int(trace.span_mask[row].sum())
            for head in range(4):
                alpha = trace.alpha[row, head, :, :spans].detach()
                count = sum(float(a) >= float(trace.tau[head].detach()) for a in alpha.flatten())
                assert float(rates[ASKED][row, layer, head]) == pytest.approx(count / alpha.numel())
            for group in range(2):
                taken = trace.expand[row, group, :, :spans].detach()
                assert float(rates[ZOOMED][row, layer, group]) == pytest.approx(float(taken.mean()))
    assert 0 < float(rates[ZOOMED].mean()) < 1
    assert not rates[ZOOMED].requires_grad


def trainer_at(step, sanity=False):
    logger = WandbLogger(offline=True)
    logger.log_image = lambda key, images, step: logged.append((key, images, step))
    logged: list = []
    trainer = SimpleNamespace(
        global_step=step,
        sanity_checking=sanity,
        num_sanity_val_steps=1,
        strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: 2 * tensor),  # two processes that saw the same
        is_global_zero=True,
        loggers=[logger],
    )
    return trainer, logged


def validate(callback, trainer, *outputs):
    module = SimpleNamespace(device=torch.device("cpu"))
    callback.on_validation_epoch_start(trainer, module)
    for output in outputs:
        callback.on_validation_batch_end(trainer, module, output, None, 0)
    callback.on_validation_epoch_end(trainer, module)


def rates(value, documents=1):
    return {ASKED: torch.full((documents, 3, 4), value), ZOOMED: torch.full((documents, 3, 2), value / 2)}


def test_a_picture_shows_the_mean_over_documents_and_goes_to_wandb(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("train.heatmaps.draw_zoom", lambda r, title, path: drawn.append((r, title, path)))
    callback = ZoomHeatmaps(tmp_path / "heatmaps")
    trainer, logged = trainer_at(250)
    validate(callback, trainer, rates(0.1, documents=3), rates(0.5))
    ((shown, title, path),) = drawn
    torch.testing.assert_close(shown[ASKED], torch.full((3, 4), 0.2))
    assert path == tmp_path / "heatmaps" / "zoom-step-000250.png"
    assert "250" in title
    assert logged == [("val/zoom_heatmap", [str(path)], 250)]
    validate(callback, trainer_at(500)[0], rates(0.4))
    torch.testing.assert_close(drawn[1][0][ASKED], torch.full((3, 4), 0.4))  # nothing is left of the first


def test_a_partial_sanity_check_draws_nothing(tmp_path):
    trainer, logged = trainer_at(0, sanity=True)
    validate(ZoomHeatmaps(tmp_path / "heatmaps"), trainer, rates(0.1))
    assert not (tmp_path / "heatmaps").exists()
    trainer.num_sanity_val_steps = float("inf")
    validate(ZoomHeatmaps(tmp_path / "heatmaps"), trainer, rates(0.1))
    assert len(logged) == 1


@pytest.mark.parametrize(("layers", "heads", "groups"), [(2, 4, 2), (48, 40, 8), (1, 1, 1)])
def test_a_drawing_is_a_picture_of_its_own(tmp_path, layers, heads, groups):
    generator = torch.Generator().manual_seed(0)
    values = {ASKED: torch.rand(layers, heads, generator=generator), ZOOMED: torch.zeros(layers, groups)}
    draw_zoom(values, "Zooming", tmp_path / "zoom.png")
    pixels = imread(tmp_path / "zoom.png")
    assert pixels.shape[0] > 300
    assert pixels.std() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["zoom.png"]


def test_a_run_draws_at_every_validation(make_module, make_data, make_trainer, tmp_path):
    heatmaps = ZoomHeatmaps(tmp_path / "heatmaps")
    trainer = make_trainer(max_steps=2, val_check_interval=1, callbacks=[heatmaps])
    trainer.fit(make_module(), datamodule=make_data())
    assert sorted(p.name for p in heatmaps.folder.iterdir()) == ["zoom-step-000001.png", "zoom-step-000002.png"]
