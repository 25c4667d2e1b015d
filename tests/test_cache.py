from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from sekv.backbone import Backbone
from sekv.cache import CompressedCache
from sekv.policies.base import FullPolicy, compress
from sekv.prefill import Prefill, prefill

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
}


def ids(n: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, (batch, n), generator=torch.Generator().manual_seed(seed))


def full(made: Prefill) -> CompressedCache:
    return compress(made, FullPolicy(), 1.0)


def generate(model: Any, prompt: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """50 new tokens, never stopping early."""
    mask = torch.ones_like(prompt) if mask is None else mask
    settings = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, **options}
    return model.generate(prompt, attention_mask=mask, **settings)[:, prompt.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("question_length", [1, 6])
def test_greedy_equals_plain_generate(
    family: str, question_length: int, make_tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model, context = make_tiny_model(family), ids(33)
    prompt = torch.cat([context, ids(question_length, seed=1)], dim=1)
    want = generate(model, prompt)
    cache = full(prefill(Backbone.from_model(model), context))
    assert torch.equal(generate(model, prompt, cache=cache), want)


def test_hybrid_equals_plain_generate(make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, context = make_tiny_model("qwen2", **HYBRID), ids(33)
    prompts = [torch.cat([context, ids(6, seed=seed)], dim=1) for seed in (1, 2)]
    want = [generate(model, prompt) for prompt in prompts]
    made = prefill(Backbone.from_model(model), context)
    cache = full(made)
    assert [len(cache.stores), sorted(made.native)] == [2, [0, 2]]
    for prompt, tokens in zip(prompts, want, strict=True):  # forks and repeated compression leave the prefill as it was
        assert torch.equal(generate(model, prompt, cache=cache.fork()), tokens)
        assert torch.equal(generate(model, prompt, cache=full(made)), tokens)
    assert cache.layers[0].keys.shape[2] == 7  # its own kind: a window, not the context


def test_sampling_with_a_seed_equals_plain_generate(make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, context = make_tiny_model(), ids(33)
    prompt = torch.cat([context, ids(6, seed=1)], dim=1)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(7)
    want = generate(model, prompt, **options)
    cache = full(prefill(Backbone.from_model(model), context))
    torch.manual_seed(7)
    assert torch.equal(generate(model, prompt, cache=cache, **options), want)
    assert not torch.equal(generate(model, prompt, cache=cache.fork(), **options), want)  # it really samples


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streaming(tiny_backbone: Backbone) -> None:
    context, streamer = ids(33), Collector()
    prompt = torch.cat([context, ids(6, seed=1)], dim=1)
    output = generate(tiny_backbone.model, prompt, cache=full(prefill(tiny_backbone, context)), streamer=streamer)
    assert streamer.ended
    assert streamer.parts == [prompt[0].tolist(), *([token] for token in output[0].tolist())]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_equals_single_rows(
    side: str, family: str, make_tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_tiny_model(family)
    contexts, questions = [ids(40, seed=1), ids(23, seed=2)], [ids(3, seed=3), ids(7, seed=4)]
    want = [generate(model, torch.cat([c, q], dim=1)) for c, q in zip(contexts, questions, strict=True)]
    backbone = Backbone.from_model(model)
    pad = torch.zeros(1, 17, dtype=torch.long)
    real = torch.ones(1, 23, dtype=torch.long)
    parts = [(pad, contexts[1]), (pad, real)] if side == "left" else [(contexts[1], pad), (real, pad)]
    tokens = torch.cat([contexts[0], torch.cat(parts[0], dim=1)])
    mask = torch.cat([torch.ones_like(contexts[0]), torch.cat(parts[1], dim=1)])
    made = prefill(backbone, tokens, mask)
    # The questions differ in length too, so there is padding between context and question.
    asked = torch.cat([torch.nn.functional.pad(questions[0], (4, 0)), questions[1]])
    asked_mask = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(questions[0]), (4, 0)), torch.ones_like(questions[1])]
    )
    prompt = torch.cat([made.input_ids, asked], dim=1)
    prompt_mask = torch.cat([made.mask.long(), asked_mask], dim=1)
    got = generate(model, prompt, prompt_mask, cache=full(made))
    assert torch.equal(got, torch.cat(want))


def test_two_questions_leave_the_memory_as_it_was(tiny_backbone: Backbone) -> None:
    context = ids(33)
    cache = full(prefill(tiny_backbone, context))
    before = [t.clone() for store in cache.stores for t in store.resident_tensors() if t is not None]
    prompts = [torch.cat([context, ids(6, seed=seed)], dim=1) for seed in (1, 2, 1)]
    first, second, again = (generate(tiny_backbone.model, p, cache=cache.fork()) for p in prompts)
    after = [t for store in cache.stores for t in store.resident_tensors() if t is not None]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert cache.get_seq_length() == 33


def test_fork_shares_the_context(tiny_backbone: Backbone) -> None:
    cache = full(prefill(tiny_backbone, ids(33)))
    pointers = [s.resident_tensors()[0].data_ptr() for s in cache.stores]  # type: ignore[union-attr]
    assert [s.resident_tensors()[0].data_ptr() for s in cache.fork().stores] == pointers  # type: ignore[union-attr]


def test_length_is_the_true_one(tiny_backbone: Backbone) -> None:
    context = ids(33)
    cache = full(prefill(tiny_backbone, context))
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [33, 33]
    generate(tiny_backbone.model, torch.cat([context, ids(6, seed=1)], dim=1), cache=cache)
    assert cache.get_seq_length() == 33 + 6 + 49  # the last token is never fed back
    assert {store.tail_length for store in cache.stores} == {55}


def test_crop_forgets_the_newest_tokens(tiny_backbone: Backbone) -> None:
    context, question, other = ids(33), ids(6, seed=1), ids(6, seed=2)
    cache = full(prefill(tiny_backbone, context))
    want = tiny_backbone.hidden_states(question, cache=cache.fork())
    tiny_backbone.hidden_states(other, cache=cache)
    cache.crop(-6)
    assert cache.get_seq_length() == 33
    torch.testing.assert_close(tiny_backbone.hidden_states(question, cache=cache), want)
    with pytest.raises(ValueError, match="cannot drop 7 tokens: only 6 were added"):
        cache.crop(-7)
    cache.reset()
    assert cache.get_seq_length() == 33


def test_decoding_grows_past_the_slack(tiny_backbone: Backbone) -> None:
    tokens = ids(230)
    cache = full(prefill(tiny_backbone, tokens[:, :20]))
    steps = [tiny_backbone.hidden_states(tokens[:, t : t + 1], cache=cache) for t in range(20, 230)]
    torch.testing.assert_close(
        torch.cat(steps, dim=1), tiny_backbone.hidden_states(tokens)[:, 20:], atol=1e-4, rtol=1e-4
    )


def test_meters_count_context_rows(tiny_backbone: Backbone) -> None:
    context = ids(33)
    cache = full(prefill(tiny_backbone, context))
    assert cache.mean_rows == 0
    generate(tiny_backbone.model, torch.cat([context, ids(6, seed=1)], dim=1), cache=cache)
    assert cache.mean_rows == 33
    assert cache.moved_bytes == cache.host_bytes == 0
    assert cache.fork().mean_rows == 0


def test_bytes_follow_the_kv_heads(make_tiny_backbone: Callable[..., Backbone]) -> None:
    backbone = make_tiny_backbone(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    cache = full(prefill(backbone, ids(33)))
    assert cache.resident_bytes == 2 * 2 * (2 * 33 * 16) * 4  # layers, K and V, KV heads x tokens x dim, float32


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("budget", ["0.01", "0.5", "2", "1.0"])
def test_tiny_contexts_stay_whole(n: int, budget: str, make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, prompt = make_tiny_model(), ids(n + 2)
    want = generate(model, prompt)
    cache = compress(prefill(Backbone.from_model(model), prompt[:, :n]), FullPolicy(), budget)
    assert torch.equal(generate(model, prompt, cache=cache), want)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_more_sequences_than_contexts_are_refused(options: dict[str, Any], tiny_backbone: Backbone) -> None:
    context = ids(33)
    prompt = torch.cat([context, ids(6, seed=1)], dim=1)
    with pytest.raises(ValueError, match="compress one context for each sequence"):
        generate(tiny_backbone.model, prompt, cache=full(prefill(tiny_backbone, context)), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite(dtype: torch.dtype, make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    backbone = Backbone.from_model(make_tiny_model().to(dtype))
    cache = full(prefill(backbone, ids(33)))
    hidden = backbone.hidden_states(ids(6, seed=1), cache=cache)
    assert hidden.dtype == dtype
    assert hidden.isfinite().all()


def test_plain_use_of_the_model_is_untouched(make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, prompt = make_tiny_model(), ids(20)
    want = generate(model, prompt)
    Backbone.from_model(model)
    assert torch.equal(generate(model, prompt), want)


@torch.no_grad()
def test_real_model_decodes_as_plain(smollm2: Backbone) -> None:
    tokenizer, model = smollm2.tokenizer, smollm2.model
    assert tokenizer is not None
    text = "The lighthouse keeper wrote every evening in a blue notebook. " * 6
    context = tokenizer(text, return_tensors="pt")["input_ids"]
    question = tokenizer("In the end, the notebook", return_tensors="pt", add_special_tokens=False)["input_ids"]
    prompt = torch.cat([context, question], dim=1)
    cache = full(prefill(smollm2, context))
    assert torch.equal(generate(model, prompt, cache=cache.fork()), generate(model, prompt))
    got = smollm2.logits(smollm2.hidden_states(question, cache=cache))
    want = smollm2.logits(smollm2.hidden_states(prompt))[:, -question.shape[1] :]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
