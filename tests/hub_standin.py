"""A stand-in for the Hugging Face Hub on loopback, for tests of push_to_hub and from_pretrained("user/name").

It keeps model repositories in memory, on the branch `main` alone, and speaks what huggingface_hub asks for in

    whoami, create_repo, delete_repo           /api/whoami-v2, /api/repos/create, /api/repos/delete
    model_info, list_repo_tree and _files      /api/models/{name}[/revision/{revision}], .../tree/{revision}[/{path}]
    get_paths_info                             /api/models/{name}/paths-info/{revision}
    upload_folder, create_commit               /api/validate-yaml, /api/models/{name}/preupload/main, .../commit/main
      with LFS files by the "basic" transfer   /{name}.git/info/lfs/objects/batch, PUT /lfs/{sha256}
    hf_hub_download, snapshot_download         GET and HEAD /{name}/resolve/{revision}/{path}, with Range

Anything else (branches, pull requests, datasets, Spaces, Xet storage) gets a 404 that says so. Where hf_xet is
installed the client uploads through it whatever the server says, unless HF_HUB_DISABLE_XET=1 is set before
huggingface_hub is imported: start clients as fresh processes, with `HubStandin.environment`.
"""

import base64
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]
Query = dict[str, list[str]]
Reply = tuple[int, Any, dict[str, str]]  # status, bytes or what becomes JSON, headers

LARGEST_BODY = 256 * 2**20
LFS_SUFFIXES = (".bin", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth", ".safetensors")
ROUTES: list[tuple[str, str, Callable[..., Reply]]] = []


def speaks(methods: str, path: str) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
    """Register an endpoint, which is called with what `path` names in braces, and with body, query and span."""
    pattern = path.replace("{name}", r"(?P<name>[\w.-]+/[\w.-]+)").replace("{revision}", "(?P<revision>[^/]+)")

    def register(endpoint: Callable[..., Reply]) -> Callable[..., Reply]:
        ROUTES.append((methods, pattern.replace("{path}", "(?P<path>.+)"), endpoint))
        return endpoint

    return register


def refusal(status: int, message: str, code: str = "") -> Reply:
    """Answer with an error, in the headers from which the client picks its exception."""
    return status, {"error": message}, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


def is_lfs(path: str, sample: bytes, size: int) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > 10 * 2**20 or b"\0" in sample[:512]


def file_entry(path: str, content: bytes) -> dict[str, Any]:
    """Describe a file as tree and paths-info do. The git blob of an LFS file is its pointer."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    if is_lfs(path, content, len(content)):
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n"
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": len(pointer)}
        content = pointer.encode()
    return entry | {"oid": hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()}


class HubStandin:
    """A Hub that lives as long as the `with` block.

    `repositories` may be written to as well as read: a repository's commit sha is a hash of its content. `private`
    holds the names of the private repositories, `requests` one "METHOD path" for each request, in order.
    """

    endpoint: str

    def __init__(self) -> None:
        self.repositories: dict[str, Files] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()  # held while a request is answered, not while it is received or sent
        self._commits: dict[tuple[str, str], Files] = {}
        self._lfs_objects: Files = {}

    def __enter__(self) -> "HubStandin":
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections.copy():  # clients keep them open
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def environment(self, home: str | os.PathLike[str]) -> dict[str, str]:
        """Return the environment for a client process that keeps its cache in `home` and knows no other Hub."""
        foreign = re.compile(r"HF_|HUGGING|TRANSFORMERS_|(https?|all|no)_proxy$", re.IGNORECASE)
        kept = {key: value for key, value in os.environ.items() if not foreign.match(key)}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": "hf_standin", "HF_HOME": os.fspath(home)}
        return kept | ours | {"HF_HUB_DISABLE_XET": "1"}

    def snapshot(self, name: str, revision: str | None) -> tuple[str, Files]:
        """Return the commit sha and the files of `main`, or of a commit whose sha was handed out before."""
        if revision not in (None, "main"):
            return revision, self._commits[name, revision]
        files = dict(self.repositories[name])
        blobs = "".join(f"{path}\0{file_entry(path, files[path])['oid']}\n" for path in sorted(files))
        sha = hashlib.sha1(blobs.encode()).hexdigest()
        self._commits[name, sha] = files
        return sha, files

    def answer(self, method: str, target: str, body: bytes, signed: bool, span: str) -> Reply:
        """Answer one request. `signed` says whether it bears a token (any will do), `span` is its Range header."""
        url = urlsplit(target)
        self.requests.append(f"{method} {url.path}")
        for methods, pattern, endpoint in ROUTES:
            if method not in methods.split() or not (match := re.fullmatch(pattern, url.path)):
                continue
            parts = {key: value and unquote(value) for key, value in match.groupdict().items()}
            name, revision = parts.get("name"), parts.get("revision") or "main"
            if name and (name not in self.repositories or (name in self.private and not signed)):
                return refusal(404 if signed else 401, "Repository not found", "RepoNotFound")
            if method in ("POST", "DELETE") and not signed:
                return refusal(401, "Invalid username or password.")
            if name and revision != "main" and (name, revision) not in self._commits:
                return refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return endpoint(self, **parts, body=body, query=parse_qs(url.query), span=span)
        return refusal(404, f"The stand-in does not speak {method} {url.path}")

    @speaks("GET", "/api/whoami-v2")
    def whoami(self, **_: Any) -> Reply:
        return 200, {"type": "user", "name": "user", "fullname": "user", "orgs": []}, {}

    @speaks("POST", "/api/repos/create")
    def create(self, body: bytes, **_: Any) -> Reply:
        wanted = json.loads(body)
        if wanted.get("type") not in (None, "model"):
            return refusal(400, "The stand-in keeps models only")
        name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        answer = {"url": f"{self.endpoint}/{name}", "name": name}
        if name in self.repositories:
            return 409, answer | {"error": "You already created this model repo"}, {}
        self.repositories[name] = {}
        if wanted.get("visibility") == "private" or wanted.get("private"):
            self.private.add(name)
        return 200, answer, {}

    @speaks("DELETE", "/api/repos/delete")
    def delete(self, body: bytes, **_: Any) -> Reply:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        if self.repositories.pop(name, None) is None:
            return refusal(404, "Repository not found", "RepoNotFound")
        self.private.discard(name)
        return 200, b"OK", {}

    @speaks("GET", "/api/models/{name}(/revision/{revision})?")
    def model_info(self, name: str, revision: str | None, **_: Any) -> Reply:
        sha, files = self.snapshot(name, revision)
        info = {"id": name, "author": name.split("/")[0], "sha": sha, "private": name in self.private, "gated": False}
        info |= {"tags": [], "library_name": "transformers", "siblings": [{"rfilename": path} for path in files]}
        if b'ForCausalLM"' in files.get("config.json", b""):
            info["pipeline_tag"] = "text-generation"
        return 200, info, {}

    @speaks("GET", "/api/models/{name}/tree/{revision}(/{path})?")
    def tree(self, name: str, revision: str, path: str | None, query: Query, **_: Any) -> Reply:
        _sha, files = self.snapshot(name, revision)
        folders = {str(parent) for file in files for parent in PurePosixPath(file).parents} - {"."}
        entries = [file_entry(file, content) for file, content in files.items()]
        entries += [{"type": "directory", "path": f, "oid": hashlib.sha1(f.encode()).hexdigest()} for f in folders]
        root = f"{path}/" if path else ""
        below = [entry for entry in entries if entry["path"].startswith(root)]
        if root and not below:
            return refusal(404, f"{path} does not exist on {revision}", "EntryNotFound")
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        shown = [entry for entry in below if recursive or "/" not in entry["path"].removeprefix(root)]
        return 200, sorted(shown, key=lambda entry: entry["path"]), {}

    @speaks("POST", "/api/models/{name}/paths-info/{revision}")
    def paths_info(self, name: str, revision: str, body: bytes, **_: Any) -> Reply:
        _sha, files = self.snapshot(name, revision)
        paths = parse_qs(body.decode()).get("paths", [])
        return 200, [file_entry(path, files[path]) for path in paths if path in files], {}

    @speaks("POST", "/api/validate-yaml")
    def validate_yaml(self, **_: Any) -> Reply:
        return 200, {"errors": [], "warnings": []}, {}

    @speaks("POST", "/api/models/{name}/preupload/main")
    def preupload(self, name: str, body: bytes, **_: Any) -> Reply:
        """Say which files go by LFS, and what is there already: the client leaves out what has not changed."""
        files, answer = self.repositories[name], []
        for file in json.loads(body)["files"]:
            path = file["path"]
            mode = "lfs" if is_lfs(path, base64.b64decode(file["sample"]), file["size"]) else "regular"
            entry = file_entry(path, files[path]) if path in files else {"oid": None}
            oid = entry.get("lfs", entry)["oid"]
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": answer}, {}

    @speaks("POST", r"/{name}\.git/info/lfs/objects/batch")
    def lfs_batch(self, body: bytes, **_: Any) -> Reply:
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(body)["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self._lfs_objects:
                wanted["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}", "header": {}}}
        return 200, {"transfer": "basic", "objects": objects}, {}

    @speaks("PUT", "/lfs/{path}")
    def lfs_put(self, path: str, body: bytes, **_: Any) -> Reply:
        if hashlib.sha256(body).hexdigest() != path:
            return refusal(400, f"The content does not have the sha256 {path}")
        self._lfs_objects[path] = body
        return 200, b"", {}

    @speaks("POST", "/api/models/{name}/commit/main")
    def commit(self, name: str, body: bytes, query: Query, **_: Any) -> Reply:
        """Apply one JSON object a line: all of them, or none where one is refused."""
        if "create_pr" in query:
            return refusal(400, "The stand-in has no pull requests")
        parent, files = self.snapshot(name, "main")
        files = dict(files)
        for item in map(json.loads, body.splitlines()):
            key, value = item["key"], item["value"]
            path = value.get("path", "").rstrip("/")
            gone = [file for file in files if file == path or (key == "deletedFolder" and file.startswith(f"{path}/"))]
            if key == "header":
                if value.get("parentCommit", parent) != parent:
                    return refusal(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[path] = base64.b64decode(value["content"])
            elif key == "lfsFile" and value["oid"] in self._lfs_objects:
                files[path] = self._lfs_objects[value["oid"]]
            elif key in ("deletedFile", "deletedFolder") and gone:
                files = {file: content for file, content in files.items() if file not in gone}
            elif key in ("deletedFile", "deletedFolder"):
                return refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            else:
                return refusal(400, f"{key} {path}: not an operation, or its LFS object was not uploaded")
        self.repositories[name] = files
        sha, _files = self.snapshot(name, "main")
        return 200, {"success": True, "commitOid": sha, "commitUrl": f"{self.endpoint}/{name}/commit/{sha}"}, {}

    @speaks("GET HEAD", "/{name}/resolve/{revision}/{path}")
    def resolve(self, name: str, revision: str, path: str, span: str, **_: Any) -> Reply:
        sha, files = self.snapshot(name, revision)
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if path not in files:
            status, answer, error = refusal(404, "Entry not found", "EntryNotFound")
            return status, answer, headers | error
        content, entry = files[path], file_entry(path, files[path])
        headers["ETag"] = f'"{entry["oid"]}"'
        if lfs := entry.get("lfs"):
            headers |= {"X-Linked-ETag": f'"{lfs["oid"]}"', "X-Linked-Size": str(lfs["size"])}
        if not (match := re.fullmatch(r"bytes=(\d+)-(\d*)|bytes=-(\d+)", span)):
            return 200, content, headers
        start, stop, tail = match.groups()
        first = int(start) if start else max(0, len(content) - int(tail))
        part = content[first : int(stop) + 1 if stop else None]
        if not part:
            return 416, b"", headers | {"Content-Range": f"bytes */{len(content)}"}
        return 206, part, headers | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *args: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave when it likes
            super().handle_error(*args)


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandin
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without a word from the client
    wbufsize = -1  # headers and body leave together

    def setup(self) -> None:
        super().setup()
        self.hub.connections.add(self.connection)

    def finish(self) -> None:
        self.hub.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Say nothing: `HubStandin.requests` is the log."""

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if size > LARGEST_BODY or "Transfer-Encoding" in self.headers:
            status, answer, headers = refusal(413, f"More than {LARGEST_BODY} bytes, or no Content-Length")
            self.close_connection = True
        else:
            body = self.rfile.read(size)
            signed, span = self.headers.get("Authorization", "").startswith("Bearer "), self.headers.get("Range", "")
            with self.hub.lock:
                status, answer, headers = self.hub.answer(self.command, self.path, body, signed, span)
        if not isinstance(answer, bytes):
            answer, headers = json.dumps(answer).encode(), headers | {"Content-Type": "application/json"}
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(answer))}).items():
            self.send_header(key, value.encode("ascii", "replace").decode())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET
