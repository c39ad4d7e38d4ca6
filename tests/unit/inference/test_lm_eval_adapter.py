"""lm-evaluation-harness uses a bundle, in its own process and over HTTP, and gets the model's own results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import txl_dist
from tests.helpers.bundles import make
from tests.helpers.launch import python
from tests.helpers.served import served
from txl_dist.cli.main import main
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.language_model import LanguageModel

pytestmark = pytest.mark.slow
MEMORY_LEN = 400
"""Tokens: more than any document has."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


class Setting(NamedTuple):
    """A bundle trained with document masks, its corpus, and a folder with the same documents as a task."""

    bundle: Path
    corpus: Path
    tasks: Path
    texts: list[str]

    @property
    def lm(self) -> LanguageModel:
        return txl_dist.load(self.bundle)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("harness")
    texts = [f"{number} " + "abc ba cab " * (3 + 2 * number) for number in range(12)]
    made = make(folder, texts=texts, document_mask=True, memory_len=MEMORY_LEN, cutoffs=(100,), div_value=2)
    split = made.corpus.split("valid")
    tokenizer = txl_dist.load(made.bundle).tokenizer
    documents = [list(map(int, document))[:-1] for document in split.each_document()]  # an end-of-text ends each
    texts = [tokenizer.decode(ids) for ids in documents]
    assert len(texts) > 2
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "local.yaml").write_text(ROLLING)
    return Setting(made.bundle, made.corpus.folder, folder, texts)


def run_harness(
    *words: str, cwd: Path, module: str = "txl_dist.inference.lm_eval_adapter"
) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**OFFLINE, "HF_HOME": str(cwd / "cache")}.items():
            patch.setenv(name, value)
        return python("-m", module, *words, cwd=cwd)


def rolling_of(
    setting: Setting, out: Path, *words: str, module: str = "txl_dist.inference.lm_eval_adapter"
) -> list[float]:
    """The harness's log-likelihood of each text."""
    flags = ["--tasks", "local_text", "--include_path", ".", "--log_samples", "--output_path", str(out)]
    done = run_harness(*words, *flags, cwd=setting.tasks, module=module)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = out.rglob("samples_local_text_*.jsonl")
    found = {}
    for line in samples.read_text().splitlines():
        record = json.loads(line)
        (found[record["doc"]["text"]],) = (float(one) for one in record["filtered_resps"])
    return [found[text] for text in setting.texts]


def evaluated(setting: Setting, out: Path) -> dict[int, list[tuple[int, float]]]:
    """(token, log p) by document, as `txl evaluate` with document masks says."""
    words = ["evaluate", str(setting.bundle), "--data", str(setting.corpus), "--num-lanes", "1"]
    assert main([*words, "--memory-len", str(MEMORY_LEN), "--log-probs", str(out)]) == 0
    found: dict[int, list[tuple[int, float]]] = {}
    for record in map(json.loads, out.read_text().splitlines()):
        found.setdefault(record["document"], []).append((record["token"], record["log_p"]))
    return found


def assert_as_evaluated(setting: Setting, rolling: list[float], out: Path) -> None:
    """Per token to 1e-4 nats. Evaluation scores the end of each document too, which is left out here; and it has no
    end-of-text before the first document of a split."""
    tokenizer = setting.lm.tokenizer
    documents = evaluated(setting, out)
    assert len(documents) == len(setting.texts)
    for number, scores in list(documents.items())[1:]:
        log_p = [log_p for token, log_p in scores if token != tokenizer.end_of_text]
        assert len(log_p) == len(tokenizer.encode(setting.texts[number]))
        assert abs(rolling[number] - sum(log_p)) / len(log_p) <= 1e-4


def test_rolling_scores_of_a_local_file_are_those_of_txl_evaluate(setting: Setting, tmp_path: Path) -> None:
    model = ["--model", "txl", "--model_args", f"path={setting.bundle},memory_len={MEMORY_LEN}", "--batch_size", "4"]
    assert_as_evaluated(setting, rolling_of(setting, tmp_path / "out", *model), tmp_path / "log_probs.jsonl")


@pytest.mark.nightly
def test_rolling_scores_over_http_are_the_same(setting: Setting, base_url: str, tmp_path: Path) -> None:
    lm = setting.lm
    arguments = f"base_url={base_url}/v1/completions,model=tiny,tokenizer_backend=remote,max_length={MEMORY_LEN}"
    arguments += f",custom_prefix_token_id={lm.tokenizer.end_of_text}"
    words = ["--model", "local-completions", "--model_args", arguments]
    rolling = rolling_of(setting, tmp_path / "out", *words, module="lm_eval")
    assert_as_evaluated(setting, rolling, tmp_path / "log_probs.jsonl")


class Asked(NamedTuple):
    """What the harness calls an Instance, as far as a model looks at it."""

    args: tuple[Any, ...]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_continuation_has_the_score_of_the_whole_text_less_its_context(setting: Setting, batch_size: int) -> None:
    from txl_dist.inference.lm_eval_adapter import HarnessModel

    lm = setting.lm
    model = HarnessModel(lm, batch_size=batch_size)
    pairs = [("abc ", "ba"), ("", "cab abc"), ("abc ba cab " * 9, "abc"), ("a", " b" * 20), ("x", "")]
    pairs += [("abc ba c", lm.generate("abc ba c", max_tokens=7, temperature=0.0).text)]
    found = model.loglikelihood([Asked(pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (log_p, is_greedy) in zip(pairs, found, strict=True):
        num_tokens = len(lm.encode(context + continuation)) - len(lm.encode(context.rstrip()))
        scores = lm.score(context + continuation)
        assert abs(log_p - float(scores[len(scores) - num_tokens :].sum())) <= 1e-4
        likeliest = lm.generate(context.rstrip(), max_tokens=num_tokens, temperature=0.0, stop=())
        expected = (context + continuation)[len(context.rstrip()) :]
        assert is_greedy == (likeliest.text == expected), (context, continuation)
    assert found[-1][1]
    assert found[-2] == (0.0, True)


def test_texts_go_on_greedily_until_a_stop_and_differ_by_their_settings(setting: Setting) -> None:
    from txl_dist.inference.lm_eval_adapter import HarnessModel

    lm = setting.lm
    model = HarnessModel(lm, batch_size=2)
    contexts = ["abc ", "ba", "", "cab abc ba"]
    asked = [(one, {"until": ["c"], "max_gen_toks": 9}) for one in contexts]
    asked += [("abc ", {"max_gen_toks": 5, "do_sample": True, "temperature": 1.0})]
    made = model.generate_until([Asked(one) for one in asked], disable_tqdm=True)
    for context, text in zip(contexts, made, strict=False):
        assert text == lm.generate(context, max_tokens=9, temperature=0.0, stop="c").text
        assert "c" not in text
    assert made[-1] == lm.generate("abc ", max_tokens=5, temperature=1.0, top_k=0).text
    ways: list[dict[str, Any]] = [{"max_new_tokens": 5}, {"max_tokens": 5, "until": None}, {"num_beams": 1}]
    ways += [{"max_gen_toks": 5, "num_beams": 4, "until": [None, ""]}, {"max_gen_toks": 5, "of_the_future": {1, 2}}]
    for way in ways:
        (text,) = model.generate_until([Asked(("abc ", {"max_gen_toks": 5, **way}))])
        assert text == lm.generate("abc ", max_tokens=5, temperature=0.0).text


def test_a_setting_that_is_not_used_is_said_once(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    from txl_dist.inference.lm_eval_adapter import HarnessModel

    model = HarnessModel(setting.lm)
    for context in ("abc ", "ba"):
        model.generate_until([Asked((context, {"max_gen_toks": 2, "num_beams": 4}))])
    assert [record.getMessage() for record in caplog.records if "num_beams" in record.getMessage()] == [
        "generation setting num_beams=4 is not used, because beam search is not supported"
    ]


def test_the_harness_can_compute_in_bf16(setting: Setting) -> None:
    from txl_dist.inference.lm_eval_adapter import HarnessModel

    requests = [Asked((text,)) for text in setting.texts]
    scores = {}
    for precision in ("fp32", "bf16"):
        model = HarnessModel.create_from_arg_string(f"path={setting.bundle},precision={precision}")
        assert model.lm.bundle.precision == precision
        scores[precision] = model.loglikelihood_rolling(requests)
    assert scores["bf16"] != scores["fp32"]
    assert scores["bf16"] == pytest.approx(scores["fp32"], rel=0.02)


def test_bad_arguments_are_refused_and_answered_in_a_line(setting: Setting) -> None:
    from txl_dist.inference.lm_eval_adapter import HarnessModel

    wrong = ("pretrained={}", "path={},memory_len=many", "path={},precision=fp64", "")
    for arguments in (words.format(setting.bundle) for words in wrong):
        with pytest.raises(ConfigError, match="give path=BUNDLE and optionally memory_len=TOKENS"):
            HarnessModel.create_from_arg_string(arguments)
    with pytest.raises(CheckpointError, match="txl export"):
        HarnessModel.create_from_arg_string("path=nowhere")
    words = ["--model", "txl", "--model_args", "path=nowhere", "--tasks", "local_text", "--include_path", "."]
    done = run_harness(*words, cwd=setting.tasks)
    assert done.returncode == 2
    assert "nowhere is not a bundle" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_begin_a_document_says_so(tmp_path: Path) -> None:
    from txl_dist.inference.lm_eval_adapter import HarnessModel

    old = make(tmp_path / "old", document_mask=True, begins_documents=False)
    model = HarnessModel(txl_dist.load(old.bundle))
    with pytest.raises(ConfigError, match="cannot begin a document: the model has no"):
        model.loglikelihood([Asked(("", "abc"))], disable_tqdm=True)
    ((log_p, _),) = model.loglikelihood([Asked(("a", "bc"))], disable_tqdm=True)
    (rolling,) = model.loglikelihood_rolling([Asked(("abc",))])
    assert abs(log_p - rolling) <= 1e-5, "the first token has no score"


def test_without_the_package_it_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError('No module named lm_eval', name='lm_eval')\n")
    command = [sys.executable, "-m", "txl_dist.inference.lm_eval_adapter", "--help"]
    path = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("pip install 'txl_dist[harness]'")


@pytest.fixture
def base_url(setting: Setting) -> Iterator[str]:
    """Of `txl serve`."""
    with served(setting.lm, memory_len=MEMORY_LEN, max_prompt_len=100_000) as server:
        yield server.url
