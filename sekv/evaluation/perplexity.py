"""`ppl:LENGTH`: perplexity of the tokens that follow a compressed context, against that under the full cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from sekv.backbone import Backbone
from sekv.cache import CompressedCache
from sekv.corpus import held_out_english
from sekv.errors import DataError
from sekv.evaluation.sample import Sample, Task
from sekv.generation import Answer
from sekv.prefill import token_surprisal
from sekv.prompt import Prompt

CONTINUATION = 256  # tokens that are scored
_CHUNK = 64  # continuation tokens read at once: what a memory looks up grows with them
_MIN_CONTEXT = 64


class PerplexityTask(Task):
    """Windows of `length` tokens over one text: a context, one token to go on from, and `CONTINUATION` scored tokens.

    Args:
        length: tokens of a window.
        text_file: plain text; held-out English by default.

    Raises:
        DataError: the length is too small, or the file cannot be read.
    """

    def __init__(self, length: int, text_file: str | None = None) -> None:
        self.names = (f"ppl:{length}",)
        self.length = length
        least = _MIN_CONTEXT + 1 + CONTINUATION
        if length < least:
            raise DataError(f"task 'ppl:{length}' needs a length of at least {least} tokens, such as ppl:4096")
        self._text = _read(text_file)

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """Windows spread evenly; without a limit they do not overlap, with a larger one only their contexts do."""
        name = self.names[0]
        if self.length > max_positions:
            raise DataError(f"{name} does not fit the backbone: it reads at most {max_positions} tokens")
        head = tokenizer("").input_ids
        bos = head[:1] if head and head[0] == tokenizer.bos_token_id else []
        ids = tokenizer(self._text, add_special_tokens=False, verbose=False).input_ids
        window = self.length - len(bos)
        if len(ids) < window:
            raise DataError(f"the text of {name} has only {len(ids)} tokens; give a longer one: {name}[text=FILE]")
        n = min(limit or len(ids) // window, (len(ids) - window) // CONTINUATION + 1)
        starts = [round(i * (len(ids) - window) / max(1, n - 1)) for i in range(n)]
        return [self._sample(tokenizer, i, bos + ids[start : start + window]) for i, start in enumerate(starts)]

    def _sample(self, tokenizer: PreTrainedTokenizerBase, index: int, ids: list[int]) -> Sample:
        cut = len(ids) - CONTINUATION - 1
        return Sample(
            task=self.names[0],
            index=index,
            context=str(tokenizer.decode(ids[:cut])),
            question="",
            answer_prefix="",
            answers=(str(tokenizer.decode(ids[cut:])),),
            max_new_tokens=0,
            metric="perplexity",
            prompt=Prompt(ids[:cut], ids[cut:]),
        )


@torch.no_grad()
def continuation_surprisal(backbone: Backbone, cache: CompressedCache, ids: Sequence[int]) -> tuple[float, Answer]:
    """Mean -log p in nats of every token of `ids` but the first, read after a compressed context.

    Args:
        backbone: the model that read the context.
        cache: the compressed context; it is forked.
        ids: the tokens that follow it, at least two.

    Returns:
        The mean, and an account whose answer is empty.
    """
    start = time.perf_counter()
    fork = cache.fork()
    tokens = torch.tensor([list(ids)], device=backbone.device)
    parts = []
    for begin in range(0, len(ids) - 1, _CHUNK):
        read = tokens[:, begin : min(begin + _CHUNK, len(ids) - 1)]
        states = backbone.hidden_states(read, cache=fork)
        parts.append(token_surprisal(backbone, states, tokens[:, begin + 1 : begin + 1 + read.shape[1]]))
    nats = float(torch.cat(parts, dim=1).double().mean())
    account = Answer(
        ids=[],
        text="",
        rows=fork.mean_rows,
        resident_bytes=cache.resident_bytes,
        host_bytes=cache.host_bytes,
        moved_bytes_per_token=fork.moved_bytes / (len(ids) - 1),
        seconds=time.perf_counter() - start,
    )
    return nats, account


def _read(text_file: str | None) -> str:
    if text_file is None:
        return "\n\n".join(held_out_english())
    try:
        return Path(text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"text file '{text_file}' cannot be read: {error}") from None
