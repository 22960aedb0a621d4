"""Starting workers on Linux: one clean process that has imported numpy and gymnasium forks them.

The zygote is single-threaded and has seen neither the user's main module nor torch, so forking it
is safe and cheap (64 workers in a second). It reaps the workers and reports how each ended; when
the parent is gone it kills them all. Workers in turn are killed by the kernel when the zygote goes.
The rule that must hold: no process outlives the loop's process, however that one ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from envrunner._transport.interpreter import command_line, worker_environment
from envrunner._transport.wakeup import drain, ring

_MESSAGE = struct.Struct("<cqqq")  # kind, worker, pid, wait status
_HELLO, _FORK, _ENDED = b"H", b"F", b"E"
_START = "from envrunner._transport.zygote import main; main(int(sys.argv[1]), int(sys.argv[2]))"
_END_S = 1.0  # for the zygote to kill and reap what is left
_PR_SET_PDEATHSIG = 1


def map_shared(fd: int, num_bytes: int) -> Any:
    """The first bytes of a file as a shared, writable buffer, unmapped when its last user lets go.

    `mmap.mmap` would keep a copy of the descriptor for as long as any array lives: a leak by count,
    though not by size, in whoever closes loops and keeps what they returned.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {num_bytes} bytes of shared memory: {os.strerror(number)}")
    block = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(block, libc.munmap, address, num_bytes).atexit = False
    return block


def is_supported() -> bool:
    """Linux, with the calls that Python 3.10 wraps."""
    return sys.platform == "linux" and all(hasattr(os, name) for name in ("eventfd", "memfd_create", "pidfd_open"))


# -- the parent's end ---------------------------------------------------------------------------


class Zygote:
    """Starts and watches the workers of one loop: the `Launcher` of Linux.

    Args:
        num_workers: how many it will be asked for.
        timeout_s: for the zygote itself to be up; None: no limit.

    Raises:
        OSError: it ended, or said nothing for that long.
    """

    def __init__(self, num_workers: int, timeout_s: float | None) -> None:
        self._num_workers = num_workers
        self._pids: dict[int, int] = {}
        self._fds: list[int] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._memory_fd = self._own(os.memfd_create("envrunner", os.MFD_CLOEXEC))
            self._bell = self._own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            self._kicks = [self._own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)) for _ in range(num_workers)]
            self._process = subprocess.Popen(
                command_line(_START, str(theirs.fileno()), str(os.getpid())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=worker_environment(),
            )
        except BaseException:
            self._close_fds()
            raise
        finally:
            theirs.close()
        try:
            self._wait_until_up(timeout_s)
        except BaseException:
            self.close()
            raise

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _wait_until_up(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)
        try:
            hello = self._socket.recv(_MESSAGE.size)
        except TimeoutError:
            raise OSError(f"the process that starts workers said nothing for {timeout_s:g} s") from None
        except ConnectionError:
            hello = b""
        finally:
            self._socket.settimeout(None)
        if not hello:
            code = self._process.wait()
            raise OSError(
                f"the process that starts workers ended with exit code {code} before it was up; "
                "its own message stands above"
            )

    def start(self) -> list[Connection]:
        """Start every worker; the parent's ends of the pipes to them."""
        pipes = []
        for worker in range(self._num_workers):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                fds = [theirs.fileno(), self._kicks[worker], self._bell, self._memory_fd]
                socket.send_fds(self._socket, [_MESSAGE.pack(_FORK, worker, 0, 0)], fds)
            pipes.append(Connection(mine.detach()))
        return pipes

    def memory(self, num_bytes: int) -> Any:
        """The block shared with the workers, zeroed. To be called once."""
        os.ftruncate(self._memory_fd, num_bytes)
        return map_shared(self._memory_fd, num_bytes)

    def kick(self, worker: int) -> None:
        ring(self._kicks[worker])

    def ring(self) -> None:
        ring(self._bell)

    def bells(self) -> dict[int, Callable[[], Any]]:
        return {self._bell: lambda: drain(self._bell)}

    def ends_fileno(self) -> int | None:
        return self._socket.fileno()

    def ended(self) -> list[tuple[int, int]]:
        """(worker, exit code or minus the signal) of those that ended since the last call; never blocks.

        Raises:
            EOFError: the zygote itself is gone, and every worker with it.
        """
        reports = []
        while select.select([self._socket], [], [], 0)[0]:
            try:
                message = self._socket.recv(_MESSAGE.size)
            except ConnectionError:
                message = b""
            if not message:
                raise EOFError
            kind, worker, pid, status = _MESSAGE.unpack(message)
            if kind == _FORK:
                self._pids[worker] = pid
            elif kind == _ENDED:
                self._pids.pop(worker, None)
                reports.append((worker, os.waitstatus_to_exitcode(status)))
        return reports

    def process_ids(self) -> dict[int, int]:
        return dict(self._pids)

    def close(self) -> None:
        """End the zygote, and with it every worker that is left."""
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel kills the workers
            self._process.wait()
        self._close_fds()

    def abandon(self) -> None:
        """In a fork of the loop's process: let go of this copy, end nothing."""
        self._process.returncode = 0  # not ours to wait for
        self._close_fds()

    def _close_fds(self) -> None:
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


# -- the zygote itself --------------------------------------------------------------------------


def main(fd: int, parent_pid: int) -> None:
    """Fork workers on request until the parent is gone; then kill them and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=fd)
    try:
        parent_life = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return
    import gymnasium  # noqa: F401  (this is what the workers are forked from)
    import numpy  # noqa: F401

    import envrunner._transport.worker  # noqa: F401

    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    workers: dict[int, int] = {}  # pid -> worker
    poll = select.poll()
    for watched in (parent.fileno(), parent_life, wake_read):
        poll.register(watched, select.POLLIN)
    parent.send(_MESSAGE.pack(_HELLO, 0, os.getpid(), 0))
    try:
        while True:
            ready = {watched for watched, _ in poll.poll()}
            if parent_life in ready:
                return
            if wake_read in ready:
                os.read(wake_read, 4096)
                _report_ended(parent, workers)
            if parent.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(parent, _MESSAGE.size, 4)
                if not message:
                    return
                _, worker, _, _ = _MESSAGE.unpack(message)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for inherited in (parent.detach(), parent_life, wake_read, wake_write):
                        os.close(inherited)
                    _become_worker(worker, *fds)
                workers[pid] = worker
                for passed in fds:
                    os.close(passed)
                parent.send(_MESSAGE.pack(_FORK, worker, pid, 0))
    except ConnectionError:
        return
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)


def _report_ended(parent: socket.socket, workers: dict[int, int]) -> None:
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        worker = workers.pop(pid, None)
        if worker is not None:
            parent.send(_MESSAGE.pack(_ENDED, worker, pid, status))


def _become_worker(worker: int, pipe_fd: int, kick_fd: int, bell_fd: int, memory_fd: int) -> NoReturn:
    """In the forked child: never returns into the zygote's own code."""
    code = 1
    try:
        code = _work(worker, pipe_fd, kick_fd, bell_fd, memory_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(worker: int, pipe_fd: int, kick_fd: int, bell_fd: int, memory_fd: int) -> int:
    zygote = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != zygote:  # it went before the kernel knew
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from envrunner._transport.worker import run_worker

    sleeper = select.poll()
    sleeper.register(kick_fd, select.POLLIN)

    def sleep(timeout_s: float | None) -> None:
        if sleeper.poll(None if timeout_s is None else 1000 * timeout_s):
            drain(kick_fd)

    return run_worker(
        worker,
        Connection(pipe_fd),
        memory=lambda num_bytes: map_shared(memory_fd, num_bytes),
        ring=lambda: ring(bell_fd),
        sleep=sleep,
    )
