"""Models on the Hugging Face Hub: `hf://OWNER/NAME[@REVISION]` names a model wherever a command takes a bundle.

A bundle is the folder of an exported model. huggingface_hub downloads and uploads it, with its own cache, its own token
and its environment variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Only the files that a bundle's manifest
lists are downloaded. Other files of the repository are ignored. A downloaded bundle is verified like a local bundle:
by its hashes, and by the losses that it stores for some fixed tokens (probe).

Every function raises TxlError with a message of one line if a package, the repository, the revision, the token or the
network is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.errors import CheckpointError, ConfigError, TxlError, first_line, translate_errors
from txl_dist.io.files import path_of, read_json
from txl_dist.io.manifest import FOR_PEOPLE, MANIFEST

NAME_OF_A_REPOSITORY = re.compile(
    r"(?!.*(?:--|\.\.))(?!.*\.git$)\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b",
    re.ASCII,
)
"""Pattern of OWNER/NAME, as the Hub allows it."""
SCHEME = "hf:/"
"""Beginning of a Hub address. It has only one slash, because a `Path` drops the second slash of `hf://`."""
_READ_BY_IMPORTERS = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.txt", "*.model", "*.pkl"]
"""Patterns of the files that are downloaded if a repository has no manifest. `txl import` reads such files."""


class Address(NamedTuple):
    """Address of a model on the Hub."""

    repository: str
    """OWNER/NAME of the repository."""
    revision: str | None
    """Branch, tag or commit. None means the default branch."""

    def __str__(self) -> str:
        if self.revision:
            suffix = f"@{self.revision}"
        else:
            suffix = ""
        return f"hf://{self.repository}{suffix}"

    @property
    def name(self) -> str:
        """Name of the model, without its owner."""
        return self.repository.partition("/")[2]


def address_of(path: str | Path) -> Address | None:
    """Return the Hub address that a path contains, or None for a local path.

    Raises ConfigError for an incomplete address.
    """
    text = str(path)
    if not text.startswith(SCHEME):
        return None
    repository, at, revision = text.removeprefix(SCHEME).strip("/").partition("@")
    if not NAME_OF_A_REPOSITORY.fullmatch(repository) or (at and not revision):
        raise ConfigError(
            f"{text} does not name a model of the Hub. Write hf://OWNER/NAME or hf://OWNER/NAME@REVISION."
        )
    return Address(repository, revision or None)


def local_model(path: str | Path) -> Path:
    """Return a local path unchanged. For a Hub address, download the model and return its local folder.

    Raises ConfigError for an incomplete address or a missing package, CheckpointError if the download fails.
    """
    address = address_of(path)
    if address is None:
        return path_of(path)
    hub = _library()
    with _explained(f"cannot download {address}"):
        try:
            first = hub.hf_hub_download(address.repository, MANIFEST, revision=address.revision)
        except hub.errors.RemoteEntryNotFoundError:
            return Path(
                hub.snapshot_download(address.repository, revision=address.revision, allow_patterns=_READ_BY_IMPORTERS)
            )
        folder = Path(first).parent
        # The folder's name is the hash of a commit, so all files come from it, even if another commit is pushed.
        hub.snapshot_download(
            address.repository, revision=folder.name, allow_patterns=[MANIFEST, *FOR_PEOPLE, *_listed(first)]
        )
        return folder


def _listed(manifest: str) -> list[str]:
    """Return the names of the files in a manifest, as patterns for the download.

    Raises CheckpointError if the file is not a manifest.
    """
    what = f"{manifest} is not a manifest of txl_dist"
    with translate_errors(CheckpointError, what, of=(ValueError, KeyError, TypeError, AttributeError)):
        return [re.sub(r"([*?[])", r"[\1]", name) for name in read_json(Path(manifest))["files"]]


def check_login(repository: str) -> None:
    """Check that the user is logged in to the Hub, before an export that takes minutes.

    Raises ConfigError if `repository` is not OWNER/NAME or the package is missing, CheckpointError if the login fails.
    """
    if not NAME_OF_A_REPOSITORY.fullmatch(repository):
        raise ConfigError(f"--push-to-hub {repository} is not the name of a repository of the Hub. Write OWNER/NAME.")
    hub = _library()
    with _explained(f"cannot push to {repository}"):
        hub.HfApi(library_name="txl_dist").whoami()


def push_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder as one commit, and return the address of the commit. A missing repository is created.

    Hidden files are not uploaded. Raises CheckpointError if the Hub refuses the commit or cannot be reached.
    """
    hub = _library()
    api = hub.HfApi(library_name="txl_dist")
    remedy = f". The folder {folder} is complete. To push it again, run `hf upload {repository} {folder}`"
    with _explained(f"cannot push to {repository}", remedy):
        api.create_repo(repository, exist_ok=True, private=private or None)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=[".*"],
            commit_message="Export a model of txl_dist",
        )
        return str(commit.commit_url)


def _library() -> Any:
    """Import and return huggingface_hub. Raises ConfigError if it is not installed."""
    remedy = 'Run `pip install "txl_dist[hub]"`'
    with translate_errors(ConfigError, "models on the Hub need a package", remedy, of=(ImportError,)):
        import huggingface_hub
        import huggingface_hub.errors
    return huggingface_hub


@contextmanager
def _explained(what: str, remedy: str = "") -> Iterator[None]:
    """Replace every exception of the block by a CheckpointError with a message of one line.

    A TxlError is raised unchanged.
    """
    try:
        yield
    except TxlError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {_reason(error)}{remedy}.") from error


def _reason(error: Exception) -> str:
    """Return the reason why a request failed, with the remedy."""
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login`, or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"there is no token. Please {login}"
    if isinstance(error, errors.GatedRepoError):
        return f"its owner grants access on request. Ask on the page of the repository, then {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such repository, or it is private. Check the name, or {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision. Name a branch, a tag or a commit of the repository"
    if status in (401, 403):
        return f"the Hub refuses the token ({status}). Use an account that may do this: {login}"
    if isinstance(error, errors.HfHubHTTPError) and status is not None:
        return f"{constants.ENDPOINT} answers {status}: {error.server_message or first_line(error)}"
    if isinstance(error, errors.IncompleteSnapshotError):
        return f"the download is incomplete, and {constants.ENDPOINT} cannot be reached. Try again with a connection"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            f"{constants.ENDPOINT} cannot be reached, and the model is not in the cache {constants.HF_HUB_CACHE}. "
            "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        )
    return f"{constants.ENDPOINT}: {first_line(error)}. The same command continues the download"
