# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
# an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
"""Transformer-XL (Dai et al. 2019): a language model that reads a text in segments and remembers earlier segments.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**tokenizer("Once upon", return_tensors="pt"), max_new_tokens=40)

The memory is a `TxlMemory`: the keys and values of each layer at the last M positions. So the cost of a token does not
depend on the length of its text. A text of any length is read in segments of `config.segment_len`, as in training. Rows
of a batch can be padded on the left, and tokens never see the padding. Each row is divided into segments from its own
first token, so its results do not depend on the other rows.

`logits` are log-probabilities of the whole vocabulary in nats, even with an adaptive softmax. There is no dropout, and
no gradient flows from one segment to the segment before. So use this code for inference and for short fine-tuning.

Shapes: B rows, T tokens, S positions of the past, K = S + T keys, N heads, H head width, D model width, V vocabulary.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_txl import TxlConfig

EMPTY = -1
"""Document number of a position that holds padding."""


class MemoryLayer(CacheLayerMixin):
    """Keys and values [B, N, S, H] of one layer for the past positions, the oldest first."""

    def __init__(self):
        super().__init__()
        self.distances = None
        """Cache of `RelativeAttention`: encodings [N, K, H] and learned terms [N, K] (or None) of the distances
        K-1 ... 0."""

    def lazy_initialization(self, key_states, value_states):
        """Make an empty past, with the type and the device of the given keys."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Append a segment's keys and values to the past. Returns the keys and values of past and segment."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        return self.keys, self.values

    def keep(self, num_positions):
        """Forget all positions except the last `num_positions`. No gradient flows into the positions that are kept."""
        first = max(0, self.keys.shape[2] - num_positions)
        self.keys = self.keys[:, :, first:].detach()
        self.values = self.values[:, :, first:].detach()

    def get_seq_length(self):
        """Return the number of past positions, S."""
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length):
        """Return the number of keys K of past and segment, and the position of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self):
        """Return -1, because the length of a text is not limited."""
        return -1

    get_max_cache_shape = get_max_length  # its name in the first releases of 5

    def reset(self):
        """Forget all past keys and values."""
        self.keys = None
        self.values = None
        self.distances = None
        self.is_initialized = False

    def batch_repeat_interleave(self, repeats):
        """Repeat each row of the batch `repeats` times."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices):
        """Keep only the rows of the batch that have these indices."""
        if self.is_initialized:
            self.keys = self.keys[indices]
            self.values = self.values[indices]


class TxlMemory(Cache):
    """Memory of a batch: each layer's keys and values at the last `memory_len` positions, and the positions' documents.

    `memory_len` can be larger than in training. If it is None, the length is `config.generation_memory_len`. Raises
    ValueError if the length is 0 and same_length is "memory".
    """

    def __init__(self, config, memory_len=None):
        super().__init__(layers=[MemoryLayer() for _ in range(config.num_layers)])
        if memory_len is None:
            memory_len = config.generation_memory_len
        self.memory_len = memory_len
        if config.same_length == "memory" and self.memory_len < 1:
            raise ValueError(
                "with same_length='memory' each token attends to memory_len tokens, but memory_len is 0. Choose a "
                "memory_len of 1 or more."
            )
        self.num_seen = 0
        self.document_BS = None

    def get_seq_length(self, layer_idx=0):
        """Return the number of tokens that were read, padding included. It can exceed the memory's length."""
        return self.num_seen

    def keep(self, num_positions):
        """Forget all positions of all layers except the last `num_positions`."""
        for layer in self.layers:
            layer.keep(num_positions)
        first = max(0, self.document_BS.shape[1] - num_positions)
        self.document_BS = self.document_BS[:, first:]

    def reset(self):
        """Forget all past positions of all layers."""
        super().reset()
        self.num_seen = 0
        self.document_BS = None

    def crop(self, tokens_to_remove):
        """Raise NotImplementedError, because positions that the memory dropped cannot come back."""
        raise NotImplementedError(
            "a memory of fixed length cannot be cropped to an earlier position. Copy the memory (copy.deepcopy) before "
            "the model reads more tokens."
        )

    def reorder_cache(self, beam_idx):
        """Keep the rows that beam search continues, in the order of `beam_idx`."""
        super().reorder_cache(beam_idx)
        if self.document_BS is not None:
            self.document_BS = self.document_BS.index_select(0, beam_idx.to(self.document_BS.device))

    def batch_repeat_interleave(self, repeats):
        """Repeat each row of the batch `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.document_BS is not None:
            self.document_BS = self.document_BS.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices):
        """Keep only the rows of the batch that have these indices."""
        super().batch_select_indices(indices)
        if self.document_BS is not None:
            self.document_BS = self.document_BS[indices]


def cluster_edges(cutoffs, vocab_size):
    """Return the pair (first id, last id + 1) for each cluster."""
    edges = [0, *cutoffs, vocab_size]
    return list(itertools.pairwise(edges))


class AdaptiveEmbedding(nn.Module):
    """Embedding that turns token ids into hidden states (Baevski and Auli 2019).

    If div_value is 1, there is one table. If div_value is larger, there is one table per cluster. Tables of rarer words
    are narrower, and each table has a projection to the model width.
    """

    def __init__(self, config):
        super().__init__()
        self.width = config.width
        self.scale = math.sqrt(config.width) if config.scale_embedding else 1.0
        cutoffs = config.cutoffs if config.div_value > 1 else ()
        self.edges = cluster_edges(cutoffs, config.vocab_size)
        for i, (low, high) in enumerate(self.edges):
            table_width = config.embed_width // config.div_value**i
            weight = nn.Parameter(torch.empty(high - low, table_width))
            self.register_parameter(f"weight_{i}", weight)
            is_projected = table_width != config.width or (config.div_value > 1 and config.project_same_width)
            projection = None
            if is_projected:
                projection = nn.Parameter(torch.empty(config.width, table_width))
            self.register_parameter(f"projection_{i}", projection)

    def forward(self, input_ids):
        """Look up the embeddings of ids [B, T].

        Returns hidden_BTD. Raises IndexError for an id outside the vocabulary.
        """
        hidden = self.weight_0.new_zeros(*input_ids.shape, self.width)
        cluster_BT = torch.zeros_like(input_ids)
        for low, _ in self.edges[1:]:
            cluster_BT += input_ids >= low
        for i, (low, _) in enumerate(self.edges):
            is_here = cluster_BT == i
            weight = getattr(self, f"weight_{i}")
            projection = getattr(self, f"projection_{i}")
            embedded = F.embedding(input_ids[is_here] - low, weight)
            if projection is not None:
                embedded = F.linear(embedded, projection)
            hidden[is_here] = embedded
        return hidden * self.scale


class AdaptiveSoftmax(nn.Module):
    """Softmax from hidden states to log-probabilities (Grave et al. 2017).

    The head is a softmax over the most frequent words and one column per tail cluster. The log-probability of a tail
    word is a sum: the log-probability of its cluster's column, plus the log-probability of the word within the cluster.
    Weights that are tied to the embedding are parameters of the embedding only.
    """

    def __init__(self, config, embedding):
        super().__init__()
        self.edges = cluster_edges(config.cutoffs, config.vocab_size)
        num_clusters = len(self.edges)
        num_tails = len(config.cutoffs)
        self.num_tables = 1 if config.div_value == 1 else num_clusters
        self.is_tied = config.tie_weights_to_embedding
        self.ties = list(config.tie_projections) or [False] * num_clusters
        for i in range(self.num_tables):
            rows = getattr(embedding, f"weight_{i}")
            if not self.is_tied:
                weight = nn.Parameter(torch.empty_like(rows))
                self.register_parameter(f"weight_{i}", weight)
            bias = nn.Parameter(torch.empty(rows.shape[0]))
            self.register_parameter(f"bias_{i}", bias)
        for i in range(num_clusters):
            like = getattr(embedding, f"projection_{self._table(i)}")
            if like is not None and not self.ties[i]:
                projection = nn.Parameter(torch.empty_like(like))
                self.register_parameter(f"projection_{i}", projection)
        if num_tails:
            self.cluster_weight = nn.Parameter(torch.empty(num_tails, config.embed_width))
            self.cluster_bias = nn.Parameter(torch.empty(num_tails))

    def _table(self, i):
        """Return the number of the table that holds cluster i."""
        return min(i, self.num_tables - 1)

    def _logits(self, i, hidden_BTD, embedding):
        """Return the logits of cluster i.

        Cluster 0 is the head, and its logits end with one column per tail cluster.
        """
        table = self._table(i)
        low, high = self.edges[i]
        weight = getattr(embedding if self.is_tied else self, f"weight_{table}")
        bias = getattr(self, f"bias_{table}")
        projection = getattr(embedding, f"projection_{table}")
        if projection is not None:
            if not self.ties[i]:
                projection = getattr(self, f"projection_{i}")
            hidden_BTD = F.linear(hidden_BTD, projection.t())
        if self.num_tables == 1:
            weight = weight[low:high]
            bias = bias[low:high]
        if i == 0 and len(self.edges) > 1:
            weight = torch.cat([weight, self.cluster_weight])
            bias = torch.cat([bias, self.cluster_bias])
        return F.linear(hidden_BTD, weight, bias)

    def forward(self, hidden_BTD, embedding):
        """Return log p of the whole vocabulary, [B, T, V], in fp32 or fp64."""
        head = self._logits(0, hidden_BTD, embedding)
        dtype = torch.promote_types(torch.float32, head.dtype)
        head = head.log_softmax(-1, dtype=dtype)
        _, shortlist_size = self.edges[0]
        parts = [head[..., :shortlist_size]]
        for i in range(1, len(self.edges)):
            tail = self._logits(i, hidden_BTD, embedding)
            column = head[..., shortlist_size + i - 1, None]
            parts.append(tail.log_softmax(-1, dtype=dtype) + column)
        return torch.cat(parts, dim=-1)


class SinusoidalDistances(nn.Linear):
    """Projection that turns sinusoids of the distances into one layer's encodings."""

    def __init__(self, config):
        super().__init__(config.width, config.num_heads * config.head_width, bias=False)
        self.width = config.width
        self.num_heads = config.num_heads
        self.clamp_len = config.clamp_len

    def forward(self, num_distances):
        """Return (encodings [N, K, H] of the distances K-1 ... 0, None).

        The second item is None because no term is learned.
        """
        # In fp32 and in this order, as in training: half precision cannot represent all positions.
        dtype = torch.promote_types(torch.float32, self.weight.dtype)
        distance_K = torch.arange(num_distances - 1, -1, -1, dtype=dtype, device=self.weight.device)
        if self.clamp_len > 0:
            distance_K = distance_K.clamp(max=self.clamp_len)
        column_F = torch.arange(0, self.width, 2, dtype=dtype, device=distance_K.device)
        frequency_F = 1 / 10000 ** (column_F / self.width)
        angle_KF = distance_K[:, None] * frequency_F
        encoding = torch.cat([angle_KF.sin(), angle_KF.cos()], dim=1)
        encoding_KD = encoding[:, : self.width].to(self.weight.dtype)
        projected = super().forward(encoding_KD)
        encoding_KNH = projected.unflatten(-1, (self.num_heads, -1))
        return encoding_KNH.transpose(0, 1), None


class LearnedDistances(nn.Module):
    """Table with a learned vector and a learned number per distance, the shortest distance first. Distances beyond the
    table's end use the last row."""

    def __init__(self, config):
        super().__init__()
        self.num_rows = config.num_distances
        if config.clamp_len:
            self.num_rows = min(config.num_distances, config.clamp_len + 1)
        self.weight = nn.Parameter(torch.empty(config.num_distances, config.num_heads, config.head_width))
        self.bias = nn.Parameter(torch.empty(config.num_distances, config.num_heads))

    def forward(self, num_distances):
        """Return (encodings [N, K, H], learned terms [N, K]) of the distances K-1 ... 0."""
        distance_K = torch.arange(num_distances - 1, -1, -1, device=self.weight.device)
        row_K = distance_K.clamp(max=self.num_rows - 1)
        encoding_NKH = self.weight[row_K].transpose(0, 1)
        term_NK = self.bias[row_K].t()
        return encoding_NKH, term_NK


class KeyValue(nn.Linear):
    """Linear layer that projects hidden states to keys and values. With `config.value_bias` only values get a bias."""

    def __init__(self, config):
        inner = config.num_heads * config.head_width
        super().__init__(config.width, 2 * inner, bias=False)
        self.value_bias = nn.Parameter(torch.empty(inner)) if config.value_bias else None

    def forward(self, hidden_BTD):
        """Return the keys and the values, each [B, T, N * H]."""
        key, value = super().forward(hidden_BTD).chunk(2, dim=-1)
        if self.value_bias is not None:
            value = value + self.value_bias
        return key, value


class RelativeAttention(nn.Module):
    """Attention by content and by distance (Dai et al. 2019, section 3.3).

    The score of query i for key j is (q_i + u) . k_j + (q_i + v) . r_{i-j}. With learned distances it is
    (q_i + u) . k_j + q_i . r_{i-j} + s_{i-j}.
    """

    def __init__(self, config, *, has_biases, mixes_values):
        super().__init__()
        inner = config.num_heads * config.head_width
        self.num_heads = config.num_heads
        self.scale = config.head_width**-0.5
        self.norm_eps = config.norm_eps if config.query_key_norm else None
        self.value_share = nn.Parameter(torch.empty(1)) if mixes_values else None
        self.query = nn.Linear(config.width, inner, bias=False)
        self.key_value = KeyValue(config)
        is_learned = config.positions == "learned_relative"
        self.distance = LearnedDistances(config) if is_learned else SinusoidalDistances(config)
        self.output = nn.Linear(inner, config.width, bias=config.output_bias)
        if has_biases:
            self.content_bias = nn.Parameter(torch.empty(config.num_heads, config.head_width))
            if not is_learned:
                self.position_bias = nn.Parameter(torch.empty(config.num_heads, config.head_width))

    def keys_and_values(self, hidden_BTD, first_value=None):
        """Return keys and values of any positions, each [B, N, T, H].

        `first_value` holds the first layer's values at the same positions. The argument is needed only if the model
        mixes these values into later layers.
        """
        key, value = self.key_value(hidden_BTD)
        key = self._by_heads(key)
        value = self._by_heads(value)
        if self.value_share is not None:
            value = torch.lerp(value, first_value, self.value_share)
        return self._normed(key), value

    def _by_heads(self, x_BTI):
        """Return a view of [B, T, N * H] as [B, N, T, H]."""
        x_BTNH = x_BTI.unflatten(-1, (self.num_heads, -1))
        return x_BTNH.transpose(1, 2)

    def _normed(self, heads, gain=1.2):
        """Divide queries, keys or encodings by their root mean square, and multiply them by `gain`, if the model norms
        them."""
        if self.norm_eps is None:
            return heads
        return gain * F.rms_norm(heads, heads.shape[-1:], eps=self.norm_eps)

    def forward(self, hidden_BTD, memory_layer, is_seen_BTK, biases, first_value=None):
        """Compute the attention of a segment's positions to the past and to the segment itself.

        Returns (output_BTD, the values [B, N, T, H] at the segment's positions). The segment's keys and values are
        appended to `memory_layer`. `biases` is the module that holds this layer's biases u and v.
        """
        key_BNTH, value_BNTH = self.keys_and_values(hidden_BTD, first_value)
        key_BNKH, value_BNKH = memory_layer.update(key_BNTH, value_BNTH)
        query_BNTH = self._normed(self._by_heads(self.query(hidden_BTD)))
        _, T, K = is_seen_BTK.shape
        position_query = query_BNTH
        if hasattr(biases, "position_bias"):
            position_query = query_BNTH + biases.position_bias[:, None]
        encoding_NKH, term_NK = self._distances(memory_layer, K)
        by_distance = position_query @ encoding_NKH.transpose(1, 2)
        if term_NK is not None:
            by_distance = by_distance + term_NK[:, None]
        # The relative shift: row i is needed T-1-i cells further left. With a column of zeros in front, that is another
        # view of the same cells.
        padded = F.pad(by_distance, (1, 0))
        shifted = padded.flatten(2)[:, :, T:].unflatten(-1, (T, K))
        content_query = query_BNTH + biases.content_bias[:, None]
        by_content = content_query @ key_BNKH.transpose(2, 3)
        scores_BNTK = (by_content + shifted) * self.scale
        scores_BNTK = scores_BNTK.masked_fill(~is_seen_BTK[:, None], float("-inf"))
        dtype = torch.promote_types(torch.float32, scores_BNTK.dtype)
        probabilities = scores_BNTK.softmax(-1, dtype=dtype).to(value_BNKH.dtype)
        context_BNTH = probabilities @ value_BNKH
        context_BTI = context_BNTH.transpose(1, 2).flatten(2)
        return self.output(context_BTI), value_BNTH

    def _distances(self, memory_layer, num_distances):
        """Return (encodings [N, K, H], learned terms [N, K]) of the distances K-1 ... 0.

        The second item is None if the model has no learned terms. Encodings and terms are the same for all texts, so
        they are cached in the memory. They are not cached if gradients are enabled.
        """
        needs_gradient = torch.is_grad_enabled()
        distances = memory_layer.distances
        if distances is None or distances[0].shape[1] < num_distances or needs_gradient:
            num_encoded = num_distances if needs_gradient else 2 * num_distances
            encoding_NKH, term_NK = self.distance(num_encoded)
            distances = self._normed(encoding_NKH, gain=1.0), term_NK
            memory_layer.distances = None if needs_gradient else distances
        encoding_NKH, term_NK = distances
        first = encoding_NKH.shape[1] - num_distances
        if term_NK is not None:
            term_NK = term_NK[:, first:]
        return encoding_NKH[:, first:], term_NK


def build_norm(config):
    """Build the norm of hidden states that the settings name: layer norm, or a division by the root mean square."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps, elementwise_affine=False)
    return nn.LayerNorm(config.width, eps=config.norm_eps)


class Block(nn.Module):
    """One Transformer-XL layer: attention and a feed-forward network, each with a residual sum."""

    def __init__(self, config, *, has_biases, is_first):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.activation = config.activation
        mixes_values = config.value_residual and not is_first
        self.attention = RelativeAttention(config, has_biases=has_biases, mixes_values=mixes_values)
        self.attention_norm = build_norm(config)
        self.ff_in = nn.Linear(config.width, config.ff_width)
        self.ff_gate = nn.Linear(config.width, config.ff_width) if config.activation == "swiglu" else None
        self.ff_out = nn.Linear(config.ff_width, config.width)
        self.ff_norm = build_norm(config)

    def forward(self, hidden, memory_layer, is_seen_BTK, biases, first_value=None):
        """Return (the layer's output_BTD, the values [B, N, T, H] of its attention)."""
        normed = self.attention_norm(hidden) if self.pre_norm else hidden
        context, value = self.attention(normed, memory_layer, is_seen_BTK, biases, first_value)
        if self.pre_norm:
            hidden = hidden + context
            return hidden + self._feed_forward(self.ff_norm(hidden)), value
        hidden = self.attention_norm(hidden + context)
        return self.ff_norm(hidden + self._feed_forward(hidden)), value

    def _feed_forward(self, hidden):
        inner = self.ff_in(hidden)
        if self.activation == "swiglu":
            inner = inner * F.silu(self.ff_gate(hidden))
        elif self.activation == "gelu":
            inner = F.gelu(inner)
        elif self.activation == "relu2":
            inner = F.relu(inner).square()
        else:
            inner = F.relu(inner)
        return self.ff_out(inner)


class ResidualMix(nn.Module):
    """Learned weighted sum of a block's input and the tokens' embeddings."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.empty(2))

    def forward(self, hidden, first):
        """Return the weighted sum of two tensors of the same shape."""
        return self.scales[0] * hidden + self.scales[1] * first


class TxlForCausalLM(PreTrainedModel, GenerationMixin):
    """Transformer-XL language model with its softmax, for scoring and text generation in transformers."""

    config_class = TxlConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ("Block",)
    _input_embed_layer = "embedding"

    def __init__(self, config):
        super().__init__(config)
        self.embedding = AdaptiveEmbedding(config)
        self.blocks = nn.ModuleList()
        self.residuals = nn.ModuleList()
        for i in range(config.num_layers):
            is_first = i == 0
            has_biases = is_first or not config.share_biases
            self.blocks.append(Block(config, has_biases=has_biases, is_first=is_first))
            if config.residual_scalars:
                self.residuals.append(ResidualMix())
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        output_hidden_states=False,
        return_dict=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Read tokens that follow the tokens in the memory. Returns log-probabilities, the loss and the memory.

        `input_ids` are [B, T]. `attention_mask` is 0 for padding. Its shape is [B, T], or it has more columns, of which
        only the last T are used. `past_key_values` is a `TxlMemory`, which is changed in place. The first token of
        `input_ids` begins a segment.

        `labels` [B, T] are equal to `input_ids`, or -100 where a token's loss does not count. The loss of a token
        depends on all tokens before it. `logits_to_keep` is the number of last tokens for which log-probabilities are
        returned. A value of 0 returns them for all tokens.

        Raises ValueError without `input_ids`, or for another kind of cache.
        """
        if kwargs.get("inputs_embeds") is not None or input_ids is None:
            raise ValueError("this model needs input_ids, and does not accept inputs_embeds. Pass input_ids.")
        memory = past_key_values
        if memory is None:
            memory = TxlMemory(self.config, self.config.memory_len)
        if not isinstance(memory, TxlMemory):
            raise ValueError(f"past_key_values is a {type(memory).__name__}, and must be a TxlMemory of this model.")
        B, T = input_ids.shape
        device = input_ids.device
        if memory.document_BS is None:
            memory.document_BS = torch.empty(B, 0, dtype=torch.int64, device=device)
        is_token_BT = torch.ones_like(input_ids)
        if attention_mask is not None:
            is_token_BT = attention_mask[:, -T:].to(device)
        document_BT = self._documents(input_ids, memory)
        document_BT = document_BT.masked_fill(is_token_BT == 0, EMPTY)
        # The column where each token's segment begins. Each row has its own segments, from its first token on.
        segment_len = self.config.segment_len
        first_B1 = (is_token_BT.cumsum(1) == 0).sum(1, keepdim=True)
        column_T = torch.arange(T, device=device)
        segment_BT = (column_T - first_B1).div(segment_len, rounding_mode="floor")
        begin_BT = first_B1 + segment_BT * segment_len
        # With padding, a segment of a row may lie in two steps of the loop. Until its end the memory is kept longer.
        surplus = 0
        if attention_mask is not None and segment_len < T:
            surplus = segment_len - 1
        steps = []
        for start in range(0, T, segment_len):
            part = slice(start, start + segment_len)
            hiddens = self._read(input_ids[:, part], memory, document_BT[:, part], begin_BT[:, part] - start)
            steps.append(hiddens)
            memory.keep(memory.memory_len + surplus)
        memory.keep(memory.memory_len)
        memory.num_seen += T
        layers = [torch.cat(parts, dim=1) for parts in zip(*steps, strict=True)]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.softmax(layers[-1][:, kept], self.embedding)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].to(device)
            loss_sum = F.nll_loss(logits[:, :-1].transpose(1, 2), targets, reduction="sum")
            if num_items_in_batch is None:
                num_items_in_batch = (targets != -100).sum()
            loss = loss_sum / num_items_in_batch
        if use_cache is None:
            use_cache = past_key_values is not None
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=memory if use_cache else None,
            hidden_states=tuple(layers) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _documents(self, input_ids, memory):
        """Return the document number of each token, [B, T]. All numbers are 0 if attention crosses document borders."""
        if not self.config.document_mask or self.config.eos_token_id is None:
            return torch.zeros_like(input_ids)
        last_B1 = torch.zeros_like(input_ids[:, :1])
        if memory.document_BS.shape[1]:
            last_B1 = memory.document_BS[:, -1:]
        num_ended_BT = (input_ids == self.config.eos_token_id).cumsum(1)
        return last_B1.clamp(min=0) + num_ended_BT

    def _seen(self, memory, document_BT, document_BK, begin_BT):
        """Return is_seen_BTK, True where a query sees a key.

        `begin_BT` holds, for each query, the column where its segment begins.
        """
        num_past = memory.document_BS.shape[1]
        key_K = torch.arange(document_BK.shape[1], device=document_BK.device)
        query_T = key_K[num_past:]
        if self.config.same_length == "off":
            oldest_BT = num_past + begin_BT - memory.memory_len
        elif self.config.same_length == "memory":
            oldest_BT = query_T[None] + 1 - memory.memory_len
        else:
            oldest_BT = query_T[None] - memory.memory_len
        is_past_TK = key_K <= query_T[:, None]
        is_near_BTK = key_K >= oldest_BT[:, :, None]
        is_same_document_BTK = document_BK[:, None] == document_BT[:, :, None]
        return is_past_TK & is_near_BTK & is_same_document_BTK

    def _read(self, input_ids, memory, document_BT, begin_BT):
        """Run the layers over some tokens, and append the tokens to the memory.

        Returns the input of each layer, followed by the output of the last layer after the final norm.
        """
        document_BK = torch.cat([memory.document_BS, document_BT], dim=1)
        is_seen_BTK = self._seen(memory, document_BT, document_BK, begin_BT)
        memory.document_BS = document_BK
        embedded = self.embedding(input_ids)
        hidden = embedded
        hiddens = []
        first_value = None
        for i, (block, layer) in enumerate(zip(self.blocks, memory.layers, strict=True)):
            if self.config.residual_scalars:
                hidden = self.residuals[i](hidden, embedded)
            hiddens.append(hidden)
            biases = self.blocks[0] if self.config.share_biases else block
            hidden, value = block(hidden, layer, is_seen_BTK, biases.attention, first_value)
            if i == 0:
                first_value = value
        return [*hiddens, self.final_norm(hidden)]

    @torch.no_grad()
    def zero_memory(self, batch_size, memory_len=None):
        """Return a memory of zeros that queries attend to. Without this memory, a text begins with an empty memory.

        The TensorFlow code and Hugging Face's TransfoXL begin with such zeros.
        """
        memory = TxlMemory(self.config, memory_len)
        hidden = self.blocks[0].ff_in.weight.new_zeros(batch_size, memory.memory_len, self.config.width)
        first_value = None
        for block, layer in zip(self.blocks, memory.layers, strict=True):
            normed = block.attention_norm(hidden) if self.config.pre_norm else hidden
            key, value = block.attention.keys_and_values(normed, first_value)
            layer.update(key, value)
            if first_value is None:
                first_value = value
        memory.document_BS = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return memory

    @classmethod
    def _supports_default_dynamic_cache(cls):
        """Return False, so that transformers does not make its own cache.

        `prepare_inputs_for_generation` makes a memory.
        """
        return False

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, use_cache=True, **kwargs
    ):
        """Return the model's inputs for the next token.

        Earlier tokens that the memory does not hold yet are read here, segment by segment. So the first new token sees
        as much of the past as later tokens. Raises ValueError for padding on the right.
        """
        memory = past_key_values
        if memory is None and use_cache:
            memory = TxlMemory(self.config)
        inputs = super().prepare_inputs_for_generation(
            input_ids, past_key_values=memory, attention_mask=attention_mask, use_cache=use_cache, **kwargs
        )
        if attention_mask is not None:
            is_padded_after = attention_mask[:, 1:] < attention_mask[:, :-1]
            if bool(is_padded_after.any()):
                raise ValueError(
                    "generation needs prompts that are padded on the left, but the attention_mask has padding on the "
                    "right. Set tokenizer.padding_side = 'left'."
                )
        token_ids = inputs["input_ids"]
        if memory is not None and token_ids.shape[1] > 1:
            mask = None if attention_mask is None else attention_mask[:, :-1]
            self(token_ids[:, :-1], attention_mask=mask, past_key_values=memory, logits_to_keep=1)
            inputs["input_ids"] = token_ids[:, -1:]
        return inputs

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialize the parameters of a module whose weights are not loaded."""
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                init.ones_(parameter)
            elif parameter.dim() > 1:
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)
            else:
                init.zeros_(parameter)
