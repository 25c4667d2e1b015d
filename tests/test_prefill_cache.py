from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sekv import prefill_cache
from sekv.errors import DataError
from sekv.policies.registry import build_policy
from sekv.prefill_cache import PrefillCache

IDS = list(range(3, 120))
KINDS = ["full_attention", "sliding_attention"]


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Counts the contexts that are really read."""
    seen: list[int] = []
    real = prefill_cache.read_context
    monkeypatch.setattr(prefill_cache, "read_context", lambda *args: seen.append(len(args[1])) or real(*args))
    return seen


def test_a_context_is_read_once_and_comes_back_bit_for_bit(tiny_backbone, tmp_path: Path, reads) -> None:
    policies = [build_policy("snapkv"), build_policy("sekv[routing=mean]")]
    first = PrefillCache(tmp_path / "a", tiny_backbone).read(IDS, policies)
    again = PrefillCache(tmp_path / "a", tiny_backbone).read(IDS, policies)
    assert reads == [len(IDS)]
    for kind in ("keys", "values", "queries"):
        for one, two in zip(getattr(first, kind), getattr(again, kind), strict=True):
            assert torch.equal(one, two)
    for kind in ("hidden", "surprisal", "input_ids", "mask"):
        assert torch.equal(getattr(first, kind), getattr(again, kind))
    assert sorted(path.suffix for path in (tmp_path / "a").iterdir()) == [".json", ".safetensors"]


def test_a_policy_that_needs_more_reads_again_and_one_that_needs_less_does_not(
    tiny_backbone, tmp_path: Path, reads
) -> None:
    cache = PrefillCache(tmp_path, tiny_backbone)
    plain, snap, sekv = ([build_policy(spec)] for spec in ("keydiff", "snapkv", "sekv[routing=mean]"))
    assert cache.read(IDS, plain).queries == [None, None]
    cache.read(IDS, snap + sekv)
    assert len(reads) == 2
    assert cache.read(IDS, plain).queries == [None, None]
    cache.read(IDS, snap)
    cache.read(IDS, sekv)
    assert len(reads) == 2
    cache.read(IDS[:-1], plain)
    assert len(reads) == 3


def test_another_backbone_is_refused(tiny_backbone, make_tiny_backbone, tmp_path: Path) -> None:
    PrefillCache(tmp_path, tiny_backbone)
    with pytest.raises(DataError, match=r"belongs to another backbone \(backbone differ\)"):
        PrefillCache(tmp_path, make_tiny_backbone("llama", seed=5))
    sliding = make_tiny_backbone("qwen2", layer_types=KINDS, use_sliding_window=True, sliding_window=8)
    with pytest.raises(DataError, match="cannot be kept on disk"):
        PrefillCache(tmp_path / "b", sliding)


def test_a_damaged_file_is_named(tiny_backbone, tmp_path: Path) -> None:
    cache = PrefillCache(tmp_path, tiny_backbone)
    cache.read(IDS, [])
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"is damaged .*delete it"):
        cache.read(IDS, [])


def test_no_file_is_left_half_written(tiny_backbone, tmp_path: Path, monkeypatch) -> None:
    def fail(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(prefill_cache, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        PrefillCache(tmp_path, tiny_backbone).read(IDS, [])
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]
