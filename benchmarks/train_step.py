"""Cost of one optimiser step against a plain prefill of the same tokens, interleaved: medians and their ratio.

Run: python benchmarks/train_step.py --tokens 2048 --window 128 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sekv.adapter import SeKVAdapter
from sekv.backbone import load_backbone
from sekv.budget import Budget
from sekv.corpus import builtin_english
from sekv.prefill import prefill
from train.losses import LossConfig, total
from train.objective import MiningConfig, evaluate_batch


def main() -> None:
    """Prints one line per repeat and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2048, help="context and window together")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    backbone = load_backbone(options.backbone)
    adapter = SeKVAdapter.create(backbone)
    optimizer = torch.optim.AdamW(adapter.parameters())
    assert backbone.tokenizer is not None
    text = "\n\n".join(builtin_english())[: 10 * options.tokens]
    ids = backbone.tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    mask = torch.ones_like(ids, dtype=torch.bool)

    def plain() -> None:
        prefill(backbone, ids, surprisal=False)

    def step() -> None:
        outcome = evaluate_batch(
            backbone,
            adapter,
            ids,
            mask,
            window=options.window,
            budget=Budget(share=0.1),
            mining=MiningConfig(),
            config=LossConfig(),
        )
        total(outcome.losses, LossConfig(), anneal=1.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {"prefill": [], "step": []}
    for repeat in range(options.repeats + 1):
        for name, work in (("prefill", plain), ("step", step)):
            started = time.perf_counter()
            work()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
                print(f"{name} {seconds[name][-1]:.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["step"] / medians["prefill"]
    print(
        f"{options.tokens} tokens, window {options.window}, {backbone.dtype}, {torch.get_num_threads()} threads: "
        f"prefill {medians['prefill']:.2f} s, step {medians['step']:.2f} s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
