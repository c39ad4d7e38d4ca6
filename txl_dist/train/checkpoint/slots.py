"""The state of a rank after its last two steps, in memory that outlives the rank's process.

    slot 0, slot 1     version N lies in slot N % 2. Each slot is a file in memory that the rank's agent holds
    slot               [head: serial number, sizes, CRC-32] [values] [table: JSON] [facts: JSON]

Each rank stores its pieces of weights and optimizer state, its memories, and the small values of `TrainState`. At ZeRO
stage 0 all ranks hold the same weights, so each rank of a node stores a share of every parameter.

One rule commits a step: a rank enters the reduction of step N + 1 only after its version N is stored (`wait`). So when
any rank has passed that reduction, all ranks have stored version N. Ranks never differ by more than one version, and
the newest version that all ranks have always exists. After a loss all ranks load that version (`newest_common`). The
live state is never used again, because a rank may have been in the middle of an update.

Versions have serial numbers of their own, because a run that rewinds makes a step twice. A version stays valid until
the version after the next is written.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from txl_dist.console.formatting import format_bytes
from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import gather_objects
from txl_dist.errors import CheckpointError, ConfigError, TrainingError, raised_everywhere
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import parse_object
from txl_dist.model.memory import Memory
from txl_dist.train.engine.partitions import Fragment, Source
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.footprint.room import host_room_bytes
from txl_dist.train.stability import Health
from txl_dist.train.state import TrainState

_HEAD = struct.Struct("qqqqq")
"""Head of a slot: serial number, bytes of values, of the table and of the facts, and their CRC-32."""
_HEAD_BYTES = 64
_NUM_KINDS = 3
"""Number of values per weight after the first step: the weight, and with most optimizers two moments."""
_ALIGNED = 64
"""Values of a tensor begin at a multiple of this number of bytes."""


class Share(NamedTuple):
    """Part of every parameter that a rank stores: part number `part`, from 0, of `num_parts` equal parts."""

    part: int
    num_parts: int


class _Piece(NamedTuple):
    """Values of a parameter in a slot. JSON stores it as a list."""

    kind: str
    parameter: str
    start: int
    """Place of the first value in the flattened parameter."""
    length: int
    offset: int
    """Place of the first byte in the values of the slot."""


class _MemoryTensor(NamedTuple):
    """Tensor of a memory in a slot. JSON stores it as a list."""

    microbatch: int
    shape: list[int]
    dtype: str
    offset: int


class _Layout(NamedTuple):
    """Places of all values in a slot."""

    pieces: list[_Piece]
    memories: list[_MemoryTensor]
    num_bytes: int


class _Slot:
    """One slot: a file in memory with one version."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._targets: list[Tensor] = []
        self._layout: _Layout | None = None
        self._table = b""

    def close(self) -> None:
        """Close the file. Values that were read stay valid."""
        os.close(self._file)

    @property
    def serial(self) -> int:
        """Serial number of the version in this slot, or 0 if the slot holds no version."""
        if os.fstat(self._file).st_size < _HEAD_BYTES:
            return 0
        serial: int = self._head()[0]
        return serial

    def is_whole(self) -> bool:
        """Return whether the content of the slot has the CRC-32 that its head says."""
        _, *sizes, crc = self._head()
        with memoryview(self._mapped(_HEAD_BYTES + sum(sizes))) as content:
            return zlib.crc32(content[_HEAD_BYTES : _HEAD_BYTES + sum(sizes)]) == crc

    def read(self) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        """Return (values as bytes, table, facts) of the version in this slot. The values are a view."""
        _, num_bytes, table_len, facts_len, _ = self._head()
        content = self._mapped(_HEAD_BYTES + num_bytes + table_len + facts_len)
        table_at = _HEAD_BYTES + num_bytes
        facts_at = table_at + table_len
        table = parse_object(content[table_at:facts_at])
        facts = parse_object(content[facts_at : facts_at + facts_len])
        return _bytes_of(content), table, facts

    def write(
        self, serial: int, layout: _Layout, values: Sequence[Tensor], facts: bytes, half: Callable[[], object]
    ) -> None:
        """Replace the version in this slot. `half` is called after the values, before the version is valid.

        Raises OSError if there is not enough memory.
        """
        if layout != self._layout:
            self._table = json.dumps({"pieces": layout.pieces, "memories": layout.memories}).encode()
        size = _HEAD_BYTES + layout.num_bytes + len(self._table) + len(facts)
        old = self._map
        content = self._mapped(size)
        content[:8] = bytes(8)
        if layout != self._layout or content is not old:
            self._layout = layout
            self._targets = _views(_bytes_of(content), layout)
        torch._foreach_copy_(self._targets, list(values))
        half()
        tail = self._table + facts
        tail_at = _HEAD_BYTES + layout.num_bytes
        content[tail_at : tail_at + len(tail)] = tail
        with memoryview(content) as whole:
            crc = zlib.crc32(whole[_HEAD_BYTES : tail_at + len(tail)])
        head = _HEAD.pack(0, layout.num_bytes, len(self._table), len(facts), crc)
        content[8 : _HEAD.size] = head[8:]
        content[:8] = _HEAD.pack(serial, 0, 0, 0, 0)[:8]

    def _head(self) -> tuple[int, int, int, int, int]:
        return _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))

    def _mapped(self, size: int) -> mmap.mmap:
        """Return the mapped file, with at least `size` bytes. A file that is too small grows."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.posix_fallocate(self._file, 0, size + size // 8)  # OSError here, and not a signal at a later write
            self._map = mmap.mmap(self._file, 0)
        return self._map


class StoredState(NamedTuple):
    """Version that all ranks have stored. `step` and `stream` are the same on every rank."""

    step: int
    stream: StreamState
    facts: dict[str, Any]
    """Small values of the state: `step`, `tokens`, `health`, `stream`, `loss_scale` and `interval`."""
    source: Source
    """Weights and optimizer state of the ranks of this node."""
    memories: tuple[Memory, ...]
    """Memories of this rank's lanes (batch rows), one per micro-batch."""

    def load(self, engine: Engine) -> TrainState:
        """Load the version into a new engine, and return the training state. All ranks call it together."""
        engine.load(self.source, loss_scale=self.facts["loss_scale"])
        return TrainState(
            step=self.step,
            tokens_seen=self.facts["tokens"],
            health=Health.from_dict(self.facts["health"]),
            stream=self.stream,
            memories=self.memories,
        )


class StateSlots:
    """The two slots of this rank, and those of the other ranks of its node."""

    def __init__(self, paths: Sequence[str], *, share: Share) -> None:
        """Open the slots at these two paths. `share` is the part of each parameter that this rank stores."""
        self._paths = list(paths)
        self._slots = [_Slot(path) for path in paths]
        self._share = share
        self._next = 1
        self._thread = ThreadPoolExecutor(1, "state slots")
        self._writing: Future[None] | None = None

    def store(self, state: TrainState, engine: Engine, sums: dict[str, Any]) -> None:
        """Begin to store the state after a step, in a thread. Weights may change again only after `wait`.

        `sums` are the values of the logging interval in progress, for JSON.
        """
        self.wait()
        fragments = engine.fragments()
        layout, values = _lay_out(fragments, state.memories, self._share)
        facts = {
            "step": state.step,
            "tokens": state.tokens_seen,
            "health": state.health.to_dict(),
            "stream": state.stream.to_dict(),
            "loss_scale": engine.loss_scale(),
            "interval": sums,
            "counts": {fragment.parameter: fragment.step for fragment in fragments},
        }
        self._writing = self._thread.submit(self._write, self._next, layout, values, facts)
        self._next += 1

    def wait(self) -> None:
        """Wait until the last version is stored. Raises TrainingError if it cannot be stored."""
        error = self.join()
        if error is not None:
            raise TrainingError(
                f"the copy of this rank's state cannot be stored in host memory: {error}. Free host memory, or set "
                "recover.spares to 0."
            ) from error

    def check_room(self, state: TrainState, engine: Engine) -> None:
        """Check that the slots of all ranks of a node fit into its host memory. All ranks call it together.

        Raises ConfigError on all ranks.
        """
        fragments = engine.fragments()
        layout, _ = _lay_out(fragments, state.memories, self._share)
        num_missing = max(0, _NUM_KINDS - max((len(fragment.values) for fragment in fragments), default=_NUM_KINDS))
        num_weights = sum(fragment.values["weight"].numel() for fragment in fragments) // self._share.num_parts
        needed = 2 * (layout.num_bytes + 4 * num_weights * num_missing)
        parts = gather_objects((os.uname().nodename, needed, host_room_bytes()))
        for node in dict.fromkeys(node for node, *_ in parts):
            node_needed = sum(part for host, part, _ in parts if host == node)
            room = min(left for host, _, left in parts if host == node)
            if node_needed > room:
                raise raised_everywhere(
                    ConfigError(
                        f"recover.spares=1 keeps two copies of each rank's state in host memory. They need "
                        f"{format_bytes(node_needed)} on {node}, but {format_bytes(room)} are free. Start fewer ranks "
                        "per node, or set recover.spares to 0."
                    )
                )

    def join(self) -> BaseException | None:
        """Wait until the thread has stored the last version, or has failed. Returns its error, if there was one."""
        if self._writing is None:
            return None
        error = self._writing.exception()
        self._writing = None
        return error

    def newest_common(self) -> StoredState | None:
        """Return the newest version that all ranks have stored undamaged, or None if there is none.

        All ranks call it together.
        """
        serials_by_rank = gather_objects([slot.serial for slot in self._slots])
        above_all = max(max(serials) for serials in serials_by_rank) + 1
        common = set.intersection(*(set(serials) for serials in serials_by_rank)) - {0}
        for serial in sorted(common, reverse=True):
            slot = serial % 2
            if all(gather_objects(self._slots[slot].is_whole())):
                # The next version must not replace this one, and no version of the same number may exist anywhere.
                self._next = above_all + (above_all - serial + 1) % 2
                return self._read(slot)
        self._next = above_all
        return None

    def close(self) -> None:
        """Close the slots of this rank."""
        self._thread.shutdown()
        for slot in self._slots:
            slot.close()

    def _read(self, slot: int) -> StoredState:
        """Read the version in a slot. All ranks call this method together."""
        values, table, facts = self._slots[slot].read()
        node = os.stat("/proc/self/ns/pid").st_ino, os.uname().nodename
        parts = []
        for other_node, path in gather_objects((node, self._paths[slot])):
            if other_node == node:
                other = _Slot(path)
                other_values, other_table, _ = other.read()
                other.close()
                parts.append((other_values, [_Piece(*piece) for piece in other_table["pieces"]]))
        memories = _read_memories(values, [_MemoryTensor(*tensor) for tensor in table["memories"]])
        stream = StreamState.from_dict(facts["stream"])
        return StoredState(facts["step"], stream, facts, SlotSource(parts, facts["counts"]), memories)

    def _write(self, serial: int, layout: _Layout, values: list[Tensor], facts: dict[str, Any]) -> None:
        """Write a version, in the thread. An error is raised by `wait`."""
        step = facts["step"]
        content = json.dumps(facts).encode()
        self._slots[serial % 2].write(serial, layout, values, content, lambda: failpoint("half-stored", step=step))
        failpoint("stored", step=step)


class SlotSource(Source):
    """Values in the slots of the ranks of a node, for `Engine.load`."""

    def __init__(self, parts: Sequence[tuple[Tensor, Sequence[_Piece]]], counts: dict[str, float]) -> None:
        """Index the pieces of each part, whose values lie in the tensor of bytes beside them.

        `counts` maps each parameter to the number of updates that the optimizer has counted.
        """
        self._counts = counts
        self._kinds: dict[str, list[str]] = {}
        self._pieces: dict[tuple[str, str], list[tuple[_Piece, Tensor]]] = {}
        for values, pieces in parts:
            for piece in pieces:
                kinds = self._kinds.setdefault(piece.parameter, [])
                if piece.kind not in kinds:
                    kinds.append(piece.kind)
                stored = _view(values, piece.offset, [piece.length], torch.float32)
                self._pieces.setdefault((piece.parameter, piece.kind), []).append((piece, stored))

    @override
    def kinds_of(self, parameter: str) -> list[str]:
        return self._kinds[parameter]

    @override
    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        values = torch.empty(length)
        num_read = 0
        for piece, stored in self._pieces.get((parameter, kind), []):
            first = max(piece.start, start)
            stop = min(piece.start + piece.length, start + length)
            if first < stop:
                values[first - start : stop - start] = stored[first - piece.start : stop - piece.start]
                num_read += stop - first
        if num_read != length:
            raise CheckpointError(
                f"the copies in memory have {num_read} of {length} values of {parameter} ({kind}), from value {start} "
                "on. The same command continues from the last checkpoint."
            )
        return values

    @override
    def step_of(self, parameter: str) -> float:
        return self._counts[parameter]


def _lay_out(fragments: Sequence[Fragment], memories: Sequence[Memory], share: Share) -> tuple[_Layout, list[Tensor]]:
    """Return (the layout of a version, its tensors in this order)."""
    pieces: list[_Piece] = []
    tensors: list[_MemoryTensor] = []
    values: list[Tensor] = []
    offset = 0
    for fragment in fragments:
        for kind, whole in fragment.values.items():
            begin = share.part * whole.numel() // share.num_parts
            end = (share.part + 1) * whole.numel() // share.num_parts
            if begin < end:
                pieces.append(_Piece(kind, fragment.parameter, fragment.start + begin, end - begin, offset))
                values.append(whole[begin:end])
                offset = _aligned(offset + 4 * (end - begin))
    for index, memory in enumerate(memories):
        for tensor in (*memory.hidden, memory.document_BM):
            name = str(tensor.dtype).removeprefix("torch.")
            tensors.append(_MemoryTensor(index, list(tensor.shape), name, offset))
            values.append(tensor)
            offset = _aligned(offset + tensor.numel() * tensor.element_size())
    return _Layout(pieces, tensors, offset), values


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _bytes_of(content: mmap.mmap) -> Tensor:
    """Return the values of a mapped slot as a tensor of bytes, which is a view."""
    return torch.frombuffer(content, dtype=torch.uint8)[_HEAD_BYTES:]


def _views(values: Tensor, layout: _Layout) -> list[Tensor]:
    """Return the tensors of a layout as views of the values of a slot."""
    views = [_view(values, piece.offset, [piece.length], torch.float32) for piece in layout.pieces]
    for tensor in layout.memories:
        views.append(_view(values, tensor.offset, tensor.shape, getattr(torch, tensor.dtype)))
    return views


def _view(values: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a slot as a view. `values` is a tensor of bytes."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return values[offset : offset + num_bytes].view(dtype).view(list(shape))


def _read_memories(values: Tensor, tensors: Sequence[_MemoryTensor]) -> tuple[Memory, ...]:
    """Return copies of the memories in a slot, one per micro-batch."""
    by_microbatch: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        stored = _view(values, tensor.offset, tensor.shape, getattr(torch, tensor.dtype))
        by_microbatch.setdefault(tensor.microbatch, []).append(stored.clone())
    memories = []
    for index in sorted(by_microbatch):
        *hidden, document_BM = by_microbatch[index]
        memories.append(Memory(tuple(hidden), document_BM))
    return tuple(memories)
