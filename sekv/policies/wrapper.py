"""Policies that wrap a scorer: they change its scores, everything else is the base's."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sekv.errors import PolicyError
from sekv.observation import Observer
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill

_FROM_BASE = ("sinks", "tail", "allocation", "safeguard", "layers", "beta")


@dataclass(kw_only=True)
class WrapperPolicy(ScorerPolicy):
    """A scorer over another scorer: `hubkv:snapkv[allocation=headwise]`; a method implements `ranking`.

    Sinks, tail, allocation and what the prefill must record are the base's.

    Attributes:
        base: the scorer to refine.
    """

    base: ScorerPolicy

    sinks: int = field(init=False)
    tail: int = field(init=False)
    allocation: str = field(init=False)
    safeguard: float = field(init=False)
    layers: str = field(init=False)
    beta: float = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.base, ScorerPolicy) or isinstance(self.base, WrapperPolicy):
            raise PolicyError(f"{self.name} refines a scorer such as keydiff or snapkv; {self.base.name} is none")
        for option in _FROM_BASE:
            setattr(self, option, getattr(self.base, option))
        super().__post_init__()

    @property
    def needs_surprisal(self) -> bool:
        """The base's."""
        return self.base.needs_surprisal

    @property
    def window(self) -> int:
        """The base's."""
        return self.base.window

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The base's."""
        return self.base.observers

    @property
    def protected_tail(self) -> int:
        """The base's."""
        return self.base.protected_tail

    def protected(self, scores: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """As the base protects."""
        return self.base.protected(scores, mask, rows)

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """The base's scores [B, K, N]."""
        return self.base.score(prefill, layer)
