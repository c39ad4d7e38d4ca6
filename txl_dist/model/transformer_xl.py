"""Transformer-XL: embedding, blocks and softmax. The memory is an argument and a result, not a part of the model.

`TransformerXL.forward` computes hidden states. `TransformerXL.softmax` turns them into losses or log-probabilities.
`SegmentLoss` is the module that training wraps. It takes one segment and returns the loss and the next memory. For
frozen weights `inference.kv_cache` computes the same results with less work, from cached keys and values.

Shapes: B lanes, T segment, M memory, K = M + T, D model width, L layers, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl_dist.config.load import check_vocabulary
from txl_dist.config.schema import AttentionKernel, ModelSection, memory_of_layers
from txl_dist.errors import ConfigError
from txl_dist.model.adaptive_embedding import AdaptiveEmbedding, Partition
from txl_dist.model.adaptive_softmax import AdaptiveSoftmax
from txl_dist.model.block import Block, ResidualMix, build_norm
from txl_dist.model.dropout import dropout
from txl_dist.model.init import initialize
from txl_dist.model.layer_norm import with_zero_columns
from txl_dist.model.memory import AttentionMask, Memory, build_mask, empty_memory
from txl_dist.model.positions import attention_biases, distance_encoding
from txl_dist.model.prediction_order import OrderedMask, PredictionOrder, build_ordered_mask


class TransformerXL(nn.Module):
    """The network of Dai et al. 2019, initialised from torch's default generator.

    If `recompute_every` is n, the activations of every n-th block are not kept, and the backward pass computes them
    again. A value of 0 keeps all activations. `attention` is the setting `engine.attention`, and `memory_lens` is
    `train.memory_lens`. With `keeps_scores` the Triton kernels of attention keep distance scores for the backward pass.

    Raises ConfigError if the cutoffs do not fit `vocab_size`, or if an argument has the wrong type.
    """

    def __init__(
        self,
        model: ModelSection,
        *,
        vocab_size: int,
        recompute_every: int = 0,
        attention: AttentionKernel = "auto",
        memory_lens: Sequence[int] = (),
        keeps_scores: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, ModelSection) or not isinstance(vocab_size, int):
            raise ConfigError(
                f"TransformerXL was called with a {type(model).__name__} and vocab_size={vocab_size!r:.80}. Pass the "
                "model section of a configuration (config.model), and the vocabulary size as a whole number."
            )
        check_vocabulary(model, vocab_size=vocab_size)
        self.section = model
        self.vocab_size = vocab_size
        self.recompute_every = recompute_every
        self.memory_lens = tuple(memory_lens)
        self.stored_width = model.width
        """Width of hidden states in storage. It is larger than the model width if the engine pads widths."""
        self.embedding = AdaptiveEmbedding(model, vocab_size=vocab_size)
        if model.share_biases:
            num_biases = 1
        else:
            num_biases = model.num_layers
        layer_biases = [attention_biases(model.num_heads, model.head_width) for _ in range(num_biases)]
        if model.share_biases:
            layer_biases *= model.num_layers
        self.blocks = nn.ModuleList()
        for index, biases in enumerate(layer_biases):
            block = Block(model, biases=biases, is_first=index == 0, kernel=attention)
            block.attention.keeps_scores = keeps_scores
            self.blocks.append(block)
        # Outside the blocks: their gradients are ready before the blocks' are complete, and ZeRO-3 exchanges those.
        if model.residual_scalars:
            num_mixes = model.num_layers
        else:
            num_mixes = 0
        self.residuals = nn.ModuleList(ResidualMix() for _ in range(num_mixes))
        self.target_row: nn.Parameter | None = None
        """Input of every query row (w in section 2.3 of Yang et al. 2019), if the model predicts in any order."""
        if model.any_order:
            self.target_row = nn.Parameter(torch.empty(model.width))
        if model.final_norm:
            self.final_norm = build_norm(model)
        else:
            self.final_norm = nn.Identity()
        self.softmax = AdaptiveSoftmax(model, vocab_size=vocab_size, embedding=self.embedding, kernel=attention)
        initialize(self, model)

    def empty_memory(self, *, num_lanes: int, memory_len: int) -> Memory:
        """Make a memory that contains no token yet, in this model's compute type and on its device."""
        lens = self.memory_of_layers(memory_len)
        weight = self.embedding.weight(0)
        return empty_memory(lens, num_lanes=num_lanes, width=self.stored_width, like=weight)

    def memory_of_layers(self, memory_len: int) -> tuple[int, ...]:
        """Return the number of tokens that each layer remembers. `memory_len` is the length of the longest memory."""
        return memory_of_layers(memory_len, self.memory_lens, num_layers=self.section.num_layers)

    def forward(
        self,
        tokens_BT: Tensor,
        memory: Memory,
        *,
        document_BT: Tensor | None = None,
        partition: Partition | None = None,
        with_loss: bool = False,
        order: PredictionOrder | None = None,
    ) -> tuple[Tensor, Memory]:
        """Compute the hidden states of a segment, hidden_BTD, and the memory after the segment. Returns both.

        With `order` (XLNet, needs `model.any_order`) the result holds the hidden states of the query rows, [B, m, D],
        which predict the targets' own tokens. The memory then stores the first R tokens of the segment.

        `document_BT` (int64, >= 0) gives each token's document, and a query then sees only its own document. If
        `document_BT` is None, a query sees all documents. `partition` groups `tokens_BT` into the clusters of
        `embedding.edges`. If `partition` is None, the groups are computed here, which waits for the device. Set
        `with_loss` if the softmax then computes a loss from the result. A tied embedding can then get a sparse
        gradient, which autograd adds to the dense gradient of the softmax. Raises ConfigError if a memory with tokens
        is passed to a model whose positions do not support a memory.
        """
        section = self.section
        scheme = section.scheme
        if not section.takes_memory and memory.memory_len:
            raise ConfigError(
                f"a model with {section.positions} positions has no memory, but the call passes a memory of "
                f"{memory.memory_len} tokens. Pass a memory of 0 tokens. For more context, use longer segments."
            )
        if document_BT is None:
            document_BT = torch.zeros_like(tokens_BT)
        stored_BR = document_BT
        visible: AttentionMask | OrderedMask
        if order is None:
            visible = build_mask(memory, document_BT, same_length=section.same_length)
        else:
            visible = build_ordered_mask(memory, document_BT, order)
            stored_BR = document_BT[:, : order.reuse_len]
        shares_gradient = with_loss and section.tie_weights
        hidden = self.embedding(tokens_BT, partition=partition, sparse_gradient=shares_gradient)
        encoding_KD = None
        if scheme.sinusoids == "distances":
            num_negative = visible.num_distances - visible.num_keys
            encoding = self._encoding(visible.num_distances, like=hidden, num_negative=num_negative)
            encoding_KD = self._drop(encoding, section.rate(section.distance_dropout))
        elif scheme.sinusoids == "embedding":
            # Counted from the segment's end. Hidden states in a memory contain the encodings of their own segment.
            hidden = hidden + self._encoding(tokens_BT.shape[1], like=hidden)
        if order is not None:
            hidden = torch.cat([hidden, self._query_rows(order, like=hidden)], dim=1)
        hidden = self._drop(hidden, section.rate(section.embed_dropout))
        embedded = hidden
        inputs: list[Tensor] = []
        first_value_BKNH: Tensor | None = None
        for index, (block, memory_BMD) in enumerate(zip(self.blocks, memory.hidden, strict=True)):
            if section.residual_scalars:
                hidden = self.residuals[index](hidden, embedded)
            if order is None:
                inputs.append(hidden)
            else:
                inputs.append(hidden[:, : order.reuse_len])
            run: Callable[..., tuple[Tensor, Tensor | None]] = block
            if self.recompute_every and self.training and index % self.recompute_every == 0:
                run = partial(checkpoint, block, use_reentrant=False)
            seen = visible.of_memory(memory_BMD.shape[1])
            nearest_KD = encoding_KD
            if encoding_KD is not None and seen is not visible:
                nearest_KD = encoding_KD[-seen.num_distances :]
            hidden, first_value_BKNH = run(hidden, memory_BMD, nearest_KD, seen, first_value_BKNH)
        if order is not None:
            hidden = hidden[:, visible.segment_len :]
        hidden_BTD = self._drop(self.final_norm(hidden), section.rate(section.output_dropout))
        return hidden_BTD, memory.append(inputs, document_BT=stored_BR)

    def _query_rows(self, order: PredictionOrder, *, like: Tensor) -> Tensor:
        """Return the first input of the query rows, [B, m, D]: the same learned row for each target."""
        if self.target_row is None:
            raise ConfigError(
                "TransformerXL.forward was called with the argument `order`, but the model predicts only the next "
                "token. Set model.any_order to true, or remove the argument `order`."
            )
        num_lanes, num_targets = order.place_Bm.shape
        return self.target_row.to(like.dtype).expand(num_lanes, num_targets, -1)

    def _encoding(self, num_distances: int, *, like: Tensor, num_negative: int = 0) -> Tensor:
        section = self.section
        encoding_KD = distance_encoding(
            num_distances, width=section.width, clamp_len=section.clamp_len, like=like, num_negative=num_negative
        )
        return with_zero_columns(encoding_KD, like.shape[-1])

    def _drop(self, x: Tensor, rate: float) -> Tensor:
        if self.training:
            return dropout(x, rate)
        return x


class Batch(NamedTuple):
    """One segment of some lanes (rows of the batch), on the device. It is the input of `SegmentLoss`."""

    tokens_BT: Tensor
    targets_BT: Tensor
    scored_BT: Tensor
    """Number 1 where the target's loss counts, else 0."""
    document_BT: Tensor | None
    """Document number of each token. If it is None, attention crosses document borders."""
    token_partition: Partition | None = None
    target_partition: Partition | None = None
    order: PredictionOrder | None = None
    """Order of prediction (XLNet). The targets are then tokens of the segment itself, [B, m]."""


class SegmentLoss(nn.Module):
    """Module that computes the loss of one segment of some lanes (rows of the batch).

    In training an engine, such as DeepSpeed, wraps this module.
    """

    def __init__(self, model: TransformerXL) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        batch: Batch,
        memory: Memory,
        normalizer: Tensor | float | None = None,
        predicts: bool = False,
        with_top1: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Return (loss, memory after the segment).

        The loss is the sum of the scored losses in nats, divided by `normalizer`. The loss has the type fp32 or fp64.
        If `normalizer` is None, the losses are not summed, and nll_BT is returned for evaluation and probes. With
        `with_top1` the first item is score_2BT of `AdaptiveSoftmax.forward`. With `predicts` the first item is log p_BV
        of the token after the segment.
        """
        hidden_BTD, memory = self.model(
            batch.tokens_BT,
            memory,
            document_BT=batch.document_BT,
            partition=batch.token_partition,
            with_loss=normalizer is not None,
            order=batch.order,
        )
        if predicts:
            return self.model.softmax(hidden_BTD[:, -1:], None), memory
        if normalizer is None:
            weight_BT = None
        else:
            weight_BT = batch.scored_BT / normalizer
        loss = self.model.softmax(
            hidden_BTD,
            batch.targets_BT,
            partition=batch.target_partition,
            weight_BT=weight_BT,
            with_top1=with_top1,
        )
        return loss, memory
