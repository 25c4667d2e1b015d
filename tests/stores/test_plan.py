"""Rows shared among layers: in proportion, as many on average as given, none more than a layer can use."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sekv.stores.plan import share_among_layers

FACTORS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=12)


def test_in_proportion():
    shares = share_among_layers(torch.tensor([0.5, 1.0, 1.5]), torch.tensor([100, 7]), torch.tensor([1000, 1000]))
    assert shares.tolist() == [[50, 3], [100, 7], [150, 10]]


def test_what_a_layer_cannot_use_goes_to_the_others():
    shares = share_among_layers(torch.tensor([0.5, 0.5, 2.0]), torch.tensor([100]), torch.tensor([120]))
    assert shares.tolist() == [[90], [90], [120]]


@settings(deadline=None)
@given(FACTORS, st.integers(0, 5000), st.integers(0, 5000))
def test_the_mean_is_never_above_what_is_given(factors, rows, most):
    shares = share_among_layers(torch.tensor(factors), torch.tensor([rows]), torch.tensor([most]))[:, 0]
    n = len(factors)
    assert int(shares.min()) >= 0 and int(shares.max()) <= most
    assert int(shares.sum()) <= n * min(rows, most)
    assert int(shares.sum()) > n * min(rows, most) - n - 1  # whole rows: less than one is lost in each layer


@settings(deadline=None)
@given(FACTORS, st.integers(0, 5000), st.integers(0, 100))
@example([1.0, 2.0], 1, 0)  # less than a row to spare, and a layer that lacks one
def test_enough_for_all_gives_all(factors, most, more):
    shares = share_among_layers(torch.tensor(factors), torch.tensor([most + more]), torch.tensor([most]))
    assert shares[:, 0].tolist() == [most] * len(factors)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 5000), st.integers(0, 5000))
def test_equal_factors_are_equal_rows(n, rows, most):
    shares = share_among_layers(torch.ones(n), torch.tensor([rows]), torch.tensor([most]))
    assert shares[:, 0].tolist() == [min(rows, most)] * n
