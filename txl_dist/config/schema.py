"""The sections of a run's settings. Each field has a type, and below it a docstring with its meaning and unit.

Sizes are global: they do not depend on the number of ranks. A field can have a `Resume` policy next to its type. The
policy says what happens when a run is resumed and its new settings have another value in this field than the run
directory. A field without a policy is frozen, so the resume is refused and the difference is shown. `load` loads,
checks and compares the sections. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from txl_dist.config.registry import OneOf


class Resume(NamedTuple):
    """Policy for a setting of a resumed run whose value differs from the run directory's value.

    "free" allows the difference silently, and "warned" allows it with a line in the log.
    """

    policy: Literal["warned", "free"]


class PositionScheme(NamedTuple):
    """Properties of a positional scheme, for the rest of the program. The module `model/positions.py` has the
    layers."""

    uses_memory: bool = False
    """True if queries can attend to past segments, because positions are given as distances."""
    sinusoids: Literal["distances", "embedding", "none"] = "none"
    """Quantity that the sinusoids encode: the distances between tokens, which each layer projects, or the positions of
    tokens, which are added to the embedding."""
    has_distance_terms: bool = False
    """True if scores have the terms (b) and (d), which depend on the distance between query and key. The functions of
    `engine.attention` compute these terms. Otherwise torch's own attention is used."""
    has_position_bias: bool = False
    """True if term (d) of the scores, which depends only on distance and head, is computed from a bias v."""
    has_table: bool = False
    """True if encodings of distances are learned. Their number is `model.num_distances`."""
    build: Callable[[ModelSection], Any] | None = None
    """Function of a plugin's scheme that builds the module of one layer. The module computes `RelativeEncodings`. It is
    None for built-in schemes."""


SCHEMES: dict[str, PositionScheme] = {
    "relative": PositionScheme(True, "distances", has_distance_terms=True, has_position_bias=True),
    "learned_relative": PositionScheme(True, has_distance_terms=True, has_table=True),
    "absolute": PositionScheme(sinusoids="embedding"),
}
"""Positional schemes by their names in `model.positions`. A plugin may add rows (`plugins.register_positions`)."""

AttentionKernel = Literal["auto", "plain", "fused", "triton"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PrecisionSetting = Literal[Precision, "auto"]

FREE = Resume("free")
WARNED = Resume("warned")

# Upper limits are far above what any machine runs, and keep out what ends in a crash of a library or in an overflow:
# they stop slips of the hand (1e12 for 1e2), not large runs.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Layers = Annotated[int, Field(gt=0, le=10_000)]
Width = Annotated[int, Field(gt=0, le=1 << 20)]
OwnWidth = Annotated[int, Field(ge=0, le=1 << 20)]
Lanes = Annotated[int, Field(gt=0, le=1 << 20)]
LONGEST = 1 << 24
"""Largest number of tokens in a segment or a memory."""
PositiveLen = Annotated[int, Field(gt=0, le=LONGEST)]
Len = Annotated[int, Field(ge=0, le=LONGEST)]
Seconds = Annotated[int, Field(gt=0, le=10**7)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
HEAVIEST = 1e9
"""Largest weight of a corpus."""
Weight = Annotated[float, Field(ge=0.0, le=HEAVIEST)]
OwnProbability = Annotated[float, Field(ge=-1.0, lt=1.0)]


class Section(BaseModel):
    """Base class of all sections. A section is frozen, and refuses unknown keys and NaN.

    The docstring under a field is its help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    """Settings for the folder of the run, its seed and its plugins."""

    dir: Annotated[str, FREE] = "runs/default"
    """Run directory, with checkpoints, logs and resolved settings."""
    seed: int = 1
    """Seed of the initial weights, the document order and dropout."""
    init: str = ""
    """Bundle (exported model) that gives a new run its initial weights. Empty: random weights."""
    plugins: Annotated[tuple[str, ...], FREE] = ()
    """Python modules to import first, for example "my_package.my_module". Importing runs their code. A module can
    register positional schemes, optimizers and metrics (docs/extending.md)."""


class DataSection(Section):
    """Settings for the corpora, which `txl prepare` wrote to folders or object stores."""

    path: Annotated[str, FREE] = "data/stdlib"
    """Folder or URL (s3://, gs://, https://) of the corpus. A resumed run checks the corpus's content, not its path."""
    more_paths: Annotated[tuple[str, ...], FREE] = ()
    """Further corpora, prepared with the same tokenizer. Each lane (batch row) reads one corpus."""
    weights: Annotated[tuple[Weight, ...], WARNED] = ()
    """Share of the lanes (batch rows) for each corpus, data.path first. Empty: shares in proportion to the corpora's
    tokens."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: Annotated[str, FREE] = "valid"
    """Split to evaluate, in each corpus that has this split. Empty: no evaluation. If no corpus has the default split
    `valid`, training runs without evaluation."""
    document_mask: bool = False
    """Whether tokens attend only within their document and to the end-of-text token before it. If false, attention
    crosses document borders, as in the paper."""
    prefetch_depth: Annotated[int, Field(gt=0, le=10_000), FREE] = 4
    """Number of steps whose tokens the reader thread prepares ahead of training."""
    on_corrupt: Annotated[Literal["raise", "skip"], WARNED] = "raise"
    """raise: a damaged document ends the run. skip: end-of-text tokens replace the document's tokens and are excluded
    from the loss, and the document is logged."""
    max_skipped: Annotated[Count, FREE] = 10
    """Number of damaged documents that a rank can skip. The next damaged document ends the run."""
    cache_dir: Annotated[str, FREE] = ""
    """Folder on each node that caches whole shards of a remote corpus. Empty: no cache, and only the needed byte ranges
    are read."""
    cache_gib: Annotated[float, Field(gt=0, le=1e9), FREE] = 100.0
    """Largest size of the cache in GiB."""
    retries: Annotated[int, Field(ge=0, le=1000), FREE] = 5
    """Largest number of retries of a failed read of a URL. The delay grows with each retry."""
    allow_protocols: Annotated[tuple[str, ...], FREE] = ()
    """Additional URL schemes to allow, for example pipe, which runs a shell command."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all corpora: `path`, then `more_paths`."""
        return self.path, *self.more_paths


class ModelSection(Section):
    """Settings of the network (Dai et al. 2019). The corpus determines the vocabulary size."""

    num_layers: Layers = 4
    """Number of transformer blocks."""
    width: Width = 128
    """Width D of the residual stream."""
    num_heads: Width = 4
    """Number of attention heads."""
    head_width: Width = 32
    """Width H of one head. num_heads * head_width may differ from width."""
    ff_width: Width = 512
    """Inner width of the feed-forward layer."""
    embed_width: OwnWidth = 0
    """Embedding width E of the most frequent words. 0 means model.width."""
    cutoffs: tuple[PositiveInt, ...] = ()
    """First token id of each tail cluster of adaptive softmax. Token ids must be in order of frequency. Empty: a plain
    softmax."""
    div_value: PositiveInt = 1
    """Divisor of the embedding width per cluster: cluster i has embeddings of width embed_width // div_value**i. With
    1, all clusters share one table."""
    tie_weights: bool = True
    """Use the input embeddings as output weights."""
    tie_projections: tuple[bool, ...] = ()
    """For each cluster, whether its input projection is also its output projection. Empty: no projection is tied."""
    pre_norm: bool = False
    """Normalize before each sublayer instead of after its residual sum."""
    final_norm: bool = False
    """Normalize the last hidden state. This needs model.pre_norm."""
    share_biases: bool = True
    """Use one pair of attention biases u, v for all layers, as the original PyTorch code does. False: each layer has
    its own pair."""
    same_length: Literal["off", "memory", "memory_and_self"] = "off"
    """Let all queries see equally many keys, including the query's own token. memory: memory_len keys (original PyTorch
    code, Hugging Face). memory_and_self: memory_len + 1 keys (NVIDIA, TensorFlow). off: the whole memory, and the
    segment up to the query."""
    clamp_len: Count = 0
    """Largest distance, in tokens, with its own encoding. All larger distances share this encoding. 0 means no
    limit."""
    positions: Annotated[str, OneOf(SCHEMES)] = "relative"
    """relative: projected sinusoids of the distance (the paper, attn_type 0 of the original code). learned_relative: a
    learned vector and bias per distance, layer and head (Shaw, attn_type 1, labml). absolute: sinusoids of the position
    added to the embedding, without memory (Vaswani, attn_type 2). Plugins can add schemes."""
    absolute_with_memory: bool = False
    """Allow a memory with absolute positions, to reproduce the problem of section 3.3 of the paper: positions restart
    in each segment, so tokens of memory and segment share positions."""
    any_order: bool = False
    """Predict tokens in random orders (XLNet). This needs train.objective="permutation"."""
    segment_terms: bool = False
    """Add scores of XLNet's segment types (first or second text) to attention, as imported XLNet models do."""
    num_distances: Len = 0
    """Rows in the table of learned_relative positions, one per distance. Larger distances use the last row."""
    norm: Literal["layer", "rms"] = "layer"
    """layer: LayerNorm with gain and bias (the paper). rms: RMSNorm without gain and bias."""
    activation: Literal["relu", "gelu", "relu2", "swiglu"] = "relu"
    """Nonlinearity of the feed-forward layer. relu2 is the square of relu. swiglu multiplies the inner values by the
    silu of a third matrix's output."""
    zero_init: bool = False
    """Initialize the last matrix of each attention layer and each feed-forward layer with 0. A new block then adds
    nothing to the residual stream."""
    query_key_norm: bool = False
    """Divide each head's queries, keys and distance encodings by their root mean square."""
    residual_scalars: bool = False
    """Mix the input x of each block with the first block's input x0: x becomes lambda x + mu x0. Each block learns its
    own lambda and mu."""
    value_residual: bool = False
    """Mix the attention values of each block with those of the first block. Each block learns the mixing share, which
    starts at one half."""
    value_bias: bool = False
    """Add a bias to the attention values (labml)."""
    output_bias: bool = False
    """Add a bias to the output projection of attention (labml)."""
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(width). labml's code omits this."""
    project_same_width: bool = True
    """Also project embeddings that are as wide as the model, unlike the TensorFlow code on lm1b. This matters only with
    div_value > 1."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Small number that norms add to the variance (layer) or mean square (rms, query_key_norm)."""
    dropout: Annotated[Probability, WARNED] = 0.1
    """Dropout rate everywhere except on attention probabilities. Settings such as model.embed_dropout replace this rate
    in one place."""
    attention_dropout: Annotated[Probability, WARNED] = 0.0
    """Dropout on attention probabilities."""
    embed_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on the embeddings. -1 means model.dropout."""
    distance_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on the encodings R of the distances (relative positions only). -1 means model.dropout."""
    projection_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout after the output projection of attention. -1 means model.dropout."""
    ff_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout inside and after the feed-forward layer. -1 means model.dropout."""
    output_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on the last hidden state. -1 means model.dropout."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights."""
    projection_init_std: Annotated[float, Field(gt=0)] = 0.01
    """Standard deviation of initial embedding and output projections."""

    @property
    def scheme(self) -> PositionScheme:
        """Properties of the positional scheme that `positions` names."""
        return SCHEMES[self.positions]

    @property
    def takes_memory(self) -> bool:
        """True if a segment may attend to past segments.

        This is possible if the positional scheme uses distances, or if absolute_with_memory is true.
        """
        return self.scheme.uses_memory or self.absolute_with_memory

    @property
    def num_ff_matrices(self) -> int:
        """Number of weight matrices in a feed-forward network: 3 for swiglu, else 2."""
        if self.activation == "swiglu":
            return 3
        return 2

    def embed_width_or_default(self) -> int:
        """Return the width of the widest embeddings: `embed_width`, or `width` if `embed_width` is 0."""
        return self.embed_width or self.width

    def rate(self, own: float) -> float:
        """Return the dropout rate of one place in the model: its own rate, or `dropout` if its own rate is negative."""
        if own < 0:
            return self.dropout
        return own


class OptimizerKind(NamedTuple):
    """Properties of an optimizer, for the rest of the program. The module `train.engine.optimizer` builds the
    optimizer."""

    settings: tuple[str, ...] = ("betas", "eps")
    """Names of the settings of [optim] that the optimizer's steps use, in addition to lr and weight_decay."""
    state_bytes: Callable[[OptimSection], int] = lambda _: 8
    """Bytes of optimizer state per parameter, in fp32."""
    needs_whole_tensors: bool = False
    """True if the optimizer's steps take norms of whole tensors. Such an optimizer cannot run with ZeRO, which cuts
    tensors up, or with flat parameters, which join tensors."""
    matrix_state_bytes: int | None = None
    """Bytes of optimizer state per value of the blocks' matrices, if the optimizer orthogonalizes their steps, else
    None."""
    build: Callable[..., Any] | None = None
    """Function of a plugin's optimizer that builds it from parameter groups and a learning rate. It is None for
    built-in optimizers."""

    @property
    def orthogonalizes(self) -> bool:
        """True if the optimizer orthogonalizes the steps of the blocks' matrices."""
        return self.matrix_state_bytes is not None


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adam": OptimizerKind(),
    "adamw": OptimizerKind(),
    "lamb": OptimizerKind(needs_whole_tensors=True),
    "muon": OptimizerKind(("betas", "eps", "muon_momentum"), matrix_state_bytes=4),
    "sgd": OptimizerKind(("momentum",), state_bytes=lambda optim: 4 if optim.momentum else 0),
}
"""Optimizers by their names in `optim.name`. A plugin may add rows (`plugins.register_optimizer`)."""


Schedule = Literal["cosine", "cosine_from_start", "inverse_sqrt", "linear", "wsd", "constant"]


class OptimSection(Section):
    """Settings of the optimizer and of the learning-rate schedule."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """Optimizer. adam, adamw and sgd are torch's fused versions. lamb is NVIDIA's version (no bias correction, weight
    norms capped at 10) and needs zero_stage 0. muon orthogonalizes the updates of the blocks' matrices, scales them to
    the size of AdamW's updates, and uses AdamW for other weights. Plugins can add optimizers."""
    lr: Annotated[float, Field(gt=0, le=1e30), WARNED] = 2.5e-4
    """Peak of the learning rate."""
    betas: Annotated[tuple[Probability, Probability], WARNED] = (0.9, 0.999)
    """Decay rates of the two moments (adam, adamw, lamb, and the AdamW part of muon)."""
    momentum: Annotated[Probability, WARNED] = 0.0
    """Momentum factor of sgd."""
    muon_momentum: Annotated[Probability, WARNED] = 0.95
    """Nesterov momentum of muon for the blocks' matrices."""
    eps: Annotated[float, Field(gt=0), WARNED] = 1e-8
    """Small number added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0), WARNED] = 0.0
    """Weight decay of matrices. Biases, norms and the attention biases u, v have no weight decay."""
    clip_norm: Annotated[float, Field(ge=0), WARNED] = 0.25
    """Largest global gradient norm. Larger gradients are scaled down. 0 disables clipping."""
    schedule: Annotated[Schedule, WARNED] = "cosine"
    """Learning rate after the warm-up. cosine begins after the warm-up (NVIDIA, TensorFlow), cosine_from_start at step
    0 (original PyTorch code). inverse_sqrt is the schedule of Vaswani et al. 2017. wsd (warm-up, stable, decay) stays
    at the peak, then decays."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1), WARNED] = 0.2
    """Share of train.max_steps, at the end of the run, in which wsd decays linearly to min_lr."""
    warmup_steps: Annotated[Count, WARNED] = 0
    """Steps of linear warm-up from 0."""
    min_lr: Annotated[float, Field(ge=0), WARNED] = 0.0
    """Final learning rate of cosine, linear and wsd, reached one step after train.max_steps. For inverse_sqrt, min_lr
    is the lower bound of the learning rate."""
    ema_decay: Annotated[Probability, WARNED] = 0.0
    """Decay per step of an exponential moving average of the fp32 weights. The average starts with the weights after
    the first update, and checkpoints contain it. 0 disables the average. `eval.use_ema` and `txl export --ema` use
    it."""

    @property
    def kind(self) -> OptimizerKind:
        """Properties of the optimizer that `name` names."""
        return OPTIMIZERS[self.name]

    def state_bytes(self, *, of_matrices: bool = False) -> int:
        """Return the bytes of optimizer state per parameter, in fp32.

        The average of the weights, if there is one, is included. With `of_matrices` the result is for a parameter of
        the blocks' matrices, for which some optimizers keep less state.
        """
        if of_matrices:
            own = self.kind.matrix_state_bytes
        else:
            own = None
        return (self.kind.state_bytes(self) if own is None else own) + (4 if self.ema_decay else 0)


class Half(NamedTuple):
    """Part of a segment whose targets and order XLNet draws together: positions [start, stop)."""

    start: int
    stop: int
    num_targets: int
    """Number of tokens that are predicted."""


def halves_of(segment_len: int, *, reuse_len: int, predicted_len: int) -> tuple[Half, ...]:
    """Return the halves of a segment in which XLNet predicts tokens.

    The targets are divided between the halves in proportion to their lengths. The first half has the `reuse_len` tokens
    that the memory stores. If `reuse_len` is the length of the segment, there is only one half.
    """
    if reuse_len == segment_len:
        return (Half(0, segment_len, predicted_len),)
    num_first = int(predicted_len * reuse_len / segment_len + 0.5)
    first = Half(0, reuse_len, num_first)
    second = Half(reuse_len, segment_len, predicted_len - num_first)
    return (first, second)


class TargetLengths(NamedTuple):
    """Settings of `[train]` by which XLNet's objective chooses the tokens to predict. The fields are those of
    `TrainSection`, with the same defaults."""

    reuse_len: int = 0
    predicted_len: int = 0
    order_len: int = 0
    longest_span: int = 5
    span_context: int = 6


class TrainSection(Section):
    """Settings for the batch size and the length of the run. All sizes are global."""

    num_lanes: Annotated[Lanes, WARNED] = 32
    """Rows of the global batch, called lanes. Each lane reads one contiguous token stream. A run that resumes with
    another num_lanes reads each remaining token once, and its memories start empty."""
    segment_len: Annotated[PositiveLen, WARNED] = 64
    """Tokens per lane (batch row) and step (T)."""
    batch_tokens: Annotated[int, Field(ge=0, le=1 << 44), FREE] = 0
    """Tokens per step, num_lanes * segment_len. Another way to give num_lanes: a file, or the flags, cannot have both.
    It must be a multiple of segment_len * microbatch_lanes * ranks. 0 means that num_lanes counts."""
    memory_len: Annotated[Len, WARNED] = 128
    """Tokens of memory per lane (batch row) and layer (M). 0 disables recurrence. If a resumed run has a longer memory,
    the older part of the memory starts empty."""
    objective: Literal["next", "permutation"] = "next"
    """next: predict each token from the tokens before it. permutation: predict some tokens of each segment in random
    orders (XLNet)."""
    reuse_len: Len = 0
    """With objective "permutation": tokens that a lane (batch row) advances per step and stores in its memory. 0 means
    segment_len."""
    predicted_len: Annotated[Len, WARNED] = 0
    """With objective "permutation": tokens per segment that are predicted. 0 means a sixth of segment_len."""
    order_len: Annotated[Len, WARNED] = 0
    """With objective "permutation": tokens per block. The order of prediction is random within each block. 0: each half
    of the segment is a block."""
    longest_span: Annotated[int, Field(ge=1, le=1000), WARNED] = 5
    """With objective "permutation": largest number of words that are predicted together."""
    span_context: Annotated[int, Field(ge=1, le=1000), WARNED] = 6
    """With objective "permutation": tokens of text per predicted word. A span of n words is chosen at random within n *
    span_context tokens."""
    memory_lens: Annotated[tuple[Len, ...], WARNED] = ()
    """Tokens of memory per layer, first layer first. The largest number must equal memory_len. Empty: memory_len in
    every layer. If a phase or an evaluation sets another memory_len, the layers with the longest memory use that
    length. The other layers keep their length, or use that length if it is smaller."""
    initial_memory: Annotated[Literal["empty", "zeros"], WARNED] = "empty"
    """Memory before a lane's first token. empty: attention masks the memory. zeros: hidden states of 0, which queries
    attend to (Hugging Face, TensorFlow). Evaluation starts with zeros only with `--zero-memory`."""
    half_loss: Annotated[bool, WARNED] = False
    """Train only on the last ceil(segment_len / 2) targets of each segment, as in the paper's ablations. Each scored
    target then has at least half a segment of context."""
    microbatch_lanes: Annotated[Lanes, WARNED] = 16
    """Lanes (batch rows) per micro-batch of a rank. num_lanes / ranks must be a multiple of this number."""
    max_steps: Annotated[PositiveInt, WARNED] = 1000
    """Optimizer steps of the whole run. The learning-rate schedule ends with the last step."""
    phases: Annotated[tuple[str, ...], WARNED] = ()
    """Phases of the run, in order: parts with their own num_lanes, segment_len, memory_len and data.weights. Write a
    phase as "until=0.5 num_lanes=128 segment_len=16 memory_len=32 weights=3,1". `until` is the share of max_steps at
    which the phase ends. After the last phase the settings of [train] and [data] apply. Steps of all phases must have
    equally many tokens."""

    @property
    def scored_len(self) -> int:
        """Number of targets per lane and step whose loss counts in training. For the next-token objective they are the
        last targets of the segment."""
        if self.is_permutation:
            return self.num_predicted
        if self.half_loss:
            return self.segment_len - self.segment_len // 2
        return self.segment_len

    @property
    def unscored(self) -> str:
        """Reason why some targets have no training loss, for messages. It is empty if all targets have a training
        loss."""
        if self.is_permutation:
            return "only a part of the tokens is predicted, in random orders (train.objective)"
        if self.half_loss:
            return "only the recent half of each segment is scored (train.half_loss)"
        return ""

    @property
    def is_permutation(self) -> bool:
        """True if the objective is to predict tokens in random orders (XLNet)."""
        return self.objective == "permutation"

    @property
    def step_len(self) -> int:
        """Number of tokens that each lane (batch row) advances in a step. The memory stores these tokens."""
        return self.reuse_len or self.segment_len

    @property
    def num_predicted(self) -> int:
        """Number of tokens that XLNet's objective predicts per segment."""
        return self.predicted_len or max(1, self.segment_len // 6)

    @property
    def num_targets(self) -> int:
        """Number of tokens that XLNet's objective predicts per segment. The number is 0 for next-token prediction."""
        if self.is_permutation:
            return self.num_predicted
        return 0

    @property
    def target_lengths(self) -> TargetLengths:
        """Settings by which XLNet's objective chooses the tokens to predict."""
        return TargetLengths(
            reuse_len=self.reuse_len,
            predicted_len=self.predicted_len,
            order_len=self.order_len,
            longest_span=self.longest_span,
            span_context=self.span_context,
        )

    def halves(self) -> tuple[Half, ...]:
        """Return the halves of a segment in which XLNet's objective predicts tokens."""
        return halves_of(self.segment_len, reuse_len=self.step_len, predicted_len=self.num_predicted)

    def memory_per_layer(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of tokens that each layer remembers."""
        return memory_of_layers(self.memory_len, self.memory_lens, num_layers=num_layers)


def memory_of_layers(memory_len: int, memory_lens: Sequence[int], *, num_layers: int) -> tuple[int, ...]:
    """Return the number of tokens that each layer remembers now.

    `memory_lens` are the numbers in training, and `memory_len` is the length of the longest memory now.
    """
    longest = max(memory_lens, default=0)
    lens = memory_lens or (longest,) * num_layers
    return tuple(memory_len if length == longest else min(length, memory_len) for length in lens)


def _word_of(value: Any) -> Any:
    """Return "on" for true and "off" for false. Files of earlier versions have true and false here."""
    if isinstance(value, bool):
        return {True: "on", False: "off"}.get(value, value)
    return value


class EngineSection(Section):
    """Settings of DeepSpeed and of the hardware."""

    zero_stage: Annotated[int, Field(ge=0, le=3), WARNED] = 1
    """ZeRO stage. 0 replicates everything. 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    precision: Annotated[PrecisionSetting, WARNED] = "fp32"
    """Number format of weights and activations in the step. fp16 and tf32 need a GPU. tf32 is fp32 with operands of
    matrix products rounded to 10 mantissa bits (Ampere or later). auto: bf16 if all ranks have a GPU with bf16 or a CPU
    that is faster in bf16 (AMX, AVX-512 BF16), otherwise fp32. A run keeps its precision."""
    offload_optimizer: Annotated[bool, WARNED] = False
    """Keep optimizer state in host memory. This needs ZeRO stage 1, 2 or 3."""
    offload_parameters: Annotated[bool, WARNED] = False
    """Keep parameters in host memory. This needs ZeRO stage 3."""
    attention: Annotated[AttentionKernel, FREE] = "auto"
    """Implementation of relative attention. plain: separate torch operations. fused: one function with a hand-written
    backward pass, on any device. triton: GPU kernels in half precision, also for residual sums, norms, activations
    and dropout, and in any precision for the softmax and for Adam's update at ZeRO stages 1 and 2. auto: the fastest
    supported implementation. With plain and fused no Triton kernel runs."""
    keep_scores: Annotated[Literal["off", "on", "auto"], FREE] = "auto"
    """Keep the distance scores of the Triton kernels from the forward to the backward pass, which then computes one
    product less. Results are bit-identical. auto: on if the step is predicted to fit into GPU memory with them."""
    cuda_graph: Annotated[Literal["off", "on", "auto"], BeforeValidator(_word_of), FREE] = "off"
    """Record forward pass, loss and backward pass of a micro-batch once per shape, and replay the recording. This helps
    if the host is slower than the GPU. It needs ZeRO stage 0, 1 or 2 without activation_checkpointing. auto: on if
    possible."""
    pad_widths: Annotated[Literal["off", "on", "auto"], FREE] = "auto"
    """Keep widths that are no multiples of 8, and heads that are no multiples of 16, with additional columns of zeros.
    Matrix products on a GPU are slow without aligned rows. Checkpoints and counts stay the same, and results do up to
    rounding. auto: on a GPU. Models with a plugin's positions or optimizer are never padded."""
    activation_checkpointing: Annotated[bool, FREE] = False
    """Recompute blocks in the backward pass. Results are bit-identical, steps take longer, and a rank needs less
    memory."""
    recompute_every: Annotated[PositiveInt, FREE] = 1
    """With activation_checkpointing: recompute only every n-th block, and keep the activations of other blocks."""
    check_memory: Annotated[bool, FREE] = True
    """Refuse to start a run that is predicted not to fit into memory, and suggest settings that fit."""
    num_threads: Annotated[int, Field(ge=0, le=1024), FREE] = 0
    """CPU threads per rank. 0 means OMP_NUM_THREADS if set, else the number of cores divided by the ranks of the
    node."""
    start_timeout_s: Annotated[Seconds, FREE] = 1800
    """Until the first step is finished: seconds without progress after which a rank counts as hung. All ranks then
    write their stack traces and exit, and a message names the hung rank."""
    timeout_s: Annotated[Seconds, FREE] = 600
    """After the first step is finished: seconds without progress after which a rank counts as hung. The longest step
    and the evaluation of one segment must take less time."""

    @property
    def is_replayable(self) -> bool:
        """True if a micro-batch can be recorded and replayed as a CUDA graph.

        ZeRO-3 gathers weights within a micro-batch, and recomputed blocks read the generator's state. Neither can be
        replayed.
        """
        return self.zero_stage < 3 and not self.activation_checkpointing

    def replays(self, *, on_gpu: bool) -> bool:
        """Return True if micro-batches are replayed as CUDA graphs."""
        return self.cuda_graph == "on" or (self.cuda_graph == "auto" and on_gpu and self.is_replayable)

    @property
    def chosen_precision(self) -> Precision:
        """The precision, in settings in which "auto" has been replaced. The plan of a run replaces it."""
        assert self.precision != "auto"
        return self.precision

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Type of the numbers that the model computes with. For the precision tf32 it is fp32."""
        if self.chosen_precision == "tf32":
            return "fp32"
        return self.chosen_precision


def _words_of_table(value: Any) -> Any:
    """Return a table of texts as a tuple of words NAME=VALUE, and any other value unchanged."""
    if isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values()):
        return tuple(f"{name}={text}" for name, text in value.items())
    if isinstance(value, list):
        return tuple(value)
    return value


def paths_of_sets(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, path) of each held-out set. `words` is the value of `eval.sets`. A missing path is empty."""
    parts = [word.partition("=") for word in words]
    return [(name, path) for name, _, path in parts]


class EvalSection(Section):
    """Settings for scoring the validation split, during and after training."""

    every_steps: Annotated[Count, FREE] = 0
    """Steps between evaluations. 0 means one evaluation, at the end."""
    num_lanes: Annotated[Lanes, FREE] = 8
    """Lanes (batch rows) into which the split is cut. Each lane starts with an empty memory. Fewer lanes give a more
    exact loss, and more lanes run faster."""
    segment_len: Annotated[Len, FREE] = 0
    """Tokens per lane (batch row) and forward pass. 0 means train.segment_len."""
    memory_len: Annotated[int, Field(ge=-1, le=LONGEST), FREE] = -1
    """Tokens of memory. -1 means train.memory_len. 0 evaluates without memory."""
    overlap_len: Annotated[Len, FREE] = 0
    """Tokens before each segment that are run again as context and not scored (`ext_len` of the original code). This
    needs eval.memory_len 0."""
    max_tokens: Annotated[int, Field(ge=0, le=10**15), FREE] = 0
    """Number of tokens to score, from the start of the split. 0 scores the whole split. With a limit, no bits per byte
    are reported."""
    sets: Annotated[tuple[str, ...], BeforeValidator(_words_of_table), FREE] = ()
    """Held-out sets that are only evaluated: corpora with the tokenizer of data.path, by name, as in {news =
    "data/news"} or ["news=data/news"]. The records of a set are eval_NAME. Its split is data.eval_split if it has that
    split, else its only split. Without a validation split the first set takes its place."""
    use_ema: Annotated[bool, FREE] = False
    """During training, score the moving average of the weights instead of the weights. This needs optim.ema_decay."""
    orders: Annotated[PositiveInt, FREE] = 1
    """With objective "permutation": number of random orders in which the tokens of each segment are predicted."""
    accuracy: Annotated[bool, FREE] = False
    """Also report the share of targets that are the most probable token. This costs a second softmax."""


class CheckpointSection(Section):
    """Settings that say when checkpoints are saved, and which checkpoints are kept."""

    every_steps: Annotated[Count, FREE] = 500
    """Steps between checkpoints. A run also saves a checkpoint at its end. 0 means only at the end."""
    every_minutes: Annotated[float, Field(ge=0, le=10**6), FREE] = 0.0
    """Minutes between checkpoints, by the clock of rank 0. 0 means by steps only. If every_steps is set too, both
    intervals apply, and each checkpoint restarts the count of minutes."""
    keep_last: Annotated[PositiveInt, FREE] = 3
    """Number of newest checkpoints to keep. An older checkpoint is removed after a new one is complete on disk."""
    keep_every: Annotated[Count, FREE] = 0
    """Also keep every checkpoint whose step is a multiple of this number. 0 means none."""
    keep_best: Annotated[bool, FREE] = False
    """Also save a checkpoint after an evaluation with the lowest loss so far, and keep this checkpoint."""
    asynchronous: Annotated[bool, FREE] = True
    """Write checkpoints while training continues. A step waits only for the copy of the whole checkpoint into host
    memory."""
    mirror: Annotated[str, FREE] = ""
    """URL in object storage, for example s3://bucket/run, to which checkpoints and records are copied while training
    continues. A start with an empty run directory resumes from it. Empty means no copies."""


class GuardSection(Section):
    """Settings for the handling of non-finite numbers, spikes and silent corruption."""

    max_consecutive_skips: Annotated[PositiveInt, FREE] = 20
    """Consecutive steps with a non-finite loss or gradient after which the run stops. All ranks skip such a step."""
    max_skipped_per_1000: Annotated[PositiveInt, FREE] = 50
    """Steps skipped because of a non-finite loss or gradient, among the last 1,000 steps, after which the run stops."""
    spike_sigma: Annotated[float, Field(ge=0), FREE] = 8.0
    """A loss or gradient norm is a spike if ln(value / median) exceeds spike_sigma * max(s, 0.02). The median, and the
    robust standard deviation s of ln(value), are those of the last spike_window steps. 0 disables detection."""
    spike_window: Annotated[int, Field(gt=0, le=10**6), FREE] = 128
    """Number of recent steps from which spike detection computes the median and the standard deviation. Detection
    starts after half this number of steps."""
    on_spike: Annotated[Literal["report", "rewind"], FREE] = "report"
    """report: log the spike and continue. rewind: return to the last checkpoint and skip the tokens of the spike."""
    spike_patience: Annotated[PositiveInt, FREE] = 3
    """Consecutive spikes that cause a rewind (return to the last checkpoint)."""
    max_rewinds: Annotated[Count, FREE] = 5
    """Largest number of rewinds (returns to the last checkpoint) in a run. Another rewind stops the run."""
    check_replicas_every_steps: Annotated[Count, FREE] = 0
    """Steps between comparisons of the parameters that all ranks hold, to find silent corruption. 0 means never."""


class RecoverSection(Section):
    """Settings for the replacement of lost ranks inside the running job."""

    spares: Annotated[int, Field(ge=0, le=1), FREE] = 0
    """1: replace a rank that dies or freezes, by a spare process per node, and repeat the step. The last two copies of
    the state stay in host memory. Works under `txl launch` (--spares 1), deepspeed and torchrun. GPUs need allow_gpu.
    0: a lost rank ends the job with exit code 76."""
    copy_every: Annotated[PositiveInt, FREE] = 1
    """Steps between two copies of the state. With n, the copies cost an n-th, but a lost rank repeats up to n - 1
    finished steps more."""
    copies: Annotated[Literal["node", "partner"], FREE] = "node"
    """node: the copies of a rank's state stay on its node, so a lost node ends the job or takes it to the last
    checkpoint. partner: the next node keeps copies too."""
    partner_every: Annotated[PositiveInt, FREE] = 1
    """Every k-th copy also goes to the next node. A lost node repeats up to k * copy_every - 1 finished steps more."""
    silent_s: Annotated[float, Field(ge=1, le=3600), FREE] = 6.0
    """Seconds without a heartbeat after which a rank counts as frozen."""
    max_in_row: Annotated[PositiveInt, FREE] = 3
    """Largest number of recoveries without a finished step between them. The next loss ends the job."""
    allow_gpu: Annotated[bool, FREE] = False
    """Allow `spares` on GPUs, where recovery has not been tested. False: such a start is refused."""
    spare_nodes: Annotated[Count, FREE] = 0
    """Number of nodes at the end of the hostfile whose processes get no rank at the start. They take over the ranks of
    a lost node."""
    on_loss: Annotated[Literal["stop", "wait", "shrink"], FREE] = "stop"
    """Action when a lost rank cannot be replaced. stop: the job ends with exit code 76. wait: it waits until its
    agent is started again. shrink: it continues with the largest number of ranks that divides the lanes."""


class MetricsSection(Section):
    """Settings that say which metrics are recorded, and how often."""

    log_every_steps: Annotated[PositiveInt, FREE] = 10
    """Steps between log lines. Each metric is the mean over these steps."""
    tensorboard: Annotated[bool, FREE] = True
    """Write TensorBoard event files next to metrics.jsonl."""
    wandb: Annotated[str, FREE] = ""
    """Weights & Biases (W&B) project that gets the records of metrics.jsonl (pip install "txl_dist[wandb]"). Empty
    sends nothing."""
    wandb_entity: Annotated[str, FREE] = ""
    """W&B user or team that owns the run. Empty: the account's default."""
    wandb_name: Annotated[str, FREE] = ""
    """Name of the W&B run. Empty: the name of the run directory."""
    wandb_group: Annotated[str, FREE] = ""
    """Group of the W&B run. Empty: none."""
    wandb_tags: Annotated[tuple[str, ...], FREE] = ()
    """Tags of the W&B run, of 1 to 64 characters each."""
    wandb_id: Annotated[str, FREE] = ""
    """Id of the W&B run, to choose or resume it. Empty: an id computed from the path of the run directory, so a resumed
    run keeps its id."""
    wandb_resume: Annotated[Literal["allow", "must", "never"], FREE] = "allow"
    """allow: resume the W&B run with this id, or start one. must: this run must exist. never: this run must not
    exist when the training starts at step 0."""
    accuracy_every_steps: Annotated[Count, FREE] = 0
    """Steps between measurements of accuracy, the share of scored targets that are the most probable token. Each
    measurement costs one more forward pass, without dropout. 0 means never."""
    norms_every_steps: Annotated[Count, FREE] = 0
    """Steps between records of each layer's gradient norm (before clipping), weight norm and output root mean square.
    Each record costs one more forward pass, without dropout. 0 means never."""
    sample_every_steps: Annotated[Count, FREE] = 0
    """Steps between sample texts, written to the log, metrics.jsonl and TensorBoard. 0 means never."""
    sample_prompt: Annotated[str, FREE] = ""
    """Prompt of the sample texts. Empty: each sample text begins a document."""
    sample_len: Annotated[PositiveLen, FREE] = 64
    """Tokens per sample text."""
    peak_tflops: Annotated[float, Field(ge=0, le=1e9), FREE] = 0.0
    """Peak of one device in 1e12 operations per second at engine.precision, for MFU (model FLOPs utilization). 0 looks
    the peak up by the device's name. For an unknown device or a CPU no MFU is reported."""
