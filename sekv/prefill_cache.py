"""Contexts that were read, kept on disk: many questions, policies and runs share one prefill."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sekv.backbone import Backbone
from sekv.errors import DataError
from sekv.generation import read_context
from sekv.policies.base import Policy
from sekv.prefill import Prefill

_ABOUT = "cache.json"


class PrefillCache:
    """A folder of prefills of one backbone, each in a safetensors file named by its token ids.

    A file holds the keys and values of every layer, so it takes as many bytes as the full cache of its context.

    Args:
        folder: new or existing.
        backbone: the only one whose prefills the folder holds.

    Raises:
        DataError: the folder holds prefills of another backbone or dtype, or the backbone has layers whose caches are
            of another kind (sliding window, linear attention), which cannot be kept.
    """

    def __init__(self, folder: Path, backbone: Backbone) -> None:
        self.folder, self.backbone = folder, backbone
        if len(backbone.geometry.compressible) != backbone.geometry.num_layers:
            raise DataError(f"'{backbone.name}' has layers with caches of their own, which cannot be kept on disk")
        about = {
            "backbone": backbone.fingerprint(),
            "dtype": str(backbone.model.dtype),
            "tokenizer": _tokenizer_digest(backbone),
        }
        here = json.loads(json.dumps(about))
        path = folder / _ABOUT
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _replace_text(path, json.dumps(here, indent=2) + "\n")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error}); give another cache folder") from None
        if found != here:
            differing = [key for key in here if found.get(key) != here[key]]
            raise DataError(
                f"the cache in {folder} belongs to another backbone ({', '.join(differing)} differ); "
                "give another cache folder"
            )

    def read(self, ids: Sequence[int], policies: Sequence[Policy]) -> Prefill:
        """The prefill of a context, from the folder if it has all that `policies` need, and kept there otherwise.

        Raises:
            DataError: the file of this context is damaged.
        """
        name = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:32]
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            kept = self._load(path, list(ids), policies)
            if kept is not None:
                return kept
        made = read_context(self.backbone, ids, policies)
        self._save(made, path)
        return made

    def _save(self, made: Prefill, path: Path) -> None:
        tensors: dict[str, Tensor] = {"input_ids": made.input_ids}
        for kind in ("keys", "values", "queries"):
            tensors |= {f"{kind}.{i}": t for i, t in enumerate(getattr(made, kind)) if t is not None}
        tensors |= {k: t for k in ("hidden", "surprisal") if (t := getattr(made, k)) is not None}
        save_tensors(tensors, path)

    def _load(self, path: Path, ids: list[int], policies: Sequence[Policy]) -> Prefill | None:
        """What the file holds, or None when `policies` need more."""
        device = self.backbone.device
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                names = set(file.keys())
                window = max((policy.window for policy in policies), default=0)
                kept = file.get_slice("hidden").get_shape()[1] if "hidden" in names else 0
                lacks_surprisal = any(policy.needs_surprisal for policy in policies) and "surprisal" not in names
                if kept < min(window, len(ids)) or lacks_surprisal:
                    return None
                tensors: dict[str, Any] = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is damaged ({error}); delete it, and its context is read again") from None
        if tensors["input_ids"].tolist() != [ids]:
            raise DataError(f"{path} holds another context; delete it, and its context is read again")
        layers = range(self.backbone.geometry.num_layers)
        # A policy takes the last queries there are: no more than it asked for.
        queries = [tensors.get(f"queries.{i}") for i in layers]
        hidden = tensors.get("hidden")
        return Prefill(
            backbone=self.backbone,
            keys=[tensors[f"keys.{i}"] for i in layers],
            values=[tensors[f"values.{i}"] for i in layers],
            queries=[None if q is None or not window else q[:, :, -window:] for q in queries],
            hidden=None if hidden is None or not window else hidden[:, -window:],
            surprisal=tensors.get("surprisal"),
            input_ids=tensors["input_ids"],
            mask=torch.ones_like(tensors["input_ids"], dtype=torch.bool),
            native={},
        )


def save_tensors(tensors: dict[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, whole or not at all.

    Args:
        tensors: on any device.
        path: of the file.
        about: for its header.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, temporary, metadata=about)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _tokenizer_digest(backbone: Backbone) -> str | None:
    """A hash of the tokens that a tokenizer knows."""
    if backbone.tokenizer is None:
        return None
    vocabulary = sorted(backbone.tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
