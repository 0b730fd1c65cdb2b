"""A local server of the hub's protocol, for tests with the real huggingface_hub."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
from huggingface_hub import constants

COMMIT = "a" * 40


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's protocol that downloads use: listings by API, files by HEAD and GET with ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        server.asked.append((self.command, self.path, self.headers.get("Range")))
        listing = re.match(r"/api/models/([^/]+/[^/?]+)(/tree)?", self.path)
        file = re.match(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", self.path)
        repository = (listing or file)[1] if listing or file else ""
        files = server.repositories.get(repository)
        if repository in server.gated:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif files is None or (file and file[2] not in files):
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound" if files else "RepoNotFound"})
        elif file:
            self._file(files[file[2]])
        elif listing[2]:
            rows = [
                {"type": "file", "path": n, "size": len(b), "oid": digest_of(b)} for n, b in files.items()
            ]
            self._answer(200, json.dumps(rows).encode())
        else:
            info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._answer(200, json.dumps(info).encode())

    def _file(self, content):
        first = int(re.findall(r"\d+", self.headers.get("Range") or "0")[0])
        headers = {"ETag": f'"{digest_of(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        sent = None
        if self.command == "GET" and len(content) > 4096 and self.server.breaks:
            self.server.breaks -= 1
            sent = 0 if first else len(content) // 2
        self._answer(206 if first else 200, content[first:], headers, sent)

    def _answer(self, status, body, headers=(), sent=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        self.close_connection = sent is not None


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def serving(cache, monkeypatch):
    """Serve a hub whose repositories are {name: {file: content}}, with a cache in a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories, server.asked, server.breaks, server.gated = {}, [], 0, set()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield server
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()
