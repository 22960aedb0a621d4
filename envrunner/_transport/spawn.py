"""Starting workers where there is no zygote (macOS, Windows): a fresh interpreter for each.

Pipes and bells are sockets on the loopback interface, opened by the worker and let in by a token;
the shared block is a temporary file mapped by both sides. Slower to start than forking (half a
second of one core for each worker), the same from then on but for the bells.
"""

from __future__ import annotations

import functools
import hmac
import json
import mmap
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from envrunner._transport.interpreter import command_line, worker_environment

_START = "from envrunner._transport.spawn import main; main()"
_TOKEN_BYTES = 32
_HELLO_BYTES = _TOKEN_BYTES + 8
_END_S = 1.0


class Interpreters:
    """Starts and watches the workers of one loop: the `Launcher` for every platform.

    Args:
        num_workers: how many.
        timeout_s: for each to call back; None: no limit.
    """

    def __init__(self, num_workers: int, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._closed = False
        self._ended: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bells: dict[int, socket.socket] = {}
        self._own_bell, self._own_hand = socket.socketpair()
        self._own_bell.setblocking(False)
        self._own_hand.setblocking(False)
        descriptor, self._path = tempfile.mkstemp(prefix="envrunner-")
        os.close(descriptor)
        self._num_workers = num_workers

    def start(self) -> list[Connection]:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=2 * self._num_workers) as server:
                port = server.getsockname()[1]
                for worker in range(self._num_workers):
                    process = subprocess.Popen(
                        command_line(_START), stdin=subprocess.PIPE, env=worker_environment(), close_fds=True
                    )
                    self._processes.append(process)
                    assert process.stdin is not None
                    process.stdin.write(json.dumps([port, token.hex(), worker, self._path]).encode())
                    process.stdin.close()
                return self._let_in(server, token)
        except BaseException:
            self.close()
            raise

    def _let_in(self, server: socket.socket, token: bytes) -> list[Connection]:
        pipes: dict[int, Connection] = {}
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while len(pipes) < self._num_workers or len(self._bells) < self._num_workers:
            server.settimeout(0.2)
            try:
                end, _ = server.accept()
            except TimeoutError:
                gone = [code for process in self._processes if (code := process.poll()) is not None]
                if gone:
                    raise OSError(
                        f"a worker's interpreter ended with exit code {gone[0]} before it was up; "
                        "its own message stands above"
                    ) from None
                if deadline is not None and time.monotonic() > deadline:
                    raise OSError(f"a worker's interpreter said nothing for {self._timeout_s:g} s") from None
                continue
            end.settimeout(5.0)
            hello = _receive(end, _HELLO_BYTES)
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], token):
                end.close()
                continue
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            worker, is_bell = int.from_bytes(hello[_TOKEN_BYTES:-1], "little"), hello[-1]
            if is_bell:
                end.setblocking(False)
                self._bells[worker] = end
            else:
                pipes[worker] = Connection(end.detach())
        return [pipes[worker] for worker in range(self._num_workers)]

    def memory(self, num_bytes: int) -> Any:
        with open(self._path, "r+b") as file:
            file.truncate(num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)

    def kick(self, worker: int) -> None:
        _ring(self._bells[worker])

    def ring(self) -> None:
        _ring(self._own_hand)

    def bells(self) -> dict[int, Callable[[], Any]]:
        ends = [self._own_bell, *self._bells.values()]
        return {end.fileno(): functools.partial(_silence, end) for end in ends}

    def ends_fileno(self) -> int | None:
        return None

    def ended(self) -> list[tuple[int, int]]:
        reports = []
        for worker, process in enumerate(self._processes):
            if worker not in self._ended and (code := process.poll()) is not None:
                self._ended.add(worker)
                reports.append((worker, code))
        return reports

    def process_ids(self) -> dict[int, int]:
        return {w: process.pid for w, process in enumerate(self._processes) if process.poll() is None}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait(_END_S)
        self.abandon()
        _unlink(self._path)

    def abandon(self) -> None:
        for end in (self._own_bell, self._own_hand, *self._bells.values()):
            end.close()


def main() -> None:
    """What a fresh interpreter runs."""
    port, token, worker, path = json.loads(sys.stdin.buffer.read())
    from envrunner._transport.worker import run_worker

    def call_back(is_bell: bool) -> socket.socket:
        end = socket.create_connection(("127.0.0.1", port))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(bytes.fromhex(token) + worker.to_bytes(7, "little") + bytes([is_bell]))
        return end

    pipe = Connection(call_back(False).detach())
    bell = call_back(True)
    bell.setblocking(False)

    def memory(num_bytes: int) -> Any:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), num_bytes)

    def sleep(timeout_s: float | None) -> None:
        if select.select([bell], [], [], timeout_s)[0] and not _silence(bell):
            _unlink(path)
            raise EOFError  # the parent is gone

    code = run_worker(worker, pipe, memory=memory, ring=lambda: _ring(bell), sleep=sleep)
    os._exit(code)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # another process did, or (on Windows) still maps it


def _receive(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            return data.ljust(size, b"\0")
        data += part
    return data


def _ring(end: socket.socket) -> None:
    try:
        end.send(b"\0")
    except (BlockingIOError, OSError):
        pass  # full: rung already; broken: its end is noticed elsewhere


def _silence(end: socket.socket) -> bool:
    """Read what is there; False at the end of the stream."""
    try:
        while data := end.recv(4096):
            if len(data) < 4096:
                return True
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
