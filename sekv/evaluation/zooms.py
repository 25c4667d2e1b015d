"""Recording what an answer zooms into, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sekv.cache import CompressedCache
from sekv.evaluation.trace import Trace
from sekv.stores.offloaded import OffloadedStore

_LONGEST_CHARACTER = 8  # tokens that one character may need, a byte each, with some to spare


class ZoomRecorder:
    """Follows one answer: `start` with the compressed context, then `trace` when it is answered."""

    def __init__(self) -> None:
        self._choices: dict[int, list[Tensor]] = {}
        self._store: OffloadedStore | None = None

    def start(self, cache: CompressedCache) -> None:
        """Begins to record, in `cache` and its forks."""
        self._choices = cache.record_zooms()
        self._store = next((store for store in cache.stores if isinstance(store, OffloadedStore)), None)

    def trace(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_ids: Sequence[int],
        question_ids: Sequence[int],
        answer_ids: Sequence[int],
    ) -> Trace | None:
        """What was zoomed into, or None when nothing was asked or the policy never chooses spans.

        Args:
            tokenizer: spells the tokens.
            context_ids: what was compressed, one context without padding.
            question_ids: what was asked with.
            answer_ids: the new tokens.
        """
        chosen = {layer: torch.cat(steps, dim=2)[0] for layer, steps in self._choices.items() if steps}
        if self._store is None or not chosen:
            return None
        segmentation = self._store.plan.segmentation
        real = (segmentation.span_length[0] > 0).cpu()
        exact = torch.zeros(len(context_ids), dtype=torch.bool)
        exact[segmentation.exact_index[0][segmentation.exact_mask[0]].cpu()] = True
        zoomed = torch.stack(list(chosen.values()))[..., real]
        return Trace(
            context=token_texts(tokenizer, context_ids),
            question=token_texts(tokenizer, question_ids),
            answer=token_texts(tokenizer, answer_ids),
            context_ids=list(context_ids),
            question_ids=list(question_ids),
            answer_ids=list(answer_ids),
            exact=exact.numpy(),
            span_start=segmentation.span_start[0].cpu()[real].numpy(),
            span_length=segmentation.span_length[0].cpu()[real].numpy(),
            layers=list(chosen),
            heads="kv" if zoomed.shape[1] == self._store.exact.key.shape[1] else "query",
            zoomed=zoomed.numpy(),
        )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, one per id; special tokens by their names.

    A tokenizer spells a token by its neighbours: a first space is dropped, a character may take several tokens. So each
    is spelled behind the last complete one, and those that end within a character are left empty until it is complete.
    """
    options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    texts: list[str] = []
    before: list[int] = []
    waiting: list[int] = []
    for number in ids:
        waiting.append(number)
        known = str(tokenizer.decode(before, **options)) if before else ""
        text = str(tokenizer.decode(before + waiting, **options))[len(known) :]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(waiting) < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        before, waiting = waiting, []
    if waiting:  # the text ends within a character
        texts[-1] = "\N{REPLACEMENT CHARACTER}"
    return texts
