"""The model `sekv` of lm-eval: every request's context is compressed, and its continuation attends the memory.

Run it with `sekv lm-eval ...`, which registers the model and hands its arguments to lm-eval:

    sekv lm-eval run --model sekv --model_args backbone=smollm2-135m,policy=keydiff,budget=0.1 --tasks arc_easy
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

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
from sekv.generation import left_padded_ids, pad_token, read_contexts
from sekv.policies.base import compress
from sekv.policies.registry import build_policy

_MAX_NEW_TOKENS = 256


class _Part(NamedTuple):
    """A request for a log-likelihood.

    Attributes:
        context: what is compressed.
        read: what is read after it: the last token of the context, and all but the last of the continuation.
        target: the continuation.
    """

    context: tuple[int, ...]
    read: list[int]
    target: list[int]


@register_model("sekv")
class SeKVLM(TemplateLM):
    """A backbone whose contexts are compressed.

    Requests with the same context, such as the options of a multiple choice, share one compressed memory. Contexts of
    about equal length are read, compressed and answered together, `batch_size` at a time, padded on the left.

    Args:
        backbone: name, folder, Hub id, or a loaded backbone.
        policy: its specification.
        budget: share of the context or number of rows.
        adapter: folder of a trained adapter.
        dtype: of the backbone.
        device: of the backbone.
        max_length: most tokens of context and continuation; the backbone's positions by default.
        tokenizer: not used here; tasks of lm-eval that generate their data read it from the same arguments.
        batch_size: contexts that are read together; a number.
        max_batch_size: accepted for lm-eval's sake.

    Raises:
        DataError: the backbone has no tokenizer, or the batch size is no number.
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
        if not str(batch_size or 1).isdecimal() or int(batch_size or 1) < 1:
            raise DataError(f"batch_size={batch_size} is no number of contexts; give one, such as batch_size=4")
        self.batch_size = int(batch_size or 1)

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

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log p of each continuation, and whether greedy decoding would write it."""
        parts = [self._part(context, continuation) for _, context, continuation in requests]
        groups: dict[tuple[int, ...], list[int]] = {}  # numbers of the requests about each context
        for number, part in enumerate(parts):
            groups.setdefault(part.context, []).append(number)
        scores: dict[int, tuple[float, bool]] = {}
        for contexts in self._batches(list(groups)):
            memory = self._memory(contexts)
            for one in zip_longest(*(groups[context] for context in contexts)):
                # A context with fewer questions than others repeats its first one.
                asked = [groups[context][0] if n is None else n for n, context in zip(one, contexts, strict=True)]
                scores |= dict(zip(asked, self._score(memory, [parts[n] for n in asked]), strict=True))
        return [scores[number] for number in range(len(parts))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: a text without a context leaves nothing to compress."""
        raise NotImplementedError(
            "rolling log-likelihoods have no context to compress; use `sekv evaluate --tasks ppl:LENGTH[text=FILE]`"
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each context greedily, or as its arguments say, up to the first stop."""
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}  # numbers of the requests with the same arguments
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            options, stops = _decoding(requests[numbers[0]].args[1])
            room = max(2, self.max_length - options["max_new_tokens"])
            prompts = {number: tuple(self.tok_encode(requests[number].args[0])[-room:]) for number in numbers}
            if any(len(prompt) < 2 for prompt in prompts.values()):
                raise DataError("a request has a context of one token, which leaves nothing to compress")
            known: dict[tuple[int, ...], str] = {}
            for batch in self._batches(list(dict.fromkeys(prompts.values()))):
                known |= dict(zip(batch, self._generate(batch, options, stops), strict=True))
            texts |= {number: known[prompt] for number, prompt in prompts.items()}
        return [texts[number] for number in range(len(requests))]

    def _batches(self, contexts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Contexts of about equal length together; one without tokens, which has no memory, by itself."""
        ordered = sorted((context for context in contexts if context), key=len, reverse=True)
        batches = [ordered[i : i + self.batch_size] for i in range(0, len(ordered), self.batch_size)]
        return batches + [[context] for context in contexts if not context]

    def _part(self, context: list[int], continuation: list[int]) -> _Part:
        ids = (context + continuation)[-self.max_length :]
        n = len(continuation)
        if n >= len(ids):
            raise DataError(f"a continuation of {n} tokens leaves no context within {self.max_length} tokens")
        cut = len(ids) - n - 1  # the last token of the context is read after it: the first prediction is made there
        return _Part(tuple(ids[:cut]), ids[cut:-1], ids[cut + 1 :])

    def _memory(self, contexts: Sequence[tuple[int, ...]]) -> CompressedCache | None:
        """The compressed contexts; None for one without tokens."""
        if not contexts[0]:
            return None
        return compress(read_contexts(self.backbone, contexts, [self.policy]), self.policy, self.budget)

    def _score(self, memory: CompressedCache | None, parts: Sequence[_Part]) -> list[tuple[float, bool]]:
        """Scores of one continuation behind each context of a memory."""
        longest = max(len(part.read) for part in parts)
        pad = pad_token(self.backbone)
        # Padded on the right: no token sees what comes after it.
        read = torch.tensor([part.read + [pad] * (longest - len(part.read)) for part in parts])
        positions = torch.tensor([len(part.context) for part in parts])[:, None] + torch.arange(longest)
        states = self.backbone.hidden_states(
            read.to(self.backbone.device),
            position_ids=positions.to(self.backbone.device),
            cache=None if memory is None else memory.fork(),
        )
        found = []
        for row, part in zip(states, parts, strict=True):
            log_p: Tensor = self.backbone.logits(row[None, : len(part.read)])[0].float().log_softmax(dim=-1)
            target = torch.tensor(part.target, device=log_p.device)
            greedy = bool((log_p.argmax(dim=-1) == target).all())
            found.append((float(log_p.gather(1, target[:, None]).sum()), greedy))
        return found

    @torch.no_grad()
    def _generate(self, prompts: Sequence[tuple[int, ...]], options: dict[str, Any], stops: list[str]) -> list[str]:
        """Texts behind a batch of prompts, up to the first stop; the last token of each is read after its memory."""
        ids, mask = left_padded_ids(self.backbone, prompts)
        self.backbone.check_length(ids.shape[1] + options["max_new_tokens"])
        if stops:
            options = options | {"stop_strings": stops, "tokenizer": self.tokenizer}
        output: Any = self.backbone.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            cache=self._memory([prompt[:-1] for prompt in prompts]),
            pad_token_id=pad_token(self.backbone),
            **options,
        )
        config: Any = self.backbone.model.generation_config
        ends = config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        texts = []
        for new in output[:, ids.shape[1] :].tolist():
            # Rows that end before others are filled up with padding, which need not be a special token.
            end = next((i for i, number in enumerate(new) if number in ends), len(new))
            text = str(self.tokenizer.decode(new[:end], skip_special_tokens=True))
            for stop in stops:
                text = text.split(stop)[0]
            texts.append(text)
        return texts


def _decoding(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What `generate` is told by the arguments of a request, and the texts that end an answer."""
    options = dict(arguments)
    until = options.pop("until", None) or []
    options["max_new_tokens"] = int(options.pop("max_gen_toks", _MAX_NEW_TOKENS))
    sampling = bool(options.pop("do_sample", False))
    temperature = options.pop("temperature", None)
    options["do_sample"] = sampling and bool(temperature)
    if options["do_sample"]:
        options["temperature"] = float(temperature)
    return options, [until] if isinstance(until, str) else list(until)
