"""The four training losses (method section 1.6), pure functions of float32 tensors.

Every loss returns one value per document [B]. A batch is worth the mean of its documents, whatever their lengths and
span counts, so a batch of two equals the two separate steps.

Dimensions: B documents, H query heads, K KV heads, Q window queries, M mined queries, R rows, S spans (padded),
r ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from train.errors import ConfigError

_SMALLEST = 1e-12  # student mass below this counts as this much in a logarithm


@dataclass(frozen=True)
class LossConfig:
    """Weights and constants of the objective.

    Attributes:
        logits: weight of KL(teacher || student) between next-token distributions.
        attention: weight of KL(teacher || student) between attention masses per row, averaged over layers and heads.
        zoom: weight of the cross-entropy of the routing probabilities.
        recon: weight of the share of spectral energy that the rank gates drop.
        budget: weight of expanded rows and ranks; annealed from 0 over the first half of training.
        rank: beta, weight of the ranks against the rows inside the budget loss.
        labels: what the router should predict. `share`: how a head's attention is divided between the spans and the
            rest, by their divergence; needs an index of tokens. `mass`: the share of the head's attention that lies on
            the span, times `mass_scale` and at most 1. `cover`, as in the paper: 1 for the smallest set of spans that
            covers `coverage` of the head's mass on spans. Measured on held-out text, `mass` ranks spans better than
            `cover` (docs/router.md).
        mass_scale: factor on the share in `mass` labels.
        coverage: rho in (0, 1], the share in `cover` labels.
        positive: w_pos, weight of a label's positive part; the paper uses 10 with `cover`.
    """

    logits: float = 1.0
    attention: float = 1.0
    zoom: float = 1.0
    recon: float = 0.5
    budget: float = 0.1
    rank: float = 0.1
    labels: str = "share"
    mass_scale: float = 10.0
    coverage: float = 0.9
    positive: float = 1.0

    def __post_init__(self) -> None:
        if self.labels not in ("share", "mass", "cover"):
            raise ConfigError(f"loss constant 'labels' must be share, mass or cover, got {self.labels}")
        for name, value in vars(self).items():
            if name != "labels" and value < 0:
                raise ConfigError(f"loss constant '{name}' must be 0 or more, got {value}")
        if not 0 < self.coverage <= 1:
            raise ConfigError(f"loss constant 'coverage' must be in (0, 1], got {self.coverage}")


def distill_logits(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of next-token distributions, averaged over mined queries.

    Args:
        teacher: logits [B, M, V].
        student: logits [B, M, V].

    Returns:
        nats [B].
    """
    target = teacher.float().log_softmax(dim=-1)
    guess = student.float().log_softmax(dim=-1)
    return (target.exp() * (target - guess)).sum(dim=-1).mean(dim=-1)


def distill_attention(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of one layer's attention mass per row, averaged over heads and mined queries.

    Args:
        teacher: mass per row [B, H, M, R]; padded rows have none.
        student: mass per row [B, H, M, R]; padded rows have none.

    Returns:
        nats [B].
    """
    teacher, student = teacher.float(), student.float()
    divergence = torch.special.xlogy(teacher, teacher) - teacher * student.clamp_min(_SMALLEST).log()
    return divergence.sum(dim=-1).mean(dim=(1, 2))


def zoom_labels(span_mass: Tensor, coverage: float) -> Tensor:
    """The smallest set of spans that covers `coverage` of the teacher's mass on spans.

    Args:
        span_mass: teacher's mass per span [..., S]; padded spans have none.
        coverage: rho, share to be covered.

    Returns:
        True for the spans in the set [..., S]; an empty set when there is no mass.
    """
    mass, order = span_mass.sort(dim=-1, descending=True, stable=True)
    before = mass.cumsum(dim=-1) - mass  # mass of the heavier spans
    needed = (before < coverage * mass.sum(dim=-1, keepdim=True)) & (mass > 0)
    return torch.zeros_like(needed).scatter(-1, order, needed)


def zoom_targets(span_mass: Tensor, config: LossConfig) -> Tensor:
    """The fixed labels of the zoom loss, from the teacher alone.

    Args:
        span_mass: teacher's mass per span [..., S]; padded spans have none.
        config: which labels.

    Returns:
        In [0, 1], float32 [..., S].
    """
    if config.labels == "cover":
        return zoom_labels(span_mass, config.coverage).float()
    return (span_mass.float() * config.mass_scale).clamp_max(1.0)


def zoom(alpha_logit: Tensor, labels: Tensor, span_mask: Tensor, positive: float) -> Tensor:
    """Weighted binary cross-entropy of one layer's routing probabilities against the labels.

    It supervises the probability and not the decision, so the threshold cannot define its own target.

    Args:
        alpha_logit: logit of the routing probability [B, H, M, S].
        labels: what each probability should be, in [0, 1] [B, H, M, S].
        span_mask: True for real spans [B, S].
        positive: weight of the labels' positive part.

    Returns:
        nats [B], averaged over heads, queries and real spans; 0 for a document without spans.
    """
    weight = torch.tensor(positive, dtype=alpha_logit.dtype, device=alpha_logit.device)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(
        alpha_logit.masked_fill(~span_mask[:, None, None], 0.0),
        labels.to(alpha_logit.dtype),
        pos_weight=weight,
        reduction="none",
    )
    return masked_mean(entropy, span_mask[:, None, None])


def zoom_shares(log_share: Tensor, span_mass: Tensor, span_mask: Tensor) -> Tensor:
    """KL between the teacher's division of attention over the spans and all the rest, and the router's.

    Args:
        log_share: the router's expected share per span, as a logarithm [B, H, M, S].
        span_mass: the teacher's share per span [B, H, M, S].
        span_mask: True for real spans [B, S].

    Returns:
        nats [B], averaged over heads and queries.
    """
    span_mass = span_mass.float().masked_fill(~span_mask[:, None, None], 0.0)
    log_share = log_share.masked_fill(~span_mask[:, None, None], 0.0)
    on_spans = log_share.masked_fill(~span_mask[:, None, None], -torch.inf).logsumexp(dim=-1)
    log_rest = (-torch.expm1(on_spans)).clamp_min(_SMALLEST).log()
    rest = (1.0 - span_mass.sum(dim=-1)).clamp_min(0.0)
    entropy = torch.special.xlogy(span_mass, span_mass).sum(dim=-1) + torch.special.xlogy(rest, rest)
    cross = (span_mass * log_share).sum(dim=-1) + rest * log_rest
    return (entropy - cross).mean(dim=(1, 2))


def recon(sigma: Tensor, gate: Tensor, span_mask: Tensor) -> Tensor:
    """Share of spectral energy that the rank gates drop: sum_i (1 - g_i)^2 sigma_i^2 / sum_i sigma_i^2.

    Args:
        sigma: singular values of the spans' keys or values [B, K, S, r]; padded ranks are 0.
        gate: rank gates in [0, 1] [B, K, S, r].
        span_mask: True for real spans [B, S].

    Returns:
        share [B], averaged over KV heads and real spans; 0 for a document without spans.
    """
    energy = sigma.square()
    total = energy.sum(dim=-1)
    dropped = ((1.0 - gate).square() * energy).sum(dim=-1)
    share = dropped / total.clamp_min(torch.finfo(total.dtype).tiny)
    return masked_mean(share, span_mask[:, None])


def expected_rows(expand_soft: Tensor, span_length: Tensor, span_mask: Tensor) -> Tensor:
    """Expected expanded rows of one layer as a fraction of all rows that could be expanded.

    Args:
        expand_soft: probability that a KV head expands a span [B, K, Q, S].
        span_length: tokens per span [B, S].
        span_mask: True for real spans [B, S].

    Returns:
        fraction [B], averaged over KV heads and queries; 0 for a document without spans.
    """
    rows = (span_length * span_mask).to(expand_soft.dtype)[:, None, None]
    fraction = (expand_soft * rows).sum(dim=-1) / rows.sum(dim=-1).clamp_min(1.0)
    return fraction.mean(dim=(1, 2))


def expected_rank(sigma: Tensor, gate: Tensor, span_mask: Tensor) -> Tensor:
    """Expected rank as a fraction of the ranks there are: the mean gate over components with energy.

    Args:
        sigma: singular values [B, K, S, r]; padded ranks are 0.
        gate: rank gates in [0, 1] [B, K, S, r].
        span_mask: True for real spans [B, S].

    Returns:
        fraction [B]; 0 for a document without spans.
    """
    return masked_mean(gate, (sigma > 0) & span_mask[:, None, :, None])


def effective_rank(sigma: Tensor, gate: Tensor, span_mask: Tensor) -> Tensor:
    """Components a span keeps, in effect: the sum of its gates over components with energy.

    Args:
        sigma: singular values [B, K, S, r]; padded ranks are 0.
        gate: rank gates in [0, 1] [B, K, S, r].
        span_mask: True for real spans [B, S].

    Returns:
        components [B], averaged over KV heads and real spans; 0 for a document without spans.
    """
    return masked_mean((gate * (sigma > 0)).sum(dim=-1), span_mask[:, None] & (sigma[..., 0] > 0))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean per document over the entries where `mask` (broadcastable) is True; 0 when there are none.

    Args:
        values: [B, ...].
        mask: bool, same number of dimensions as `values`.

    Returns:
        [B].
    """
    mask = mask.expand_as(values)
    total = values.masked_fill(~mask, 0.0).flatten(1).sum(dim=1)
    return total / mask.flatten(1).sum(dim=1).clamp_min(1)


def annealing(step: int, total_steps: int) -> float:
    """Factor on the budget loss: 0 at the first step, 1 from the middle of training on."""
    return min(1.0, 2.0 * step / total_steps) if total_steps > 0 else 1.0


def total(parts: Mapping[str, Tensor], config: LossConfig, anneal: float) -> Tensor:
    """The objective per document.

    Args:
        parts: `logits`, `attention`, `zoom`, `recon` and `budget`, each [B].
        config: the weights.
        anneal: factor on the budget loss in [0, 1].

    Returns:
        [B].
    """
    return (
        config.logits * parts["logits"]
        + config.attention * parts["attention"]
        + config.zoom * parts["zoom"]
        + config.recon * parts["recon"]
        + config.budget * anneal * parts["budget"]
    )
