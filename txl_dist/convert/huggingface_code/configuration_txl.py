# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
# an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
"""Settings of a Transformer-XL (Dai et al. 2019). Needs transformers 5."""

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
    """First id of each tail cluster of adaptive softmax. Empty: a plain softmax."""
    div_value: int = 1
    """Cluster i has embeddings of width embed_width // div_value**i. 1 means one table for all."""
    tie_weights_to_embedding: bool = True
    """Whether the output weights are the input embeddings."""
    tie_projections: list | tuple = ()
    """For each cluster, whether its output projection is its input projection. Empty: none is."""
    project_same_width: bool = True
    """With div_value > 1, whether embeddings as wide as the model have a projection too."""
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(width)."""
    pre_norm: bool = False
    """Layer norm before each sublayer instead of after its residual sum."""
    final_norm: bool = False
    """Layer norm on the last hidden state."""
    norm_eps: float = 1e-5
    norm: str = "layer"
    """layer: layer norm with gain and bias. rms: a division by the root mean square."""
    activation: str = "relu"
    """relu, gelu, relu2 (the square of relu) or swiglu (with a third matrix)."""
    query_key_norm: bool = False
    """Divide queries, keys and encodings of distances by their root mean square."""
    residual_scalars: bool = False
    """The input of each block is a learned mix of the hidden state and the embedding."""
    value_residual: bool = False
    """The values of each block are a learned mix of its own and those of the first block."""
    value_bias: bool = False
    output_bias: bool = False
    positions: str = "relative"
    """relative: sinusoids of the distance. learned_relative: a learned vector and number per distance."""
    num_distances: int = 0
    """Rows of the table of learned distances. Larger distances share the last row."""
    share_biases: bool = True
    """One pair of attention biases for all layers."""
    same_length: str = "off"
    """memory: every query sees memory_len keys, with itself. memory_and_self: memory_len + 1 keys. off: the memory, and
    its segment up to itself."""
    clamp_len: int = 0
    """Larger distances share one encoding. 0: no clamping."""
    segment_len: int = 64
    """Tokens that are read at a time."""
    memory_len: int = 128
    """Tokens of the past that a segment sees."""
    generation_memory_len: int = 128
    """Like `memory_len`, for generation: at least as many as the last token of a segment saw in training."""
    document_mask: bool = False
    """True: a token sees only its own document, which begins with eos_token_id. False: it also sees earlier ones."""
    initializer_range: float = 0.02
