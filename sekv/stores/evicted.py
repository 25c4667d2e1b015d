"""The store of methods that drop tokens: only the kept rows, a different number for every head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sekv.stores.base import ExactRows, Store, causal_tail_mask

Rescore = Callable[[Tensor, Tensor], Tensor]
"""Keys [B, K, R, d] and which are real [B, K, R] to scores [B, K, R], the highest to be kept."""

_SMALLEST_BLOCK = 32  # rows per block when heads differ: at this size less than one block per head is wasted
_BLOCK_COST = 4  # rows whose reading costs about as much as one more block
_WORKSPACE_BYTES = 64 * 2**20  # float32 logits and partial sums that may exist at once


class EvictedStore(Store):
    """Keeps a subset of the context's rows, ragged per batch row and KV head.

    The rows of one (batch row, KV head) pair, a *group*, lie in blocks of equal size; the blocks of all groups share
    one tensor [M, block, d]. Heads that keep more rows own more blocks, and nothing is padded to the longest head. When
    all groups keep the same number of rows, that number is the block size and every group is one block.

    Dimensions: B batch, H query heads, K KV heads (H = G * K), N context tokens, M blocks, Q queries, T tail tokens.

    Args:
        key: [B, K, N, d], rotated.
        value: [B, K, N, dv].
        keep: True for kept tokens [B, K, N]; at least one per batch row and head, never padding.
        lengths: true tokens of each context [B].
        rescore: scores of rows by their keys alone, from keys [B, K, R, d] in the order of their positions and which of
            them are real [B, K, R]: by it tokens that leave the tail compete with the rows there are, head by head.
            None: they are forgotten.

    Raises:
        ValueError: a head keeps no token.
    """

    def __init__(
        self, key: Tensor, value: Tensor, keep: Tensor, lengths: Tensor, rescore: Rescore | None = None
    ) -> None:
        # The empty context part of the exact rows: here they hold the tail only.
        super().__init__(ExactRows(*(t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (key, value))), lengths)
        self._rescore = rescore
        self.rows_per_head = keep.sum(dim=-1)  # [B, K]
        counts = self.rows_per_head.flatten()
        fewest, most = int(counts.min()), int(counts.max())
        if fewest == 0:
            raise ValueError("every batch row and KV head must keep at least one row of the context")
        self.block = most if fewest == most else _block_size(counts)
        blocks = (counts + self.block - 1) // self.block  # blocks of each group [B*K]
        first = blocks.cumsum(0) - blocks  # index of each group's first block
        group = torch.arange(len(counts), device=keep.device).repeat_interleave(blocks)
        self._first = (first * self.block).view_as(self.rows_per_head)  # row of each group's first in the flat tensors
        self.key_blocks, self.value_blocks = self._packed(key, value, keep, len(group))
        left = counts[group] - (torch.arange(len(group), device=keep.device) - first[group]) * self.block
        filled = torch.arange(self.block, device=keep.device) < left[:, None]
        # All are None when every group is exactly one full block.
        self.group: Tensor | None = None  # [M]
        self.bias: Tensor | None = None  # 0, or -inf for empty places, float32 [M, 1, block]
        self.members: Tensor | None = None  # 1 where a block is a group's, float32 [B*K, M]
        if fewest != most:
            self.group, self._column = group, group[:, None]
            self.members = torch.nn.functional.one_hot(group, len(counts)).T.contiguous().float()
            self.bias = torch.zeros(len(group), 1, self.block, device=keep.device)
            self.bias.masked_fill_(~filled[:, None], -torch.inf)
        self._kept = int(counts.sum())

    def _packed(self, key: Tensor, value: Tensor, keep: Tensor, n_blocks: int) -> tuple[Tensor, Tensor]:
        """Blocks of the kept rows, in the order of their positions."""
        # Slot of each kept row in the flat tensors, in the order that boolean indexing yields rows.
        slot = (self._first[..., None] + keep.cumsum(dim=-1) - 1)[keep]
        blocks = [x.new_zeros(n_blocks * self.block, x.shape[3]).index_copy_(0, slot, x[keep]) for x in (key, value)]
        packed_key, packed_value = (x.view(n_blocks, self.block, -1) for x in blocks)
        return packed_key, packed_value

    def _release(self, n: int, real: Tensor | None) -> None:
        """Lets the oldest tail tokens compete with the rows there are; every head keeps as many as it had."""
        if self._rescore is None:
            return
        counts = self.rows_per_head[..., None]
        place = torch.arange(int(counts.max()), device=counts.device)
        # Rows of a head lie behind one another, however many blocks it has; places beyond its own are not real.
        row = (self._first[..., None] + place).clamp_max(self.key_blocks.shape[0] * self.block - 1)
        rows = [
            torch.cat([blocks.flatten(0, 1)[row], tail], dim=2)
            for blocks, tail in zip((self.key_blocks, self.value_blocks), self._oldest(n), strict=True)
        ]
        later = torch.ones_like(counts, dtype=torch.bool).expand(-1, -1, n) if real is None else real[:, None]
        mask = torch.cat([place < counts, later.expand(*counts.shape[:2], n)], dim=-1)
        scores = self._rescore(rows[0], mask).masked_fill(~mask, -torch.inf)
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        # New tensors: other stores may read the old ones.
        self.key_blocks, self.value_blocks = self._packed(rows[0], rows[1], rank < counts, len(self.key_blocks))
        self.rewritten = True

    def attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        """One softmax over each head's kept rows and the visible tail."""
        batch, heads, n_queries, dim = query.shape
        kv_heads = self.rows_per_head.shape[1]
        self.meter.queries += batch * n_queries * kv_heads
        self.meter.rows += float(self._kept) * n_queries
        if tail_mask is None:
            tail_mask = causal_tail_mask(n_queries, self.tail_length, query.device)
        n_blocks, dim_value = len(self.key_blocks), self.value_blocks.shape[2]
        per_query = 4 * (heads // kv_heads) * n_blocks * (dim + self.block + dim_value)
        chunk = max(1, _WORKSPACE_BYTES // per_query)
        if n_queries <= chunk:
            return self._attend(query, scaling, tail_mask)
        masks = [None] * n_queries if tail_mask is None else tail_mask.split(chunk, dim=2)
        parts = [self._attend(q, scaling, m) for q, m in zip(query.split(chunk, dim=2), masks, strict=True)]
        return torch.cat(parts, dim=2)

    def _attend(self, query: Tensor, scaling: float, tail_mask: Tensor | None) -> Tensor:
        batch, kv_heads = self.rows_per_head.shape
        heads, n_queries, dim = query.shape[1:]
        # Queries of a group side by side [B*K, G*Q, d]: its heads read the same rows.
        grouped = query.reshape(batch * kv_heads, -1, dim).float() * scaling
        keys = self.key_blocks.float().mT
        # [M, G*Q, block]
        logits = grouped @ keys if self.bias is None else torch.baddbmm(self.bias, self._to_blocks(grouped), keys)
        tail_key, tail_value = self.exact.key.flatten(0, 1).float(), self.exact.value.flatten(0, 1).float()
        tail_logits = grouped @ tail_key.mT  # [B*K, G*Q, T]
        if tail_mask is not None:
            shape = (batch, kv_heads, heads // kv_heads, n_queries, self.tail_length)
            tail_logits.view(shape).masked_fill_(~tail_mask[:, :, None], -torch.inf)
        # The softmax of a group spans its blocks and its tail: one maximum, one total.
        largest = self._max_into(_amax(tail_logits), logits.amax(dim=-1))  # [B*K, G*Q]
        tail_weights = tail_logits.sub_(largest[..., None]).exp_()
        weights = logits.sub_(self._to_blocks(largest)[..., None]).exp_()
        total = self._add_into(tail_weights.sum(dim=-1), weights.sum(dim=-1))
        output = self._add_into(tail_weights @ tail_value, weights @ self.value_blocks.float())  # [B*K, G*Q, dv]
        return (output / total[..., None]).to(query.dtype).reshape(batch, heads, n_queries, -1)

    def _to_blocks(self, per_group: Tensor) -> Tensor:
        return per_group if self.group is None else per_group.index_select(0, self.group)

    def _max_into(self, per_group: Tensor, per_block: Tensor) -> Tensor:
        if self.group is None:
            return torch.maximum(per_group, per_block)
        return per_group.scatter_reduce_(0, self._column.expand_as(per_block), per_block, "amax")

    def _add_into(self, per_group: Tensor, per_block: Tensor) -> Tensor:
        if self.members is None:
            return per_group.add_(per_block)
        # One small product: adding by index takes a step per block, and an order of its own on accelerators.
        if per_group.dim() == 2:
            return per_group.addmm_(self.members, per_block)
        per_group.flatten(1).addmm_(self.members, per_block.flatten(1))
        return per_group

    @classmethod
    def restored(cls, state: dict[str, Tensor], lengths: Tensor, rescore: Rescore | None = None) -> EvictedStore:
        """The store whose `state` this is; the other arguments are the constructor's."""
        keep = torch.arange(int(state["rows"].max()), device=lengths.device) < state["rows"][..., None]
        padded = []
        for name in ("key", "value"):
            rows = state[name]
            padded.append(rows.new_zeros(*keep.shape, rows.shape[1]))
            padded[-1][keep] = rows
        return cls(padded[0], padded[1], keep, lengths, rescore)

    def state(self) -> dict[str, Tensor]:
        """Kept rows, head behind head in the order of their positions, and how many each head has."""
        counts = self.rows_per_head[..., None]
        place = torch.arange(int(counts.max()), device=counts.device)
        row = (self._first[..., None] + place)[place < counts]
        key, value = (blocks.flatten(0, 1)[row] for blocks in (self.key_blocks, self.value_blocks))
        return {"key": key, "value": value, "rows": self.rows_per_head}

    def resident_tensors(self) -> list[Tensor | None]:
        """Kept rows, their index, and the tail."""
        tables = [self.group, self.bias, self.members, self.rows_per_head, self._first]
        return [self.key_blocks, self.value_blocks, *tables, *self.exact.tensors()]


def _block_size(counts: Tensor) -> int:
    """Rows per block by which groups of these sizes [groups] are read fastest: few blocks, few empty places.

    Args:
        counts: rows of each group.
    """
    sizes = torch.arange(_SMALLEST_BLOCK, max(_SMALLEST_BLOCK, int(counts.max())) + 1, device=counts.device)
    blocks = ((counts + sizes[:, None] - 1) // sizes[:, None]).sum(dim=1)
    wasted = blocks * sizes - counts.sum()
    # Never more waste than the smallest blocks could have, and bytes stay those of the kept rows.
    allowed = torch.minimum(counts.sum() // 50, _SMALLEST_BLOCK * counts.new_tensor(len(counts)) // 2)
    cost = blocks * (sizes + _BLOCK_COST) + (wasted > allowed.clamp_min(int(wasted[0]))) * counts.sum()
    return int(sizes[cost.argmin()])


def _amax(logits: Tensor) -> Tensor:
    """Maximum over the last dimension; -inf where it is empty."""
    return logits.amax(dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
