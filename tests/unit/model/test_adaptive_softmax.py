"""Adaptive embedding and softmax: one distribution over the whole vocabulary, with every cluster in every step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.models import POSITIONS, VOCAB_SIZE, random_tokens, tiny_model, tiny_section
from txl_dist.config.schema import ModelSection
from txl_dist.errors import ConfigError
from txl_dist.model.adaptive_embedding import AdaptiveEmbedding, Partition
from txl_dist.model.adaptive_softmax import AdaptiveSoftmax, ClusterTable
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.vocabulary_clusters import ClusterRows, partition_by_cluster

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_narrow_embedding": {"embed_width": 6, "tie_projections": (True,)},
    "untied": {"tie_weights": False},
    "div_1": {"cutoffs": (5, 20)},
    "div_1_narrow_embedding": {"cutoffs": (5, 20), "embed_width": 6, "tie_projections": (True, False, True)},
    "div_1_untied": {"cutoffs": (5, 20), "tie_weights": False},
    "div_2": {"cutoffs": (5, 20), "div_value": 2},
    "div_2_tied_projections": {"cutoffs": (5, 20), "div_value": 2, "tie_projections": (False, True, True)},
    "div_2_untied": {"cutoffs": (5, 20), "div_value": 2, "tie_weights": False},
    "div_2_one_table": {"div_value": 2},
    "div_2_same_width": {"cutoffs": (5, 20), "div_value": 2, "project_same_width": False},
    "div_2_same_width_in_a_tail": {
        "cutoffs": (5, 20),
        "div_value": 2,
        "embed_width": 24,
        "project_same_width": False,
        "tie_projections": (True, True, False),
    },
    "div_4": {"cutoffs": (5,), "div_value": 4, "tie_projections": (False, True)},
    "unscaled": {"scale_embedding": False},
    "div_2_unscaled": {"cutoffs": (5, 20), "div_value": 2, "scale_embedding": False},
}
ADAPTIVE = [name for name, settings in VARIANTS.items() if "cutoffs" in settings]


def given_partition(ids: Tensor, *, edges: tuple[int, ...], multiple: int = 8) -> Partition:
    rows = partition_by_cluster(ids.numpy(), edges=edges, multiple=multiple)
    return [ClusterRows(*(torch.from_numpy(field) for field in cluster)) for cluster in rows]


def hidden_states(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


@pytest.mark.parametrize("name", VARIANTS)
def test_hits_are_where_the_whole_distribution_has_its_highest_value_at_the_target(name: str) -> None:
    softmax = tiny_model(dtype=torch.float64, **VARIANTS[name]).softmax
    hidden_BTD, targets_BT = 5 * hidden_states(3, 70, 12), random_tokens(3, 70)
    for favoured in range(softmax.num_tails + 1):  # tails win too
        with torch.no_grad():
            if favoured:
                softmax.cluster_bias[favoured - 1] += 4.0
        best_S = softmax.log_probabilities(hidden_BTD.flatten(0, 1)).argmax(-1)
        targets_BT[:, :40] = best_S.view(3, 70)[:, :40]
        expected_BT = best_S.view(3, 70) == targets_BT
        score_2BT = softmax(hidden_BTD, targets_BT, with_top1=True)
        assert torch.equal(score_2BT[1], expected_BT.double())
        assert torch.equal(score_2BT[0], softmax(hidden_BTD, targets_BT))
        assert not expected_BT.all()
        won = torch.bucketize(best_S, torch.tensor(softmax.edges[1:-1]), right=True)
        assert int((won == favoured).sum()) > 0


def test_a_tail_that_cannot_win_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = tiny_model(dtype=torch.float64, cutoffs=(5, 20), div_value=2).softmax
    hidden_BTD, targets_BT = hidden_states(2, 7, 12), random_tokens(2, 7)
    with torch.no_grad():
        softmax.cluster_bias[:] = -50.0
    sizes = []
    logits = ClusterTable.logits
    monkeypatch.setattr(ClusterTable, "logits", lambda table, rows: sizes.append(len(rows)) or logits(table, rows))
    softmax.top1_correct(hidden_BTD, targets_BT)
    assert sizes == [14]


@pytest.mark.parametrize("name", VARIANTS)
def test_probabilities_sum_to_one_and_the_losses_are_theirs(name: str) -> None:
    softmax = tiny_model(dtype=torch.float64, **VARIANTS[name]).softmax
    hidden_BTD = hidden_states(2, VOCAB_SIZE, 12)
    log_p_SV = softmax.log_probabilities(hidden_BTD.flatten(0, 1))
    assert log_p_SV.shape == (2 * VOCAB_SIZE, VOCAB_SIZE)
    assert (log_p_SV.exp().sum(1) - 1).abs().max() <= 1e-12
    targets_BT = torch.stack([torch.arange(VOCAB_SIZE), torch.arange(VOCAB_SIZE).flip(0)])
    losses_BT = softmax(hidden_BTD, targets_BT)
    assert losses_BT.shape == targets_BT.shape
    expected = -log_p_SV.gather(1, targets_BT.reshape(-1, 1)).view(2, VOCAB_SIZE)
    assert (losses_BT - expected).abs().max() <= 1e-12


def test_a_tail_word_is_as_likely_as_its_cluster_times_itself_inside_it() -> None:
    model = tiny_model(dtype=torch.float64, **VARIANTS["div_2"])
    softmax, hidden_D = model.softmax, hidden_states(12)
    parameters = dict(softmax.named_parameters())

    def probabilities(i: int) -> Tensor:
        rows, bias = parameters[f"weight_{i}"], parameters[f"bias_{i}"]
        if i == 0:
            rows = torch.cat([rows, parameters["cluster_weight"]])
            bias = torch.cat([bias, parameters["cluster_bias"]])
        logits = rows @ (parameters[f"projection_{i}"].t() @ hidden_D) + bias
        return logits.exp() / logits.exp().sum()

    head, *tails = (probabilities(i) for i in range(3))
    expected = torch.cat([head[:5], head[5] * tails[0], head[6] * tails[1]])
    assert (softmax.log_probabilities(hidden_D[None])[0].exp() - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_the_embedding_is_a_lookup_times_the_root_of_the_width_unless_it_is_not_scaled(name: str) -> None:
    settings = VARIANTS[name]
    embedding = tiny_model(dtype=torch.float64, **settings).embedding
    tokens_BT = random_tokens(3, 11)
    edges = (0, *(settings.get("cutoffs", ()) if settings.get("div_value", 1) > 1 else ()), VOCAB_SIZE)
    scale = math.sqrt(12) if settings.get("scale_embedding", True) else 1.0
    assert embedding.edges == edges
    hidden_BTD = embedding(tokens_BT)
    for b in range(3):
        for t in range(11):
            token = int(tokens_BT[b, t])
            i = sum(token >= edge for edge in edges[1:])
            row = embedding.weight(i)[token - edges[i]]
            projection = embedding.projection(i)
            expected = scale * (row if projection is None else projection @ row)
            assert (hidden_BTD[b, t] - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("multiple", [1, 8, 128])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_partition_made_on_the_host_gives_what_one_made_on_the_spot_gives(name: str, multiple: int) -> None:
    model = tiny_model(dtype=torch.float64, **VARIANTS[name])
    tokens_BT, targets_BT = random_tokens(3, 7, seed=1), random_tokens(3, 7, seed=2)
    of_tokens = given_partition(tokens_BT, edges=model.embedding.edges, multiple=multiple)
    of_targets = given_partition(targets_BT, edges=model.softmax.edges, multiple=multiple)
    hidden_BTD = model.embedding(tokens_BT)
    assert (model.embedding(tokens_BT, partition=of_tokens) - hidden_BTD).abs().max() <= 1e-12
    losses_BT = model.softmax(hidden_BTD, targets_BT)
    assert (model.softmax(hidden_BTD, targets_BT, partition=of_targets) - losses_BT).abs().max() <= 1e-12


def test_losses_are_fp32_where_the_weights_are_half_precision() -> None:
    for name in ("plain", "div_2"):
        model = tiny_model(dtype=torch.bfloat16, **VARIANTS[name])
        hidden_BTD = hidden_states(2, 3, 12, dtype=torch.bfloat16)
        assert model.softmax(hidden_BTD, random_tokens(2, 3)).dtype == torch.float32
        log_p_SV = model.softmax.log_probabilities(hidden_BTD.flatten(0, 1))
        assert log_p_SV.dtype == torch.float32
        assert (log_p_SV.exp().sum(1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_cluster_without_targets_gets_a_gradient_of_zeros_for_all_its_parameters(name: str) -> None:
    model = tiny_model(**VARIANTS[name])
    edge = model.softmax.edges[-2]
    tokens_BT = torch.tensor([[0, 4, edge - 2, edge - 1]])  # none in the last cluster
    hidden_BTD = hidden_states(1, 4, 12, dtype=torch.float32)
    model.softmax(hidden_BTD, tokens_BT).sum().backward()
    gradients = {key: parameter.grad for key, parameter in model.softmax.named_parameters()}
    assert [key for key, gradient in gradients.items() if gradient is None] == []
    one_table, last = model.section.div_value == 1, len(model.section.cutoffs)
    for leaf in ("weight", "bias"):
        gradient = gradients[f"{leaf}_0"][edge:] if one_table else gradients[f"{leaf}_{last}"]
        assert gradient is not None
        assert (gradient == 0).all()
    if not one_table:
        assert (gradients[f"projection_{last}"] == 0).all()
    assert (gradients["cluster_weight"] != 0).any()


@pytest.mark.parametrize("name", [name for name in ADAPTIVE if "div_value" in VARIANTS[name]])
def test_a_cluster_without_tokens_gets_a_gradient_of_zeros_in_the_embedding(name: str) -> None:
    embedding = tiny_model(**VARIANTS[name]).embedding
    embedding(torch.tensor([[0, 4, embedding.edges[-2] - 1]])).sum().backward()
    for i in range(embedding.num_tables):
        for parameter in (embedding.weight(i), embedding.projection(i)):
            if parameter is not None:
                assert parameter.grad is not None
                assert bool((parameter.grad != 0).any()) is (i < embedding.num_tables - 1)


GRADIENT_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_untied": {"tie_weights": False},
    "plain_narrow": {"embed_width": 2},
    "plain_narrow_tied_projection": {"embed_width": 2, "tie_projections": (True,)},
    "unscaled": {"scale_embedding": False},
    "div_1": {"cutoffs": (2, 5)},
    "div_1_untied": {"cutoffs": (2, 5), "tie_weights": False},
    "div_1_narrow": {"cutoffs": (2, 5), "embed_width": 3},
    "div_1_narrow_tied_projections": {"cutoffs": (2, 5), "embed_width": 3, "tie_projections": (True, False, True)},
    "div_2": {"cutoffs": (2, 5), "div_value": 2},
    "div_2_untied": {"cutoffs": (2, 5), "div_value": 2, "tie_weights": False},
    "div_2_tied_projections": {"cutoffs": (2, 5), "div_value": 2, "tie_projections": (False, True, True)},
    "div_2_only_projections_tied": {
        "cutoffs": (2, 5),
        "div_value": 2,
        "tie_weights": False,
        "tie_projections": (True, True, True),
    },
    "div_2_same_width": {"cutoffs": (2, 5), "div_value": 2, "project_same_width": False},
    "div_2_one_table": {"div_value": 2},
    "div_4": {"cutoffs": (4,), "div_value": 4, "tie_projections": (True, False)},
}


@pytest.mark.parametrize("name", GRADIENT_VARIANTS)
def test_gradients_are_those_of_what_is_computed(name: str) -> None:
    torch.manual_seed(0)
    section = tiny_section(**{"width": 4, **GRADIENT_VARIANTS[name]})
    embedding = AdaptiveEmbedding(section, vocab_size=9)
    softmax = AdaptiveSoftmax(section, vocab_size=9, embedding=embedding)
    network = nn.ModuleList([embedding, softmax]).double()
    parameters = list(network.parameters())
    for parameter in parameters:
        nn.init.normal_(parameter, std=0.5)
    tokens_BT, targets_BT = torch.tensor([[0, 3, 8], [4, 1, 2]]), torch.tensor([[1, 2, 6], [7, 0, 4]])
    of_tokens = given_partition(tokens_BT, edges=embedding.edges, multiple=4)
    of_targets = given_partition(targets_BT, edges=softmax.edges, multiple=4)

    def losses(*_: Tensor) -> Tensor:
        hidden_BTD = embedding(tokens_BT, partition=of_tokens).tanh()
        result: Tensor = softmax(hidden_BTD, targets_BT, partition=of_targets)
        return result

    assert torch.autograd.gradcheck(losses, parameters)  # it perturbs the parameters in place


@pytest.mark.parametrize("name", VARIANTS)
def test_tied_weights_are_one_parameter_and_untied_ones_are_not(name: str) -> None:
    settings = VARIANTS[name]
    embedding, softmax = (model := tiny_model(**settings)).embedding, model.softmax
    for i in range(embedding.num_tables):
        is_shared = getattr(softmax, f"weight_{i}") is embedding.weight(i)
        assert is_shared is settings.get("tie_weights", True)
    for i, is_tied in enumerate(settings.get("tie_projections", ())):
        table = min(i, embedding.num_tables - 1)
        projection = embedding.projection(table)
        assert projection is None or (getattr(softmax, f"projection_{i}") is projection) is is_tied


def test_cutoffs_beyond_the_vocabulary_are_refused() -> None:
    for cutoffs in ((VOCAB_SIZE,), (5, 99)):
        with pytest.raises(ConfigError, match=r"model\.cutoffs"):
            TransformerXL(tiny_section(cutoffs=cutoffs), vocab_size=VOCAB_SIZE)


def assert_normal(values: Tensor, *, mean: float, std: float, what: str) -> None:
    """Mean and standard deviation within five standard errors."""
    count = values.numel()
    assert abs(values.mean().item() - mean) <= 5 * std / math.sqrt(count), what
    assert abs(values.std().item() / std - 1) <= 5 / math.sqrt(2 * count), what


@pytest.mark.parametrize("name", POSITIONS)
def test_initial_weights_have_the_spread_of_the_original(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "width": 128, "ff_width": 256, "cutoffs": (100, 400), "div_value": 2}
    spread = {"init_std": 0.02, "projection_init_std": 0.01}
    biases = {"value_bias": True, "output_bias": True}
    section = ModelSection.model_validate({**sizes, **spread, **biases, **POSITIONS[name]})
    model = TransformerXL(section, vocab_size=1000)
    kinds = set()
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf.startswith("projection_"):
            kind, mean, std = "projection", 0.0, 0.01
        elif name.endswith("norm.weight"):
            kind, mean, std = "gain", 1.0, 0.02
        elif leaf in ("content_bias", "position_bias") or "bias" not in leaf:
            kind, mean, std = "weight", 0.0, 0.02
        else:
            kinds.add("bias")
            assert (parameter == 0).all(), name
            continue
        kinds.add(kind)
        assert_normal(parameter.detach(), mean=mean, std=std, what=name)
    assert kinds == {"projection", "gain", "weight", "bias"}


def test_initial_weights_follow_from_the_seed() -> None:
    one, same, other = (dict(tiny_model(seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)
