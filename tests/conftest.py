"""Fixtures shared by all tests: tiny seeded backbones of each family, an offline tokenizer, and no network."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sekv.backbone import Backbone, load_backbone

FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test that uses the real model."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow_model)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte after <pad> 0, <bos> 1 and <eos> 2: 259 tokens, nothing downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(family: str = "llama", seed: int = 0, **config: Any) -> PreTrainedModel:
    """A seeded float32 model: 2 layers, 4 query and 2 KV heads of 16, weights big enough for uneven attention."""
    settings: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        settings["sliding_window"] = None  # its default would make every layer a sliding one
    settings.update(config)
    make_config, make_model = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(make_config(**settings)).float().eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., PreTrainedModel]:
    """Makes a fresh tiny transformers model without our attention: `make_tiny_model("qwen3", seed=1)`."""
    return tiny_model


@pytest.fixture(scope="session")
def make_tiny_backbone(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Backbone]:
    """Makes a fresh tiny backbone: `make_tiny_backbone("qwen3", seed=1, num_hidden_layers=3)`."""

    def make(family: str = "llama", seed: int = 0, **config: Any) -> Backbone:
        return Backbone.from_model(tiny_model(family, seed, **config), tokenizer, f"tiny-{family}")

    return make


@pytest.fixture(scope="session")
def tiny_backbone(make_tiny_backbone: Callable[..., Backbone]) -> Backbone:
    """The tiny Llama; frozen, so tests can share it."""
    return make_tiny_backbone("llama")


@pytest.fixture(scope="session")
def smollm2() -> Backbone:
    """The real default backbone in float32; fetched on first use, and a failure to fetch it fails the test."""
    return load_backbone("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses every connection, as a machine without network does."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("network access is blocked in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip runs in a process of its own
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
