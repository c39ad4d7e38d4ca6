"""The whole network, computed from the papers number by number: one lane, one token and one float at a time.

It shares only the names and the values of the weights with the package. Sources: Dai et al. 2019 (memory, attention),
Vaswani et al. 2017 (absolute positions), Shaw et al. 2018 (learned distances), Grave et al. 2017 (softmax by clusters),
Baevski and Auli 2019 (embedding by clusters), and the original code for details that they leave open.

Where weights are tied or shared, only one of the names is read. So the results agree only if the model really ties
them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tests.helpers.naive import (
    Matrix,
    Score,
    Vector,
    dot,
    learned_score,
    naive_attention,
    naive_encoding,
    plain_score,
    plus,
    relative_score,
    rms,
    same,
    times,
)
from txl_dist.model.transformer_xl import TransformerXL


class NaiveMemory(NamedTuple):
    """Memory of one lane (batch row). It contains only positions that were read, oldest first."""

    hidden_LMD: list[Matrix]
    documents: list[int]


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def relu(x: float) -> float:
    return max(x, 0.0)


def relu2(x: float) -> float:
    return max(x, 0.0) ** 2


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def cluster_of(token: int, edges: list[int]) -> int:
    return max(i for i, edge in enumerate(edges[:-1]) if token >= edge)


def log_softmax(logits: Vector) -> Vector:
    largest = max(logits)
    log_sum = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - log_sum for logit in logits]


class NaiveModel:
    """The weights of a model as lists, and the computation of losses."""

    def __init__(self, model: TransformerXL) -> None:
        self.section, self.vocab_size, self.trained_lens = model.section, model.vocab_size, model.memory_lens
        self.weights: dict[str, Any] = {name: tensor.tolist() for name, tensor in model.state_dict().items()}

    def empty_memory(self) -> NaiveMemory:
        return NaiveMemory([[] for _ in range(self.section.num_layers)], [])

    def memory_lens(self, memory_len: int) -> list[int]:
        """Return the memory length of each layer. The layers with the longest memory have the whole length, and the
        others at most the length of their training."""
        if not self.trained_lens:
            return [memory_len] * self.section.num_layers
        return [memory_len if own == max(self.trained_lens) or own > memory_len else own for own in self.trained_lens]

    def segment(
        self, tokens: list[int], targets: list[int], memory: NaiveMemory, *, memory_len: int, documents: list[int]
    ) -> tuple[Vector, NaiveMemory]:
        """Return the losses of a segment in nats, and the memory after it."""
        hidden_TD = [self.embed(token) for token in tokens]
        if self.section.positions == "absolute":
            hidden_TD = [
                plus(hidden, self.position(len(tokens) - 1 - i)) for i, hidden in enumerate(hidden_TD)
            ]  # counted from the end
        remembered, embedded_TD, first_SD = [], hidden_TD, []
        for layer, (memory_MD, own_len) in enumerate(zip(memory.hidden_LMD, self.memory_lens(memory_len), strict=True)):
            if self.section.residual_scalars:
                own, other = self.weights[f"residuals.{layer}.scales"]
                hidden_TD = [
                    [own * x + other * x0 for x, x0 in zip(*pair, strict=True)]
                    for pair in zip(hidden_TD, embedded_TD, strict=True)
                ]
            remembered.append(self.newest(memory_MD + hidden_TD, own_len))
            first_SD = first_SD or self.values(0, memory_MD + hidden_TD)
            own_SD = self.newest(first_SD, len(memory_MD) + len(tokens))
            own_documents = self.newest(memory.documents, len(memory_MD))
            hidden_TD = self.block(layer, hidden_TD, memory_MD, own_documents, documents, own_len, own_SD)
        if self.section.final_norm:
            hidden_TD = [self.norm("final_norm", hidden) for hidden in hidden_TD]
        losses = [-self.log_probability(target, hidden) for target, hidden in zip(targets, hidden_TD, strict=True)]
        return losses, NaiveMemory(remembered, self.newest(memory.documents + documents, memory_len))

    def newest(self, items: list, count: int) -> list:
        return items[max(0, len(items) - count) :]

    def position(self, distance: int) -> Vector:
        clamp_len = self.section.clamp_len
        return naive_encoding(min(distance, clamp_len) if clamp_len else distance, width=self.section.width)

    def projects(self, cluster: int) -> bool:
        """Return whether the embeddings of a cluster pass through a projection matrix."""
        section = self.section
        if section.div_value > 1 and section.project_same_width:
            return True
        return (section.embed_width or section.width) // section.div_value**cluster != section.width

    def embed(self, token: int) -> Vector:
        section = self.section
        edges = [0, *section.cutoffs, self.vocab_size] if section.div_value > 1 else [0, self.vocab_size]
        cluster = cluster_of(token, edges)
        row = self.weights[f"embedding.weight_{cluster}"][token - edges[cluster]]
        if self.projects(cluster):
            row = times(self.weights[f"embedding.projection_{cluster}"], row)
        return [math.sqrt(section.width) * x for x in row] if section.scale_embedding else row

    def log_probability(self, target: int, hidden: Vector) -> float:
        """Return the log-probability of a word: that of its cluster in the head, if it is a tail cluster, plus that of
        the word in its cluster."""
        edges = [0, *self.section.cutoffs, self.vocab_size]
        cluster = cluster_of(target, edges)
        head = log_softmax(self.logits(0, hidden, edges))
        if cluster == 0:
            return head[target]
        inside = log_softmax(self.logits(cluster, hidden, edges))
        return head[edges[1] + cluster - 1] + inside[target - edges[cluster]]

    def logits(self, cluster: int, hidden: Vector, edges: list[int]) -> Vector:
        section, one_table = self.section, self.section.div_value == 1
        table = 0 if one_table else cluster
        rows = self.weights[f"{'embedding' if section.tie_weights else 'softmax'}.weight_{table}"]
        biases = self.weights[f"softmax.bias_{table}"]
        if one_table:
            rows, biases = (x[edges[cluster] : edges[cluster + 1]] for x in (rows, biases))
        if cluster == 0 and section.cutoffs:
            rows = rows + self.weights["softmax.cluster_weight"]
            biases = biases + self.weights["softmax.cluster_bias"]
        if self.projects(0 if one_table else cluster):
            is_tied = bool(section.tie_projections) and section.tie_projections[cluster]
            name = f"embedding.projection_{table}" if is_tied else f"softmax.projection_{cluster}"
            hidden = [dot(list(column), hidden) for column in zip(*self.weights[name], strict=True)]
        return plus(times(rows, hidden), biases)

    def norm(self, name: str, x: Vector) -> Vector:
        if self.section.norm == "rms":
            return rms(x, eps=self.section.norm_eps)
        mean = sum(x) / len(x)
        variance = sum((value - mean) ** 2 for value in x) / len(x)
        normed = [(value - mean) / math.sqrt(variance + self.section.norm_eps) for value in x]
        gain, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return [value * g + b for value, g, b in zip(normed, gain, bias, strict=True)]

    def heads(self, x: Vector) -> Matrix:
        width = self.section.head_width
        return [x[n * width : (n + 1) * width] for n in range(self.section.num_heads)]

    def scores(self, layer: int) -> list[Score]:
        """Return the score function of each head of a layer."""
        section = self.section
        heads = range(section.num_heads)
        if section.positions == "absolute":
            return [plain_score for _ in heads]
        owner = f"blocks.{0 if section.share_biases else layer}.attention"
        content = self.weights[f"{owner}.content_bias"]
        weight = self.weights[f"blocks.{layer}.attention.distance.weight"]
        norm = (lambda r: rms(r, eps=section.norm_eps)) if section.query_key_norm else same
        if section.positions == "relative":
            H, position = section.head_width, self.weights[f"{owner}.position_bias"]
            return [
                relative_score(
                    weight[n * H : (n + 1) * H], content[n], position[n], clamp_len=section.clamp_len, norm=norm
                )
                for n in heads
            ]
        bias = self.weights[f"blocks.{layer}.attention.distance.bias"]
        return [
            learned_score(
                [row[n] for row in weight],
                [row[n] for row in bias],
                content[n],
                clamp_len=section.clamp_len,
                norm=norm,
            )
            for n in heads
        ]

    def normed_heads(self, x: Vector) -> Matrix:
        """Return queries or keys by head, normalized if the model has query_key_norm."""
        if not self.section.query_key_norm:
            return self.heads(x)
        return [[1.2 * value for value in rms(head, eps=self.section.norm_eps)] for head in self.heads(x)]

    def values(self, layer: int, sources: Matrix) -> Matrix:
        """Return the values of a layer from its inputs, before value_residual mixes them."""
        section, name = self.section, f"blocks.{layer}.attention"
        inner = section.num_heads * section.head_width
        weight = self.weights[f"{name}.key_value.weight"][inner:]
        bias = self.weights[f"{name}.key_value.value_bias"] if section.value_bias else [0.0] * inner
        if section.pre_norm:
            sources = [self.norm(f"blocks.{layer}.attention_norm", x) for x in sources]
        return [plus(times(weight, x), bias) for x in sources]

    def attention(
        self,
        layer: int,
        hidden_TD: Matrix,
        memory_MD: Matrix,
        memory_documents: list[int],
        documents: list[int],
        memory_len: int,
        first_SD: Matrix,
    ) -> Matrix:
        section, name = self.section, f"blocks.{layer}.attention"
        inner = section.num_heads * section.head_width
        key = self.weights[f"{name}.key_value.weight"][:inner]
        output_bias = self.weights[f"{name}.output.bias"] if section.output_bias else [0.0] * section.width
        values = self.values(layer, memory_MD + hidden_TD)
        if section.value_residual and layer > 0:
            (share,) = self.weights[f"{name}.value_share"]
            values = [
                [(1 - share) * v + share * first for v, first in zip(*pair, strict=True)]
                for pair in zip(values, first_SD, strict=True)
            ]
        if section.pre_norm:
            hidden_TD, memory_MD = (
                [self.norm(f"blocks.{layer}.attention_norm", x) for x in states] for states in (hidden_TD, memory_MD)
            )
        context_TNH = naive_attention(
            [self.normed_heads(times(self.weights[f"{name}.query.weight"], x)) for x in hidden_TD],
            [self.normed_heads(times(key, x)) for x in memory_MD + hidden_TD],
            [self.heads(value) for value in values],
            score_N=self.scores(layer),
            memory_documents=memory_documents,
            documents=documents,
            same_length=section.same_length,
            memory_len=memory_len,
        )
        output = self.weights[f"{name}.output.weight"]
        return [plus(times(output, [x for head in heads for x in head]), output_bias) for heads in context_TNH]

    def feed_forward(self, layer: int, x: Vector) -> Vector:
        def linear(name: str, x: Vector) -> Vector:
            name = f"blocks.{layer}.{name}"
            return plus(times(self.weights[f"{name}.weight"], x), self.weights[f"{name}.bias"])

        inner = linear("ff_in", x)
        if self.section.activation == "swiglu":
            outer = [value * silu(gate) for value, gate in zip(inner, linear("ff_gate", x), strict=True)]
        else:
            activation = {"relu": relu, "gelu": gelu, "relu2": relu2}[self.section.activation]
            outer = [activation(value) for value in inner]
        return linear("ff_out", outer)

    def block(
        self,
        layer: int,
        hidden_TD: Matrix,
        memory_MD: Matrix,
        memory_documents: list[int],
        documents: list[int],
        memory_len: int,
        first_SD: Matrix,
    ) -> Matrix:
        attention_norm, ff_norm = f"blocks.{layer}.attention_norm", f"blocks.{layer}.ff_norm"
        contexts = self.attention(layer, hidden_TD, memory_MD, memory_documents, documents, memory_len, first_SD)
        sums = [plus(x, context) for x, context in zip(hidden_TD, contexts, strict=True)]
        if self.section.pre_norm:
            return [plus(x, self.feed_forward(layer, self.norm(ff_norm, x))) for x in sums]
        sums = [self.norm(attention_norm, x) for x in sums]
        return [self.norm(ff_norm, plus(x, self.feed_forward(layer, x))) for x in sums]
