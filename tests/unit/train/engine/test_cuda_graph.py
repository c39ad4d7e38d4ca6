"""Replayed micro-steps equal normal micro-steps. The recording is a stand-in that repeats the recorded operations in
the same tensors. tests/gpu tests CUDA's own recording."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.helpers.models import tiny_model
from txl_dist import vocabulary_clusters as clusters
from txl_dist.data.loader.stream import plain_segment
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import Batch, SegmentLoss
from txl_dist.train.batch import BatchMaker
from txl_dist.train.engine import cuda_graph as graph
from txl_dist.train.engine.flat import FlatModule

LANES, LENGTH, MEMORY, WIDTH = 2, 6, 9, 12
CUTOFFS = (10, 30)


class Recorder(TorchDispatchMode):
    """As a CUDA graph: notes each operation with its tensors; a replay runs these again, into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recordings = self.num_replays = 0
        self.num_copied = 0
        """Number of values of memories that one replay copies."""
        self._operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def __call__(self, run: Callable[[], Any]) -> Callable[[], None]:
        self.num_recordings += 1
        self._operations = operations = []
        with self:
            run()
        # Memories are copied as lists. Other copies are of the model's activations.
        self.num_copied = sum(num_copied(func, args) for func, args, _, _ in operations if "foreach" in func.name())

        @torch.no_grad()
        @_disable_current_modes()
        def replay() -> None:
            self.num_replays += 1
            for func, args, kwargs, results in operations:
                for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or done in place
                        old.copy_(new)

        return replay


class CopyCount(TorchDispatchMode):
    """Counts the values of memories that are copied outside of replays."""

    num_copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_copied += num_copied(func, args)
        return func(*args, **(kwargs or {}))


def num_copied(func: Any, args: tuple[Any, ...]) -> int:
    """Return the number of values of hidden states that an operation copies into other tensors."""
    if func._schema.name not in ("aten::copy_", "aten::_foreach_copy_", "aten::clone", "aten::cat"):
        return 0
    written = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    return sum(tensor.numel() for tensor in written if tensor.dim() == 3 and tensor.shape[2] == WIDTH)


def batch_of(seed: int, *, lanes: int = LANES) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (lanes, LENGTH + 1), generator=generator)
    maker = BatchMaker((0, *CUTOFFS, 50), (0, *CUTOFFS, 50), mask_documents=False)
    batch = maker.batch(plain_segment(ids.numpy()))
    return batch._replace(scored_BT=batch.scored_BT.double())


def modules(*, scale: Callable[[], float] = lambda: 4.0) -> tuple[FlatModule, graph.GraphedModule, Recorder]:
    model = tiny_model(dtype=torch.float64, cutoffs=CUTOFFS, div_value=2, dropout=0.3)
    plain = FlatModule(SegmentLoss(model), prefix="model.")
    recorder = Recorder()
    return plain, graph.GraphedModule(copy.deepcopy(plain), scale=scale, record=recorder), recorder


def empty(module: Any, *, memory_len: int = MEMORY) -> Memory:
    memory: Memory = module.model.empty_memory(num_lanes=LANES, memory_len=memory_len)
    return memory


def check_same(memories: Sequence[Memory], others: Sequence[Memory]) -> None:
    for memory, other in zip(memories, others, strict=True):
        assert torch.equal(torch.stack(memory.hidden), torch.stack(other.hidden))
        assert torch.equal(memory.document_BM, other.document_BM)


def test_losses_memories_and_gradients_of_replayed_steps_are_those_of_the_module() -> None:
    scales = [4.0, 4.0, 8.0, 2.0]
    plain, graphed, recorder = modules(scale=iter(scales).__next__)
    memories = [empty(plain.module), empty(plain.module)]
    for seed, scale in enumerate(scales):
        results: list[tuple[Tensor, Memory]] = []
        for index, module in enumerate((plain, graphed)):
            torch.manual_seed(seed)
            loss, memories[index] = module(batch_of(seed), memories[index], 12.0)
            (loss * scale).backward()
            results.append((loss.detach(), memories[index]))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(torch.stack(results[0][1].hidden), torch.stack(results[1][1].hidden))
        assert torch.equal(results[0][1].document_BM, results[1][1].document_BM)
        for mine, other in zip(plain.parameters(), graphed.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad), "gradients add up over micro-batches"
    assert (recorder.num_recordings, recorder.num_replays) == (1, 4)


def test_a_replay_does_not_write_over_what_an_earlier_one_gave() -> None:
    _, graphed, _ = modules()
    loss, memory = graphed(batch_of(0), empty(graphed.module.module), 12.0)
    kept = loss.item(), torch.stack(memory.hidden).clone()
    graphed(batch_of(1), memory, 12.0)
    assert loss.item() == kept[0]
    assert torch.equal(torch.stack(memory.hidden), kept[1])


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("memory_len", [LENGTH, MEMORY, 4])
def test_a_replayed_step_copies_each_memory_once_and_a_skipped_step_leaves_it_alone(
    memory_len: int, num_microbatches: int
) -> None:
    """The model writes a memory of another length than the segment once more. With several micro-batches there is one
    more copy, because the next micro-batch overwrites the recorded results."""
    plain, graphed, recorder = modules()
    before = [[empty(plain.module, memory_len=memory_len)] * num_microbatches] * 2
    expected_copies = 1 + (memory_len != LENGTH) + (num_microbatches > 1)
    num_values = sum(hidden_BMD.numel() for hidden_BMD in before[0][0].hidden)
    for step in range(6):
        plain.zero_grad()
        graphed.zero_grad()
        after: list[list[Memory]] = [[], []]
        losses: list[list[Tensor]] = [[], []]
        counts = []
        for index, module in enumerate((plain, graphed)):
            for place in range(num_microbatches):
                seed = step * num_microbatches + place
                torch.manual_seed(seed)
                batch = batch_of(seed)
                ends_document = torch.randint(0, 2, batch.tokens_BT.shape)
                batch = batch._replace(document_BT=3 * step + ends_document.cumsum(1).clamp(max=2))
                with CopyCount() as count:
                    loss, memory = module(batch, before[index][place], 12.0)
                counts.append(count.num_copied + recorder.num_copied)
                (loss * 4.0).backward()
                after[index].append(memory)
                losses[index].append(loss.detach())
        assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
        check_same(*before)
        check_same(*after)
        for left, right in zip(plain.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad)  # type: ignore[arg-type]
        if step in (2, 3, 5):  # step 4 needs no copy of the memory that the skipped step 3 made
            assert counts[num_microbatches:] == [expected_copies * num_values] * num_microbatches
        if step != 3:
            before = after
        del after, memory
    assert recorder.num_recordings == 1


@pytest.mark.parametrize(("normalizer", "dtype"), [(7.0, torch.float64), (12.0, torch.float32)])
def test_another_number_or_another_type_is_another_recording(normalizer: float, dtype: torch.dtype) -> None:
    plain, graphed, recorder = modules()
    memory, batch = empty(plain.module), batch_of(0)
    graphed(batch, memory, 12.0)
    changed = batch._replace(scored_BT=batch.scored_BT.to(dtype) / 3)
    results = []
    for module in (plain, graphed):
        torch.manual_seed(1)
        loss, _ = module(changed, memory, normalizer)
        (loss * 4.0).backward()
        results.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (recorder.num_recordings, recorder.num_replays) == (2, 2)


def test_graphs_of_other_sizes_share_inputs_results_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "RUNG_ROWS", 4)
    monkeypatch.setattr(clusters, "size_ladder", clusters.size_ladder.__wrapped__)
    plain, graphed, recorder = modules()
    batches = [batch_of(seed) for seed in range(6)]
    shapes = {tuple(len(cluster.rows) for cluster in batch.target_partition or ()) for batch in batches}
    assert len(shapes) > 1
    memories = [empty(plain.module), empty(plain.module)]
    for seed, batch in enumerate([*batches, *batches]):
        for index, module in enumerate((plain, graphed)):
            torch.manual_seed(seed)
            loss, memories[index] = module(batch, memories[index], 12.0)
            (loss * 4.0).backward()
        assert torch.equal(torch.stack(memories[0].hidden), torch.stack(memories[1].hidden))
        for mine, other in zip(plain.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    assert recorder.num_recordings == len(shapes)
    assert recorder.num_replays == len(batches) * 2
    held = [{value.data_ptr() for value in graph.outputs} for graph in graphed._graphs.values()]
    assert all(one == held[0] for one in held)
    num_shapes = len({place for place in graphed._inputs if place[0] == 0})
    assert num_shapes == 1


def test_evaluation_is_not_recorded() -> None:
    plain, graphed, recorder = modules()
    batch, memory = batch_of(0), empty(plain.module)
    with torch.no_grad():
        expected = plain.eval()(batch, memory)[0]
        assert torch.equal(graphed.eval()(batch, memory)[0], expected)
    assert recorder.num_recordings == 0


def test_shapes_beyond_the_limit_run_without_a_graph(monkeypatch: Any) -> None:
    monkeypatch.setattr(graph, "MAX_GRAPHS", 1)
    _, graphed, recorder = modules()
    model = graphed.module.module.model
    for lanes in (2, 3, 2, 4):
        memory = model.empty_memory(num_lanes=lanes, memory_len=MEMORY)
        loss, _ = graphed(batch_of(lanes, lanes=lanes), memory, 6.0 * lanes)
        loss.backward()
        assert loss.isfinite()
    assert (recorder.num_recordings, recorder.num_replays) == (1, 2)


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_shape_that_memory_does_not_suffice_for_runs_without_a_graph(breaks_off: bool) -> None:
    plain, graphed, recorder = modules()
    memory, batch = empty(plain.module), batch_of(0)
    graphed(batch, memory, 12.0)

    def fails(run: Callable[[], Any]) -> Callable[[], None]:
        run()
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            if breaks_off:
                raise RuntimeError("operation failed due to a previous error during capture")

    graphed._record = fails
    for normalizer in (7.0, 8.0, 12.0):
        results = []
        for module in (plain, graphed):
            torch.manual_seed(1)
            module.zero_grad()
            loss, _ = module(batch, memory, normalizer)
            (loss * 4.0).backward()
            results.append([loss.detach(), *(parameter.grad for parameter in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert recorder.num_replays == 2, "what was recorded is replayed"


def test_any_other_error_of_a_recording_is_raised() -> None:
    _, graphed, _ = modules()
    graphed._record = Mock(side_effect=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        graphed(batch_of(0), empty(graphed.module.module), 12.0)


def test_an_allocator_that_refuses_to_free_memory_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graphed, _ = modules()
    graphed._record = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    refuses = Mock(side_effect=RuntimeError("INTERNAL ASSERT FAILED"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuses)
    loss, _ = graphed(batch_of(0), empty(graphed.module.module), 12.0)
    assert loss.isfinite()
    assert refuses.call_count == 1
