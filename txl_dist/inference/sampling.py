"""Choice of the next token: limits on the candidates, then a draw by two random numbers per token.

Candidates are ordered by id and divided into groups. There are about as many groups as candidates in a group. The first
number selects a group by the groups' cumulative probabilities. The second number selects a token by the cumulative
probabilities within the group.

Rounding differs between a batch and a single row, so a draw can change if a number lies close to a border between
candidates. With two numbers, a border is a sum over few groups or few candidates, so its rounding error is small.
With one number, a border would be a sum over all candidates before it, so its rounding error would be larger. A test
with one number and 4,096 candidates found that one draw in 4,000 differed between a batch and a single row.

Shapes: B rows, V vocabulary, S tokens that may be drawn, N groups, G tokens in a group.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from txl_dist.inference.options import Sampling


def uniform_numbers(seed: int, *, sample: int = 0) -> np.random.Generator:
    """Make the random number generator of one text. It depends only on the text's seed and sample number.

    So a text does not depend on the other texts of its batch.
    """
    return np.random.Generator(np.random.PCG64([seed, sample]))


@torch.inference_mode()
def choose(log_p_BV: Tensor, uniform_B2: Tensor, sampling: Sampling, *, seen_BV: Tensor | None = None) -> Tensor:
    """Choose the next token of each row, using sampling settings and two random numbers. Returns their ids, id_B.

    `log_p_BV` are the model's log-probabilities in nats. `uniform_B2` are two numbers in [0, 1) per row (fp64).
    `seen_BV` (bool) marks the tokens to which the repetition penalty applies.
    """
    scores_BS = log_p_BV
    ids_S = None
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
    if ids_S is None:
        return places_B
    return ids_S[places_B]


def _drawn(scores_BS: Tensor, uniform_B2: Tensor, sampling: Sampling) -> Tensor:
    """Draw place_B1, an index among the scores, after top_k, the temperature, top_p and min_p are applied."""
    places_BS = None
    if 0 < sampling.top_k < scores_BS.shape[1]:
        likeliest_BS = scores_BS.topk(sampling.top_k, dim=-1, sorted=False).indices
        places_BS = likeliest_BS.sort(dim=-1).values
        scores_BS = scores_BS.gather(-1, places_BS)
    scores_BS = _limited(scores_BS, sampling)
    drawn_B1 = _drawn_by_group(scores_BS.exp(), uniform_B2)
    if places_BS is None:
        return drawn_B1
    return places_BS.gather(-1, drawn_B1)


def _limited(scores_BS: Tensor, sampling: Sampling) -> Tensor:
    """Apply the temperature, and set the scores outside top_p and min_p to -inf. The highest score becomes 0."""
    # The highest score is moved to 0 first, so that a tiny temperature does not overflow.
    highest_B1 = scores_BS.amax(-1, keepdim=True)
    scores_BS = (scores_BS - highest_B1) / sampling.temperature
    if sampling.top_p < 1:
        ordered_BS = scores_BS.sort(dim=-1, descending=True).values
        p_BS = ordered_BS.softmax(-1)
        # A token is kept if those before it sum to less than top_p; the first always is.
        before_BS = p_BS.cumsum(-1) - p_BS
        is_kept_BS = before_BS < sampling.top_p
        num_kept_B1 = is_kept_BS.sum(-1, keepdim=True).clamp(min=1)
        least_B1 = ordered_BS.gather(-1, num_kept_B1 - 1)
        scores_BS = scores_BS.masked_fill(scores_BS < least_B1, -math.inf)
    if sampling.min_p:
        least_score = math.log(sampling.min_p)
        scores_BS = scores_BS.masked_fill(scores_BS < least_score, -math.inf)
    return scores_BS


def _drawn_by_group(p_BS: Tensor, uniform_B2: Tensor) -> Tensor:
    """Draw place_B1, an index among the probabilities.

    The first random number of a row selects a group. The second one selects a token in that group.
    """
    num_scores = p_BS.shape[1]
    group_len = 1 + math.isqrt(num_scores - 1)
    if num_scores % group_len:
        p_BS = F.pad(p_BS, (0, -num_scores % group_len))
    p_BNG = p_BS.view(len(p_BS), -1, group_len)
    group_B1 = _fallen(p_BNG.sum(-1), uniform_B2[:, :1])
    index_B1G = group_B1[:, :, None].expand(-1, -1, group_len)
    p_BG = p_BNG.gather(1, index_B1G)[:, 0]
    place_in_group_B1 = _fallen(p_BG, uniform_B2[:, 1:])
    drawn_B1 = group_B1 * group_len + place_in_group_B1
    return drawn_B1.clamp(max=num_scores - 1)  # where probabilities are NaN, which the caller reports


def _fallen(p_BS: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return place_B1: the index whose interval of cumulative probabilities contains the row's random number.

    An index of probability 0 is never returned. The probabilities of a row can have any sum.
    """
    cumulated_BS = p_BS.cumsum(-1)
    # In fp64 the product with 1 - 2**-53, the largest number that can be drawn, is rounded to less than the sum.
    target_B1 = uniform_B1 * cumulated_BS[:, -1:]
    place_B1 = torch.searchsorted(cumulated_BS, target_B1, right=True)
    return place_B1.clamp(max=p_BS.shape[1] - 1)
