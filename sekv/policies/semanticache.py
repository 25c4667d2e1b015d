"""SemantiCache: merge tokens that mean the same within a clause into one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sekv.budget import Budget
from sekv.errors import PolicyError
from sekv.policies.base import Policy, check_minimum
from sekv.policies.keydiff import unit_keys
from sekv.policies.selection import top
from sekv.prefill import Prefill
from sekv.stores.merged import MergedStore, merge_rows

_HALVINGS = 12  # of the interval in which a head's threshold lies
_FORCED = 4  # a chunk without delimiters ends after this many times the shortest chunk, at least
_LONGEST = 64  # tokens; shorter where the budget allows


@dataclass(frozen=True)
class ChunkPlan:
    """What all layers share. Dimensions: B batch, N tokens, C chunks, L longest chunk.

    Attributes:
        rows: rows per head [B].
        index: token index of each chunk's tokens [B, C, L], 0 beyond a chunk.
        real: where `index` is a token [B, C, L].
        exact: sinks and tail [B, N].
    """

    rows: Tensor
    index: Tensor
    real: Tensor
    exact: Tensor


@dataclass(kw_only=True)
class SemantiCachePolicy(Policy):
    """SemantiCache (arXiv 2603.14303): merges similar keys within chunks, nothing is dropped.

    The context is cut into chunks at delimiters. Within a chunk the first free token becomes a seed and takes all free
    tokens whose keys have a cosine of at least tau with its own; the next free token is the next seed. Each cluster
    becomes one row, the mean of its keys and of its values, and a row of m tokens gets log m added to its logit, so it
    weighs as much as its tokens would (proportional attention).

    Choices where the paper's text leaves them open or knows no budget: tau is found per KV head by bisection, so that
    the rows fit the budget, and rows left over go to the tokens least like their seed, on their own; similarity is of
    rotated keys; sinks and tail are rows of one token; a budget with few rows joins chunks (at most every m-th token
    ends one), and a stretch without delimiters is cut after max(64, 4 m) tokens.

    Attributes:
        delimiters: characters whose tokens end a chunk.
    """

    name: ClassVar[str] = "semanticache"

    delimiters: str = ".!?;\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delimiters:
            raise PolicyError(f"{self.name}: delimiters is empty; give the characters that end a chunk")

    def prepare(self, prefill: Prefill, budget: Budget) -> ChunkPlan:
        """Cuts the contexts into chunks.

        Raises:
            BudgetError: the budget cannot hold sinks, tail and one row.
        """
        rows, lengths = self.rows(prefill, budget), prefill.lengths
        least = torch.full_like(rows, self.sinks + self.tail + 1)
        check_minimum(rows, least, lengths, "semanticache (sinks, tail and one merged row)")
        exact = prefill.mask & (
            (prefill.positions < self.sinks) | (prefill.positions >= (lengths - self.tail)[:, None])
        )
        exact |= (rows >= lengths)[:, None] & prefill.mask  # a context that is kept whole
        free = prefill.mask & ~exact
        ends = self.chunk_ends(prefill, free, rows - exact.sum(dim=1))
        return ChunkPlan(rows, *_chunk_tables(free, ends), exact)

    def chunk_ends(self, prefill: Prefill, free: Tensor, cores: Tensor) -> Tensor:
        """Where chunks end [B, N], at most `cores[b]` of them in the `free` tokens [B, N] of each context."""
        count = free.sum(dim=1)
        # At most count / m delimiters and count / 4m forced cuts remain, and one chunk after the last.
        shortest = torch.where(cores > 3, (1.25 * count / (cores - 3).clamp_min(1)).ceil(), count + 1).long()
        shortest = shortest.clamp_min(1)[:, None]
        longest = (shortest * _FORCED).clamp_min(_LONGEST)
        place = (free.long().cumsum(dim=1) - 1).clamp_min(0)
        several = (cores > 3)[:, None]
        cuts = _last_of_cell(place // shortest, self._delimits(prefill) & free & several)
        empty = _cell_sums(place // longest, cuts) == 0
        return cuts | (_last_of_cell(place // longest, free & several) & empty & (place % longest == longest - 1))

    def _delimits(self, prefill: Prefill) -> Tensor:
        """Tokens [B, N] whose text holds a delimiter; none without a tokenizer."""
        tokenizer = prefill.backbone.tokenizer
        if tokenizer is None:
            return torch.zeros_like(prefill.mask)
        known, place = prefill.input_ids.unique(return_inverse=True)
        texts = tokenizer.batch_decode([[token] for token in known.tolist()])
        marked = [any(mark in text for mark in self.delimiters) for text in texts]
        return torch.tensor(marked, device=place.device)[place]

    def compress(self, prefill: Prefill, layer: int, plan: ChunkPlan) -> MergedStore:
        """A store of merged rows."""
        key, value = prefill.key_value(layer)
        row = self.row_of_token(key, prefill.mask, plan)
        n_rows = int(plan.rows.max())
        merged_key, size = merge_rows(key, row, n_rows)
        return MergedStore(merged_key, merge_rows(value, row, n_rows)[0], size, prefill.lengths)

    def restore(self, prefill: Prefill, layer: int, plan: ChunkPlan, state: dict[str, Tensor]) -> MergedStore:
        """As `compress` made it."""
        return MergedStore.restored(state, prefill.lengths)

    def row_of_token(self, key: Tensor, mask: Tensor, plan: ChunkPlan) -> Tensor:
        """The row of each token [B, K, N], numbered by their first tokens; padding has the number of rows."""
        batch, kv_heads, n, dim = key.shape
        chunks, longest = plan.index.shape[1:]
        unit = unit_keys(key, mask[:, None])
        flat = plan.index.flatten(1)
        gathered = unit.gather(2, flat[:, None, :, None].expand(-1, kv_heads, -1, dim))
        gathered = gathered.reshape(batch, kv_heads, chunks, longest, dim)
        similarity = gathered @ gathered.mT  # [B, K, C, L, L]
        real = plan.real[:, None]
        cores = (plan.rows - plan.exact.sum(dim=1))[:, None].expand(-1, kv_heads)
        seed = _clusters(similarity, real, cores)  # [B, K, C, L]
        seed = _split_off(similarity, seed, real, cores)
        leads = torch.zeros(batch, kv_heads, n + 1, dtype=torch.bool, device=key.device)
        token = torch.where(real, plan.index[:, None], n).flatten(2).expand(-1, kv_heads, -1)
        is_seed = (seed == torch.arange(longest, device=key.device)) & real
        leads.scatter_(2, torch.where(is_seed.flatten(2), token, n), True)
        leads = leads[..., :n] | plan.exact[:, None]
        number = leads.long().cumsum(dim=2) - 1  # of the row that a leading token begins
        lead = torch.arange(n + 1, device=key.device).expand(batch, kv_heads, -1).clone()
        seed_token = plan.index[:, None].expand(-1, kv_heads, -1, -1).gather(3, seed).flatten(2)
        lead.scatter_(2, token, seed_token)
        row = number.gather(2, lead[..., :n])
        return row.masked_fill(~mask[:, None], int(plan.rows.max()))


def _last_of_cell(cell: Tensor, marked: Tensor) -> Tensor:
    """The last marked token [B, N] of each cell [B, N]."""
    token = torch.arange(1, cell.shape[1] + 1, device=cell.device) * marked
    last = torch.zeros_like(cell).scatter_reduce_(1, cell, token, "amax")
    return marked & (last.gather(1, cell) == token)


def _cell_sums(cell: Tensor, marked: Tensor) -> Tensor:
    """Marked tokens in each token's cell [B, N]."""
    return torch.zeros_like(cell).scatter_add_(1, cell, marked.long()).gather(1, cell)


def _chunk_tables(free: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Index and reality of the chunks' tokens [B, C, L] from the free tokens and the chunks' last ones [B, N]."""
    batch, n = free.shape
    chunk = (ends & free).long().cumsum(dim=1) - (ends & free).long()
    chunk = torch.where(free, chunk, 0)
    count = torch.zeros_like(chunk).scatter_add_(1, chunk, free.long())
    n_chunks, longest = int(chunk.max()) + 1, max(1, int(count.max()))
    before = count.cumsum(dim=1) - count  # free tokens before each chunk
    offset = free.long().cumsum(dim=1) - 1 - before.gather(1, chunk)
    slot = torch.where(free, chunk * longest + offset, n_chunks * longest)
    index = torch.zeros(batch, n_chunks * longest + 1, dtype=torch.long, device=free.device)
    index.scatter_(1, slot, torch.arange(n, device=free.device).expand(batch, -1))
    real = torch.zeros_like(index, dtype=torch.bool).scatter_(1, slot, free)
    shape = (batch, n_chunks, longest)
    return index[:, :-1].reshape(shape), real[:, :-1].reshape(shape)


def _seeds(similarity: Tensor, real: Tensor, threshold: Tensor) -> Tensor:
    """Greedy seeds of every chunk at once: each token's seed [B, K, C, L], its own place where there is no token."""
    longest = similarity.shape[-1]
    place = torch.arange(longest, device=similarity.device)
    seed = torch.where(real, longest, place).expand(similarity.shape[:-1]).clone()
    near = similarity >= threshold[..., None, None, None]
    for i in range(longest):  # places in a chunk, not tokens of the context
        free = seed == longest
        joins = free & free[..., i : i + 1] & (near[..., i, :] | (place == i))
        seed = torch.where(joins, i, seed)
    return seed


def _clusters(similarity: Tensor, real: Tensor, cores: Tensor) -> Tensor:
    """Seeds at each head's largest threshold, to within bisection, with at most `cores` clusters [B, K]."""
    place = torch.arange(similarity.shape[-1], device=similarity.device)
    low = torch.full(cores.shape, -1.5, device=similarity.device)  # one cluster per chunk, which always fits
    high = torch.full_like(low, 1.5)  # one cluster per token
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        clusters = ((_seeds(similarity, real, middle) == place) & real).sum(dim=(2, 3))
        fits = clusters <= cores
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return _seeds(similarity, real, low)


def _split_off(similarity: Tensor, seed: Tensor, real: Tensor, cores: Tensor) -> Tensor:
    """Gives rows that are left over to the tokens least like their seed, alone."""
    place = torch.arange(similarity.shape[-1], device=similarity.device).expand_as(seed)
    own = seed == place
    spare = cores - (own & real).sum(dim=(2, 3))
    likeness = similarity.gather(-1, seed[..., None])[..., 0].masked_fill(own | ~real, torch.inf)
    members = (~own & real).sum(dim=(2, 3))
    alone = top(-likeness.flatten(2), torch.minimum(spare, members)[..., None]).view_as(seed)
    return torch.where(alone, place, seed)
