"""What is measured: a backbone that reads real text, compresses it by each policy, and decodes token by token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sekv.adapter import SeKVAdapter
from sekv.architecture import find_architecture
from sekv.backbone import Backbone, load_backbone, pick_device, pick_dtype
from sekv.budget import Budget
from sekv.cache import CompressedCache
from sekv.corpus import builtin_english
from sekv.errors import DataError, PolicyError
from sekv.generation import read_context
from sekv.policies.base import Policy, compress
from sekv.policies.registry import build_policy
from sekv.policies.scorer import ScorerPolicy
from sekv.prefill import Prefill

REFERENCE = "full"
UNTRAINED = "untrained"  # in the place of an adapter: a fresh one
_RANDOM = "config:"
_CHARS_PER_TOKEN = 8  # of English at most, so that a tokenizer need not read the whole corpus


def open_backbone(name: str, dtype: str, device: str) -> Backbone:
    """A backbone with its weights, or with random ones.

    Args:
        name: as `load_backbone` reads it; `config:` and a folder, a config.json, a Hub id or a name of the table of
            architectures for random weights.
        dtype: as `load_backbone` reads it.
        device: likewise.

    Raises:
        BackboneError: there is none.
    """
    if not name.startswith(_RANDOM):
        return load_backbone(name, dtype, device)
    target = pick_device(device)
    backbone = find_architecture(name.removeprefix(_RANDOM)).random_backbone(pick_dtype(dtype, target), target)
    backbone.name = name  # figures say that the weights are random
    return backbone


def open_adapter(name: str | None, backbone: Backbone) -> SeKVAdapter | None:
    """The adapter of sekv, on the backbone's device.

    Args:
        name: a folder or a Hub id; `untrained` for a fresh one; None for none.
        backbone: that it has to fit.

    Raises:
        AdapterError: there is no such adapter, or it belongs to another backbone.
    """
    if name is None:
        return None
    if name == UNTRAINED:
        return SeKVAdapter.create(backbone).to(backbone.device)
    adapter = SeKVAdapter.from_pretrained(name)
    adapter.check_backbone(backbone)
    return adapter.to(backbone.device)


def open_policies(specs: Sequence[str], adapter: SeKVAdapter | None) -> dict[str, Policy]:
    """The policies by specification, the full cache first: it is what the others are compared with.

    Raises:
        PolicyError: a policy is unknown, cannot be made, or named twice.
    """
    twice = [spec for i, spec in enumerate(specs) if spec in specs[:i]]
    if twice:
        raise PolicyError(f"policy '{twice[0]}' is named twice; name each once")
    return {spec: build_policy(spec, adapter=adapter) for spec in dict.fromkeys((REFERENCE, *specs))}


@dataclass(frozen=True)
class Workload:
    """The backbone, the text, and the policies.

    Attributes:
        backbone: any.
        policies: by specification, the full cache among them.
        budget: of all policies.
    """

    backbone: Backbone
    policies: dict[str, Policy]
    budget: Budget

    @property
    def budget_value(self) -> float | int:
        """As figures state it."""
        return self.budget.share if self.budget.share is not None else self.budget.rows or 0

    def check(self, lengths: Sequence[int], new_tokens: int) -> None:
        """Refuses what could not be measured to its end.

        Raises:
            DataError: a length is none, or does not fit the backbone together with the tokens decoded after it.
        """
        limit = self.backbone.geometry.max_positions
        for length in lengths:
            if length < 2:
                raise DataError(f"a context of {length} tokens has nothing to measure; give at least 2")
            if length + new_tokens > limit:
                after = f" and {new_tokens} decoded ones" if new_tokens else ""
                raise DataError(
                    f"{length} tokens{after} exceed the {limit} positions of '{self.backbone.name}'; give lengths up "
                    f"to {limit - new_tokens}"
                )

    def ids(self, n: int) -> list[int]:
        """The first `n` tokens of the built-in English text, which begins again where it ends."""
        found = self._encode(self._text[: n * _CHARS_PER_TOKEN])
        if len(found) < n:
            found = self._encode(self._text)
        return (found * -(-n // len(found)))[:n]

    @cached_property
    def _text(self) -> str:
        return "\n\n".join(builtin_english())

    def _encode(self, text: str) -> list[int]:
        if self.backbone.tokenizer is None:  # bytes: random weights know no words
            return [byte % self.backbone.geometry.vocab_size for byte in text.encode()]
        found: list[int] = self.backbone.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def read(self, ids: Sequence[int], specs: Sequence[str] | None = None, offload: bool = False) -> Prefill:
        """A prefill for some policies, all of them by default."""
        chosen = [self.policies[spec] for spec in (self.policies if specs is None else specs)]
        return read_context(self.backbone, ids, chosen, offload)

    def needs(self, spec: str) -> Hashable:
        """What a policy's prefill records: policies with equal needs share one."""
        policy = self.policies[spec]
        return policy.needs_surprisal, policy.window, tuple(policy.observers)

    def build(self, context: Prefill, spec: str) -> CompressedCache:
        """The memory of a policy."""
        return compress(as_read(context), self.policies[spec], self.budget)

    def scorer(self, spec: str) -> ScorerPolicy | None:
        """The policy, if it scores tokens."""
        policy = self.policies[spec]
        return policy if isinstance(policy, ScorerPolicy) else None

    @torch.no_grad()
    def score(self, context: Prefill, policy: ScorerPolicy) -> None:
        """Scores all tokens of all layers."""
        read = as_read(context)
        for layer in self.backbone.geometry.compressible:
            policy.score(read, layer)

    @torch.no_grad()
    def step(self, cache: CompressedCache, token: int) -> Tensor:
        """One decode step: reads a token and says the next one [1]."""
        ids = torch.tensor([[token]], device=self.backbone.device)
        position = torch.tensor([[cache.get_seq_length()]], device=self.backbone.device)
        hidden = self.backbone.hidden_states(ids, position_ids=position, cache=cache)
        return self.backbone.logits(hidden)[:, -1].argmax(dim=-1)


def as_read(context: Prefill) -> Prefill:
    """The prefill without what policies have added to it since, so that they find it out again."""
    return replace(context, observed=dict(context.observed))
