"""Slots: every wanted row lies in exactly one of them, within a bound that is never exceeded."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from sekv.kernels import choose_spans
from sekv.routing import select_spans
from sekv.stores.slots import SlotTable, slots_needed


@pytest.mark.parametrize("spared", [0, 1])
def test_the_bound_is_the_most_any_choice_needs(spared):
    length = torch.tensor([[5, 4, 9, 0, 4], [0, 0, 7, 3, 6]])
    for rows in range(24):
        most = 0
        for spans in length.tolist():
            real = [n for n in spans if n]
            for count in range(len(real) + 1):
                for chosen in combinations(real, count):
                    if sum(chosen) - spared * count <= rows:
                        most = max(most, sum(chosen))
        assert most <= slots_needed(length, torch.tensor([rows, rows]), spared) <= most + 8


def test_wanted_rows_are_held_once_and_only_new_ones_are_fetched():
    rng = np.random.default_rng(0)
    length = rng.integers(4, 12, (3, 20))
    table = SlotTable(length, capacity=48)
    held: list[set[int]] = [set(), set(), set()]
    reused = 0
    for _ in range(200):
        wanted = np.zeros((3, 20), dtype=bool)
        for group in range(3):
            left = 48
            for span in rng.permutation(8 if group else 20):  # groups that change their mind less reuse more
                if length[group, span] <= left:
                    wanted[group, span], left = True, left - length[group, span]
        missing = table.admit(wanted)
        new = set() if missing is None else set(missing.spans.tolist())
        for group in range(3):
            spans = set(np.flatnonzero(wanted[group]).tolist())
            fetched = {number % 20 for number in new if number // 20 == group}
            assert fetched.isdisjoint(held[group]) and spans - held[group] == fetched
            reused += len(spans & held[group])
            counts = np.bincount(table.owner[group], minlength=21)
            assert all(counts[span] == length[group, span] for span in spans)
            held[group] = {span for span in range(20) if counts[span]}
            assert all(counts[span] == length[group, span] for span in held[group])
        visible = table.visible(wanted[:, None])[:, 0]
        assert (visible.sum(axis=1) == (wanted * length).sum(axis=1)).all()
        if missing is not None:
            assert (
                table.owner[missing.group, missing.slot] == np.repeat(missing.spans % 20, length.ravel()[missing.spans])
            ).all()
    assert reused > 200


@pytest.mark.parametrize("thresholded", [False, True])
def test_the_choice_on_the_host_is_the_choice(thresholded):
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        length = torch.randint(0, 12, (6, 30), generator=g)
        rows = torch.randint(0, 60, (6,), generator=g)
        margin = torch.randn(6, 30, generator=g)
        want = select_spans(margin, length - 1, rows, margin >= 0 if thresholded else None)
        numbers = margin.numpy()
        eligible = numbers >= 0 if thresholded else numbers > -np.inf
        found = choose_spans(numbers, (length - 1).numpy(), rows[:, None].numpy(), eligible)
        assert np.array_equal(found, want.numpy())
