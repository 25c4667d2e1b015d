"""Every ablation's router, fitted to the same documents and measured on the same held-out ones.

Each document is read once and kept. Then each configuration in configs/ablations/ is fitted layer by layer to the full
cache's queries (`train.warmstart`; end-to-end steps are left out, so what differs is the design and not the length of a
run) and read as at inference. Measured at the queries that look farthest back: KL of the next-token distribution to the
full cache's, and recall, the share of the teacher's attention on spans that lies in the spans taken. Half of the
held-out documents ask for facts hidden in them.

Adapters are kept: DIR/NAME is an adapter for `sekv evaluate`.

Run: python benchmarks/ablations.py --output DIR --documents 4 --retrieval 16 --held-out 6 --steps 200
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.backbone import Backbone, load_backbone
from sekv.budget import Budget
from sekv.corpus import builtin_code, builtin_english, is_held_out
from sekv.errors import BudgetError
from sekv.policies.base import compress
from sekv.policies.sekv import SeKVPolicy
from sekv.prefill import Prefill
from sekv.routing import group_sum
from train.examples import RouterExample, make_example
from train.losses import LossConfig, distill_logits
from train.objective import MiningConfig, mine_queries, read_document
from train.recall import covered_share
from train.retrieval import retrieval_sequence
from train.warmstart import WarmStartConfig, fit_routers

CONFIGS = Path(__file__).parent.parent / "configs"
ABLATIONS = CONFIGS / "ablations"
_WINDOW = 128  # query tokens of plain text
Document = tuple[Prefill, int]  # what was read, and the tokens of its window


def read_all(
    backbone: Backbone, texts: list[str], plain: int, retrieval: int, tokens: int, seed: int
) -> list[Document]:
    """Reads `plain` documents of real text, then `retrieval` ones with facts hidden in them."""
    rng = random.Random(seed)
    sequences = []
    for i in range(plain + retrieval):
        ids = pieces(backbone, texts, rng, tokens)
        if i < plain:
            sequences.append((ids, _WINDOW))
        else:
            assert backbone.tokenizer is not None
            sequences.append(retrieval_sequence(backbone.tokenizer, ids, rng, 256, backbone.geometry.max_positions))
    read = []
    for ids, window in sequences:
        batch = torch.tensor([ids], device=backbone.device)
        read.append((read_document(backbone, batch, torch.ones_like(batch, dtype=torch.bool), window), window))
        print(f"read document {len(read)}/{len(sequences)}: {len(ids)} tokens", flush=True)
    return read


def pieces(backbone: Backbone, texts: list[str], rng: random.Random, tokens: int) -> list[int]:
    """Token ids of a random place in a random text, as many as asked for."""
    assert backbone.tokenizer is not None
    ids: list[int] = []
    while len(ids) < tokens:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 8 * tokens))
        ids += backbone.tokenizer(text[start : start + 8 * tokens], add_special_tokens=False, verbose=False).input_ids
    return ids[:tokens]


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and `model` settings of the shipped design and of each ablation."""
    shipped = read_settings(CONFIGS / "smollm2-135m.yaml")
    yield "shipped", shipped
    for path in sorted(ABLATIONS.glob("*.yaml")):
        changed = read_settings(path)
        yield path.stem, changed | {"adapter": shipped["adapter"] | changed.get("adapter", {})}


def read_settings(path: Path) -> dict[str, Any]:
    """The `model` group of a training configuration."""
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    return settings


@torch.no_grad()
def recall(adapter: SeKVAdapter, example: RouterExample, by_teacher: bool = False) -> float:
    """Share of the teacher's mass on spans in the spans taken at equal rows, in the router's or the teacher's order."""
    kv_heads = example.key.shape[1]
    wanted = group_sum(example.span_mass, kv_heads)
    order = wanted if by_teacher else group_sum(torch.sigmoid(example.logits(adapter)[1]), kv_heads)
    return float(covered_share(wanted, order, example.cost, example.zoom_rows).mean())


@torch.no_grad()
def divergence(document: Document, policy: SeKVPolicy, budget: Budget) -> float:
    """KL of the next token to the full cache's at the mined queries, in nats."""
    state, window = document
    n_context, backbone = state.n_tokens - window, state.backbone
    cache = compress(state.narrow(n_context), policy, budget)
    hidden = backbone.hidden_states(
        state.input_ids[:, n_context:], position_ids=state.positions[:, n_context:], cache=cache
    )
    assert state.hidden is not None
    mined = mine_queries(state, window, MiningConfig())[0]
    teacher, student = (x[:, mined] for x in (state.hidden, hidden))
    return float(distill_logits(backbone.logits(teacher), backbone.logits(student)).mean())


def measure(
    backbone: Backbone,
    settings: dict[str, Any],
    fitted_to: list[Document],
    held_out: list[Document],
    budgets: list[Budget],
    options: argparse.Namespace,
    folder: Path,
) -> dict[str, float]:
    """Fits one configuration, saves its adapter and returns its figures."""
    config = SeKVConfig(**settings.get("adapter", {}))
    loss = LossConfig(**settings.get("losses", {}))
    torch.manual_seed(options.seed)
    adapter = SeKVAdapter.create(backbone, config)
    routed = settings.get("train_router", True)

    def example(document: Document, budget: Budget) -> RouterExample:
        return make_example(document[0], adapter, window=document[1], budget=budget, mining=MiningConfig())

    if routed:
        shared = settings.get("warm_start", {}).get("layer_rows", WarmStartConfig.layer_rows)
        start = WarmStartConfig(steps=options.steps, layer_rows=shared)
        fit_routers(adapter, [example(d, budgets[0]) for d in fitted_to], start, loss)
    adapter.save_pretrained(folder)
    policy = SeKVPolicy(adapter=adapter, routing="learned" if routed else "mean")
    figures = {}
    for budget in budgets:
        try:
            figures[f"KL at {budget}"] = mean(divergence(d, policy, budget) for d in held_out)
        except BudgetError:  # a summary row for every span does not fit into every budget
            figures[f"KL at {budget}"] = float("nan")
    examples = [example(d, budgets[0]) for d in held_out]
    figures[f"recall at {budgets[0]}"] = mean(recall(adapter, e) for e in examples) if routed else float("nan")
    figures["oracle"] = mean(recall(adapter, e, by_teacher=True) for e in examples)
    return figures


def main() -> None:
    """Prints a table, and writes it to DIR/ablations.csv row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=4, help="of plain text to fit to")
    parser.add_argument("--retrieval", type=int, default=16, help="with hidden facts to fit to")
    parser.add_argument("--held-out", type=int, default=6, help="to measure on, half of either kind")
    parser.add_argument("--tokens", type=int, default=3072, help="of a document, at most")
    parser.add_argument("--steps", type=int, default=200, help="of the fit")
    parser.add_argument("--budgets", default="0.1,0.05", help="the first is fitted to")
    parser.add_argument("--only", default="", help="names of ablations, with commas (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    budgets = [Budget.parse(b) for b in options.budgets.split(",")]
    texts = [*builtin_english(), *builtin_code()]
    seen, unseen = ([t for t in texts if is_held_out(t) == held] for held in (False, True))
    half = options.held_out // 2
    held_out = read_all(backbone, unseen, options.held_out - half, half, options.tokens, options.seed + 1)
    fitted_to = read_all(backbone, seen, options.documents, options.retrieval, options.tokens, options.seed)
    rows: list[dict[str, Any]] = []
    options.output.mkdir(parents=True, exist_ok=True)
    for name, settings in configurations():
        if options.only and name not in options.only.split(","):
            continue
        folder = options.output / name.replace(" ", "-")
        rows.append({"design": name, **measure(backbone, settings, fitted_to, held_out, budgets, options, folder)})
        print({k: v if isinstance(v, str) else round(v, 4) for k, v in rows[-1].items()}, flush=True)
        with (options.output / "ablations.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.3f}" for v in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
