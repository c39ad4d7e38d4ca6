"""File safety: no file outside the folder is overwritten, no FIFO is opened, and no name leads out of its folder."""

from __future__ import annotations

import ast
import errno
import os
import shutil
from pathlib import Path
from typing import IO

import pytest

import txl_dist
from txl_dist.config.load import Config, config_to_toml, load_config
from txl_dist.console.logging import GrowingFile
from txl_dist.data.format import INDEX_NAME
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare.reindex import reindex_corpus
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import ConfigError, DataError, translate_errors
from txl_dist.io import files
from txl_dist.io.files import (
    atomic_replace,
    canonical_hash,
    create_file,
    hashed_json,
    parse_json,
    parse_toml,
    read_bytes,
    resolve_inside,
)
from txl_dist.io.manifest import MANIFEST, describe_file, files_of, problems_of, write_manifest
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.train.run_dir import open_run_dir

PACKAGE = Path(txl_dist.__file__).parent
VICTIM = b"precious"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "outside" / "victim"
    path.parent.mkdir()
    path.write_bytes(VICTIM)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"text number {number} of a few words\n" * 5, encoding="utf-8")
    prepare_corpus(tmp_path / "corpus", inputs=[text], kind="byte", valid_fraction=0.2, num_workers=1)
    return tmp_path / "corpus"


def test_reindex_writes_through_no_link_under_any_of_its_names(corpus: Path, victim: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    shutil.copy(corpus / "tokenizer.json", tokenizer)
    names = [path.name for path in corpus.iterdir() if path.suffix != ".tar"]
    for name in names:
        (corpus / name).unlink()
        (corpus / name).symlink_to(victim)
    temporaries = [f"{name}.tmp" for name in names]
    temporaries += [f"{path.name}.idx.reindexed" for path in corpus.glob("*.tar")] + [f"{INDEX_NAME}.idx.reindexed"]
    for name in temporaries:
        (corpus / name).symlink_to(victim)
    reindex_corpus(corpus, tokenizer_path=tokenizer, overwrite=True)
    assert victim.read_bytes() == VICTIM
    assert verify_corpus(corpus) == []
    assert [path.name for path in corpus.iterdir() if path.is_symlink() and ".tmp" not in path.name] == []


def test_a_new_run_writes_through_no_link_under_any_of_its_names(tmp_path: Path, victim: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "config.toml.tmp"):
        (run / name).symlink_to(victim)
    open_run_dir(run, config_to_toml(Config()))
    assert victim.read_bytes() == VICTIM
    assert not (run / "config.toml").is_symlink()
    assert sorted(path.name for path in run.iterdir()) == ["config.toml"]


@pytest.mark.parametrize("where", ["the folder", "its files"])
def test_prepare_writes_through_no_link_where_it_works(tmp_path: Path, victim: Path, where: str) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 30, encoding="utf-8")
    scratch = tmp_path / ".corpus.prepare"
    if where == "the folder":
        scratch.symlink_to(victim.parent)
    else:
        scratch.mkdir()
        for name in ("owner", "lock", "job.json.tmp", "tokenizer.json.tmp", "dropped.u64", "part-000000.json.tmp"):
            (scratch / name).symlink_to(victim)
        (scratch / "corpus").symlink_to(victim.parent)
    settings = {"kind": "byte", "valid_inputs": [tmp_path / "a.txt"], "num_workers": 1, "duplicates": "ignore"}
    (tmp_path / "b.txt").write_text("other text\n" * 30, encoding="utf-8")
    prepare_corpus(tmp_path / "corpus", inputs=[tmp_path / "b.txt"], **settings)
    assert victim.read_bytes() == VICTIM
    assert [path.name for path in victim.parent.iterdir()] == ["victim"]


def test_what_a_crash_left_under_a_temporary_name_blocks_no_write(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"half of an older o")
    atomic_replace(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_is_created_only_once_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "file", b"second")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"first"}


def test_a_file_that_is_created_is_never_seen_without_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    flush = files.fsync

    def look(stream: IO[bytes]) -> None:
        seen.append((tmp_path / "file").exists())
        flush(stream)

    monkeypatch.setattr(files, "fsync", look)
    create_file(tmp_path / "file", b"content")
    assert seen == [False]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError("full")

    atomic_replace(tmp_path / "file", b"old")
    monkeypatch.setattr(files, "fsync", full)
    with pytest.raises(OSError, match="full"):
        atomic_replace(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_the_package_writes_files_by_one_way_only() -> None:
    """Every call that could write through a link stands here, with its reason."""
    known = {
        "console/echo.py": ["open"],  # os.devnull
        "io/files.py": ["open", "open"],  # `write_output`: the file that a user named; `create_file`: mode x
        "planning/doctor/disk.py": ["open", "open", "write_bytes", "write_bytes"],  # in a folder of tempfile's
        "evaluation/options.py": ["open"],  # --json FILE: is it writable?
        "evaluation/log_probs.py": ["savez"],  # into memory
        "cli/prompts.py": ["open"],  # --out FILE
        "launcher/deepspeed_files.py": ["write_text", "write_text"],  # in a folder of tempfile's
        "launcher/sweep.py": ["open"],  # what a run says, in a file that is made anew
        "model/kernels/attention_launch.py": ["write_text"],  # in a folder of tempfile's
        "distributed/processes.py": ["write_text"],  # the name of this process in /proc
        "data/storage/remote.py": ["open"],  # into the part file that cache.py has made anew
    }
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        if names := sorted(filter(None, map(_writes, calls))):
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == known


def _writes(call: ast.Call) -> str:
    """The name of a call that may write to a path it is given."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = [each.value for each in [*call.args, *(keyword.value for keyword in call.keywords)] if _is_text(each)]
    if name == "open" and any(set(word) <= set("rwaxbt+") and set(word) & set("wax") for word in words):
        return name
    is_method = isinstance(call.func, ast.Attribute)
    return name if is_method and name in ("write_text", "write_bytes", "tofile", "savez") else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_what_is_no_regular_file_is_refused_at_once_wherever_one_is_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        import socket

        server = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(tmp_path)  # the path of a socket is short
        server.bind("it")
        server.close()
    with pytest.raises(OSError, match=r"regular file|directory|No such device"):
        read_bytes(path)
    refusal = "is a folder without a tokenizer" if kind == "folder" else "cannot read the tokenizer"
    with pytest.raises(DataError, match=refusal):
        load_tokenizer(path)
    if kind != "device":
        with pytest.raises(OSError, match=r"regular file|directory|No such device"):
            GrowingFile(path).append(b"line")


def test_a_fifo_among_the_files_of_a_manifest_is_damage(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b"")
    write_manifest(tmp_path, {name: describe_file(tmp_path / name) for name in files_of(tmp_path)})
    (tmp_path / "state.json").unlink()
    os.mkfifo(tmp_path / "state.json")
    os.mkfifo(tmp_path / "stranger")
    problems = "; ".join(problems_of(tmp_path))
    assert "stranger is not in the manifest" in problems
    assert "state.json cannot be read (Not a regular file)" in problems


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", "a/../../victim", "..", "", "a\0b", "link", "into/x"])
def test_a_name_in_a_manifest_never_leaves_its_folder(tmp_path: Path, victim: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(victim)
    (folder / "into").symlink_to(victim.parent)
    write_manifest(folder, {name: {"bytes": len(VICTIM), "sha256": files.sha256_of_bytes(VICTIM)}})
    assert any("in this folder" in problem or "out of this folder" in problem for problem in problems_of(folder))
    with pytest.raises(ValueError, match="this folder"):
        resolve_inside(folder, name, nested=True)


def test_a_link_inside_a_folder_is_a_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    assert resolve_inside(tmp_path, "link").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["../train", "/train", "train\0", "a/b", "..", ".hidden", "x" * 300])
def test_neither_splits_nor_shards_of_an_index_name_files_elsewhere(corpus: Path, name: str) -> None:
    good = parse_json((corpus / INDEX_NAME).read_bytes())
    for splits in ({name: good["splits"]["train"]}, _renamed(good["splits"], name)):
        index = good | {"splits": splits}
        index["self_sha256"] = canonical_hash(index)
        (corpus / INDEX_NAME).write_bytes(hashed_json(index))
        with pytest.raises(DataError, match="a file outside the corpus folder"):
            open_corpus(corpus)


def _renamed(splits: dict[str, dict[str, object]], name: str) -> dict[str, object]:
    shard = splits["train"]["shards"][0] | {"name": name}  # type: ignore[index]
    return {"train": splits["train"] | {"shards": [shard]}}


def test_a_shard_that_is_a_link_to_elsewhere_is_refused(corpus: Path, tmp_path: Path) -> None:
    shard = next(corpus.glob("train-*.tar"))
    shard.rename(tmp_path / "elsewhere.tar")
    shard.symlink_to(tmp_path / "elsewhere.tar")
    with pytest.raises(DataError, match="leads out of this folder"):
        open_corpus(corpus).split("train").check_files()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 70 + "]" * 70, "1" * 5000, "\ufeff[", "{"])
def test_json_that_is_deep_or_broken_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text.encode())


def test_toml_that_is_deep_or_broken_is_a_value_error() -> None:
    for text in ("a = " + "[" * 100_000, "a = " + "[" * 70 + "]" * 70, "a = \x00"):
        with pytest.raises(ValueError, match=r".+"):
            parse_toml(text)


def test_a_config_file_that_is_a_fifo_or_deep_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000, encoding="utf-8")
    for name in ("fifo.toml", "deep.toml"):
        with pytest.raises(ConfigError, match=name) as error:
            load_config(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_manifest_lists_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert files_of(tmp_path) == []
    assert problems_of(tmp_path)[0].endswith(f"{MANIFEST} is missing")


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (FileNotFoundError(2, "No such file"), DataError, "cannot read it: No such file. Look there."),
        (ValueError("no number"), DataError, "cannot read it: no number. Look there."),
        (ConfigError("ours"), ConfigError, "ours"),
        (TypeError("a defect"), TypeError, "a defect"),
    ],
)
def test_an_error_is_told_by_what_reason_and_remedy_but_ours_and_defects_pass_as_they_are(
    error: Exception, told: type[Exception], message: str
) -> None:
    known = (OSError, ValueError)
    with pytest.raises(told) as raised, translate_errors(DataError, "cannot read it", "Look there.", of=known):
        raise error
    assert str(raised.value) == message
