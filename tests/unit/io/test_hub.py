"""Models on the Hub, with a stand-in server for the Hub's HTTP interface: push, download, verification and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import txl_dist
from tests.helpers.bundles import Made, make
from tests.helpers.hub import TOKEN, Hub, hub_server, sha_of
from txl_dist.cli.main import main
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import load_bundle
from txl_dist.io.hub import Address, address_of, local_model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, which huggingface_hub takes for the Hub, with an empty cache and a token."""
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "tokens"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("made") / "a")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("spelt", "wanted"),
    [
        ("hf://me/model", Address("me", None)),
        ("hf://me/model@v1.0", Address("me", "v1.0")),
        ("hf://me/model@refs/pr/3", Address("me", "refs/pr/3")),
        ("hf://me/model/", Address("me", None)),
    ],
)
def test_an_address_survives_being_a_path(spelt: str, wanted: Address) -> None:
    wanted = wanted._replace(repository="me/model")
    assert address_of(spelt) == address_of(Path(spelt)) == wanted
    assert wanted.name == "model"


@pytest.mark.parametrize("path", ["runs/first", "./hf:/x/y", "/abs/hf://x", "hf", "model@v1"])
def test_a_path_is_no_address(path: str) -> None:
    assert address_of(path) is None
    assert local_model(path) == Path(path)


@pytest.mark.parametrize(
    "spelt", ["hf://", "hf://model", "hf://a/b/c", "hf://a/b@", "hf://a/b c", "hf://../b", "hf://a/b.git", "hf://a/\n"]
)
def test_half_an_address_is_refused_with_the_right_form(spelt: str) -> None:
    with pytest.raises(ConfigError, match="hf://OWNER/NAME"):
        local_model(spelt)


def test_a_pushed_bundle_is_downloaded_and_is_the_same_model(hub: Hub, made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (made.bundle / ".hidden").touch()
    assert main(["export", str(made.bundle), str(out), "--push-to-hub", "me/model", "--license", "mit"]) == 0
    pushed = hub.files("me/model")
    assert {name: pushed[name] for name in files_of(out)} == files_of(out)
    assert ".hidden" not in pushed
    hub.commit("me/model", pushed | {"figure.png": b"of the owner", "README.md": b"edited there"})
    here, there = txl_dist.load(str(out)), txl_dist.load("hf://me/model")
    assert there.generate("abc", max_tokens=5).text == here.generate("abc", max_tokens=5).text
    folder = local_model("hf://me/model")
    assert not (folder / "figure.png").exists()
    assert (folder / "README.md").read_bytes() == b"edited there"
    assert load_bundle("hf://me/model@main").card.license == "mit"


def test_a_revision_names_the_model_of_its_commit(hub: Hub, made: Made, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["export", str(made.bundle), str(tmp_path / name), "--name", name]) == 0
        hub.commit("me/model", files_of(tmp_path / name))
    assert load_bundle(f"hf://me/model@{sha_of('me/model', 0)}").card.name == "one"
    assert load_bundle("hf://me/model").card.name == "two"


def test_every_command_that_takes_a_bundle_takes_an_address(
    hub: Hub, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit("me/model", files_of(made.bundle))
    monkeypatch.chdir(tmp_path)
    corpus = str(made.corpus.folder)
    for words in (
        ["generate", "hf://me/model", "--prompt", "abc", "--max-tokens", "2"],
        ["verify", "hf://me/model"],
        ["report", "hf://me/model"],
        ["evaluate", "hf://me/model", "--data", corpus],
        ["export", "hf://me/model", "again"],
    ):
        assert main(words) == 0, words
    assert (tmp_path / "model.html").is_file()
    assert load_bundle("again").source == load_bundle("hf://me/model").source
    first = len(hub.requests)
    assert not [line for line in hub.requests[:first] if line.startswith("POST")]
    capsys.readouterr()


def test_a_model_in_the_cache_needs_no_network(hub: Hub, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("me/model", files_of(made.bundle))
    load_bundle("hf://me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load_bundle("hf://me/model")
    with pytest.raises(CheckpointError, match="cannot be reached, and the model is not in the cache"):
        load_bundle("hf://me/other")


def one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on standard error of a command that fails with exit code 2."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "hf://me/none"], "cannot download hf://me/none: there is no such repository, or it is private"),
        (["generate", "hf://me/model@v9"], "cannot download hf://me/model@v9: the repository has no such revision"),
        (["generate", "hf://model"], "Write hf://OWNER/NAME"),
        (["generate", "hf://me/data"], "it has no config.toml (a run), state.json (a checkpoint), model.safetensors"),
        (["evaluate", "hf://me/none", "--data", "x"], "there is no such repository"),
        (["serve", "hf://me/none"], "there is no such repository"),
        (["verify", "hf://me/none"], "there is no such repository"),
        (["export", "hf://me/none", "x"], "there is no such repository"),
        (["import", "hf://me/none", "x", "--format", "huggingface"], "there is no such repository"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    hub: Hub, made: Made, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit("me/model", files_of(made.bundle))
    hub.commit("me/data", {"notes.txt": b"no model"})
    assert said in one_line(words, capsys)


def test_a_private_model_needs_a_token(hub: Hub, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("me/model", files_of(made.bundle))
    hub.private.add("me/model")
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(CheckpointError, match="hf auth login"):
        load_bundle("hf://me/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    load_bundle("hf://me/model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not match its sha256"),
        (lambda data: data[: len(data) // 2], "bytes instead of"),
        (lambda data: b"", "bytes instead of"),
    ],
)
def test_a_damaged_model_of_the_hub_is_refused_as_a_local_one(hub: Hub, made: Made, change, said: str) -> None:
    files = files_of(made.bundle)
    hub.commit("me/model", files | {"model.safetensors": change(files["model.safetensors"])})
    with pytest.raises(CheckpointError, match=said):
        load_bundle("hf://me/model")


def test_a_download_that_breaks_is_one_line_and_the_next_one_is_whole(
    hub: Hub, made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.commit("me/model", files_of(made.bundle))
    hub.cut_after = 2000
    assert "cannot download hf://me/model" in one_line(["generate", "hf://me/model"], capsys)
    hub.cut_after = -1
    load_bundle("hf://me/model")


def test_no_network_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library tries again, later and later
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert "http://127.0.0.1:9 cannot be reached" in one_line(["generate", "hf://me/model"], capsys)


@pytest.mark.parametrize(
    ("token", "status", "said"),
    [
        ("", 200, "cannot push to me/new: there is no token. Please log in with `hf auth login`, or set HF_TOKEN"),
        ("bad", 200, "cannot push to me/new: the Hub refuses the token (401)"),
        (TOKEN, 403, "cannot push to me/new: the Hub refuses the token (403)"),
        (TOKEN, 400, "answers 400: the Hub has a bad day"),
    ],
)
def test_a_push_that_fails_is_one_line(
    hub: Hub, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    token: str, status: int, said: str,
) -> None:  # fmt: skip
    hub.push_status = status
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
    out = tmp_path / "out"
    line = one_line(["export", str(made.bundle), str(out), "--push-to-hub", "me/new"], capsys)
    assert said in line
    assert out.exists() == (token == TOKEN), "without a token nothing is exported; what is written is kept"
    assert ("`hf upload me/new" in line) == (token == TOKEN)


@pytest.mark.parametrize("name", ["model", "a/b/c", "https://huggingface.co/a/b", "a/b@main", "-a/b"])
def test_a_repository_to_push_to_is_owner_and_name(made: Made, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(["export", str(made.bundle), "out", f"--push-to-hub={name}"], capsys)
    assert "OWNER/NAME" in line
    assert not Path("out").exists()


@pytest.mark.slow
def test_processes_with_the_librarys_own_environment_push_and_load(hub: Hub, made: Made, tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "txl_dist"]
    for words in (
        ["export", str(made.bundle), str(tmp_path / "out"), "--push-to-hub", "me/model", "--private"],
        ["generate", "hf://me/model", "--prompt", "abc", "--max-tokens", "3"],
    ):
        done = subprocess.run([*command, *words], env=os.environ | variables, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
    assert hub.private == {"me/model"}
    assert json.loads(hub.files("me/model")["card.json"]) == {}
