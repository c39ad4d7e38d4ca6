"""The page of a run is complete, escaped, small and reproducible, and shows errors."""

import dataclasses
import errno
import itertools
import json
import math
import os
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_runs import HOSTILE, make_run, parts
from txl_dist.cli.main import main
from txl_dist.distributed.processes import process_id
from txl_dist.errors import ConfigError, DataError
from txl_dist.io import files
from txl_dist.report.compare import write_comparison
from txl_dist.report.pictures import part_pictures
from txl_dist.report.records import History, RecordTable, read_history, read_loss_parts
from txl_dist.report.report import render, write_report
from txl_dist.report.summary import facts_of, read_run

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Text, tags and figures of a page; refuses tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    write_report(run)
    return Page((run / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def short(run: Path, tmp_path: Path) -> Path:
    """A copy of the run with its first and its last record alone: a page of few pictures, which take the time."""
    copy = shutil.copytree(run, tmp_path / "short")
    first, *_, last = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (copy / "metrics.jsonl").write_text(f"{first}\n{last}\n", encoding="utf-8")
    return copy


def test_a_whole_run_has_all_pictures_with_words_for_those_who_do_not_see_them(page: Page) -> None:
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) == page.count("figure") == 21
    assert all(len(attributes["aria-label"] or "") > 30 for attributes in pictures)
    for word in ("how often: start 2, ", "dashed lines: resumed (1), rewound (1)", "validation code loss"):
        assert word in page.text.lower()


def test_the_first_tiles_say_what_was_trained_on_what_by_which_program(run: Path) -> None:
    facts = facts_of(read_run(run))
    first = ["State", "Corpus", "Tokenizer", "Model", "Memory", "Commit", "Command"]
    assert [fact.name for fact in facts[:7]] == first
    values = {fact.name: (fact.value, fact.note) for fact in facts}
    assert values["Corpus"] == ("stdlib, code", "data/stdlib")
    assert values["Tokenizer"] == ("4,096 ids", "subword")
    assert values["Model"][0] == "524k parameters"
    assert "4 layers, width 128, 4 heads, relative positions" in values["Model"][1]
    assert "feed-forward width 512, adaptive softmax, clusters begin at 512, 2,048" in values["Model"][1]
    assert values["Memory"] == ("128 tokens", "segments of 64 tokens, 32 lanes")
    assert values["Commit"] == ("c0ffee123456", "txl_dist 0.1.0, torch 2.13.0, ZeRO-1, fp32")
    assert values["Command"] == ("txl train 'a b.toml'", "")


def test_the_precision_is_said_before_the_first_checkpoint_and_as_it_was_set(tmp_path: Path) -> None:
    copy = make_run(tmp_path / "run")
    shutil.rmtree(copy / "checkpoints", ignore_errors=True)
    config = copy / "config.toml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('precision = "fp32"', 'precision = "tf32"'), encoding="utf-8")
    (commit,) = [fact for fact in facts_of(read_run(copy)) if fact.name == "Commit"]
    assert commit.note.endswith(", tf32")


@pytest.mark.parametrize(
    ("cutoffs", "words"),
    [
        ([], "plain softmax"),
        ([512], "adaptive softmax, clusters begin at 512"),
        ([512, 2048], "adaptive softmax, clusters begin at 512, 2,048"),
        ("many", ""),
    ],
)
def test_the_softmax_is_named_as_people_name_it(tmp_path: Path, cutoffs: object, words: str) -> None:
    copy = make_run(tmp_path / "run")
    config = copy / "config.toml"
    text = config.read_text(encoding="utf-8")
    text = re.sub(r"cutoffs = \[[^\]]*\]", f"cutoffs = {json.dumps(cutoffs)}", text)
    config.write_text(text, encoding="utf-8")
    (model,) = [fact for fact in facts_of(read_run(copy)) if fact.name == "Model"]
    assert model.note.endswith(words or "feed-forward width 512")
    assert "[" not in model.note


@pytest.mark.usefixtures("page")
def test_what_a_run_did_not_record_is_folded_away(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"kind": "sample", "step": 1, "prompt": "a", "text": "b"}\n', encoding="utf-8")
    write_report(bare)
    html = (bare / "report.html").read_text(encoding="utf-8")
    for title in ("Loss", "Speed", "Layers", "Events"):
        assert re.search(rf"<details><summary><h2>{title}</h2><span class=\"soft\">nothing recorded</span>", html), (
            title
        )
    assert "<h2>Text samples</h2>\n<p" in html
    html = (run / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>([^<]+)</h2><span class=\"soft\">nothing recorded", html) == ["Layers"]


def test_one_rank_is_told_as_one(tmp_path: Path) -> None:
    start = {"kind": "event", "event": "start", "step": 0, "ranks": 1, "hosts": 1, "device": "x86_64", "torch": "2"}
    lines = [json.dumps({**start, "threads_per_rank": 1}), json.dumps({**start, "ranks": 11, "threads_per_rank": 2})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_report(tmp_path)
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "1 rank on 1 host (x86_64), 1 thread per rank" in text
    assert "11 ranks on 1 host (x86_64), 2 threads per rank" in text


def test_scores_of_the_run_are_shown_where_they_were_made(page: Page, tmp_path: Path) -> None:
    assert re.search(r"memory 64\s*2\.2680\s*9\.5000\s*-\s*123,456", page.text)
    assert re.search(r"order 0\s*4\.5000", page.text)
    assert "length of the memory" in page.text
    (tmp_path / "metrics.jsonl").write_text('{"kind": "event", "event": "start", "step": 0}\n', encoding="utf-8")
    (tmp_path / "evaluation.json").write_text('{"odd": 3, "\\u001b": {"loss": "no", "memory_len": 1e99}}')
    write_report(tmp_path)
    assert "length of the memory" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_events_are_told_in_words_and_those_of_other_versions_as_they_are(page: Page, tmp_path: Path) -> None:
    for words in (
        "step_000000200, 20.5 MiB. Training waited for 0.",
        "loss 9.1 after a median of 2.2, a deviation of 14.2 sigma",
        "back from step 1,400. Training skips the text of the spike",
        "rank 2 on node-b took 17.5 % longer than the median of the others",
        "4 ranks on 2 hosts (x86_64)",
    ):
        assert words in page.text
    event = {"kind": "event", "event": "saved", "step": 3, "path": "step_3", "gib": "much", "new": {"a": 1}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    write_report(tmp_path)
    assert "path step_3, gib much" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).text


def test_the_gain_per_position_is_paired_and_in_bins_with_their_tokens(page: Page) -> None:
    assert "Gain from the memory per position" in page.text
    assert "At step 2,000, over 4,096 tokens, about 512 for each point" in page.text


@pytest.mark.parametrize(
    ("num", "words"), [(8, ""), (12, "Layer 0 is the first layer after the embedding. 8 of 12 layers.")]
)
def test_a_picture_without_room_for_all_layers_says_so(tmp_path: Path, num: int, words: str) -> None:
    measured = [{"kind": "memory", "step": step, "memory_norm": [1.0] * num} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, measured)), encoding="utf-8")
    write_report(tmp_path)
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert ("of 12 layers" in text) == bool(words)
    assert words in text


def test_scores_are_drawn_by_cluster_and_by_position_where_they_have_several(page: Page) -> None:
    pictures = [attributes["aria-label"] or "" for tag, attributes in page.tags if tag == "svg"]
    clusters, positions = [text for text in pictures if text.startswith("Scores per ")]
    assert "memory 0 from 2 to 4.3, lowest 2, highest 4.3; memory 128 from 2 to 4" in clusters
    assert "position in the segment, tokens. memory 0 from 3.3 to 2.6" in positions
    assert "Clusters 0: ids 0 to 511, 1: ids 512 to 1,023, 2: ids 1,024 to 1,535." in page.text


@pytest.mark.parametrize(
    "odd",
    [[], 3, [3], [[]], [{}], [{}, {}], [{"first": "a"}, None], parts(None, None, size=2), parts(2.0, size=5),
     parts(1e300, -1e300, size=10**300)],
    ids=lambda odd: str(odd)[:20],
)  # fmt: skip
def test_parts_that_are_one_or_odd_are_no_picture(tmp_path: Path, odd: object) -> None:
    scores = {"model": {"loss": 2.0, "by_cluster": odd, "by_position": odd}, "other": odd}
    (tmp_path / "evaluation.json").write_text(json.dumps(scores), encoding="utf-8")
    assert part_pictures(read_loss_parts(tmp_path)) == []


def test_every_axis_of_numbers_has_a_unit_or_a_name(run: Path) -> None:
    html = (run / "report.html").read_text(encoding="utf-8")
    for unit in ("nats per token", "tokens seen", "minutes of work", "tokens/s", "ms per step", "GiB", "MFU, %"):
        assert f">{unit}" in html or f", {unit}" in html


def test_what_comes_from_the_run_is_text(page: Page) -> None:
    assert page.count("script") == page.count("img") == 0
    assert HOSTILE in page.text


def test_nothing_is_fetched_and_scripts_are_forbidden(page: Page) -> None:
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "action", "poster", "data"):
            assert name not in attributes, tag
        address = attributes.get("href") or ""
        assert not re.match(r"[a-z]+:|//", address) or address == "data:,"
        assert not [name for name in attributes if name.startswith("on")]
    policies = [attributes.get("content") for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policies
    assert policies[0]
    assert policies[0].startswith("default-src 'none'")


def test_headings_go_down_one_level_at_a_time(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_links_lead_to_files_of_the_run_from_wherever_the_page_lies(short: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages" / "a page.html"
    out.parent.mkdir()
    write_report(short, out=out)
    found = Page(out.read_text(encoding="utf-8"))
    links = [attributes["href"] or "" for tag, attributes in found.tags if tag == "a"]
    assert len(links) == 5
    assert all((out.parent / link).exists() for link in links)


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        write_report(run, out=tmp_path / "page.html")
        pages.append((tmp_path / "page.html").read_bytes())
        (tmp_path / "page.html").rename(tmp_path / name)
    assert pages[0] == pages[1]


def test_a_run_without_most_records_says_so_in_sentences(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "event", "event": "start", "step": 0}\n{"ki', encoding="utf-8")
    lines = write_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.count("svg") == 0
    for sentence in (
        "Loss against tokens: no numbers are recorded.",
        "No text was written",
        "config.toml cannot be read",
        "Throughput: no numbers",
    ):
        assert sentence in page.text
    assert "incomplete lines in metrics.jsonl 1" in page.text
    assert lines[-1] == f"page: {tmp_path / 'report.html'}"


def test_settings_that_differ_are_shown_those_of_other_versions_too(short: Path) -> None:
    config = short / "config.toml"
    config.write_text(config.read_text(encoding="utf-8") + "\n[fancy]\nnew = 3\n", encoding="utf-8")
    write_report(short)
    text = Page((short / "report.html").read_text(encoding="utf-8")).text
    assert re.search(r"fancy\.new\s*3\s*unknown to this version", text)
    assert re.search(r"optim\.lr\s*0\.002\s*0\.00025", text)
    assert not re.search(r"optim\.eps\s*1e-08\s*1e-08", text)


def test_broken_neighbours_of_the_records_do_no_harm(short: Path) -> None:
    (short / "config.toml").write_bytes(b"\xff[[[")
    for state in short.glob("checkpoints/*/state.json"):
        state.write_text("{", encoding="utf-8")
    (short / "DONE").unlink()
    (short / "RUN.lock").write_text("not json", encoding="utf-8")
    write_report(short)
    assert "Crashed or killed" in Page((short / "report.html").read_text(encoding="utf-8")).text


def test_state_is_told_by_done_lock_and_last_event(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def state(*events: str) -> str:
        lines = [json.dumps({"kind": "event", "event": name, "step": 3, "reason": "SIGTERM"}) for name in events]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return read_run(run).state

    assert state("start").startswith("not done")
    assert state("start", "stopped").startswith("stopped by SIGTERM")
    lock = {"process": process_id(), "nonce": "ab", "started": "now"}
    (run / "RUN.lock").write_text(json.dumps(lock), encoding="utf-8")
    assert state("start") == "going on"
    gone = process_id()._replace(start_ticks=1)
    (run / "RUN.lock").write_text(json.dumps(lock | {"process": gone}), encoding="utf-8")
    assert state("start").startswith("crashed or killed")
    elsewhere = process_id()._replace(host="elsewhere")
    (run / "RUN.lock").write_text(json.dumps(lock | {"process": elsewhere}), encoding="utf-8")
    assert state("start") == "going on"
    os.utime(run / "RUN.lock", (time.time() - 600,) * 2)
    assert state("start").startswith("crashed or killed")
    (run / "DONE").touch()
    assert state("start") == "done"


def test_the_headline_takes_the_newest_and_the_best(tmp_path: Path) -> None:
    records = [{"kind": "event", "event": "start", "step": 0, "parameters": 1234567, "ranks": 2}]
    records += [{"kind": "eval", "step": step, "loss": loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5))]
    text = "\n".join(map(json.dumps, records))
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    facts = {fact.name: (fact.value, fact.note) for fact in facts_of(read_run(tmp_path))}
    assert facts["Validation loss"] == ("2.5000", "nats per token; perplexity 12.18; best: 2.0000 at step 20")
    assert facts["Step"] == ("30", "")
    assert facts["Model"] == ("1.23M parameters", "1,234,567 exactly")


def test_the_straggler_is_the_rank_that_is_slowest_most_often(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "step": step, "slowest_rank": rank, "slowest_host": f"h{rank}", "slowest_pct": 10.0 + step}
        for step, rank in ((1, 3), (2, 3), (3, 0), (4, 3))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (fact,) = (fact for fact in facts_of(read_run(tmp_path)) if fact.name == "Slowest rank")
    assert (fact.value, fact.note) == ("3 on h3", "in 75 % of the records, slower there by 12.0 % (median)")


@pytest.mark.slow
def test_a_million_records_make_a_small_page(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = lengthened(read_history(run), 1_000_000)
    monkeypatch.setattr("txl_dist.report.summary.read_history", lambda path: long)
    write_report(run, out=tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_500_000
    Page((tmp_path / "page.html").read_text(encoding="utf-8"))


def lengthened(history: History, num: int) -> History:
    """The same run with so many train records, a hundredth as many of the other kinds, and a thousand samples."""
    chance = np.random.default_rng(1)

    def table(old: RecordTable, rows: int, **more: int) -> RecordTable:
        names = {*old.columns} | {f"{prefix}_{n}" for prefix, count in more.items() for n in range(count)}
        columns = {name: chance.normal(5.0, 1.0, rows) for name in names}
        return RecordTable(columns | {name: np.arange(1.0, rows + 1) for name in ("step", "hours", "tokens_seen")})

    return dataclasses.replace(
        history,
        train=table(history.train, num),
        evals={kind: table(one, num // 100) for kind, one in history.evals.items()},
        memory=table(history.memory, num // 100, memory_norm=24, memory_attention_pct=24),
        events=[event._replace(step=n, hours=float(n)) for n in range(num // 2000) for event in history.events],
        samples=[history.samples[0]._replace(step=step, text="text " * 10_000) for step in range(1000)],
    )


def test_text_that_no_page_can_hold_is_replaced(tmp_path: Path) -> None:
    sample = {"kind": "sample", "step": 1, "prompt": "\x1b[31m\x00", "text": "\ud800 lone \u0085"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    write_report(tmp_path)
    content = (tmp_path / "report.html").read_bytes()
    assert b"\x00" not in content
    assert b"\x1b" not in content
    assert "lone" in content.decode("utf-8")


NEVER_MEASURED = [
    [{"kind": "train", "loss": 1.0, "tokens_seen": 1e308}],
    [
        {"kind": "train", "loss": 1.0, "tokens_seen": math.nan},
        {"kind": "eval_a\udcff", "loss": 1.0},
        {"kind": "event", "event": "half \ud800 and \x00\x1b[31m\n"},
        {"kind": "event", "event": "saved", "seconds": 10**400},
    ],
    [
        {"kind": "train", "loss": 1e300, "step_ms": 1e308, "tokens_per_s": -1e308},
        {"kind": "event", "event": "start", "parameters": 10**400, "ranks": "\x1b[31m\ud800"},
        {"kind": "memory", "memory_norm_" + "9" * 5000: 1.0},
        {"kind": "memory", "loss_by_position": [None], "loss_by_position_without_memory": [1e308]},
    ],
]


@pytest.mark.parametrize("odd", NEVER_MEASURED)
@pytest.mark.filterwarnings("error")
def test_values_that_no_training_comes_to_make_a_page_all_the_same(
    tmp_path: Path, odd: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    usual = [{"kind": "train", "step": step, "loss": 2.0, "time_s": 60.0 * step} for step in (1, 2)]
    marks = [{"kind": "event", "event": name, "step": 2} for name in ("start", "skipped", "start")]
    lines = [*usual, *marks, *(one | {"step": step} for step in (9, 10) for one in odd)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 0
    assert all(line.isprintable() and line.encode() for line in capsys.readouterr().out.splitlines())
    Page((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_templates_know_no_missing_values() -> None:
    with pytest.raises(Exception, match="undefined"):
        render("report.html.j2", title="t")


def test_a_page_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{", encoding="utf-8")  # would be another error
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"it is a folder\. Name another file with --out"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match=r"no folder .*nowhere\. Name another"):
        write_report(tmp_path, out=tmp_path / "nowhere" / "x.html")


@pytest.mark.slow
def test_a_link_is_followed_and_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "old.html").symlink_to("real/page.html")
    for _ in range(2):  # a page that is not there yet, and one that is
        write_report(run, out=tmp_path / "old.html")
    assert (tmp_path / "old.html").is_symlink()
    assert not (tmp_path / "real" / "page.html").is_symlink()
    assert (tmp_path / "real" / "page.html").read_bytes().startswith(b"<!DOCTYPE html>")
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["page.html"]


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to itself", "link to a device"])
def test_what_is_no_file_is_left_alone(run: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if "pipe" in kind:
        os.mkfifo(tmp_path / "pipe" if "link" in kind else out)
    if "link" in kind:
        out.symlink_to({"pipe": "pipe", "itself": "out", "device": os.devnull}[kind.split()[-1]])
    before = out.lstat()
    with pytest.raises(ConfigError, match=r"cannot write the page .*out: it is not a regular file\. Name another file"):
        write_report(run, out=out)
    with pytest.raises(ConfigError, match="not a regular file"):
        write_comparison([run, tmp_path], out=out)
    assert os.path.samestat(before, out.lstat())


def test_a_disk_that_is_full_leaves_the_old_page_and_no_part_of_the_new(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = short / "page.html"
    out.write_text("old", encoding="utf-8")
    before = sorted(path.name for path in short.iterdir())
    monkeypatch.setattr(files, "fsync", flush)
    with pytest.raises(ConfigError, match="No space left"):
        write_report(short, out=out)
    assert sorted(path.name for path in short.iterdir()) == before
    assert out.read_text(encoding="utf-8") == "old"


def test_a_run_without_records_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="is not a run with records"):
            write_report(path)
