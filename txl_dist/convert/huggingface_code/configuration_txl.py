# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
# an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
"""Settings of a Transformer-XL (Dai et al. 2019). This code needs transformers 5."""

from transformers import PreTrainedConfig


class TxlConfig(PreTrainedConfig):
    """Architecture of the network, and the segment and memory lengths of its training."""

    model_type = "txl"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {  # noqa: RUF012 (as its base class has it)
        "hidden_size": "width",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "head_width",
        "intermediate_size": "ff_width",
    }

    vocab_size: int = 256
    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    head_width: int = 32
    ff_width: int = 512
    embed_width: int = 128
    """Embedding width of the most frequent words."""
    cutoffs: list | tuple = ()
    """First id of each tail cluster of the adaptive softmax. An empty list means a plain softmax."""
    div_value: int = 1
    """Divisor of embedding widths. Cluster i has embeddings of width embed_width // div_value**i. With a value of 1 all
    clusters use one table."""
    tie_weights_to_embedding: bool = True
    """True if the output weights are the input embeddings."""
    tie_projections: list | tuple = ()
    """One value per cluster. It is True if the cluster's output projection is its input projection. An empty list means
    that all output projections are separate."""
    project_same_width: bool = True
    """True if embeddings that are as wide as the model have a projection too. The setting has an effect only if
    div_value is above 1."""
    scale_embedding: bool = True
    """True if embeddings are multiplied by the square root of the model width."""
    pre_norm: bool = False
    """True if the layer norm is before each sublayer, False if it is after each residual sum."""
    final_norm: bool = False
    """True if the last hidden state is normed."""
    norm_eps: float = 1e-5
    norm: str = "layer"
    """Kind of norm. "layer" is layer norm with gain and bias. "rms" is a division by the root mean square."""
    activation: str = "relu"
    """Activation of the feed-forward networks: relu, gelu, relu2 (the square of relu) or swiglu (with a third matrix).
    """
    query_key_norm: bool = False
    """True if queries, keys and encodings of distances are divided by their root mean square."""
    residual_scalars: bool = False
    """True if the input of each block is a learned mix of the hidden state and the embedding."""
    value_residual: bool = False
    """True if the attention values of each block are a learned mix of its own values and the first block's values."""
    value_bias: bool = False
    output_bias: bool = False
    positions: str = "relative"
    """Positional scheme. "relative" uses sinusoids of the distance. "learned_relative" uses a learned vector and a
    learned number per distance."""
    num_distances: int = 0
    """Number of rows in the table of learned distances. Larger distances use the last row."""
    share_biases: bool = True
    """True if all layers use the same pair of attention biases."""
    same_length: str = "off"
    """Number of keys that a query sees. "memory": memory_len keys, the query's own key included. "memory_and_self":
    memory_len + 1 keys. "off": the whole memory, and the query's segment up to the query."""
    clamp_len: int = 0
    """Largest distance with its own encoding. Larger distances use the encoding of this distance. A value of 0 means no
    limit."""
    segment_len: int = 64
    """Number of tokens that the model reads at a time."""
    memory_len: int = 128
    """Number of earlier tokens that a segment sees."""
    generation_memory_len: int = 128
    """Number of earlier tokens that generation sees. It is at least the number of tokens that the last token of a
    segment saw in training."""
    document_mask: bool = False
    """True if a token sees only its own document, which begins with eos_token_id. False if a token also sees earlier
    documents."""
    initializer_range: float = 0.02
