"""Parameters, floating-point operations per token and bytes per rank, by formula.

Per trained token, forward and backward, a multiply-add being 2 operations (L layers, D width, N*H inner width, F
feed-forward width, T segment, M memory, K = M + T, b lanes per rank and micro-batch):

    linear      L (4 D NH + 2 D F) 2*3      query, key, value, output and feed-forward of the segment
    memory      L (M / T) 2 D NH 2*2        keys and values of the memory: no gradient flows into it
    distances   L K D NH / (b T) 2*2        projected once per micro-batch; only for sinusoids of the distance
    scores      L 2 NH (M + (T+1)/2) 2*3    terms (a)+(c) and the weighted sum, visible pairs only
    shift       L   NH (M + (T+1)/2) 2*3    terms (b)+(d); not for absolute positions
    softmax     (head + share of each tail) 2*3, the shares being those of the tokens given (default: Zipf's law)
"""

from __future__ import annotations

import math

import torch

from txl_dist.model.adaptive_embedding import is_projected
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.sections import ModelSection


def has_projections(model: ModelSection) -> bool:
    """Whether any embeddings are projected to the model width."""
    widths = [model.embed_width_or_default() // model.div_value**i for i in range(len(model.cutoffs) + 1)]
    return any(is_projected(model, table_width=width) for width in widths)


def count_parameters(model: ModelSection, *, vocab_size: int) -> int:
    """Trainable numbers, each tied tensor once. Allocates nothing."""
    with torch.device("meta"):
        network = TransformerXL(model, vocab_size=vocab_size)
    return sum(parameter.numel() for parameter in network.parameters())


def flops_per_token(
    model: ModelSection, *, vocab_size: int, segment_len: int, memory_len: int, microbatch_lanes: int
) -> float:
    """Operations of a training step per token, by the formula above."""
    T, M, K = segment_len, memory_len, memory_len + segment_len
    L, D, inner = model.num_layers, model.width, model.num_heads * model.head_width
    pairs = M + (T + 1) / 2
    linear = L * (4 * D * inner + 2 * D * model.ff_width) * 6
    memory = L * M / T * 2 * D * inner * 4
    distances = L * K * D * inner / (microbatch_lanes * T) * 4 if model.positions == "relative" else 0.0
    scores = L * (2 if model.positions == "absolute" else 3) * inner * pairs * 6
    return linear + memory + distances + scores + _softmax_flops(model, vocab_size=vocab_size)


def bytes_per_rank(
    model: ModelSection,
    *,
    vocab_size: int,
    segment_len: int,
    memory_len: int,
    lanes_per_rank: int,
    microbatch_lanes: int,
    world_size: int,
    zero_stage: int,
    bytes_per_number: int,
) -> dict[str, float]:
    """Estimated bytes of a rank by what holds them. Activations are a rough count of the tensors autograd keeps."""
    parameters = count_parameters(model, vocab_size=vocab_size)
    shard = world_size
    T, K, B, L = segment_len, memory_len + segment_len, microbatch_lanes, model.num_layers
    inner = model.num_heads * model.head_width
    per_layer = B * T * (10 * model.width + 2 * model.ff_width + 4 * inner) + 2 * B * K * inner
    per_layer += 3 * B * model.num_heads * T * K
    head = B * T * 2 * ((model.cutoffs or (vocab_size,))[0] + len(model.cutoffs))
    master = 0 if bytes_per_number == 4 and zero_stage == 0 else 4
    return {
        "weights": parameters * bytes_per_number / (shard if zero_stage == 3 else 1),
        "gradients": parameters * bytes_per_number / (shard if zero_stage >= 2 else 1),
        "optimizer": parameters * (8 + master) / (shard if zero_stage >= 1 else 1),
        "memories": 2 * L * lanes_per_rank * memory_len * model.width * bytes_per_number,
        "activations": (L * per_layer + head) * bytes_per_number,
    }


def _softmax_flops(model: ModelSection, *, vocab_size: int) -> float:
    edges = (0, *model.cutoffs, vocab_size)
    width = model.embed_width_or_default()
    harmonic = math.log(vocab_size) + 0.5772
    total = 0.0
    for i in range(len(edges) - 1):
        share = 1.0 if i == 0 else math.log(edges[i + 1] / edges[i]) / harmonic
        columns = edges[i + 1] - edges[i] + (len(model.cutoffs) if i == 0 else 0)
        table_width = width // model.div_value**i
        projection = table_width * model.width if is_projected(model, table_width=table_width) else 0
        total += share * (columns * table_width + 2 * projection)
    return total * 6
