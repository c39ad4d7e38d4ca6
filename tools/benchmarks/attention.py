"""Compare the time and memory of our layers and our attention with those of other codes.

    python -m tools.benchmarks.attention --peer-original DIR [--peer-nvidia DIR]

Two stacks of layers run forward and backward, in fp32 on one thread, with a full memory and without dropout. Stack A is
short and narrow, and stack B is long:

    A   4 layers, width 256, 4 heads of 64, feed-forward 1,024, segment = memory = 128, batch 8
    B   2 layers, width 512, 8 heads of 64, feed-forward 2,048, segment = memory = 512, batch 2

    original   the authors' RelPartialLearnableDecoderLayer
    nvidia     NVIDIA's layer of the same name
    plain      our `Block` with `engine.attention = "plain"`
    fused      our `Block` with `engine.attention = "fused"`

All variants have the same weights and inputs. Each round computes the outputs and the gradients of the input, of all
weights and of the biases u and v. The table shows times and peaks of memory. It also shows the distance of outputs and
gradients from the first variant's, relative to their norm, and the operations that torch counts, as a multiple of the
operations that `model/flops.py` computes. A second table shows attention alone, in the shapes of one layer of the
stack.

Two more tables show the Triton kernels for a micro-batch of each recipe in bf16. `--launches` runs nothing. It counts
the kernels that one layer would launch, forward and backward, how often the programs of each kernel fill the 132
multiprocessors of an H100, and the bytes of scores that are moved per token. `--buffers` needs a GPU. It prints the
milliseconds of a layer's attention for each size of the score buffer, replayed as CUDA graphs.

Each option `--peer-*` names the folder `pytorch` of the other code. Without these options our plain layers are the
baseline.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tools.benchmarks import measuring, peers
from txl_dist.config.load import load_config
from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.convert.key_mapping import from_original, to_original
from txl_dist.model.block import Block
from txl_dist.model.flops import flops_by_part
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.kernels import attention_launch
from txl_dist.model.memory import AttentionMask, Memory, build_mask
from txl_dist.model.positions import attention_biases, distance_encoding
from txl_dist.model.relative_attention import Terms, relative_attention

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = {
    "enwik8_base": 22,
    "enwik8_large": None,
    "wt103_base": None,
    "nvidia_wt103_base": None,
    "wt103_large": None,
}
"""Recipes that --launches and --buffers read, with the number of lanes (batch rows) of a micro-batch. None means the
recipe's own number."""
PASSES = 8
"""Number of passes over the visible attention scores in one step. The forward pass writes and reads the scores. The
backward pass writes them, reads and writes them again, and then reads them three times."""
TOLERANCE = 1e-5
"""Largest allowed difference of outputs and gradients between variants, relative to their norm."""


class Size(NamedTuple):
    """Sizes of a stack of layers: the model's settings, segment length T, memory length M (tokens), and B lanes (batch
    rows)."""

    model: ModelSection
    T: int
    M: int
    B: int


def _size(num_layers: int, width: int, length: int, lanes: int) -> Size:
    model = ModelSection(
        num_layers=num_layers,
        width=width,
        num_heads=width // 64,
        head_width=64,
        ff_width=4 * width,
        dropout=0.0,
    )
    return Size(model, length, length, lanes)


SIZES = {"A": _size(4, 256, 128, 8), "B": _size(2, 512, 512, 2)}
TINY = {"tiny": _size(1, 64, 8, 2)}


class Given(NamedTuple):
    """Inputs and weights from which all variants start. Tensors have the batch dimension first."""

    hidden_BTD: Tensor
    memory: Memory
    d_output_BTD: Tensor
    weights: dict[str, Tensor]
    """Weights by the names of the original code."""


class PeerStack(nn.Module):
    """Layers of another code, with the time dimension first. The names in its state are those of that code's whole
    model."""

    def __init__(self, peer: peers.Peer, size: Size, *, mask_TK1: Tensor) -> None:
        super().__init__()
        model, shape = size.model, (size.model.num_heads, size.model.head_width)
        self.layers = nn.ModuleList(
            peer.model.RelPartialLearnableDecoderLayer(
                model.num_heads,
                model.width,
                model.head_width,
                model.ff_width,
                0.0,
                dropatt=0.0,
                pre_lnorm=False,
                tgt_len=size.T,
                ext_len=0,
                mem_len=size.M,
            )
            for _ in range(model.num_layers)
        )
        self.positions = peer.model.PositionalEmbedding(model.width)
        self.r_w_bias, self.r_r_bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.mask_TK1 = mask_TK1

    def forward(self, hidden_TBD: Tensor, memory_LMBD: Tensor) -> Tensor:
        """Return the output of the last layer, [T, B, D]."""
        encoding = self.positions(torch.arange(self.mask_TK1.shape[1] - 1, -1, -1.0))
        for layer, memory_MBD in zip(self.layers, memory_LMBD, strict=True):
            hidden_TBD = layer(
                hidden_TBD, encoding, self.r_w_bias, self.r_r_bias, dec_attn_mask=self.mask_TK1, mems=memory_MBD
            )
        return hidden_TBD


class OurStack(nn.Module):
    """Our blocks, run as `TransformerXL` runs them."""

    def __init__(self, model: ModelSection, *, kernel: AttentionKernel) -> None:
        super().__init__()
        biases = attention_biases(model.num_heads, model.head_width)
        self.blocks = nn.ModuleList(Block(model, biases=biases, kernel=kernel) for _ in range(model.num_layers))

    def forward(self, hidden_BTD: Tensor, memory: Memory) -> Tensor:
        """Return the output of the last block, [B, T, D]."""
        visible = build_mask(memory, torch.zeros(hidden_BTD.shape[:2], dtype=torch.int64))
        D = hidden_BTD.shape[-1]
        encoding_KD = distance_encoding(visible.num_keys, width=D, clamp_len=0, like=hidden_BTD)
        for block, memory_BMD in zip(self.blocks, memory.hidden, strict=True):
            hidden_BTD, _ = block(hidden_BTD, memory_BMD, encoding_KD, visible)
        return hidden_BTD


class Variant(NamedTuple):
    """A stack of layers, its inputs in the layout that it expects, and functions that convert its results for
    comparison."""

    module: nn.Module
    hidden: Tensor
    memory: Any
    d_output: Tensor
    batch_first: Callable[[Tensor], Tensor]
    named: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """Converts a dictionary of weights or gradients from the stack's names to the names of the original code."""

    def step(self) -> Tensor:
        """Run forward and backward, and return the output. The gradients stay in the stack's parameters."""
        self.module.zero_grad()
        self.hidden.grad = None
        output: Tensor = self.module(self.hidden, self.memory)
        output.backward(self.d_output)
        return output

    def results(self) -> dict[str, Tensor]:
        """Return the output and all gradients, batch first, by the names of the original code."""
        output = self.step()
        gradients = {name: cast(Tensor, weight.grad) for name, weight in self.module.named_parameters()}
        of_input = self.batch_first(cast(Tensor, self.hidden.grad))
        return {"output": self.batch_first(output.detach()), "input": of_input, **self.named(gradients)}


def given(size: Size) -> Given:
    """Return random inputs and weights from a fixed seed. The weights are as large as those of a trained model."""
    torch.manual_seed(0)
    (model, T, M, B), D = size, size.model.width
    ours = OurStack(model, kernel="plain")
    for weight in ours.parameters():
        nn.init.normal_(weight, std=0.02) if weight.dim() == 2 else nn.init.normal_(weight, mean=0.5, std=0.1)
    memory = Memory(torch.randn(model.num_layers, B, M, D).unbind(), torch.zeros(B, M, dtype=torch.int64))
    weights = to_original(ours.state_dict(), model)
    return Given(torch.randn(B, T, D), memory, torch.randn(B, T, D), weights)


def build(name: str, size: Size, arguments: argparse.Namespace) -> Variant:
    """Build a variant. All variants have the same weights and inputs."""
    data = given(size)
    if name in ("plain", "fused"):
        module = OurStack(size.model, kernel=cast(AttentionKernel, name))
        module.load_state_dict(from_original(data.weights, size.model), strict=False)
        hidden = data.hidden_BTD.requires_grad_()
        return Variant(
            module, hidden, data.memory, data.d_output_BTD, lambda x: x, lambda own: to_original(own, size.model)
        )
    mask_TK = torch.ones(size.T, size.M + size.T).triu(1 + size.M).bool()
    if name == "original":
        stack = PeerStack(peers.original(arguments.peer_original), size, mask_TK1=mask_TK[:, :, None])
    else:
        stack = PeerStack(peers.nvidia(arguments.peer_nvidia), size, mask_TK1=mask_TK)
    stack.load_state_dict(data.weights, strict=False)
    hidden = data.hidden_BTD.transpose(0, 1).contiguous().requires_grad_()
    memory_LMBD = torch.stack(data.memory.hidden).transpose(1, 2).contiguous()
    d_output_TBD = data.d_output_BTD.transpose(0, 1).contiguous()
    return Variant(stack, hidden, memory_LMBD, d_output_TBD, lambda x: x.transpose(0, 1), lambda own: own)


def names(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the variants whose code is available, the baseline first."""
    theirs = [name for name in ("original", "nvidia") if getattr(arguments, f"peer_{name}") is not None]
    return [*theirs, "plain", "fused"]


def off_by(results: dict[str, Tensor], base: dict[str, Tensor]) -> float:
    """Return the largest distance of an output or gradient from the baseline's, relative to the baseline's norm."""
    return max(float((results[name] - expected).norm() / expected.norm()) for name, expected in base.items())


def counted_flops(action: Callable[[], object], size: Size) -> float:
    """Return the operations that torch counts during `action`, as a multiple of the number that `model/flops.py`
    computes."""
    parts = flops_by_part(
        size.model,
        vocab_size=1,
        segment_len=size.T,
        memory_lens=[size.M] * size.model.num_layers,
        microbatch_lanes=size.B,
    )
    needed = size.B * size.T * sum(parts[name] for name in ("linear", "memory", "distances", "scores", "shift"))
    with FlopCounterMode(display=False) as counter:
        action()
    return float(counter.get_total_flops() / needed)


def _stack_flags(key: str) -> list[str]:
    """Return the flags that name the stack to a child process. A tiny stack needs none, because the child also gets
    --tiny."""
    return [] if key in TINY else ["--stack", key]


def measure_stack(key: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all variants of a stack and return the rows of its table."""
    size = (SIZES | TINY)[key]
    variants = {name: build(name, size, arguments) for name in names(arguments)}
    base = next(iter(variants))
    expected = variants[base].results()
    more = {
        name: {"off by": off_by(variant.results(), expected), "FLOPs of formula": counted_flops(variant.step, size)}
        for name, variant in variants.items()
    }
    timings = measuring.interleaved({name: v.step for name, v in variants.items()}, rounds=arguments.rounds)
    peaks = {name: measuring.peak_in_fresh_process(name, arguments=_stack_flags(key)) for name in variants}
    return measuring.rows(timings, base=base, peaks=peaks, more=more)


def measure_attention(key: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure attention alone, without the projections, and return the rows of its table."""
    model, T, M, B = (SIZES | TINY)[key]
    N, H = model.num_heads, model.head_width
    torch.manual_seed(0)
    query = torch.randn(B, T, N, H, requires_grad=True)
    # The memory layout is head-major, as in `Block`.
    key_, value = (torch.randn(N, B, M + T, H).permute(1, 2, 0, 3).requires_grad_() for _ in range(2))
    distance = torch.randn(M + T, N, H, requires_grad=True)
    u, v = (torch.randn(N, H, requires_grad=True) for _ in range(2))
    document_BK = torch.zeros(B, M + T, dtype=torch.int64)
    visible = AttentionMask(document_BK[:, M:], document_BK, None)
    d_context = torch.randn(B, T, N, H)

    def step(attend: Callable[..., Tensor]) -> dict[str, Tensor]:
        context = attend(Terms(query, key_, value, distance, u, v), visible=visible)
        gradients = torch.autograd.grad(context, [query, key_, value, distance, u, v], d_context)
        return {"context": context.detach()} | {str(place): gradient for place, gradient in enumerate(gradients)}

    functions = {"plain": relative_attention, "fused": fused_relative_attention}
    more = {"fused": {"off by": off_by(step(functions["fused"]), step(functions["plain"]))}, "plain": {"off by": 0.0}}
    actions = {name: lambda attend=attend: step(attend) for name, attend in functions.items()}
    return measuring.rows(measuring.interleaved(actions, rounds=arguments.rounds), base="plain", more=more)


def recipe_sizes() -> dict[str, attention_launch.Sizes]:
    """Return the sizes of attention in a micro-batch of each recipe."""
    found = {}
    for recipe, lanes in RECIPES.items():
        config = load_config(CONFIGS / f"{recipe}.toml")
        found[recipe] = attention_launch.Sizes.of(
            config.model, config.train, lanes=lanes or config.train.microbatch_lanes
        )
    return found


def launch_table(buffer_mib: float) -> list[dict[str, object]]:
    """Return a row per recipe with the number of launches. For each kernel the row has the smallest number of waves of
    its launches (a wave fills all multiprocessors once)."""
    attention_launch.SCORE_BUFFER_BYTES = int(buffer_mib * 2**20)
    table = []
    for recipe, sizes in recipe_sizes().items():
        planned = [one for backward in (False, True) for one in attention_launch.launches(sizes, backward=backward)]
        fewest: dict[str, float] = {}
        for one in planned:
            fewest[one.kernel] = min(one.waves, fewest.get(one.kernel, math.inf))
        seen = sizes.N * (sizes.K - sizes.T + (sizes.T + 1) / 2)
        row: dict[str, object] = {"recipe": recipe, "lanes": sizes.B, "launches": len(planned)}
        table.append(
            row
            | {"KB of scores a token": seen * PASSES * sizes.value_bytes / 1000}
            | {kernel.replace("_", " "): least for kernel, least in fewest.items()}
        )
    return table


def buffer_table(recipe: str, buffers_mib: list[float], *, rounds: int) -> list[dict[str, object]]:
    """Measure a layer's attention with all gradients on a GPU, and return a row for each size of the score buffer in
    MiB."""
    B, T, K, N, H, *_ = sizes = recipe_sizes()[recipe]
    shapes = [(B, T, N, H), (B, K, 2, N, H), (K, N, H), (N, H), (N, H)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    query, key_value, distance, u, v = leaves
    document_BK = torch.zeros(B, K, dtype=torch.int64, device="cuda")
    visible = AttentionMask(document_BK[:, K - T :], document_BK, None)
    d_context = torch.randn(B, T, N, H, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        key, value = key_value.unbind(2)
        terms = Terms(query, key, value, distance, u, v)
        torch.autograd.grad(attention_launch.triton_relative_attention(terms, visible=visible), leaves, d_context)

    graphs, more = {}, {}
    for mib in buffers_mib:
        attention_launch.SCORE_BUFFER_BYTES = int(mib * 2**20)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()  # compiles, and allocates the buffers that must exist before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        name = f"{mib:g} MiB"
        graphs[name] = graph.replay
        planned = [one for backward in (False, True) for one in attention_launch.launches(sizes, backward=backward)]
        more[name] = {"launches": len(planned)}
    return measuring.rows(measuring.interleaved(graphs, rounds=rounds), base=next(iter(graphs)), more=more)


def main() -> None:
    """Measure and print the tables. Exit with code 1 if an output or a gradient differs by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-original", type=Path, default=None, metavar="DIR")
    parser.add_argument("--peer-nvidia", type=Path, default=None, metavar="DIR")
    parser.add_argument("--stack", choices=("A", "B", "all"), default="all")
    parser.add_argument("--tiny", action="store_true", help="use a tiny size that takes seconds, to try the program")
    measuring.add_measure_options(parser)
    parser.add_argument(
        "--launches", action="store_true", help="count the launches of the Triton kernels, without a GPU"
    )
    default = attention_launch.SCORE_BUFFER_BYTES / 2**20
    parser.add_argument(
        "--buffer-mib", type=float, default=default, help="size of the score buffer for --launches, in MiB"
    )
    parser.add_argument(
        "--buffers", type=float, nargs="+", metavar="MIB", help="sizes of the score buffer to measure on a GPU, in MiB"
    )
    arguments = parser.parse_args()
    if arguments.launches or arguments.buffers:
        tables = (
            {
                f"launches of a layer, waves of each kernel, {arguments.buffer_mib:g} MiB": launch_table(
                    arguments.buffer_mib
                )
            }
            if arguments.launches
            else {one: buffer_table(one, arguments.buffers, rounds=arguments.rounds) for one in RECIPES}
        )
        for title, table in tables.items():
            measuring.print_table(title, table)
        if arguments.json is not None:
            measuring.write_json(arguments.json, tables)
        return
    torch.set_num_threads(1)
    chosen = list(SIZES) if arguments.stack == "all" else [arguments.stack]
    stacks = list(TINY) if arguments.tiny else chosen
    if arguments.measure == "memory":
        variant = build(arguments.only, (SIZES | TINY)[stacks[0]], arguments)
        measuring.print_peak(measuring.peak_mib(variant.step))
        return
    tables = {}
    for key in measuring.announced(stacks, what="stack"):
        tables[f"stack {key}"] = measure_stack(key, arguments)
        tables[f"attention alone, as in stack {key}"] = measure_attention(key, arguments)
    for title, table in tables.items():
        measuring.print_table(title, table)
    if arguments.json is not None:
        measuring.write_json(arguments.json, tables)
    if any(cast(float, row["off by"]) > TOLERANCE for table in tables.values() for row in table):
        sys.exit(f"outputs or gradients of two variants differ by more than {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
