"""One question, answered from a compressed context, with everything a report needs to know about the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sekv.backbone import Backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache
from sekv.errors import DataError
from sekv.policies.base import Policy, compress
from sekv.prefill import Prefill, prefill
from sekv.prompt import Prompt


@dataclass(frozen=True)
class Answer:
    """What a question gave and what it cost.

    Attributes:
        ids: new tokens, the one that ended the answer included.
        text: the new tokens as text, without special tokens; empty when the backbone has no tokenizer.
        rows: mean rows of the compressed context attended per query, layer and KV head.
        resident_bytes: bytes of the compressed context on the compute tier, tail not counted.
        host_bytes: bytes of the compressed context on the host tier.
        moved_bytes_per_token: bytes brought from the host per token read or written after the context.
        seconds: wall-clock time of the answer, the question's pass included.
    """

    ids: list[int]
    text: str
    rows: float
    resident_bytes: int
    host_bytes: int
    moved_bytes_per_token: float
    seconds: float


def memory_ids(prompt: Prompt, query_aware: bool) -> list[int]:
    """The ids that are compressed: the context, or with `query_aware` the question as well.

    The last token of the prompt is always fed after the compression, because the first new token is read off it.
    """
    return prompt.ids[:-1] if query_aware else prompt.context_ids


def read_context(backbone: Backbone, ids: Sequence[int], policies: Sequence[Policy], offload: bool = False) -> Prefill:
    """One prefill that records what all of `policies` need; with `offload` its keys and values lie on the host."""
    return read_contexts(backbone, [ids], policies, offload)


def read_contexts(
    backbone: Backbone, contexts: Sequence[Sequence[int]], policies: Sequence[Policy], offload: bool = False
) -> Prefill:
    """The same for a batch of contexts, each with a token or more."""
    return prefill(
        backbone,
        *left_padded_ids(backbone, contexts),
        surprisal=any(policy.needs_surprisal for policy in policies),
        window=max((policy.window for policy in policies), default=0),
        offload=offload,
        observers=list(dict.fromkeys(observer for policy in policies for observer in policy.observers)),
    )


def left_padded_ids(backbone: Backbone, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids of unequal length as one batch [B, N], padded on the left, and a mask that is 1 where they are real."""
    n = max(map(len, rows))
    pad = pad_token(backbone)
    ids = torch.tensor([[pad] * (n - len(row)) + list(row) for row in rows], device=backbone.device)
    mask = torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in rows], device=backbone.device)
    return ids, mask


def answer(
    backbone: Backbone,
    cache: CompressedCache,
    context_ids: Sequence[int],
    question_ids: Sequence[int],
    max_new_tokens: int,
    **options: Any,
) -> Answer:
    """Decodes an answer greedily, or as `options` say, up to the end-of-text token.

    Args:
        backbone: the model that read the context.
        cache: the compressed context; it is forked, so it can be asked again.
        context_ids: the ids that were compressed.
        question_ids: the ids after them, at least one.
        max_new_tokens: most tokens to decode.
        options: passed on to `model.generate`: `do_sample`, `temperature`, `streamer`, `stopping_criteria`, ...

    Raises:
        DataError: no question, ids that are not the compressed context's, or no room for the answer.
    """
    if not question_ids:
        raise DataError("there is no token to ask with: question_ids is empty")
    if len(context_ids) != cache.n_context:
        raise DataError(f"context_ids has {len(context_ids)} tokens, but the compressed context has {cache.n_context}")
    ids = torch.tensor([[*context_ids, *question_ids]], device=backbone.device)
    backbone.check_length(ids.shape[1] + max_new_tokens)
    fork = cache.fork()
    start = time.perf_counter()
    with torch.no_grad():
        output: Any = backbone.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            cache=fork,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token(backbone),
            **{"do_sample": False, **options},
        )
    new = output[0, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    tokenizer = backbone.tokenizer
    return Answer(
        ids=new,
        text=str(tokenizer.decode(new, skip_special_tokens=True)) if tokenizer is not None else "",
        rows=fork.mean_rows,
        resident_bytes=cache.resident_bytes,
        host_bytes=cache.host_bytes,
        # The last new token is never fed back.
        moved_bytes_per_token=fork.moved_bytes / (len(question_ids) + len(new) - 1),
        seconds=seconds,
    )


def pad_token(backbone: Backbone) -> int:
    """What fills the rows of a batch up; masked, so any token will do where a tokenizer has none for it."""
    pad = backbone.tokenizer.pad_token_id if backbone.tokenizer is not None else None
    return pad if isinstance(pad, int) else 0


def ask(
    context: Prefill,
    policy: Policy,
    budget: Budget,
    prompt: Prompt,
    max_new_tokens: int,
    query_aware: bool = False,
    **options: Any,
) -> Answer:
    """Compresses a context that was read and answers the prompt from it.

    Args:
        context: the prefill of `memory_ids(prompt, query_aware)`.
        policy: the method.
        budget: share of the context or number of rows.
        prompt: what is asked.
        max_new_tokens: most tokens to decode.
        query_aware: the question was read and is compressed with the context.
        options: as for `answer`.

    Returns:
        The answer; its seconds include the compression.
    """
    start = time.perf_counter()
    cache = compress(context, policy, budget)
    ids = memory_ids(prompt, query_aware)
    found = answer(context.backbone, cache, ids, prompt.ids[len(ids) :], max_new_tokens, **options)
    return replace(found, seconds=time.perf_counter() - start)
