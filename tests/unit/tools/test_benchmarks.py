"""The benchmarks run to their end at tiny sizes, without code of others. Their figures are not checked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.bundles import make
from tests.helpers.launch import python
from tools.benchmarks.products import Products

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


Run = Callable[..., str]


@pytest.fixture
def run(warm_bin: Path) -> Run:
    """Run a tool and return what it prints. The processes that it starts are forked too."""

    def run(tool: str, *words: str) -> str:
        command = [str(warm_bin / "python"), "-m", f"tools.benchmarks.{tool}", *words]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def tables_in(path: Path) -> dict[str, list[dict[str, object]]]:
    return json.loads(path.read_text(encoding="utf-8"))["tables"]


def test_a_whole_step_is_timed_with_its_losses_memory_and_waits(run: Run, tmp_path: Path) -> None:
    run("step", "--tiny", "--bf16", "--rounds", "1", "--json", str(tmp_path / "step.json"))
    ((plain, ours, bf16, products, share),) = tables_in(tmp_path / "step.json").values()
    assert (plain["x by min"], plain["loss error"], plain["syncs"], ours["syncs"]) == (1.0, 0.0, 0, 0)
    assert float(str(ours["loss error"])) < 1e-6 < float(str(bf16["loss error"])) < 1e-2
    assert products["variant"] == "ours, products alone"
    assert 0 < float(str(share["share of products"])) < 1


@pytest.mark.nightly
def test_a_step_is_timed_beside_another_checkout_in_a_process_of_its_own(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = ("--sizes", "ptb", "--against", str(ROOT), "--json", str(file))
    run("step", "--tiny", "--rounds", "1", *words)
    ((*_, older, _, _),) = tables_in(file).values()
    assert str(older["variant"]).startswith("ours at ")
    assert float(str(older["min ms"])) > 0


def test_products_are_made_again_beside_what_the_step_reads_and_writes() -> None:
    left, right, out = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(3, 5)

    def step() -> None:
        torch.addmm(out, left, right.t(), beta=1, out=out)
        torch.bmm(left[None], right.t()[None])

    products = Products.of(step, pool_numbers=2**10)
    before = out.clone()
    products()
    assert len(products) == 2
    assert torch.equal(out, before)


def test_the_softmax_of_a_gpu_moves_ten_bytes_per_logit(run: Run) -> None:
    counted = [float(row.split("│")[2]) for row in run("softmax", "--count").splitlines() if row[:1] == "│"]
    assert counted == [52.0, 10.0]


def test_what_attention_launches_is_listed_by_recipe(run: Run, tmp_path: Path) -> None:
    run("attention", "--launches", "--buffer-mib", "128", "--json", str(tmp_path / "launches.json"))
    (table,) = tables_in(tmp_path / "launches.json").values()
    assert {row["recipe"]: row["launches"] for row in table} == {
        **{"enwik8_base": 15, "enwik8_large": 15, "wt103_base": 8, "nvidia_wt103_base": 8, "wt103_large": 15}
    }


def test_without_transformers_its_peer_says_what_to_install() -> None:
    program = "import sys; sys.modules['transformers'] = None; from tools.benchmarks import peers; peers.huggingface()"
    result = python("-c", program, cwd=ROOT)
    assert result.returncode == 1
    assert "Install transformers==4.46.3" in result.stderr.splitlines()[-1]


def test_generation_is_timed_alone_and_in_batches(run: Run, tmp_path: Path) -> None:
    checkout = str(ROOT)
    file = tmp_path / "decode.json"
    run("decode", "--tiny", "--rounds", "1", "--tokens", "2", "--against", checkout, "--json", str(file))
    (table,) = tables_in(file).values()
    assert [row["case"] for row in table] == [f"memory 8: {checkout}", "memory 8: ours", "2 rows, memory 8: ours"]
    assert table[0]["x by min"] == 1.0
    assert all(float(str(row["tokens per s"])) > 0 for row in table)


def test_generation_in_bf16_is_timed_beside_fp32_in_each_case(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    run("decode", "--tiny", "--rounds", "1", "--tokens", "2", "--bf16", "--json", str(file))
    (table,) = tables_in(file).values()
    cases = ["memory 8: ours", "memory 8: ours, bf16", "2 rows, memory 8: ours", "2 rows, memory 8: ours, bf16"]
    assert [row["case"] for row in table] == cases
    assert [row["x by min"] for row in table[::2]] == [1.0, 1.0]


def test_a_commit_that_there_is_not_is_no_base_line() -> None:
    result = python("-m", "tools.benchmarks.decode", "--tiny", "--against", "no-such-commit", cwd=ROOT)
    assert result.returncode == 1
    assert "--against no-such-commit is neither a folder nor a commit" in result.stderr.splitlines()[-1]


def test_evaluation_is_timed_beside_a_vanilla_transformer_with_equal_losses(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    run("evaluation", "--tiny", "--rounds", "1", "--lengths", "24", "--tokens", "8", "--json", str(file))
    table, of_precision = tables_in(file).values()
    assert [row["variant"] for row in table] == ["vanilla, fused", "vanilla, plain", "recurrence", "cached"]
    assert all(float(str(row["loss error"])) < 1e-5 for row in table)
    rows = [(row["rows"], row["variant"]) for row in of_precision]
    assert rows == [(1, "fp32"), (1, "bf16"), (16, "fp32"), (16, "bf16")]
    assert all(0 < float(str(row["loss error"])) < 0.01 for row in of_precision)


def test_a_server_is_measured_with_vllms_names(run: Run, tmp_path: Path) -> None:
    bundle = make(tmp_path / "made").bundle
    words = ["--num-prompts", "4", "--input-len", "3", "--output-len", "4", "--json", str(tmp_path / "serve.json")]
    printed = run("serve", str(bundle), *words, "--rounds", "1")
    told = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    assert "x one at a time" in printed
    assert len(told["turns_ms"]) == 10
    assert told["completed"] == 4
    assert told["failed"] == 0
    assert told["total_output_tokens"] > 4
    names = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "duration")
    assert told.keys() >= set(names)
    assert told.keys() >= {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in VLLMS}
    words += ["--request-rate", "200", "--goodput", "ttft:100000", "e2el:0.0001"]
    run("serve", str(bundle), *words, "--precision", "bf16")
    told = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    assert (told["request_rate"], told["request_goodput"]) == (200.0, 0.0)


VLLMS = ("ttft", "tpot", "itl", "e2el")
