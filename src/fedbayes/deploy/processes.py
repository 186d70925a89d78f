"""Flower's processes on this machine: a SuperLink with TLS, a node for each site, and a run, on loopback alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbayes import files
from fedbayes.deploy.tls import make_certificates, make_key
from fedbayes.errors import UserError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
}
"""Nothing phones home, and tasks are looked for every tenth of a second."""
START = 60.0  # seconds that a process has to open its port


class Federation:
    """A SuperLink and the nodes of some sites, as processes of this machine.

    Args:
        project: The Flower project (its folder has pyproject.toml).
        folder: Where certificates, keys, logs and Flower's own files go.
        sites: The settings of each site, which become its node config.
    """

    def __init__(self, project: Path, folder: Path, sites: Sequence[Mapping[str, Any]]) -> None:
        self.project, self.folder, self.sites = project.resolve(), folder.resolve(), list(sites)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.secrets, self.logs = self.folder / "certificates", self.folder / "logs"
        # Flower starts its own commands by name.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "flwr"), "PATH": path}

    def start(self) -> None:
        """Certificates and keys, then the server's processes, then the sites'."""
        make_certificates(self.secrets)
        files.make_folder(self.logs)
        home = files.make_folder(self.folder / "flwr")
        address, ca = f"127.0.0.1:{self.port}", self.secrets / "ca.crt"
        given = f'[superlink]\ndefault = "loop"\n\n[superlink.loop]\naddress = "{address}"\nroot-certificates = "{ca}"\n'
        files.write(home / "config.toml", given.encode())
        self.start_link()
        self.start_executor()
        for number in range(len(self.sites)):
            make_key(self.secrets / f"site{number}")
            self.command(["flwr", "supernode", "register", str(self.secrets / f"site{number}.pub"), "loop"])
        for number in range(len(self.sites)):
            self.start_site(number)

    def start_link(self) -> None:
        """The SuperLink; what it knows is in a file, so that it may be started again."""
        secrets = self.secrets
        given = ["--ssl-ca-certfile", str(secrets / "ca.crt"), "--ssl-certfile", str(secrets / "server.pem")]
        given += ["--ssl-keyfile", str(secrets / "server.key"), "--enable-supernode-auth"]
        given += ["--database", str(self.folder / "link.db"), "--isolation", "process"]
        self.spawn("superlink", ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), *given])
        wait_for_port(self.port, self.processes["superlink"], self.logs / "superlink.log")

    def start_executor(self) -> None:
        """What starts the server app; apart from the SuperLink, so that each survives the other."""
        given = ["--runtime-api-address", f"127.0.0.1:{self.port}", "--root-certificates", str(self.secrets / "ca.crt")]
        self.spawn("superexec", ["flower-superexec", *given])

    def start_site(self, number: int, key: Path | None = None) -> None:
        """The node of a site."""
        settings = " ".join(f"{name}={_toml(value)}" for name, value in self.sites[number].items())
        key = key or self.secrets / f"site{number}"
        given = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(self.secrets / "ca.crt")]
        given += ["--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(free_port())]
        given += ["--node-config", settings]
        self.spawn(f"site{number}", ["flower-supernode", *given])

    def run(self, config: Mapping[str, Any], wait: float | None = None, project: Path | None = None) -> subprocess.Popen[bytes]:
        """`flwr run` of the project or of another one; its log is in logs/run.log. With `wait`, until it ends."""
        settings = " ".join(f"{name}={_toml(value)}" for name, value in config.items())
        process = self.spawn("run", ["flwr", "run", str(project or self.project), "loop", "--stream", "-c", settings])
        if wait is not None:
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                raise UserError(f"the run is not through after {wait:.0f} s; see {self.logs}") from None
        return process

    def command(self, given: Sequence[str], wait: float = START) -> str:
        """A command that ends; gives what it wrote."""
        done = subprocess.run(
            [program(given[0]), *given[1:]], env=self.environment, capture_output=True, text=True, timeout=wait, check=False
        )
        if done.returncode:
            raise UserError(f"{' '.join(given[:3])} failed: {(done.stderr or done.stdout).strip()[-500:]}")
        return done.stdout

    def spawn(self, name: str, given: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process of its own group, whose output goes to its log."""
        with open(self.logs / f"{name}.log", "ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            words, where = [program(given[0]), *given[1:]], self.folder
            process = subprocess.Popen(words, env=self.environment, cwd=where, start_new_session=True, **streams)
        self.processes[name] = process
        return process

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """A signal to a process and its children."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait(30)

    def stop(self) -> None:
        """End all processes, the last first; those that do not end in ten seconds are killed."""
        for process in reversed(list(self.processes.values())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + 10
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@contextlib.contextmanager
def federation(project: Path, folder: Path, sites: Sequence[Mapping[str, Any]]) -> Iterator[Federation]:
    """A federation that is stopped however the block ends."""
    started = Federation(project, folder, sites)
    try:
        started.start()
        yield started
    finally:
        started.stop()


def program(name: str) -> str:
    """One of Flower's commands, beside this Python or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"{name} is not there: deployment needs Flower; pip install 'fedbayes[flower]'")
    return found


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a process listens."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UserError(f"it ended before it listened; the end of {log}: {log.read_text()[-500:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise UserError(f"nothing listens on port {port} after {START:.0f} s; see {log}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
