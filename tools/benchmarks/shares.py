"""Show how a training step's CPU time is divided between matrix products and the other kinds of operations.

    python -m tools.benchmarks.shares --sizes ptb       a step in bf16 and a step in fp32, some minutes
    python -m tools.benchmarks.shares --sizes ptb --attention-dropout 0.2       as in configs/ptb.toml
    python -m tools.benchmarks.shares --tiny            a tiny size, some seconds

A step is one step of the engine on one rank with one thread: batch, forward, loss, backward, norm, clipping and update.
Times are the thread's CPU time. So other programs on the same cores disturb them little. Each kind's time is the least
of `--steps` steps.

    products    matrix products
    softmax     exponentials, maxima, sums along rows and their gradients, in attention and in the loss
    casts       copies between number formats
    copies      copies within a number format, and filling
    masks       random masks of dropout
    update      optimizer, norm and clipping of gradients
    other       all other operations
    python      the rest of the step: Python, autograd and DeepSpeed
    MiB moved   memory that the operations of a kind read and write in a step. It does not depend on the processor
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tools.benchmarks.measuring import positive, print_table, write_json
from tools.benchmarks.products import NAMES
from tools.benchmarks.step import sizes_of
from tools.benchmarks.switches import EngineStep
from tools.benchmarks.trainers import Sizes, zipf_segments
from txl_dist.config.load import Config
from txl_dist.distributed.collectives import distributed_context

KINDS: dict[str, tuple[str, ...]] = {
    "products": tuple(name.removeprefix("aten::") for name in NAMES),
    "softmax": ("_softmax", "_log_softmax", "_softmax_backward_data", "exp_", "amax", "log"),
    "copies": ("copy_", "_foreach_copy_", "clone", "cat", "stack", "fill_", "zero_", "new_zeros", "zeros_like"),
    "casts": ("_to_copy",),
    "masks": ("random_", "bernoulli_", "lt_"),
    "update": ("_fused_adam_", "_fused_adamw_", "linalg_vector_norm", "_foreach_norm", "_foreach_mul_"),
}
"""Kinds of operations and the names of their operations. A copy between two number formats is a cast."""
ORDER = ("products", "softmax", "casts", "copies", "masks", "update", "other", "python")


class _Meter(TorchDispatchMode):
    """Sums of CPU time in nanoseconds, and of bytes read and written, by kind of operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nanoseconds: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        spent = time.thread_time_ns() - began
        given = _tensors([args, kwargs or {}])
        kind = kind_of(func._schema.name.removeprefix("aten::"), given)
        self.nanoseconds[kind] += spent
        if not func.is_view and "empty" not in func._schema.name:
            self.bytes[kind] += sum(x.numel() * x.itemsize for x in [*given, *_tensors(result)])
        return result


def kind_of(name: str, tensors: list[Tensor]) -> str:
    """Return the kind of an operation, from its name and the tensors that it reads."""
    kind = next((kind for kind, names in KINDS.items() if name in names), "other")
    if kind == "copies" and len({x.dtype for x in tensors}) > 1:
        return "casts"
    return kind


def _tensors(values: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def config_of(sizes: Sizes, *, precision: str) -> Config:
    """Return the settings of a run with these sizes on one rank, in one micro-batch."""
    train = {"num_lanes": sizes.num_lanes, "microbatch_lanes": sizes.num_lanes}
    train |= {"segment_len": sizes.segment_len, "memory_len": sizes.memory_len}
    model = sizes.model.model_dump(exclude_defaults=True)
    return Config.model_validate({"model": model, "train": train, "engine": {"precision": precision}})


def measured(step: Callable[[], object], *, steps: int) -> list[dict[str, object]]:
    """Return a row for each kind of operation, and a row for the whole step. It makes 2 `steps` steps, half of them
    without the meter."""
    meters: list[_Meter] = []
    whole_ns: list[int] = []
    for _ in range(steps):
        began = time.thread_time_ns()
        step()
        whole_ns.append(time.thread_time_ns() - began)
        with _Meter() as meter:
            step()
        meters.append(meter)
    kinds_ns = {kind: min(meter.nanoseconds[kind] for meter in meters) for kind in ORDER}
    total_ns = min(whole_ns)
    kinds_ns["python"] = max(0, total_ns - sum(kinds_ns.values()))
    table = []
    for kind, spent_ns in [*kinds_ns.items(), ("step", total_ns)]:
        moved = sum(meters[0].bytes.values()) if kind == "step" else meters[0].bytes[kind]
        table.append({"kind": kind, "ms": spent_ns / 1e6, "share": spent_ns / total_ns, "MiB moved": moved / 2**20})
    return table


def _next_step(step: EngineStep, segments: Iterator[Any]) -> Tensor:
    return step(next(segments))


def main() -> None:
    """Measure a step in each precision and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=("wt103", "ptb", "wide"), default="ptb")
    parser.add_argument("--attention-dropout", type=float, default=0.0, metavar="P", help="as model.attention_dropout")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--steps", type=positive, default=4, help="measured steps in each precision")
    parser.add_argument("--tiny", action="store_true", help="use a tiny size that takes seconds, to try the program")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    sizes = sizes_of(arguments.sizes, tiny=arguments.tiny)
    sizes = sizes._replace(model=sizes.model.model_copy(update={"attention_dropout": arguments.attention_dropout}))
    segments = itertools.cycle(list(itertools.islice(zipf_segments(sizes, seed=1), 4)))
    tables: dict[str, list[dict[str, object]]] = {}
    with distributed_context(timeout_s=600, num_threads=1) as ranks:
        for precision in arguments.precisions:
            step = EngineStep(config_of(sizes, precision=precision), ranks, vocab_size=sizes.vocab_size)
            action = partial(_next_step, step, segments)
            action()
            title = f"{precision}: a step of {sizes.tokens:,} tokens, {arguments.sizes}, 1 thread"
            tables[title] = measured(action, steps=arguments.steps)
            print_table(title, tables[title])
    if arguments.json:
        write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
