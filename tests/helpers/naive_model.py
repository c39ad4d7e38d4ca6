"""The whole network from the texts, number by number: one lane, one token, one float at a time.

It shares with the package the names and values of the weights, and nothing else. Sources: Dai et al. 2019 (memory,
attention), Vaswani et al. 2017 (absolute positions), Shaw et al. 2018 (learned distances), Grave et al. 2017 (softmax
by clusters), Baevski and Auli 2019 (embedding by clusters); for details that they leave open, the original code.

Where weights are tied or shared, only one of the names is read: the model must really tie them to agree.
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
    times,
)
from txl_dist.model.transformer_xl import TransformerXL


class NaiveMemory(NamedTuple):
    """What one lane remembers: only positions that were really seen, oldest first."""

    hidden_LMD: list[Matrix]
    documents: list[int]


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def relu(x: float) -> float:
    return max(x, 0.0)


def cluster_of(token: int, edges: list[int]) -> int:
    return max(i for i, edge in enumerate(edges[:-1]) if token >= edge)


def log_softmax(logits: Vector) -> Vector:
    largest = max(logits)
    log_sum = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - log_sum for logit in logits]


class NaiveModel:
    """The weights of a model as lists, and what to do with them."""

    def __init__(self, model: TransformerXL) -> None:
        self.section, self.vocab_size = model.section, model.vocab_size
        self.weights: dict[str, Any] = {name: tensor.tolist() for name, tensor in model.state_dict().items()}

    def empty_memory(self) -> NaiveMemory:
        return NaiveMemory([[] for _ in range(self.section.num_layers)], [])

    def segment(
        self, tokens: list[int], targets: list[int], memory: NaiveMemory, *, memory_len: int, documents: list[int]
    ) -> tuple[Vector, NaiveMemory]:
        """The losses of a segment in nats, and the memory after it."""
        hidden_TD = [self.embed(token) for token in tokens]
        if self.section.positions == "absolute":
            hidden_TD = [
                plus(hidden, self.position(len(tokens) - 1 - i)) for i, hidden in enumerate(hidden_TD)
            ]  # counted from the end
        remembered = []
        for layer, memory_MD in enumerate(memory.hidden_LMD):
            remembered.append(self.newest(memory_MD + hidden_TD, memory_len))
            hidden_TD = self.block(layer, hidden_TD, memory_MD, memory.documents, documents, memory_len)
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
        """Whether a cluster's embeddings pass through a matrix: one table only if it must, clusters always."""
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
        """That of the cluster in the head, if it is a tail cluster, and that of the word inside its cluster."""
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
        mean = sum(x) / len(x)
        variance = sum((value - mean) ** 2 for value in x) / len(x)
        normed = [(value - mean) / math.sqrt(variance + self.section.norm_eps) for value in x]
        gain, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return [value * g + b for value, g, b in zip(normed, gain, bias, strict=True)]

    def heads(self, x: Vector) -> Matrix:
        width = self.section.head_width
        return [x[n * width : (n + 1) * width] for n in range(self.section.num_heads)]

    def scores(self, layer: int) -> list[Score]:
        """How each head of a layer compares a query with a key."""
        section = self.section
        heads = range(section.num_heads)
        if section.positions == "absolute":
            return [plain_score for _ in heads]
        owner = f"blocks.{0 if section.share_biases else layer}.attention"
        content = self.weights[f"{owner}.content_bias"]
        weight = self.weights[f"blocks.{layer}.attention.distance.weight"]
        if section.positions == "relative":
            H, position = section.head_width, self.weights[f"{owner}.position_bias"]
            return [
                relative_score(weight[n * H : (n + 1) * H], content[n], position[n], clamp_len=section.clamp_len)
                for n in heads
            ]
        bias = self.weights[f"blocks.{layer}.attention.distance.bias"]
        return [
            learned_score([row[n] for row in weight], [row[n] for row in bias], content[n], clamp_len=section.clamp_len)
            for n in heads
        ]

    def attention(
        self,
        layer: int,
        hidden_TD: Matrix,
        memory_MD: Matrix,
        memory_documents: list[int],
        documents: list[int],
        memory_len: int,
    ) -> Matrix:
        section, name = self.section, f"blocks.{layer}.attention"
        inner = section.num_heads * section.head_width
        key_value = self.weights[f"{name}.key_value.weight"]
        value_bias = self.weights[f"{name}.key_value.value_bias"] if section.value_bias else [0.0] * inner
        output_bias = self.weights[f"{name}.output.bias"] if section.output_bias else [0.0] * section.width
        sources = memory_MD + hidden_TD
        context_TNH = naive_attention(
            [self.heads(times(self.weights[f"{name}.query.weight"], x)) for x in hidden_TD],
            [self.heads(times(key_value[:inner], x)) for x in sources],
            [self.heads(plus(times(key_value[inner:], x), value_bias)) for x in sources],
            score_N=self.scores(layer),
            memory_documents=memory_documents,
            documents=documents,
            same_length=section.same_length,
            memory_len=memory_len,
        )
        output = self.weights[f"{name}.output.weight"]
        return [plus(times(output, [x for head in heads for x in head]), output_bias) for heads in context_TNH]

    def feed_forward(self, layer: int, x: Vector) -> Vector:
        activation, weights = {"relu": relu, "gelu": gelu}[self.section.activation], self.weights
        inner = plus(times(weights[f"blocks.{layer}.ff_in.weight"], x), weights[f"blocks.{layer}.ff_in.bias"])
        outer = [activation(value) for value in inner]
        return plus(times(weights[f"blocks.{layer}.ff_out.weight"], outer), weights[f"blocks.{layer}.ff_out.bias"])

    def block(
        self,
        layer: int,
        hidden_TD: Matrix,
        memory_MD: Matrix,
        memory_documents: list[int],
        documents: list[int],
        memory_len: int,
    ) -> Matrix:
        attention_norm, ff_norm = f"blocks.{layer}.attention_norm", f"blocks.{layer}.ff_norm"
        about = (memory_documents, documents, memory_len)
        if self.section.pre_norm:
            normed_TD, normed_MD = ([self.norm(attention_norm, x) for x in states] for states in (hidden_TD, memory_MD))
            contexts = self.attention(layer, normed_TD, normed_MD, *about)
            sums = [plus(x, context) for x, context in zip(hidden_TD, contexts, strict=True)]
            return [plus(x, self.feed_forward(layer, self.norm(ff_norm, x))) for x in sums]
        contexts = self.attention(layer, hidden_TD, memory_MD, *about)
        sums = [self.norm(attention_norm, plus(x, context)) for x, context in zip(hidden_TD, contexts, strict=True)]
        return [self.norm(ff_norm, plus(x, self.feed_forward(layer, x))) for x in sums]
