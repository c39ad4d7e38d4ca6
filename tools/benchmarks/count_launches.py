"""Count the launches and the moved bytes of a training step on a GPU, without a GPU.

    python -m tools.benchmarks.count_launches --json FILE --before FILE

The engine runs two steps of each recipe at its real sizes on a device that computes nothing (fake_gpu.py), and the
second step is counted. The table has a row per quantity:

    launches, micro-step    launches in forward and backward of one micro-batch. An operation that torch dispatches
                            counts as one launch, unless it is a view or makes an empty tensor. Padding and the
                            backward of slices and of layer norm count as two. An operation over a list of tensors
                            (`_foreach_*`, fused Adam) counts as many launches as CUDA needs, with at most 320 blocks
                            of 65,536 values in one launch.
    Triton                  those of the launches that are our kernels; `attention` counts only attention's kernels
    a layer                 difference between the recipe and the recipe with one layer less
    products, unaligned     matrix products of torch in which an operand's rows or columns do not begin at multiples of
                            16 bytes. Count them with `--pad-widths off` and on too, for the effect of that setting.
    update                  gradient norm, decision, clipping and optimizer; one GPU exchanges nothing
    bytes per parameter     bytes that the update moves; an operand counts once, or twice if it is changed in place
    bytes per table value   bytes of the vocabulary's tables and of their gradients that are moved after products and
                            look-ups have made the gradients: sums, scaling, exchange, norm and update. Only for a
                            vocabulary in clusters
    bytes per logit         bytes of logits that the softmax moves in forward and gradient
    MB a layer              bytes that attention moves: each operand once per kernel and call, and the score buffer at
                            each launch (`of these scores`); a small score buffer stays in the L2 cache
    waves                   smallest number of programs of a kernel, divided by the number that the 132
                            multiprocessors of an H100 hold at once. This number follows from the registers and the
                            shared memory of the kernel's machine code (sm_90), which is compiled here.
    graphs                  number of different shapes of micro-batches in --steps steps of random words by Zipf's
                            law, and with --text also of a text's words in order. Each shape needs its own CUDA graph.
                            `padded` is the share of rows that are padding.

Limitations: The program measures no times. An operand that a kernel reads twice counts once, except for the score
buffer. Libraries can launch more than one kernel for an operation (to split a product or to sort ids). The counts are
for bf16, the recipe's ZeRO stage and one GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tools.benchmarks.fake_gpu import MEMORY_BYTES, MULTIPROCESSORS, HopperDriver, fake_gpu
from tools.benchmarks.measuring import announced, print_table
from tools.benchmarks.trainers import Sizes, zipf_segments
from txl_dist.config.load import Config, load_config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.kernels.attention_launch import BACKWARD, FORWARD, SUM
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, batch_maker
from txl_dist.train.engine.zero import ZeroEngine, import_deepspeed
from txl_dist.train.footprint.fits import SURE, with_kept_scores

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {
    "enwik8_base": (204, 22),
    "enwik8_large": (204, 8),
    "wt103_base": (267_735, 60),
    "nvidia_wt103_base": (267_735, 32),
    "wt103_large": (267_735, 16),
}
"""Vocabulary size in tokens, and number of lanes (batch rows) of a micro-batch on one GPU, of each recipe."""

WRITTEN_BESIDES_READ = {
    ("key_value_gradients", "SCORES"),
    ("distance_query_gradients", "D_QUERY"),
    ("distance_gradients", "D_DISTANCE"),
    ("adam_step", "MASTERS"),
    ("adam_step", "MEANS"),
    ("adam_step", "SQUARES"),
}
"""Operands that a Triton kernel both reads and writes. They count as two passes."""
MOVES_NOTHING = {("multiply_unless_one", "VALUES")}
"""Operands that a Triton kernel does not read or write if the loss is not scaled: in bf16 and fp32, with one
micro-batch per step."""
MAKES_GRADIENTS = ("mm", "addmm", "embedding", "embedding_dense_backward")
"""Operations that make a gradient of a table, or read the table for the model."""
ATTENTION = {*FORWARD, *BACKWARD, SUM, "set_width"}
"""Names of the Triton kernels of attention."""
SELECTING = ("embedding", "index_select", "index", "gather", "scatter", "index_add", "index_put", "index_copy")
"""Operations that read or write only a part of their largest operand. The part is as large as the largest of the other
operands."""
IN_TWO = ("native_layer_norm_backward", "constant_pad_nd", "slice_backward", "select_backward")
"""Operations for which ATen launches two kernels: gradients of inputs and of weights, or zeros and a copy into them."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operations that are matrix products."""
BLOCKS, BLOCK_LEN, MOST_TENSORS = 320, 65_536, (110, 64, 48, 36, 30)
"""Limits of ATen's MultiTensorApply.cuh for one launch: blocks, values in a block, and tensors by number of lists."""


class Event(NamedTuple):
    """One operation or Triton kernel that ran on the device."""

    phase: str
    """`micro-step` or `update`."""
    region: str
    """`softmax` during the softmax's forward pass, otherwise empty."""
    name: str
    launches: int
    num_bytes: int
    num_logit_bytes: int
    programs: int
    """Number of programs of a Triton kernel. It is 0 for an operation of torch."""
    scores_bytes: int = 0
    table_bytes: int = 0
    """Bytes of the vocabulary's tables and their gradients. It is 0 for `MAKES_GRADIENTS`."""
    is_unaligned: bool = False
    """True for a product with an operand that is not aligned (`is_aligned`)."""


class Counter:
    """The `Recorder` of this program. It collects the events of the counted phases, and for each Triton kernel the
    arguments with which it is compiled."""

    def __init__(self) -> None:
        self.phase = self.region = ""
        self.events: list[Event] = []
        self.num_logits = 0
        self.logit_columns: set[int] = set()
        self.table_lens: set[int] = set()
        """Numbers of values of the vocabulary's tables, and of their clusters."""
        self.programs: dict[tuple[str, Any], list[int]] = defaultdict(list)
        self.kernels: dict[tuple[str, Any], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._logit_storages: set[int] = set()
        self._logit_lens: set[int] = set()

    def operation(self, function: Any, arguments: tuple[Any, ...], settings: dict[str, Any], result: Any) -> None:
        """Record an operation of torch. See `Recorder`."""
        if not self.phase or not (launches := launches_of(function, arguments)):
            return
        name = function._schema.name.removeprefix("aten::")
        if self.region == "softmax" and re.match("(add)?mm|bmm|_triton", name):
            self._note_logits(result)
        operands = list(operands_of(function, arguments, settings, result))
        logits = sum(count for tensor, count in operands if self._is_of_logits(tensor))
        moved = sum(count for _, count in operands)
        tables = sum(count for tensor, count in operands if tensor.numel() in self.table_lens)
        if name in MAKES_GRADIENTS:
            tables = 0
        is_unaligned = name in PRODUCTS and not all(is_aligned(tensor) for tensor, _ in operands if tensor.dim() > 1)
        event = Event(self.phase, self.region, name, launches, moved, logits, 0, 0, tables, is_unaligned)
        self.events.append(event)

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Record a launch of a Triton kernel. See `Recorder`."""
        if not self.phase:
            return
        name = kernel.fn.__name__
        names = [parameter.name for parameter in kernel.params]
        tensors = {
            n: [t for t in tree_leaves(x) if isinstance(t, Tensor)] for n, x in zip(names, arguments, strict=False)
        }
        operands = {n: found for n, found in tensors.items() if found and (name, n) not in MOVES_NOTHING}
        twice = {n for n in operands if (name, n) in WRITTEN_BESIDES_READ}
        sizes = {n: sum(map(span, found)) * (2 if n in twice else 1) for n, found in operands.items()}
        # A kernel of the softmax writes the gradients over the logits.
        logits = sum(2 * span(x) for found in operands.values() for x in found if self._is_of_logits(x))
        programs, scores = math.prod(grid), sizes.get("SCORES", 0)
        moved = sum(sizes.values())
        tables = sum(
            span(x) * (2 if n in twice else 1)
            for n, found in operands.items()
            for x in found
            if x.numel() in self.table_lens
        )
        self.events.append(Event(self.phase, self.region, name, 1, moved, logits, programs, scores, tables))
        key = (name, repr([described(x) for x in arguments]) + repr(sorted(settings.items(), key=str)))
        self.programs[key].append(programs)
        self.kernels[key] = (kernel, arguments, settings)

    def _note_logits(self, result: Any) -> None:
        """Remember the result of a product as logits if it has as many columns as a cluster has words."""
        if isinstance(result, Tensor) and result.shape[-1] in self.logit_columns:
            self.num_logits += result.numel()
            self._logit_storages.add(result.untyped_storage()._cdata)
            self._logit_lens |= {result.shape[0] * columns for columns in self.logit_columns}

    def _is_of_logits(self, tensor: Tensor) -> bool:
        if self.region != "softmax":
            return False
        is_copy = tensor.shape[-1:].numel() in self.logit_columns and tensor.numel() in self._logit_lens
        return is_copy or tensor.untyped_storage()._cdata in self._logit_storages


def launches_of(function: Any, arguments: tuple[Any, ...]) -> int:
    """Return the smallest number of kernels that an operation of torch launches. Views and empty tensors need 0."""
    schema: Any = function._schema
    name: str = schema.name.partition("::")[2]
    if not schema.name.startswith(("aten::", "c10d::")) or "empty" in name or name == "_unsafe_view":
        return 0
    if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
        return 0  # a view
    lists = [x for x in arguments if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    if name.startswith(("_foreach", "_fused")):
        # Fused Adam's list of step counters does not count as a list.
        lists = [x for x in lists if x[0].dim() or name.startswith("_foreach")]
        return multi_tensor_launches(lists) + (name == "_foreach_norm")
    return 2 if name in IN_TWO else 1


def multi_tensor_launches(lists: list[Any]) -> int:
    """Return the number of launches into which ATen's `multi_tensor_apply` splits lists of tensors of the same
    sizes."""
    most, launches, blocks, tensors = MOST_TENSORS[min(len(lists), 5) - 1], 0, 0, 0
    for tensor in lists[0]:
        chunks, tensors = math.ceil(tensor.numel() / BLOCK_LEN), tensors + 1
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if blocks == BLOCKS or (tensors == most and is_last):
                launches, blocks, tensors = launches + 1, 0, 0 if is_last else 1
    return launches + (blocks > 0)


def operands_of(
    function: Any, arguments: tuple[Any, ...], settings: dict[str, Any], result: Any
) -> Iterator[tuple[Tensor, int]]:
    """Yield each operand of an operation, with the bytes of it that are moved."""
    schema: Any = function._schema
    name: str = schema.name.partition("::")[2]
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    given = dict(zip((one.name for one in schema.arguments), arguments, strict=False)) | settings
    only_written = name in ("copy_", "fill_", "zero_", "_foreach_copy_", "bernoulli_", "random_")
    # Fused Adam writes gradients only if it unscales them.
    keeps_gradients = name.startswith("_fused") and given.get("grad_scale") is None
    seen: set[int] = set()
    sides: list[tuple[Tensor, int]] = []
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_out = is_written and (argument.kwarg_only or (only_written and argument.name == "self"))
        passes = 2 if is_written and not is_out and not (keeps_gradients and argument.name == "grads") else 1
        for tensor in tree_leaves(given.get(argument.name)):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                seen.add(id(tensor))
                sides.append((tensor, passes * span(tensor)))
    sides += [(tensor, span(tensor)) for tensor in made if id(tensor) not in seen and tensor.is_cuda]
    if name.rstrip("_") in SELECTING and sides:
        largest = max(range(len(sides)), key=lambda i: sides[i][1])
        rest = max((count for i, (_, count) in enumerate(sides) if i != largest), default=0)
        sides[largest] = (sides[largest][0], min(sides[largest][1], rest))
    yield from sides


def span(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct values. An expanded tensor stores fewer values than it has elements."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def is_aligned(matrix: Tensor) -> bool:
    """Return True if all rows (or columns, of a transposed matrix) begin at multiples of 16 bytes."""
    starts = [stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1 and stride != 1]
    return all(start * matrix.element_size() % 16 == 0 for start in (*starts, matrix.storage_offset()))


def described(value: Any) -> Any:
    """Return the properties of an argument that determine how a kernel is compiled: the type of a tensor, or the value
    itself."""
    if isinstance(value, tuple):
        return tuple(map(described, value))
    return value.dtype if isinstance(value, Tensor) else value


class Counted(NamedTuple):
    """Results of counting one step."""

    counter: Counter
    maker: BatchMaker
    num_parameters: int
    num_table_values: int
    """Number of values of the vocabulary's tables. It is 0 if the vocabulary is not in clusters."""
    weight_bytes: int
    """Bytes of the weights that the model computes with."""


def count(config: Config, *, vocab_size: int, lanes: int) -> Counted:
    """Run two steps on the fake device and count the second. It works once per process, because DeepSpeed is
    initialized."""
    counter, train = Counter(), config.train
    engine_room = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ |= engine_room | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    sizes = Sizes.of(config, vocab_size=vocab_size, num_lanes=lanes)
    segment = plain_segment(next(zipf_segments(sizes)))
    with fake_gpu(counter) as device, fake_ranks(device) as ranks:
        plan = plan_batch(config.train, world_size=1)
        engine = ZeroEngine(config, vocab_size=vocab_size, plan=plan, ranks=ranks)
        softmax = engine.model.softmax
        counter.logit_columns = columns_of(softmax.edges, num_tails=softmax.num_tails)
        slots = [slot for stored in engine.stored for slot in stored.slots]
        if softmax.num_tails:
            slots = [slot for slot in slots if re.search(r"\.weight_\d+$", slot.name)]
        else:
            slots = []
        num_table_values = sum(math.prod(engine.shapes[slot.name]) for slot in slots)
        tables = [slot.shape for slot in slots]
        counter.table_lens = {math.prod(table) for table in tables}
        if len(tables) == 1:
            counter.table_lens |= {rows * tables[0][1] for rows in rows_of(softmax.edges)}
        softmax.register_forward_pre_hook(lambda *_: setattr(counter, "region", "softmax"))
        softmax.register_forward_hook(lambda *_: setattr(counter, "region", ""))
        maker = batch_maker(engine.model, mask_documents=False, for_graphs=True)
        memory = engine.empty_memory(num_lanes=lanes, memory_len=train.memory_len)
        for phase in ("", "micro-step"):
            batch = moved(maker.batch(segment), device)
            counter.phase = phase
            loss, memory = engine.forward(batch, memory, normalizer=float(lanes * train.scored_len))
            engine.backward(loss)
            counter.phase = "update" if phase else ""
            engine.grad_norm()
            engine.step(lr=1e-4, grad_norm=1.0)
            counter.phase = ""
        num_parameters = sum(math.prod(shape) for shape in engine.shapes.values())
        weight_bytes = sum(stored.tensor.nbytes for stored in engine.stored)
    return Counted(counter, maker, num_parameters, num_table_values, weight_bytes)


@contextmanager
def fake_ranks(device: torch.device) -> Iterator[RankInfo]:
    """Yield one rank in a process group that exchanges nothing. DeepSpeed uses the given device."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.device_name = lambda index=None: "cuda"
    accelerator.current_device_name = lambda: "cuda"
    accelerator.communication_backend_name = lambda: "fake"
    accelerator.is_fp16_supported = lambda: True
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield RankInfo(0, 1, 0, device, 1)
    finally:
        torch.distributed.destroy_process_group()


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device. The function of `train.batch` cannot be used, because it would pin the batch
    first."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, tuple):
            return type(value)(*map(move, value)) if hasattr(value, "_fields") else tuple(map(move, value))
        return value

    return Batch(*map(move, batch))


def rows_of(edges: Iterable[int]) -> set[int]:
    """Return the numbers of token ids of the clusters between these edges."""
    return {high - low for low, high in itertools.pairwise(edges)}


def columns_of(edges: Iterable[int], *, num_tails: int) -> set[int]:
    """Return the possible numbers of columns of logits: those of each cluster, and those of the head with one column
    per tail cluster."""
    edges = list(edges)
    sizes = rows_of(edges)
    return sizes | {edges[1] + num_tails} | {-(-size // 16) * 16 for size in (*sizes, edges[1] + num_tails)}


def row_of(config: Config, *, vocab_size: int, lanes: int, waves: bool) -> dict[str, Any]:
    """Count one step of a recipe and return its quantities."""
    counted = count(config, vocab_size=vocab_size, lanes=lanes)
    counter, maker, num_parameters, num_table_values, weight_bytes = counted
    step = [event for event in counter.events if event.phase == "micro-step"]
    update = [event for event in counter.events if event.phase == "update"]
    attention = [event for event in step if event.programs and event.name in ATTENTION]
    scores = sum(event.scores_bytes for event in attention)
    row: dict[str, Any] = {
        "launches, micro-step": sum(event.launches for event in step),
        "of these Triton": sum(1 for event in step if event.programs),
        "attention": len(attention),
        "micro-step, MB": sum(event.num_bytes for event in step) / 1e6,
        "weights, MB": weight_bytes / 1e6,
        "products, micro-step": sum(1 for event in step if event.name in PRODUCTS),
        "products, unaligned": sum(1 for event in step if event.is_unaligned),
        "launches, update": sum(event.launches for event in update),
        "update, bytes per parameter": sum(event.num_bytes for event in update) / num_parameters,
        "update, MB": sum(event.num_bytes for event in update) / 1e6,
        "update, bytes per table value": sum(e.table_bytes for e in counter.events) / max(num_table_values, 1),
        "softmax, bytes per logit": sum(event.num_logit_bytes for event in step) / max(counter.num_logits, 1),
        "softmax, launches": sum(event.launches for event in step if event.region == "softmax"),
        "attention, MB of scores": scores / 1e6,
        "attention, MB besides": operands_once(attention) * config.model.num_layers / 1e6,
    }
    if waves:
        row |= {f"waves, {name}": value for name, value in waves_of(counter).items()}
    row["operations"] = operations_of(step, "micro-step") + operations_of(update, "update")
    row["edges"] = [list(edges) for edges in (maker.embedding_edges, maker.softmax_edges)]
    row["rows_multiple"] = maker.rows_multiple
    return row


def operations_of(events: list[Event], phase: str) -> list[dict[str, Any]]:
    """Return a row per kind of operation or kernel, in the order of moved bytes, the most first."""
    launches, moved = dict[str, int](), dict[str, int]()
    for event in events:
        name = f"{event.name} (softmax)" if event.region else event.name
        launches[name] = launches.get(name, 0) + event.launches
        moved[name] = moved.get(name, 0) + event.num_bytes
    return [
        {"phase": phase, "operation": name, "launches": launches[name], "MB": moved[name] / 1e6}
        for name in sorted(moved, key=lambda name: -moved[name])
    ]


def operands_once(attention: list[Event]) -> int:
    """Return the bytes of all operands except scores. Each kernel counts once, because its launches in a layer share
    the operands."""
    by_kernel: dict[str, int] = {}
    for event in attention:
        by_kernel[event.name] = max(by_kernel.get(event.name, 0), event.num_bytes - event.scores_bytes)
    return sum(by_kernel.values())


def waves_of(counter: Counter) -> dict[str, float]:
    """Return for each kernel its smallest number of waves. A wave is the number of programs that all multiprocessors
    hold at once."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key, (kernel, arguments, settings) in counter.kernels.items():
            resident = MULTIPROCESSORS * resident_programs(*machine_of(kernel, arguments, settings, Path(folder)))
            waves = min(counter.programs[key]) / resident
            found[key[0]] = min(waves, found.get(key[0], math.inf))
    return found


def machine_of(kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any], folder: Path) -> tuple[int, int, int]:
    """Compile a kernel for sm_90. Return the registers per thread, the bytes of shared memory and the warps of a
    program."""
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    driver._active = HopperDriver()
    given = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in arguments]
    built = kernel.run(*given, grid=(1,), warmup=True, **settings)
    binary = folder / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(cuobjdump), "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", usage)[0]), built.metadata.shared, built.metadata.num_warps


def resident_programs(registers: int, shared_bytes: int, warps: int) -> int:
    """Return how many programs one multiprocessor of compute capability 9.0 holds at once (from CUDA's programming
    guide)."""
    by_registers = 4 * (16_384 // (math.ceil(registers * 32 / 256) * 256)) // warps
    by_memory = 233_472 // (shared_bytes + 1024)
    return max(1, min(by_registers, by_memory, 64 // warps, 32))


def graphs_of(
    maker: BatchMaker, sizes: Sizes, segments: Iterator[np.ndarray], *, steps: int, where: str
) -> dict[str, Any]:
    """Return the number of different shapes of a step's batch, and the percentage of padded rows."""
    graphs, padded = f"graphs, {where}", f"padded rows, {where}, %"
    if len(maker.embedding_edges) == len(maker.softmax_edges) == 2:
        return {graphs: 1, padded: 0.0}
    shapes, rows, needed = set(), 0, 0
    for _ in range(steps):
        batch = maker.batch(plain_segment(next(segments)))
        partitions = [p for p in (batch.token_partition, batch.target_partition) if p is not None]
        shapes.add(tuple(len(cluster.ids) for partition in partitions for cluster in partition))
        rows += sum(shapes_sum(partition) for partition in partitions)
        needed += sizes.tokens * len(partitions)
    return {graphs: len(shapes), padded: 100 * (rows / needed - 1)}


def text_segments(path: Path, sizes: Sizes) -> Iterator[np.ndarray]:
    """Yield ids [lanes, T + 1] of a text's words in order, without end. The most frequent word has id 0. Each lane
    (batch row) reads its own part of the text again and again."""
    lines = path.read_text(encoding="utf-8").splitlines()
    words, inverse, counts = np.unique(
        [word for line in lines for word in (*line.split(), "<eos>")], return_inverse=True, return_counts=True
    )
    ids = np.empty(len(words), np.int64)
    ids[np.argsort(-counts, kind="stable")] = np.arange(len(words))
    length = len(inverse) // sizes.num_lanes
    lanes = ids[inverse][: length * sizes.num_lanes].reshape(sizes.num_lanes, length)
    for start in itertools.count(0, sizes.segment_len):
        yield lanes[:, np.arange(start, start + sizes.segment_len + 1) % length]


def shapes_sum(partition: Any) -> int:
    """Return the number of rows of all clusters."""
    return sum(len(cluster.ids) for cluster in partition)


def recipe_of(name: str, *, layers_less: int = 0, pad_widths: str = "auto") -> Config:
    """Return a recipe on one GPU with one micro-batch per step. Its number of lanes is from `RECIPES`."""
    config = load_config(CONFIGS / f"{name}.toml").model_dump(mode="json")
    lanes = RECIPES[name][1]
    config["train"] |= {"num_lanes": lanes, "microbatch_lanes": lanes}
    config["model"]["num_layers"] -= layers_less
    config["engine"] |= {"cuda_graph": False, "precision": "bf16", "pad_widths": pad_widths}
    counted = Config.model_validate(config)
    plan = plan_batch(counted.train, world_size=1)
    return with_kept_scores(counted, plan=plan, vocab_size=RECIPES[name][0], room=SURE["cuda"] * MEMORY_BYTES)


def measured(name: str, *, steps: int, waves: bool, text: Path | None, pad_widths: str) -> dict[str, Any]:
    """Return all quantities of a recipe. Steps are counted in separate processes."""
    whole, less = (in_fresh_process(name, layers_less=n, waves=waves and not n, pad_widths=pad_widths) for n in (0, 1))
    layer = {
        "launches, a layer": whole["launches, micro-step"] - less["launches, micro-step"],
        "attention, a layer": whole["attention"] - less["attention"],
        "attention, MB a layer": sum(whole[k] - less[k] for k in ("attention, MB of scores", "attention, MB besides")),
        "of these scores": whole["attention, MB of scores"] - less["attention, MB of scores"],
    }
    config, (vocab_size, lanes) = recipe_of(name), RECIPES[name]
    embedding_edges, softmax_edges = map(tuple, whole.pop("edges"))
    maker = BatchMaker(embedding_edges, softmax_edges, False, whole.pop("rows_multiple"))
    sizes = Sizes.of(config, vocab_size=vocab_size, num_lanes=lanes)
    graphs = graphs_of(maker, sizes, zipf_segments(sizes), steps=steps, where="Zipf")
    if text is not None:
        graphs |= graphs_of(maker, sizes, text_segments(text, sizes), steps=steps, where="text")
    kept = {
        key: value for key, value in whole.items() if key not in ("attention, MB of scores", "attention, MB besides")
    }
    return {"lanes": lanes, **kept, **layer, **graphs}


def in_fresh_process(name: str, *, layers_less: int, waves: bool, pad_widths: str) -> dict[str, Any]:
    """Return the result of `row_of` from a new process. Raises RuntimeError with the end of the child's error
    output."""
    words = ["--child", name, "--layers-less", str(layers_less), "--pad-widths", pad_widths]
    words += [] if waves else ["--no-waves"]
    command = [sys.executable, "-m", "tools.benchmarks.count_launches", *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {child.returncode}:\n{child.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return row


def compared(now: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per quantity. If earlier figures are given, the row also has the earlier value and the ratio."""
    rows = []
    for name in dict.fromkeys((*now, *before)):
        row: dict[str, Any] = {"quantity": name}
        if before:
            row |= {"before": before.get(name)}
        row |= {"now": now.get(name)}
        if before:
            was, has = before.get(name), now.get(name)
            row |= {"now / before": has / was if has and was else None}
        rows.append(row)
    return rows


def main() -> int:
    """Count each recipe, print its tables and write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=5000, help="steps in which graphs are counted")
    parser.add_argument("--no-waves", dest="waves", action="store_false", help="compile no kernels, and print no waves")
    parser.add_argument("--text", type=Path, metavar="FILE", help="also count the graphs of this text's words in order")
    parser.add_argument("--operations", action="store_true", help="also print a table of all operations and kernels")
    parser.add_argument("--pad-widths", choices=("auto", "off"), default="auto", help="setting engine.pad_widths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="file that --json wrote on an earlier commit, for comparison"
    )
    parser.add_argument("--child", choices=RECIPES, help=argparse.SUPPRESS)
    parser.add_argument("--layers-less", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        config, (vocab_size, lanes) = (
            recipe_of(arguments.child, layers_less=arguments.layers_less, pad_widths=arguments.pad_widths),
            RECIPES[arguments.child],
        )
        print(json.dumps(row_of(config, vocab_size=vocab_size, lanes=lanes, waves=arguments.waves)))
        return 0
    before = json.loads(arguments.before.read_text(encoding="utf-8"))["recipes"] if arguments.before else {}
    found: dict[str, dict[str, Any]] = {}
    for name in announced(arguments.recipes, what="recipe"):
        found[name] = measured(
            name, steps=arguments.steps, waves=arguments.waves, text=arguments.text, pad_widths=arguments.pad_widths
        )
        operations = found[name].pop("operations")
        print_table(name, compared(found[name], before.get(name, {})))
        if arguments.operations:
            print_table(f"{name}: operations", operations)
        if arguments.json:
            content = {"torch": torch.__version__, "steps": arguments.steps, "recipes": found}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
