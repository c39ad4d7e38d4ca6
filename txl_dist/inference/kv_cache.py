"""Runs a model with frozen weights, and stores the keys and values of past tokens in a KV cache.

The plain model (`TransformerXL`) stores hidden states, and projects the whole memory to keys and values again for every
segment. With frozen weights each position, and the encoding of each distance, need only one projection. Evaluation,
scoring, generation and serving all use this module. Its results equal the results of the plain model up to rounding.

    frozen = FrozenModel(model)
    ring = frozen.ring(num_rows=4, memory_len=512, chunk_len=64)       # the rows' memory: each chunk changes it
    hidden_BTD = frozen.run(tokens_BT, ring)                           # T <= chunk_len
    log_p = frozen.log_probabilities(hidden_BTD)

**The ring.** Each layer has a buffer of 2 R slots, where R = memory_len + chunk_len. Position p is stored twice: in
slot p mod R, and R slots later. So the last R positions are always contiguous, oldest first, and attention reads them
as a view. A chunk writes two copies of its own keys and values, and this cost does not depend on the length of the
past. All rows (texts of the batch) write to the same slots. A row that remembers fewer positions than other rows has
nothing in its oldest slots, and a mask hides these slots.

**The scores.** The score of a query and a key is a product of the two, plus a term of their distance. One matrix
product gives the terms of all distances, [queries, distances K-1 ... 0]. Each row of the result is followed by T - 1
cells of -inf, and row i is read T-1-i cells further on. This view is the relative shift of `model.relative_attention`.
A future key has a distance below zero, so its term is -inf and masks the key. The view is added to the products of
queries and keys. Few heads and rows are computed at a time, so that their scores stay in a CPU's cache.

Shapes: L layers, B rows, T tokens of a chunk, M memory, R = M + chunk_len, K = past + T keys, N heads, H head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError
from txl_dist.model.activation import ACTIVATIONS, swiglu
from txl_dist.model.adaptive_embedding import Partition
from txl_dist.model.block import Block
from txl_dist.model.memory import EMPTY, Memory
from txl_dist.model.positions import distance_encoding
from txl_dist.model.relative_attention import at_least_fp32
from txl_dist.model.rms_norm import RmsNorm, rms_norm
from txl_dist.model.transformer_xl import TransformerXL

BLOCK_LEN = {"cpu": 128, "cuda": 512}
"""Number of queries of a chunk that attend at a time, by kind of device. Shorter blocks compute fewer scores of future
keys, which are masked."""
MOST_SCORES = {"cpu": 2**19, "cuda": 2**27}
"""Largest number of attention scores that are computed at a time, by kind of device. A part with one head and one row
is never divided, even if it has more scores. On a CPU this number keeps the scores in the cache. On a GPU it allows
few, large products."""
MOST_LOGITS = 2**26
"""Largest number of logits that `FrozenModel.losses` computes at a time without a `partition`: 256 MiB in fp32. The
logits of one token are never split."""


class CacheState(NamedTuple):
    """Memory of one text (one row of a `KVCache`) as a value, which can be kept, saved and put into other rows."""

    key_values: tuple[Tensor, ...]
    """key_value_2NSH of each layer: keys, then values, of the last S positions, oldest first.

    Some layers may have fewer than S positions (setting `train.memory_lens`).
    """
    document_S: Tensor
    """Document number (int64) of each of the last S positions."""


class KVCache:
    """Memory of several texts, one per row: each layer's keys and values at the last positions.

    `FrozenModel.ring` makes the cache and explains the arguments. `FrozenModel.run` reads and changes the cache.
    """

    def __init__(
        self,
        owner: FrozenModel,
        *,
        num_rows: int,
        memory_len: int,
        chunk_len: int,
        with_documents: bool,
        least_len: int = 0,
    ) -> None:
        section = owner.model.section
        weight = owner.model.embedding.weight(0)
        self.owner = owner
        """Model that computes the keys and values."""
        self.memory_len = memory_len
        self.chunk_len = chunk_len
        self.least_len = least_len
        lens = owner.model.memory_of_layers(memory_len)
        self.memory_lens = tuple(max(length, min(least_len, memory_len)) for length in lens)
        """Memory length of each layer. The largest of them is `memory_len`."""
        self.size = memory_len + chunk_len
        self.key_values: list[Tensor] = []
        with _room_for(num_rows, memory_len=memory_len):
            for length in self.memory_lens:
                num_slots = 2 * (length + chunk_len) + chunk_len
                shape = (2, section.num_heads, num_rows, num_slots, section.head_width)
                self.key_values.append(weight.new_zeros(shape))
        self.documents = None
        if with_documents:
            places = (num_rows, 2 * self.size + chunk_len)
            self.documents = torch.full(places, EMPTY, dtype=torch.int64, device=weight.device)
        # Positions that each row remembers, by layer: more than are read, so that the last can be dropped again.
        self._known_LB = np.zeros((len(lens), num_rows), dtype=np.int64)
        self._sizes_L1 = np.array(self.memory_lens)[:, None] + chunk_len
        self._position = 0  # the next one

    @property
    def num_rows(self) -> int:
        """Number of rows, B in the shapes."""
        return self._known_LB.shape[1]

    @property
    def num_known(self) -> np.ndarray:
        """Number of positions that each row remembers, [B]. It is at most `size`."""
        num_known: np.ndarray = self._known_LB[self.memory_lens.index(self.memory_len)]
        return num_known

    @property
    def past_len(self) -> int:
        """Number of past positions that the next chunk reads: as many as the row with the longest past remembers."""
        return min(int(self.num_known.max(initial=0)), self.memory_len)

    def advance(self, num_tokens: int, document_BT: Tensor | None) -> Tensor | None:
        """Make room for a chunk of `num_tokens`. Then `write` adds each layer's keys and values.

        `document_BT` is the document number of each token, or None without documents. Returns mask_BTK, True where a
        token sees a key, or None if every row sees all of the past.
        """
        past_len = self.past_len
        first = self._position % self.size
        mask = None
        if self.documents is not None:
            assert document_BT is not None
            for start in (first, first + self.size):
                self.documents[:, start : start + num_tokens] = document_BT
            here = first + self.size
            document_B1K = self.documents[:, None, here - past_len : here + num_tokens]
            mask = document_B1K == document_BT[:, :, None]
        elif int(self.num_known.min(initial=past_len)) < past_len:
            num_missing_B = np.maximum(past_len - self.num_known, 0)
            begin_B = torch.from_numpy(num_missing_B).to(self.key_values[0].device)
            key_K = torch.arange(past_len + num_tokens, device=begin_B.device)
            mask = (key_K >= begin_B[:, None])[:, None].expand(-1, num_tokens, -1)
        self._position += num_tokens
        self._known_LB = np.minimum(self._known_LB + num_tokens, self._sizes_L1)
        return mask

    def write(self, layer: int, key_value_2NBTH: Tensor, *, past_len: int) -> tuple[Tensor, Tensor]:
        """Append a chunk to the past of a layer.

        Returns (key_NBKH, value_NBKH) of past and chunk, as views of the buffer.
        """
        buffer = self.key_values[layer]
        num_tokens = key_value_2NBTH.shape[3]
        size = self.memory_lens[layer] + self.chunk_len
        slot_stride = buffer.stride(3)
        first = (self._position - num_tokens) % size
        # Both copies of the slots as one view, because calls dominate the time of a single token.
        both = buffer.as_strided(
            (2, *key_value_2NBTH.shape), (size * slot_stride, *buffer.stride()), first * slot_stride
        )
        both.copy_(key_value_2NBTH)
        past_len = min(past_len, self.memory_lens[layer])
        key, value = buffer.narrow(3, first + size - past_len, past_len + num_tokens).unbind(0)
        return key, value

    @torch.inference_mode()
    def past(self, row: int, *, without_last: int = 0, most: int | None = None) -> CacheState:
        """Copy a row's memory as a value: its last `memory_len` positions, or `most` positions if `most` is given.

        `without_last` is a number of newest positions to leave out. Up to `chunk_len` positions can be left out without
        loss. If more are left out and the memory was full, the copy lacks the oldest positions.
        """
        if most is None:
            limit = self.memory_len
        else:
            limit = most
        length = int(np.clip(self.num_known[row] - without_last, 0, limit))
        key_values = []
        for buffer, memory_len, known_B in zip(self.key_values, self.memory_lens, self._known_LB, strict=True):
            size = memory_len + self.chunk_len
            stop = self._position % size + size - without_last
            if most is None:
                layer_limit = memory_len
            else:
                layer_limit = most
            num_known = int(np.clip(known_B[row] - without_last, 0, layer_limit))
            layer_len = min(length, num_known)
            key_values.append(buffer[:, :, row, stop - layer_len : stop].clone())
        documents = torch.zeros(length, dtype=torch.int64, device=key_values[0].device)
        if self.documents is not None:
            stop = self._position % self.size + self.size - without_last
            documents = self.documents[row, stop - length : stop].clone()
        return CacheState(tuple(key_values), documents)

    @torch.inference_mode()
    def put(self, row: int, past: CacheState) -> None:
        """Replace a row's memory by the last `size` positions of `past`.

        A layer of `past` may have fewer positions than the same layer of this cache. Then no layer of the row remembers
        more positions than this layer of `past` has.
        """
        past_len = past.document_S.shape[0]
        lens_L = [key_value_2NSH.shape[2] for key_value_2NSH in past.key_values]
        num_complete = past_len
        for layer_len, memory_len in zip(lens_L, self.memory_lens, strict=True):
            if layer_len < min(past_len, memory_len):
                num_complete = min(num_complete, layer_len)
        self._known_LB[:, row] = np.minimum(np.minimum(lens_L, num_complete), self._sizes_L1[:, 0])
        for buffer, memory_len, key_value_2NSH in zip(self.key_values, self.memory_lens, past.key_values, strict=True):
            _put(buffer[:, :, row], key_value_2NSH, at=self._position, size=memory_len + self.chunk_len, axis=2)
        if self.documents is not None:
            self.documents[row] = EMPTY
            _put(self.documents[row], past.document_S, at=self._position, size=self.size, axis=0)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these numbers, in this order. A number may be repeated, which copies its row."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.key_values[0].device)
        with _room_for(len(rows), memory_len=self.memory_len):
            self.key_values = [buffer.index_select(2, index) for buffer in self.key_values]
        if self.documents is not None:
            self.documents = self.documents.index_select(0, index)
        self._known_LB = self._known_LB[:, list(rows)]

    def forget(self, row: int) -> None:
        """Clear a row's memory.

        This saves work, because all rows read as many positions as the row with the longest past.
        """
        self._known_LB[:, row] = 0

    def copied(self, *, memory_len: int, chunk_len: int) -> KVCache:
        """Copy the rows' memory into a new cache with another memory length and another `chunk_len`."""
        with_documents = self.documents is not None
        ring = self.owner.ring(
            num_rows=self.num_rows,
            memory_len=memory_len,
            chunk_len=chunk_len,
            with_documents=with_documents,
            least_len=self.least_len,
        )
        for row in range(self.num_rows):
            ring.put(row, self.past(row, most=self.size))
        return ring


def _put(slots: Tensor, values: Tensor, *, at: int, size: int, axis: int) -> None:
    """Write the last `size` values before position `at` into the ring buffer, which has two slots for each position.

    The slots of position `at` and later positions need no values yet, because a later chunk writes them first.
    """
    num_values = values.shape[axis]
    next_slot = at % size
    copies = ((next_slot + size, min(num_values, size)), (next_slot, min(next_slot, num_values)))
    for stop, length in copies:
        place = slots.narrow(axis, stop - length, length)
        place.copy_(values.narrow(axis, num_values - length, length))


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory could not be allocated, on a GPU or on the host.

    torch has an exception class for this error on GPUs, but not on the host.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error)
    # The second: the number of bytes is larger than an integer can hold.
    return "can't allocate memory" in message or "Overflow when unpacking long" in message


@contextmanager
def _room_for(num_rows: int, *, memory_len: int) -> Iterator[None]:
    """Raise ConfigError about `num_rows` and `memory_len` if memory cannot be allocated in the block."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the device ran out of memory for the keys and values of {counted(memory_len, 'token')} in each of "
            f"{counted(num_rows, 'row')} of the batch. Choose a smaller --memory-len, or a smaller batch "
            "(--batch-size, --num-lanes)."
        ) from error


class _Layer(NamedTuple):
    """A Transformer layer as functions and tensors that are made from its weights once.

    torch modules look up their parameters at every call. On a CPU this takes a tenth of the time per token. So the
    linear maps and norms here are plain functions.
    """

    block: Block
    attention_norm: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]
    ff_norm: Callable[[Tensor], Tensor]
    ff_in: Callable[[Tensor], Tensor]
    ff_gate: Callable[[Tensor], Tensor] | None
    ff_out: Callable[[Tensor], Tensor]
    weight: Tensor
    """Weight of the projection to queries, keys and values, [3 N H, D].

    The part for queries includes the factor H ** -0.5. If the layer norms queries, this factor is applied after the
    norm instead.
    """
    bias: Tensor | None
    query_bias_2N11H: Tensor
    """Biases u and v, scaled by H ** -0.5. In a model without the bias v, its values are 0."""

    def prepare_qkv(self, projected_3NBTH: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Norm queries and keys, and mix values, as the model's settings say. Returns (query_NBTH, key_value_2NBTH)."""
        query, key, value = projected_3NBTH.unbind(0)
        attention = self.block.attention
        if attention.norm_eps is not None:
            query = attention.qk_norm(query) * query.shape[-1] ** -0.5
        return query, torch.stack(attention.prepare_kv(key, value, first_value))

    def finish(self, hidden_SD: Tensor, context_SD: Tensor) -> Tensor:
        """Compute the layer's output from its attention, as `Block.finish` does in evaluation.

        S is the number of positions of all rows together.
        """
        hidden = hidden_SD + self.output(context_SD)
        if self.block.pre_norm:
            ff_input = self.ff_norm(hidden)
        else:
            hidden = ff_input = self.attention_norm(hidden)
        inner = self.ff_in(ff_input)
        if self.ff_gate is not None:
            inner = swiglu(inner, self.ff_gate(ff_input))
        else:
            inner = ACTIVATIONS[self.block.activation](inner)
        hidden = hidden + self.ff_out(inner)
        if self.block.pre_norm:
            return hidden
        return self.ff_norm(hidden)


def _function_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the same as a linear map or a norm, and holds its parameters."""
    if isinstance(module, nn.Linear):
        return partial(F.linear, weight=module.weight, bias=module.bias)
    if isinstance(module, RmsNorm):
        return partial(rms_norm, eps=module.eps)
    assert isinstance(module, nn.LayerNorm)
    shape = tuple(module.normalized_shape)
    weight = module.weight
    bias = module.bias
    eps = module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


class _Parts(NamedTuple):
    """Division of a chunk's attention into parts, each of which computes few enough scores for a CPU's cache."""

    slices: list[tuple[slice, slice, slice]]
    """Heads, rows and queries of each part. Rows are divided only if a single head has too many scores."""
    buffer: Tensor
    """Buffer for the scores of one part."""

    @classmethod
    def of(cls, num_heads: int, num_rows: int, num_tokens: int, *, num_keys: int, like: Tensor) -> _Parts:
        """Divide a chunk of more than one token into parts."""
        if like.is_cuda:
            kind = "cuda"
        else:
            kind = "cpu"
        most = MOST_SCORES[kind]
        queries = min(num_tokens, BLOCK_LEN[kind])
        num_scores = queries * (num_keys + queries - 1)  # of one head and row
        rows = min(num_rows, max(1, most // num_scores))
        heads = min(num_heads, max(1, most // (num_scores * num_rows)))
        head_slices = [slice(n, n + heads) for n in range(0, num_heads, heads)]
        row_slices = [slice(b, b + rows) for b in range(0, num_rows, rows)]
        query_slices = [slice(i, min(i + queries, num_tokens)) for i in range(0, num_tokens, queries)]
        slices = list(itertools.product(head_slices, row_slices, query_slices))
        return cls(slices, like.new_empty(heads * rows * num_scores))


class FrozenModel:
    """Model with frozen weights, in evaluation mode, that keeps keys and values of the past in a `KVCache`.

    Raises ConfigError if the model's positions support no memory (`config.schema.SCHEMES`).
    """

    @torch.inference_mode()
    def __init__(self, model: TransformerXL) -> None:
        if not model.section.scheme.uses_memory:
            raise ConfigError(
                f"a model with {model.section.positions} positions has no memory, so its keys and values cannot be "
                f"cached. Run the model on whole segments, without a cache."
            )
        assert not model.training
        self.model = model
        section = model.section
        self.layers: list[_Layer] = []
        scale = section.head_width**-0.5
        for block in cast(list[Block], list(model.blocks)):
            attention = block.attention
            content = attention.content_bias
            position: Tensor | None = attention.position_bias
            assert content is not None
            if position is None:
                position = torch.zeros_like(content)
            value_bias = attention.key_value.value_bias
            if value_bias is None:
                bias = None
            else:
                bias = F.pad(value_bias, (2 * value_bias.numel(), 0))
            biases = torch.stack([content, position])
            # Normed queries are scaled after the norm.
            if section.query_key_norm:
                query_scale = 1.0
            else:
                query_scale = scale
            weight = torch.cat([attention.query.weight * query_scale, attention.key_value.weight])
            self.layers.append(
                _Layer(
                    block,
                    attention_norm=_function_of(block.attention_norm),
                    output=_function_of(attention.output),
                    ff_norm=_function_of(block.ff_norm),
                    ff_in=_function_of(block.ff_in),
                    ff_gate=None if block.ff_gate is None else _function_of(block.ff_gate),
                    ff_out=_function_of(block.ff_out),
                    weight=weight,
                    bias=bias,
                    query_bias_2N11H=biases[:, :, None, None] * scale,
                )
            )
        self.tables = model.softmax.tables()
        self._prepares_qkv = section.query_key_norm or section.value_residual
        self._window = {"off": None, "memory": 0, "memory_and_self": 1}[section.same_length]
        self._distances: list[tuple[Tensor, Tensor | None]] = []

    @torch.inference_mode()
    def ring(
        self,
        *,
        num_rows: int,
        memory_len: int,
        chunk_len: int = 1,
        with_documents: bool = False,
        least_len: int = 0,
    ) -> KVCache:
        """Make an empty memory of `memory_len` tokens for each of `num_rows` texts.

        One call of `run` takes at most `chunk_len` tokens per text.

        With `with_documents`, each call of `run` gets the document number of each token, and a token sees only its own
        document. `least_len` is the shortest memory that any layer gets, at most `memory_len`. This length can exceed
        the layer's memory in training.

        Raises ConfigError if the memory does not fit on the device. Also raises it if a query would see no key, because
        `same_length` is "memory" and `memory_len` is 0.
        """
        if self._window == 0 and memory_len == 0:
            raise ConfigError(
                "with model.same_length=memory each token attends to as many tokens as the memory has, but the memory "
                "has 0 tokens. Choose a --memory-len of 1 or more."
            )
        return KVCache(
            self,
            num_rows=num_rows,
            memory_len=memory_len,
            chunk_len=chunk_len,
            with_documents=with_documents,
            least_len=least_len,
        )

    @torch.inference_mode()
    def past_of(self, memory: Memory) -> list[CacheState]:
        """Convert a memory of hidden states to keys and values, one `CacheState` per lane (batch row) of the memory."""
        key_values: list[Tensor] = []
        for layer, hidden_BMD in zip(self.layers, memory.hidden, strict=True):
            if key_values:
                first_value = key_values[0].select(-3, 1)
            else:
                first_value = None
            key_values.append(layer.block.project_key_value(hidden_BMD, first_value))
        pasts = []
        for lane, document_M in enumerate(memory.document_BM):
            num_empty = int((document_M == EMPTY).sum())
            num_known = memory.memory_len - num_empty
            lane_key_values = []
            for key_value_BM2NH in key_values:
                first = max(0, key_value_BM2NH.shape[1] - num_known)
                key_value_S2NH = key_value_BM2NH[lane, first:]
                lane_key_values.append(key_value_S2NH.permute(1, 2, 0, 3))
            pasts.append(CacheState(tuple(lane_key_values), document_M[num_empty:]))
        return pasts

    @torch.inference_mode()
    def run(
        self,
        tokens_BT: Tensor,
        ring: KVCache,
        *,
        document_BT: Tensor | None = None,
        partition: Partition | None = None,
    ) -> Tensor:
        """Compute hidden_BTD of a chunk, as `TransformerXL.forward` does, and append the chunk to `ring`.

        `document_BT` (int64, >= 0) is required if the ring was made `with_documents`. `partition` groups the tokens by
        vocabulary cluster, as in `TransformerXL.forward`.
        """
        embedded_BTD = self.model.embedding(tokens_BT, partition=partition)
        return self.run_embedded(embedded_BTD, ring, document_BT=document_BT)[-1]

    @torch.inference_mode()
    def run_embedded(self, embedded_BTD: Tensor, ring: KVCache, *, document_BT: Tensor | None = None) -> list[Tensor]:
        """Run a chunk of vectors instead of tokens, as `run` does, and append it to `ring`.

        Returns L + 1 tensors [B, T, D]: the input of each of the L layers, then the normed output of the last layer.
        """
        num_tokens = embedded_BTD.shape[1]
        assert num_tokens <= ring.chunk_len
        past_len = ring.past_len
        mask_BTK = ring.advance(num_tokens, document_BT)
        hidden_SD = embedded_BTD.flatten(0, 1)
        layer_distances = self._distances_of(ring.size)
        hiddens = []
        section = self.model.section
        num_keys = past_len + num_tokens
        shape_BT3NH = (ring.num_rows, num_tokens, 3, section.num_heads, section.head_width)
        attend = self._attend_one
        if num_tokens > 1:
            parts = _Parts.of(section.num_heads, ring.num_rows, num_tokens, num_keys=num_keys, like=embedded_BTD)
            attend = partial(self._attend, parts=parts)
        embedded_SD = hidden_SD
        first_value = None
        for index, (layer, distances) in enumerate(zip(self.layers, layer_distances, strict=True)):
            if section.residual_scalars:
                hidden_SD = self.model.residuals[index](hidden_SD, embedded_SD)
            hiddens.append(hidden_SD.view_as(embedded_BTD))
            if section.pre_norm:
                normed = layer.attention_norm(hidden_SD)
            else:
                normed = hidden_SD
            projected = F.linear(normed, layer.weight, layer.bias)
            projected_3NBTH = projected.view(*shape_BT3NH).permute(2, 3, 0, 1, 4)
            query_NBTH = projected_3NBTH[0]
            key_value_2NBTH = projected_3NBTH[1:]
            if self._prepares_qkv:
                query_NBTH, key_value_2NBTH = layer.prepare_qkv(projected_3NBTH, first_value)
                if index == 0:
                    first_value = key_value_2NBTH[1]
            key_NBKH, value_NBKH = ring.write(index, key_value_2NBTH, past_len=past_len)
            query_2NBTH = query_NBTH + layer.query_bias_2N11H
            if self._window is None:
                window = num_keys
            else:
                window = ring.memory_lens[index] + self._window
            if mask_BTK is None:
                mask = None
            else:
                mask = mask_BTK[:, :, num_keys - key_NBKH.shape[2] :]
            context_NBTH = attend(query_2NBTH, key_NBKH, value_NBKH, distances, mask, window=window)
            context_SI = context_NBTH.permute(1, 2, 0, 3).reshape(hidden_SD.shape[0], -1)
            hidden_SD = layer.finish(hidden_SD, context_SI)
        return [*hiddens, self.model.final_norm(hidden_SD).view_as(embedded_BTD)]

    @torch.inference_mode()
    def log_probabilities(self, hidden_SD: Tensor) -> Tensor:
        """Compute log-probabilities in nats of the whole vocabulary from hidden states: [S, V], in fp32 or higher."""
        return self.model.softmax.log_probabilities(hidden_SD, tables=self.tables)

    @torch.inference_mode()
    def losses(self, hidden_BTD: Tensor, targets_BT: Tensor, *, partition: Partition | None = None) -> Tensor:
        """Compute the loss nll_BT of each target in nats, in fp32 or higher.

        `partition` groups the targets by vocabulary cluster. Without `partition`, few tokens are computed at a time to
        save memory.
        """
        softmax = self.model.softmax
        num_tokens = targets_BT.numel()
        if partition is not None:
            most = num_tokens
        else:
            most = max(1, MOST_LOGITS // self.model.vocab_size)
        if num_tokens <= most:
            return softmax.losses(hidden_BTD, targets_BT, partition=partition, tables=self.tables)
        hidden_parts = hidden_BTD.flatten(0, 1)[None].split(most, dim=1)
        target_parts = targets_BT.flatten()[None].split(most, dim=1)
        nll_parts = []
        for hidden_1sD, targets_1s in zip(hidden_parts, target_parts, strict=True):
            nll_parts.append(softmax.losses(hidden_1sD, targets_1s, tables=self.tables))
        return torch.cat(nll_parts, dim=1).view(targets_BT.shape)

    @torch.inference_mode()
    def top1_correct(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return top1_BT: 1.0 where the target is the most probable token, else 0.0."""
        return self.model.softmax.top1_correct(hidden_BTD, targets_BT, tables=self.tables)

    def _attend(
        self,
        query_2NBTH: Tensor,
        key_NBKH: Tensor,
        value_NBKH: Tensor,
        distances: tuple[Tensor, Tensor | None],
        mask_BTK: Tensor | None,
        *,
        window: int,
        parts: _Parts,
    ) -> Tensor:
        """Compute attention of several queries per row. Returns context_NBTH.

        `distances` has the encodings, and the learned term or None, of at least K distances in descending order to 0. A
        query sees at most `window` keys.
        """
        N, B, T, H = query_2NBTH.shape[1:]
        K = key_NBKH.shape[2]
        context_NBTH = query_2NBTH.new_empty(N, B, T, H)
        for heads, rows, queries in parts.slices:
            first_key = max(0, K - T + queries.start + 1 - window)
            keys = slice(first_key, K - T + queries.stop)
            num_keys = keys.stop - keys.start
            content_query, position_query = query_2NBTH[:, heads, rows, queries]
            distance_NHS, bias_NS = distances
            scores = _scores_by_distance(
                position_query,
                distance_NHS[heads, :, -num_keys:],
                None if bias_NS is None else bias_NS[heads, -num_keys:],
                num_masked=max(0, num_keys - window),
                buffer=parts.buffer,
            )
            if mask_BTK is not None:
                scores.masked_fill_(~mask_BTK[rows, queries, keys], float("-inf"))
            # Heads and rows as one dimension, of views.
            content_query = content_query.flatten(0, 1)
            key = key_NBKH[heads, rows, keys].flatten(0, 1)
            value = value_NBKH[heads, rows, keys].flatten(0, 1)
            out = context_NBTH[heads, rows, queries].flatten(0, 1)
            scores = scores.flatten(0, 1)
            scores.baddbmm_(content_query, key.transpose(1, 2))
            if scores.dtype == at_least_fp32(scores.dtype):  # softmax in place, where torch's own copies
                scores.sub_(scores.amax(-1, keepdim=True)).exp_()
                total = scores.sum(-1, keepdim=True)
                torch.bmm(scores, value, out=out).div_(total)
            else:
                torch.bmm(scores.softmax(-1), value, out=out)
        return context_NBTH

    def _attend_one(
        self,
        query_2NB1H: Tensor,
        key_NBKH: Tensor,
        value_NBKH: Tensor,
        distances: tuple[Tensor, Tensor | None],
        mask_B1K: Tensor | None,
        *,
        window: int,
    ) -> Tensor:
        """Compute attention of one query per row, as `_attend` does.

        For one query, the number of operations matters more than the use of a CPU's cache.
        """
        N, B, _, H = query_2NB1H.shape[1:]
        distance_NHS, bias_NS = distances
        K = min(key_NBKH.shape[2], window)
        if window < key_NBKH.shape[2]:
            key_NBKH = key_NBKH[:, :, -K:]
            value_NBKH = value_NBKH[:, :, -K:]
        content_query, position_query = query_2NB1H.unbind(0)
        scores_NBK = torch.bmm(position_query.squeeze(2), distance_NHS.narrow(2, distance_NHS.shape[2] - K, K))
        if bias_NS is not None:
            scores_NBK += bias_NS[:, None, -K:]
        if mask_B1K is not None:
            scores_NBK.masked_fill_(~mask_B1K[:, 0, -K:], float("-inf"))
        query = content_query.reshape(N * B, 1, H)
        key = key_NBKH.flatten(0, 1)
        value = value_NBKH.flatten(0, 1)
        if scores_NBK.is_cuda or scores_NBK.dtype == at_least_fp32(scores_NBK.dtype):
            scores = torch.baddbmm(scores_NBK.view(N * B, 1, K), query, key.transpose(1, 2))
        else:  # in half precision torch copies the keys first, and transposed keys are slow to copy
            scores = torch.baddbmm(scores_NBK.view(N * B, K, 1), key, query.transpose(1, 2)).transpose(1, 2)
        probabilities = scores.softmax(-1, dtype=at_least_fp32(scores.dtype)).to(scores.dtype)
        return torch.bmm(probabilities, value).view(N, B, 1, H)

    def _distances_of(self, num_distances: int) -> list[tuple[Tensor, Tensor | None]]:
        """Return each layer's (distance_NHS, bias_NS or None), scaled, for S >= `num_distances` distances S-1 ... 0.

        The result is stored, because it is the same for every chunk.
        """
        if not self._distances or self._distances[0][0].shape[2] < num_distances:
            scale = self.model.section.head_width**-0.5
            self._distances = []
            section = self.model.section
            encoding_KD = distance_encoding(
                num_distances, width=section.width, clamp_len=section.clamp_len, like=self.model.embedding.weight(0)
            )
            for layer in self.layers:
                distances = layer.block.attention.distances(num_distances, encoding_KD=encoding_KD)
                assert distances is not None
                if distances.bias_KN is None:
                    bias_NS = None
                else:
                    bias_NS = distances.bias_KN.t().contiguous() * scale
                self._distances.append((distances.key_KNH.permute(1, 2, 0).contiguous(), bias_NS))
        return self._distances


def _scores_by_distance(
    query_NBTH: Tensor, distance_NHK: Tensor, bias_NK: Tensor | None, *, num_masked: int, buffer: Tensor
) -> Tensor:
    """Compute the terms scores_NBTK of keys whose distances from the last query are K-1 ... 0.

    The result is a view of `buffer`, which has at least N * B * T * (K + T - 1) numbers. Scores of the `num_masked`
    largest distances and of distances below 0 are -inf.
    """
    N, B, T, H = query_NBTH.shape
    K = distance_NHK.shape[2]
    row_len = K + T - 1
    scores_NSR = buffer[: N * B * T * row_len].view(N, B * T, row_len)
    torch.bmm(query_NBTH.reshape(N, B * T, H), distance_NHK, out=scores_NSR[:, :, :K])
    if bias_NK is not None:
        scores_NSR[:, :, :K] += bias_NK[:, None]
    if num_masked:
        scores_NSR[:, :, :num_masked] = float("-inf")
    scores_NSR[:, :, K:] = float("-inf")
    lane = T * row_len
    return scores_NSR.as_strided((N, B, T, K), (B * lane, lane, row_len - 1, 1), T - 1)
