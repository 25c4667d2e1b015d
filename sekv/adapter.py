"""The trainable part of SeKV: routing projections, thresholds and the rank gate (method sections 1.2 and 1.3)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sekv.backbone import Backbone, compare_fingerprints
from sekv.errors import AdapterError, PolicyError
from sekv.hub import hub_snapshot, is_hub_id
from sekv.segmentation import SegmentationConfig

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
FORMAT_VERSION = 1

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

SHARE_BIAS = math.log(10.0)  # to begin with alpha is one half where a span is expected to hold a tenth of the attention


@dataclass(frozen=True)
class SeKVConfig:
    """What an adapter was trained for; a policy starts from these values.

    Attributes:
        index: what a router knows of a span: `tokens`, a projected key of each of its tokens, or `summary`, the
            projected summary key alone (the paper's).
        routing_dim: d_r, rows of each head's projection.
        max_rank: r_max, most components kept of a span's keys and of its values; spans that so many components would
            not make smaller are not factored.
        basis_bits: how the host stores bases and raw rows: 8 for whole numbers with one step per component and per raw
            row, 0 for the backbone's dtype.
        index_bits: how the compute tier stores an index of tokens, 4 or 8 bits a number.
        gate_hidden: width of the rank gate's hidden layer.
        alpha: anchors are tokens whose surprisal exceeds mean + alpha * standard deviation.
        min_span: shorter spans stay exact, in tokens.
        max_span: longer spans are split, in tokens.
        persistent_share: share of the budget that exact rows and summaries may take.
        summary_share: share of the budget for summary rows, which neighbouring spans share; 1 gives each its own.
        summary_bias: added to the logits of summary rows, to begin with; one for each head is learned.
        segmentation: `surprisal`, or `fixed` for equal chunks (ablation).
        anchors: keep anchors exact; False is an ablation.
        summary_weights: `surprisal`, or `uniform` (ablation).
        rope: factor keys `pre` or `post` rotation.
        share_group: all heads of a KV group attend to the union of their spans; False gives per-head masks.
        zoom: False never zooms: summaries stand for all spans, nothing is rebuilt (ablation).
        threshold: `head` for one threshold per layer and head, `global` for a single one (ablation).
    """

    index: str = "tokens"
    routing_dim: int = 16
    max_rank: int = 24
    basis_bits: int = 8
    index_bits: int = 4
    gate_hidden: int = 32
    alpha: float = 1.0
    min_span: int = 4
    max_span: int = 32
    persistent_share: float = 0.35
    summary_share: float = 0.1
    summary_bias: float = -1.0
    segmentation: str = "surprisal"
    anchors: bool = True
    summary_weights: str = "surprisal"
    rope: str = "pre"
    share_group: bool = True
    zoom: bool = True
    threshold: str = "head"

    def __post_init__(self) -> None:
        choices = {
            "index": ("tokens", "summary"),
            "summary_weights": ("surprisal", "uniform"),
            "rope": ("pre", "post"),
            "threshold": ("head", "global"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise PolicyError(f"{name} '{getattr(self, name)}' is unknown; use one of {', '.join(allowed)}")
        if self.basis_bits not in (0, 8):
            raise PolicyError(f"basis_bits must be 8, or 0 for the backbone's dtype, got {self.basis_bits}")
        if self.index_bits not in (4, 8):
            raise PolicyError(f"index_bits must be 4 or 8, got {self.index_bits}")
        for name in ("routing_dim", "max_rank", "gate_hidden"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.summary_share < 1.0 and not self.share_group:
            raise PolicyError(
                "share_group=False needs summary_share=1: heads that zoom apart cannot share summary rows"
            )
        self.cutting()  # refuses what no context can be cut by

    def cutting(self, **protected: int) -> SegmentationConfig:
        """How contexts are cut; `sinks` and `tail` are the policy's to say."""
        return SegmentationConfig(
            alpha=self.alpha,
            min_span=self.min_span,
            max_span=self.max_span,
            persistent_share=self.persistent_share,
            summary_share=self.summary_share,
            method=self.segmentation,
            anchors=self.anchors,
            **protected,
        )


class LayerRouter(NamedTuple):
    """Routing parameters of one layer, float32.

    Attributes:
        projection: W [H, d_r, d].
        key_projection: the projection of the keys [K, d_r, d] with an index of tokens; None where W serves both.
        threshold: tau in (0, 1) [H].
        scale: factor on the inner product [H], positive.
        length_coefficient: factor on log|S| [H], not negative; None with an index of tokens, whose sum grows by itself.
        offset: added to a span's log-sum over its tokens [H]; None with an index of summaries.
        bias: added to the logit [H].
        summary_bias: added to the logits of summary rows [H].
    """

    projection: Tensor
    key_projection: Tensor | None
    threshold: Tensor
    scale: Tensor
    length_coefficient: Tensor | None
    offset: Tensor | None
    bias: Tensor
    summary_bias: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> LayerRouter:
        """The router with every parameter that there is changed."""
        return LayerRouter._make(None if parameter is None else change(parameter) for parameter in self)


class RankGate(nn.Module):
    """g = sigmoid(MLP([sigma_i / sigma_1; k_S / |k_S|])): how much of each component a span keeps.

    One network serves keys and values of every layer and head.

    Args:
        max_rank: r_max.
        head_dim: d.
        hidden: width of the hidden layer.
    """

    def __init__(self, max_rank: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.max_rank = max_rank
        self.inner = nn.Linear(max_rank + head_dim, hidden)
        self.outer = nn.Linear(hidden, max_rank)
        nn.init.normal_(self.outer.weight, std=0.02)
        nn.init.constant_(self.outer.bias, 5.0)  # starts by keeping nearly everything: 0.993

    def forward(self, sigma: Tensor, summary_key: Tensor) -> Tensor:
        """Gates in (0, 1).

        Args:
            sigma: singular values, descending [..., r] with r <= r_max.
            summary_key: k_S [..., d].

        Returns:
            [..., r] float32.
        """
        rank = sigma.shape[-1]
        spectrum = sigma / sigma[..., :1].clamp_min(1e-12)
        spectrum = nn.functional.pad(spectrum, (0, self.max_rank - rank))
        direction = nn.functional.normalize(summary_key.float(), dim=-1)
        hidden = nn.functional.gelu(self.inner(torch.cat([spectrum, direction], dim=-1)))
        return torch.sigmoid(self.outer(hidden))[..., :rank]


def _directions(n: int, heads: int, rank: int, dim: int, generator: torch.Generator) -> Tensor:
    """Orthonormal projections [n, heads, rank, dim]."""
    return torch.linalg.qr(torch.randn(n, heads, dim, rank, generator=generator)).Q.mT.contiguous()


class SeKVAdapter(nn.Module):
    """Everything SeKV trains. The backbone stays frozen and is not part of this module.

    Args:
        layers: indices of the backbone's layers that are compressed.
        num_heads: query heads H per layer.
        num_kv_heads: KV heads K per layer.
        head_dim: dimension d of a head.
        config: hyper-parameters.
        fingerprint: identity of the backbone, saved beside the weights and checked at loading.
        backbone_parameters: parameters of the backbone, for the share; None when unknown.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        config: SeKVConfig,
        fingerprint: Mapping[str, Any],
        backbone_parameters: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.fingerprint = config, dict(fingerprint)
        self.layers = tuple(layers)
        self.backbone_parameters = backbone_parameters
        n, heads, dim = len(self.layers), num_heads, head_dim
        if config.routing_dim > dim:
            raise PolicyError(f"routing_dim {config.routing_dim} exceeds the head dimension {dim}")
        generator = torch.Generator().manual_seed(0)
        self.projection = nn.Parameter(_directions(n, heads, config.routing_dim, dim, generator))
        shape = (n, heads) if config.threshold == "head" else (1, 1)
        self.threshold_logit = nn.Parameter(torch.zeros(shape))
        self.log_scale = nn.Parameter(torch.zeros(n, heads))
        self.bias = nn.Parameter(torch.full((n, heads), SHARE_BIAS if config.index == "tokens" else 0.0))
        self.summary_bias = nn.Parameter(torch.full((n, heads), config.summary_bias))
        if config.index == "tokens":
            keys = self.projection.detach().unflatten(1, (num_kv_heads, -1)).mean(2)
            self.key_projection = nn.Parameter(keys)
            self.offset = nn.Parameter(torch.zeros(n, heads))
        else:
            self.length_raw = nn.Parameter(torch.full((n, heads), math.log(math.e - 1.0)))  # softplus gives 1
        self.gate = RankGate(config.max_rank, dim, config.gate_hidden)
        # Not trained by gradient: measured at the warm start.
        self.register_buffer("row_factor", torch.ones(n))

    row_factor: Tensor
    """Rows that each layer may zoom into, relative to the mean of all layers [L]."""

    @classmethod
    def create(cls, backbone: Backbone, config: SeKVConfig | None = None) -> SeKVAdapter:
        """A fresh adapter for a backbone, on its device."""
        shape = backbone.geometry
        adapter = cls(
            shape.compressible,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            config or SeKVConfig(),
            backbone.fingerprint(),
            backbone.num_parameters,
        )
        return adapter.to(backbone.device)

    @property
    def num_parameters(self) -> int:
        """Trainable parameters."""
        return sum(p.numel() for p in self.parameters())

    @property
    def parameter_share(self) -> float | None:
        """Trainable parameters over the backbone's, or None when the backbone is unknown."""
        return self.num_parameters / self.backbone_parameters if self.backbone_parameters else None

    def router(self, layer: int) -> LayerRouter:
        """Routing parameters of a backbone layer."""
        try:
            i = self.layers.index(layer)
        except ValueError:
            raise AdapterError(
                f"the adapter has no router for layer {layer}; it has layers {list(self.layers)}"
            ) from None
        return self._routers().each(lambda parameter: parameter[i])

    def joint_router(self) -> LayerRouter:
        """All layers' routers as one whose heads are (layer, head), for work on every layer at once."""
        return self._routers().each(lambda parameter: parameter.flatten(0, 1))

    def _routers(self) -> LayerRouter:
        by_tokens = self.config.index == "tokens"
        return LayerRouter(
            projection=self.projection,
            key_projection=self.key_projection if by_tokens else None,
            threshold=torch.sigmoid(self.threshold_logit).expand_as(self.bias),
            scale=self.log_scale.exp(),
            length_coefficient=None if by_tokens else nn.functional.softplus(self.length_raw),
            offset=self.offset if by_tokens else None,
            bias=self.bias,
            summary_bias=self.summary_bias,
        )

    def check_backbone(self, backbone: Backbone) -> None:
        """Refuses a backbone the adapter was not trained for.

        Raises:
            AdapterError: names every difference, both sides.
        """
        differences = compare_fingerprints(self.fingerprint, backbone.fingerprint())
        if differences:
            raise AdapterError(
                f"the adapter was trained for another backbone than {backbone.name}: {'; '.join(differences)}. "
                "Load the backbone it was trained for, or train an adapter for this one with `sekv train`."
            )

    def save_pretrained(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes adapter_config.json and adapter_model.safetensors, each under a temporary name first.

        Args:
            directory: created when missing.
            extra: JSON-able facts about the training, kept under `training`.

        Returns:
            The directory.

        Raises:
            AdapterError: the directory cannot be made.
        """
        from sekv import __version__

        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AdapterError(f"the adapter's folder {folder} cannot be made: {error.strerror}") from None
        payload = {
            "format_version": FORMAT_VERSION,
            "sekv_version": __version__,
            "config": asdict(self.config),
            "backbone": self.fingerprint,
            "backbone_parameters": self.backbone_parameters,
            "training": dict(extra or {}),
        }
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.state_dict().items()}
        weights, config = folder / (WEIGHTS_NAME + ".tmp"), folder / (CONFIG_NAME + ".tmp")
        try:
            save_file(tensors, weights)
            config.write_text(json.dumps(payload, indent=2) + "\n")
            weights.chmod(config.stat().st_mode)  # safetensors writes for the owner only; let the umask decide
            os.replace(weights, folder / WEIGHTS_NAME)
            os.replace(config, folder / CONFIG_NAME)
        except safetensors.SafetensorError as error:  # how the library reports a disk that cannot be written
            raise AdapterError(f"{folder / WEIGHTS_NAME} cannot be written ({error})") from None
        finally:
            for temporary in (weights, config):
                temporary.unlink(missing_ok=True)
        return folder

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, backbone: Backbone | None = None) -> SeKVAdapter:
        """Loads an adapter; nothing in the files is executed.

        Args:
            name_or_path: folder with adapter_config.json and adapter_model.safetensors, or a Hub id such as `org/name`.
            backbone: checked against the adapter's fingerprint, and where the adapter is put.

        Returns:
            The adapter in evaluation mode.

        Raises:
            AdapterError: a file is missing or corrupt, tensors are missing, unexpected, misshapen or not finite, the
                backbone is not the one the adapter was trained for, or the Hub cannot serve it.
        """
        folder = _locate(name_or_path)
        payload = read_adapter_config(folder)
        adapter = cls(
            *_shape(payload["backbone"], folder),
            _config(payload["config"], folder),
            payload["backbone"],
            payload.get("backbone_parameters"),
        )
        if backbone is not None:
            adapter.check_backbone(backbone)
        adapter._load_tensors(folder / WEIGHTS_NAME)
        if backbone is not None:
            adapter.to(backbone.device)
        return adapter.eval().requires_grad_(False)

    def _load_tensors(self, path: Path) -> None:
        if not path.is_file():
            raise AdapterError(f"{path} does not exist; an adapter folder holds {CONFIG_NAME} and {WEIGHTS_NAME}")
        try:
            tensors = load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise AdapterError(f"{path} is corrupt or truncated ({error}); export the adapter again") from None
        tensors.setdefault("row_factor", torch.ones_like(self.row_factor))  # adapters made before layers differed
        expected = self.state_dict()
        problems = [f"missing tensor '{name}'" for name in sorted(expected.keys() - tensors.keys())]
        problems += [f"unexpected tensor '{name}'" for name in sorted(tensors.keys() - expected.keys())]
        problems += [
            f"tensor '{name}' has shape {list(tensors[name].shape)}, expected {list(expected[name].shape)}"
            for name in sorted(expected.keys() & tensors.keys())
            if tensors[name].shape != expected[name].shape
        ]
        if problems:
            raise AdapterError(f"{path} does not fit its {CONFIG_NAME}: {'; '.join(problems)}")
        broken = [f"'{name}'" for name in sorted(tensors) if not bool(tensors[name].isfinite().all())]
        if broken:
            raise AdapterError(
                f"{path} holds values that are not finite in {', '.join(broken)}; export an earlier checkpoint"
            )
        self.load_state_dict(tensors)


def _locate(name_or_path: str | Path) -> Path:
    """The folder of that name, or the one the Hub's cache keeps of that repository."""
    folder = Path(name_or_path).expanduser()
    if folder.exists() or not is_hub_id(str(name_or_path)):
        return folder
    try:
        return hub_snapshot(str(name_or_path), (CONFIG_NAME, WEIGHTS_NAME), AdapterError)
    except AdapterError as error:
        raise AdapterError(f"there is no folder {folder} with an adapter, and on the Hub: {error}") from error


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json, checked for its parts.

    Raises:
        AdapterError: missing, not JSON, another format version, or incomplete.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise AdapterError(f"{path} does not exist; give a Hub id, or a folder made by `sekv export`")
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON ({error}); export the adapter again") from None
    if not isinstance(payload, dict) or payload.get("format_version") != FORMAT_VERSION:
        found = payload.get("format_version") if isinstance(payload, dict) else None
        raise AdapterError(f"{path} has format version {found}, this version of sekv reads {FORMAT_VERSION}")
    missing = [key for key in ("config", "backbone") if not isinstance(payload.get(key), dict)]
    if missing:
        raise AdapterError(f"{path} lacks {', '.join(missing)}; export the adapter again")
    return payload


def _config(values: Mapping[str, Any], folder: Path) -> SeKVConfig:
    known = {f.name for f in fields(SeKVConfig)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise AdapterError(
            f"{folder / CONFIG_NAME} has unknown settings {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    hints = get_type_hints(SeKVConfig)
    for name, value in values.items():
        if not _is_a(value, hints[name]):
            raise AdapterError(f"{folder / CONFIG_NAME}: {name} is {value!r}, expected {_KINDS[hints[name]]}")
    try:
        return SeKVConfig(**values)
    except PolicyError as error:
        raise AdapterError(f"{folder / CONFIG_NAME}: {error}") from None


def _is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value can stand for a setting: whole numbers are numbers, true and false are not."""
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _shape(fingerprint: Mapping[str, Any], folder: Path) -> tuple[list[int], int, int, int]:
    """Compressible layers, query heads, KV heads and head dimension of the backbone the adapter was made for."""
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "compressible": (_is_list(lambda layer: _is_a(layer, int) and layer >= 0), "a list of layers"),
        "num_heads": (lambda value: _is_a(value, int) and value > 0, "a whole number above 0"),
        "num_kv_heads": (lambda value: _is_a(value, int) and value > 0, "a whole number above 0"),
        "head_dim": (lambda value: _is_a(value, int) and value > 0, "a whole number above 0"),
        "weight_sketch": (_is_sketch, "lists of numbers by layer"),
    }
    for name, (fits, expected) in checks.items():
        if name not in fingerprint:
            raise AdapterError(f"{folder / CONFIG_NAME}: the backbone's fingerprint lacks {name}")
        if not fits(fingerprint[name]):
            raise AdapterError(
                f"{folder / CONFIG_NAME}: {name} of the backbone is {fingerprint[name]!r}, expected {expected}"
            )
    return (
        list(fingerprint["compressible"]),
        fingerprint["num_heads"],
        fingerprint["num_kv_heads"],
        fingerprint["head_dim"],
    )


def _is_list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(fits, value))


def _is_sketch(value: Any) -> bool:
    numbers = _is_list(lambda number: _is_a(number, float))
    return isinstance(value, dict) and all(map(numbers, value.values()))
