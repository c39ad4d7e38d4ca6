"""Facts about GPUs and the machines around them, for `txl plan`.

Memory and bandwidth are from datasheets and from the output of `nvidia-smi`. Peaks are in `model.flops`. The other
figures are the shares of the bandwidths and peaks that a trainer reaches. These shares are not measured on any of our
machines. `tools/experiments/notebook/planning.md` has the source of each column, and says which figures are guesses.
Units are in the names: GiB are 2**30 bytes, GB are 1e9.
"""

from __future__ import annotations

from dataclasses import dataclass

from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError
from txl_dist.model.flops import peak_tflops

CONTEXT_GIB = 1.2
"""GPU memory in GiB that no allocator counts. CUDA's context, kernels, the workspace of cuBLAS and the buffers of NCCL
use it."""
FRAGMENTED_SHARE = 0.08
"""Share of the GPU memory, after CONTEXT_GIB is subtracted, that the caching allocator keeps in fragments too small for
any tensor. The value is a guess (see docs/planning.md)."""


@dataclass(frozen=True)
class Gpu:
    """Facts about one model of GPU and the machine around it."""

    device: str
    """Words by which the GPU is recognized in the device name that torch reports, as in `model.flops.PEAK_TFLOPS`."""
    memory_gib: float
    """Memory of the GPU that the driver reports, in GiB."""
    bandwidth_gb_s: float
    """Bandwidth of the GPU's memory in GB/s, from the datasheet."""
    bus_gb_s: float
    """Bus bandwidth in GB/s of an all-reduce among the GPUs of a machine, as nccl-tests defines it."""
    matmul_share: float
    """Share of the GPU's peak (operations per second) that the matrix products of Transformer-XL models reach. The time
    to read and write their operands is not included."""
    host_ms: float
    """Milliseconds in which the machine's CPU issues the forward pass of one layer in NVIDIA's Transformer-XL code."""
    has_bf16: bool = True
    """True if the GPU has bf16, which our Triton kernels need. GPUs have it from Ampere on."""
    clock: float = 1.0
    """Clock rate of this board, divided by the clock rate of the board for which the datasheet gives the peak."""

    def flops(self, precision: str) -> float:
        """Return the GPU's peak in operations per second for fp32, tf32, bf16 or fp16."""
        return peak_tflops(self.device, precision=precision) * 1e12 * self.clock

    @property
    def usable_bytes(self) -> float:
        """Bytes of the GPU's memory that are left for tensors."""
        return (self.memory_gib - CONTEXT_GIB) * (1 - FRAGMENTED_SHARE) * 2**30


_FAST_HOST_MS, _SLOW_HOST_MS = 15.38 / 16, 21.36 / 16

GPUS: dict[str, Gpu] = {
    "b200": Gpu("B200", 178.0, 7700, 700, 0.55, _FAST_HOST_MS),
    "h200": Gpu("H200", 140.4, 4800, 360, 0.55, _FAST_HOST_MS),
    "gh200": Gpu("GH200", 95.6, 4000, 360, 0.55, _FAST_HOST_MS),
    "h100": Gpu("H100", 79.6, 3350, 360, 0.55, _FAST_HOST_MS),
    "h100-pcie": Gpu("H100 PCIe", 79.6, 2000, 40, 0.55, _FAST_HOST_MS),
    "a100": Gpu("A100", 80.0, 2039, 235, 0.55, _FAST_HOST_MS),
    "a100-40gb": Gpu("A100", 39.6, 1555, 235, 0.55, _FAST_HOST_MS),
    "a40": Gpu("A40", 45.0, 696, 20, 0.55, _FAST_HOST_MS),
    "rtx-a6000": Gpu("RTX A6000", 47.5, 768, 20, 0.55, _FAST_HOST_MS),
    "l40s": Gpu("L40S", 45.0, 864, 20, 0.55, _FAST_HOST_MS),
    "l4": Gpu("L4", 22.5, 300, 12, 0.55, _FAST_HOST_MS),
    "v100-16gb": Gpu("V100", 15.8, 900, 75, 0.72, _SLOW_HOST_MS, has_bf16=False),
    "v100-32gb": Gpu("V100", 31.7, 900, 75, 0.72, _SLOW_HOST_MS, has_bf16=False),
    "v100-32gb-450w": Gpu("V100", 31.7, 981, 120, 0.94, _FAST_HOST_MS, has_bf16=False, clock=131 / 125),
    "t4": Gpu("T4", 14.6, 320, 10, 0.55, _SLOW_HOST_MS, has_bf16=False),
    "rtx-4090": Gpu("RTX 4090", 24.0, 1008, 12, 0.55, _FAST_HOST_MS),
    "rtx-3090": Gpu("RTX 3090", 24.0, 936, 12, 0.55, _FAST_HOST_MS),
}
"""GPUs by the name that `--gpu` takes. The GPUs v100-16gb and v100-32gb are in a DGX-1, and v100-32gb-450w is in a
DGX-2H."""


@dataclass(frozen=True)
class GpuCluster:
    """Cluster of equal machines with GPUs of one kind."""

    gpu: Gpu
    gpus_per_node: int = 8
    network_gb_s: float = 50.0
    """Network bandwidth between nodes in GB/s, in each direction. It is the sum of all network cards of one node."""


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name, in upper or lower case.

    Raises ConfigError for an unknown name. The message suggests the nearest name.
    """
    try:
        return GPUS[name.lower().replace("_", "-").replace(" ", "-")]
    except KeyError:
        hint = did_you_mean(name, GPUS)
        raise ConfigError(f"--gpu {name} is not known.{hint} Choose one of {', '.join(GPUS)}.") from None
