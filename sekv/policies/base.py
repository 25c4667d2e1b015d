"""What a policy is: it turns each layer's keys and values into a store, within a budget."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sekv.budget import Budget
from sekv.cache import CompressedCache, StoreLayer
from sekv.errors import BudgetError, PolicyError
from sekv.observation import Observer
from sekv.prefill import Prefill
from sekv.stores.base import TAIL_BLOCK, Store
from sekv.stores.full import FullStore

_SHORT_CONTEXT = 36  # tokens: the default sinks and tail; larger ones do not lift the budget


@dataclass(kw_only=True)
class Policy(ABC):
    """A way to compress a context.

    Attributes:
        sinks: first tokens that are always kept exactly.
        tail: last tokens that are always kept exactly.
        max_rows: most rows, of context and later tokens together, that a query may attend to: in a long generation the
            oldest tokens, the question's included, leave the tail, and positions stay true. They are folded into spans
            (sekv), compete by the policy's own score (`ScorerPolicy.scores_keys`), or are forgotten. None: it grows.
    """

    name: ClassVar[str]
    uses_budget: ClassVar[bool] = True  # False: the same at every budget

    sinks: int = 4
    tail: int = 32
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for option in ("sinks", "tail"):
            if getattr(self, option) < 0:
                raise PolicyError(f"{self.name}: {option} must be 0 or more, got {getattr(self, option)}")

    @property
    def needs_surprisal(self) -> bool:
        """Whether the prefill must compute surprisal for this policy: the LM head over every token."""
        return False

    @property
    def window(self) -> int:
        """Last queries of the context that the prefill must keep for this policy."""
        return 0

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Statistics over all queries that the prefill must gather for this policy."""
        return ()

    def prepare(self, prefill: Prefill, budget: Budget) -> Any:
        """What all layers share (rows per context, segmentation), computed once; `compress` receives it as `plan`.

        Raises:
            BudgetError: the budget cannot hold the memory; the message says the smallest that can.
        """
        return self.rows(prefill, budget)

    def rows(self, prefill: Prefill, budget: Budget) -> Tensor:
        """Rows allowed for each context [B]; a short one of sinks and tail only is kept whole."""
        whole = min(self.sinks + self.tail, _SHORT_CONTEXT)
        rows = [n if n <= whole else budget.rows_for(n) for n in prefill.lengths.tolist()]
        return torch.tensor(rows, device=prefill.mask.device)

    @abstractmethod
    def compress(self, prefill: Prefill, layer: int, plan: Any) -> Store:
        """The store of one compressible layer."""

    def restore(self, prefill: Prefill, layer: int, plan: Any, state: dict[str, Tensor]) -> Store:
        """The store of one layer from its `Store.state`, for policies whose stores have one.

        Args:
            prefill: of the context, without keys (`Prefill.blank`).
            layer: number of the layer.
            plan: from `prepare`.
            state: on the compute tier.
        """
        raise PolicyError(f"{self.name} keeps no memories: compress the context again")


@dataclass(kw_only=True)
class FullPolicy(Policy):
    """The full cache: nothing is dropped, whatever the budget says."""

    name: ClassVar[str] = "full"
    uses_budget: ClassVar[bool] = False

    def compress(self, prefill: Prefill, layer: int, plan: Any) -> Store:
        """All rows, exactly."""
        return full_store(prefill, layer)


def full_store(prefill: Prefill, layer: int) -> FullStore:
    """A store that keeps every row of a layer."""
    key, value = prefill.key_value(layer)
    return FullStore(key, value, prefill.mask)


def compress(prefill: Prefill, policy: Policy, budget: Budget | str | float | int) -> CompressedCache:
    """Compresses every layer of a prefill that can be compressed.

    A budget of the whole context, and a context no longer than sinks + tail, keep everything: the full cache, token for
    token, under every policy.

    Args:
        prefill: the context, read once.
        policy: the method.
        budget: share of the context or number of rows.

    Returns:
        A cache for `model.generate`; `fork()` it to ask several questions.

    Raises:
        BudgetError: the budget cannot hold what the policy must keep.
        PolicyError: the policy cannot run on this backbone or needs what the prefill did not record.
    """
    budget = Budget.parse(budget)
    return _compressed(prefill, policy, budget, policy.compress)


def restore(prefill: Prefill, policy: Policy, budget: Budget, states: Sequence[dict[str, Tensor]]) -> CompressedCache:
    """The cache whose stores' states these are, as `compress` made it.

    Args:
        prefill: of the context, without keys (`Prefill.blank`).
        policy: the method, with the same options.
        budget: likewise.
        states: `Store.state` of every layer; all of them can be compressed.
    """

    def make(context: Prefill, layer: int, plan: Any) -> Store:
        return policy.restore(context, layer, plan, states[layer])

    return _compressed(prefill, policy, budget, make)


def _compressed(
    prefill: Prefill, policy: Policy, budget: Budget, make: Callable[[Prefill, int, Any], Store]
) -> CompressedCache:
    """A cache of what `make` gives for each layer that can be compressed."""
    if policy.needs_surprisal and prefill.surprisal is None:
        raise PolicyError(f"{policy.name} needs surprisal; call prefill(..., surprisal=True)")
    keep_all = bool((policy.rows(prefill, budget) >= prefill.lengths).all())
    max_tail = _room_for_tail(policy, prefill, budget)
    layers: list[Any] = []
    plan = None if keep_all else policy.prepare(prefill, budget)
    for index in range(prefill.backbone.geometry.num_layers):
        if index in prefill.native:
            # A copy: decoding extends these layers, and the prefill may be compressed again.
            layers.append(copy.deepcopy(prefill.native[index]))
            continue
        store = full_store(prefill, index) if keep_all else make(prefill, index, plan)
        store.max_tail = max_tail
        layers.append(StoreLayer(store, prefill.n_tokens))
    return CompressedCache(layers, prefill.n_tokens)


def _room_for_tail(policy: Policy, prefill: Prefill, budget: Budget) -> int | None:
    """Tail tokens that `max_rows` leaves room for, or None without it."""
    if policy.max_rows is None:
        return None
    rows = int((policy.rows(prefill, budget) if policy.uses_budget else prefill.lengths).max())
    if policy.max_rows < rows + TAIL_BLOCK:
        raise BudgetError(
            f"max_rows={policy.max_rows} leaves too little room beside the {rows} rows of the context; give at least "
            f"{rows + TAIL_BLOCK}, or a smaller budget"
        )
    return policy.max_rows - rows


def check_minimum(rows: Tensor, minimum: Tensor, lengths: Tensor, what: str) -> None:
    """Refuses a budget in rows [B] below what any context of the batch needs at least [B].

    Raises:
        BudgetError: names the smallest budget that works, in rows and as a share.
    """
    short = (rows < minimum) & (rows < lengths)
    if bool(short.any()):
        i = int(short.nonzero()[0])
        n, least = int(lengths[i]), int(minimum[i])
        raise BudgetError(
            f"budget of {int(rows[i])} rows is too small for a context of {n} tokens: {what} needs at least {least} "
            f"rows (a share of {min(1.0, least / n + 5e-5):.4f})"
        )


def observed(prefill: Prefill, observer: Observer, layer: int, name: str) -> Any:
    """What an observer found in a layer.

    Raises:
        PolicyError: the prefill did not run it; `name` says who needs it.
    """
    if observer not in prefill.observed:
        raise PolicyError(f"{name} needs what the prefill observes; call prefill(..., observers=policy.observers)")
    return prefill.observed[observer][layer]
