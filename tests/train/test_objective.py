"""The step as a whole: causality, batching, what learns."""

from __future__ import annotations

import pytest
import torch

from sekv.budget import Budget
from sekv.errors import BackboneError
from train import losses
from train.module import Draw
from train.objective import read_document, run_student
from train.windows import cut_documents

WINDOW = 16


def window_logits(module, ids, mask):
    """Student and teacher logits over the window."""
    document = read_document(module.backbone, ids, mask, WINDOW)
    student = run_student(document, module.adapter, Budget(share=0.3), WINDOW)
    return module.backbone.logits(student.hidden), module.backbone.logits(document.hidden)


@torch.no_grad()
@pytest.mark.parametrize("position", [0, 5, 14])
def test_tokens_after_a_query_never_change_its_student_logits(ready_module, batch, position):
    ids, mask = cut_documents(batch["input_ids"], batch["attention_mask"].bool(), torch.tensor([300, 240]), WINDOW)
    before, _ = window_logits(ready_module, ids, mask)
    changed = ids.clone()
    first = ids.shape[1] - WINDOW + position + 1
    changed[:, first:] = (changed[:, first:] + 17) % 250 + 3
    after, _ = window_logits(ready_module, changed, mask)
    torch.testing.assert_close(after[:, : position + 1], before[:, : position + 1], atol=1e-5, rtol=0)
    assert (after[:, position + 1 :] - before[:, position + 1 :]).abs().max() > 1e-2


def test_losses_only_look_at_the_context_before_the_window(ready_module, batch):
    """The memory is built from the context alone: tokens of the window change no summary, basis or partition."""
    ids, mask = cut_documents(batch["input_ids"], batch["attention_mask"].bool(), torch.tensor([300, 240]), WINDOW)
    changed = ids.clone()
    changed[:, -WINDOW:] = 5
    traces = [
        run_student(
            read_document(ready_module.backbone, x, mask, WINDOW), ready_module.adapter, Budget(share=0.3), WINDOW
        ).traces
        for x in (ids, changed)
    ]
    for one, other in zip(*traces, strict=True):
        for name in ("sigma_key", "gate_value", "summary_key"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        for table, same in zip(one.segmentation.tensors(), other.segmentation.tensors(), strict=True):
            assert torch.equal(table, same)


def gradients(module, batch, draw):
    module.adapter.zero_grad()
    outcome = module.evaluate(batch, draw)
    total = losses.total(outcome.losses, module.loss_config, anneal=1.0)
    total.mean().backward()
    return total.detach(), {name: p.grad.clone() for name, p in module.adapter.named_parameters()}


def test_a_batch_of_two_equals_the_two_separate_steps(ready_module, batch):
    budget, cuts = Budget(share=0.3), torch.tensor([300, 240])
    together, gradient = gradients(ready_module, batch, Draw(budget, cuts))
    separate = [
        gradients(ready_module, {name: t[i : i + 1] for name, t in batch.items()}, Draw(budget, cuts[i : i + 1]))
        for i in range(2)
    ]
    torch.testing.assert_close(together, torch.cat([total for total, _ in separate]), atol=1e-5, rtol=1e-5)
    for name, value in gradient.items():
        mean = (separate[0][1][name] + separate[1][1][name]) / 2
        torch.testing.assert_close(value, mean, atol=1e-5, rtol=1e-4, msg=name)


def test_padding_side_does_not_matter(ready_module, batch):
    draw = Draw(Budget(share=0.3), torch.tensor([300, 240]))
    right = {name: torch.stack([t[0], t[1].roll(-70)]) for name, t in batch.items()}
    left_total, _ = gradients(ready_module, batch, draw)
    right_total, _ = gradients(ready_module, right, draw)
    torch.testing.assert_close(left_total, right_total)


def test_every_adapter_parameter_learns_and_the_backbone_does_not(ready_module, batch):
    _, gradient = gradients(ready_module, batch, Draw(Budget(share=0.3), torch.tensor([300, 240])))
    assert gradient.keys() == {name for name, _ in ready_module.adapter.named_parameters()}
    assert [name for name, value in gradient.items() if not value.abs().sum() > 0] == []
    assert all(p.grad is None for p in ready_module.backbone.model.parameters())


def test_every_loss_is_finite_and_per_document(ready_module, batch):
    outcome = ready_module.evaluate(batch, Draw(Budget(share=0.3), torch.tensor([300, 240])), recall=True)
    assert set(outcome.losses) == {"logits", "attention", "zoom", "recon", "budget"}
    for name, value in {**outcome.losses, **outcome.figures}.items():
        assert value.shape == (2,), name
        assert value.isfinite().all(), name
        assert (value >= -1e-6).all(), name
    assert outcome.figures["recall_oracle"].min() >= outcome.figures["recall_mean"].min()
    assert (outcome.figures["rows"] <= 0.3 * 300).all()


def test_a_backbone_with_layers_of_its_own_kind_is_refused(make_tiny_backbone, batch):
    backbone = make_tiny_backbone("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    with pytest.raises(BackboneError, match="training needs full attention in every layer"):
        read_document(backbone, batch["input_ids"], batch["attention_mask"], WINDOW)
