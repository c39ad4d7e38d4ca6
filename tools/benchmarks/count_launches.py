"""What a training step asks of a GPU, counted without one.

    python -m tools.benchmarks.count_launches --json FILE --before FILE

The engine runs two steps of each recipe, at its real sizes, on a device that computes nothing (fake_gpu.py); the second
is counted. A row per quantity:

    launches, micro-step    forward and backward of one micro-batch. An operation that torch dispatches is one launch,
                            if it is not a view and makes no empty tensor; padding, and the backward of slices and of
                            layer norm, are two; one over a list of tensors (`_foreach_*`, fused Adam) is as many as
                            CUDA's 320 blocks of 65,536 values need.
    Triton                  of these, kernels of ours. `attention` has its kernels alone
    a layer                 the difference between the recipe and the same with one layer less
    update                  norm, decision, clipping and optimizer, without the exchange, of which one GPU has none
    bytes per parameter     moved by the update: each operand read once, what is written in place twice
    bytes per logit         moved in the softmax's forward and gradient by operands that are logits
    MB a layer              of attention: each operand once for each kernel and call, and the score buffer, which stays
                            in the L2 cache where it is small, at each launch (`of these scores`)
    waves                   smallest number of programs of a kernel over what 132 multiprocessors of an H100 hold at
                            once, by the registers and shared memory of its machine code (sm_90), compiled here
    graphs                  different shapes of micro-batches in so many steps of independent words by Zipf's law, and
                            with --text of a text's words in order: each is a CUDA graph of its own; `padded` are rows
                            that only fill up

Limitations: it measures no times. What a kernel reads twice counts once (but for the score buffer). Libraries may
launch more than one kernel for an operation (splitting a product, sorting ids). In bf16, at the recipe's stage, on one
GPU.
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

from tools.benchmarks.fake_gpu import MULTIPROCESSORS, fake_gpu
from tools.benchmarks.measuring import announced, print_table
from tools.benchmarks.trainers import Sizes, zipf_segments
from txl_dist.config.load import Config, load_config, plan_batch
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo
from txl_dist.model.kernels.attention_launch import BACKWARD, FORWARD, SUM
from txl_dist.model.transformer_xl import Batch
from txl_dist.train.batch import BatchMaker, batch_maker
from txl_dist.train.engine.zero import ZeroEngine, import_deepspeed

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {
    "enwik8_base": (204, 22),
    "enwik8_large": (204, 8),
    "wt103_base": (267_735, 60),
    "nvidia_wt103_base": (267_735, 32),
    "wt103_large": (267_735, 16),
}
"""Vocabulary and lanes of a micro-batch on one GPU."""

WRITTEN_BESIDES_READ = {
    ("key_value_gradients", "SCORES"),
    ("distance_query_gradients", "D_QUERY"),
    ("distance_gradients", "D_DISTANCE"),
}
"""Operands that a Triton kernel of attention both reads and writes: two passes over them."""
ATTENTION = {*FORWARD, *BACKWARD, SUM, "set_width"}
"""Its kernels."""
SELECTING = ("embedding", "index_select", "index", "gather", "scatter", "index_add", "index_put", "index_copy")
"""Operations that touch of their largest operand only as much as there is of the others."""
IN_TWO = ("native_layer_norm_backward", "constant_pad_nd", "slice_backward", "select_backward")
"""Operations that ATen makes of two kernels: gradients of inputs and of weights; zeros, then a copy into them."""
BLOCKS, BLOCK_LEN, MOST_TENSORS = 320, 65_536, (110, 64, 48, 36, 30)
"""Of ATen's MultiTensorApply.cuh: in one launch, and the tensors of a list by the number of lists."""


class Event(NamedTuple):
    """Something that the device does."""

    phase: str
    """micro-step or update"""
    region: str
    """softmax, or nothing"""
    name: str
    launches: int
    num_bytes: int
    num_logit_bytes: int
    programs: int
    """Of a Triton kernel, else 0."""
    scores_bytes: int = 0


class Counter:
    """The `Recorder`: events of the phases that are to be counted, and of each Triton kernel how it is compiled."""

    def __init__(self) -> None:
        self.phase = self.region = ""
        self.events: list[Event] = []
        self.num_logits = 0
        self.logit_columns: set[int] = set()
        self.programs: dict[tuple[str, Any], list[int]] = defaultdict(list)
        self.kernels: dict[tuple[str, Any], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._logit_storages: set[int] = set()
        self._logit_lens: set[int] = set()

    def operation(self, function: Any, arguments: tuple[Any, ...], settings: dict[str, Any], result: Any) -> None:
        """See `Recorder`."""
        if not self.phase or not (launches := launches_of(function, arguments)):
            return
        name = function._schema.name.removeprefix("aten::")
        if self.region == "softmax" and re.match("(add)?mm|bmm|_triton", name):
            self._note_logits(result)
        operands = list(operands_of(function, arguments, settings, result))
        logits = sum(count for tensor, count in operands if self._is_of_logits(tensor))
        moved = sum(count for _, count in operands)
        self.events.append(Event(self.phase, self.region, name, launches, moved, logits, 0))

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """See `Recorder`."""
        if not self.phase:
            return
        name = kernel.fn.__name__
        names = [parameter.name for parameter in kernel.params]
        tensors = {
            n: [t for t in tree_leaves(x) if isinstance(t, Tensor)] for n, x in zip(names, arguments, strict=False)
        }
        operands = {n: found for n, found in tensors.items() if found}
        twice = {n for n in operands if (name, n) in WRITTEN_BESIDES_READ}
        sizes = {n: sum(map(span, found)) * (2 if n in twice else 1) for n, found in operands.items()}
        # A kernel of the softmax makes gradients where the logits were.
        logits = sum(2 * span(x) for found in operands.values() for x in found if self._is_of_logits(x))
        programs, scores = math.prod(grid), sizes.get("SCORES", 0)
        moved = sum(sizes.values())
        self.events.append(Event(self.phase, self.region, name, 1, moved, logits, programs, scores))
        key = (name, repr([described(x) for x in arguments]) + repr(sorted(settings.items(), key=str)))
        self.programs[key].append(programs)
        self.kernels[key] = (kernel, arguments, settings)

    def _note_logits(self, result: Any) -> None:
        """A product with as many columns as a cluster has words makes logits."""
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
    """How many kernels an operation of torch is, at least; 0 for views and empty tensors."""
    schema: Any = function._schema
    name: str = schema.name.partition("::")[2]
    if not schema.name.startswith(("aten::", "c10d::")) or "empty" in name or name == "_unsafe_view":
        return 0
    if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
        return 0  # a view
    lists = [x for x in arguments if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    if name.startswith(("_foreach", "_fused")):
        # The steps that fused Adam counts are no list of their own.
        lists = [x for x in lists if x[0].dim() or name.startswith("_foreach")]
        return multi_tensor_launches(lists) + (name == "_foreach_norm")
    return 2 if name in IN_TWO else 1


def multi_tensor_launches(lists: list[Any]) -> int:
    """As ATen's `multi_tensor_apply` splits lists of tensors of the same sizes."""
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
    """(operand, bytes moved of it)."""
    schema: Any = function._schema
    name: str = schema.name.partition("::")[2]
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    given = dict(zip((one.name for one in schema.arguments), arguments, strict=False)) | settings
    only_written = name in ("copy_", "fill_", "zero_", "_foreach_copy_", "bernoulli_", "random_")
    # Fused Adam writes gradients only where it has unscaled them.
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
    """Bytes of the different values; a tensor that is expanded has fewer than numbers."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def described(value: Any) -> Any:
    """What of an argument decides how a kernel is compiled, and a little more."""
    if isinstance(value, tuple):
        return tuple(map(described, value))
    return value.dtype if isinstance(value, Tensor) else value


class Counted(NamedTuple):
    """Of one step."""

    counter: Counter
    maker: BatchMaker
    num_parameters: int


def count(config: Config, *, vocab_size: int, lanes: int) -> Counted:
    """Run two steps on the fake device; count the second. Works once in a process: DeepSpeed is initialised."""
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
    return Counted(counter, maker, num_parameters)


@contextmanager
def fake_ranks(device: torch.device) -> Iterator[RankInfo]:
    """One rank in a process group that exchanges nothing, with DeepSpeed on the device."""
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
    """To the device; `train.batch` would pin it first."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, tuple):
            return type(value)(*map(move, value)) if hasattr(value, "_fields") else tuple(map(move, value))
        return value

    return Batch(*map(move, batch))


def columns_of(edges: Iterable[int], *, num_tails: int) -> set[int]:
    """How many columns logits may have: of each cluster, and of the head with those that stand for the tails."""
    edges = list(edges)
    sizes = {high - low for low, high in itertools.pairwise(edges)}
    return sizes | {edges[1] + num_tails} | {-(-size // 16) * 16 for size in (*sizes, edges[1] + num_tails)}


def row_of(config: Config, *, vocab_size: int, lanes: int, waves: bool) -> dict[str, Any]:
    """What is counted of one step of a recipe."""
    counter, maker, num_parameters = count(config, vocab_size=vocab_size, lanes=lanes)
    step = [event for event in counter.events if event.phase == "micro-step"]
    update = [event for event in counter.events if event.phase == "update"]
    attention = [event for event in step if event.programs and event.name in ATTENTION]
    scores = sum(event.scores_bytes for event in attention)
    row: dict[str, Any] = {
        "launches, micro-step": sum(event.launches for event in step),
        "of these Triton": sum(1 for event in step if event.programs),
        "attention": len(attention),
        "launches, update": sum(event.launches for event in update),
        "update, bytes per parameter": sum(event.num_bytes for event in update) / num_parameters,
        "update, MB": sum(event.num_bytes for event in update) / 1e6,
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
    """A row per kind of operation or kernel, those that move most first."""
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
    """Bytes of all operands but scores, of each kernel in one layer once: its launches share them."""
    by_kernel: dict[str, int] = {}
    for event in attention:
        by_kernel[event.name] = max(by_kernel.get(event.name, 0), event.num_bytes - event.scores_bytes)
    return sum(by_kernel.values())


def waves_of(counter: Counter) -> dict[str, float]:
    """Smallest number of programs by what all multiprocessors hold at once, for each kernel."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key, (kernel, arguments, settings) in counter.kernels.items():
            resident = MULTIPROCESSORS * resident_programs(*machine_of(kernel, arguments, settings, Path(folder)))
            waves = min(counter.programs[key]) / resident
            found[key[0]] = min(waves, found.get(key[0], math.inf))
    return found


def machine_of(kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any], folder: Path) -> tuple[int, int, int]:
    """(registers of a thread, bytes of shared memory, warps) of a program, compiled for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    class Hopper:
        """As much of a driver as compilation asks for."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver._active = Hopper()
    given = [MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in arguments]
    built = kernel.run(*given, grid=(1,), warmup=True, **settings)
    binary = folder / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(cuobjdump), "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", usage)[0]), built.metadata.shared, built.metadata.num_warps


def resident_programs(registers: int, shared_bytes: int, warps: int) -> int:
    """Programs that one multiprocessor of compute capability 9.0 holds at once (CUDA's programming guide)."""
    by_registers = 4 * (16_384 // (math.ceil(registers * 32 / 256) * 256)) // warps
    by_memory = 233_472 // (shared_bytes + 1024)
    return max(1, min(by_registers, by_memory, 64 // warps, 32))


def graphs_of(
    maker: BatchMaker, sizes: Sizes, segments: Iterator[np.ndarray], *, steps: int, where: str
) -> dict[str, Any]:
    """Different shapes of a step's batch, and rows that are padding."""
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
    """Endless ids [lanes, T + 1] of a text's words in order, the most frequent word being 0; each lane reads a piece of
    its own, again and again."""
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
    """Rows of all clusters."""
    return sum(len(cluster.ids) for cluster in partition)


def recipe_of(name: str, *, layers_less: int = 0) -> Config:
    """A recipe on one GPU, in one micro-batch of `RECIPES`' lanes."""
    config = load_config(CONFIGS / f"{name}.toml").model_dump(mode="json")
    lanes = RECIPES[name][1]
    config["train"] |= {"num_lanes": lanes, "microbatch_lanes": lanes}
    config["model"]["num_layers"] -= layers_less
    config["engine"] |= {"cuda_graph": False, "precision": "bf16"}
    return Config.model_validate(config)


def measured(name: str, *, steps: int, waves: bool, text: Path | None) -> dict[str, Any]:
    """All quantities of a recipe: counted in processes of their own."""
    whole, less = (in_fresh_process(name, layers_less=n, waves=waves and not n) for n in (0, 1))
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


def in_fresh_process(name: str, *, layers_less: int, waves: bool) -> dict[str, Any]:
    """What `row_of` finds. Raises RuntimeError with the child's last words."""
    words = ["--child", name, "--layers-less", str(layers_less), *([] if waves else ["--no-waves"])]
    command = [sys.executable, "-m", "tools.benchmarks.count_launches", *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {child.returncode}:\n{child.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return row


def compared(now: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per quantity; with what was before, and the ratio, where that is known."""
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
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=5000, help="in which graphs are counted")
    parser.add_argument("--no-waves", dest="waves", action="store_false", help="compile no kernels")
    parser.add_argument("--text", type=Path, metavar="FILE", help="count graphs of its words in order, too")
    parser.add_argument("--operations", action="store_true", help="also a table of all operations and kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--before", type=Path, metavar="FILE", help="such a file of an earlier commit")
    parser.add_argument("--child", choices=RECIPES, help=argparse.SUPPRESS)
    parser.add_argument("--layers-less", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        config, (vocab_size, lanes) = (
            recipe_of(arguments.child, layers_less=arguments.layers_less),
            RECIPES[arguments.child],
        )
        print(json.dumps(row_of(config, vocab_size=vocab_size, lanes=lanes, waves=arguments.waves)))
        return 0
    before = json.loads(arguments.before.read_text(encoding="utf-8"))["recipes"] if arguments.before else {}
    found: dict[str, dict[str, Any]] = {}
    for name in announced(arguments.recipes, what="recipe"):
        found[name] = measured(name, steps=arguments.steps, waves=arguments.waves, text=arguments.text)
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
