"""Downloads against a server on this machine that breaks off, forgets ranges, and serves wrong bytes."""

from __future__ import annotations

import errno
import hashlib
import socket
import threading
import urllib.error
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from leanbayes import data
from leanbayes.data.cache import check_md5, download
from leanbayes.data.catalogue import SOURCES
from tests.data import upstream

BODY = np.random.default_rng(0).bytes(100_000)
MD5 = hashlib.md5(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serve BODY; the first part of the path says how badly."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Range")))
        how = self.path.split("/")[1]
        tries = sum(path == self.path for path, _ in self.server.seen)
        if how == "gone" or (how == "busy" and tries == 1):
            self.send_error(404 if how == "gone" else 503)
            return
        body = BODY[::-1] if how == "wrong" else BODY
        wanted = self.headers.get("Range")
        start = int(wanted[6:-1]) if wanted and how != "forgetful" else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        breaks = how in ("cut", "forgetful") and tries == 1
        self.wfile.write(rest[: len(rest) // 2] if breaks else rest)

    def log_message(self, *args):
        """Keep quiet."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    told = []
    target = tmp_path / "sub" / "file.gz"
    download((f"{server.url}/cut/file",), target, md5=MD5, progress=lambda *args: told.append(args), pause=0)
    assert target.read_bytes() == BODY
    assert [wanted for _, wanted in server.seen] == [None, "bytes=50000-"]
    assert told[-1] == ("file.gz", 100_000, 100_000)
    assert [path.name for path in target.parent.iterdir()] == ["file.gz"]


def test_a_later_call_goes_on_with_the_part(server, tmp_path):
    with pytest.raises(ConnectionError, match="broke after 50000 of 100000 bytes"):
        download((f"{server.url}/cut/file",), tmp_path / "file", md5=MD5, attempts=1)
    assert (tmp_path / "file.part").stat().st_size == 50_000
    assert not (tmp_path / "file").exists()
    download((f"{server.url}/cut/file",), tmp_path / "file", md5=MD5, attempts=1)
    assert server.seen[-1][1] == "bytes=50000-"
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_server_without_ranges_is_read_from_the_start(server, tmp_path):
    download((f"{server.url}/forgetful/file",), tmp_path / "file", md5=MD5, pause=0)
    assert (tmp_path / "file").read_bytes() == BODY
    assert len(server.seen) == 2


def test_a_complete_part_only_needs_its_checksum(server, tmp_path):
    (tmp_path / "file.part").write_bytes(BODY)
    download((f"{server.url}/right/file",), tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == BODY


def test_wrong_bytes_are_refused_and_thrown_away(server, tmp_path):
    with pytest.raises(ConnectionError, match=f"could not download file .*expected md5 {MD5}, got"):
        download((f"{server.url}/wrong/file",), tmp_path / "file", md5=MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_file_does_not_survive_the_checksum(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * 10)
    with pytest.raises(ConnectionError, match="expected md5"):
        download((f"{server.url}/right/file",), tmp_path / "file", md5=MD5)
    download((f"{server.url}/right/file",), tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == BODY


def test_the_next_address_is_tried(server, tmp_path):
    urls = tuple(f"{server.url}/{how}/file" for how in ("gone", "wrong", "right"))
    download(urls, tmp_path / "file", md5=MD5, pause=0)
    assert (tmp_path / "file").read_bytes() == BODY
    assert [path for path, _ in server.seen] == ["/gone/file", "/wrong/file", "/right/file"]


def test_a_busy_server_is_asked_again(server, tmp_path):
    download((f"{server.url}/busy/file",), tmp_path / "file", pause=0)
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_file_that_changed_on_disk_is_noticed(tmp_path):
    (tmp_path / "file").write_bytes(BODY[:-1])
    with pytest.raises(ValueError, match=MD5):
        check_md5(tmp_path / "file", MD5)


def test_prepare_downloads_verifies_and_converts(server, tmp_path, monkeypatch):
    there = tmp_path / "there"
    upstream.write_mnist(there)
    upstream.publish(monkeypatch, "mnist", there)
    monkeypatch.setattr(Handler, "do_GET", lambda self: _serve(self, there))
    origin = SOURCES["mnist"].origin
    files = tuple(file._replace(urls=(f"{server.url}/{file.name}",)) for file in origin.files)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], origin=replace(origin, files=files)))
    told = []
    data.prepare("mnist", tmp_path, say=lambda line: None, progress=lambda *args: told.append(args[0]))
    assert set(told) == {file.name for file in files}
    assert len(data.load("mnist", tmp_path).test) == 20
    assert len(list((tmp_path / "upstream" / "mnist").iterdir())) == 4


def _serve(handler, folder):
    body = (folder / handler.path[1:]).read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_without_a_network_the_error_says_which_file_to_put_where(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    expected = r"could not download cifar-10-binary\.tar\.gz .*no network.*put it into .*upstream.cifar10\."
    with pytest.raises(ConnectionError, match=expected):
        data.prepare("cifar10", tmp_path, say=lambda line: None)


@pytest.mark.parametrize(
    "reason",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
    ],
)
def test_without_a_way_out_nothing_is_repeated_and_all_files_are_named(tmp_path, monkeypatch, reason):
    asked, slept = [], []

    def unreachable(request, **kwargs):
        asked.append(request.full_url)
        raise urllib.error.URLError(reason)

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr("time.sleep", slept.append)
    files = SOURCES["mnist"].origin.files
    expected = ", ".join(rf"{file.name} \(md5 {file.md5}\) from {file.urls[0]}" for file in files)
    with pytest.raises(ConnectionError, match=rf"get {expected} and put them into .*upstream.mnist\."):
        data.prepare("mnist", tmp_path, say=lambda line: None)
    assert asked == list(files[0].urls)
    assert not slept
