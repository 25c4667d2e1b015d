"""The frozen backbone: any transformers causal LM with rotary attention, and its geometry read from the config."""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from sekv.cache import ATTENTION_NAME, register_attention
from sekv.default_backbone import default_backbone_dir
from sekv.errors import BackboneError, DataError
from sekv.hub import hub_snapshot, is_hub_id, quiet_progress
from sekv.rotary import rotate

DEFAULT_BACKBONE = "smollm2-135m"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GEOMETRY_KEYS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")
_SKETCH_SIZE = 16  # probes per sketched layer
_SKETCH_COSINE = 0.95  # 4-bit copies of the same weights stay above 0.99, other weights of the same shape near 0


@dataclass(frozen=True)
class Geometry:
    """The numbers that fix the shapes of keys, values and queries.

    Attributes:
        model_type: transformers' name of the architecture.
        num_layers: layers L.
        num_heads: query heads H per layer.
        num_kv_heads: KV heads K per layer.
        head_dim: dimension d of one head, as the config states it.
        hidden_size: dimension D of hidden states.
        vocab_size: rows of the LM head.
        max_positions: longest sequence in tokens the backbone was made for.
        compressible: indices of the layers with full attention; the others keep their own cache.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    compressible: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Any) -> Geometry:
        """Reads the geometry of a decoder config.

        Raises:
            BackboneError: the config describes attention that cannot be compressed.
        """
        # Older transformers lack this name only; scorers run there as presses of kvpress, without a backbone.
        from transformers.cache_utils import get_layer_types_and_kwargs

        what = f"the backbone '{config.model_type}'"
        _refuse_unsupported(config, what)
        layer_types, _ = get_layer_types_and_kwargs(config)
        compressible = tuple(i for i, kind in enumerate(layer_types) if kind == "full_attention")
        max_positions = getattr(config, "max_position_embeddings", None)
        if not isinstance(max_positions, int):
            raise BackboneError(f"{what} states no max_position_embeddings; give a RoPE model, such as Llama or Qwen")
        if not compressible:
            kinds = ", ".join(sorted(set(layer_types)))
            raise BackboneError(f"{what} has no full-attention layer, nothing to compress (its layers: {kinds})")
        heads = _uniform(config, "num_attention_heads", compressible, what)
        kv_heads = _uniform(config, "num_key_value_heads", compressible, what, default=heads)
        head_dim = _uniform(config, "head_dim", compressible, what, default=config.hidden_size // heads)
        return cls(
            model_type=config.model_type,
            num_layers=len(layer_types),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=max_positions,
            compressible=compressible,
        )


def _refuse_unsupported(config: Any, what: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise BackboneError(f"{what} is an encoder-decoder; give a decoder-only causal LM")
    if getattr(config, "kv_lora_rank", None):
        raise BackboneError(f"{what} keeps a latent instead of keys and values; give a model with MHA or GQA")
    if getattr(config, "attn_logit_softcapping", None):
        raise BackboneError(f"{what} caps its attention logits, which is not supported; give another model")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise BackboneError(f"{what} shares keys and values between layers; give one where each layer has its own")


def _uniform(config: Any, name: str, layers: Sequence[int], what: str, default: int | None = None) -> int:
    """The value of `name` that all `layers` agree on; `default` where the config does not state it."""
    per_layer = list(config.per_layer_config)
    values = {getattr(per_layer[i], name, None) or default for i in layers}
    value = values.pop() if len(values) == 1 else None
    if not isinstance(value, int):
        found = sorted(str(v) for v in {value, *values})
        raise BackboneError(f"{what} needs one {name} for all full-attention layers, it has {', '.join(found)}")
    return value


class Backbone:
    """A frozen causal LM, ready to be read and to decode over compressed memory.

    Make one with `load_backbone` or `Backbone.from_model`.

    Attributes:
        model: the transformers model, frozen, in eval mode, attention implementation `sekv`.
        tokenizer: its tokenizer, or None.
        name: what messages and reports call it.
        geometry: its shapes.
        rotary: its rotary module.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, geometry: Geometry
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.geometry = geometry
        self._config: Any = model.config.get_text_config(decoder=True)
        self._fingerprint: dict[str, Any] | None = None
        self._decoder: nn.Module = model.get_decoder()
        self._head: nn.Module = model.get_output_embeddings()
        self.rotary = _rotary_module(self._decoder, name)
        # Models that bring their own code still use the older name of the argument.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str | None = None
    ) -> Backbone:
        """Freezes a model in memory and gives it the `sekv` attention.

        Raises:
            BackboneError: the model is not a causal LM with rotary attention, or none of its layers can be compressed.
        """
        name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        if not isinstance(model, PreTrainedModel) or not isinstance(model.get_output_embeddings(), nn.Module):
            raise BackboneError(f"'{name}' ({type(model).__name__}) is not a causal LM: it has no language-model head")
        geometry = Geometry.from_config(model.config.get_text_config(decoder=True))
        backbone = cls(model, tokenizer, name, geometry)
        if any(hasattr(backbone.attention_module(i), "sinks") for i in geometry.compressible):
            raise BackboneError(f"'{name}' has learned attention sinks, which are not supported; give another model")
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        if backbone._config._attn_implementation != ATTENTION_NAME:
            raise BackboneError(
                f"'{name}' ({type(model).__name__}) computes attention outside transformers' attention interface; "
                "give a model of a family that uses it, such as Llama, Mistral or Qwen"
            )
        model.requires_grad_(False).eval()
        return backbone

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        weight: Any = self.model.get_input_embeddings().weight
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the keys and values."""
        return self.model.dtype

    @property
    def num_parameters(self) -> int:
        """Parameters of the backbone, shared ones counted once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def line_breaks(self) -> Tensor | None:
        """True for token ids whose text contains a line break [vocabulary], or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        table = torch.zeros(max(self.geometry.vocab_size, len(self.tokenizer)), dtype=torch.bool)
        # Byte-level vocabularies write the line break as U+010A, SentencePiece as <0x0A>.
        marks = ("\n", "\u010a", "<0x0A>")
        table[[i for token, i in self.tokenizer.get_vocab().items() if any(mark in token for mark in marks)]] = True
        return table.to(self.device)

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Runs the decoder without the LM head.

        Args:
            input_ids: new tokens [B, n].
            attention_mask: 1 for real tokens [B, past + n], or None when there is no padding.
            position_ids: [B, n], or None to count on from the cache.
            cache: a transformers cache that the call extends, or None.

        Returns:
            Hidden states after the final norm [B, n, D].
        """
        output = self._decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **({} if cache is None else {self._cache_argument: cache}),
        )
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head with the config's final scale or cap: hidden states [B, n, D] to logits [B, n, V]."""
        logits = self._head(hidden)
        scale = getattr(self._config, "logit_scale", None)  # Cohere multiplies
        if scale is not None:
            logits = logits * scale
        divisor = getattr(self._config, "logits_scaling", None)  # Granite divides
        if divisor is not None:
            logits = logits / divisor
        cap = getattr(self._config, "final_logit_softcapping", None)  # Gemma caps
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def native_cache_layers(self) -> list[Any]:
        """Fresh, empty cache layers of the backbone's own kinds, one per layer."""
        return list(DynamicCache(config=self.model.config).layers)

    def check_length(self, n: int) -> None:
        """Refuses a sequence of `n` tokens that the backbone's positions do not cover.

        Raises:
            DataError: `n` exceeds the maximum.
        """
        limit = self.geometry.max_positions
        if n > limit:
            raise DataError(f"{n} tokens are more than the {limit} that '{self.name}' can read; shorten the text")

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation of the full-attention layers at `positions` [B, n].

        Returns:
            cos and sin, each [B, n, rot_dim] float32; rot_dim < head_dim where only part of a head is rotated.
        """
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        if "layer_type" in inspect.signature(self.rotary.forward).parameters:
            return self.rotary(like, positions, layer_type="full_attention")
        return self.rotary(like, positions)

    @cached_property
    def rotates_halves(self) -> bool:
        """True when RoPE pairs dimension i with i + rot_dim / 2, which is what undoing it on keys relies on."""
        attention = self.attention_module(self.geometry.compressible[0])
        apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if apply is None:
            return False
        cos, sin = self.rope(torch.tensor([[3]], device=self.device))
        probe = torch.arange(1.0, self.geometry.head_dim + 1, device=self.device).reshape(1, 1, 1, -1)
        try:
            theirs = apply(probe, probe, cos, sin)[1]
        except RuntimeError:  # a part of the head is rotated, and the module cuts it out before the call
            probe = probe[..., : cos.shape[-1]]
            theirs = apply(probe, probe, cos, sin)[1]
        return torch.allclose(theirs, rotate(probe, cos[:, None], sin[:, None]), rtol=1e-4)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this backbone from another: geometry, rotation, vocabulary, and a sketch of its weights.

        The sketch does not depend on the dtype, and quantised copies of the same weights stay close to it.
        """
        if self._fingerprint is None:  # once: frozen weights do not change, and may be dealt to several processes later
            self._fingerprint = self._make_fingerprint()
        return copy.deepcopy(self._fingerprint)

    def _make_fingerprint(self) -> dict[str, Any]:
        geometry = asdict(self.geometry)
        ends = sorted({self.geometry.compressible[0], self.geometry.compressible[-1]})
        return {
            "model_type": geometry["model_type"],
            **{key: geometry[key] for key in _GEOMETRY_KEYS},
            "compressible": list(self.geometry.compressible),
            "rope": json.loads(json.dumps(getattr(self._config, "rope_parameters", None), default=str)),
            "tokenizer_size": None if self.tokenizer is None else len(self.tokenizer),
            "weight_sketch": {str(layer): _sketch(self._key_projection(layer), self.geometry) for layer in ends},
        }

    def attention_scaling(self, layer: int) -> float:
        """The factor on q.k in a layer's attention."""
        return float(getattr(self.attention_module(layer), "scaling", self.geometry.head_dim**-0.5))

    def attention_module(self, layer: int) -> nn.Module:
        """The attention module of a layer."""
        block = self._decoder.get_submodule("layers")[layer]  # type: ignore[index]
        for name in ("self_attn", "attention", "attn"):
            if isinstance(module := getattr(block, name, None), nn.Module):
                return module
        raise BackboneError(f"layer {layer} of '{self.name}' has no attention module that can be found")

    def _key_projection(self, layer: int) -> nn.Module:
        attention = self.attention_module(layer)
        for name in ("k_proj", "qkv_proj", "query_key_value"):
            if isinstance(module := getattr(attention, name, None), nn.Module):
                return module
        raise BackboneError(f"layer {layer} of '{self.name}' has no key projection that can be found")


def _rotary_module(decoder: nn.Module, name: str) -> nn.Module:
    module = getattr(decoder, "rotary_emb", None)
    if not isinstance(module, nn.Module):
        raise BackboneError(f"'{name}' has no rotary position embedding; give a RoPE model, such as Llama or Qwen")
    return module


def _chirp(rows: int, columns: int) -> Tensor:
    """A fixed matrix [rows, columns] without structure along either side, the same on every machine and version."""
    row = torch.arange(1, rows + 1, dtype=torch.float64)[:, None]
    column = torch.arange(1, columns + 1, dtype=torch.float64)[None]
    return torch.sin(row * column.square() * 0.6180339887 + row)


@torch.no_grad()
def _sketch(projection: nn.Module, geometry: Geometry) -> list[float]:
    """r_i . W x_i for fixed r_i, x_i, run through the module so that quantised weights count as what they do."""
    weight = next(projection.parameters())
    probe = _chirp(_SKETCH_SIZE, geometry.hidden_size) / math.sqrt(geometry.hidden_size)
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    probe = probe.to(weight.device, dtype)
    output = (projection(probe) - projection(torch.zeros_like(probe))).double().cpu()  # the bias is not in the sketch
    sketch = (output * _chirp(*output.shape)).sum(dim=1)
    return [float(f"{value:.4g}") for value in sketch.tolist()]


def compare_fingerprints(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Differences between the backbone an adapter was made for and the one at hand, for people to read.

    Args:
        saved: the fingerprint stored with the adapter.
        current: the fingerprint of the backbone in use.

    Returns:
        Lines such as `num_layers: adapter 30, backbone 12`; empty for the same backbone, in any dtype.
    """
    differences = [
        f"{key}: adapter {saved.get(key)}, backbone {current.get(key)}"
        for key in ("model_type", *_GEOMETRY_KEYS, "compressible", "rope")
        if saved.get(key) != current.get(key)
    ]
    sizes = saved.get("tokenizer_size"), current.get("tokenizer_size")
    if None not in sizes and sizes[0] != sizes[1]:  # a backbone may be loaded without its tokenizer
        differences.append(f"tokenizer_size: adapter {sizes[0]}, backbone {sizes[1]}")
    if not differences:
        differences = _compare_sketches(saved.get("weight_sketch", {}), current["weight_sketch"])
    return differences


def _compare_sketches(saved: dict[str, list[float]], current: dict[str, list[float]]) -> list[str]:
    if saved.keys() != current.keys():
        return [f"weight_sketch: adapter has layers {sorted(saved)}, backbone {sorted(current)}"]
    lines = []
    for layer in current:
        old, new = (torch.tensor(v, dtype=torch.float64) for v in (saved[layer], current[layer]))
        if old.shape != new.shape:
            lines.append(f"weight_sketch of layer {layer}: the adapter's has another length")
            continue
        cosine = float(torch.nn.functional.cosine_similarity(old, new, dim=0))
        if not cosine >= _SKETCH_COSINE:
            lines.append(f"weights of layer {layer}: another model of the same shape (sketch cosine {cosine:.2f})")
    return lines


def load_backbone(name_or_path: str | Path, dtype: str | torch.dtype = "auto", device: str = "auto") -> Backbone:
    """Loads and freezes a backbone.

    Args:
        name_or_path: `smollm2-135m` (the embedded default), a folder with config.json and weights, or a Hub id.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 where the hardware computes it, float32 elsewhere.
        device: a torch device, or `auto`: CUDA when there is one.

    Raises:
        BackboneError: not found, not reachable, corrupt, or not a model that can be compressed.
    """
    target = pick_device(device)
    torch_dtype = pick_dtype(dtype, target)
    name = str(name_or_path)
    folder = _locate(name)
    _check_folder(folder, name)
    tokenizer = _load_tokenizer(folder, name)
    model = _load_model(folder, name, torch_dtype, target)
    return Backbone.from_model(model, tokenizer, name)


def pick_device(device: str) -> torch.device:
    """What `device` means here: `auto` is CUDA when there is one.

    Raises:
        BackboneError: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise BackboneError(f"unknown device '{device}'; give auto, cpu, cuda or cuda:N") from error
    try:
        torch.zeros(1, device=picked).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # each kind of device is missing in its own way
        raise BackboneError(
            f"device '{device}' does not exist here; give cpu, or auto to take what there is"
        ) from error
    return picked


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """What `dtype` means on a device.

    Raises:
        BackboneError: it is none of the names that are known.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and _cpu_has_bfloat16())
        return torch.bfloat16 if fast else torch.float32
    if dtype not in _DTYPES:
        raise BackboneError(f"unknown dtype '{dtype}'; give auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _cpu_has_bfloat16() -> bool:
    # Emulated bfloat16 is several times slower than float32, so only instructions for it count.
    checks = (getattr(torch.cpu, n, None) for n in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)


def _locate(name: str) -> Path:
    if name == DEFAULT_BACKBONE:
        return default_backbone_dir()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not is_hub_id(name):
        raise BackboneError(
            f"backbone '{name}' is neither a folder, nor a Hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, "
            f"nor the embedded '{DEFAULT_BACKBONE}'"
        )
    return hub_snapshot(name)


def _check_folder(folder: Path, name: str) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise BackboneError(f"the folder '{name}' has no config.json; give a folder saved by save_pretrained")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BackboneError(f"the config.json of '{name}' is not JSON ({error}); copy or download it again") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise BackboneError(f"the folder '{name}' has no weights (*.safetensors); copy them next to config.json")


def _load_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception on a corrupt file
        raise BackboneError(f"the tokenizer of '{name}' cannot be read: {_first_line(error)}") from error


def _load_model(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    try:
        with quiet_progress():
            model, info = auto.from_pretrained(
                folder, dtype=dtype, device_map=device, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # safetensors, json, torch and transformers each raise their own kind
        raise BackboneError(
            f"backbone '{name}' cannot be loaded, its files may be truncated or of another format "
            f"({type(error).__name__}: {_first_line(error)}); copy or download them again"
        ) from error
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lacking:  # transformers would fill them at random
        raise BackboneError(
            f"the weights of backbone '{name}' lack {len(lacking)} tensors of its config (first {lacking[0]}); "
            "copy or download them again"
        )
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
