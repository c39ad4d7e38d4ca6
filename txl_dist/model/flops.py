"""Formulas for the floating-point operations per token, the peak rate of a device, and the number of parameters.

The model FLOPs utilisation (MFU) is the ratio of the operations per second to the device's peak. Operations are counted
per trained token, forward and backward. A multiply-add is 2 operations. Symbols: L layers, D width, N*H inner width, F
feed-forward width, T segment, M memory, K = M + T, b lanes (rows) per rank and micro-batch, C tail clusters. Cluster i
has width E_i, size V_i, and a share p_i of the tokens.

    linear      L (4 D NH + 2 D F) 2*3            query, key, value, output, feed-forward of the segment (swiglu: 3 D F)
    memory      L (M / T) 2 D NH 2*2              keys and values of the memory: no gradient flows into it
    distances   L K D NH / (b T) 2*2              projected once per micro-batch; only for sinusoids of the distance
    scores      L 2 NH S 2*3                      terms (a)+(c) and the weighted sum over the S keys that are seen
    shift       L   NH S 2*3                      terms (b)+(d); not for absolute positions
    softmax     ((V_0 + C) E_0 + sum p_i V_i E_i) 2*3        head, then the tails
    projections (D E_0 + sum p_i D E_i) 2*3  and  sum p_i D E_i 2*3      of softmax and embedding, where they have any

If the model predicts in any order (XLNet), a step advances each lane (row of the batch) by R tokens. The step computes
rows for the T tokens of the segment and m query rows, which have no keys and values. So the linear part counts query,
output and feed-forward for T + m rows, and keys and values for T rows. All rows compute scores with all K keys. There
are K + T - 1 distances. The softmax has m rows, and the embedding T. All numbers are then divided by R instead of T.

A token sees S = M + (T+1)/2 keys on average. With same_length it sees M or M + 1 keys. MFU counts only these useful
operations. It does not count masked parts of blocks, padded rows of clusters, or activations that are computed twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import torch

from txl_dist.config.schema import ModelSection
from txl_dist.model.adaptive_embedding import is_projected
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.vocabulary_clusters import typical_shares

PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "B200": (2250.0, 1125.0, 75.0),
    "A100": (312.0, 156.0, 19.5),
    "A800": (312.0, 156.0, 19.5),
    "V100 PCIE": (112.0, 14.0, 14.0),
    "V100": (125.0, 15.7, 15.7),
    "L40S": (362.1, 183.2, 91.6),
    "L4": (121.0, 60.5, 30.3),
    "A40": (149.7, 74.8, 37.4),
    "RTX A6000": (154.8, 77.4, 38.7),
    "T4": (65.0, 8.1, 8.1),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
}
"""Dense peaks in TFLOP/s by device: (half precision with fp32 accumulation, TF32, fp32). The words of a key must all be
in the device's name, and the first key that matches is used. The figures are from NVIDIA's datasheets, where figures
"with sparsity" are halved. The figures of RTX cards are from NVIDIA's architecture whitepapers. A board without TF32 or
bf16 has the figure of the type that it would use instead."""


def peak_tflops(device_name: str, *, precision: str) -> float:
    """Return a device's dense peak in TFLOP/s for a type, or 0 if the device is not known.

    The type is "fp32", "tf32", "bf16" or "fp16".
    """
    words = set(re.split(r"[\s-]+", device_name))
    column = {"tf32": 1, "fp32": 2}.get(precision, 0)
    for name, peaks in PEAK_TFLOPS.items():
        if words.issuperset(name.split()):
            return peaks[column]
    return 0.0


def count_parameters(model: ModelSection, *, vocab_size: int) -> int:
    """Count the trainable parameters (single numbers) of a model. A tied tensor counts once. Nothing is allocated."""
    with torch.device("meta"):
        network = TransformerXL(model, vocab_size=vocab_size)
    return sum(parameter.numel() for parameter in network.parameters())


def has_projections(model: ModelSection) -> bool:
    """Return True if the embeddings of any cluster are projected to the model width."""
    embed_width = model.embed_width_or_default()
    for i in range(len(model.cutoffs) + 1):
        table_width = embed_width // model.div_value**i
        if is_projected(model, table_width=table_width):
            return True
    return False


def flops_by_part(
    model: ModelSection,
    *,
    vocab_size: int,
    segment_len: int,
    memory_lens: Sequence[int],
    microbatch_lanes: int,
    cluster_shares: Sequence[float] = (),
    step_len: int = 0,
    num_targets: int = 0,
) -> dict[str, float]:
    """Return the operations of a training step per token, for each part of the formula above.

    `memory_lens` holds the number of tokens that each layer remembers. `cluster_shares` holds each cluster's share of
    the tokens, as `vocabulary_clusters.cluster_shares` counts them. If `cluster_shares` is empty, the function uses
    `typical_shares`. `num_targets` is 0 if every token predicts the next token. Otherwise the model predicts in any
    order (XLNet), and `num_targets` is the number of predicted tokens of a segment. A step then advances each lane by
    `step_len` tokens (0: the whole segment).
    """
    T = segment_len
    R = step_len or T
    L = model.num_layers
    D = model.width
    inner = model.num_heads * model.head_width
    # Summed over all layers.
    M = sum(memory_lens)
    K = M + len(memory_lens) * T
    seen_in_segment = {"off": (T + 1) / 2, "memory": 0.0, "memory_and_self": 1.0}[model.same_length]
    seen = M + L * seen_in_segment
    num_distances = K
    rows = 1.0  # rows, tokens and predictions per token by which the lane moves on
    tokens = 1.0
    predicted = 1.0
    if num_targets:
        seen = float(K)
        num_distances = K + L * (T - 1)
        rows = (T + num_targets) / R
        tokens = T / R
        predicted = num_targets / R
    scheme = model.scheme
    distances = shift = 0.0
    if scheme.sinusoids == "distances":
        distances = num_distances * D * inner / (microbatch_lanes * R) * 4.0
    if scheme.has_distance_terms:
        shift = inner * seen * rows * 6.0
    shares = tuple(cluster_shares) or typical_shares((0, *model.cutoffs, vocab_size))
    vocabulary = _vocabulary_flops(model, vocab_size=vocab_size, shares=shares, tokens=tokens, predicted=predicted)
    linear_of_row = 2 * D * inner + model.num_ff_matrices * D * model.ff_width
    return {
        "linear": L * (linear_of_row * rows + 2 * D * inner * tokens) * 6.0,
        "memory": M / R * 2 * D * inner * 4.0,
        "distances": distances,
        "scores": 2 * inner * seen * rows * 6.0,
        "shift": shift,
        **vocabulary,
    }


def _vocabulary_flops(
    model: ModelSection, *, vocab_size: int, shares: Sequence[float], tokens: float, predicted: float
) -> dict[str, float]:
    """Return the operations of softmax and projections per token.

    All `predicted` tokens pass through the softmax's head. Only a share of them passes through each tail, and only a
    share of the `tokens` that are read passes through each embedding table.
    """
    edges = (0, *model.cutoffs, vocab_size)
    embed_width = model.embed_width_or_default()
    softmax = 0.0
    projections = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        table_width = embed_width // model.div_value**i
        is_head = i == 0
        columns = high - low
        if is_head:
            columns += len(model.cutoffs)
        if is_head:
            passing = predicted
        else:
            passing = predicted * shares[i]
        softmax += passing * columns * table_width
        if is_projected(model, table_width=table_width):
            projections += (passing + tokens * shares[i]) * table_width * model.width
    return {"softmax": softmax * 6, "projections": projections * 6}
