"""Which token comes next: limits on what may be drawn, and two random numbers per token.

Tokens stand in the order of their ids, in about as many groups as a group has tokens. One uniform number falls among
the cumulated probabilities of the groups, the other among those of the tokens of that group. So what is drawn changes
only where a number lies at a border, and rounding, by which a batch differs from single rows, moves borders by as
little as probabilities. With one number for all tokens there would be as many borders as tokens, each moved by the
rounding of all before it: of 4,096 tokens one draw in 4,000 came out otherwise in a batch.

Shapes: B rows, V vocabulary, S tokens that may be drawn, G in a group.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from txl_dist.inference.options import Sampling


def uniform_numbers(seed: int, *, sample: int = 0) -> np.random.Generator:
    """The random numbers of one text: of its seed, and of which of several samples of one prompt it is; of nothing
    else, so that a text does not depend on what it is generated beside."""
    return np.random.Generator(np.random.PCG64([seed, sample]))


@torch.inference_mode()
def choose(log_p_BV: Tensor, uniform_B2: Tensor, sampling: Sampling, *, seen_BV: Tensor | None = None) -> Tensor:
    """id_B, by two numbers in [0, 1) per row (fp64). `seen_BV` (bool) are the tokens that the penalty is for."""
    scores_BS, ids_S = log_p_BV, None
    if seen_BV is not None:
        scores_BS = torch.where(seen_BV, scores_BS * sampling.repetition_penalty, scores_BS)
    if sampling.allowed:
        ids_S = torch.tensor(sorted(set(sampling.allowed)), device=log_p_BV.device)
        scores_BS = scores_BS[:, ids_S]
    if sampling.temperature == 0:
        places_B1 = scores_BS.argmax(-1, keepdim=True)
    else:
        places_B1 = _drawn(scores_BS.double(), uniform_B2, sampling)
    places_B = places_B1[:, 0]
    return places_B if ids_S is None else ids_S[places_B]


def _drawn(scores_BS: Tensor, uniform_B2: Tensor, sampling: Sampling) -> Tensor:
    places_BS = None
    if 0 < sampling.top_k < scores_BS.shape[1]:
        places_BS = scores_BS.topk(sampling.top_k, dim=-1, sorted=False).indices.sort(dim=-1).values
        scores_BS = scores_BS.gather(-1, places_BS)
    # The likeliest is moved to 0 first: a tiny temperature must not overflow.
    scores_BS = (scores_BS - scores_BS.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_p < 1:
        ordered_BS = scores_BS.sort(dim=-1, descending=True).values
        p_BS = ordered_BS.softmax(-1)
        # A token stays if those before it have not yet reached top_p; the first always does.
        num_kept_B1 = (p_BS.cumsum(-1) - p_BS < sampling.top_p).sum(-1, keepdim=True).clamp(min=1)
        scores_BS = scores_BS.masked_fill(scores_BS < ordered_BS.gather(-1, num_kept_B1 - 1), -math.inf)
    if sampling.min_p:
        scores_BS = scores_BS.masked_fill(scores_BS < math.log(sampling.min_p), -math.inf)
    num_scores = scores_BS.shape[1]
    group_len = 1 + math.isqrt(num_scores - 1)
    p_BS = scores_BS.exp()
    if num_scores % group_len:
        p_BS = F.pad(p_BS, (0, -num_scores % group_len))
    p_BNG = p_BS.view(len(p_BS), -1, group_len)
    group_B1 = _fallen(p_BNG.sum(-1), uniform_B2[:, :1])
    p_BG = p_BNG.gather(1, group_B1[:, :, None].expand(-1, -1, group_len))[:, 0]
    drawn_B1 = group_B1 * group_len + _fallen(p_BG, uniform_B2[:, 1:])
    drawn_B1 = drawn_B1.clamp(max=num_scores - 1)  # of numbers that are none, for who asked to say
    return drawn_B1 if places_BS is None else places_BS.gather(-1, drawn_B1)


def _fallen(p_BS: Tensor, uniform_B1: Tensor) -> Tensor:
    """place_B1 of a number among cumulated probabilities, whatever their sum; never one whose probability is 0."""
    cumulated_BS = p_BS.cumsum(-1)
    # In fp64 the product with 1 - 2**-53, the largest number there is, is rounded to less than the sum.
    target_B1 = uniform_B1 * cumulated_BS[:, -1:]
    return torch.searchsorted(cumulated_BS, target_B1, right=True).clamp(max=p_BS.shape[1] - 1)
