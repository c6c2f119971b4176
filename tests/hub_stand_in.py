"""A small local server with the Hub's HTTP API for uploads. No request goes to the network.

It answers the requests of an upload by `huggingface_hub`: create, validate-yaml, preupload, the LFS batch with upload
and verification, and the commit. It keeps the files of the commit.
"""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_standin"
LARGE = (".safetensors", ".bin")


class Hub(ThreadingHTTPServer):
    """`repos`: files by path, `objects`: large files by sha256, `log`: requests as "METHOD path"."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.private, self.objects, self.log, self.commits = {}, {}, {}, [], []
        self.refuse = {}  # path prefix -> (status, message)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content=None, status=200, **headers):
        body = json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self):
        hub, path = self.server, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.log.append(f"{self.command} {path}")
        for prefix, (status, message) in hub.refuse.items():
            if path.startswith(prefix):
                return self.answer({"error": message}, status, X_Error_Message=message)
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401, X_Error_Message="Invalid credentials")
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path.startswith("/objects/"):
            assert hashlib.sha256(body).hexdigest() == parts[1]
            hub.objects[parts[1]] = body
            return self.answer()
        if path.startswith("/verify/"):
            asked = json.loads(body)
            stored = hub.objects.get(asked["oid"])
            return self.answer(status=200 if stored is not None and len(stored) == asked["size"] else 404)
        if path.endswith("/info/lfs/objects/batch"):
            return self.answer({"transfer": "basic", "objects": [self.action(o) for o in json.loads(body)["objects"]]})
        if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in hub.repos:
            if parts[4] == "preupload":
                files = [f["path"] for f in json.loads(body)["files"]]
                modes = [{"path": f, "uploadMode": "lfs" if f.endswith(LARGE) else "regular"} for f in files]
                return self.answer({"files": [mode | {"shouldIgnore": False, "oid": None} for mode in modes]})
            if parts[4] == "commit":
                return self.commit("/".join(parts[2:4]), parts[5], body)
        return self.answer({"error": "not found"}, 404, X_Error_Code="RepoNotFound")

    do_GET = do_POST = do_PUT = handle_any

    def create(self, asked):
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repos:
            return self.answer({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
        self.server.repos[name], self.server.private[name] = (
            {},
            asked.get("private") is True or asked.get("visibility") == "private",
        )
        return self.answer({"url": f"{self.server.url}/{name}", "name": name})

    def action(self, wanted):
        if wanted["oid"] in self.server.objects:
            return wanted
        upload = {"href": f"{self.server.url}/objects/{wanted['oid']}", "header": {}}
        return wanted | {
            "actions": {"upload": upload, "verify": {"href": f"{self.server.url}/verify/x", "header": {}}}
        }

    def commit(self, name, revision, body):
        files = {}
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        self.server.repos[name] |= files  # all files of a commit at once
        oid = hashlib.sha1(body).hexdigest()
        self.server.commits.append((name, revision, summary, sorted(files)))
        return self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"})


@contextmanager
def hub():
    """A running server, which is stopped at the end of the block."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
