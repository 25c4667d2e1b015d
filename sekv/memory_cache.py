"""Compressed memories kept on disk, beside the prefills they come from: later questions and runs compress nothing."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sekv import __version__
from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache
from sekv.errors import DataError
from sekv.policies.base import Policy, compress, restore
from sekv.prefill import Prefill
from sekv.prefill_cache import save_tensors

_FOLDER = "memories"

Read = Callable[[], tuple[Prefill, float]]
"""Gives the context and the seconds that reading it took."""


@dataclass(frozen=True)
class Memory:
    """A compressed context and what it took to make it, wherever it comes from now.

    Attributes:
        cache: the compressed context; fork it for each question.
        prefill_seconds: reading the context.
        seconds: compressing it.
    """

    cache: CompressedCache
    prefill_seconds: float
    seconds: float

    @classmethod
    def of(cls, context: Prefill, prefill_seconds: float, policy: Policy, budget: Budget) -> Memory:
        """Compresses a context that was read."""
        start = time.perf_counter()
        cache = compress(context, policy, budget)
        return cls(cache, prefill_seconds, time.perf_counter() - start)


class MemoryCache:
    """The folder `memories` of a cache folder: one safetensors file per context, policy and budget.

    The header of a file says the context, the policy with all of its options, the adapter, the budget and the version
    of this package; its name is a digest of that. The backbone and its tokenizer are those of the cache folder.

    Memories that hold all keys and values as they are (full, quest, sentencekv, and every policy at a budget that keeps
    everything) get no file: they are made of the prefill as quickly as they would be read.

    Args:
        folder: of a `PrefillCache`.
        backbone: the one of that cache.
    """

    def __init__(self, folder: Path, backbone: Backbone) -> None:
        self.folder, self.backbone = folder / _FOLDER, backbone

    def get(self, ids: Sequence[int], policy: Policy, budget: Budget, read: Read) -> Memory:
        """The memory of a context: from the folder, or made and kept there.

        Args:
            ids: the context.
            policy: the method.
            budget: share of the context or number of rows.
            read: called when there is no file.

        Raises:
            DataError: the file is damaged, or holds another memory than its name says.
        """
        about = _about(ids, policy, budget)
        path = self.folder / f"{_digest(about)}.safetensors"
        if path.exists():
            return self._load(path, about, ids, policy, budget)
        context, prefill_seconds = read()
        made = Memory.of(context, prefill_seconds, policy, budget)
        tensors: dict[str, Tensor] = {}
        for layer, store in enumerate(made.cache.stores):
            state = store.state()
            if state is None:
                return made
            tensors |= {f"{layer}.{name}": tensor for name, tensor in state.items()}
        if policy.needs_surprisal and context.surprisal is not None:
            tensors["surprisal"] = context.surprisal
        self.folder.mkdir(parents=True, exist_ok=True)
        took = {"prefill_seconds": repr(made.prefill_seconds), "seconds": repr(made.seconds)}
        save_tensors(tensors, path, about | took)
        return made

    def _load(self, path: Path, about: dict[str, str], ids: Sequence[int], policy: Policy, budget: Budget) -> Memory:
        try:
            with safe_open(path, framework="pt", device=str(self.backbone.device)) as file:
                found = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
            took = [float(found[name]) for name in ("prefill_seconds", "seconds")]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}); delete it, and its context is compressed again") from None
        if differing := [name for name in about if found.get(name) != about[name]]:
            raise DataError(
                f"{path} holds another memory ({', '.join(differing)} differ); delete it, and it is compressed again"
            )
        states: list[dict[str, Tensor]] = [{} for _ in range(self.backbone.geometry.num_layers)]
        surprisal = tensors.pop("surprisal", None)
        for name, tensor in tensors.items():
            layer, _, rest = name.partition(".")
            states[int(layer)][rest] = tensor
        blank = Prefill.blank(self.backbone, torch.tensor([list(ids)], device=self.backbone.device), surprisal)
        return Memory(restore(blank, policy, budget, states), *took)


def adapter_digest(adapter: SeKVAdapter) -> str:
    """A hash of an adapter's configuration and weights."""
    digest = hashlib.sha256(json.dumps(asdict(adapter.config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(adapter.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _about(ids: Sequence[int], policy: Policy, budget: Budget) -> dict[str, str]:
    """What decides a memory of one backbone."""
    adapter = getattr(policy, "adapter", None)
    return {
        "version": __version__,
        "context": _digest(list(ids)),
        "policy": repr(policy),  # a dataclass: with every option, given or by default
        "adapter": "" if adapter is None else adapter_digest(adapter),
        "budget": repr(budget),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
