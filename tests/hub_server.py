"""A local HTTP server with the part of the Hub's API that uploads and downloads of small repositories take."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import transformers.utils.hub
from huggingface_hub import constants, hf_api

Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """Repositories by name: branch -> files. Every commit can be asked for by its hash."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.branches: dict[str, dict[str, Files]] = {}
        self.commits: dict[str, Files] = {}

    def files(self, repository: str, revision: str = "main") -> Files:
        """The files of a branch or a commit."""
        return self.commits.get(revision) or self.branches[repository][revision]

    def commit(self, repository: str, revision: str, added: Files, deleted: list[str]) -> str:
        files = self.branches.setdefault(repository, {}).get(revision, {})
        kept = {name: data for name, data in files.items() if not any(_covers(path, name) for path in deleted)}
        self.branches[repository][revision] = kept | added
        return self.sha(repository, revision)

    def sha(self, repository: str, revision: str) -> str:
        files = self.files(repository, revision)
        sha = hashlib.sha1(b"".join(n.encode() + data for n, data in sorted(files.items()))).hexdigest()
        self.commits[sha] = files
        return sha


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.parts
        if parts == ["api", "repos", "create"]:
            given = json.loads(body)
            name = f"{given.get('organization') or 'user'}/{given['name']}"
            self.server.branches.setdefault(name, {"main": {}})
            return self.reply({"url": f"{self.server.endpoint}/{name}"})
        if parts[:2] == ["api", "validate-yaml"]:
            return self.reply({"errors": [], "warnings": []})
        repository, action, revision = "/".join(parts[2:4]), parts[4], parts[5]
        if action == "branch":
            self.server.branches[repository].setdefault(revision, dict(self.server.files(repository)))
            return self.reply({})
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.reply(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            )
        assert action == "commit", self.path
        lines = [json.loads(line) for line in body.splitlines()]
        added = {v["path"]: base64.b64decode(v["content"]) for v in (line["value"] for line in lines) if "content" in v}
        deleted = [line["value"]["path"] for line in lines if line["key"].startswith("deleted")]
        sha = self.server.commit(repository, revision, added, deleted)
        return self.reply({"commitUrl": f"{self.server.endpoint}/{repository}/commit/{sha}", "commitOid": sha})

    @property
    def parts(self) -> list[str]:
        return [unquote(part) for part in self.path.split("?")[0].strip("/").split("/")]

    def answer(self) -> None:
        parts = self.parts
        try:
            if parts[:2] == ["api", "models"]:
                return self.reply(self.about("/".join(parts[2:4]), parts[4:]))
            repository, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            data, sha = self.server.files(repository, revision)[name], self.server.sha(repository, revision)
        except KeyError:
            code = "EntryNotFound" if "/".join(parts[:2]) in self.server.branches else "RepoNotFound"
            return self.reply({"error": "not found"}, status=404, headers={"X-Error-Code": code})
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha}
        return self.reply(data, headers=headers)

    def about(self, repository: str, rest: list[str]) -> Any:
        revision = rest[1] if len(rest) > 1 else "main"
        files = self.server.files(repository, revision)
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            names = [name for name in files if name.startswith(f"{below}/" if below else "")]
            return [
                {"type": "file", "path": n, "size": len(files[n]), "oid": hashlib.sha1(files[n]).hexdigest()}
                for n in names
            ]
        siblings = [{"rfilename": name} for name in files]
        return {"id": repository, "sha": self.server.sha(repository, revision), "siblings": siblings}

    def reply(self, content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def _covers(path: str, name: str) -> bool:
    return name == path or name.startswith(path.rstrip("/") + "/")


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub that all libraries use while the block runs."""
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    values = {"ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
    try:
        with (
            patch.multiple(constants, **values),
            patch.object(transformers.utils.hub, "_hf_api", None),
            patch.object(hf_api.api, "endpoint", hub.endpoint),
        ):
            yield hub
    finally:
        hub.shutdown()
        hub.server_close()
