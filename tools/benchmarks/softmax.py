"""Compare our adaptive softmax with others: `python -m tools.benchmarks.softmax --peer-original DIR [--peer-nvidia
DIR]`.

The sizes are 1,024 tokens, model width 256 and 60,000 words with cutoffs at 10,000, 20,000 and 40,000. Targets follow
Zipf's law. Everything runs in fp32 on one thread. Each variant computes the mean loss and all gradients: of the hidden
states, of the table and its bias, and of the weight and bias of the columns for clusters. All variants have the same
weights and begin each round without gradients.

    original   the authors' module
    nvidia     NVIDIA's module
    torch      torch.nn.AdaptiveLogSoftmaxWithLoss without its projections to narrower tails; it has no biases in tails
               and cannot tie weights
    chunked    F.linear_cross_entropy per cluster, if this torch has it
    plain      the sum of our losses, with gradients from autograd
    fused      our fused function; the rows of each cluster are padded as for a CPU
    padded     our fused function; the rows of each cluster are padded as for a GPU

`--count` runs nothing. It counts, with tensors without storage, the bytes per logit that a GPU would move in bf16,
without the reads of products. It prints them for torch's operations and for the Triton kernel.

The table shows times, peaks of memory, and the differences of loss and gradients from the first variant's, relative to
their norm. Each option `--peer-*` names the folder `pytorch` of the other code. Without these options our plain losses
are the baseline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.benchmarks import measuring, peers
from txl_dist.config.schema import ModelSection
from txl_dist.model import fused_softmax
from txl_dist.model.adaptive_embedding import ROWS_MULTIPLE, AdaptiveEmbedding
from txl_dist.model.adaptive_softmax import AdaptiveSoftmax
from txl_dist.vocabulary_clusters import ClusterRows, partition_by_cluster

WIDTH, VOCAB_SIZE, CUTOFFS = 256, 60_000, (10_000, 20_000, 40_000)
EDGES = (0, *CUTOFFS, VOCAB_SIZE)
SHAPE = (8, 128)
NUM_TOKENS = SHAPE[0] * SHAPE[1]
TOLERANCE = 1e-5
"""Largest allowed difference of losses and gradients between variants, relative to their norm."""


class Given(NamedTuple):
    """Inputs and weights from which all variants start."""

    hidden_SD: Tensor
    targets_S: Tensor
    weight_VD: Tensor
    cluster_weight_CD: Tensor
    """Weights of the columns for tail clusters. Row i - 1 belongs to tail i."""


class Variant(NamedTuple):
    """A variant of the softmax that is measured."""

    loss: Callable[[Tensor], Tensor]
    """Computes the mean loss in nats from the hidden states."""
    gradients: Callable[[], list[Tensor]]
    """Returns the gradients of the table and of the columns for clusters, in our order, after a backward pass."""
    module: nn.Module


def given() -> Given:
    """Return inputs and weights, which are the same in every process."""
    generator = torch.Generator().manual_seed(0)
    hidden_SD = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    weight_VD = torch.randn(VOCAB_SIZE, WIDTH, generator=generator) * 0.05
    cluster_weight_CD = torch.randn(len(CUTOFFS), WIDTH, generator=generator) * 0.05
    share_V = 1 / np.arange(1, VOCAB_SIZE + 1)
    ids = np.random.default_rng(0).choice(VOCAB_SIZE, NUM_TOKENS, p=share_V / share_V.sum())
    return Given(hidden_SD, torch.from_numpy(ids), weight_VD, cluster_weight_CD)


def peer(module: Any, data: Given, *, weight: Tensor, bias: Tensor) -> Variant:
    """Build the original's or NVIDIA's variant, with its table and bias. Cluster i of their code uses column -i of the
    head."""
    with torch.no_grad():
        weight.copy_(data.weight_VD)
        bias.zero_()
        module.cluster_weight.copy_(data.cluster_weight_CD.flip(0))
    return Variant(
        lambda hidden_SD: module(hidden_SD, data.targets_S).mean(),
        lambda: [cast(Tensor, weight.grad), module.cluster_weight.grad.flip(0)],
        module,
    )


def torchs(data: Given) -> Variant:
    """Build the variant of torch's module, which has no biases in tails."""
    module: Any = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB_SIZE, list(CUTOFFS), div_value=1.0, head_bias=True)
    with torch.no_grad():
        module.head.weight.copy_(torch.cat([data.weight_VD[: CUTOFFS[0]], data.cluster_weight_CD]))
        module.head.bias.zero_()
        for i, tail in enumerate(module.tail, start=1):
            tail[0] = nn.Identity()
            tail[1].weight.copy_(data.weight_VD[EDGES[i] : EDGES[i + 1]])

    def gradients() -> list[Tensor]:
        head, clusters = module.head.weight.grad.split([CUTOFFS[0], len(CUTOFFS)])
        return [torch.cat([head, *(tail[1].weight.grad for tail in module.tail)]), clusters]

    return Variant(lambda hidden_SD: module(hidden_SD, data.targets_S).loss, gradients, module)


def ours(data: Given, *, fused: bool, multiple: int) -> Variant:
    """Build our variant. The rows of each cluster are padded to a multiple of `multiple`."""
    sizes: dict[str, Any] = {"num_layers": 1, "width": WIDTH, "num_heads": 4, "head_width": 64, "ff_width": WIDTH}
    section = ModelSection.model_validate({**sizes, "cutoffs": CUTOFFS})
    embedding = AdaptiveEmbedding(section, vocab_size=VOCAB_SIZE)
    module: Any = AdaptiveSoftmax(section, vocab_size=VOCAB_SIZE, embedding=embedding)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.weight_0.copy_(data.weight_VD)
        module.cluster_weight.copy_(data.cluster_weight_CD)
    clusters = partition_by_cluster(data.targets_S.numpy(), edges=EDGES, multiple=multiple)
    partition = [ClusterRows(*map(torch.from_numpy, cluster)) for cluster in clusters]
    targets_BT, weight_BT = data.targets_S.view(SHAPE), torch.full(SHAPE, 1 / NUM_TOKENS)

    def loss(hidden_SD: Tensor) -> Tensor:
        hidden_BTD = hidden_SD.view(*SHAPE, WIDTH)
        if fused:
            return cast(Tensor, module(hidden_BTD, targets_BT, partition=partition, weight_BT=weight_BT))
        losses: Tensor = module(hidden_BTD, targets_BT, partition=partition)
        return (losses * weight_BT).sum()

    return Variant(loss, lambda: [module.weight_0.grad, module.cluster_weight.grad], module)


def chunked(data: Given) -> Variant:
    """Build the variant with torch's linear_cross_entropy, one call per cluster."""
    table, bias_V = nn.Parameter(data.weight_VD.clone()), nn.Parameter(torch.zeros(VOCAB_SIZE))
    clusters, cluster_bias = nn.Parameter(data.cluster_weight_CD.clone()), nn.Parameter(torch.zeros(len(CUTOFFS)))
    targets_S, shortlist_size = data.targets_S, CUTOFFS[0]
    rows = [((targets_S >= EDGES[i]) & (targets_S < EDGES[i + 1])).nonzero()[:, 0] for i in range(len(EDGES) - 1)]
    columns_S = targets_S.clone()
    for i in range(1, len(rows)):
        columns_S[rows[i]] = shortlist_size - 1 + i

    def loss(hidden_SD: Tensor) -> Tensor:
        weight = torch.cat([table[:shortlist_size], clusters])
        bias = torch.cat([bias_V[:shortlist_size], cluster_bias])
        settings: dict[str, Any] = {"reduction": "sum", "options": nn.LinearCrossEntropyOptions()}
        total = F.linear_cross_entropy(hidden_SD, weight, columns_S, linear_bias=bias, **settings)
        for i in range(1, len(rows)):
            part = slice(EDGES[i], EDGES[i + 1])
            total = total + F.linear_cross_entropy(
                hidden_SD[rows[i]],
                table[part],
                targets_S[rows[i]] - EDGES[i],
                linear_bias=bias_V[part],
                **settings,
            )
        return total / NUM_TOKENS

    parameters = nn.ParameterList([table, bias_V, clusters, cluster_bias])
    return Variant(loss, lambda: [cast(Tensor, table.grad), cast(Tensor, clusters.grad)], parameters)


def build(name: str, data: Given, arguments: argparse.Namespace) -> Variant:
    """Build a variant by its name."""
    sizes = (VOCAB_SIZE, WIDTH, WIDTH, list(CUTOFFS))
    if name == "original":
        module = peers.original(arguments.peer_original).softmax.ProjectedAdaptiveLogSoftmax(*sizes)
        return peer(module, data, weight=module.out_layers[0].weight, bias=module.out_layers[0].bias)
    if name == "nvidia":
        code = peers.nvidia(arguments.peer_nvidia).softmax
        no_projections = {"tie_projs": [False] + [True] * len(CUTOFFS), "out_projs": []}
        module = code.ProjectedAdaptiveLogSoftmax(*sizes, **no_projections)
        return peer(module, data, weight=module.out_layers_weights[0], bias=module.out_layers_biases[0])
    if name == "torch":
        return torchs(data)
    if name == "chunked":
        return chunked(data)
    return ours(data, fused=name != "plain", multiple=ROWS_MULTIPLE["cuda" if name == "padded" else "cpu"])


def names(arguments: argparse.Namespace) -> list[str]:
    """Return the variants that can be measured on this machine, the baseline first."""
    theirs = [name for name in ("original", "nvidia") if getattr(arguments, f"peer_{name}") is not None]
    has_chunked = hasattr(F, "linear_cross_entropy")
    return [*theirs, "plain", "fused", "padded", "torch", *(["chunked"] if has_chunked else [])]


def step(variant: Variant, data: Given) -> tuple[Tensor, list[Tensor]]:
    """Compute one loss and all gradients."""
    variant.module.zero_grad()
    hidden_SD = data.hidden_SD.clone().requires_grad_()
    loss = variant.loss(hidden_SD)
    loss.backward()
    assert hidden_SD.grad is not None
    return loss.detach(), [hidden_SD.grad, *variant.gradients()]


def disagreement(results: dict[str, tuple[Tensor, list[Tensor]]], name: str, *, base: str) -> dict[str, object]:
    """Return the relative differences of loss and gradients from the baseline's. For gradients it is the largest
    one."""
    (loss, gradients), (base_loss, base_gradients) = results[name], results[base]
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, base_gradients, strict=True))
    return {"loss off by": float((loss - base_loss).abs() / base_loss), "gradient off by": worst}


class LogitBytes(TorchDispatchMode):
    """A context that counts the bytes of all tensors of a chunk's shape that operations read or write."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.moved = shape, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation: Callable[..., Any] = func
        result = operation(*args, **(kwargs or {}))
        name, written = func._schema.name.removeprefix("aten::"), self._bytes(result)
        if name in ("mm", "addmm"):
            # If the product's output is not contiguous, the bias is copied there first and read again.
            self.moved += written * (3 if written and name == "addmm" and not result.is_contiguous() else 1)
        elif not func.is_view and name not in ("gather", "scatter_"):
            self.moved += self._bytes(args[1:] if name == "copy_" else args) + written
        return result

    def _bytes(self, tree: object) -> int:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tensor.shape == self.shape)

    def kernel(self, logits_cV: Tensor, bias: Tensor, targets_c: Tensor, share_c: Tensor) -> Tensor:
        """Count the bytes of the Triton kernel, which reads each logit twice and writes it once."""
        self.moved += 3 * logits_cV.nbytes
        return torch.empty_like(share_c)


def bytes_per_logit(*, by_kernel: bool, num_columns: int = 20_003) -> float:
    """Return the bytes moved per logit by a softmax in one chunk, forward and backward, with the bias and its
    gradient."""
    num_rows, width = fused_softmax.CHUNK_ROWS["cpu"], 64
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    weight_VE, bias_V = torch.empty(num_columns, width, **options), torch.empty(num_columns, **options)
    targets_R, weight_S = torch.empty(num_rows, dtype=torch.int64, device="meta"), torch.empty(num_rows, device="meta")
    cluster = fused_softmax.Cluster(
        None, targets_R, (fused_softmax.Columns(weight_VE, bias_V, 0, num_columns),), projection_DE=None
    )
    count = LogitBytes((num_rows, num_columns))
    patched: dict[str, Any] = {"runs_kernel": lambda hidden_SD: by_kernel, "_into_gradient_by_kernel": count.kernel}
    patched["_multiply_unless_one"] = lambda gradient, factor: None  # no gradient here has the size of the logits
    patched["CACHED_LOGITS"] = {"cpu": num_rows * num_columns}  # all rows at once, as on a GPU
    with mock.patch.multiple(fused_softmax, **patched), count:
        fused_softmax.fused_linear_cross_entropy(
            torch.empty(num_rows, width, **options), [cluster], weight_S=weight_S
        ).backward()
    return count.moved / (num_rows * num_columns)


def main() -> None:
    """Measure all variants and print the table. Exit with code 1 if a loss or a gradient differs by more than the
    tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-original", type=Path, default=None, metavar="DIR")
    parser.add_argument("--peer-nvidia", type=Path, default=None, metavar="DIR")
    measuring.add_measure_options(parser)
    parser.add_argument("--count", action="store_true", help="count the bytes per logit without running anything")
    arguments = parser.parse_args()
    if arguments.count:
        ways = {"operations of torch": False, "Triton kernel": True}
        table = [{"by": way, "bytes per logit": bytes_per_logit(by_kernel=kernel)} for way, kernel in ways.items()]
        measuring.print_table("one chunk's softmax in bf16, besides what products read", table)
        return
    torch.set_num_threads(1)
    data = given()
    chosen = names(arguments) if arguments.only is None else [arguments.only]
    if arguments.measure == "memory":
        variant = build(chosen[0], data, arguments)
        measuring.print_peak(measuring.peak_mib(lambda: step(variant, data)))
        return
    variants = {name: build(name, data, arguments) for name in chosen}
    base = chosen[0]
    results = {name: step(variant, data) for name, variant in variants.items()}
    agreement = {name: disagreement(results, name, base=base) for name in variants}
    results.clear()
    for variant in variants.values():
        variant.module.zero_grad()

    def run(variant: Variant) -> None:
        step(variant, data)
        variant.module.zero_grad()

    actions = {name: lambda variant=variant: run(variant) for name, variant in variants.items()}
    timings = measuring.interleaved(actions, rounds=arguments.rounds)
    peaks = {name: measuring.peak_in_fresh_process(name) for name in variants}
    table = measuring.rows(timings, base=base, peaks=peaks, more=agreement)
    title = f"adaptive softmax, {NUM_TOKENS:,} tokens, width {WIDTH}, {VOCAB_SIZE:,} words, speed-up over {base}"
    measuring.print_table(title, table)
    if arguments.json is not None:
        measuring.write_json(arguments.json, {title: table})
    if max(max(float(str(value)) for value in one.values()) for one in agreement.values()) > TOLERANCE:
        sys.exit(f"losses or gradients of two variants differ by more than {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
