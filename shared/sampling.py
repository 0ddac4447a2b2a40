"""From logits to the distribution that a request samples from: temperature, then top-k, top-p and min-p.

One function for p and q alike, in serving and in judging, so that both sides mean the same by "after the request's
filters". Every filter is a threshold on the row's own logits: ties with the last kept token are kept, and a row's
result depends on nothing but that row. It draws nothing and knows nothing of penalties, bias or grammars.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.trace import Sampling

_CHUNK, _CHUNKED = 128, 4096  # of the two stages of `largest`, and the vocabulary from which they pay
_COLDEST = 1e-30
_NUCLEUS = (128, 1024)  # top-p ranks this many of the largest, then all, until a row's mass is in what is ranked


def largest(logits: Tensor) -> Tensor:  # [rows, vocab] -> [rows]
    """The first largest of each row, as argmax gives it.

    On CPU in two stages: the maxima of chunks are taken by vector instructions, which argmax is not, at a seventh of
    its time for a vocabulary of 49,152.
    """
    rows, vocab = logits.shape
    if logits.device.type != "cpu" or vocab % _CHUNK or vocab < _CHUNKED:
        return logits.argmax(-1)
    chunks = logits.unfold(1, _CHUNK, _CHUNK)  # [rows, vocab / chunk, chunk], a view
    best = chunks.amax(-1).argmax(-1)
    within = chunks.gather(1, best[:, None, None].expand(rows, 1, _CHUNK)).squeeze(1).argmax(-1)
    return best * _CHUNK + within


def filtered_probs(
    logits: Tensor,  # [rows, vocab]; -inf marks ids that must not be drawn
    sampling: Sampling,
) -> Tensor:  # [rows, vocab] float32, each row sums to 1
    """The distribution after the filters; temperature 0 is a point mass at the first largest logit."""
    logits = logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    # Shifted before the division: a tiny temperature then underflows to 0 instead of overflowing to nan. The least that
    # divides is one that float32 holds (1e-46 would be 0 there); below it only the largest logit is left in any case.
    scores = (logits - logits.amax(1, keepdim=True)).div_(max(sampling.temperature, _COLDEST))
    least = _threshold(scores, sampling)
    if least is not None:
        scores.masked_fill_(scores < least, float("-inf"))
    return scores.softmax(1)


def _threshold(scores: Tensor, sampling: Sampling) -> Tensor | None:  # [rows, vocab] -> [rows, 1]
    """The least score that survives all filters; None when none is on. The largest score is 0 in every row."""
    vocab = scores.shape[1]
    ranked: Tensor | None = None  # [rows, k] the kept scores, descending, up to ties with the last
    least: Tensor | None = None
    if 0 < sampling.top_k < vocab:
        ranked = scores.topk(sampling.top_k, dim=1).values
        least = ranked[:, -1:]
    if sampling.top_p < 1.0:
        nucleus = _nucleus_threshold(scores, ranked, sampling.top_p)
        least = nucleus if least is None else torch.maximum(least, nucleus)
    if sampling.min_p > 0.0:
        floor = scores.new_full((len(scores), 1), math.log(sampling.min_p)).clamp_max_(0.0)
        least = floor if least is None else torch.maximum(least, floor)
    return least


def _nucleus_threshold(scores: Tensor, ranked: Tensor | None, top_p: float) -> Tensor:  # [rows, 1]
    """The score of the last token in the smallest set of largest tokens whose mass is at least `top_p`.

    With top-k on, mass is counted among what top-k kept, and `ranked` holds all of it.
    """
    if ranked is not None:
        total = scores.exp().masked_fill_(scores < ranked[:, -1:], 0.0).sum(1, keepdim=True)
        return _last_needed(ranked, total, top_p)
    total = scores.exp().sum(1, keepdim=True)
    least = torch.empty_like(total)
    open_ = torch.arange(len(scores), device=scores.device)  # rows whose nucleus is not found yet
    for size in (*_NUCLEUS, scores.shape[1]):
        size = min(size, scores.shape[1])
        rows = scores if len(open_) == len(scores) else scores[open_]
        ranked = rows.topk(size, dim=1).values
        least[open_] = _last_needed(ranked, total[open_], top_p)
        open_ = open_[ranked.exp().sum(1) < top_p * total[open_, 0]]
        if size == scores.shape[1] or not len(open_):
            break
    return least


def _last_needed(ranked: Tensor, total: Tensor, top_p: float) -> Tensor:  # [rows, k] descending -> [rows, 1]
    weights = ranked.exp()
    before = weights.cumsum(1) - weights  # mass ahead of each token
    needed = (before < top_p * total).sum(1, keepdim=True).clamp_min_(1)  # [rows, 1]
    return ranked.gather(1, needed - 1)
