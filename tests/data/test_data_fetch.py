"""Downloads from a local server: complete, resumed, without ranges, truncated, wrong, too large, full disk."""

import errno
import hashlib
import http.server
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _data_samples import IDX, CifarSample, IdxSample

from onelip import data
from onelip.data import download
from onelip.data.registry import OFFICIAL

NAME = "cifar-10-binary.tar.gz"


@dataclass
class Server:
    """Content and behaviour of the server, and the requests it received."""

    files: dict[str, bytes]
    ranges: bool = True
    cut_after: int | None = None  # close the connection after this number of bytes of a response
    length: bool = True
    wrong_range: bool = False
    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)


def handler_for(server: Server) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.asked.append((self.path, asked))
            content = server.files.get(self.path.removeprefix("/"))
            if content is None:
                self.send_error(404)
                return
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                first = start - 1 if server.wrong_range else start
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            if server.length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:][: server.cut_after])

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server({NAME: os.urandom(700_000)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_for(state)) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{running.server_port}/"
        yield state
        running.shutdown()
        thread.join()


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def get(server: Server, root: Path, **options: object) -> Path:
    options = {"url": server.url, "digests": {NAME: digest(server.files[NAME])}, **options}
    (path,) = data.fetch("cifar10", root, **options)  # type: ignore[arg-type]
    return path


def part_of(root: Path) -> Path:
    return root / f"{NAME}.part"


@pytest.mark.parametrize("length", [True, False])
def test_a_whole_file_with_progress(tmp_path, server, length):
    server.length = length
    seen = []
    path = get(server, tmp_path / "new" / "root", progress=lambda *step: seen.append(step))
    assert path == tmp_path / "new" / "root" / NAME
    assert path.read_bytes() == server.files[NAME]
    assert list(path.parent.iterdir()) == [path]
    assert seen[-1] == (NAME, 700_000, 700_000 if length else None)
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)


def test_what_is_there_and_right_is_not_fetched_and_what_is_wrong_is_replaced(tmp_path, server):
    get(server, tmp_path)
    get(server, tmp_path)
    assert len(server.asked) == 1
    (tmp_path / NAME).write_bytes(b"wrong")
    assert get(server, tmp_path).read_bytes() == server.files[NAME]


def test_a_cut_download_is_reported_and_resumed(tmp_path, server):
    server.cut_after = 300_000
    with pytest.raises(data.FetchError, match=r"the server stopped after 300000 of 700000 bytes"):
        get(server, tmp_path)
    assert not (tmp_path / NAME).exists()
    assert part_of(tmp_path).stat().st_size == 300_000
    with pytest.raises(data.FetchError, match="after 600000 of 700000"):
        get(server, tmp_path)
    assert get(server, tmp_path).read_bytes() == server.files[NAME]
    assert [asked for _, asked in server.asked] == [None, "bytes=300000-", "bytes=600000-"]
    assert not part_of(tmp_path).exists()


def test_without_ranges_it_starts_again(tmp_path, server):
    server.ranges = False
    part_of(tmp_path).write_bytes(server.files[NAME][:1000])
    assert get(server, tmp_path).read_bytes() == server.files[NAME]
    assert len(server.asked) == 1  # the whole file of the first response is used


def test_a_part_that_is_whole_already_is_only_verified(tmp_path, server):
    part_of(tmp_path).write_bytes(server.files[NAME])
    assert get(server, tmp_path).read_bytes() == server.files[NAME]


def test_a_part_of_another_file_is_thrown_away(tmp_path, server):
    part_of(tmp_path).write_bytes(b"x" * 1000)
    assert get(server, tmp_path).read_bytes() == server.files[NAME]
    assert [asked for _, asked in server.asked] == ["bytes=1000-", None]
    (tmp_path / NAME).unlink()
    part_of(tmp_path).write_bytes(b"x" * 800_000)
    assert get(server, tmp_path).read_bytes() == server.files[NAME]


def test_a_range_that_was_not_asked_for_is_refused(tmp_path, server):
    server.wrong_range = True
    part_of(tmp_path).write_bytes(server.files[NAME][:1000])
    with pytest.raises(data.FetchError, match="expected the bytes from 1000, got another range"):
        get(server, tmp_path)


def test_a_wrong_file_never_gets_its_name(tmp_path, server):
    with pytest.raises(
        data.ChecksumError, match=r"with md5:c32a.*got a different one of 700000 bytes, which was deleted"
    ):
        get(server, tmp_path, digests=None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_is_stopped(tmp_path, server):
    with pytest.raises(data.FetchError, match=r"expected at most 500000 bytes, got a file of 700000"):
        get(server, tmp_path, cap=500_000)
    server.length = False
    with pytest.raises(data.FetchError, match=r"expected at most 500000 bytes, got more"):
        get(server, tmp_path, cap=500_000)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_reported_before_it_is_filled(tmp_path, server, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    with pytest.raises(data.FetchError, match=r"the disk is full .*700000 bytes are needed and 1000 are free"):
        get(server, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported(tmp_path, server):
    part_of(tmp_path).symlink_to("/dev/full")  # every write to it fails as on a full disk
    with pytest.raises(data.FetchError, match=r"the disk is full .*free some space"):
        get(server, tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_disk_that_fills_in_the_middle_keeps_what_has_come(tmp_path, server, monkeypatch):
    real = download._chunks

    def filling(response, address):
        for number, chunk in enumerate(real(response, address)):
            if number == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield chunk

    monkeypatch.setattr(download, "_chunks", filling)
    with pytest.raises(data.FetchError, match="received bytes are kept"):
        get(server, tmp_path)
    monkeypatch.setattr(download, "_chunks", real)
    assert part_of(tmp_path).stat().st_size == 2 * 256 * 1024
    assert get(server, tmp_path).read_bytes() == server.files[NAME]


def test_a_place_that_cannot_be_written_is_reported(tmp_path, server):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(data.FetchError, match=r"cannot be written .*choose another root \(or ONELIP_DATA\)"):
        get(server, tmp_path / "file")


def test_no_file_and_no_server(tmp_path, server):
    server.files["other"] = server.files.pop(NAME)
    with pytest.raises(data.FetchError, match="the server answered HTTP 404"):
        data.fetch("cifar10", tmp_path, server.url)
    with pytest.raises(data.FetchError, match="no connection to the server"):
        data.fetch("cifar10", tmp_path, "http://127.0.0.1:9/")
    with pytest.raises(data.FetchError, match="expected an http or https address, got 'file:"):
        data.fetch("cifar10", tmp_path, f"file://{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_the_next_server_is_asked_and_goes_on_where_the_first_stopped(tmp_path, server, monkeypatch):
    official = OFFICIAL["cifar10"]
    monkeypatch.setitem(official.__dict__, "urls", (f"{server.url}missing/", server.url))
    assert get(server, tmp_path, url=None).read_bytes() == server.files[NAME]
    monkeypatch.setitem(official.__dict__, "urls", (f"{server.url}missing/", f"{server.url}gone/"))
    (tmp_path / NAME).unlink()
    with pytest.raises(data.FetchError, match=r"(?s)missing/.*404.*gone/.*404"):
        get(server, tmp_path, url=None)


def test_two_processes_do_not_write_the_same_part(tmp_path, server):
    fcntl = pytest.importorskip("fcntl")
    with part_of(tmp_path).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(data.FetchError, match="another process is fetching this file"):
            get(server, tmp_path)
    assert get(server, tmp_path).exists()


def test_unknown_names_and_missing_digests_are_refused(tmp_path, server):
    with pytest.raises(data.DataError, match=r"cannot fetch 'digits'; expected one of mnist"):
        data.fetch("digits", tmp_path)
    with pytest.raises(data.ChecksumError, match=f"digests has no entry for '{NAME}'"):
        get(server, tmp_path, digests={})


def test_what_was_fetched_loads(tmp_path, server, monkeypatch):
    monkeypatch.setenv("ONELIP_DATA", str(tmp_path))
    cifar, mnist = CifarSample("cifar10", "binary"), IdxSample()
    server.files[NAME] = cifar.archive()
    server.files |= {f"{name}.gz": mnist.files[name] for name in IDX}
    get(server, tmp_path)
    assert len(data.load_data("cifar10", digests=cifar.digests).train_labels) == len(cifar.train_labels)
    data.fetch("mnist", url=server.url, digests={f"{n}.gz": d for n, d in mnist.digests.items()})
    assert len(data.load_data("mnist", digests=mnist.digests).train_labels) == 20
