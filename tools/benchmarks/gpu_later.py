"""The sections of `gpu.py --run 2` and `--run 3`: comparison of our attention and steps with other codes, and training.

kernels   relative attention alone, with every implementation that can compute it recipes   whole steps of the
WikiText-103 recipes, of our code and of the other codes curve     3,000 steps of `txl train` on the source text of
Python's library, on the CPU and on the GPU resume    a run that is resumed from its middle, compared with the
uninterrupted run memcheck  attention once, forward and backward, under NVIDIA's compute-sanitizer
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.benchmarks.gpu_jobs import Job, Section, Setting, Skipped, error_row
from tools.benchmarks.gpu_rows import Row
from tools.benchmarks.gpu_sections import (
    ROOT,
    SHAPES,
    TINY_SHAPES,
    Found,
    Shape,
    attention_times,
    step,
)
from txl_dist.config.load import Config, config_to_toml, load_config
from txl_dist.errors import first_and_last_line
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.kernels.attention_launch import triton_relative_attention
from txl_dist.model.memory import AttentionMask
from txl_dist.model.relative_attention import Terms, relative_attention


def kernels(setting: Setting) -> dict[str, Job]:
    """Return a job per shape and variant, ours first."""
    shapes = TINY_SHAPES[:1] if setting.rehearse else SHAPES
    names = list(attentions(setting))
    jobs: dict[str, Job] = {}
    for name in names:
        for shape in shapes:
            jobs[f"{shape.name}, {name}"] = functools.partial(_timed_kernel, setting, shape, name)
    return jobs


def _timed_kernel(setting: Setting, shape: Shape, name: str) -> Found:
    dtype = torch.float32 if setting.rehearse else torch.bfloat16
    yield attention_times(setting, shape, attentions(setting)[name](), dtype=dtype)


def attentions(setting: Setting) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Return all implementations of relative attention by name. They have the signature of the plain equation."""
    found: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "triton": lambda: functools.partial(triton_relative_attention, keeps_scores=True),
        "sdpa": lambda: _sdpa,
        "flex": _Flex,
        "fused": lambda: fused_relative_attention,
        "plain": lambda: relative_attention,
    }
    if setting.rehearse:
        del found["flex"]  # it has no backward pass on a CPU
    return found


def _shifted_terms(terms: Terms) -> tuple[Tensor, Tensor]:
    """Return the terms (b)+(d) by distance, [N, B, T, K+1] with a column of zeros in front, and a view of them by key,
    [N, B, T, K]."""
    query, distance, position_bias = terms.query_BTNH, terms.distance_KNH, terms.position_bias_NH
    assert distance is not None
    assert position_bias is not None
    (B, T, N, H), K = query.shape, distance.shape[0]
    position_query = (query + position_bias).permute(2, 0, 1, 3).reshape(N, B * T, H)
    products = torch.bmm(position_query, F.pad(distance.permute(1, 2, 0), (1, 0))).view(N, B, T * (K + 1))
    return products.view(N, B, T, K + 1), products[:, :, T:].view(N, B, T, K)


def _sdpa(terms: Terms, *, visible: AttentionMask) -> Tensor:
    """Compute attention with torch's memory-efficient kernel and the shifted view as bias. The other backends fail or
    give wrong results."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (query, key, value), (_, shifted) = terms[:3], _shifted_terms(terms)
    scale = query.shape[-1] ** -0.5
    hidden_BTK = ~visible.mask()
    bias = (shifted * scale).masked_fill_(hidden_BTK, float("-inf")).transpose(0, 1)
    assert terms.content_bias_NH is not None
    content_query = (query + terms.content_bias_NH).transpose(1, 2)
    backend = SDPBackend.EFFICIENT_ATTENTION if query.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        context = F.scaled_dot_product_attention(
            content_query, key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias, scale=scale
        )
    return context.transpose(1, 2)


class _Flex:
    """FlexAttention, compiled. Its score function reads the terms (b)+(d)."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.attend = torch.compile(flex_attention, dynamic=False)
        self.create_mask, self.masks = create_block_mask, dict[tuple[int, int], Any]()

    def __call__(self, terms: Terms, *, visible: AttentionMask) -> Tensor:
        query, key, value = terms[:3]
        T, K = query.shape[1], key.shape[1]
        scale: float = query.shape[-1] ** -0.5
        products = _shifted_terms(terms)[0]
        if (T, K) not in self.masks:
            near = lambda b, h, i, j: j <= i + K - T  # noqa: E731
            self.masks[T, K] = self.create_mask(near, None, None, T, K, device=query.device)

        def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + products[h, b, i, torch.clamp(j - i + T, 0, K)] * scale

        assert terms.content_bias_NH is not None
        heads = ((query + terms.content_bias_NH).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        context: Tensor = self.attend(*heads, score_mod=score, block_mask=self.masks[T, K], scale=scale)
        return context.transpose(1, 2)


def recipes(setting: Setting) -> dict[str, Job]:
    """Return a job per WikiText-103 recipe and code, ours first."""
    names = ("wt103_base", "nvidia_wt103_base", "wt103_large")
    codes = ("ours graphed", "nvidia fp16", "original TF32", "ours")
    return {
        f"{name}, {code}": functools.partial(step, setting, name, code)
        for code in codes
        for name in (names[:1] if setting.rehearse else names)
    }


KINDS: dict[str, dict[str, Any]] = {
    "bf16 graphed": {"precision": "bf16", "cuda_graph": True},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
}
SCRATCH = tempfile.TemporaryDirectory()
"""Temporary folder of this process."""


def curve(setting: Setting) -> dict[str, Job]:
    """Return one job. It contains all runs, because they share the corpus and the CPU's run continues in the
    background."""
    return {"curves": functools.partial(_curves, setting)}


def _curves(setting: Setting) -> Found:
    """Yield a row per run with the mean losses of twelve parts of the run, and the largest difference from the CPU's
    losses.

    The model and the learning rate are those of the quickstart, with 8 lanes (batch rows) and without dropout, so that
    only the arithmetic differs.
    """
    steps = 24 if setting.rehearse else 3000
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepared(tiny=setting.rehearse)
        started = _start(corpus, Path(folder, "cpu"), steps=steps, engine=KINDS["fp32"], cpu=True)
        found: dict[str, list[float]] = {}
        kinds = {"fp32 again": KINDS["fp32"]} if setting.rehearse else KINDS
        for name, engine in kinds.items():
            run = Path(folder, name.replace(" ", "_"))
            try:
                _finish(_start(corpus, run, steps=steps, engine=engine, cpu=setting.rehearse))
            except RuntimeError as error:
                yield {"run": name, **error_row(error)}
                continue
            found[name] = _parts(_losses(run))
            yield {"run": name, "losses": found[name]}
        _finish(started)
        on_cpu = _parts(_losses(Path(folder, "cpu")))
        yield {"run": "CPU fp32", "losses": on_cpu}
        for name, losses in found.items():
            off = max(abs(a - b) / b for a, b in zip(losses, on_cpu, strict=True))
            yield {"run": name, "losses off by": off, "at the end by": losses[-1] / on_cpu[-1] - 1}


def resume(setting: Setting) -> dict[str, Job]:
    """Return a job per kind of arithmetic."""
    kinds = {"fp32": KINDS["fp32"]} if setting.rehearse else KINDS
    return {name: functools.partial(_resumed, setting, engine) for name, engine in kinds.items()}


def _resumed(setting: Setting, engine: dict[str, Any]) -> Found:
    """Train, resume a copy of the run from its middle, and compare losses and weights bit by bit."""
    half = 4 if setting.rehearse else 30
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepared(tiny=setting.rehearse)
        whole, copied = Path(folder, "whole"), Path(folder, "copied")
        words: dict[str, Any] = {"steps": 2 * half, "engine": engine, "cpu": setting.rehearse, "save_every": half}
        _finish(_start(corpus, whole, **words))
        shutil.copytree(whole, copied)
        last, middle = (sorted((copied / "checkpoints").glob("step_*"))[place] for place in (-1, 0))
        shutil.rmtree(last)
        _finish(_start(corpus, copied, **words, resume=str(middle)))
        losses = [_losses(run)[half:] for run in (whole, copied)]
        hashes = [_hashes(sorted((run / "checkpoints").glob("step_*"))[-1]) for run in (whole, copied)]
        yield {
            "steps": half,
            "losses alike": sum(a == b for a, b in zip(*losses, strict=True)),
            "files": len(hashes[0]),
            "files alike": sum(hashes[0][name] == hashes[1].get(name) for name in hashes[0]),
        }


@functools.cache
def prepared(*, tiny: bool) -> Path:
    """Prepare a corpus of real text once and return its folder. The text is the source of Python's library, or this
    project's docs in a rehearsal."""
    corpus = Path(SCRATCH.name, "corpus")
    inputs = [*map(str, sorted((ROOT / "docs").glob("*.md")))] if tiny else ["stdlib"]
    size = "2500" if tiny else "4096"
    _finish(_txl("prepare", *inputs, "--out", str(corpus), "--vocab-size", size))
    return corpus


def _start(
    corpus: Path,
    run: Path,
    *,
    steps: int,
    engine: dict[str, Any],
    cpu: bool,
    save_every: int = 0,
    resume: str = "auto",
) -> Child:
    path = run.with_suffix(f".{resume == 'auto'}.toml")
    values = load_config(ROOT / "configs/quickstart.toml").model_dump(mode="json")
    changes = {
        "data": {"path": str(corpus)},
        "run": {"dir": str(run)},
        "train": {"max_steps": steps, "num_lanes": 8, "microbatch_lanes": 8},
        "engine": engine,
        "metrics": {"log_every_steps": 1, "sample_every_steps": 0},
        "eval": {"every_steps": 0},
        "checkpoint": {"every_steps": save_every or steps},
    }
    for section, fields in changes.items():
        values[section] |= fields
    path.write_text(config_to_toml(Config.model_validate(values)), encoding="utf-8")
    return _txl("train", str(path), f"--resume={resume}", cpu=cpu)


def _txl(*words: str, cpu: bool = False) -> Child:
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    own = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads} if cpu else {}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    return Child([sys.executable, "-m", "txl_dist", *words], environment)


class Child:
    """Process whose output is copied to the standard error of this process, which is the log, line by line.

    So the log has the output also if this process is killed. The pipe is read at all times, because a full pipe would
    stop the process.
    """

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Start the process. Without `environment` it has that of this process."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, errors="replace", **pipes)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._copy, daemon=True)
        self.reader.start()

    def wait(self) -> tuple[int, str]:
        """Wait for the process. Return its exit status and its output."""
        self.reader.join()
        return self.process.wait(), "".join(self.lines)

    def _copy(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)


def _finish(child: Child) -> None:
    """Wait for the process. Raises RuntimeError with its output if it failed."""
    status, said = child.wait()
    if status != 0:
        raise RuntimeError(said.strip() or f"exit status {status}")


def _losses(run: Path) -> list[float]:
    """Return the loss of every step of a run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    by_step = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
    return [by_step[number] for number in sorted(by_step)]


def _parts(losses: list[float], *, count: int = 12) -> list[float]:
    size = len(losses) // count
    return [sum(losses[n * size : (n + 1) * size]) / size for n in range(count)]


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Return the hashes of a checkpoint's tensor files."""
    return {
        str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.rglob("*.safetensors"))
    }


def memcheck(setting: Setting) -> dict[str, Job]:
    """Return one job that runs attention under compute-sanitizer."""
    return {"attention": functools.partial(_checked, setting)}


def _checked(setting: Setting) -> Found:
    """Run attention under compute-sanitizer and yield its result, which is an error if it found one. Raises Skipped if
    compute-sanitizer is not installed."""
    found = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if found is None:
        raise Skipped("compute-sanitizer is not installed")
    if setting.device != "cuda":
        raise Skipped("there is no GPU")
    command = [found, "--tool", "memcheck", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tools.benchmarks.gpu_later"]
    status, said = Child(command).wait()
    lines = said.splitlines()
    summary = [line for line in lines if "ERROR SUMMARY" in line or "Invalid" in line]
    row: Row = {"exit status": status, "words": (summary or lines or [""])[-1][:200]}
    yield row | ({"error": first_and_last_line(said) or f"exit status {status}", "log": said} if status else {})


def once() -> None:
    """Run attention at an odd shape with dropout, forward and backward, for compute-sanitizer to check."""
    from tools.benchmarks.gpu_sections import leaves_of, visibility

    shape = Shape("odd", 2, 37, 23, 3, 40)
    leaves = leaves_of(shape, dtype=torch.bfloat16, device="cuda")
    seen = visibility(shape, device="cuda", documents=True)
    context = triton_relative_attention(leaves.terms(), visible=seen, dropout=0.1)
    torch.autograd.grad(context, leaves, torch.randn_like(context))
    torch.cuda.synchronize()


SECTIONS: dict[str, Section] = {
    "kernels": kernels,
    "recipes": recipes,
    "curve": curve,
    "resume": resume,
    "memcheck": memcheck,
}


def main() -> None:
    """Run attention once. Compute-sanitizer starts this program without arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device. tools/benchmarks/gpu.py --rehearse tries the sections on a CPU.")
    once()


if __name__ == "__main__":
    main()
