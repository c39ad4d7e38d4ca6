"""The sections of a run's settings: frozen, typed, each field documented under itself with its unit.

Sizes are global and know nothing of the number of ranks. Each field may carry a `Resume` class beside its type: what
happens when it differs from the settings that made the run directory. Unmarked fields are frozen: a change is refused
with a diff. `config` loads, checks and compares them. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from txl_dist.config.registry import OneOf


class Resume(NamedTuple):
    """How a setting may change when a run directory is continued: "free" silently, "warned" with a line in the log."""

    policy: Literal["warned", "free"]


class PositionScheme(NamedTuple):
    """What the program must know of a way to tell positions; `model.positions` has its layers."""

    uses_memory: bool = False
    """A past segment can be attended to: what is told are distances."""
    sinusoids: Literal["distances", "embedding", "none"] = "none"
    """What they encode: distances, projected by each layer, or positions, added to the embedding."""
    has_distance_terms: bool = False
    """Scores have terms (b) and (d), which `engine.attention` computes; else torch's own attention does it all."""
    has_position_bias: bool = False
    """Term (d) is made with a bias v."""
    has_table: bool = False
    """Distances are learned, `model.num_distances` of them."""
    build: Callable[[ModelSection], Any] | None = None
    """Function of a plugin's scheme that builds a layer's module, which makes `RelativeEncodings`; unset for ours."""


SCHEMES: dict[str, PositionScheme] = {
    "relative": PositionScheme(True, "distances", has_distance_terms=True, has_position_bias=True),
    "learned_relative": PositionScheme(True, has_distance_terms=True, has_table=True),
    "absolute": PositionScheme(sinusoids="embedding"),
}
"""By `model.positions`; a plugin may add rows (`plugins.register_positions`)."""

AttentionKernel = Literal["auto", "plain", "fused", "triton"]

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
"""Tokens of a segment or a memory."""
PositiveLen = Annotated[int, Field(gt=0, le=LONGEST)]
Len = Annotated[int, Field(ge=0, le=LONGEST)]
Seconds = Annotated[int, Field(gt=0, le=10**7)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=1e9)]
OwnProbability = Annotated[float, Field(ge=-1.0, lt=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    """Where the run lives and its one seed."""

    dir: Annotated[str, FREE] = "runs/default"
    """Folder of the run: checkpoints, logs, resolved config."""
    seed: int = 1
    """Seed of everything random: initial weights, document order, dropout."""
    init: str = ""
    """Bundle whose weights a new run begins with; empty draws them. `txl train --init BUNDLE` sets it."""
    plugins: Annotated[tuple[str, ...], FREE] = ()
    """Modules that are imported before anything else, which runs their code: "my_package.my_module". Each may add
    positional schemes, optimizers and metrics (docs/extending.md)."""


class DataSection(Section):
    """The corpora, as `txl prepare` wrote them, in folders or object stores."""

    path: Annotated[str, FREE] = "data/stdlib"
    """Folder or URL (s3://, gs://, https://) with index.json; its content, not its name, is checked on resume."""
    more_paths: Annotated[tuple[str, ...], FREE] = ()
    """Further corpora, of the same tokenizer, that are mixed in: each lane reads one corpus."""
    weights: Annotated[tuple[Weight, ...], WARNED] = ()
    """Share of the lanes per corpus, data.path first; none means in proportion to their tokens. 0 pauses a corpus."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: Annotated[str, FREE] = "valid"
    """Split to evaluate on, of each corpus that has it; no evaluation if it is empty, or `valid` and there is none."""
    document_mask: bool = False
    """Tokens attend only within their document, plus the preceding end-of-text, so that the document's first token is
    scored too. Without it, memory runs over the borders of documents, as in the paper."""
    prefetch_depth: Annotated[int, Field(gt=0, le=10_000), FREE] = 4
    """Steps that the reader thread may run ahead."""
    on_corrupt: Annotated[Literal["raise", "skip"], WARNED] = "raise"
    """raise: a damaged document ends the run. skip: its tokens are replaced and not scored, counted and logged."""
    max_skipped: Annotated[Count, FREE] = 10
    """Damaged documents that a rank may skip before the run ends all the same."""
    cache_dir: Annotated[str, FREE] = ""
    """Folder on each node for whole shards of a corpus at a URL; empty reads ranges, without a cache."""
    cache_gib: Annotated[float, Field(gt=0, le=1e9), FREE] = 100.0
    """Largest size of the cache."""
    retries: Annotated[int, Field(ge=0, le=1000), FREE] = 5
    """How often a failed read of a URL is tried again, waiting longer each time."""
    allow_protocols: Annotated[tuple[str, ...], FREE] = ()
    """URL schemes to allow beyond the usual ones, for instance pipe, which runs a shell command."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all corpora, `path` first."""
        return self.path, *self.more_paths


class ModelSection(Section):
    """The network (Dai et al. 2019). The vocabulary size comes from the corpus."""

    num_layers: Layers = 4
    """Transformer blocks."""
    width: Width = 128
    """Width D of the residual stream."""
    num_heads: Width = 4
    """Attention heads."""
    head_width: Width = 32
    """Width H of one head; num_heads * head_width need not equal width."""
    ff_width: Width = 512
    """Inner width of the feed-forward layer."""
    embed_width: OwnWidth = 0
    """Width E of the embeddings of the most frequent words; 0 means width."""
    cutoffs: tuple[PositiveInt, ...] = ()
    """Ids (in frequency order) at which the clusters of adaptive softmax begin; none means a plain softmax."""
    div_value: PositiveInt = 1
    """Cluster i has embeddings of width embed_width // div_value**i; 1 means one table for all."""
    tie_weights: bool = True
    """Output rows are the input embeddings."""
    tie_projections: tuple[bool, ...] = ()
    """Per cluster: its output projection is its input projection. Empty means none is tied."""
    pre_norm: bool = False
    """Layer norm before each sublayer instead of after its residual sum."""
    final_norm: bool = False
    """Layer norm on the last hidden state; only with pre_norm."""
    share_biases: bool = True
    """One pair of attention biases u, v for all layers (original PyTorch code); False: a pair per layer."""
    same_length: Literal["off", "memory", "memory_and_self"] = "off"
    """Let every query see equally many keys, itself included: memory_len of them (memory: original PyTorch code and
    Hugging Face) or memory_len + 1 (memory_and_self: NVIDIA, TensorFlow). off: memory and segment up to itself."""
    clamp_len: Count = 0
    """Distances above this many tokens share one encoding; 0 means no clamping."""
    positions: Annotated[str, OneOf(SCHEMES)] = "relative"
    """relative: sinusoids of the distance, projected (the paper; attn_type 0 of the original code). learned_relative: a
    learned vector and bias per distance, layer and head (Shaw; attn_type 1; labml). absolute: sinusoids of the position
    added to the embedding, no memory (Vaswani; attn_type 2: the vanilla baseline). Or a scheme of a plugin."""
    absolute_with_memory: bool = False
    """Allow absolute positions a memory, to see why the paper gave them up (section 3.3): positions are counted anew in
    each segment, and what is remembered keeps those that it was computed with, so that now and then look alike."""
    num_distances: Len = 0
    """Rows of the table of learned_relative; larger distances share the last one."""
    norm: Literal["layer", "rms"] = "layer"
    """layer: mean and variance, with gain and bias (the paper). rms: the root mean square alone, with neither."""
    activation: Literal["relu", "gelu", "relu2", "swiglu"] = "relu"
    """Nonlinearity of the feed-forward layer. relu2 is the square of relu; swiglu has a third matrix of ff_width
    columns, whose silu multiplies what ff_in gives."""
    zero_init: bool = False
    """The last matrices of attention and feed-forward layer begin at 0: a block adds nothing at first."""
    query_key_norm: bool = False
    """Queries, keys and encodings of distances of each head are divided by their root mean square."""
    residual_scalars: bool = False
    """Before each block x becomes lambda x + mu x0, with x0 the input of the first; both are learned, per block."""
    value_residual: bool = False
    """The values of attention are mixed with those of the first block, half and half at first; shares are learned."""
    value_bias: bool = False
    """A bias on the values of attention (labml)."""
    output_bias: bool = False
    """A bias on the output projection of attention (labml)."""
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(width); labml does not."""
    project_same_width: bool = True
    """With div_value > 1 also embeddings as wide as the model have a projection; False: they do not (the TensorFlow
    code on lm1b)."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance in layer norm, to the mean of the squares in rms and query_key_norm."""
    dropout: Annotated[Probability, WARNED] = 0.1
    """Dropout everywhere but on attention probabilities; the rates below set single places apart."""
    attention_dropout: Annotated[Probability, WARNED] = 0.0
    """Dropout on attention probabilities."""
    embed_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on the embeddings; -1 means dropout."""
    distance_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on the encodings R of the distances (relative positions only); -1 means dropout."""
    projection_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on what attention's output projection gives; -1 means dropout."""
    ff_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout inside the feed-forward layer and on what it gives; -1 means dropout."""
    output_dropout: Annotated[OwnProbability, WARNED] = -1.0
    """Dropout on the last hidden state; -1 means dropout."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; 0.005 in the large recipes."""
    projection_init_std: Annotated[float, Field(gt=0)] = 0.01
    """Standard deviation of initial embedding and output projections."""

    @property
    def scheme(self) -> PositionScheme:
        """What `positions` names."""
        return SCHEMES[self.positions]

    @property
    def takes_memory(self) -> bool:
        """Whether a segment may attend to past ones: by distances, or because it was asked for by name."""
        return self.scheme.uses_memory or self.absolute_with_memory

    @property
    def num_ff_matrices(self) -> int:
        """Of the feed-forward layer."""
        return 3 if self.activation == "swiglu" else 2

    def embed_width_or_default(self) -> int:
        """Width of the widest embeddings."""
        return self.embed_width or self.width

    def rate(self, own: float) -> float:
        """The dropout of a place that may have a rate of its own."""
        return self.dropout if own < 0 else own


class OptimizerKind(NamedTuple):
    """What the program must know of an optimizer; `train.engine.optim` builds it."""

    settings: tuple[str, ...] = ("betas", "eps")
    """Names of the settings below that its steps take, besides lr and weight_decay."""
    state_bytes: Callable[[OptimSection], int] = lambda _: 8
    """Of what it keeps per parameter, in fp32."""
    needs_whole_tensors: bool = False
    """It takes norms of whole tensors, which ZeRO would cut up and flat parameters join."""
    matrix_state_bytes: int | None = None
    """Of what it keeps per value of the matrices of blocks, where it treats those apart: it orthogonalizes them."""
    build: Callable[..., Any] | None = None
    """For a plugin's optimizer: builds it from groups and a learning rate; `train.engine.optim` builds ours."""

    @property
    def orthogonalizes(self) -> bool:
        """The steps of the matrices of blocks."""
        return self.matrix_state_bytes is not None


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adam": OptimizerKind(),
    "adamw": OptimizerKind(),
    "lamb": OptimizerKind(needs_whole_tensors=True),
    "muon": OptimizerKind(("betas", "eps", "muon_momentum"), matrix_state_bytes=4),
    "sgd": OptimizerKind(("momentum",), state_bytes=lambda optim: 4 if optim.momentum else 0),
}
"""By `optim.name`; a plugin may add rows (`plugins.register_optimizer`)."""


Schedule = Literal["cosine", "cosine_from_start", "inverse_sqrt", "linear", "wsd", "constant"]


class OptimSection(Section):
    """Optimizer and learning-rate schedule."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """adam, adamw and sgd in torch's fused form; lamb as NVIDIA has it (no bias correction, norms of weights counted up
    to 10), only without ZeRO partitioning; muon orthogonalizes the steps of the matrices of blocks, as long as AdamW's,
    and is AdamW for everything else. Or an optimizer of a plugin."""
    lr: Annotated[float, Field(gt=0, le=1e30), WARNED] = 2.5e-4
    """Peak learning rate."""
    betas: Annotated[tuple[Probability, Probability], WARNED] = (0.9, 0.999)
    """Decay of the two moments (adam, adamw, lamb; muon for what is no matrix)."""
    momentum: Annotated[Probability, WARNED] = 0.0
    """Momentum (sgd)."""
    muon_momentum: Annotated[Probability, WARNED] = 0.95
    """Nesterov's momentum of the matrices (muon)."""
    eps: Annotated[float, Field(gt=0), WARNED] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0), WARNED] = 0.0
    """Decay of matrices; biases, norms and the attention biases u, v are never decayed."""
    clip_norm: Annotated[float, Field(ge=0), WARNED] = 0.25
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Annotated[Schedule, WARNED] = "cosine"
    """Shape of the learning rate after the warm-up. cosine begins where the warm-up ends (NVIDIA, TensorFlow),
    cosine_from_start at step 0 (original PyTorch code); inverse_sqrt is Noam's; wsd (warm-up, stable, decay) stays at
    its peak and cools down in the last part of the run."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1), WARNED] = 0.2
    """Share of train.max_steps in which the rate of wsd falls, along a line, to min_lr."""
    warmup_steps: Annotated[Count, WARNED] = 0
    """Steps of linear warm-up from 0."""
    min_lr: Annotated[float, Field(ge=0), WARNED] = 0.0
    """What the learning rate falls to for cosine, linear and wsd, one step behind train.max_steps; a floor for
    inverse_sqrt."""
    ema_decay: Annotated[Probability, WARNED] = 0.0
    """Decay per step of an exponential average of the fp32 weights, kept beside them and saved with them; 0 keeps none.
    It begins with the weights behind the first update. `eval.use_ema` scores it, `txl export --ema` takes it."""

    @property
    def kind(self) -> OptimizerKind:
        """What `name` names."""
        return OPTIMIZERS[self.name]

    def state_bytes(self, *, of_matrices: bool = False) -> int:
        """What is kept per parameter besides the weights, in fp32; `of_matrices` of blocks some keep less."""
        own = self.kind.matrix_state_bytes if of_matrices else None
        return (self.kind.state_bytes(self) if own is None else own) + (4 if self.ema_decay else 0)


class TrainSection(Section):
    """Batch arithmetic and length of the run. All sizes are global."""

    num_lanes: Annotated[Lanes, WARNED] = 32
    """Rows of the global batch; each is one contiguous token stream. A run that continues with another number reads on
    where it was, each token once, with empty memories."""
    segment_len: Annotated[PositiveLen, WARNED] = 64
    """Tokens per lane and step (T)."""
    memory_len: Annotated[Len, WARNED] = 128
    """Tokens of memory per lane and layer (M); 0 switches recurrence off. A run that continues with a longer memory
    begins with its older part empty."""
    memory_lens: Annotated[tuple[Len, ...], WARNED] = ()
    """Tokens of memory of each layer, the first one first, memory_len the longest of them; empty: memory_len in each.
    Where another memory_len holds, in a phase or in evaluation, the longest layers have that, the others at most it."""
    initial_memory: Annotated[Literal["empty", "zeros"], WARNED] = "empty"
    """What a lane remembers before its first token. empty: nothing, which is masked. zeros: hidden states of 0 that are
    attended to, as Hugging Face and the TensorFlow code begin; evaluation begins so with `--zero-memory` only."""
    half_loss: Annotated[bool, WARNED] = False
    """Train on the recent half of each segment's targets only, ceil(segment_len / 2) of them, which have half a segment
    of context at least (the paper's ablations). The loss is per scored token; evaluation scores all."""
    microbatch_lanes: Annotated[Lanes, WARNED] = 16
    """Lanes that a rank runs at once; divides num_lanes / ranks."""
    max_steps: Annotated[PositiveInt, WARNED] = 1000
    """Optimizer steps in the whole run; the schedule ends here."""
    phases: Annotated[tuple[str, ...], WARNED] = ()
    """Parts of the run with other lengths, in order, each as "until=0.5 num_lanes=128 segment_len=16 memory_len=32",
    until that share of the steps. Behind the last the settings above hold; all steps have equally many tokens."""

    @property
    def scored_len(self) -> int:
        """Targets of a segment whose loss counts in training, the last ones."""
        return self.segment_len - self.segment_len // 2 if self.half_loss else self.segment_len

    def memory_per_layer(self, num_layers: int) -> tuple[int, ...]:
        """Tokens of memory of each layer."""
        return memory_of_layers(self.memory_len, self.memory_lens, num_layers=num_layers)


def memory_of_layers(memory_len: int, memory_lens: Sequence[int], *, num_layers: int) -> tuple[int, ...]:
    """Tokens of memory of each layer, where it is `memory_len` in the longest and `memory_lens` were trained."""
    longest = max(memory_lens, default=0)
    lens = memory_lens or (longest,) * num_layers
    return tuple(memory_len if length == longest else min(length, memory_len) for length in lens)


def _word_of(value: Any) -> Any:
    """Files of earlier versions say true or false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


class EngineSection(Section):
    """DeepSpeed and the hardware."""

    zero_stage: Annotated[int, Field(ge=0, le=3), WARNED] = 1
    """0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also parameters."""
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], WARNED] = "fp32"
    """Type of weights and activations in the step; fp16 and tf32 need a GPU. tf32 is fp32 but for its matrix products,
    made of operands with 10 bits behind the point (Ampere or later); its checkpoints are those of fp32."""
    offload_optimizer: Annotated[bool, WARNED] = False
    """Keep optimizer state in host memory (stages 1 to 3)."""
    offload_parameters: Annotated[bool, WARNED] = False
    """Keep parameters in host memory (stage 3)."""
    attention: Annotated[AttentionKernel, FREE] = "auto"
    """How attention with relative positions is computed. plain: the equation in plain torch. fused: one function with a
    hand-written backward, anywhere. triton: kernels for GPUs in half precision, also of what surrounds attention
    (residual sums, norms, activations, dropout). auto: the fastest that fits."""
    cuda_graph: Annotated[Literal["off", "on", "auto"], BeforeValidator(_word_of), FREE] = "off"
    """Record forward, loss and backward of a micro-batch once per shape and replay them: for models so small that the
    host is slower than the GPU (stages 0 to 2, without activation_checkpointing). auto: wherever that can be, which is
    never on a CPU. In a file true and false mean on and off."""
    activation_checkpointing: Annotated[bool, FREE] = False
    """Recompute blocks in the backward pass; bit-identical, slower, smaller."""
    recompute_every: Annotated[PositiveInt, FREE] = 1
    """With activation_checkpointing: recompute every so many-th block only, and keep the activations of the others."""
    check_memory: Annotated[bool, FREE] = True
    """Refuse at the start what is predicted not to fit into memory, with settings that would; False starts it."""
    num_threads: Annotated[int, Field(ge=0, le=1024), FREE] = 0
    """CPU threads per rank; 0 means cores // local ranks. OMP_NUM_THREADS, where set, wins over 0."""
    start_timeout_s: Annotated[Seconds, FREE] = 1800
    """Seconds without progress, up to the first finished step, after which the ranks are taken to hang: they name the
    one that is missing, write their stacks and end."""
    timeout_s: Annotated[Seconds, FREE] = 600
    """The same from the first finished step on; longer than the longest step, and than a segment of evaluation."""

    @property
    def is_replayable(self) -> bool:
        """Whether a micro-batch can be a CUDA graph: ZeRO-3 gathers weights within it, and blocks that are computed
        again ask for the generator's state."""
        return self.zero_stage < 3 and not self.activation_checkpointing

    def replays(self, *, on_gpu: bool) -> bool:
        """Whether micro-batches are CUDA graphs."""
        return self.cuda_graph == "on" or (self.cuda_graph == "auto" and on_gpu and self.is_replayable)

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """What numbers are stored in while the model computes."""
        return "fp32" if self.precision == "tf32" else self.precision


class EvalSection(Section):
    """Evaluation of the held-out split during and after training."""

    every_steps: Annotated[Count, FREE] = 0
    """Steps between evaluations; 0 means at the end only."""
    num_lanes: Annotated[Lanes, FREE] = 8
    """Stripes that the split is cut into; each starts with an empty memory, so fewer is more exact, more is faster."""
    segment_len: Annotated[Len, FREE] = 0
    """Tokens per lane and forward pass; 0 means train.segment_len."""
    memory_len: Annotated[int, Field(ge=-1, le=LONGEST), FREE] = -1
    """Tokens of memory; -1 means train.memory_len, 0 evaluates without memory."""
    overlap_len: Annotated[Len, FREE] = 0
    """Tokens before each segment that are run again, not scored, as context for models without memory (the original's
    ext_len); only with a memory of 0."""
    max_tokens: Annotated[int, Field(ge=0, le=10**15), FREE] = 0
    """Score only the first so many tokens of the split, which gives no bits per byte; 0 means all."""
    use_ema: Annotated[bool, FREE] = False
    """While training, score the average of the weights in place of the weights; needs optim.ema_decay."""
    accuracy: Annotated[bool, FREE] = False
    """Also tell the share of tokens whose most probable token is the target, which costs a second softmax."""


class CheckpointSection(Section):
    """Saving."""

    every_steps: Annotated[Count, FREE] = 500
    """Steps between checkpoints; 0 means at the end only. The end is always saved."""
    every_minutes: Annotated[float, Field(ge=0, le=10**6), FREE] = 0.0
    """Minutes from one checkpoint to the next, by the clock of rank 0; 0 means by steps only. With every_steps both
    hold, and each checkpoint starts the minutes again."""
    keep_last: Annotated[PositiveInt, FREE] = 3
    """Committed checkpoints to keep; older ones are removed after a new one is committed."""
    keep_every: Annotated[Count, FREE] = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none besides."""
    keep_best: Annotated[bool, FREE] = False
    """Also save after each evaluation that is the best so far, and keep that checkpoint."""
    asynchronous: Annotated[bool, FREE] = True
    """Write behind the training: a step waits only for a copy into host memory, as large as the checkpoint."""


class GuardSection(Section):
    """What to do when numbers go wrong."""

    max_consecutive_skips: Annotated[PositiveInt, FREE] = 20
    """Steps in a row whose loss or gradient is not finite, each skipped on all ranks, after which the run stops."""
    max_skipped_per_1000: Annotated[PositiveInt, FREE] = 50
    """The same for skipped steps among the last 1,000."""
    spike_sigma: Annotated[float, Field(ge=0), FREE] = 8.0
    """A loss or gradient norm is a spike when its logarithm lies more than so many robust standard deviations, of at
    least 2 %, above the median of the steps before it; 0 looks for none."""
    spike_window: Annotated[int, Field(gt=0, le=10**6), FREE] = 128
    """Steps that median and deviation are taken over; no spike is seen before half of them are there."""
    on_spike: Annotated[Literal["report", "rewind"], FREE] = "report"
    """report: log it and go on. rewind: go back to the last checkpoint and leave out the tokens of the spike."""
    spike_patience: Annotated[PositiveInt, FREE] = 3
    """Spikes in a row that make a rewind."""
    max_rewinds: Annotated[Count, FREE] = 5
    """Rewinds after which the run stops."""
    check_replicas_every_steps: Annotated[Count, FREE] = 0
    """Steps between comparisons of the parameters that all ranks hold, which find silent corruption; 0 means none."""


class MetricsSection(Section):
    """What is reported, and how often."""

    log_every_steps: Annotated[PositiveInt, FREE] = 10
    """Steps between log lines; a metric is the mean over these steps. The device is synchronised only then."""
    tensorboard: Annotated[bool, FREE] = True
    """Write TensorBoard event files beside metrics.jsonl."""
    wandb: Annotated[str, FREE] = ""
    """Project at Weights & Biases that gets the same records (pip install "txl_dist[wandb]"); empty sends nothing."""
    wandb_entity: Annotated[str, FREE] = ""
    """User or team at Weights & Biases that owns the run; empty means the default of the account."""
    wandb_name: Annotated[str, FREE] = ""
    """Name of the run there; empty means the name of the run directory."""
    wandb_group: Annotated[str, FREE] = ""
    """Group that the run belongs to there; empty means none."""
    wandb_tags: Annotated[tuple[str, ...], FREE] = ()
    """Tags of the run there, of 1 to 64 characters each."""
    wandb_id: Annotated[str, FREE] = ""
    """Id of the run there, to resume one or to choose it; empty makes one of the path of the run directory, so that a
    resumed run is the same run there."""
    wandb_resume: Annotated[Literal["allow", "must", "never"], FREE] = "allow"
    """allow: resume the run with this id there, or start it. must: it has to exist. never: it must not exist."""
    accuracy_every_steps: Annotated[Count, FREE] = 0
    """Steps between measurements of the share of the step's targets (with train.half_loss those that it scores) that
    are the most probable token, by one more pass over them without dropout; 0 makes none. For held-out text see
    eval.accuracy."""
    norms_every_steps: Annotated[Count, FREE] = 0
    """Steps between records of the norms of each layer's gradients (before clipping) and weights, and of the root mean
    square of what it gives to the next, by one more pass without dropout; 0 makes none."""
    sample_every_steps: Annotated[Count, FREE] = 0
    """Steps between texts that the model writes, into the log, metrics.jsonl and TensorBoard; 0 means none."""
    sample_prompt: Annotated[str, FREE] = ""
    """What these texts continue; empty begins a document."""
    sample_len: Annotated[PositiveLen, FREE] = 64
    """Tokens of such a text."""
    peak_tflops: Annotated[float, Field(ge=0, le=1e9), FREE] = 0.0
    """Peak of one device in 1e12 operations per second at engine.precision, of which MFU is the share in use. 0 takes
    it by the device's name; where that is not known, as for a CPU, no MFU is reported."""
