"""`txl evaluate --adapt` adds a row and does not change the rows with fixed weights."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.bundles import SEGMENT_LEN, Made, make
from tests.helpers.models import tiny_section
from txl_dist.cli.main import main
from txl_dist.config.load import changed
from txl_dist.errors import ConfigError, DataError
from txl_dist.evaluation.evaluate import evaluate_trained
from txl_dist.evaluation.options import AdaptationOptions, Outputs, Overrides
from txl_dist.evaluation.target import open_target
from txl_dist.inference.bundle import load_bundle, write_bundle
from txl_dist.model.transformer_xl import TransformerXL

CACHE = {"adapt": "cache", "cache_share": 0.3, "cache_theta": 0.2, "cache_window": 10}
DYNAMIC = {"adapt": "dynamic", "adapt_batches": 3, "adapt_lr": 1e-2, "adapt_eps": 0.1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("made"))


def evaluated(made: Made, adaptation: dict[str, Any], **changes: Any) -> dict[str, dict[str, Any]]:
    out = made.bundle.parent / "result.json"
    told = evaluate_trained(
        made.bundle, data=made.corpus.folder, overrides=Overrides(**({"num_lanes": 3} | changes)), baselines=False,
        adaptation=AdaptationOptions(**adaptation), outputs=Outputs(json=out),
    )  # fmt: skip
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())
    assert all(any(line.startswith(name) for line in told) for name in results)
    return results


@torch.no_grad()
def naive_cached(made: Made, *, by_document: bool) -> float:
    """Mean loss with a cache, of the whole text or of each document by itself, behind the end of the one before it."""
    settings = tiny_section(init_std=0.2, **made.settings)
    model = TransformerXL(settings, vocab_size=made.corpus.vocab_size).eval()
    model.load_state_dict(made.weights, strict=False)
    split, end = made.corpus.split("valid"), made.corpus.end_of_text
    texts = [split.read_all().tolist()]
    if by_document:
        documents = [document.tolist() for document in split.each_document()]
        texts = [documents[0], *([end, *document] for document in documents[1:])]
    losses = []
    for text in texts:
        tokens = torch.tensor([text])
        hidden_BTD, _ = model(tokens[:, :-1], model.empty_memory(num_lanes=1, memory_len=0))
        nll = model.softmax(hidden_BTD, tokens[:, 1:])[0].tolist()
        products = CACHE["cache_theta"] * (hidden_BTD[0].double() @ hidden_BTD[0].double().T)
        for t, loss in enumerate(nll):
            known = range(max(0, t - CACHE["cache_window"]), t)
            weights = {j: math.exp(products[t, j]) for j in known}
            hits = sum(weight for j, weight in weights.items() if text[j + 1] == text[t + 1])
            share = CACHE["cache_share"]
            losses.append(
                -math.log((1 - share) * math.exp(-loss) + share * hits / sum(weights.values())) if known else loss
            )
    return float(np.mean(losses))


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_cache_knows_the_documents_that_the_model_knows(tmp_path: Path, document_mask: bool) -> None:
    made = make(tmp_path, document_mask=document_mask)
    row = evaluated(made, CACHE, num_lanes=1, memory_len=(10**4,))["adapted: cache"]
    expected = naive_cached(made, by_document=document_mask)
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - naive_cached(made, by_document=not document_mask)) > 1e-4, "it makes a difference"


@pytest.mark.parametrize("lengths", [{"memory_len": (0,), "overlap_len": 20}, {"memory_len": (8,)}], ids=str)
def test_tokens_that_are_run_again_stand_in_the_cache_once(made: Made, tmp_path: Path, lengths: dict[str, Any]) -> None:
    """Where products count for nothing the cache is a count of the words in its window."""
    share, window = CACHE["cache_share"], CACHE["cache_window"]
    found = evaluated(made, CACHE | {"cache_theta": 0.0}, num_lanes=1, **lengths)["adapted: cache"]["loss"]
    evaluate_trained(
        made.bundle, data=made.corpus.folder, overrides=Overrides(num_lanes=1, **lengths), baselines=False,
        outputs=Outputs(log_probs=tmp_path / "p.npz"),
    )  # fmt: skip
    scored = np.load(tmp_path / "p.npz")
    words, losses = scored["token"].tolist(), []
    for t, p in enumerate(np.exp(scored["log_p"].astype(np.float64))):
        known = words[max(0, t - window) : t]
        losses.append(-math.log((1 - share) * p + share * known.count(words[t]) / len(known) if known else p))
    assert found == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("adaptation", [CACHE, DYNAMIC], ids=["cache", "dynamic"])
def test_the_static_row_is_the_same_bit_for_bit_with_an_adapted_one_beside_it(
    made: Made, adaptation: dict[str, Any]
) -> None:
    before = hashlib.sha256((made.bundle / "model.safetensors").read_bytes()).digest()
    alone = evaluated(made, {})
    both = evaluated(made, adaptation, without_memory=True)
    name = f"adapted: {adaptation['adapt']}"
    assert list(alone) == ["model"]
    assert list(both) == ["model", "memory off", name]
    assert both["model"]["loss"] == alone["model"]["loss"] != both[name]["loss"]
    assert both[name]["tokens"] == alone["model"]["tokens"]
    told = both[name]["adapted"]
    assert {key: told[key] for key in adaptation if key != "adapt"} == {
        k: v for k, v in adaptation.items() if k != "adapt"
    }
    assert (told["by"], told["segment_len"]) == (adaptation["adapt"], SEGMENT_LEN)
    assert "memory_len" not in both[name], "no picture over lengths has it"
    assert hashlib.sha256((made.bundle / "model.safetensors").read_bytes()).digest() == before


def test_steps_that_learn_what_repeats_gain_and_a_rate_of_next_to_nothing_changes_nothing(made: Made) -> None:
    """The held-out text of this random model is letters in a row."""
    gains = {}
    for lr in (1e-12, 1e-2):
        results = evaluated(made, DYNAMIC | {"adapt_lr": lr})
        gains[lr] = results["model"]["loss"] - results["adapted: dynamic"]["loss"]
    assert abs(gains[1e-12]) < 1e-5
    assert gains[1e-2] > 0.1


@pytest.mark.parametrize(
    "settings", [{"document_mask": True}, {"positions": "absolute", "memory_len": 0}, {"cutoffs": [5, 60]}], ids=str
)
@pytest.mark.parametrize("adaptation", [CACHE, DYNAMIC], ids=["cache", "dynamic"])
def test_every_kind_of_model_can_adapt(tmp_path: Path, settings: dict[str, Any], adaptation: dict[str, Any]) -> None:
    results = evaluated(make(tmp_path, **settings), adaptation)
    assert results[f"adapted: {adaptation['adapt']}"]["loss"] < results["model"]["loss"]


def test_weights_of_half_precision_are_stepped_in_fp32(made: Made, tmp_path: Path) -> None:
    """In bf16 such small steps would be none."""
    write_bundle(tmp_path / "half", load_bundle(made.bundle), dtype="bf16")
    small = DYNAMIC | {"adapt_lr": 1e-4}
    half, whole = (evaluated(made._replace(bundle=bundle), small) for bundle in (tmp_path / "half", made.bundle))
    assert half["adapted: dynamic"]["loss"] == pytest.approx(whole["adapted: dynamic"]["loss"], abs=0.02)
    assert (half["model"]["precision"], half["adapted: dynamic"]["precision"]) == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("adaptation", "changes", "message"),
    [
        ({**CACHE, "cache_theta": -0.1}, {}, "--cache-theta -0.1: it must be 0 or more"),
        ({**CACHE, "cache_theta": math.nan}, {}, "--cache-theta nan: it must be 0 or more"),
        ({**CACHE, "cache_share": 1.0}, {}, "--cache-share 1.0: it must be 0 or more and below 1"),
        ({**CACHE, "cache_share": -0.1}, {}, "--cache-share -0.1"),
        ({**CACHE, "cache_window": 0}, {}, "--cache-window 0: it must be 1 to"),
        ({**CACHE, "cache_window": 1 << 40}, {}, "--cache-window .*: it must be 1 to"),
        ({**CACHE, "adapt_lr": 1e-3}, {}, "--adapt-lr works only with --adapt dynamic, not with --adapt cache"),
        ({**CACHE, "adapt_train": "x"}, {}, "--adapt-train works only with --adapt dynamic"),
        ({"cache_window": 7}, {}, "--cache-window works only with --adapt cache, not with --adapt off"),
        ({**DYNAMIC, "cache_share": 0.2}, {}, "--cache-share works only with --adapt cache, not with --adapt dynamic"),
        ({**DYNAMIC, "adapt_lr": 0.0}, {}, "--adapt-lr 0.0: it must be above 0"),
        ({**DYNAMIC, "adapt_lr": math.inf}, {}, "--adapt-lr inf: it must be above 0"),
        ({**DYNAMIC, "adapt_decay": -1.0}, {}, "--adapt-decay -1.0: it must be 0 or more"),
        ({**DYNAMIC, "adapt_eps": 0.0}, {}, "--adapt-eps 0.0: it must be above 0"),
        ({**DYNAMIC, "adapt_batches": 0}, {}, "--adapt-batches 0: it must be 1 to"),
        (CACHE, {"memory_len": (0, 8)}, "--adapt cache is compared with one evaluation of the whole split"),
        (DYNAMIC, {"precision": "bf16"}, "--adapt dynamic updates weights in fp32"),
        (DYNAMIC, {"protocol": "original"}, "--adapt dynamic is compared with one evaluation of the whole split"),
    ],
    ids=str,
)
def test_what_no_adapted_score_can_have_is_refused_before_anything_is_read(
    tmp_path: Path, adaptation: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate_trained(
            tmp_path / "nothing", data="x", overrides=Overrides(**changes), baselines=False,
            adaptation=AdaptationOptions(**adaptation), outputs=Outputs(),
        )  # fmt: skip


def test_a_file_of_log_probabilities_is_of_the_static_scores_and_refused_beside_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="remove --protocol and --log-probs"):
        AdaptationOptions(**CACHE).check(Overrides(), Outputs(log_probs=tmp_path / "p.npz"))


def test_several_ranks_share_a_cache_of_each_lane_but_not_one_set_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    AdaptationOptions(**CACHE).check(Overrides(), Outputs())
    with pytest.raises(ConfigError, match=r"--adapt dynamic .*Start this evaluation as one process"):
        AdaptationOptions(**DYNAMIC).check(Overrides(), Outputs())


def test_text_of_other_tokens_or_without_a_training_split_measures_no_gradients(made: Made, tmp_path: Path) -> None:
    other = make(tmp_path / "other", kind="bpe", vocab_size=270)
    with pytest.raises(DataError, match=r"was prepared with another tokenizer than .*--tokenizer-file"):
        evaluated(made, DYNAMIC | {"adapt_train": str(other.corpus.folder)})
    with pytest.raises(DataError, match="is not a readable corpus"):
        evaluated(made, DYNAMIC | {"adapt_train": str(tmp_path / "nowhere")})
    target = open_target(made.bundle, data=made.corpus.folder)
    assert target.train_text("", target.config).name == "train"
    with pytest.raises(DataError, match=r"has no split 'other' .* Give with --adapt-train a corpus"):
        target.train_text("", changed(target.config, {"data.train_split": "other"}))


def test_the_command_line_names_what_is_no_corpus(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(made.bundle), "--data", str(made.corpus.folder), "--adapt", "dynamic"]
    assert main([*words, "--adapt-train", str(tmp_path / "nowhere")]) == 2
    assert "--adapt-train" in capsys.readouterr().err


def test_steps_that_are_too_large_end_in_a_word_not_in_a_number(made: Made) -> None:
    with pytest.raises(ConfigError, match=r"--adapt dynamic reached a loss that is not finite.*Lower --adapt-lr"):
        evaluated(made, DYNAMIC | {"adapt_lr": 1e38})
