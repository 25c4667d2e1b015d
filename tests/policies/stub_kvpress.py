"""What the bridge uses of kvpress' published interface, so that it is tested where kvpress is not installed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class BasePress:
    def post_init_from_model(self, model):
        pass

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError

    def forward_hook(self, module, input, kwargs, output):  # noqa: A002 - its name there
        raise NotImplementedError

    @contextmanager
    def __call__(self, model):
        yield


@dataclass
class ScorerPress(BasePress):
    compression_ratio: float = 0.0

    def __post_init__(self):
        assert 0 <= self.compression_ratio < 1, "Compression ratio must be between 0 and 1"

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        n_kept = max(1, int(keys.shape[2] * (1 - self.compression_ratio)))
        index = scores.topk(n_kept, dim=-1).indices[..., None].expand(-1, -1, -1, module.head_dim)
        return keys.gather(2, index), values.gather(2, index)


@dataclass
class LastQueryPress(ScorerPress):
    """The last token's attention logits, from the layer's hidden states as presses do it."""

    scale: float = 1.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert module.rotary_emb is not None
        cos, sin = (t[:, -1:, None] for t in kwargs["position_embeddings"])
        query = module.q_proj(hidden_states[:, -1:]).unflatten(-1, (-1, module.head_dim))
        low, high = query.chunk(2, dim=-1)
        query = (query * cos + torch.cat([-high, low], dim=-1) * sin).transpose(1, 2)
        grouped = query.unflatten(1, (keys.shape[1], -1)).mean(dim=2)
        return self.scale * (grouped @ keys.mT)[:, :, 0]


@dataclass
class HeadwisePress(BasePress):
    """Drops head-wise by leaving marks on the module instead of removing rows."""

    press: ScorerPress

    @property
    def compression_ratio(self):
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value):
        self.press.compression_ratio = value

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        n = keys.shape[2]
        n_dropped = scores.shape[1] * (n - max(1, int(n * (1 - self.compression_ratio))))
        index = (-scores).flatten(1).topk(n_dropped, dim=1).indices.flatten()
        module.masked_key_indices = (torch.zeros_like(index), index // n, index % n)
        return keys, values


@dataclass
class OwnPassPress(BasePress):
    """Runs the model itself."""

    compression_ratio: float = 0.0

    @contextmanager
    def __call__(self, model):
        yield
