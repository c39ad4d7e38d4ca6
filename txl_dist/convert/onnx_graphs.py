"""A folder that ONNX Runtime runs: one graph for a token, one for a chunk, over one file of weights.

    token.onnx, chunk.onnx   graphs of static lengths, for any number of rows
    weights.bin              of both: each tensor once, outside of the graphs, which may have 2 GiB at most
    config.json              names of inputs and outputs, lengths, what the model was trained on
    tokenizer.json           text <-> ids, for the library `tokenizers`; txl_tokenizer.json is ours
    MANIFEST.json            bytes and sha256 of each file

The memory is a value: keys and values of each layer at the last M positions, oldest first, and for each row how many of
them it has; what is before those is masked, never attended as zeros. So a fresh memory is zeros of length 0, whatever
the model: its `same_length` and `clamp_len` are in the graphs. Hidden states, which training keeps, would be half as
large, but M of them would have to be projected again for each token.

The graphs are the model's own modules over keys and values that are given: there is no second mathematics. They are run
next to the bundle before the folder is published.

Shapes: L layers, N heads, B rows, T tokens of a graph, M memory, K = M + T, H head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.artifacts import ArtifactKind
from txl_dist.convert.huggingface_tokenizer import write_tokenizers
from txl_dist.convert.output_dir import new_folder
from txl_dist.errors import CheckpointError, ConfigError, translate_errors
from txl_dist.inference.bundle import Bundle, prove
from txl_dist.inference.card import write_readme
from txl_dist.inference.kv_cache import FrozenModel
from txl_dist.io.files import open_new, write_bytes
from txl_dist.model.adaptive_embedding import AdaptiveEmbedding
from txl_dist.model.block import Block
from txl_dist.model.memory import EMPTY, Memory, build_mask
from txl_dist.model.positions import distance_encoding
from txl_dist.model.transformer_xl import TransformerXL

FORMAT_VERSION = 2
WEIGHTS = "weights.bin"
INPUTS = ("tokens", "memory", "length", "num_tokens")
"""The last of the chunk only."""
OUTPUTS = ("log_probs", "next_memory", "next_length")
TOLERANCE = 1e-4
"""Largest difference to the bundle in nats."""
CHECKED_SEGMENTS = 5


def export_onnx(out: Path, bundle: Bundle) -> float:
    """Write the folder and run it; returns the largest difference of a log-probability to the bundle, in nats.

    Raises ConfigError for absolute positions or a missing package, CheckpointError if graphs or probe differ, or
    the folder cannot be written.
    """
    section = bundle.section
    network = bundle.model
    if not section.scheme.uses_memory:
        raise ConfigError(
            f"{section.positions} positions count from a segment's first token, and these graphs pass on a past that "
            "is addressed by distances. Export a bundle."
        )
    with translate_errors(
        ConfigError, "--format onnx needs packages", 'Run `pip install "txl_dist[onnx]"`', of=(ImportError,)
    ):
        import onnx_ir
        import onnxruntime  # noqa: F401 (used by the check: its lack is better reported before the export than after it)
        import onnxscript  # noqa: F401 (used by torch.onnx)
    prove(bundle, bundle.model, bundle.dtype, where=str(out))
    # As `txl generate` has it: no less than a segment saw; where the memory's length is the window, just that.
    memory_len = bundle.memory_len
    if section.same_length == "off":
        memory_len = max(memory_len, bundle.segment_len - 1)
    if memory_len == 0:
        raise ConfigError("a memory of 0 tokens leaves these graphs nothing to pass on. Export a bundle.")
    lengths = {"token": 1, "chunk": bundle.segment_len}
    with new_folder(out, kind=ArtifactKind.ONNX) as folder, _plain_attention(network):
        graphs = {
            name: _exported(Step(network, memory_len=memory_len, num_tokens=length), takes_count=name == "chunk")
            for name, length in lengths.items()
        }
        _move_weights(list(graphs.values()), folder)
        for name, graph in graphs.items():
            onnx_ir.save(graph, folder / f"{name}.onnx")
        write_tokenizers(folder, bundle)
        error = largest_difference(folder, bundle, memory_len=memory_len)
        if not error <= TOLERANCE:
            raise CheckpointError(f"the graphs differ from the bundle by {error:.3g} nats. Report this defect.")
        content = {
            "format_version": FORMAT_VERSION,
            "memory_shape": [section.num_layers, 2, section.num_heads, "rows", memory_len, section.head_width],
            "memory_len": memory_len,
            "chunk_len": bundle.segment_len,
            "vocab_size": network.vocab_size,
            "end_of_text": bundle.tokenizer.end_of_text,
            "begins_documents": bundle.begins_documents,
            "document_mask": bundle.document_mask,
            "graphs": {
                name: {"file": f"{name}.onnx", "inputs": _inputs(name == "chunk"), "outputs": list(OUTPUTS)}
                for name in graphs
            },
            "difference_to_bundle": error,
            "model": section.model_dump(mode="json"),
            "source": bundle.source,
        }
        write_bytes(folder / "config.json", json.dumps(content, indent=1).encode() + b"\n")
        num_bytes = sum(path.stat().st_size for path in (*folder.glob("*.onnx"), *folder.glob("*.bin")))
        write_readme(folder, bundle.described(dtype="fp32", num_bytes=num_bytes), ArtifactKind.ONNX)
    return error


class Step(nn.Module):
    """`num_tokens` tokens of some rows over what they remember; what is exported."""

    encoding_KD: Tensor

    def __init__(self, network: TransformerXL, *, memory_len: int, num_tokens: int) -> None:
        super().__init__()
        section = network.section
        self.network = network
        self.memory_len = memory_len
        self.num_tokens = num_tokens
        encoding = distance_encoding(
            memory_len + num_tokens, width=section.width, clamp_len=section.clamp_len, like=network.embedding.weight(0)
        )
        self.register_buffer("encoding_KD", encoding)

    def forward(
        self, tokens_BT: Tensor, memory_L2NBMH: Tensor, length_B: Tensor, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log_p_BTV, the memory after the tokens, its lengths). The memory takes the first `num_tokens` of them, all
        without."""
        network = self.network
        section = self.network.section
        place_M = torch.arange(self.memory_len)
        document_BM = torch.where(place_M >= self.memory_len - length_B[:, None], 0, EMPTY)
        visible = build_mask(Memory((), document_BM), torch.zeros_like(tokens_BT), same_length=section.same_length)
        hidden = _embedded(network.embedding, tokens_BT)
        memory = []
        embedded = hidden
        first_value = None
        blocks = cast(list[Block], list(network.blocks))
        for index, (block, memory_2NBMH) in enumerate(zip(blocks, memory_L2NBMH.unbind(0), strict=True)):
            if section.residual_scalars:
                hidden = network.residuals[index](hidden, embedded)
            if section.pre_norm:
                normed = block.attention_norm(hidden)
            else:
                normed = hidden
            new_BT2NH = block.attention.project_key_value(normed)
            new_BT2NH = block.attention.prepare_fused_kv(new_BT2NH, first_value)
            if block.gives_values:
                first_value = new_BT2NH.select(-3, 1)
            key_value_2NBKH = torch.cat([memory_2NBMH, new_BT2NH.permute(2, 3, 0, 1, 4)], dim=3)
            key_BKNH, value_BKNH = key_value_2NBKH.permute(0, 2, 3, 1, 4).unbind(0)
            context_BTD = block.attention(
                normed,
                key_BKNH=key_BKNH,
                value_BKNH=value_BKNH,
                distances=block.attention.distances(visible.num_keys, encoding_KD=self.encoding_KD),
                visible=visible,
            )
            hidden = block.finish(hidden, context_BTD)
            if num_tokens is None:
                memory.append(key_value_2NBKH[:, :, :, self.num_tokens :])
            else:
                memory.append(key_value_2NBKH.index_select(3, place_M + num_tokens))
        log_p_SV = network.softmax.log_probabilities(network.final_norm(hidden).flatten(0, 1))
        length_B = length_B + (self.num_tokens if num_tokens is None else num_tokens)
        return (
            log_p_SV.unflatten(0, (-1, self.num_tokens)),
            torch.stack(memory),
            length_B.clamp(max=self.memory_len),
        )


def _embedded(embedding: AdaptiveEmbedding, tokens_BT: Tensor) -> Tensor:
    """hidden_BTD as the embedding gives it, without asking on the host which cluster a token is of."""
    if embedding.num_tables == 1:
        return cast(Tensor, embedding(tokens_BT))
    hidden_BTD = torch.zeros(())
    lows = embedding.edges[:-1]
    cluster_BT = torch.stack([tokens_BT >= low for low in lows[1:]]).sum(0)  # ids that are none are of an end
    for i, low in enumerate(lows):
        is_here_BT = cluster_BT == i
        embedded = F.embedding(torch.where(is_here_BT, tokens_BT - low, 0), embedding.weight(i))
        projection = embedding.projection(i)
        if projection is not None:
            embedded = F.linear(embedded, projection)
        hidden_BTD = torch.where(is_here_BT[:, :, None], embedded, hidden_BTD)
    return hidden_BTD * embedding.scale


def _inputs(takes_count: bool) -> list[str]:
    return list(INPUTS if takes_count else INPUTS[:-1])


def _exported(step: Step, *, takes_count: bool) -> Any:
    """The graph of a step, of the library onnx_ir."""
    section = step.network.section
    num_rows = 2
    memory = torch.zeros(section.num_layers, 2, section.num_heads, num_rows, step.memory_len, section.head_width)
    tokens = torch.zeros(num_rows, step.num_tokens, dtype=torch.int64)
    given: list[Tensor] = [tokens, memory, torch.zeros(num_rows, dtype=torch.int64)]
    rows = torch.export.Dim("rows", min=1)
    shapes: list[dict[int, Any]] = [{0: rows}, {3: rows}, {0: rows}]
    if takes_count:
        given.append(torch.tensor(1))
        shapes.append({})
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            step.eval(),
            tuple(given),
            dynamo=True,
            input_names=_inputs(takes_count),
            output_names=list(OUTPUTS),
            dynamic_shapes=tuple(shapes),
            verbose=False,
        )
    assert program is not None
    graph = program.model
    for node in graph.graph:
        node.metadata_props.clear()  # where in our source each came from, with the paths of this machine
    for function in graph.functions.values():
        for node in function:
            node.metadata_props.clear()
    return graph


@contextmanager
def _plain_attention(network: TransformerXL) -> Iterator[None]:
    """The equation itself: the other kernels are no operators of ONNX."""
    attentions = [block.attention for block in cast(list[Block], list(network.blocks))]
    kernels = [attention.kernel for attention in attentions]
    try:
        for attention in attentions:
            attention.kernel = "plain"
        yield
    finally:
        for attention, kernel in zip(attentions, kernels, strict=True):
            attention.kernel = kernel


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages on packages that it would use, and on its own future."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _move_weights(graphs: list[Any], folder: Path) -> None:
    """Write the tensors of all graphs into one file, equal ones once, and make the graphs name their places there."""
    import onnx_ir

    places: dict[tuple[str, str], tuple[int, int]] = {}
    with open_new(folder / WEIGHTS) as file:
        for value in [value for graph in graphs for value in graph.graph.initializers.values()]:
            tensor = value.const_value
            if tensor.nbytes < 1024:  # sizes and lengths, which ONNX Runtime wants to see in the graph
                continue
            content = tensor.tobytes()
            key = (str(tensor.dtype), hashlib.sha256(content).hexdigest())
            if key not in places:
                file.write(bytes(-file.tell() % 4096))  # whole pages, so that the file can be mapped
                places[key] = (file.tell(), len(content))
                file.write(content)
            offset, length = places[key]
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=folder
            )


def largest_difference(folder: Path, bundle: Bundle, *, memory_len: int) -> float:
    """Return the largest difference of any log-probability between the graphs and the bundle, in nats.

    It compares two rows, one of which begins a segment later. They have five segments, the last one cut short, then
    single tokens.
    """
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3
    chunk, token = (InferenceSession(folder / f"{name}.onnx", options) for name in ("chunk", "token"))
    frozen = FrozenModel(bundle.model)
    chunk_len = bundle.segment_len
    section = bundle.section
    ring = frozen.ring(num_rows=2, memory_len=memory_len, chunk_len=chunk_len)
    shape = (section.num_layers, 2, section.num_heads, 2, memory_len, section.head_width)
    memory = np.zeros(shape, np.float32)
    length = np.zeros(2, np.int64)
    start = 0
    worst = 0.0
    for num_tokens in [*[chunk_len] * (CHECKED_SEGMENTS - 1), (chunk_len + 1) // 2, *[1] * 8]:
        place_T = start + np.arange(num_tokens)
        tokens_BT = np.stack([place_T * 7919 + 1, place_T * 104729 + 5]) % bundle.model.vocab_size
        given = {"tokens": tokens_BT, "memory": memory, "length": length}
        if num_tokens == 1:
            log_p_BTV, memory, length = token.run(None, given)
        else:
            padding = ((0, 0), (0, chunk_len - num_tokens))
            given |= {"tokens": np.pad(tokens_BT, padding), "num_tokens": np.array(num_tokens)}
            log_p_BTV, memory, length = chunk.run(None, given)
        expected_BTD = frozen.run(torch.from_numpy(tokens_BT), ring)
        expected_SV = frozen.log_probabilities(expected_BTD.flatten(0, 1))
        found_SV = torch.from_numpy(log_p_BTV[:, :num_tokens]).flatten(0, 1)
        worst = max(worst, float((found_SV - expected_SV).abs().max()))
        if start == 0:  # the second row begins again, next to one that continues
            length[1] = 0
            ring.forget(1)
        start += num_tokens
    return worst
