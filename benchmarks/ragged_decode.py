"""Decode cost of a ragged store against a uniform one that keeps as many rows, interleaved: medians of their ratios.

The default geometry is a layer of SmolLM2-135M at 10% of 4,096 tokens; the heads' shares of the rows follow a ramp.
Times are those of the processor, which other work on the machine distorts least; one thread makes them comparable.

Run: OMP_NUM_THREADS=1 python benchmarks/ragged_decode.py --rows 409 --spread 0.4 --repeats 200
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from sekv.stores.evicted import EvictedStore


def _keep(counts: list[int], n_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    keep = torch.zeros(1, len(counts), n_tokens, dtype=torch.bool)
    for head, count in enumerate(counts):
        keep[0, head, torch.randperm(n_tokens, generator=generator)[:count]] = True
    return keep


def main() -> None:
    """Prints bytes, median times and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=409, help="mean rows per KV head")
    parser.add_argument("--spread", type=float, default=0.4, help="the first head keeps this share less, the last more")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8, help="stores of each kind, visited in turn as in a model")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()

    torch.manual_seed(0)
    dtype, kv_heads = getattr(torch, options.dtype), options.kv_heads
    ramp = torch.linspace(-options.spread, options.spread, kv_heads)
    counts = {"uniform": [options.rows] * kv_heads, "ragged": (options.rows * (1 + ramp)).int().tolist()}
    key, value = torch.randn(2, 1, kv_heads, options.tokens, options.dim, dtype=dtype)
    lengths = torch.tensor([options.tokens])
    stores = {
        name: [EvictedStore(key, value, _keep(rows, options.tokens), lengths) for _ in range(options.layers)]
        for name, rows in counts.items()
    }
    query = torch.randn(1, options.heads, 1, options.dim, dtype=dtype)
    new = torch.randn(1, kv_heads, 1, options.dim, dtype=dtype)

    seconds: dict[str, list[float]] = {name: [] for name in stores}
    for repeat in range(options.repeats + 5):
        for name in sorted(stores, reverse=bool(repeat % 2)):
            started = time.process_time()
            for store in stores[name]:
                store.append(new, new)
                store.attend(query, options.dim**-0.5, None)
            if repeat >= 5:  # the first rounds warm up
                seconds[name].append((time.process_time() - started) / options.layers)
    for name, found in stores.items():
        micro = 1e6 * statistics.median(seconds[name])
        print(f"{name}: rows {counts[name]}, {found[0].resident_bytes:,} bytes, {micro:.0f} us per layer and token")
    ratio = statistics.median(a / b for a, b in zip(seconds["ragged"], seconds["uniform"], strict=True))
    print(f"{options.dtype}, {torch.get_num_threads()} threads: ragged / uniform {ratio:.2f}")


if __name__ == "__main__":
    main()
