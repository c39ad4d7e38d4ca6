"""Export of a folder that ONNX Runtime runs: a graph for one token, a graph for a chunk of tokens, and the weights.

    token.onnx, chunk.onnx   graphs of fixed lengths, for any number of batch rows
    weights.bin              weights of both graphs, each tensor once. The weights are not in the graph files, because a
                             graph file can have at most 2 GiB.
    config.json              names of inputs and outputs, lengths, settings of the model
    tokenizer.json           the tokenizer for the library `tokenizers`
    txl_tokenizer.json       this package's tokenizer, as in a bundle
    MANIFEST.json            size and sha256 of each file

The memory is an input and an output of both graphs. It holds the keys and values of each layer at the last M positions,
the oldest first. For each row it also holds the number of filled positions. Other positions are masked, so that queries
do not attend to them. So a memory without tokens consists of zeros and the number 0. The model's `same_length` and
`clamp_len` are part of the graphs. In training the memory holds hidden states and is half as large. With such
a memory, the graphs would have to project M hidden states to keys and values for each new token.

The graphs are made from the model's own modules, with keys and values as arguments. Before the folder is published, the
graphs' results are compared with the bundle's results.

Shapes: L layers, N heads, B rows, T tokens of a graph, M memory, K = M + T, H head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
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
from txl_dist.inference.bundle import Bundle, prove, require_causal
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
"""Names of the graphs' inputs. Only the graph for a chunk has the last input."""
OUTPUTS = ("log_probs", "next_memory", "next_length")
"""Names of the graphs' outputs."""
TOLERANCE = 1e-4
"""Largest allowed difference between the graphs' and the bundle's log-probabilities, in nats."""
CHECKED_SEGMENTS = 5
"""Number of segments on which the graphs are compared with the bundle."""


def export_onnx(out: Path, bundle: Bundle) -> float:
    """Write a folder that ONNX Runtime runs, and run its graphs once to compare them with the bundle.

    Returns the largest difference between the graphs' and the bundle's log-probabilities, in nats. Raises ConfigError
    for absolute positions or a missing package. Raises CheckpointError if the graphs' log-probabilities or the losses
    of the probe differ too much, or if the folder cannot be written.
    """
    section = bundle.section
    require_causal(section, where="the model")
    network = bundle.model
    if not section.scheme.uses_memory:
        raise ConfigError(
            f"a model with {section.positions} positions has no memory, but the ONNX graphs (--format onnx) need a "
            "memory. Export a bundle."
        )
    remedy = 'Run `pip install "txl_dist[onnx]"`'
    with translate_errors(ConfigError, "--format onnx needs packages", remedy, of=(ImportError,)):
        import onnx_ir
        import onnxruntime  # noqa: F401 (for the check: a missing package is reported before the export, not after it)
        import onnxscript  # noqa: F401 (used by torch.onnx)
    prove(bundle, bundle.model, bundle.dtype, where=str(out))
    # As in `txl generate`: at least as many positions as a segment saw, or exactly the window with `same_length`.
    memory_len = bundle.memory_len
    if section.same_length == "off":
        memory_len = max(memory_len, bundle.segment_len - 1)
    if memory_len == 0:
        raise ConfigError(
            "the ONNX graphs (--format onnx) pass a memory from call to call, but the model's memory has 0 tokens. "
            "Export a bundle."
        )
    with new_folder(out, kind=ArtifactKind.ONNX) as folder, _plain_attention(network):
        token_step = Step(network, memory_len=memory_len, num_tokens=1)
        chunk_step = Step(network, memory_len=memory_len, num_tokens=bundle.segment_len)
        token_graph = _exported(token_step, takes_count=False)
        chunk_graph = _exported(chunk_step, takes_count=True)
        _move_weights([token_graph, chunk_graph], folder)
        onnx_ir.save(token_graph, folder / "token.onnx")
        onnx_ir.save(chunk_graph, folder / "chunk.onnx")
        write_tokenizers(folder, bundle)
        error = largest_difference(folder, bundle, memory_len=memory_len)
        if not error <= TOLERANCE:
            raise CheckpointError(
                f"log-probabilities that the ONNX graphs compute differ from the bundle's by {error:.3g} nats. Report "
                "this defect."
            )
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
                "token": {"file": "token.onnx", "inputs": _inputs(False), "outputs": list(OUTPUTS)},
                "chunk": {"file": "chunk.onnx", "inputs": _inputs(True), "outputs": list(OUTPUTS)},
            },
            "difference_to_bundle": error,
            "model": section.model_dump(mode="json"),
            "source": bundle.source,
        }
        text = json.dumps(content, indent=1)
        write_bytes(folder / "config.json", text.encode() + b"\n")
        files = [*folder.glob("*.onnx"), *folder.glob("*.bin")]
        num_bytes = sum(path.stat().st_size for path in files)
        write_readme(folder, bundle.described(dtype="fp32", num_bytes=num_bytes), ArtifactKind.ONNX)
    return error


class Step(nn.Module):
    """Module that is exported as a graph. It reads `num_tokens` tokens of some rows and their memory."""

    encoding_KD: Tensor
    """Sinusoids of the distances K-1 ... 0."""

    def __init__(self, network: TransformerXL, *, memory_len: int, num_tokens: int) -> None:
        super().__init__()
        self.network = network
        self.memory_len = memory_len
        self.num_tokens = num_tokens
        section = network.section
        weight = network.embedding.weight(0)
        num_distances = memory_len + num_tokens
        encoding = distance_encoding(num_distances, width=section.width, clamp_len=section.clamp_len, like=weight)
        self.register_buffer("encoding_KD", encoding)

    def forward(
        self, tokens_BT: Tensor, memory_L2NBMH: Tensor, length_B: Tensor, num_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log_p_BTV, the memory after the tokens, the number of filled positions of each row).

        With `num_tokens`, only the first `num_tokens` tokens are appended to the memory.
        """
        network = self.network
        section = network.section
        place_M = torch.arange(self.memory_len)
        num_empty_B1 = self.memory_len - length_B[:, None]
        document_BM = torch.where(place_M >= num_empty_B1, 0, EMPTY)
        document_BT = torch.zeros_like(tokens_BT)
        visible = build_mask(Memory((), document_BM), document_BT, same_length=section.same_length)
        embedded = _embedded(network.embedding, tokens_BT)
        hidden = embedded
        memory: list[Tensor] = []
        first_value: Tensor | None = None
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
            new_2NBTH = new_BT2NH.permute(2, 3, 0, 1, 4)
            key_value_2NBKH = torch.cat([memory_2NBMH, new_2NBTH], dim=3)
            key_BKNH, value_BKNH = key_value_2NBKH.permute(0, 2, 3, 1, 4).unbind(0)
            distances = block.attention.distances(visible.num_keys, encoding_KD=self.encoding_KD)
            context_BTD = block.attention(
                normed,
                key_BKNH=key_BKNH,
                value_BKNH=value_BKNH,
                distances=distances,
                visible=visible,
            )
            hidden = block.finish(hidden, context_BTD)
            if num_tokens is None:
                memory.append(key_value_2NBKH[:, :, :, self.num_tokens :])
            else:
                memory.append(key_value_2NBKH.index_select(3, place_M + num_tokens))
        hidden_SD = network.final_norm(hidden).flatten(0, 1)
        log_p_SV = network.softmax.log_probabilities(hidden_SD)
        log_p_BTV = log_p_SV.unflatten(0, (-1, self.num_tokens))
        length_B = length_B + (self.num_tokens if num_tokens is None else num_tokens)
        next_length_B = length_B.clamp(max=self.memory_len)
        return log_p_BTV, torch.stack(memory), next_length_B


def _embedded(embedding: AdaptiveEmbedding, tokens_BT: Tensor) -> Tensor:
    """Compute the tokens' embeddings hidden_BTD without grouping the tokens by cluster on the host."""
    if embedding.num_tables == 1:
        return cast(Tensor, embedding(tokens_BT))
    hidden_BTD = torch.zeros(())
    lows = embedding.edges[:-1]
    # Ids outside the vocabulary fall into the first or the last cluster.
    is_beyond = torch.stack([tokens_BT >= low for low in lows[1:]])
    cluster_BT = is_beyond.sum(0)
    for i, low in enumerate(lows):
        is_here_BT = cluster_BT == i
        ids_BT = torch.where(is_here_BT, tokens_BT - low, 0)
        embedded = F.embedding(ids_BT, embedding.weight(i))
        projection = embedding.projection(i)
        if projection is not None:
            embedded = F.linear(embedded, projection)
        hidden_BTD = torch.where(is_here_BT[:, :, None], embedded, hidden_BTD)
    return hidden_BTD * embedding.scale


def _inputs(takes_count: bool) -> list[str]:
    """Return the names of a graph's inputs. `takes_count` says whether num_tokens is an input."""
    return list(INPUTS if takes_count else INPUTS[:-1])


def _exported(step: Step, *, takes_count: bool) -> Any:
    """Export a step to ONNX. Returns its graph as a model of the library onnx_ir."""
    section = step.network.section
    num_rows = 2
    tokens = torch.zeros(num_rows, step.num_tokens, dtype=torch.int64)
    memory = torch.zeros(section.num_layers, 2, section.num_heads, num_rows, step.memory_len, section.head_width)
    length = torch.zeros(num_rows, dtype=torch.int64)
    arguments: list[Tensor] = [tokens, memory, length]
    rows = torch.export.Dim("rows", min=1)
    shapes: list[dict[int, Any]] = [{0: rows}, {3: rows}, {0: rows}]
    if takes_count:
        arguments.append(torch.tensor(1))
        shapes.append({})
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            step.eval(),
            tuple(arguments),
            dynamo=True,
            input_names=_inputs(takes_count),
            output_names=list(OUTPUTS),
            dynamic_shapes=tuple(shapes),
            verbose=False,
        )
    assert program is not None
    graph = program.model
    for node in graph.graph:
        node.metadata_props.clear()  # source lines, with paths of this machine
    for function in graph.functions.values():
        for node in function:
            node.metadata_props.clear()
    return graph


@contextmanager
def _plain_attention(network: TransformerXL) -> Iterator[None]:
    """Use the plain attention during the block, because ONNX has no operators for the fused kernels."""
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
    """Silence the exporter's messages about optional packages and deprecations."""
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
    """Write the tensors of all graphs to one file, and make each graph refer to the file.

    Tensors that are equal are written once.
    """
    import onnx_ir

    places: dict[tuple[str, str], tuple[int, int]] = {}
    with open_new(folder / WEIGHTS) as file:
        for value in itertools.chain.from_iterable(graph.graph.initializers.values() for graph in graphs):
            tensor = value.const_value
            if tensor.nbytes < 1024:  # sizes and lengths, which ONNX Runtime needs in the graph
                continue
            content = tensor.tobytes()
            key = (str(tensor.dtype), hashlib.sha256(content).hexdigest())
            if key not in places:
                padding_len = -file.tell() % 4096  # whole pages, so that the file can be mapped
                file.write(bytes(padding_len))
                places[key] = (file.tell(), len(content))
                file.write(content)
            offset, length = places[key]
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=folder
            )


def largest_difference(folder: Path, bundle: Bundle, *, memory_len: int) -> float:
    """Return the largest difference between the graphs' and the bundle's log-probabilities, in nats.

    The graphs read two rows of tokens, and the second row begins one segment later. In each row the graph for a chunk
    reads CHECKED_SEGMENTS segments, and the last of these segments is shorter. Then the graph for one token reads
    single tokens.
    """
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3
    chunk = InferenceSession(folder / "chunk.onnx", options)
    token = InferenceSession(folder / "token.onnx", options)
    section = bundle.section
    chunk_len = bundle.segment_len
    frozen = FrozenModel(bundle.model)
    ring = frozen.ring(num_rows=2, memory_len=memory_len, chunk_len=chunk_len)
    shape = (section.num_layers, 2, section.num_heads, 2, memory_len, section.head_width)
    memory = np.zeros(shape, np.float32)
    length = np.zeros(2, np.int64)
    whole_chunks = [chunk_len] * (CHECKED_SEGMENTS - 1)
    half_chunk = (chunk_len + 1) // 2
    single_tokens = [1] * 8
    start = 0
    largest = 0.0
    for num_tokens in [*whole_chunks, half_chunk, *single_tokens]:
        place_T = start + np.arange(num_tokens)
        rows = [place_T * 7919 + 1, place_T * 104729 + 5]
        tokens_BT = np.stack(rows) % bundle.model.vocab_size
        if num_tokens == 1:
            inputs = {"tokens": tokens_BT, "memory": memory, "length": length}
            log_p_BTV, memory, length = token.run(None, inputs)
        else:
            padded_BT = np.pad(tokens_BT, ((0, 0), (0, chunk_len - num_tokens)))
            inputs = {"tokens": padded_BT, "memory": memory, "length": length, "num_tokens": np.array(num_tokens)}
            log_p_BTV, memory, length = chunk.run(None, inputs)
        expected_BTD = frozen.run(torch.from_numpy(tokens_BT), ring)
        expected_SV = frozen.log_probabilities(expected_BTD.flatten(0, 1))
        log_p_SV = torch.from_numpy(log_p_BTV[:, :num_tokens]).flatten(0, 1)
        difference = (log_p_SV - expected_SV).abs().max()
        largest = max(largest, float(difference))
        if start == 0:  # the second row begins again, while the first continues
            length[1] = 0
            ring.forget(1)
        start += num_tokens
    return largest
