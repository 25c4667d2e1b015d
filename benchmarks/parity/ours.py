"""Our side of the comparison with kvpress: models, token ids, and what our policies make of them, as files.

Usage: python benchmarks/parity/ours.py FOLDER [BACKBONE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from cases import CASES, CONTEXT, KEPT, QUESTION
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from sekv.backbone import Backbone, load_backbone
from sekv.budget import Budget
from sekv.corpus import builtin_english
from sekv.generation import read_context
from sekv.policies import build_policy, compress
from sekv.policies.scorer import ScorerPolicy
from sekv.prompt import template_parts

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


def backbones(base: Backbone) -> dict[str, Backbone]:
    """The backbone itself, and tiny models of random weights with its vocabulary and 4 query heads to a KV head."""
    made = {"SmolLM2-135M": base} if base.name == "smollm2-135m" else {base.name: base}
    for name, config, model in (
        ("tiny Llama (GQA 8:2)", LlamaConfig, LlamaForCausalLM),
        ("tiny Qwen3 (GQA 8:2)", Qwen3Config, Qwen3ForCausalLM),
    ):
        torch.manual_seed(0)
        tiny = model(config(vocab_size=base.geometry.vocab_size, **_TINY)).float()
        made[name] = Backbone.from_model(tiny, base.tokenizer, name)
    return made


@torch.no_grad()
def run(backbone: Backbone, context: list[int], question: list[int]) -> dict[str, Tensor]:
    """Scores [L, K, N], kept positions [L, K, N] and the question's last logits [V] of every case."""
    found: dict[str, Tensor] = {}
    policies = [build_policy(case.spec) for case in CASES]
    state = read_context(backbone, context, policies)
    for case, policy in zip(CASES, policies, strict=True):
        assert isinstance(policy, ScorerPolicy)
        plan = policy.prepare(state, Budget(rows=KEPT))
        layers = backbone.geometry.compressible
        found[f"{case.name}|scores"] = torch.stack([policy.score(state, layer)[0].float() for layer in layers])
        found[f"{case.name}|kept"] = torch.stack([policy.keep(state, layer, plan.of(layer))[0] for layer in layers])
        cache = compress(state, policy, Budget(rows=KEPT))
        positions = len(context) + torch.arange(len(question))[None]
        hidden = backbone.hidden_states(torch.tensor([question]), position_ids=positions, cache=cache)
        found[f"{case.name}|logits"] = backbone.logits(hidden[:, -1])[0].float()
        print(f"{backbone.name}: {case.name}", flush=True)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main(folder: Path, name: str) -> None:
    """Writes `inputs.json`, the models, and `ours-N.safetensors` into a folder."""
    disable_progress_bar()
    base = load_backbone(name, dtype="float32", device="cpu")
    tokenizer = base.tokenizer
    assert tokenizer is not None
    head, _ = template_parts(tokenizer)
    text = tokenizer("\n\n".join(builtin_english()[:4]), add_special_tokens=False).input_ids
    context = (head + text)[:CONTEXT]
    question = tokenizer(QUESTION, add_special_tokens=False).input_ids
    folder.mkdir(parents=True, exist_ok=True)
    models = []
    for number, (label, backbone) in enumerate(backbones(base).items()):
        where = folder / f"model-{number}"
        save_file(run(backbone, context, question), folder / f"ours-{number}.safetensors")
        backbone.model.save_pretrained(where)
        tokenizer.save_pretrained(where)
        models.append(label)
    inputs = {"models": models, "context": context, "question": question}
    (folder / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m")
