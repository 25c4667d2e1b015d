"""Policies by name: `snapkv`, `nestedkv[safeguard=0.1]`, `hubkv[gamma=0.5]:snapkv[window=32]`.

After `kvpress:` stands a press as kvpress writes it: `kvpress:SnapKVPress(window_size=32)`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from sekv.errors import PolicyError
from sekv.policies.base import FullPolicy, Policy
from sekv.policies.chunkkv import ChunkKVPolicy
from sekv.policies.expected_attention import ExpectedAttentionPolicy
from sekv.policies.h2o import H2OPolicy
from sekv.policies.hubkv import HubKVPolicy
from sekv.policies.keydiff import KeyDiffPolicy
from sekv.policies.kvpress_bridge import KvpressPolicy
from sekv.policies.kvzip import KVzipPolicy
from sekv.policies.nestedkv import NestedKVPolicy
from sekv.policies.observed import ObservedAttentionPolicy
from sekv.policies.pyramidkv import PyramidKVPolicy
from sekv.policies.quest import QuestPolicy
from sekv.policies.sekv import SeKVPolicy
from sekv.policies.semanticache import SemantiCachePolicy
from sekv.policies.sentencekv import SentenceKVPolicy
from sekv.policies.snapkv import SnapKVPolicy
from sekv.policies.streaming_llm import StreamingLLMPolicy
from sekv.policies.tova import TOVAPolicy

_WRAPPED = "base"  # the field of a policy that wraps another one
_PRESS = "press"  # the field of a policy that takes the text after the colon as it is
_REGISTRY: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Makes a policy known under its `name`; usable as a class decorator.

    Raises:
        PolicyError: the name is taken by another class.
    """
    known = _REGISTRY.setdefault(policy.name, policy)
    if known is not policy:
        raise PolicyError(f"policy '{policy.name}' is already registered as {known.__module__}.{known.__qualname__}")
    return policy


for _policy in (
    FullPolicy,
    SeKVPolicy,
    HubKVPolicy,
    NestedKVPolicy,
    KeyDiffPolicy,
    SnapKVPolicy,
    StreamingLLMPolicy,
    H2OPolicy,
    TOVAPolicy,
    ObservedAttentionPolicy,
    ExpectedAttentionPolicy,
    PyramidKVPolicy,
    ChunkKVPolicy,
    KVzipPolicy,
    SemantiCachePolicy,
    KvpressPolicy,
    QuestPolicy,
    SentenceKVPolicy,
):
    register(_policy)


def available_policies() -> dict[str, str]:
    """Name and one-line description of every known policy."""
    return {name: (policy.__doc__ or "").strip().splitlines()[0] for name, policy in sorted(_REGISTRY.items())}


def build_policy(spec: str, **context: Any) -> Policy:
    """Makes a policy from its spec.

    Args:
        spec: `name`, `name[option=value,...]`, or either followed by `:` and the spec of the policy that it wraps.
        context: what options cannot say, such as `adapter=`; given to the policies that have a field of that name.

    Raises:
        PolicyError: the spec is malformed, or a policy, an option or a value is unknown; the message lists the known.
    """
    head, separator, wrapped = _partition(spec, ":")
    name, options = _parse_head(head.strip(), spec)
    if name not in _REGISTRY:
        raise PolicyError(f"unknown policy '{name}' in '{spec}'; known: {', '.join(sorted(_REGISTRY))}")
    policy = _REGISTRY[name]
    parameters = {f.name: f for f in fields(policy) if f.init}
    arguments = {key: value for key, value in context.items() if key in parameters}
    arguments |= _parse_options(policy, parameters, options)
    if separator and _PRESS in parameters:
        arguments[_PRESS] = wrapped.strip()
    elif separator:
        if _WRAPPED not in parameters:
            raise PolicyError(f"policy '{name}' wraps no other policy; remove ':{wrapped}' from '{spec}'")
        arguments[_WRAPPED] = build_policy(wrapped, **context)
    return policy(**arguments)


def split_specs(text: str) -> list[str]:
    """Splits `sekv[a=1,b=2],nestedkv` at the commas outside brackets and parentheses; empty parts are refused.

    Raises:
        PolicyError: a spec is empty or a bracket is not closed.
    """
    specs = []
    while True:
        spec, separator, text = _partition(text, ",")
        if not spec.strip():
            raise PolicyError("empty policy spec; give names separated by commas, such as sekv,nestedkv")
        specs.append(spec.strip())
        if not separator:
            return specs


def _partition(text: str, separator: str) -> tuple[str, str, str]:
    """`str.partition` at the first separator outside brackets."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if depth < 0:
            break
        if depth == 0 and character == separator:
            return text[:i], separator, text[i + 1 :]
    if depth:
        raise PolicyError(f"brackets in policy spec '{text}' do not match; write name[option=value,option=value]")
    return text, "", ""


def _parse_head(head: str, spec: str) -> tuple[str, dict[str, str]]:
    """`name[a=1,b=2]` as the name and its options, unparsed."""
    name, bracket, rest = head.partition("[")
    if not bracket:
        return name, {}
    inside, bracket, after = rest.partition("]")
    if not bracket or after.strip():
        raise PolicyError(f"policy spec '{spec}' is malformed; write name[option=value,option=value]")
    options: dict[str, str] = {}
    for item in inside.split(",") if inside.strip() else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise PolicyError(f"option '{item.strip()}' in '{spec}' is malformed; write option=value")
        if key in options:
            raise PolicyError(f"option '{key}' is given twice in '{spec}'")
        options[key] = value
    return name.strip(), options


def _parse_options(policy: type[Policy], parameters: dict[str, Field[Any]], options: dict[str, str]) -> dict[str, Any]:
    hints = get_type_hints(policy)
    # A field of any other type is a part, not an option: the wrapped policy, the adapter.
    known = {key: parser for key in parameters if key != _PRESS and (parser := _parser(hints[key]))}
    parsed = {}
    for key, text in options.items():
        if key not in known and _WRAPPED in parameters and key in {f.name for f in fields(policy) if not f.init}:
            raise PolicyError(
                f"policy '{policy.name}' has no option '{key}', it belongs to the policy that {policy.name} wraps: "
                f"write {policy.name}:{KeyDiffPolicy.name}[{key}={text}]"
            )
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise PolicyError(f"policy '{policy.name}' has no option '{key}'; its options: {listed}")
        try:
            parsed[key] = known[key](text)
        except ValueError as error:
            raise PolicyError(f"policy '{policy.name}': option {key}={text} is not {error}") from None
    return parsed


def _parser(hint: Any) -> Callable[[str], Any] | None:
    """The parser of an option's type, or None when the type cannot be written in brackets."""
    if get_origin(hint) in (Union, types.UnionType):
        parsers = [_PARSERS.get(part) for part in get_args(hint) if part is not types.NoneType]
        return parsers[0] if len(parsers) == 1 else None
    return _PARSERS.get(hint)


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("a number")
    return number


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


_PARSERS: dict[Any, Callable[[str], Any]] = {int: _parse_int, float: _parse_float, bool: _parse_bool, str: str}
