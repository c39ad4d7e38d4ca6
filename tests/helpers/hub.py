"""A stand-in for the Hugging Face Hub: the endpoints that huggingface_hub uses to push and to download a model.

Repositories are in memory, each as a list of commits. The only valid token is `good`. Other tokens are refused as on
the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "good"


@dataclass
class Hub:
    """State of the server: repositories, uploads and received requests."""

    endpoint: str = ""
    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    """Commits of each repository, oldest first. A commit contains files by name."""
    private: set[str] = field(default_factory=set)
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Large files by their sha256."""
    requests: list[str] = field(default_factory=list)
    cut_after: int = -1
    """Number of bytes of a file after which a connection breaks. The value -1 means never."""
    push_status: int = 200
    """Status with which a commit is answered."""

    def files(self, repository: str) -> dict[str, bytes]:
        return self.repositories[repository][-1]

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        self.repositories.setdefault(repository, []).append(files)
        return sha_of(repository, len(self.repositories[repository]) - 1)


def sha_of(repository: str, number: int) -> str:
    return hashlib.sha1(f"{repository} {number}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if path.startswith("/upload/"):
            self.hub.uploads[path.removeprefix("/upload/")] = body
            return self._send(200, {})
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if path == "/api/whoami-v2":
            return self._send(200, {"name": "me", "type": "user"}) if token == TOKEN else self._send(401, {})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if path.startswith("/api/models/"):
            return self._api(path.removeprefix("/api/models/"), body, token)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if "/resolve/" in path:
            repository, _, rest = path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            return self._resolve(repository, revision, name, token)
        return self._send(404, {})

    def _create(self, asked: dict[str, Any], token: str) -> None:
        if token != TOKEN:
            return self._send(401, {})
        repository = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if repository in self.hub.repositories:
            return self._send(409, {"url": f"{self.hub.endpoint}/{repository}"})
        self.hub.repositories[repository] = [{".gitattributes": b"*.safetensors filter=lfs\n"}]
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(repository)
        return self._send(200, {"url": f"{self.hub.endpoint}/{repository}", "name": repository, "id": repository})

    def _api(self, path: str, body: bytes, token: str) -> None:
        parts = path.split("/")
        repository, verb = "/".join(parts[:2]), parts[2] if len(parts) > 2 else ""
        number = self._number(repository, parts[3] if len(parts) > 3 else "main", token)
        if number is None:
            return None
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [(one["path"], "lfs" if one["path"].endswith(".safetensors") else "regular") for one in files]
            told = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]
            return self._send(200, {"files": told})
        if verb == "commit":
            return self._commit(repository, body, token)
        files = self.hub.repositories[repository][number]
        if verb == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._send(200, entries)
        siblings = [{"rfilename": name} for name in files]
        return self._send(200, {"id": repository, "sha": sha_of(repository, number), "siblings": siblings})

    def _commit(self, repository: str, body: bytes, token: str) -> None:
        if token != TOKEN:
            return self._send(403, {})
        if self.hub.push_status != 200:
            return self._send(self.hub.push_status, {"error": "the Hub has a bad day"})
        files = dict(self.hub.files(repository))
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        sha = self.hub.commit(repository, files)
        return self._send(200, {"commitUrl": f"{self.hub.endpoint}/{repository}/commit/{sha}", "commitOid": sha})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.endpoint}/upload/{one['oid']}"}}}
            for one in asked["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _resolve(self, repository: str, revision: str, name: str, token: str) -> None:
        number = self._number(repository, revision, token)
        if number is None:
            return None
        data = self.hub.repositories[repository][number].get(name)
        if data is None:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha_of(repository, number)})
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": sha_of(repository, number)}
        if self.command == "GET" and self.hub.cut_after >= 0 and len(data) > self.hub.cut_after:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[: self.hub.cut_after])
            self.close_connection = True
            return None
        return self._send(200, data, headers)

    def _number(self, repository: str, revision: str, token: str) -> int | None:
        """Return the number of a revision's commit. If there is none, send the error and return None."""
        commits = self.hub.repositories.get(repository)
        if commits is None or (repository in self.hub.private and token != TOKEN):
            self._send(401 if not token else 404, {}, {"X-Error-Code": "RepoNotFound"})
            return None
        known = {sha_of(repository, number): number for number in range(len(commits))} | {"main": len(commits) - 1}
        if revision not in known:
            self._send(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return known[revision]

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if not isinstance(content, bytes):
            self.send_header("Content-Type", "application/json")
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Yield a hub on a free port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
