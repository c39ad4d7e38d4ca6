"""The sections of `gpu.py --run 1`: correctness and speed on this GPU.

    device   limits of the device: copies, products of matrices, and the cost of a launch
    steps    eager and graphed steps of enwik8_base by `ZeroEngine`: losses and norms, and the time (gpu_engine.py)
    tests    tests/gpu, a job per test
    twins    results of the device against fp64 on the CPU with the same rounded inputs: relative errors by norms
    engine   the same steps at every ZeRO stage and type
    profile  the time of such a step, by kernel
    sweep    attention by size of its score buffer and by tiles
    codes    whole steps of enwik8_base: the original's code, NVIDIA's code, ours (trainers.py)

Operations are counted by `txl_dist.model.flops`, without those on masked pairs. In a rehearsal the sizes are tiny and
everything runs in fp32 on the CPU, with Triton's kernels in its interpreter. The figures of a rehearsal have no
meaning.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch
from torch import Tensor

from tools.benchmarks import gpu_engine
from tools.benchmarks.gpu_jobs import Job, Section, Setting, Skipped
from tools.benchmarks.gpu_rows import Row
from tools.benchmarks.gpu_timing import times
from tools.benchmarks.measuring import milliseconds
from tools.benchmarks.peers import nvidia, original
from tools.benchmarks.trainers import OurTrainer, PeerTrainer, Sizes, Trainer, zipf_segments
from txl_dist.config.load import load_config
from txl_dist.config.schema import EngineSection, ModelSection
from txl_dist.data.loader.stream import plain_segment
from txl_dist.distributed.collectives import RankInfo, distributed_context
from txl_dist.errors import first_and_last_line
from txl_dist.model.flops import flops_by_part, peak_tflops
from txl_dist.model.kernels import attention_launch
from txl_dist.model.memory import EMPTY, AttentionMask
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.model.transformer_xl import SegmentLoss, TransformerXL
from txl_dist.train.batch import batch_maker, to_device

ROOT = Path(__file__).parents[2]
RECIPES = {
    "enwik8_base": (204, 22),
    "enwik8_large": (204, 32),
    "wt103_base": (267_735, 60),
    "nvidia_wt103_base": (267_735, 128),
    "wt103_large": (267_735, 64),
}
"""Vocabulary size in tokens, and lanes (batch rows) on one device. The number of lanes is halved until the step fits
into the GPU's memory."""
CODES = ("ours graphed", "ours", "original TF32", "nvidia fp16")
"""Codes to compare. The first one replays forward and backward as one CUDA graph."""
HALVES = (torch.bfloat16, torch.float16)
OUTPUTS = ("result", "q", "kv", "R", "u", "v")
Found = Iterator[Mapping[str, object]]


class Shape(NamedTuple):
    """Sizes of one call of attention. `queries` and `memory` are in tokens."""

    name: str
    lanes: int
    queries: int
    memory: int
    heads: int
    head_width: int


SHAPES = (
    Shape("enwik8 base", 22, 512, 512, 8, 64),
    Shape("enwik8 large", 8, 768, 768, 8, 128),
    Shape("wt103 base", 60, 150, 150, 10, 41),
    Shape("NVIDIA wt103 base", 32, 192, 192, 8, 64),
    Shape("wt103 large", 16, 384, 384, 16, 64),
)
ODD_SHAPES = (
    Shape("odd", 3, 37, 23, 5, 40),
    Shape("no memory", 2, 128, 0, 4, 64),
    Shape("long memory", 2, 64, 640, 4, 32),
)
TINY_SHAPES = (Shape("tiny", 2, 16, 16, 2, 16), Shape("odd", 1, 7, 5, 3, 8))


class Leaves(NamedTuple):
    """Inputs of attention, of one type and on one device. All of them require gradients."""

    query: Tensor
    key_value: Tensor
    """Keys and values [B, K, 2, N, H], in the layout of the model's joint projection."""
    distance: Tensor
    content_bias: Tensor
    position_bias: Tensor

    def terms(self) -> Terms:
        """Return the inputs in the form that `Attention` passes to the attention function."""
        key, value = self.key_value.unbind(2)
        return Terms(self.query, key, value, self.distance, self.content_bias, self.position_bias)

    def cast(self, dtype: torch.dtype, device: str) -> Leaves:
        """Return the same values in another type and on another device."""
        return Leaves(*(x.detach().to(device, dtype).requires_grad_() for x in self))


def leaves_of(shape: Shape, *, dtype: torch.dtype, device: str) -> Leaves:
    """Return random inputs. They are drawn on the CPU, so that they are the same on every device."""
    generator, (_, B, T, M, N, H) = torch.Generator().manual_seed(0), shape
    sizes = [(B, T, N, H), (B, M + T, 2, N, H), (M + T, N, H), (N, H), (N, H)]
    return Leaves(*(torch.randn(size, generator=generator).to(dtype) for size in sizes)).cast(dtype, device)


def visibility(shape: Shape, *, device: str, documents: bool = False, oldest: int | None = None) -> AttentionMask:
    """Return the attention mask. With `documents`, a part of the memory is empty and a document begins inside the
    segment."""
    _, B, T, M, _, _ = shape
    of_keys = torch.zeros(B, M + T, dtype=torch.int64)
    if documents:
        of_keys[:, : M // 3], of_keys[:, M + T // 2 :] = EMPTY, 1
    of_keys = of_keys.to(device)
    return AttentionMask(of_keys[:, M:], of_keys, oldest)


def device(setting: Setting) -> dict[str, Job]:
    """Return the jobs that measure the device's limits."""
    where, size = setting.device, 1 << (20 if setting.rehearse else 29)

    def machine() -> Found:
        yield {"what": "device", "figure": torch.cuda.get_device_name() if where == "cuda" else "cpu"}
        for name in ("torch", "triton", "deepspeed"):
            yield {"what": name, "figure": _version(name)}
        yield {
            "what": "missing for compiling kernels",
            "figure": attention_launch.missing_compiler_reason() or "nothing",
        }
        if where == "cuda":
            one = torch.cuda.get_device_properties(0)
            yield {"what": "multiprocessors", "figure": one.multi_processor_count}
            yield {"what": "memory, GiB", "figure": one.total_memory / 2**30}
            yield {"what": "L2, MB", "figure": one.L2_cache_size / 1e6}
            yield {"what": "CUDA of torch", "figure": torch.version.cuda}
            yield {"what": "driver, clocks, power", "figure": _smi()}

    def copies() -> Found:
        source, target = torch.ones(size, device=where), torch.empty(size, device=where)
        ms = min(milliseconds(lambda: target.copy_(source)) for _ in range(10))
        yield {"what": "copy, GB/s read and written", "figure": 8 * size / ms / 1e6}
        ms = min(milliseconds(source.sum) for _ in range(10))
        yield {"what": "sum, GB/s read", "figure": 4 * size / ms / 1e6}

    def products() -> Found:
        kinds = {"fp32": torch.float32} if setting.rehearse else {
            "bf16": torch.bfloat16, "fp16": torch.float16, "TF32": torch.float32, "fp32": torch.float32
        }  # fmt: skip
        side = 128 if setting.rehearse else 8192
        for name, dtype in kinds.items():
            torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
            left, right = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
            found = times(functools.partial(torch.mm, left, right), device=where)
            yield {"what": f"{name} product of {side}^3, TFLOP/s", "figure": 2 * side**3 / _ms(found) / 1e9}
        torch.backends.cuda.matmul.allow_tf32 = False

    def launches() -> Found:
        small, count = torch.zeros(1024, device=where), 200
        found = times(lambda: [small.add_(1.0) for _ in range(count)], device=where)
        yield {"what": "small kernel in a graph, us", "figure": 1000 * _ms(found) / count}
        yield {"what": "small kernel launched by the host, us", "figure": 1000 * _ms(found, "host ms") / count}
        shape = Shape("tiny", 1, 16, 16, 1, 16)
        leaves, seen = leaves_of(shape, dtype=_half(setting), device=where), visibility(shape, device=where)
        with torch.no_grad():
            found = times(
                lambda: attention_launch.triton_relative_attention(leaves.terms(), visible=seen), device=where
            )
        yield {"what": "two Triton kernels launched by the host, us", "figure": 1000 * _ms(found, "host ms")}

    return {"machine": machine, "copies": copies, "products": products, "launches": launches}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _ms(found: Mapping[str, object], which: str = "device ms") -> float:
    return float(str(found[which]))


def _half(setting: Setting) -> torch.dtype:
    return torch.float32 if setting.rehearse else torch.bfloat16


FIRST_TESTS = tuple(
    f"tests/gpu/test_kernels_gpu.py::test_{name}"
    for name in (
        "context_and_all_gradients_are_those_of_the_twin[enwik8_base-torch.bfloat16-None]",
        "a_weighted_loss_and_its_gradients_are_those_of_autograd[torch.bfloat16-204-3.0]",
        "residual_and_norm_are_those_of_the_twin_and_the_same_again[410-torch.bfloat16-0.2]",
        "bias_and_activation_are_those_of_the_twin_and_the_same_again[relu-torch.bfloat16-0.2]",
        "adams_steps_are_those_of_torch_in_fp64[torch.bfloat16-Adam]",
        "products_that_lie_apart_are_attended_to_as_one[wt103_base]",
    )
)
"""Tests that run every kernel once between them. They come first, in case the time does not suffice for all tests."""


def tests(setting: Setting) -> dict[str, Job]:
    """Return a job per test of tests/gpu/test_kernels_gpu.py, those of `FIRST_TESTS` first."""
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]

    class Collector:
        ids: list[str] = []  # noqa: RUF012  a process has one collection

        def pytest_collection_finish(self, session: Any) -> None:
            self.ids += [item.nodeid for item in session.items]

    class Reporter:
        def __init__(self) -> None:
            self.rows: list[Row] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                row: Row = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
                words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
                if report.outcome == "failed":
                    row |= {"error": first_and_last_line(words), "log": words}
                elif report.outcome != "passed":
                    row["words"] = first_and_last_line(words)
                self.rows.append(row)

    def run(test: str) -> Found:
        reporter = Reporter()
        status = pytest.main([*options, str(ROOT / test)], plugins=[reporter])
        yield from reporter.rows or [{"error": f"pytest ended with {status!r}"}]

    pytest.main([*options, "--collect-only", str(ROOT / "tests/gpu/test_kernels_gpu.py")], plugins=[Collector()])
    ordered = [*FIRST_TESTS, *(test for test in Collector.ids if test not in FIRST_TESTS)]
    chosen = ordered[:2] if setting.rehearse else ordered
    return {test: functools.partial(run, test) for test in chosen}


def twins(setting: Setting) -> dict[str, Job]:
    """Return the jobs that compare the device's results with fp64 on the CPU."""
    shapes = TINY_SHAPES if setting.rehearse else (*SHAPES, *ODD_SHAPES)
    attention = {f"attention, {s.name}": functools.partial(_attention_twins, setting, s) for s in shapes}
    windows = {"windows": functools.partial(_attention_twins, setting, shapes[0], oldest=1)}
    models = {part: functools.partial(_model_twins, setting, part) for part in ("softmax", "embedding", "model")}
    return {**models, "dropout": functools.partial(_dropout, setting), **windows, **attention}


def _attention_twins(setting: Setting, shape: Shape, *, oldest: int | None = None) -> Found:
    where, dtypes = setting.device, (torch.float32,) if setting.rehearse else HALVES
    shape = shape._replace(lanes=min(shape.lanes, 2))
    for dtype in dtypes:
        for documents in (False, True):
            given = leaves_of(shape, dtype=dtype, device=where)
            exact = given.cast(torch.float64, "cpu")
            seen, known = (visibility(shape, device=d, documents=documents, oldest=oldest) for d in (where, "cpu"))
            mine = attention_launch.triton_relative_attention(given.terms(), visible=seen)
            theirs = relative_attention(exact.terms(), visible=known)
            towards = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            gradients = torch.autograd.grad(mine, given, towards.to(where))
            true = torch.autograd.grad(theirs, exact, towards.double())
            pairs = zip(OUTPUTS, (mine, *gradients), (theirs, *true), strict=True)
            row: Row = {"type": _name(dtype), "documents": str(documents)}
            yield row | {name: _error(a, b) for name, a, b in pairs}


def _error(mine: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the exact result, computed on the CPU in fp64."""
    exact = exact.detach().double()
    return float((mine.detach().cpu().double() - exact).norm() / exact.norm())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _small_model(setting: Setting, *, dropout: float = 0.0) -> Sizes:
    wide = not setting.rehearse
    section = ModelSection(
        num_layers=3 if wide else 2,
        width=256 if wide else 32,
        num_heads=4 if wide else 2,
        head_width=64 if wide else 16,
        ff_width=512 if wide else 64,
        cutoffs=(1000, 4000) if wide else (50, 150),
        div_value=2,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return Sizes(section, 10_000, 4, 128, 128) if wide else Sizes(section, 300, 2, 8, 8)


def _model_twins(setting: Setting, part: str) -> Found:
    """Yield rows with errors of loss and gradients. The whole model runs on two segments, softmax and embedding on
    one."""
    sizes = _small_model(setting)
    for dtype in (torch.float32,) if setting.rehearse else (*HALVES, torch.float32):
        torch.manual_seed(0)
        exact = TransformerXL(sizes.model, vocab_size=sizes.vocab_size).to(dtype).double()
        mine = TransformerXL(sizes.model, vocab_size=sizes.vocab_size, attention="auto").to(setting.device, dtype)
        mine.load_state_dict(exact.state_dict())
        outcomes = [_outcome(model, part, sizes) for model in (mine, exact)]
        (result, gradients), (true, true_gradients) = outcomes
        errors = {name: _error(gradients[name], true) for name, true in true_gradients.items() if true.norm()}
        worst = max(errors, key=lambda name: errors[name])
        yield {
            "type": _name(dtype),
            "result": _error(result, true),
            "median gradient": sorted(errors.values())[len(errors) // 2],
            "worst gradient": errors[worst],
            "which": worst,
        }


def _outcome(model: TransformerXL, part: str, sizes: Sizes) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (result, gradients by name) of a part of the model."""
    weight = model.embedding.weight(0)
    maker = batch_maker(model, mask_documents=False)
    segments = zipf_segments(sizes)
    batches = [to_device(maker.batch(plain_segment(next(segments))), weight.device) for _ in range(2)]
    size = (sizes.num_lanes, sizes.segment_len, sizes.model.width)
    values, towards = (torch.randn(size, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in (2, 3))
    if part == "embedding":
        result = model.embedding(batches[0].tokens_BT, partition=batches[0].token_partition)
        (result * towards.to(result)).sum().backward()
    elif part == "softmax":
        hidden = values.to(weight).requires_grad_()
        result = model.softmax(
            hidden,
            batches[0].targets_BT,
            partition=batches[0].target_partition,
            weight_BT=batches[0].scored_BT / sizes.tokens,
        )
        result.backward()
    else:
        result, memory = torch.zeros(()), model.empty_memory(num_lanes=sizes.num_lanes, memory_len=sizes.memory_len)
        for batch in batches:
            loss, memory = SegmentLoss(model)(batch, memory, float(sizes.tokens))
            loss.backward()
            result = loss
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if part == "softmax":
        assert hidden.grad is not None
        gradients["hidden"] = hidden.grad
    return result, gradients


def _dropout(setting: Setting) -> Found:
    """Check that the same seed gives the same bits, that another seed gives other bits, and that the mean of the kept
    values is right."""
    where, rate = setting.device, 0.15
    shape = Shape("dropout", 2, 64, 64, 2, 16) if setting.rehearse else Shape("dropout", 2, 512, 512, 8, 64)
    leaves, seen = leaves_of(shape, dtype=_half(setting), device=where), visibility(shape, device=where)
    even = Leaves(torch.zeros_like(leaves[0]), torch.ones_like(leaves[1]), *map(torch.zeros_like, leaves[2:]))
    torch.manual_seed(0)
    context = attention_launch.triton_relative_attention(even.terms(), visible=seen, dropout=rate)
    yield {"what": "attention: mean of what should be 1", "figure": float(context.float().mean())}
    sizes = _small_model(setting, dropout=rate)
    model = TransformerXL(sizes.model, vocab_size=sizes.vocab_size).to(where, _half(setting)).train()
    told: list[dict[str, Tensor]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        told.append(_outcome(model, "model", sizes)[1])
    for words, other in (("the same seed", told[1]), ("another seed", told[2])):
        alike = [torch.equal(value, other[name]) for name, value in told[0].items()]
        yield {"what": f"model: gradients with the same bits, {words}, %", "figure": 100 * sum(alike) / len(alike)}


def _ranks(setting: Setting) -> RankInfo:
    """Join the process group for the rest of the process, and return the rank."""
    if setting.rehearse:
        gpu_engine.graphs_by_running_again()
    return distributed_context(timeout_s=120, num_threads=1 if setting.rehearse else 8).__enter__()


def steps(setting: Setting) -> dict[str, Job]:
    """Return jobs for eager and for graphed steps in bf16 at ZeRO stage 1. See `engine`."""
    half = "fp32" if setting.rehearse else "bf16"
    return _engine_jobs(setting, [(1, half, False), (1, half, True)])


def engine(setting: Setting) -> dict[str, Job]:
    """Return a job per stage, type and graph setting of `ZeroEngine`, without those of `steps`.

    `off by` is the largest relative difference from the CPU's figures.
    """
    half = "fp32" if setting.rehearse else "bf16"
    cases = [(0, half, False), (2, half, False), (3, half, False)]
    cases += [] if setting.rehearse else [(1, "fp16", False), (0, "fp16", False), (1, "fp16", True)]
    cases += [(0, half, True), (2, half, True)]
    if not setting.rehearse and "tf32" in get_args(EngineSection.model_fields["precision"].annotation):
        cases.append((1, "tf32", False))
    return _engine_jobs(setting, cases)


def _engine_jobs(setting: Setting, cases: list[tuple[int, str, bool]]) -> dict[str, Job]:
    """Return a job per case (ZeRO stage, precision, whether the steps are graphed)."""
    ranks = _ranks(setting)
    wanted = gpu_engine.reference(setting, ranks)

    def one(stage: int, precision: str, graphed: bool) -> Found:
        return gpu_engine.measured(setting, ranks, stage=stage, precision=precision, graphed=graphed, wanted=wanted)

    return {f"ZeRO-{s} {p}{' graphed' * g}": functools.partial(one, s, p, g) for s, p, g in cases}


def profile(setting: Setting) -> dict[str, Job]:
    """Return jobs that yield a row for the step, and a row for each of the longest kernels."""
    ranks, tiny = _ranks(setting), setting.rehearse
    lanes = 2 if tiny else gpu_engine.LANES

    def one(graphed: bool) -> Found:
        precision = "fp32" if tiny else "bf16"
        config = gpu_engine.recipe(stage=1, precision=precision, graphed=graphed, lanes=lanes, tiny=tiny)
        training = gpu_engine.Training(config, ranks, lanes=lanes)
        return gpu_engine.profiled(training, steps=1 if tiny else 3, rows=5 if tiny else 40)

    return {"graphed": functools.partial(one, True), "eager": functools.partial(one, False)}


BUFFERS_MIB = (192, 46, 92, 23)
"""Score buffers to try. They hold 8, 2, 4 and 1 heads of enwik8_base. The L2 cache of an H100 has 50 MB."""
TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "attend": ((128, 64, 4, 2), (128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3)),
    "key_value_gradients": ((64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 8, 3)),
    "query_gradients": ((128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 4)),
    "distance_query_gradients": ((128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 4)),
    "distance_gradients": ((128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 4)),
    "distance_scores": ((128, 128, 8, 1), (128, 64, 4, 1), (64, 64, 4, 1)),
}
"""Tiles (rows, columns, warps, stages) to try instead of those of `attention_launch.tiles`, by kernel."""


def sweep(setting: Setting) -> dict[str, Job]:
    """Return jobs that time attention of enwik8_base, forward and backward, with distance scores kept and computed
    again, with other score buffers, and with another tile for one kernel at a time."""
    shape = TINY_SHAPES[0] if setting.rehearse else SHAPES[0]
    buffers = BUFFERS_MIB[:1] if setting.rehearse else BUFFERS_MIB
    jobs: dict[str, Job] = {}
    for words, keeps in (("kept", True), ("computed again", False)):
        one = functools.partial(_swept, setting, shape, keeps_scores=keeps)
        jobs |= {f"scores {words}, buffer {size} MiB": functools.partial(one, buffer_mib=size) for size in buffers}
    for number in range(1 if setting.rehearse else 4):
        for name, tried in list(TILES.items())[: 1 if setting.rehearse else None]:
            if number < len(tried):
                words = "x".join(map(str, tried[number]))
                jobs[f"{name} {words}"] = functools.partial(_swept, setting, shape, kernel=name, tile=tried[number])
    return jobs


def _swept(
    setting: Setting,
    shape: Shape,
    *,
    keeps_scores: bool = True,
    buffer_mib: int = 192,
    kernel: str = "",
    tile: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Found:
    usual = attention_launch.tiles(shape.head_width, has_dropout=False)
    if kernel and kernel not in usual:
        raise Skipped(f"attention_launch.py has no kernel {kernel}")
    attend = functools.partial(attention_launch.triton_relative_attention, keeps_scores=keeps_scores)
    with _changed(buffer_mib, kernel, tile, usual):
        cache = torch.cuda.get_device_properties().L2_cache_size if setting.device == "cuda" else 50 * 10**6
        share = attention_launch.SCORE_BUFFER_BYTES / cache
        yield {"buffer / L2": share} | attention_times(setting, shape, attend, dtype=_half(setting))


@contextmanager
def _changed(buffer_mib: int, kernel: str, tile: tuple[int, int, int, int], usual: dict[str, Any]) -> Iterator[None]:
    rows, columns, warps, stages = tile
    changes: dict[str, Any] = {"SCORE_BUFFER_BYTES": buffer_mib << 20}
    if kernel:
        *_, smallest = usual[kernel]
        other = smallest._replace(rows=rows, columns=columns, num_warps=warps, num_stages=stages, max_registers=None)
        changes["tiles"] = lambda width, *, has_dropout: usual | {kernel: (other,)}
    with mock.patch.multiple(attention_launch, **changes):
        yield


def attention_times(
    setting: Setting, shape: Shape, attend: Callable[..., Tensor], *, dtype: torch.dtype
) -> dict[str, object]:
    """Return milliseconds and TFLOP/s of the forward pass, and of forward and backward together."""
    _, B, T, M, N, H = shape
    leaves, seen = leaves_of(shape, dtype=dtype, device=setting.device), visibility(shape, device=setting.device)
    towards = torch.randn(B, T, N, H, device=setting.device).to(dtype)

    def forward() -> Tensor:
        return attend(leaves.terms(), visible=seen)

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, towards)

    ahead, whole = times(forward, device=setting.device), times(both, device=setting.device)
    product = 2 * B * N * H * T * (M + (T + 1) / 2)  # operations of one of the three products of the forward pass
    return {
        "forward ms": ahead["device ms"],
        "both ms": whole["device ms"],
        "host ms": whole["host ms"],
        "forward TFLOP/s": 3 * product / _ms(ahead) / 1e9,
        "both TFLOP/s": 9 * product / _ms(whole) / 1e9,
        "timed": whole["timed"],
    }


def codes(setting: Setting) -> dict[str, Job]:
    """Return a job per code, on enwik8_base."""
    return {code: functools.partial(step, setting, "enwik8_base", code) for code in CODES}


def step(setting: Setting, recipe: str, code: str) -> Found:
    """Yield a row with tokens per second, MFU and peak memory of one code on one recipe."""
    vocab_size, lanes = RECIPES[recipe]
    while True:
        sizes = Sizes.of(load_config(ROOT / f"configs/{recipe}.toml"), vocab_size=vocab_size, num_lanes=lanes)
        try:
            yield {"recipe": recipe, "code": code} | _timed(
                _shrunk(sizes) if setting.rehearse else sizes, code, setting
            )
            return
        except torch.OutOfMemoryError:
            if lanes == 1:
                raise
            lanes //= 2
        gc.collect()  # trainers contain reference cycles, and the one that did not fit still holds its memory
        torch.cuda.empty_cache()


def _timed(sizes: Sizes, code: str, setting: Setting) -> Row:
    device, segments = setting.device, zipf_segments(sizes)
    trainer = trainer_of(sizes, code, setting)
    given = [next(segments) for _ in range(8)]
    first_loss = float(trainer.step(given[0]))
    for ids in given[1:3]:
        trainer.step(ids)
    guess_ms = milliseconds(lambda: trainer.step(given[3]))
    steps = min(200, max(4, round(4000 / guess_ms))) if device == "cuda" else 4

    def some() -> None:
        for number in range(steps):
            loss = trainer.step(given[number % len(given)])
        assert math.isfinite(float(loss)), "the loss is not finite"

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # removes the peak of an attempt with more lanes that did not fit
    step_ms = min(milliseconds(some) for _ in range(2)) / steps
    flops = flops_by_part(
        sizes.model,
        vocab_size=sizes.vocab_size,
        segment_len=sizes.segment_len,
        memory_lens=[sizes.memory_len] * sizes.model.num_layers,
        microbatch_lanes=sizes.num_lanes,
    )
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    tflops, peak = sum(flops.values()) * sizes.tokens / step_ms / 1e9, peak_tflops(name, precision="bf16")
    return {
        "lanes": sizes.num_lanes,
        "step ms": step_ms,
        "tokens/s": 1000 * sizes.tokens / step_ms,
        "MFU % (of bf16 peak)": 100 * tflops / peak if peak else float("nan"),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan"),
        "first loss": first_loss,
    }


def trainer_of(sizes: Sizes, code: str, setting: Setting) -> Trainer:
    """Build the trainer of one of `CODES`. Ours runs in bf16. In a rehearsal all run in fp32."""
    device = setting.device
    if code == "original TF32":
        torch.set_float32_matmul_precision("high")
        return PeerTrainer(original(_given(setting, "original")), sizes, device=device)
    if code == "nvidia fp16":
        return PeerTrainer(nvidia(_given(setting, "nvidia")), sizes, device=device, nvidia=True, half=device == "cuda")
    precision = "bf16" if device == "cuda" else "fp32"
    return OurTrainer(sizes, attention="auto", device=device, precision=precision, graphed="graphed" in code)


def _given(setting: Setting, name: str) -> Path:
    folder = setting.peers[name]
    if folder is None:
        raise Skipped(f"--peer-{name} was not given")
    return folder


def _shrunk(sizes: Sizes) -> Sizes:
    """Return tiny sizes for a rehearsal, with the same kinds of parts as the recipe."""
    small = {"num_layers": 2, "width": 32, "num_heads": 2, "head_width": 16, "ff_width": 64}
    cutoffs = (100, 200, 300) if sizes.model.cutoffs else ()
    model = ModelSection.model_validate(
        sizes.model.model_dump() | small | {"cutoffs": cutoffs, "div_value": min(2, sizes.model.div_value)}
    )
    return Sizes(model, 400, 2, 16, 16)


SECTIONS: dict[str, Section] = {
    "device": device,
    "steps": steps,
    "tests": tests,
    "twins": twins,
    "engine": engine,
    "profile": profile,
    "sweep": sweep,
    "codes": codes,
}
