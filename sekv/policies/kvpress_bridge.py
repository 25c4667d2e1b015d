"""A bridge to NVIDIA's kvpress: its presses as policies here, and scorers from here as its presses.

kvpress is optional and never imported before it is asked for: importing it wraps every attention function of
transformers. It declares transformers < 5.3 and runs on later ones too:
`pip install 'sekv[kvpress]' && pip install --no-deps kvpress`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from sekv.backbone import Backbone
from sekv.errors import PolicyError
from sekv.policies.scorer import LayerRows, ScorerPolicy
from sekv.prefill import Prefill
from sekv.stores.evicted import EvictedStore

_EXAMPLE = "kvpress:SnapKVPress(window_size=32)"
_INSTALL = "pip install 'sekv[kvpress]' && pip install --no-deps kvpress"

OnLayer = Callable[[int, nn.Module, Tensor, dict[str, Any]], None]


@dataclass(kw_only=True)
class KvpressPolicy(ScorerPolicy):
    """A press of kvpress, or its scores under HubKV: `kvpress:SnapKVPress(window_size=32)`, `hubkv:kvpress:KnormPress`.

    As a policy the press decides alone: its own `compress` runs on the layer's keys and values at the ratio that leaves
    the budget, and sinks, tail and allocation of this class play no part; a press that keeps more or fewer rows than
    asked is reported with what it kept. Under `hubkv` a press that scores gives the scores, and selection is ours.
    The context is read once more for every budget, because presses work from the hidden states of each layer.

    Padded batches are refused: presses would score padding as text. Presses that run passes of their own (KVzip) are
    refused too.

    Attributes:
        press: the press as kvpress writes it, without its ratio; literal arguments and nested presses.
    """

    name: ClassVar[str] = "kvpress"

    press: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.build()

    def build(self) -> Any:
        """A fresh press.

        Raises:
            PolicyError: kvpress is not installed, or the text is not a press that can run here.
        """
        press = parse_press(self.press)
        base = import_kvpress().BasePress
        for method in ("__call__", "forward_hook"):
            if getattr(type(press), method) is not getattr(base, method):
                raise PolicyError(f"'{self.press}' runs passes of its own and has no place here; see the policy kvzip")
        return press

    def score(self, prefill: Prefill, layer: int) -> Tensor:
        """The press's own scores [B, K, N].

        Raises:
            PolicyError: the press does not score tokens, or the contexts are padded.
        """
        found = ("kvpress scores", self.press)
        if found not in prefill.observed:
            if not isinstance(self.build(), import_kvpress().ScorerPress):
                raise PolicyError(f"'{self.press}' gives no scores, so it cannot be refined; give a ScorerPress")
            prefill.observed[found] = self._run(prefill, lambda press, *state: press.score(*state).float(), None)
        return prefill.observed[found][layer]

    def compress(self, prefill: Prefill, layer: int, plan: LayerRows) -> EvictedStore:
        """A store of what the press keeps.

        Raises:
            PolicyError: the contexts are padded, the press takes no ratio, or it drops every row of a head.
        """
        found = ("kvpress rows", self.press, tuple(plan.mean.tolist()))
        if found not in prefill.observed:
            prefill.observed[found] = self._run(prefill, _compressed, plan.mean)
        key, value, keep = prefill.observed[found][layer]
        if not bool(keep.any(dim=-1).all()):
            raise PolicyError(
                f"'{self.press}' leaves a head of layer {layer} without rows; give more rows or a safeguard"
            )
        return EvictedStore(key, value, keep, prefill.lengths)

    @torch.no_grad()
    def _run(self, prefill: Prefill, work: Callable[..., Any], rows: Tensor | None) -> list[Any]:
        """What `work(press, module, hidden, key, value, attentions, kwargs)` gives for each compressible layer."""
        if not bool(prefill.mask.all()):
            raise PolicyError(f"'{self.press}' knows no padding; compress contexts of different lengths one by one")
        press, n = self.build(), prefill.n_tokens
        if rows is not None:
            if not hasattr(press, "compression_ratio"):
                raise PolicyError(f"'{self.press}' has no compression_ratio, so no budget can be set")
            # A quarter of a row more, so that truncating and rounding both give the rows that were asked for.
            press.compression_ratio = max(0.0, 1.0 - (float(rows[0]) + 0.25) / n)
        press.post_init_from_model(prefill.backbone.model)
        results: list[Any] = [None] * prefill.backbone.geometry.num_layers

        def on_layer(index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> None:
            key, value = (t.clone() for t in prefill.key_value(index))
            results[index] = work(press, module, hidden, key, value, None, kwargs)

        with _watched(prefill.backbone, on_layer):
            prefill.backbone.hidden_states(prefill.input_ids)
        return results


def _compressed(press: Any, module: Any, *state: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values that a press returns and which of them it keeps [B, K, n]."""
    module.masked_key_indices = None  # where head-wise presses of kvpress note what they drop
    key, value = press.compress(module, *state)
    keep = torch.ones(key.shape[:3], dtype=torch.bool, device=key.device)
    dropped = module.masked_key_indices
    del module.masked_key_indices
    if dropped is not None:
        keep[tuple(index.to(keep.device) for index in dropped)] = False
    return key, value, keep


@contextmanager
def _watched(backbone: Backbone, on_layer: OnLayer) -> Iterator[None]:
    """Calls `on_layer(index, module, hidden states, arguments)` after each compressible layer's attention."""
    handles, borrowed = [], []
    try:
        for index in backbone.geometry.compressible:
            module = backbone.attention_module(index)
            if not hasattr(module, "rotary_emb"):  # presses look for it here, transformers keeps it on the model
                module.rotary_emb = backbone.rotary
                borrowed.append(module)

            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any, index: int = index) -> None:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                on_layer(index, module, hidden, kwargs)

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in borrowed:
            del module.rotary_emb


def import_kvpress() -> Any:
    """The module kvpress.

    Raises:
        PolicyError: it cannot be imported.
    """
    try:
        import kvpress
    except ImportError as error:
        raise PolicyError(f"kvpress cannot be imported ({error}); install it: {_INSTALL}") from error
    return kvpress


def parse_press(text: str) -> Any:
    """Makes a press from text such as `AdaKVPress(press=SnapKVPress(window_size=32))`; nothing is evaluated.

    Raises:
        PolicyError: the text is not a call of a press with literal arguments, or kvpress refuses them.
    """
    if not text:
        raise PolicyError(f"kvpress needs a press: write {_EXAMPLE}")
    kvpress = import_kvpress()
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise PolicyError(f"'{text}' is not a press; write {_EXAMPLE}") from None
    return _press_of(tree, text, kvpress)


def _press_of(node: ast.expr, text: str, kvpress: Any) -> Any:
    if isinstance(node, ast.Name):
        node = ast.Call(func=node, args=[], keywords=[])
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise PolicyError(f"'{text}' is not a press; write {_EXAMPLE}")
    kind = getattr(kvpress, node.func.id, None)
    if not (isinstance(kind, type) and issubclass(kind, kvpress.BasePress)):
        known = ", ".join(sorted(n for n in dir(kvpress) if n.endswith("Press")))
        raise PolicyError(f"kvpress has no press '{node.func.id}'; it has {known}")

    def value(part: ast.expr) -> Any:
        if isinstance(part, ast.Call):
            return _press_of(part, text, kvpress)
        try:
            return ast.literal_eval(part)
        except ValueError:
            raise PolicyError(f"'{ast.unparse(part)}' in '{text}' is not a number, a text or a press") from None

    try:
        return kind(*map(value, node.args), **{str(k.arg): value(k.value) for k in node.keywords})
    except (TypeError, AssertionError, ValueError) as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"kvpress refuses '{text}': {error}") from error


def as_press(policy: ScorerPolicy, compression_ratio: float = 0.0) -> Any:
    """A scorer from here as a press of kvpress; its AdaKVPress adds competing heads.

    Args:
        policy: one that scores keys and values alone: `nestedkv`, `keydiff`, or `hubkv` over one of them. Sinks and
            tail are protected as under the policy.
        compression_ratio: share of the rows to remove.

    Raises:
        PolicyError: kvpress is not installed, or the policy needs queries, surprisal, or other layers.
    """
    kvpress = import_kvpress()
    if policy.window or policy.observers or policy.needs_surprisal or policy.layers != "uniform":
        raise PolicyError(f"{policy.name} needs more than a layer's keys and values, so it cannot be a press")

    scorer: Any = kvpress.ScorerPress

    class PolicyPress(scorer):
        def score(
            self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
        ) -> Tensor:
            view = _layer_view(keys, values)
            rows = max(1, int(view.n_tokens * (1 - self.compression_ratio)))
            rows_each = torch.full((len(keys),), rows, device=keys.device)
            return policy.protected(policy.ranking(view, 0, rows_each), view.mask, rows_each)

    return PolicyPress(compression_ratio)


def _layer_view(key: Tensor, value: Tensor) -> Prefill:
    """One layer's keys and values as a prefill; nothing else of a backbone is known."""
    batch, kv_heads, n, _ = key.shape
    geometry = SimpleNamespace(num_layers=1, num_kv_heads=kv_heads, compressible=(0,))
    mask = torch.ones(batch, n, dtype=torch.bool, device=key.device)
    return Prefill(
        backbone=cast(Backbone, SimpleNamespace(name="kvpress", geometry=geometry)),
        keys=[key],
        values=[value],
        queries=[None],
        hidden=None,
        surprisal=None,
        input_ids=torch.zeros(batch, n, dtype=torch.long, device=key.device),
        mask=mask,
        native={},
    )
