"""The last two copies of a rank's state, in memory that outlives the rank's process.

    slots      files in memory that the rank's agent holds. Two of them, or three with rare partner copies
    content    [values] [table: JSON] [facts: JSON], in a `SlotFile`

Each rank stores its pieces of weights and optimizer state, its memories, and the small values of `TrainState`. At ZeRO
stage 0 all ranks hold the same weights, so each rank of a node stores a share of every partition.

One rule commits a version: a rank enters the reduction of a step only after all its copies of earlier states are stored
(`wait`). So when any rank has passed that reduction, all ranks have stored the same newest version. Ranks never differ
by more than one version, and the newest version that all ranks have always exists. After a loss all ranks load that
version (`newest_common`), unless a checkpoint is newer. The live state is never used again, because a rank may have
been in the middle of an update.

With a partner, some versions are also sent to an agent on another node, and `wait` returns after its acknowledgement.
A rank whose own slots are lost or damaged fetches the version from there. Partner copies may be rarer. Then
a rank keeps its own copy of the last version that was sent, because a lost node takes all to that version.

Versions have serial numbers of their own, because a run that rewinds makes a step twice. A version stays valid until
a later version is stored by all ranks.

A job that has lost ranks for good continues with fewer. It reads the version that all earlier ranks have stored: any
range of the weights, and the memories in the order of the lanes. So does a job at ZeRO stage 0 if a rank has moved to
another node, because the ranks of a node then store other shares.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from pydantic_core import to_json
from torch import Tensor
from typing_extensions import override

from txl_dist.data.loader.stream_state import StreamState
from txl_dist.distributed.collectives import gather_objects
from txl_dist.distributed.recovery.partner import num_own_slots
from txl_dist.distributed.recovery.seat import node_name
from txl_dist.distributed.recovery.slot_file import HEAD_BYTES, SlotFile, Version, slot_to_replace
from txl_dist.errors import CheckpointError, ConfigError, TrainingError, raised_everywhere
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import parse_object
from txl_dist.model.memory import Memory
from txl_dist.train.checkpoint.partner import Partner
from txl_dist.train.checkpoint.slot_copy import SlotCopy
from txl_dist.train.checkpoint.slot_room import RankCopies, room_problem
from txl_dist.train.engine.partitions import WEIGHT, PartitionState, Source
from txl_dist.train.engine.protocol import Engine
from txl_dist.train.footprint.room import host_room_bytes
from txl_dist.train.stability import Health
from txl_dist.train.state import TrainState

NOTHING_CARRIED: dict[str, Any] = {
    "interval": None,
    "clipping": [0, 0, 0.0],
    "skipped": [0, [], 1],
    "unsaved_s": 0.0,
    "retry_at": 0,
}
"""Values that a rank carries beside its state when its process is no replacement. `began` is added to them."""
_NUM_KINDS = 3
"""Number of values per weight after the first step: the weight, and with most optimizers two moments."""
_ENDED = (FileNotFoundError, PermissionError, ProcessLookupError)
"""Errors of opening a file of an agent that has ended. Linux refuses it while its parent has not noticed the end."""
_ALIGNED = 64
"""Values of a tensor begin at a multiple of this number of bytes."""


class Share(NamedTuple):
    """Part of every partition that a rank stores: part number `part`, from 0, of `num_parts` equal parts."""

    part: int
    num_parts: int

    def of(self, length: int) -> slice:
        """Return this part of a flat tensor of that length."""
        return slice(self.part * length // self.num_parts, (self.part + 1) * length // self.num_parts)

    def cut(self, flat: Tensor) -> Tensor:
        """Return this part of a flat tensor as a view."""
        return flat if self.num_parts == 1 else flat[self.of(len(flat))]


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


class _Span(NamedTuple):
    """Place of a flat fp32 tensor in a slot. It holds pieces of one kind."""

    offset: int
    """Place of the first byte in the values of the slot."""
    length: int


class _Layout(NamedTuple):
    """Places of all values in a slot."""

    spans: list[_Span]
    parameters: list[list[str]]
    """Names of the parameters in each partition."""
    pieces: list[_Piece]
    memories: list[_MemoryTensor]
    num_bytes: int


class _Slot(SlotFile):
    """One slot of this rank, or of another rank of its node."""

    def __init__(self, file: int | str, *, copy: SlotCopy | None = None) -> None:
        """Open the file, which is a path or a descriptor. Without `copy` the slot is only read."""
        super().__init__(file)
        self._copy = copy or SlotCopy()
        self._targets: list[Tensor] = []
        self._layout: _Layout | None = None
        self._written: mmap.mmap | None = None
        self._table = b""

    @override
    def close(self) -> None:
        if self._written is not None:
            self._copy.unpin(torch.frombuffer(self._written, dtype=torch.uint8))
        super().close()

    def read(self) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        """Return (values as bytes, table, facts) of the version in this slot. The values are a view."""
        head = self.head
        content = self.mapped(head.num_bytes)
        table_at = HEAD_BYTES + head.values_len
        facts_at = table_at + head.table_len
        table = parse_object(content[table_at:facts_at])
        facts = parse_object(content[facts_at : head.num_bytes])
        return _bytes_of(content), table, facts

    def write(
        self,
        version: Version,
        layout: _Layout,
        values: Sequence[Tensor],
        facts: bytes,
        mark: Any,
        half: Callable[[], object],
    ) -> None:
        """Replace the version in this slot. `half` is called after the values, before the version is valid.

        `mark` comes from the slot's `SlotCopy`. Raises OSError if there is not enough memory.
        """
        if layout != self._layout:
            table = {"parameters": layout.parameters, "pieces": layout.pieces, "memories": layout.memories}
            self._table = to_json(table)
        tail = self._table + facts
        tail_at = HEAD_BYTES + layout.num_bytes
        num_bytes = tail_at + len(tail)
        content = self.begin(num_bytes)
        if content is not self._written:
            if self._written is not None:
                self._copy.unpin(torch.frombuffer(self._written, dtype=torch.uint8))
            self._copy.pin(torch.frombuffer(content, dtype=torch.uint8))
            self._written = content
            self._layout = None
        if layout != self._layout:
            self._layout = layout
            self._targets = _views(_bytes_of(content), layout)
        self._copy.copy(self._targets, values, mark)
        half()
        content[tail_at:num_bytes] = tail
        self.seal(version, layout.num_bytes, len(self._table), len(facts))


@dataclass
class StoredState:
    """Version that all ranks have stored. `step` and `stream` are the same on every rank."""

    step: int
    stream: StreamState
    facts: dict[str, Any]
    """Small values of the state: `step`, `tokens`, `health`, `stream`, `loss_scale`, `carried` and `begins_phase`. With
    fewer ranks than before they are those of rank 0, except `carried`."""
    source: Source
    """Weights and optimizer state of the ranks of this node."""
    memories: tuple[Memory, ...]
    """Memories of this rank's lanes (batch rows), one per micro-batch."""

    @property
    def begins_phase(self) -> bool:
        """Whether a phase of the run begins with this state. Otherwise a step of the phase made it."""
        return bool(self.facts["begins_phase"])

    def load(self, engine: Engine) -> TrainState:
        """Load the version into a new engine, and return the training state. All ranks call it together, once.

        The values are released, because this object stays until the next loss: the memories, and the slots of other
        ranks, which may have been fetched into memory of this process.
        """
        source, memories = self.source, self.memories
        self.source, self.memories = SlotSource([], {}), ()
        engine.load(source, loss_scale=self.facts["loss_scale"])
        return TrainState(
            step=self.step,
            tokens_seen=self.facts["tokens"],
            health=Health.from_dict(self.facts["health"]),
            stream=self.stream,
            memories=memories,
        )


class _Thread:
    """Thread that runs one job at a time, with as little Python as possible.

    After each step its code is out of the processor's caches, so a `ThreadPoolExecutor`, with its many locks and calls,
    would take a tenth of a millisecond more.
    """

    def __init__(self) -> None:
        """Start the thread, which waits for its first job."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._errors: SimpleQueue[BaseException | None] = SimpleQueue()
        self._is_busy = False
        self._thread = Thread(target=self._run, name="state slots", daemon=True)
        self._thread.start()

    def begin(self, job: Callable[[], None]) -> None:
        """Begin a job. The caller has waited for the job before with `join`."""
        self._is_busy = True
        self._jobs.put(job)

    def join(self) -> BaseException | None:
        """Wait for the end of the job, if there is one. Returns its error, once."""
        if not self._is_busy:
            return None
        error = self._errors.get()
        self._is_busy = False
        return error

    def close(self) -> None:
        """End the thread after its job."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            error = _error_of(job)
            del job  # and with it the values
            self._errors.put(error)
            del error


class StateSlots:
    """The slots of this rank, and those of the other ranks of its node."""

    def __init__(
        self,
        paths: Sequence[str],
        *,
        share: Share,
        rank: int,
        world_size: int,
        others: Sequence[str] = (),
        partner: Partner | None = None,
        copy: SlotCopy | None = None,
    ) -> None:
        """Open the slots at these paths. `share` is the part of each partition that this rank stores.

        `rank` and `world_size` are those of the present job. `others` are slots of this node whose ranks are no part of
        the job any more. One rank of the node gets them. `partner` keeps copies on another node. `copy` copies values
        from the device into a slot. Without it the device is the CPU.
        """
        self._copy = copy or SlotCopy()
        self._paths = list(paths)
        self._slots = [_Slot(path, copy=self._copy) for path in paths]
        self._others = []
        for path in others:
            with suppress(*_ENDED):  # an agent without a rank may have ended, and its slots with it
                self._others.append(_Slot(path))
        partner_every = 1 if partner is None else partner.every
        self._num_used = num_own_slots(has_partner=partner is not None, partner_every=partner_every)
        self._share = share
        self._rank = rank
        self._world_size = world_size
        self._partner = partner
        self._newest = 0
        """Serial number of the last version that was stored or loaded."""
        self._sent = 0
        """Serial number of the last version that the partner has acknowledged."""
        self._must_send = True
        """Whether the next version is for the partner too, although its interval may not have passed."""
        self._layout: _Layout | None = None
        """Layout of the last version, used again while `_layout_key` is the same."""
        self._layout_key: object = None
        """Pieces, kinds and sizes of the last version's partitions, shapes and types of its memories."""
        self._next = 1
        self._thread = _Thread()

    def store(
        self,
        state: TrainState,
        engine: Engine,
        carried: dict[str, Any],
        *,
        begins_phase: bool = False,
        after_rewind: bool = False,
    ) -> None:
        """Begin to store the state after a step, in a thread. Weights may change again only after `wait`.

        `carried` are further values of this rank's process, for JSON, that a replacement continues. `begins_phase` says
        that the state is that of the phase's beginning, for instance with memories of another length than the step
        before has left. `after_rewind` says that the run has given up all versions before. Then the partner gets this
        one, whose interval may not have passed yet.
        """
        self.wait()
        partitions = engine.partition_states()
        memories = self._copy.unchanging(state.memories)
        values = [self._share.cut(flat) for partition in partitions for flat in partition.values.values()]
        tensors = _tensors(memories)
        places = [(partition.pieces, [*partition.values], len(partition.values[WEIGHT])) for partition in partitions]
        key = places, [(value.shape, value.dtype) for value in tensors]
        if self._layout is None or key != self._layout_key:
            self._layout_key = key
            self._layout = _lay_out(partitions, memories, self._share)
        facts = {
            "step": state.step,
            "tokens": state.tokens_seen,
            "health": state.health.to_dict(),
            "stream": state.stream.to_dict(),
            "loss_scale": engine.loss_scale(),
            "carried": carried,
            "begins_phase": begins_phase,
            "updates": [partition.step for partition in partitions],
            "share": self._share,
        }
        if after_rewind:
            self._must_send = True
        slot = slot_to_replace(self._slots[: self._num_used], kept={self._newest, self._sent} - {0})
        version = Version(self._next, self._world_size, self._rank)
        write = partial(
            self._write,
            slot,
            version,
            layout=self._layout,
            values=[*values, *tensors],
            facts=to_json(facts),
            mark=self._copy.mark(),
            step=state.step,
        )
        self._thread.begin(write)
        self._next += 1

    def wait(self) -> None:
        """Wait until the last version is stored, and the partner has it if it is due.

        Raises TrainingError if there is not enough memory, and LostRankError if the partner is gone. Any other error of
        the thread is raised unchanged.
        """
        error = self.join()
        if isinstance(error, OSError | MemoryError):
            raise TrainingError(
                f"the copy of this rank's state cannot be stored in host memory: {error}. Free host memory, or set "
                "recover.spares to 0."
            ) from error
        if error is not None:
            raise error

    def check_room(self, state: TrainState, engine: Engine, *, with_average: bool) -> None:
        """Check that the slots of all ranks of a node fit into its host memory, before the first version is stored.

        `with_average` says whether the first step adds an average of the weights. Later the slots have their memory,
        which does not count as free, so nothing is checked. All ranks call it together. Raises ConfigError on all
        ranks.
        """
        if self._next > 1:  # the same on all ranks
            return
        partitions = engine.partition_states()
        num_kinds = _NUM_KINDS + with_average
        num_missing = max(0, num_kinds - max((len(partition.values) for partition in partitions), default=num_kinds))
        num_weights = sum(len(partition.values[WEIGHT]) for partition in partitions) // self._share.num_parts
        layout = _lay_out(partitions, state.memories, self._share)
        size = layout.num_bytes + 4 * num_weights * num_missing
        partner_rank = None if self._partner is None else self._partner.rank
        copies = gather_objects(RankCopies(node_name(), size, host_room_bytes(), partner_rank))
        problem = room_problem(copies, num_slots=self._num_used)
        if problem:
            raise raised_everywhere(ConfigError(problem))

    def join(self) -> BaseException | None:
        """Wait until the thread has stored the last version, or has failed. Returns its error, if there was one."""
        return self._thread.join()

    def newest_common(self) -> StoredState | None:
        """Return the newest version that exists undamaged for all ranks, or None if there is none.

        A rank that has lost its version, or whose version is damaged, fetches it from an agent that keeps a copy. The
        version may be of another number of ranks. All ranks call this method together.
        """
        own = [slot.head.version for slot in (*self._slots, *self._others)]
        kept = self._partner.versions(self._world_size) if self._partner is not None else {}
        by_agent: dict[int, list[Version]] = {}
        everywhere: set[Version] = set()
        for own_of_rank, kept_of_rank in gather_objects((own, kept)):
            by_agent |= kept_of_rank
            everywhere.update(own_of_rank, *kept_of_rank.values())
        self._next = max(version.serial for version in everywhere) + 1  # a number that exists nowhere
        for serial, world_size in _complete(everywhere):
            slot = None
            if world_size == self._world_size:
                slot = self._find(Version(serial, world_size, self._rank), by_agent)
            places = gather_objects(self._place_in(slot) if slot is not None else None)
            if places[0] is not None and all(place == places[0] for place in places):
                assert slot is not None
                self._newest = serial
                return self._read(slot)
            with ExitStack() as opened:  # also if another rank is lost now
                slots = self._find_all(serial, world_size, by_agent, opened)
                if all(gather_objects(slots is not None)):
                    assert slots is not None
                    self._newest = serial
                    return self._read_part(slots)
        return None

    def close(self) -> None:
        """Close the slots of this rank, and the connection to the partner."""
        self._thread.close()
        for slot in (*self._slots, *self._others):
            slot.close()
        if self._partner is not None:
            self._partner.close()

    def _place_in(self, slot: _Slot) -> object:
        """Return the place of a version in the run, which must be the same on all ranks: its step and its place in the
        text. Return None if the version does not have this rank's present share, with which the ranks of each node
        have all weights."""
        _, _, facts = slot.read()
        return _place_of(facts) if facts["share"] == [*self._share] else None

    def _find(self, version: Version, by_agent: dict[int, list[Version]]) -> _Slot | None:
        """Return the slot of this rank with an undamaged version, which other agents may have to send. Otherwise return
        None. `by_agent` are the versions that each agent has, by the agent's number."""
        for slot in self._slots:
            if slot.head.version == version and slot.is_whole():
                return slot
        if self._partner is None:
            return None
        damaged = [slot for slot in self._slots if slot.head.version == version]
        slot = min(damaged or self._slots[: self._num_used], key=lambda slot: slot.head.serial)
        for keeper, versions in by_agent.items():
            if keeper != self._rank and version in versions and self._partner.fetch(version, keeper, slot):
                return slot
        return None

    def _find_all(
        self, serial: int, world_size: int, by_agent: dict[int, list[Version]], opened: ExitStack
    ) -> list[_Slot] | None:
        """Return slots with the parts of all ranks of a version, in their order, or None if a part is missing or is
        of another step.

        The slots are opened for reading, and `opened` closes them. All ranks call this method together.
        """
        mine = {}
        for slot in (*self._slots, *self._others):
            version = slot.head.version
            if version[:2] == (serial, world_size) and slot.is_whole():
                mine[version.rank] = slot.path  # of this process: the agent of the slot may end
        own = []
        paths: dict[int, str] = {}
        for holder, (node, found) in enumerate(gather_objects((node_name(), mine))):
            if node == node_name():
                own.append(holder)
                paths |= found
        fetched: dict[int, str] = {}
        if own[0] == self._rank:  # one rank of each node fetches for the others
            for rank in set(range(world_size)).difference(paths):
                arrived = self._fetch(Version(serial, world_size, rank), by_agent)
                if arrived is None:
                    break
                opened.callback(arrived.close)
                fetched[rank] = arrived.path
        paths |= gather_objects(fetched)[own[0]]
        slots: list[_Slot] = []
        for rank in range(world_size):
            try:
                slot = _Slot(paths[rank])
            except (KeyError, *_ENDED):
                return None
            opened.callback(slot.close)
            slots.append(slot)
        places = [_place_of(slot.read()[2]) for slot in slots]
        return slots if all(place == places[0] for place in places) else None

    def _fetch(self, version: Version, by_agent: dict[int, list[Version]]) -> _Slot | None:
        """Fetch a version of any rank into memory of this process, which others can open while it is open here.

        Returns None if no agent sends it.
        """
        if self._partner is None:
            return None
        slot = _Slot(os.memfd_create("txl_fetched", os.MFD_CLOEXEC))
        for keeper, versions in by_agent.items():
            if version in versions and self._partner.fetch(version, keeper, slot):
                return slot
        slot.close()
        return None

    def _read_part(self, slots: Sequence[_Slot]) -> StoredState:
        """Read this rank's part of a version from the slots of all its ranks. The values outlive the slots."""
        contents = [slot.read() for slot in slots]
        memories: list[Memory] = []
        counts: dict[str, float] = {}
        for values, table, facts in contents:
            tensors = [_MemoryTensor(*tensor) for tensor in table["memories"]]
            memories += _read_memories(values, tensors, device=self._copy.device)
            counts |= _counts_of(table, facts)
        begin = self._rank * len(memories) // self._world_size
        end = (self._rank + 1) * len(memories) // self._world_size
        parts = []
        for values, table, _ in contents:
            parts.append((values, [_Piece(*piece) for piece in table["pieces"]]))
        facts = dict(contents[0][2])
        num_before = len(memories) // len(contents)  # memories of each earlier rank
        carried = [content[2]["carried"] for content in contents[begin // num_before : (end - 1) // num_before + 1]]
        facts["carried"] = _joined(carried, counts_first=begin % num_before == 0)
        stream = StreamState.from_dict(facts["stream"])
        return StoredState(facts["step"], stream, facts, SlotSource(parts, counts), tuple(memories[begin:end]))

    def _read(self, slot: _Slot) -> StoredState:
        """Read the version in a slot, and send it to the partner again. All ranks call this method together."""
        values, table, facts = slot.read()
        parts = []
        for other_node, path in gather_objects((node_name(), self._paths[self._slots.index(slot)])):
            if other_node == node_name():
                other = _Slot(path)
                other_values, other_table, _ = other.read()
                other.close()
                parts.append((other_values, [_Piece(*piece) for piece in other_table["pieces"]]))
        if self._partner is not None and self._partner.rank is not None:
            self._sent, self._must_send = slot.head.serial, False
            self._thread.begin(partial(self._partner.send, slot, kept=self._sent))
        tensors = [_MemoryTensor(*tensor) for tensor in table["memories"]]
        memories = _read_memories(values, tensors, device=self._copy.device)
        stream = StreamState.from_dict(facts["stream"])
        return StoredState(facts["step"], stream, facts, SlotSource(parts, _counts_of(table, facts)), memories)

    def _write(
        self,
        slot: _Slot,
        version: Version,
        *,
        layout: _Layout,
        values: list[Tensor],
        facts: bytes,
        mark: Any,
        step: int,
    ) -> None:
        """Write a version, and send it to the partner if it is due, in the thread. An error is raised by `wait`."""
        slot.write(version, layout, values, facts, mark, lambda: failpoint("half-stored", step=step))
        self._newest = serial = version.serial
        failpoint("stored", step=step)
        if self._partner is None or self._partner.rank is None:
            return
        if self._must_send or serial >= self._sent + self._partner.every:
            self._partner.send(slot, kept=self._sent)
            self._sent, self._must_send = serial, False
            failpoint("sent", step=step)


class SlotSource(Source):
    """Values in the slots of the ranks of a node, for `Engine.load`."""

    def __init__(self, parts: Sequence[tuple[Tensor, Sequence[_Piece]]], counts: dict[str, float]) -> None:
        """Index the pieces. Each part is (values of a slot as a tensor of bytes, pieces of these values).

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
        for stored_pieces in self._pieces.values():
            stored_pieces.sort(key=lambda entry: entry[0].start)

    @override
    def kinds_of(self, parameter: str) -> list[str]:
        return self._kinds[parameter]

    @override
    def read(self, kind: str, parameter: str, *, start: int, length: int) -> Tensor:
        values = torch.empty(length)
        first = start
        for piece, stored in self._pieces.get((parameter, kind), []):
            stop = min(piece.start + piece.length, start + length)
            if piece.start <= first < stop:  # nodes may store shares that overlap
                values[first - start : stop - start] = stored[first - piece.start : stop - piece.start]
                first = stop
        if first != start + length:
            raise CheckpointError(
                f"the copies in memory have {first - start} of {length} values of {parameter} ({kind}), from value "
                f"{start} on. The same command continues from the last checkpoint."
            )
        return values

    @override
    def step_of(self, parameter: str) -> float:
        return self._counts[parameter]


def _error_of(job: Callable[[], None]) -> BaseException | None:
    """Run a job. Returns its error, if there was one."""
    try:
        job()
    except BaseException as error:  # noqa: BLE001  the main thread raises it in `wait`
        return error
    return None


def _joined(carried: Sequence[dict[str, Any]], *, counts_first: bool) -> dict[str, Any]:
    """Return the carried values of a rank that takes over the lanes of these ranks: their damaged documents together,
    and the other values of the first one.

    `counts_first` says whether the number of the first rank's documents counts. Otherwise another rank has it, which
    takes over the first lanes of that rank.
    """
    joined = dict(carried[0])
    if "skipped" in joined:
        numbers, documents, ranks = zip(*(values["skipped"] for values in carried), strict=True)
        first = 0 if counts_first else 1
        joined["skipped"] = [sum(numbers[first:]), list(itertools.chain.from_iterable(documents)), sum(ranks[first:])]
    return joined


def _place_of(facts: dict[str, Any]) -> object:
    """Return the step and the place in the text to which the facts of a version belong."""
    return facts["step"], facts["stream"]


def _complete(versions: Iterable[Version]) -> list[tuple[int, int]]:
    """Return (serial number, number of ranks) of each version of which the parts of all ranks exist, newest first."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for version in versions:
        if version.serial:
            ranks.setdefault((version.serial, version.world_size), set()).add(version.rank)
    return sorted((key for key, parts in ranks.items() if len(parts) == key[1]), reverse=True)


def _lay_out(partitions: Sequence[PartitionState], memories: Sequence[Memory], share: Share) -> _Layout:
    """Return the layout of a version: each partition's tensors, then the memories."""
    spans: list[_Span] = []
    parameters: list[list[str]] = []
    pieces: list[_Piece] = []
    tensors: list[_MemoryTensor] = []
    offset = 0
    for partition in partitions:
        parameters.append([piece.parameter for piece in partition.pieces])
        for kind, flat in partition.values.items():
            part = share.of(len(flat))
            spans.append(_Span(offset, part.stop - part.start))
            for piece in partition.pieces:
                begin = max(piece.offset, part.start)
                length = min(piece.offset + piece.length, part.stop) - begin
                if length > 0:
                    start = piece.start + begin - piece.offset
                    pieces.append(_Piece(kind, piece.parameter, start, length, offset + 4 * (begin - part.start)))
            offset = _aligned(offset + 4 * (part.stop - part.start))
    for index, memory in enumerate(memories):
        for tensor in _tensors([memory]):
            name = str(tensor.dtype).removeprefix("torch.")
            tensors.append(_MemoryTensor(index, list(tensor.shape), name, offset))
            offset = _aligned(offset + tensor.numel() * tensor.element_size())
    return _Layout(spans, parameters, pieces, tensors, offset)


def _counts_of(table: dict[str, Any], facts: dict[str, Any]) -> dict[str, float]:
    """Return the number of updates that the optimizer has counted for each parameter of a slot."""
    counts: dict[str, float] = {}
    for parameters, num_updates in zip(table["parameters"], facts["updates"], strict=True):
        counts |= dict.fromkeys(parameters, num_updates)
    return counts


def _tensors(memories: Sequence[Memory]) -> list[Tensor]:
    """Return the tensors of memories, in the order in which a slot stores them."""
    return [tensor for memory in memories for tensor in (*memory.hidden, memory.document_BM)]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _bytes_of(content: mmap.mmap) -> Tensor:
    """Return the values of a mapped slot as a tensor of bytes, which is a view."""
    return torch.frombuffer(content, dtype=torch.uint8)[HEAD_BYTES:]


def _views(values: Tensor, layout: _Layout) -> list[Tensor]:
    """Return the tensors of a layout as views of the values of a slot."""
    views = [_view(values, span.offset, [span.length], torch.float32) for span in layout.spans]
    for tensor in layout.memories:
        views.append(_view(values, tensor.offset, tensor.shape, getattr(torch, tensor.dtype)))
    return views


def _view(values: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a slot as a view. `values` is a tensor of bytes."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return values[offset : offset + num_bytes].view(dtype).view(list(shape))


def _read_memories(values: Tensor, tensors: Sequence[_MemoryTensor], *, device: torch.device) -> tuple[Memory, ...]:
    """Return copies of the memories in a slot, one per micro-batch, on the device."""
    by_microbatch: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        stored = _view(values, tensor.offset, tensor.shape, getattr(torch, tensor.dtype))
        by_microbatch.setdefault(tensor.microbatch, []).append(stored.to(device, copy=True))
    memories = []
    for index in sorted(by_microbatch):
        *hidden, document_BM = by_microbatch[index]
        memories.append(Memory(tuple(hidden), document_BM))
    return tuple(memories)
