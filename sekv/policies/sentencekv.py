"""SentenceKV: sentences on the host, retrieved per query by their mean key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sekv.errors import PolicyError
from sekv.policies.retrieval import RetrievalPolicy
from sekv.prefill import Prefill
from sekv.stores.plan import SpanPlan
from sekv.stores.retrieval import SentenceStore

_ENDINGS = (".", "!", "?", "\n", "\u010a", "<0x0A>", "\u3002")  # line breaks as byte-level and SentencePiece write them


@dataclass(kw_only=True)
class SentenceKVPolicy(RetrievalPolicy):
    """SentenceKV (arXiv 2504.00970): every query reads the sentences whose mean key it is closest to.

    A sentence ends with a token whose text ends in `.`, `!`, `?` or a line break, or after `span` tokens.

    Departures: every query retrieves for itself, where the paper averages the queries of the sentence being written; no
    token of a sentence is dropped beforehand; sinks and tail are always read and count; heads that share keys choose
    together, by the mass that a softmax gives each sentence, summed over the heads.
    """

    name: ClassVar[str] = "sentencekv"

    span: int = 64

    def ends(self, prefill: Prefill) -> Tensor | None:
        """Where sentences end [B, N].

        Raises:
            PolicyError: the backbone has no tokenizer.
        """
        tokenizer = prefill.backbone.tokenizer
        if tokenizer is None:
            raise PolicyError(
                f"{self.name} cuts at sentence ends, and '{prefill.backbone.name}' has no tokenizer; give it one"
            )
        ids, place = prefill.input_ids.unique(return_inverse=True)
        texts = tokenizer.convert_ids_to_tokens(ids.tolist())
        final = torch.tensor([text is not None and text.endswith(_ENDINGS) for text in texts], device=ids.device)
        return final[place]

    def compress(self, prefill: Prefill, layer: int, plan: SpanPlan) -> SentenceStore:
        """Mean keys, sinks and tail on the compute tier, sentences on the host."""
        return SentenceStore(*prefill.key_value(layer), plan)
