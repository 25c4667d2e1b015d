"""A backbone's architecture without its weights: to plan before anything is downloaded, or to fill it at random."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import DEFAULT_BACKBONE, Backbone
from sekv.default_backbone import cache_root
from sekv.errors import BackboneError
from sekv.hub import hub_snapshot, is_hub_id

_TABLE = "architectures.json"
_CONFIG = "config.json"


@dataclass(frozen=True)
class Architecture:
    """What a backbone is made of.

    Attributes:
        name: as the configuration names it.
        fields: its config.json.
        source: where the fields come from, for people.
    """

    name: str
    fields: dict[str, Any]
    source: str

    @cached_property
    def backbone(self) -> Backbone:
        """The backbone on the meta device in bfloat16: shapes and parameters, no weights.

        Raises:
            BackboneError: transformers does not know the architecture, or it cannot be compressed.
        """
        return self._made_on(torch.device("meta"), torch.bfloat16)

    def random_backbone(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Backbone:
        """The backbone with random weights and without a tokenizer: to measure time and memory, which need no others.

        Raises:
            BackboneError: as `backbone`.
        """
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return self._made_on(device, dtype)

    def _made_on(self, device: torch.device, dtype: torch.dtype) -> Backbone:
        auto: Any = AutoModelForCausalLM
        try:
            config = AutoConfig.for_model(**self.fields)
            with device:
                model = auto.from_config(config, dtype=dtype)
        except Exception as error:  # each architecture checks its fields in its own way
            reason = " ".join(str(error).split())
            raise BackboneError(f"the config.json of '{self.name}' describes no causal LM: {reason}") from error
        return Backbone.from_model(model, None, self.name)

    def adapter(self, config: SeKVConfig) -> SeKVAdapter:
        """A fresh adapter over the backbone; it belongs to no weights, so it fits none.

        Raises:
            PolicyError: the adapter does not fit the head dimension.
        """
        shape = self.backbone.geometry
        return SeKVAdapter(
            shape.compressible,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            config,
            {},
            self.backbone.num_parameters,
        )


def shipped_architectures() -> dict[str, dict[str, Any]]:
    """Published architectures of the backbones that configs/ trains, by name or Hub id."""
    return json.loads(files("sekv").joinpath(_TABLE).read_text(encoding="utf-8"))


def find_architecture(name: str) -> Architecture:
    """Looks in a local folder, the table that comes with this package, and for other Hub ids at config.json alone.

    Args:
        name: `smollm2-135m`, a folder or the config.json in it, or a Hub id.

    Raises:
        BackboneError: there is no such folder, the Hub does not have it or cannot be reached, or it is no JSON.
    """
    folder = cache_root() / name if name == DEFAULT_BACKBONE else Path(name).expanduser()
    if folder.name == _CONFIG and folder.is_file():
        folder = folder.parent
    if (folder / _CONFIG).is_file():
        return Architecture(name, _read(folder / _CONFIG, name), f"{folder / _CONFIG}")
    if name in (table := shipped_architectures()):
        return Architecture(name, table[name], "its published config.json, as shipped with sekv")
    if folder.exists() or not is_hub_id(name):
        raise BackboneError(
            f"backbone '{name}' is neither a folder with {_CONFIG}, nor a Hub id, nor one of {', '.join(table)}"
        )
    path = hub_snapshot(name, (_CONFIG,)) / _CONFIG
    if not path.is_file():
        raise BackboneError(f"'{name}' has no {_CONFIG} on the Hub; give a causal LM of transformers")
    return Architecture(name, _read(path, name), f"its {_CONFIG} from the Hub")


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BackboneError(f"the config.json of '{name}' is not JSON ({error}); copy or download it again") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise BackboneError(f"the config.json of '{name}' names no model_type; give a causal LM of transformers")
    return fields
