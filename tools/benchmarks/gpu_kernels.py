"""Compile the Triton kernels of `gpu.py --run 1` on a CPU, and pack Triton's cache for the machine with the GPU.

    python -m tools.benchmarks.gpu_kernels --out kernels.tar.gz     ten minutes on one core
    tar xzf kernels.tar.gz -C / && export TRITON_CACHE_DIR=FOLDER   on the machine with the GPU

Compiling takes minutes of one core, and a GPU would wait for it. The tests of tests/gpu, the sections `twins` and
`sweep`, and the engine of section `engine` run here on a fake GPU (fake_gpu.py) of compute capability 9.0. Each launch
of a Triton kernel only compiles the kernel. Triton up to 3.6 also compiles a launcher in C per kernel. The launchers
are linked against a libcuda that does nothing. The machine's own libcuda is used there.

The kernels are found on the other machine if it has the same version of Triton and, for the launchers, of Python. The
cache contains absolute paths, so FOLDER must be the same on both machines (--folder). A kernel that is not found is
compiled as usual. The table has a row per part: `kernels` that were launched, and how many kernels and launchers were
`compiled`, because they were not in FOLDER before.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gzip
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tools.benchmarks.fake_gpu import HopperDriver, fake_gpu
from tools.benchmarks.measuring import announced, print_table
from txl_dist.model.kernels import attention_launch

ROOT = Path(__file__).parents[2]
FOLDER = Path("/tmp/txl-triton")
KEPT = (".cubin", ".json", ".so")
"""Endings of the files that Triton uses when it finds a kernel. The others are intermediate forms of the code."""


class CompilingRecorder:
    """The `Recorder` of this program. It keeps each launch whose arguments are compiled in a different way."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def operation(self, function: Any, arguments: tuple[Any, ...], settings: dict[str, Any], result: Any) -> None:
        """Ignore an operation of torch. See `Recorder`."""

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Record a launch of a Triton kernel. See `Recorder`."""
        given = tuple(map(_without_values, arguments))
        key = f"{kernel.fn.__name__} {given} {sorted(settings.items(), key=str)}"
        self.launches[key] = (kernel, given, settings)

    def compile_all(self) -> int:
        """Compile all recorded kernels and their launchers for sm_90. Return the number of different kernels."""
        from triton.runtime import driver

        driver._active = HopperDriver()
        built: dict[int, Any] = {}
        for kernel, arguments, settings in self.launches.values():
            compiled = kernel.run(*arguments, grid=(1,), warmup=True, **settings)
            built[id(compiled)] = compiled
        _compile_launchers(list(built.values()))
        return len(built)


class _Pointer:
    """Argument for a kernel that is only compiled: the type of a tensor, and its address within its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def __repr__(self) -> str:
        return f"{self.dtype} {self._address % 16}"

    def data_ptr(self) -> int:
        """Return the address. Triton compiles a kernel again for an address that is no multiple of 16."""
        return self._address


def _without_values(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _Pointer(argument)
    if isinstance(argument, tuple):
        items = map(_without_values, argument)
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    return argument


@contextmanager
def _stub_libcuda(backend: Path) -> Iterator[None]:
    """Let Triton link against a libcuda whose functions do nothing, because this machine has no driver.

    `backend` is Triton's folder for NVIDIA's GPUs. The library has all of libcuda's functions that its sources name.
    So launchers can be loaded here too: Triton compiles a launcher again if it cannot be loaded.
    """
    sources = [path.read_text(encoding="utf-8") for path in (*backend.glob("*.c"), *backend.glob("*.py"))]
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", " ".join(sources))))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "stub.c"), Path(folder, "libcuda.so.1")
        source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
        command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(library), "-Wl,-soname,libcuda.so.1"]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        with mock.patch.dict(os.environ, {"TRITON_LIBCUDA_PATH": folder}):
            yield


def _compile_launchers(kernels: list[Any]) -> None:
    """Compile the C code that starts these kernels, for the versions of Triton that have one launcher per kernel."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return
    with _stub_libcuda(Path(driver.__file__).parent):
        driver.CudaUtils()
        for kernel in kernels:
            driver.CudaLauncher(kernel.src, kernel.metadata)


def launch_tests(recorder: CompilingRecorder, tests: Sequence[str] = ("tests/gpu/test_kernels_gpu.py",)) -> list[str]:
    """Run tests by their pytest ids. Return the errors that may have ended a test before its last launch."""
    import pytest

    stopped: list[str] = []

    class OnFakeGpu:
        @pytest.hookimpl(wrapper=True)
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> Generator[None, object, object]:
            try:
                with _session(recorder):
                    return (yield)
            except (AssertionError, DynamicOutputShapeException):
                return True  # a fake GPU has no figures; the tests compare them after the last launch
            except Exception as error:  # noqa: BLE001
                stopped.append(f"{pyfuncitem.name}: {error!r}"[:200])
                return True

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[OnFakeGpu()])
    return stopped


def launch_section(recorder: CompilingRecorder, name: str) -> list[str]:
    """Run the jobs of a section of `gpu.py --run 1`. Return the errors that ended jobs."""
    from tools.benchmarks import gpu_sections
    from tools.benchmarks.gpu_jobs import Setting

    def once(action: Callable[[], object], *, device: str) -> dict[str, object]:
        action()
        return {"device ms": 1.0, "host ms": 1.0, "timed": "not at all"}

    true_outcome, last_outcome = gpu_sections._outcome, list[Any]()

    def outcome(model: Any, *others: Any) -> Any:
        """Return the GPU's outcome for the exact model on the CPU too. Backward of a fake CPU tensor fails."""
        if next(model.parameters()).is_cuda:
            last_outcome[:] = [true_outcome(model, *others)]
            return last_outcome[0]
        result, gradients = last_outcome[0]
        return result.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}

    stopped: list[str] = []
    with mock.patch.multiple(gpu_sections, times=once, _outcome=outcome):
        for job, work in gpu_sections.SECTIONS[name](Setting("cuda", False, {})).items():
            try:
                with _session(recorder):
                    list(work())
            except Exception as error:  # noqa: BLE001
                stopped.append(f"{job}: {error!r}"[:200])
    return stopped


def launch_engine(recorder: CompilingRecorder, precision: str, *, stages: Sequence[int] = (1,)) -> list[str]:
    """Make steps of the engine of enwik8_base at these ZeRO stages, with the numbers of lanes of section `engine`."""
    from tools.benchmarks import gpu_engine
    from tools.benchmarks.count_launches import fake_ranks, moved
    from tools.benchmarks.trainers import Sizes, zipf_segments
    from txl_dist.config.load import plan_batch
    from txl_dist.data.loader.stream import plain_segment
    from txl_dist.train.batch import batch_maker
    from txl_dist.train.engine.zero import ZeroEngine

    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ |= one_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with fake_gpu(recorder) as device, fake_ranks(device) as ranks:
        both = ((gpu_engine.REFERENCE_LANES, False), (gpu_engine.LANES, True))
        for stage, (lanes, has_dropout) in itertools.product(stages, both):
            config = gpu_engine.recipe(stage=stage, precision=precision, dropout=has_dropout, lanes=lanes)
            plan, vocab_size = plan_batch(config.train, world_size=1), gpu_engine.VOCAB_SIZE
            engine = ZeroEngine(config, vocab_size=vocab_size, plan=plan, ranks=ranks)
            maker = batch_maker(engine.model, mask_documents=False)
            memory = engine.empty_memory(num_lanes=lanes, memory_len=config.train.memory_len)
            sizes = Sizes.of(config, vocab_size=vocab_size, num_lanes=lanes)
            batch = moved(maker.batch(plain_segment(next(zipf_segments(sizes)))), device)
            loss, _ = engine.forward(batch, memory, normalizer=float(sizes.tokens))
            engine.backward(loss)
            engine.grad_norm()
            engine.step(lr=1e-4, grad_norm=1.0)
    return []


def launch_one(recorder: CompilingRecorder) -> list[str]:
    """Launch the small kernel that a run tries before it chooses Triton."""
    with _session(recorder) as device:
        attention_launch.run_small_kernel(device)
    return []


@contextmanager
def _session(recorder: CompilingRecorder) -> Iterator[torch.device]:
    """Yield the fake GPU, and replace the calls of tests and sections that need a real one."""

    def to_device(value: Tensor) -> Tensor:
        return value.to(torch.device("cuda", 0))

    def new_tensor(values: Any, *, device: Any = "cpu", **settings: Any) -> Tensor:
        made = _true_tensor(values, **settings)  # its values are known, so moving it would really move them
        return made if device == "cpu" else torch.empty(made.shape, dtype=made.dtype, device=device)

    def same_module(value: Any, memo: Any = None) -> Any:
        """Return a module itself, because a deep copy of a fake parameter ends the process (torch 2.11)."""
        return value if isinstance(value, nn.Module) else _true_deepcopy(value, memo)

    with ExitStack() as stack:
        device = stack.enter_context(fake_gpu(recorder))
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "set_sync_debug_mode", lambda mode: None),
            (torch, "Generator", lambda device="cpu": _true_generator()),
            (torch, "tensor", new_tensor),
            (copy, "deepcopy", same_module),
            (torch, "equal", lambda first, second: True),
            (Tensor, "cuda", to_device),
            (nn.Module, "cuda", lambda module: module._apply(to_device)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield device


_true_generator, _true_tensor, _true_deepcopy = torch.Generator, torch.tensor, copy.deepcopy
PARTS: dict[str, Callable[[CompilingRecorder], list[str]]] = {
    "one kernel": launch_one,
    "tests": launch_tests,
    "twins": lambda recorder: launch_section(recorder, "twins"),
    "sweep": lambda recorder: launch_section(recorder, "sweep"),
    "engine bf16": lambda recorder: launch_engine(recorder, "bf16", stages=(1, 2)),
    "engine fp16": lambda recorder: launch_engine(recorder, "fp16"),
    "engine tf32": lambda recorder: launch_engine(recorder, "tf32"),
}
"""Functions that launch the kernels of a part of the run on a fake GPU, by name. Each runs in its own process."""


def child(part: str) -> dict[str, object]:
    """Compile the kernels of a part in this process and return its row."""
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    recorder, began, known = CompilingRecorder(), time.monotonic(), len(binaries(folder))
    stopped = PARTS[part](recorder)
    return {
        "part": part,
        "kernels": recorder.compile_all(),
        "compiled": len(binaries(folder)) - known,
        "seconds": round(time.monotonic() - began),
        "stopped": "; ".join(stopped),
    }


def binaries(folder: Path) -> list[Path]:
    """Return the results of compilers in a cache: kernels and launchers."""
    return [path for path in folder.rglob("*") if path.suffix in (".cubin", ".so")]


def compiled(part: str, folder: Path) -> dict[str, Any]:
    """Compile a part in a new process. Raises RuntimeError with the end of its error output if it fails."""
    command = [sys.executable, "-m", "tools.benchmarks.gpu_kernels", "--child", part]
    own = {"TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the part {part} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def pack(folder: Path, out: Path) -> int:
    """Pack the cache with paths from the root of the file system. Return the number of files.

    The intermediate forms of the code are packed as empty files. Triton does not use them, but version 3.9 finds a
    kernel only if all of its files exist.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files:
            entry = archive.gettarinfo(path, arcname=str(path.relative_to("/")))
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
            if path.suffix not in KEPT:
                entry.size = 0
            archive.addfile(entry, io.BytesIO(path.read_bytes()))
    out.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return len(files)


def main() -> int:
    """Compile the parts, print a row for each, and pack the cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="archive that is written (.tar.gz)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="TRITON_CACHE_DIR on both machines")
    parser.add_argument("--keep", action="store_true", help="also pack what the folder contains")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child)))
        return 0
    if arguments.out is None:
        parser.error("name the archive with --out FILE")
    folder = arguments.folder.absolute()
    if not arguments.keep and folder.is_dir() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty. Remove it, or pack what it contains too with --keep.")
    rows = [compiled(part, folder) for part in announced(arguments.parts, what="part")]
    print_table("kernels", rows)
    count = pack(folder, arguments.out)
    print(f"{arguments.out}: {count} files, {arguments.out.stat().st_size / 1e6:.1f} MB, for TRITON_CACHE_DIR={folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
