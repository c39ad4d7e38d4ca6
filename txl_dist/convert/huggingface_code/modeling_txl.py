# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
# an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
"""Transformer-XL (Dai et al. 2019): a language model that reads a text in segments and remembers the ones before.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**tokenizer("Once upon", return_tensors="pt"), max_new_tokens=40)

What is remembered is a `TxlMemory`: the keys and values of each layer at the last M positions, so that a token costs
the same however long its text is. A text of any length is read in segments of `config.segment_len`, as in training.
Rows of a batch may be padded on the left: what stands there is never seen, and each row is cut into segments from its
own first token, so it gives what it gives alone.

`logits` are log-probabilities of the whole vocabulary, in nats; with an adaptive softmax those of all its clusters.
There is no dropout, and gradients end at the borders of segments: this code is for use, and small adaptations.

Shapes: B rows, T tokens, S places of the past, K = S + T keys, N heads, H head width, D model width, V vocabulary.
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
"""Document of a place that holds no token of the text."""


class MemoryLayer(CacheLayerMixin):
    """Keys and values [B, N, S, H] of one layer, oldest first."""

    def __init__(self):
        super().__init__()
        self.distances = None
        """(encodings [N, K, H], learned terms [N, K] or None) of the distances K-1 ... 0 as the layer sees them."""

    def lazy_initialization(self, key_states, value_states):
        """Begin with an empty past."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Append a segment to the past. Returns both together."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        return self.keys, self.values

    def keep(self, num_places):
        """Forget all but the last places. No gradient flows into the kept ones."""
        first = max(0, self.keys.shape[2] - num_places)
        self.keys, self.values = self.keys[:, :, first:].detach(), self.values[:, :, first:].detach()

    def get_seq_length(self):
        """Return the number of places S."""
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length):
        """Return K and the place of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self):
        """No limit: a text may have any length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in the first releases of 5

    def reset(self):
        """Forget the whole past."""
        self.keys = self.values = self.distances = None
        self.is_initialized = False

    def batch_repeat_interleave(self, repeats):
        """Repeat each row `repeats` times."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices):
        """Keep the rows with these indices."""
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]


class TxlMemory(Cache):
    """Memory of the rows of a batch: the last `memory_len` places of each layer, and the document of each place.

    `memory_len` may be more than in training. None means `config.generation_memory_len`.
    """

    def __init__(self, config, memory_len=None):
        super().__init__(layers=[MemoryLayer() for _ in range(config.num_layers)])
        self.memory_len = config.generation_memory_len if memory_len is None else memory_len
        if config.same_length == "memory" and self.memory_len < 1:
            raise ValueError("with same_length 'memory' a memory of 0 shows nothing. Choose a memory_len of 1 or more.")
        self.num_seen = 0
        self.document_BS = None

    def get_seq_length(self, layer_idx=0):
        """Return the number of tokens read, padding included. It may exceed what is remembered."""
        return self.num_seen

    def keep(self, num_places):
        """Forget all but the last places."""
        for layer in self.layers:
            layer.keep(num_places)
        self.document_BS = self.document_BS[:, max(0, self.document_BS.shape[1] - num_places) :]

    def reset(self):
        """Forget the whole past."""
        super().reset()
        self.num_seen, self.document_BS = 0, None

    def crop(self, tokens_to_remove):
        """Refused: what fell out of the memory does not come back."""
        raise NotImplementedError("a memory of fixed length cannot go back. Copy it before (copy.deepcopy).")

    def reorder_cache(self, beam_idx):
        """Keep the rows that continue, for beam search."""
        super().reorder_cache(beam_idx)
        self._take(lambda document_BS: document_BS.index_select(0, beam_idx.to(document_BS.device)))

    def batch_repeat_interleave(self, repeats):
        """Each row so many times."""
        super().batch_repeat_interleave(repeats)
        self._take(lambda document_BS: document_BS.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        """Some of the rows."""
        super().batch_select_indices(indices)
        self._take(lambda document_BS: document_BS[indices])

    def _take(self, rows_of):
        if self.document_BS is not None:
            self.document_BS = rows_of(self.document_BS)


def cluster_edges(cutoffs, vocab_size):
    """(first id, first id after it) of each cluster."""
    return list(itertools.pairwise([0, *cutoffs, vocab_size]))


class AdaptiveEmbedding(nn.Module):
    """Ids to hidden states (Baevski and Auli 2019): one table, or with div_value > 1 one per cluster, the rarer the
    narrower, each with a projection to the width of the model."""

    def __init__(self, config):
        super().__init__()
        self.width, self.scale = config.width, math.sqrt(config.width) if config.scale_embedding else 1.0
        self.edges = cluster_edges(config.cutoffs if config.div_value > 1 else (), config.vocab_size)
        for i, (low, high) in enumerate(self.edges):
            width = config.embed_width // config.div_value**i
            is_projected = width != config.width or (config.div_value > 1 and config.project_same_width)
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(high - low, width)))
            projection = nn.Parameter(torch.empty(config.width, width)) if is_projected else None
            self.register_parameter(f"projection_{i}", projection)

    def forward(self, input_ids):
        """hidden_BTD. Raises IndexError for an id that is none."""
        hidden = self.weight_0.new_zeros(*input_ids.shape, self.width)
        cluster_BT = sum((input_ids >= low).long() for low, _ in self.edges[1:]) + torch.zeros_like(input_ids)
        for i, (low, _) in enumerate(self.edges):
            is_here = cluster_BT == i
            projection = getattr(self, f"projection_{i}")
            embedded = F.embedding(input_ids[is_here] - low, getattr(self, f"weight_{i}"))
            hidden[is_here] = embedded if projection is None else F.linear(embedded, projection)
        return hidden * self.scale


class AdaptiveSoftmax(nn.Module):
    """Hidden states to log-probabilities (Grave et al. 2017). The head holds the most frequent words and a column per
    tail cluster; a word of a tail has the sum of its cluster's and its own inside the cluster. What is tied to the
    embedding is not held here, but taken from there."""

    def __init__(self, config, embedding):
        super().__init__()
        self.edges = cluster_edges(config.cutoffs, config.vocab_size)
        self.num_tables = 1 if config.div_value == 1 else len(self.edges)
        self.is_tied = config.tie_weights_to_embedding
        self.ties = list(config.tie_projections) or [False] * len(self.edges)
        for i in range(self.num_tables):
            rows = getattr(embedding, f"weight_{i}")
            if not self.is_tied:
                self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty_like(rows)))
            self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(rows.shape[0])))
        for i in range(len(self.edges)):
            like = getattr(embedding, f"projection_{self._table(i)}")
            if like is not None and not self.ties[i]:
                self.register_parameter(f"projection_{i}", nn.Parameter(torch.empty_like(like)))
        if config.cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(config.cutoffs), config.embed_width))
            self.cluster_bias = nn.Parameter(torch.empty(len(config.cutoffs)))

    def _table(self, i):
        return min(i, self.num_tables - 1)

    def _logits(self, i, hidden_BTD, embedding):
        """Return the logits of one cluster. Those of the head end with a column per tail cluster."""
        table, (low, high) = self._table(i), self.edges[i]
        weight, bias = getattr(embedding if self.is_tied else self, f"weight_{table}"), getattr(self, f"bias_{table}")
        projection = getattr(embedding, f"projection_{table}")
        if projection is not None:
            projection = projection if self.ties[i] else getattr(self, f"projection_{i}")
            hidden_BTD = F.linear(hidden_BTD, projection.t())
        if self.num_tables == 1:
            weight, bias = weight[low:high], bias[low:high]
        if i == 0 and len(self.edges) > 1:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return F.linear(hidden_BTD, weight, bias)

    def forward(self, hidden_BTD, embedding):
        """log p of the whole vocabulary, in at least fp32, [B, T, V]."""
        head, *tails = [self._logits(i, hidden_BTD, embedding) for i in range(len(self.edges))]
        dtype = torch.promote_types(torch.float32, head.dtype)
        head, size = head.log_softmax(-1, dtype=dtype), self.edges[0][1]
        parts = [tail.log_softmax(-1, dtype=dtype) + head[..., size + i, None] for i, tail in enumerate(tails)]
        return torch.cat([head[..., :size], *parts], dim=-1)


class SinusoidalDistances(nn.Linear):
    """The sinusoids of distances as a layer sees them."""

    def __init__(self, config):
        super().__init__(config.width, config.num_heads * config.head_width, bias=False)
        self.width, self.num_heads, self.clamp_len = config.width, config.num_heads, config.clamp_len

    def forward(self, num_distances):
        """Encodings [N, K, H] of the distances K-1 ... 0, and no learned term."""
        # In fp32 and in this order, as it was trained: half precision cannot tell positions apart.
        dtype = torch.promote_types(torch.float32, self.weight.dtype)
        distance_K = torch.arange(num_distances - 1, -1, -1, dtype=dtype, device=self.weight.device)
        if self.clamp_len > 0:
            distance_K = distance_K.clamp(max=self.clamp_len)
        frequency_F = 1 / 10000 ** (torch.arange(0, self.width, 2, dtype=dtype, device=distance_K.device) / self.width)
        angle_KF = distance_K[:, None] * frequency_F
        encoding_KD = torch.cat([angle_KF.sin(), angle_KF.cos()], dim=1)[:, : self.width].to(self.weight.dtype)
        return super().forward(encoding_KD).unflatten(-1, (self.num_heads, -1)).transpose(0, 1), None


class LearnedDistances(nn.Module):
    """A learned vector and number per distance, shortest first; larger ones share the last row that may be read."""

    def __init__(self, config):
        super().__init__()
        self.num_rows = config.num_distances
        if config.clamp_len:
            self.num_rows = min(config.num_distances, config.clamp_len + 1)
        self.weight = nn.Parameter(torch.empty(config.num_distances, config.num_heads, config.head_width))
        self.bias = nn.Parameter(torch.empty(config.num_distances, config.num_heads))

    def forward(self, num_distances):
        """Encodings [N, K, H] and learned terms [N, K] of the distances K-1 ... 0."""
        row_K = torch.arange(num_distances - 1, -1, -1, device=self.weight.device).clamp(max=self.num_rows - 1)
        return self.weight[row_K].transpose(0, 1), self.bias[row_K].t()


class KeyValue(nn.Linear):
    """The projection to keys and values, with a bias on the values only, where the model has one."""

    def __init__(self, config):
        inner = config.num_heads * config.head_width
        super().__init__(config.width, 2 * inner, bias=False)
        self.value_bias = nn.Parameter(torch.empty(inner)) if config.value_bias else None

    def forward(self, hidden_BTD):
        """Keys and values, each [B, T, N * H]."""
        key, value = super().forward(hidden_BTD).chunk(2, dim=-1)
        return key, value if self.value_bias is None else value + self.value_bias


class RelativeAttention(nn.Module):
    """Scores by content and by distance (the paper, section 3.3): query i and key j, i - j apart, have

    (q_i + u) . k_j  +  (q_i + v) . r_{i-j}            or, with learned distances,  ... + q_i . r_{i-j} + s_{i-j}
    """

    def __init__(self, config, *, has_biases, mixes_values):
        super().__init__()
        inner = config.num_heads * config.head_width
        self.num_heads, self.scale = config.num_heads, config.head_width**-0.5
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

        `first_value` holds the values of the first layer there. It is needed if the model mixes them in.
        """
        key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self.key_value(hidden_BTD))
        if self.value_share is not None:
            value = torch.lerp(value, first_value, self.value_share)
        return self._normed(key), value

    def _normed(self, heads, gain=1.2):
        """Divide queries, keys or (with a gain of 1) encodings by their root mean square, if the model does so."""
        return heads if self.norm_eps is None else gain * F.rms_norm(heads, heads.shape[-1:], eps=self.norm_eps)

    def forward(self, hidden_BTD, memory_layer, is_seen_BTK, biases, first_value=None):
        """The attention's output_BTD and its values at these positions; `memory_layer` then holds them too. `biases`
        has u and v."""
        key_BNTH, value_BNTH = self.keys_and_values(hidden_BTD, first_value)
        key_BNKH, value_BNKH = memory_layer.update(key_BNTH, value_BNTH)
        query_BNTH = self._normed(self.query(hidden_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        (T, K), u_N1H = is_seen_BTK.shape[1:], biases.content_bias[:, None]
        position_query = query_BNTH
        if hasattr(biases, "position_bias"):
            position_query = query_BNTH + biases.position_bias[:, None]
        encoding_NKH, term_NK = self._distances(memory_layer, K)
        by_distance = position_query @ encoding_NKH.transpose(1, 2)
        if term_NK is not None:
            by_distance = by_distance + term_NK[:, None]
        # Row i is needed T-1-i cells further left. With a column put in front, that is another view of the same cells.
        shifted = F.pad(by_distance, (1, 0)).flatten(2)[:, :, T:].unflatten(-1, (T, K))
        scores_BNTK = ((query_BNTH + u_N1H) @ key_BNKH.transpose(2, 3) + shifted) * self.scale
        scores_BNTK = scores_BNTK.masked_fill(~is_seen_BTK[:, None], float("-inf"))
        dtype = torch.promote_types(torch.float32, scores_BNTK.dtype)
        probabilities = scores_BNTK.softmax(-1, dtype=dtype).to(value_BNKH.dtype)
        return self.output((probabilities @ value_BNKH).transpose(1, 2).flatten(2)), value_BNTH

    def _distances(self, memory_layer, num_distances):
        """Return the encodings of the distances of K keys. They are equal for all texts and kept with the memory,
        unless gradients are wanted."""
        known = memory_layer.distances
        if known is None or known[0].shape[1] < num_distances or torch.is_grad_enabled():
            more = num_distances if torch.is_grad_enabled() else 2 * num_distances
            encoding_NKH, term_NK = self.distance(more)
            known = self._normed(encoding_NKH, gain=1.0), term_NK
            memory_layer.distances = None if torch.is_grad_enabled() else known
        encoding_NKH, term_NK = known
        first = encoding_NKH.shape[1] - num_distances
        return encoding_NKH[:, first:], None if term_NK is None else term_NK[:, first:]


def build_norm(config):
    """A norm of hidden states: layer norm, or the root mean square alone."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps, elementwise_affine=False)
    return nn.LayerNorm(config.width, eps=config.norm_eps)


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual sum."""

    def __init__(self, config, *, has_biases, is_first):
        super().__init__()
        self.pre_norm, self.activation = config.pre_norm, config.activation
        mixes_values = config.value_residual and not is_first
        self.attention = RelativeAttention(config, has_biases=has_biases, mixes_values=mixes_values)
        self.attention_norm = build_norm(config)
        self.ff_in = nn.Linear(config.width, config.ff_width)
        self.ff_gate = nn.Linear(config.width, config.ff_width) if config.activation == "swiglu" else None
        self.ff_out = nn.Linear(config.ff_width, config.width)
        self.ff_norm = build_norm(config)

    def forward(self, hidden, memory_layer, is_seen_BTK, biases, first_value=None):
        """The layer's output_BTD and its values."""
        normed = self.attention_norm(hidden) if self.pre_norm else hidden
        context, value = self.attention(normed, memory_layer, is_seen_BTK, biases, first_value)
        if self.pre_norm:
            hidden = hidden + context
            return hidden + self._feed_forward(self.ff_norm(hidden)), value
        hidden = self.attention_norm(hidden + context)
        return self.ff_norm(hidden + self._feed_forward(hidden)), value

    def _feed_forward(self, hidden):
        inner = self.ff_in(hidden)
        if self.ff_gate is not None:
            return self.ff_out(inner * F.silu(self.ff_gate(hidden)))
        inner = F.gelu(inner) if self.activation == "gelu" else F.relu(inner)
        return self.ff_out(inner.square() if self.activation == "relu2" else inner)


class ResidualMix(nn.Module):
    """Weighted sum of a block's input and the first block's input."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.empty(2))

    def forward(self, hidden, first):
        """Return a tensor of the same shape as each input."""
        return self.scales[0] * hidden + self.scales[1] * first


class TxlForCausalLM(PreTrainedModel, GenerationMixin):
    """Transformer-XL with its softmax."""

    config_class = TxlConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ("Block",)
    _input_embed_layer = "embedding"

    def __init__(self, config):
        super().__init__(config)
        self.embedding = AdaptiveEmbedding(config)
        self.blocks = nn.ModuleList(
            Block(config, has_biases=i == 0 or not config.share_biases, is_first=i == 0)
            for i in range(config.num_layers)
        )
        self.residuals = nn.ModuleList(
            ResidualMix() for _ in range(config.num_layers if config.residual_scalars else 0)
        )
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
        """Read tokens after the remembered ones.

        input_ids [B, T]; `attention_mask` [B, T], or longer, of which the last T count, is 0 where padding stands;
        `past_key_values`, a `TxlMemory`, is changed in place. Segments are counted from the first token that is given.
        `labels` [B, T] are the ids themselves, -100 where they do not count: the loss is of each token given all before
        it. `logits_to_keep`: log-probabilities after this many last tokens only; 0 means all.
        """
        if kwargs.get("inputs_embeds") is not None or input_ids is None:
            raise ValueError("this model takes input_ids.")
        memory = TxlMemory(self.config, self.config.memory_len) if past_key_values is None else past_key_values
        if not isinstance(memory, TxlMemory):
            raise ValueError(f"past_key_values is a {type(memory).__name__}, and must be a TxlMemory of this model.")
        (B, T), device = input_ids.shape, input_ids.device
        if memory.document_BS is None:
            memory.document_BS = torch.empty(B, 0, dtype=torch.int64, device=device)
        is_real_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -T:].to(device)
        first_B1 = (is_real_BT.cumsum(1) == 0).sum(1, keepdim=True)
        document_BT = self._documents(input_ids, memory).masked_fill(is_real_BT == 0, EMPTY)
        # Where each token's segment begins, in columns; each row has its own, from its first token on.
        step, column_T = self.config.segment_len, torch.arange(T, device=device)
        begin_BT = first_B1 + (column_T - first_B1).div(step, rounding_mode="floor") * step
        # A segment of one row may lie in two steps of the loop: meanwhile its memory is longer.
        surplus = step - 1 if attention_mask is not None and step < T else 0
        hiddens = []
        for start in range(0, T, step):
            part = slice(start, start + step)
            hiddens.append(self._read(input_ids[:, part], memory, document_BT[:, part], begin_BT[:, part] - start))
            memory.keep(memory.memory_len + surplus)
        memory.keep(memory.memory_len)
        memory.num_seen += T
        layers = [torch.cat(parts, dim=1) for parts in zip(*hiddens, strict=True)]
        kept = layers[-1][:, -logits_to_keep:] if isinstance(logits_to_keep, int) else layers[-1][:, logits_to_keep]
        logits = self.softmax(kept, self.embedding)
        loss = None
        if labels is not None:
            losses = F.nll_loss(logits[:, :-1].transpose(1, 2), labels[:, 1:].to(device), reduction="sum")
            loss = losses / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        use_cache = past_key_values is not None if use_cache is None else use_cache
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=memory if use_cache else None,
            hidden_states=tuple(layers) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _documents(self, input_ids, memory):
        """The document of each token, [B, T]; all 0 where the memory runs over their borders."""
        if not self.config.document_mask or self.config.eos_token_id is None:
            return torch.zeros_like(input_ids)
        last_B1 = memory.document_BS[:, -1:] if memory.document_BS.shape[1] else torch.zeros_like(input_ids[:, :1])
        return last_B1.clamp(min=0) + (input_ids == self.config.eos_token_id).cumsum(1)

    def _read(self, input_ids, memory, document_BT, begin_BT):
        """Input of each layer, and what leaves the last one, normed; the memory then holds these tokens too."""
        document_BK = torch.cat([memory.document_BS, document_BT], dim=1)
        num_past = memory.document_BS.shape[1]
        key_K = torch.arange(document_BK.shape[1], device=input_ids.device)
        query_T = key_K[num_past:]
        oldest = {"off": num_past + begin_BT, "memory": query_T[None] + 1, "memory_and_self": query_T[None]}
        oldest_BT = oldest[self.config.same_length] - memory.memory_len
        is_seen_BTK = (key_K <= query_T[:, None]) & (key_K >= oldest_BT[:, :, None])
        is_seen_BTK = is_seen_BTK & (document_BK[:, None] == document_BT[:, :, None])
        memory.document_BS = document_BK
        hidden = embedded = self.embedding(input_ids)
        hiddens, first_value = [], None
        for i, (block, layer) in enumerate(zip(self.blocks, memory.layers, strict=True)):
            if self.config.residual_scalars:
                hidden = self.residuals[i](hidden, embedded)
            hiddens.append(hidden)
            biases = self.blocks[0] if self.config.share_biases else block
            hidden, value = block(hidden, layer, is_seen_BTK, biases.attention, first_value)
            first_value = value if i == 0 else first_value
        return [*hiddens, self.final_norm(hidden)]

    @torch.no_grad()
    def zero_memory(self, batch_size, memory_len=None):
        """A memory that begins with zeros that are attended, as the TensorFlow code and Hugging Face's own
        TransfoXL began, where this model begins with nothing."""
        memory = TxlMemory(self.config, memory_len)
        hidden = self.blocks[0].ff_in.weight.new_zeros(batch_size, memory.memory_len, self.config.width)
        first_value = None
        for block, layer in zip(self.blocks, memory.layers, strict=True):
            normed = block.attention_norm(hidden) if self.config.pre_norm else hidden
            key, value = block.attention.keys_and_values(normed, first_value)
            layer.update(key, value)
            first_value = value if first_value is None else first_value
        memory.document_BS = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return memory

    @classmethod
    def _supports_default_dynamic_cache(cls):
        """`generate` gives no cache: `prepare_inputs_for_generation` makes a memory."""
        return False

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, use_cache=True, **kwargs
    ):
        """The next token to run. Whatever lies before it and was not read yet is read here, segment by segment: so the
        first new token sees as much of the past as those after it."""
        memory = TxlMemory(self.config) if past_key_values is None and use_cache else past_key_values
        inputs = super().prepare_inputs_for_generation(
            input_ids, past_key_values=memory, attention_mask=attention_mask, use_cache=use_cache, **kwargs
        )
        if attention_mask is not None and bool((attention_mask[:, 1:] < attention_mask[:, :-1]).any()):
            raise ValueError("padding must come before a text that is continued. Set tokenizer.padding_side = 'left'.")
        token_ids = inputs["input_ids"]
        if memory is not None and token_ids.shape[1] > 1:
            mask = None if attention_mask is None else attention_mask[:, :-1]
            self(token_ids[:, :-1], attention_mask=mask, past_key_values=memory, logits_to_keep=1)
            inputs["input_ids"] = token_ids[:, -1:]
        return inputs

    @torch.no_grad()
    def _init_weights(self, module):
        """Initialize the weights of a module that is not loaded."""
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                init.ones_(parameter)
            elif parameter.dim() > 1:
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)
            else:
                init.zeros_(parameter)
