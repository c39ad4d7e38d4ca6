"""Predicted time of a training step on a cluster, as a sum over the parts of the step. Nothing is measured here.

    products     sum over matrix products [R, I] x [I, C] of 2 R I C / (share * peak), plus the time to move
                 R I + I C + R C numbers
    attention    the same sum over the products of attention, or the Triton kernels' operations, and passes over
                 the T x K scores
    elementwise  passes over tensors of the model width, the feed-forward width, and the width of all heads
    vocabulary   products of softmax and projections, passes over logits and over the tables' gradients
    optimizer    bytes per parameter that this rank updates
    host         CPU time to issue the work of a step, minus the time that the GPU's work hides
    exchange     gradients and weights among the ranks, minus the time that the backward pass hides

A `Program` describes the costs in which trainers differ: useless operations, passes over tensors, bytes moved, and
waits. OURS describes this package. `tools/checks/plan.py` describes NVIDIA's Transformer-XL, and compares the
predictions with NVIDIA's published speeds. The sources of the constants are in tools/experiments/notebook/planning.md.
The prediction ignores the tile shapes of kernels, imbalance among ranks, the reading of data, and other jobs on the
network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from txl_dist.config.schema import ModelSection, Precision
from txl_dist.planning.hardware import Gpu, GpuCluster
from txl_dist.train.engine.muon import NUM_ITERATIONS, Matrix

MEMORY_SHARE = 0.85
"""Share of a GPU's memory bandwidth that passes over large tensors reach."""
KERNEL_SHARE = 0.3
"""Share of the GPU's peak that our Triton kernels reach. The value is a prediction."""
KERNEL_PRODUCTS = 11
"""Number of products of T x K scores that the Triton kernels compute in forward and backward pass. Two of them compute
scores again in the backward pass. Kept distance scores save one of these two."""
EXCHANGE_SHARE = 0.5
"""Share of the bus bandwidth within a node that a trainer reaches."""
NETWORK_SHARE = 0.85
OVERLAP = 0.5
"""Share of the backward pass during which communication between nodes can be hidden."""
LATENCY_S = 10e-6
"""Latency of a collective in seconds. It is multiplied by log2 of the number of ranks."""
BUCKET_BYTES = 64 * 2**20
GATHERS = {0: 0, 1: 1, 2: 1, 3: 2}
"""Number of times in a step that each rank receives the other ranks' parameters, by ZeRO stage. At stage 3 the number
is per micro-batch."""

AttentionKind = Literal["kernels", "fused", "plain"]


@dataclass(frozen=True)
class Program:
    """Costs of one trainer's code, which `step_time` uses.

    A pass reads or writes a tensor once, in the type of the activations.
    """

    memory_products: tuple[int, int]
    """Two numbers: how many projections of the memory are computed, and how many products each projection needs in a
    step. The second number is 2, or 3 if hidden states in the memory get gradients."""
    skips_masked: bool
    """True if scores above the diagonal, which the causal mask removes, cost nothing."""
    score_passes: dict[AttentionKind, float]
    """Number of passes (reads or writes) over the scores, in addition to the passes of the matrix products."""
    dropout_passes: float
    """Number of additional passes (reads or writes) over the scores if the probabilities have dropout."""
    width_passes: float
    """Number of passes (reads or writes) over tensors of the model width, per layer."""
    ff_passes: float
    """Number of passes (reads or writes) over tensors of the feed-forward width, per layer."""
    inner_passes: float
    """Number of passes (reads or writes) over tensors of the width of all heads together, per layer."""
    logit_passes: float
    """Number of passes (reads or writes) over the logits."""
    table_passes: float
    """Number of passes (reads or writes) over the gradient of the embeddings."""
    cuts_tables: bool
    """True if one table is cut into the embeddings of all vocabulary clusters, so that the passes over its gradient are
    made for every cluster."""
    state_bytes: tuple[float, float]
    """Bytes that an update moves per parameter. The first number is for a model whose weights are all fp32. The second
    number is for a model that also has half-precision weights."""
    host_factor: float
    """Host time of a layer, divided by the host time of the forward pass in NVIDIA's program on the same machine."""
    waits: bool
    """True if the host often waits for the GPU. Then none of the host's time is hidden."""
    update_host_s: float = 0.0
    """Seconds of host time in a step after the host has waited for the norm of the gradients. The GPU's work does not
    hide this time."""


OURS = Program(
    memory_products=(2, 2),
    skips_masked=True,
    score_passes={"kernels": 0, "fused": 10, "plain": 18},
    dropout_passes=4,
    width_passes=44,
    ff_passes=11,
    inner_passes=20,
    logit_passes=16,
    table_passes=9,
    cuts_tables=False,
    state_bytes=(36, 46),
    host_factor=1.2,
    waits=False,
    update_host_s=2e-3,
)
HOST_BY_STAGE = (1.0, 1.05, 1.03, 2.33)
"""Host time at each ZeRO stage, divided by the host time at stage 0. It was measured in
tools/experiments/notebook/benchmarks.md."""
NORMS_EXTRA_BYTES = 20.0
KERNEL_UPDATE_BYTES = (36, 30)
"""Bytes that Adam's Triton kernel and the norm move per parameter: in fp32, and with half-precision weights."""


@dataclass(frozen=True)
class Work:
    """Description of the work of one rank in a step, for `step_time`."""

    model: ModelSection
    vocab_size: int
    shares: tuple[float, ...]
    """Share of the tokens that belong to each cluster of the vocabulary."""
    parameters: int
    segment_len: int
    memory_lens: tuple[int, ...]
    """Number of tokens in the memory of each layer."""
    microbatch_lanes: int
    num_microbatches: int
    world_size: int
    zero_stage: int
    precision: Precision
    attention: AttentionKind = "plain"
    keeps_scores: bool = False
    """True if the Triton kernels keep distance scores from the forward to the backward pass."""
    recomputed: float = 0.0
    """Share of the blocks whose forward pass is computed a second time."""
    graphed: bool = False
    """True if forward and backward pass are one launch of a CUDA graph."""
    needs_whole_tensors: bool = False
    orthogonalizes: bool = False
    """True if the optimizer orthogonalizes the updates of matrices (Muon)."""
    updates_by_kernel: bool = False
    """True if the Triton kernel of Adam makes the update."""
    step_len: int = 0
    """Number of tokens by which each lane (batch row) advances in a step. 0 means segment_len."""
    num_targets: int = 0
    """Number of tokens per segment that are predicted in random order, as in XLNet. 0 means that every token predicts
    the next token."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one number in the compute type."""
        if self.precision in ("bf16", "fp16"):
            return 2
        return 4

    @property
    def tokens(self) -> int:
        """Number of tokens in a micro-batch of this rank."""
        return self.microbatch_lanes * self.segment_len

    @property
    def rows(self) -> int:
        """Number of rows that a block computes in a micro-batch: one per token, and for prediction in random order also
        one per target."""
        return self.tokens + self.microbatch_lanes * self.num_targets

    @property
    def predictions(self) -> int:
        """Number of tokens that the softmax predicts in a micro-batch."""
        if self.num_targets:
            return self.microbatch_lanes * self.num_targets
        return self.tokens

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens by which a step advances all lanes (batch rows) of all ranks together."""
        step_len = self.step_len or self.segment_len
        return self.microbatch_lanes * step_len * self.num_microbatches * self.world_size


@dataclass(frozen=True)
class StepTime:
    """Seconds of each part of a step (see the module's docstring). The parts do not overlap, so the step's time is
    their sum."""

    products: float
    attention: float
    elementwise: float
    vocabulary: float
    optimizer: float
    host: float
    exchange: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return float(sum(vars(self).values()))


class Product(NamedTuple):
    """Matrix product [rows, inner] x [inner, columns] that is computed `times` times in a step."""

    rows: float
    inner: float
    columns: float
    times: float

    def seconds(self, gpu: Gpu, work: Work) -> float:
        """Return the predicted seconds of the product.

        The result is the sum of two times: computing the product at the GPU's rate, and reading and writing its
        operands at the bandwidth of the GPU's memory.
        """
        operations = 2 * self.rows * self.inner * self.columns
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        rate = gpu.matmul_share * gpu.flops(work.precision)
        computing_s = operations / rate
        moving_s = numbers * work.num_bytes / _bandwidth(gpu)
        return self.times * (computing_s + moving_s)


def step_time(work: Work, cluster: GpuCluster, program: Program = OURS) -> StepTime:
    """Predict the time of one step of one rank, by part. All ranks have the same work."""
    gpu = cluster.gpu
    model = work.model
    times = work.num_microbatches
    again = 1 + work.recomputed / 3
    products = again * sum(product.seconds(gpu, work) for product in _layer_products(work, program))
    attention = again * _attention_s(work, gpu, program)
    inner = model.num_heads * model.head_width
    numbers = program.width_passes * model.width
    numbers += program.ff_passes * model.ff_width
    numbers += program.inner_passes * inner
    elementwise = again * model.num_layers * work.rows * numbers * work.num_bytes / _bandwidth(gpu)
    vocabulary = _vocabulary_s(work, gpu, program)
    computing = products + attention + elementwise + vocabulary
    host = _host_s(work, gpu, program, computing=computing)
    backward_s = 2 / 3 * (computing + host)
    if work.zero_stage >= 2:
        backward_s *= times
    return StepTime(
        products=times * products,
        attention=times * attention,
        elementwise=times * elementwise,
        vocabulary=times * vocabulary,
        optimizer=_optimizer_s(work, gpu, program),
        host=times * host + program.update_host_s,
        exchange=exchange_s(work, cluster, backward_s=backward_s),
    )


def exchange_bytes(work: Work) -> float:
    """Return the bytes that a rank sends in a step. The rank receives the same number of bytes.

    Let P be the bytes of all parameters in the compute type. With N ranks and one micro-batch per step, a rank sends
    2P(N-1)/N bytes at ZeRO stages 0 to 2, and 3P(N-1)/N bytes at stage 3. An all-reduce counts as a reduce-scatter and
    an all-gather. With several micro-batches, stage 2 reduces gradients in every micro-batch, and stage 3 also gathers
    parameters in every micro-batch. Muon sends matrices to the ranks that compute their updates, and these ranks send
    the updates back.
    """
    stage = work.zero_stage
    times = work.num_microbatches
    others = (work.world_size - 1) / work.world_size
    once = work.parameters * work.num_bytes * others
    if stage == 0:
        reduced = 2
    elif stage >= 2:
        reduced = times
    else:
        reduced = 1
    gathered = GATHERS[stage]
    if stage == 3:
        gathered *= times
    sent = once * (reduced + gathered)
    if work.orthogonalizes:  # in fp32: at stage 0 what it makes goes to all, else to its owners, as what it is made of
        num_values = sum(rows * columns for rows, columns in _matrix_shapes(work.model))
        values = num_values * others
        if stage == 0:
            sent += 4 * values
        else:
            sent += 4 * (2 * values / work.world_size)
    return sent


def exchange_s(work: Work, cluster: GpuCluster, *, backward_s: float) -> float:
    """Return the seconds that the exchange with other ranks adds to a step.

    `backward_s` is the time of the backward pass, which can hide the wait for a network between nodes. The exchange
    within a node is not hidden, because copies of its buckets take bandwidth from the computation.
    """
    if work.world_size == 1:
        return 0.0
    sent = exchange_bytes(work)
    copied = 4 * work.parameters * work.num_bytes / _bandwidth(cluster.gpu)
    within_s = sent / (cluster.gpu.bus_gb_s * 1e9 * EXCHANGE_SHARE)
    if work.world_size > cluster.gpus_per_node:
        network_s = sent / (cluster.network_gb_s * 1e9 * NETWORK_SHARE)
        within_s += max(0.0, network_s - within_s - OVERLAP * backward_s)
    collectives = math.ceil(sent / BUCKET_BYTES)
    if work.zero_stage == 3:
        collectives = max(collectives, 3 * work.model.num_layers * work.num_microbatches)
    return within_s + copied + collectives * LATENCY_S * math.log2(work.world_size)


def _bandwidth(gpu: Gpu) -> float:
    return gpu.bandwidth_gb_s * 1e9 * MEMORY_SHARE


def _layer_products(work: Work, program: Program) -> Iterator[Product]:
    """Yield all matrix products of the blocks except the products of the scores.

    The result includes the forward pass, and the products of the backward pass for the gradients of weights and inputs.
    """
    model = work.model
    rows = float(work.rows)
    layers = model.num_layers
    width = model.width
    inner = model.num_heads * model.head_width
    num_projections, num_passes = program.memory_products
    yield Product(work.tokens, width, 3 * inner, 3 * layers)
    if work.num_targets:
        yield Product(rows - work.tokens, width, inner, 3 * layers)
    for memory_len, count in Counter(work.memory_lens).items():
        memory_rows = work.microbatch_lanes * memory_len
        yield Product(memory_rows, width, num_projections * inner, num_passes * count)
        if model.scheme.sinusoids == "distances":
            num_distances = work.segment_len + memory_len
            if work.num_targets:
                num_distances += work.segment_len - 1
            yield Product(num_distances, width, inner, 2 * count)
    yield Product(rows, inner, width, 3 * layers)
    yield Product(rows, width, model.ff_width, 3 * model.num_ff_matrices * layers)


def _attention_s(work: Work, gpu: Gpu, program: Program) -> float:
    seconds = 0.0
    for memory_len, count in Counter(work.memory_lens).items():
        seconds += count * _layer_attention_s(work, memory_len, gpu, program)
    return seconds


def _layer_attention_s(work: Work, memory_len: int, gpu: Gpu, program: Program) -> float:
    model = work.model
    queries = work.segment_len + work.num_targets
    keys = memory_len + work.segment_len
    heads = work.microbatch_lanes * model.num_heads
    if program.skips_masked and not work.num_targets:
        seen = memory_len + (queries + 1) / 2
    else:
        seen = float(keys)
    if model.same_length != "off" and program.skips_masked:
        seen = min(seen, memory_len + 1.0)
    if model.scheme.has_distance_terms:
        num_scores = 3  # products: keys, distances, values
    else:
        num_scores = 2
    if work.attention == "kernels":
        num_products = KERNEL_PRODUCTS - work.keeps_scores
        operations = heads * num_products * 2 * model.head_width * queries * seen
        return operations / (KERNEL_SHARE * gpu.flops(work.precision))
    product = Product(queries, model.head_width, seen, 3 * num_scores * heads)
    # Query rows of prediction in random order are computed in plain torch.
    share_plain = work.num_targets / queries
    passes = (1 - share_plain) * program.score_passes[work.attention] + share_plain * program.score_passes["plain"]
    if model.attention_dropout:
        passes += program.dropout_passes
    return product.seconds(gpu, work) + heads * queries * seen * passes * work.num_bytes / _bandwidth(gpu)


def _vocabulary_s(work: Work, gpu: Gpu, program: Program) -> float:
    model = work.model
    edges = (0, *work.model.cutoffs, work.vocab_size)
    embed_width = model.embed_width_or_default()
    seconds = table_numbers = logits = 0.0
    for index, share in enumerate(work.shares):
        table_width = embed_width // model.div_value**index
        size = edges[index + 1] - edges[index]
        if index == 0:
            rows = work.predictions * 1.0
        else:
            rows = work.predictions * share
        seconds += Product(rows, table_width, size, 3).seconds(gpu, work)
        if model.div_value > 1 or embed_width != model.width:
            seconds += Product(rows + work.tokens * share, model.width, table_width, 3).seconds(gpu, work)
        table_numbers += size * table_width
        logits += rows * size
    if program.cuts_tables and model.div_value == 1:
        cuts = len(work.shares)
    else:
        cuts = 1
    numbers = logits * program.logit_passes + table_numbers * program.table_passes * cuts
    return seconds + numbers * work.num_bytes / _bandwidth(gpu)


def _optimizer_s(work: Work, gpu: Gpu, program: Program) -> float:
    if work.zero_stage:
        updated = work.parameters / work.world_size
    else:
        updated = work.parameters / 1
    if work.updates_by_kernel:
        moved = float(KERNEL_UPDATE_BYTES[work.num_bytes == 2])
    else:
        moved = program.state_bytes[work.num_bytes == 2]
    if work.needs_whole_tensors and program is OURS:
        moved += NORMS_EXTRA_BYTES
    if work.orthogonalizes:
        products = _newton_schulz_flops(work.model) / work.world_size
    else:
        products = 0.0
    rate = gpu.matmul_share * gpu.flops(work.precision)
    return updated * moved / _bandwidth(gpu) + products / rate


def _matrix_shapes(model: ModelSection) -> list[tuple[int, int]]:
    """Return the shapes of the matrices that Muon orthogonalizes."""
    width = model.width
    inner = model.num_heads * model.head_width
    num_projections = 4  # queries, keys, values, output
    if model.scheme.sinusoids == "distances":
        num_projections += 1
    shapes = [(width, inner)] * num_projections + [(width, model.ff_width)] * model.num_ff_matrices
    return shapes * model.num_layers


def _newton_schulz_flops(model: ModelSection) -> float:
    """Return the operations of one update of all matrices by Newton-Schulz iterations."""
    shapes = _matrix_shapes(model)
    matrices = [Matrix("", 0, *shape, longest=max(shape)) for shape in shapes]
    return 2.0 * NUM_ITERATIONS * sum(matrix.multiplications for matrix in matrices)


def _host_s(work: Work, gpu: Gpu, program: Program, *, computing: float) -> float:
    """Return by how many seconds the host time of a micro-batch exceeds the GPU's time for the same micro-batch. If the
    host often waits for the GPU, return the whole host time."""
    if work.graphed:
        return 0.0
    needed = program.host_factor * gpu.host_ms / 1e3 * work.model.num_layers * (1 + work.recomputed / 3)
    if program.waits:
        return needed
    return max(0.0, needed * HOST_BY_STAGE[work.zero_stage] - computing)
