"""The model `sekv` of lm-eval: every request's context is compressed, and its continuation attends the memory.

Run it with `sekv lm-eval ...`, which registers the model and hands its arguments to lm-eval:

    sekv lm-eval run --model sekv --model_args backbone=smollm2-135m,policy=keydiff,budget=0.1 --tasks arc_easy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor

from sekv.adapter import SeKVAdapter
from sekv.backbone import Backbone, load_backbone
from sekv.budget import Budget
from sekv.cache import CompressedCache
from sekv.errors import DataError
from sekv.generation import answer, read_context
from sekv.policies.base import compress
from sekv.policies.registry import build_policy

_MAX_NEW_TOKENS = 256


@register_model("sekv")
class SeKVLM(TemplateLM):
    """A backbone whose contexts are compressed.

    Requests with the same context, such as the options of a multiple choice, share one compressed memory. They are
    answered one at a time, so there is no padding.

    Args:
        backbone: name, folder, Hub id, or a loaded backbone.
        policy: its specification.
        budget: share of the context or number of rows.
        adapter: folder of a trained adapter.
        dtype: of the backbone.
        device: of the backbone.
        max_length: most tokens of context and continuation; the backbone's positions by default.
        tokenizer: not used here; tasks of lm-eval that generate their data read it from the same arguments.
        batch_size: accepted for lm-eval's sake.
        max_batch_size: likewise.
    """

    def __init__(
        self,
        backbone: str | Backbone = "smollm2-135m",
        policy: str = "full",
        budget: str | float = 1.0,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        tokenizer: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.budget = Budget.parse(budget)
        trained = SeKVAdapter.from_pretrained(adapter) if adapter else None
        self.policy = build_policy(policy, adapter=trained)
        self.backbone = backbone if isinstance(backbone, Backbone) else load_backbone(backbone, dtype, device or "auto")
        if trained is not None:
            trained.check_backbone(self.backbone)
            trained.to(self.backbone.device)
        if self.backbone.tokenizer is None:
            raise DataError(f"the backbone '{self.backbone.name}' has no tokenizer, which lm-eval needs")
        self.tokenizer: Any = self.backbone.tokenizer
        positions = self.backbone.geometry.max_positions
        self.max_length = min(positions, int(max_length)) if max_length else positions
        self._last: tuple[list[int], CompressedCache] | None = None

    @property
    def eot_token_id(self) -> int:
        """What ends a text, and begins one that has no context."""
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's cache of tokenized requests."""
        return self.backbone.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that begins with BOS does not get another."""
        bos = self.tokenizer.bos_token
        special = add_special_tokens if add_special_tokens is not None else not (bos and string.startswith(bos))
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log p of each continuation, and whether greedy decoding would write it."""
        return [self._score(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: a text without a context leaves nothing to compress."""
        raise NotImplementedError(
            "rolling log-likelihoods have no context to compress; use `sekv evaluate --tasks ppl:LENGTH[text=FILE]`"
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each context greedily, or as its arguments say, up to the first stop."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, arguments: dict[str, Any]) -> str:
        options = dict(arguments)
        until = options.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        limit = int(options.pop("max_gen_toks", _MAX_NEW_TOKENS))
        sampling = bool(options.pop("do_sample", False))
        temperature = options.pop("temperature", None)
        if sampling and temperature:
            options |= {"do_sample": True, "temperature": float(temperature)}
        ids = self.tok_encode(context)[-max(2, self.max_length - limit) :]
        if stops:
            options |= {"stop_strings": stops, "tokenizer": self.tokenizer}
        memory = self._memory(ids[:-1]) if len(ids) > 1 else None
        if memory is None:
            raise DataError("a request has a context of one token, which leaves nothing to compress")
        text = answer(self.backbone, memory, ids[:-1], ids[-1:], limit, **options).text
        for stop in stops:
            text = text.split(stop)[0]
        return text

    @torch.no_grad()
    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = (context + continuation)[-self.max_length :]
        n = len(continuation)
        if n >= len(ids):
            raise DataError(f"a continuation of {n} tokens leaves no context within {self.max_length} tokens")
        cut = len(ids) - n - 1  # the last token of the context is read after it: the first prediction is made there
        read = torch.tensor([ids[cut:-1]], device=self.backbone.device)
        cache = self._memory(ids[:cut]).fork() if cut else None
        states = self.backbone.hidden_states(read, cache=cache)
        log_p: Tensor = self.backbone.logits(states)[0].float().log_softmax(dim=-1)
        target = torch.tensor(ids[cut + 1 :], device=log_p.device)
        greedy = bool((log_p.argmax(dim=-1) == target).all())
        return float(log_p.gather(1, target[:, None]).sum()), greedy

    def _memory(self, ids: list[int]) -> CompressedCache:
        """The compressed context, made once for requests that follow one another."""
        if self._last is None or self._last[0] != ids:
            context = read_context(self.backbone, ids, [self.policy])
            self._last = ids, compress(context, self.policy, self.budget)
        return self._last[1]
