"""Documents to sequences of token ids, and sequences to batches: one way for every source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

TokenIds = np.ndarray[tuple[int], np.dtype[np.int32]]


def cut_to_sequences(
    documents: Iterable[Sequence[int]], length: int, min_length: int, separator: int
) -> Iterator[list[int]]:
    """Turns tokenised documents into training sequences.

    A document longer than `length` is cut into pieces; a shorter one stays whole; documents below `min_length` are
    joined, with a separator between them, until they fill a sequence. What is left below `min_length` is dropped.

    Args:
        documents: token ids.
        length: longest sequence in tokens.
        min_length: shortest sequence in tokens.
        separator: token id between joined documents.

    Yields:
        Sequences of `min_length` to `length` tokens.
    """
    joined: list[int] = []
    for document in documents:
        if len(document) >= min_length:
            for start in range(0, len(document), length):
                if len(piece := document[start : start + length]) >= min_length:
                    yield list(piece)
            continue
        joined += [separator, *document] if joined else document
        if len(joined) >= length:
            yield joined[:length]
            joined = []
    if len(joined) >= min_length:
        yield joined


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token between joined documents."""
    return next((i for i in (tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None), 0)


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def collate(sequences: Sequence[Sequence[int] | TokenIds], pad: int = 0) -> dict[str, Tensor]:
    """Pads sequences on the left: `input_ids` and `attention_mask` [B, N], both int64."""
    size = max(map(len, sequences))
    ids = torch.full((len(sequences), size), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, size - len(sequence) :] = torch.as_tensor(sequence, dtype=torch.int64)
        mask[row, size - len(sequence) :] = 1
    return {"input_ids": ids, "attention_mask": mask}
