"""kvpress' side of the comparison, run in an environment of its own; needs kvpress and nothing of this project.

Usage: python benchmarks/parity/theirs.py FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from cases import CASES, RATIO, Case
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar


def record_scores(press: Any) -> list[Tensor]:
    """A list that fills with the scores [K, N] of each layer when the press runs."""
    scores: list[Tensor] = []
    if isinstance(press, kvpress.KVzipPress):
        finish = press.compress_post

        def finished(model: Any) -> None:
            scores.extend(press.score_val[:, 0].clone())
            finish(model)

        press.compress_post = finished
        return scores
    scorer = press if isinstance(press, kvpress.ScorerPress) else press.press
    score = scorer.score

    def scored(*args: Any, **kwargs: Any) -> Tensor:
        result = score(*args, **kwargs)
        scores.append(result[0].clone())
        return result

    scorer.score = scored
    return scores


@torch.no_grad()
def run(model: Any, case: Case, context: Tensor, question: Tensor, full: DynamicCache) -> dict[str, Tensor]:
    """Scores [L, K, N], kept positions [L, K, N] and the question's last logits [V]; `full` holds all keys."""
    modules = [layer.self_attn for layer in model.model.layers]
    press = eval(case.press, vars(kvpress))  # noqa: S307 - the text is in cases.py
    press.compression_ratio = RATIO
    scores = record_scores(press)
    cache = DynamicCache()
    with press(model):
        model.model(input_ids=context, past_key_values=cache)
    kept = []
    for index, module in enumerate(modules):
        whole, left = full.layers[index].keys[0], cache.layers[index].keys[0]  # [K, N, d], [K, n, d]
        keep = torch.zeros(whole.shape[:2], dtype=torch.bool)
        keep.scatter_(1, torch.cdist(left, whole).argmin(dim=-1), True)
        if getattr(module, "masked_key_indices", None) is not None:
            _, heads, tokens = module.masked_key_indices
            keep[heads, tokens] = False
        kept.append(keep)
    for step, token in enumerate(question):  # one by one, which needs no mask over layers of different lengths
        position = torch.tensor([[context.shape[1] + step]])
        logits = model(input_ids=token[None, None], past_key_values=cache, position_ids=position).logits
    return {
        f"{case.name}|scores": torch.stack(scores).contiguous(),
        f"{case.name}|kept": torch.stack(kept).contiguous(),
        f"{case.name}|logits": logits[0, -1].contiguous(),
    }


def main(folder: Path) -> None:
    """Writes `theirs-N.safetensors` and the versions beside our files."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    inputs = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    context, question = torch.tensor([inputs["context"]]), torch.tensor(inputs["question"])
    for number, label in enumerate(inputs["models"]):
        found: dict[str, Tensor] = {}
        model = AutoModelForCausalLM.from_pretrained(folder / f"model-{number}", dtype=torch.float32).eval()
        full = DynamicCache()
        with torch.no_grad():
            model.model(input_ids=context, past_key_values=full)
        for case in CASES:
            model.set_attn_implementation("eager" if "Observed" in case.press else "sdpa")
            for layer in model.model.layers:
                layer.self_attn.masked_key_indices = None  # the case before may have left marks
            found |= run(model, case, context, question, full)
            print(f"{label}: {case.press}", flush=True)
        save_file(found, folder / f"theirs-{number}.safetensors")
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
