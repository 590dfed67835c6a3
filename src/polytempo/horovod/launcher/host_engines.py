"""`HostEngines`: an engine for each host, which starts a command's processes there.

this host      forks them                      (`local_engine`)
other hosts    an agent, by ssh, forks them    (`ssh_engine`)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from polytempo.engines.engine import Engine, EngineProcess, Launch, Role
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.command_process import CommandRun, perform_command
from polytempo.engines.remote.command_agents import ChildAgents
from polytempo.engines.remote.messages import TravellingRun
from polytempo.engines.remote.network import address_of, common_address, interface_of
from polytempo.engines.remote.remote_engine import opened_remote
from polytempo.engines.ssh_engine import Ssh
from polytempo.horovod.launcher.settings import LOCAL_NAMES, LaunchSettings
from polytempo.spec.topology import Topology

_LOOK_S = 0.02
_END_S = 10.0


@dataclass(eq=False)
class _Host:
    """A host with an engine that is open, or that a thread is opening."""

    name: str
    stack: ExitStack = field(default_factory=ExitStack)
    engine: Engine | None = None
    starter: ChildAgents | None = None
    opening: threading.Thread | None = None
    problem: Exception | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """The environment of the process that is started next."""


class HostEngines:
    """Use it in a `with` statement: no process, file or port is left. `most`: how many processes there may be in all.

    `hosts`: hosts that may come later; the address for them is found at the beginning.
    """

    def __init__(self, run: CommandRun, settings: LaunchSettings, hosts: Iterable[str], most: int) -> None:
        self._run, self._settings, self._most = run, settings, most
        self._hosts: dict[str, _Host] = {}
        self._owners: dict[EngineProcess, Engine] = {}
        self._lost: list[EngineProcess] = []
        """Processes that could not be started; the next `poll` reports them."""
        self._local = set() if settings.ssh is not None else set(LOCAL_NAMES)
        self.address = self._own_address([name for name in hosts if name not in self._local])
        """The address of this process for the processes of all hosts."""

    def __enter__(self) -> HostEngines:
        """Nothing is started yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes and agents."""
        for host in self._hosts.values():
            if host.opening is not None and host.opening.is_alive() and host.starter is not None:
                host.starter.stop()
        with ExitStack() as stack:
            for host in self._hosts.values():
                if host.opening is not None:
                    host.opening.join(self._settings.start_timeout_s + _END_S)
                stack.callback(host.stack.close)

    def is_local(self, name: str) -> bool:
        """True for this host."""
        return name in self._local

    def open(self, hosts: Mapping[str, int]) -> None:
        """Open the engines of hosts with so many slots each, and wait. PolytempoError where one is not in time."""
        for name, slots in hosts.items():
            self.begin(name, slots)
        for name in hosts:
            host = self._hosts[name]
            while host.opening is not None and host.opening.is_alive():
                host.opening.join(_LOOK_S)  # Ctrl-C is heard in between
            if host.problem is not None:
                raise host.problem

    def begin(self, name: str, slots: int) -> None:
        """Begin to open the engine of a host, in a thread where the host is another one."""
        if name in self._hosts:
            return
        host = self._hosts[name] = _Host(name)
        if self.is_local(name):
            host.engine = host.stack.enter_context(Local().open(self._launch(host, slots)))
        else:
            host.opening = threading.Thread(target=self._open_remote, args=(host, slots), daemon=True)
            host.opening.start()

    def is_open(self, name: str) -> bool:
        """True if processes can be started there."""
        return name in self._hosts and self._hosts[name].engine is not None

    def problem(self, name: str) -> Exception | None:
        """The reason why its engine could not be opened; the next `begin` tries again."""
        host = self._hosts.get(name)
        if host is None or host.problem is None:
            return None
        del self._hosts[name]
        return host.problem

    def start(self, name: str, role: Role, label: str, environment: Mapping[str, str]) -> EngineProcess:
        """Start the command there. `label` begins the lines of its output."""
        host = self._hosts[name]
        assert host.engine is not None
        network = self._network() if self.is_local(name) else {}
        host.told = {"name": label, "environment": {**network, **environment}}
        process = host.engine.start(role)
        self._owners[process] = host.engine
        if process.exit_code is not None:  # its agent is lost; the next process there gets another one
            host.engine.poll(0.0)
            self._hosts.pop(name).stack.close()
            self._lost.append(process)
        return process

    def poll(self, wait_s: float) -> list[EngineProcess]:
        """The processes that have ended since the last poll; waits for one at most for `wait_s`."""
        until_s = time.monotonic() + wait_s
        if self._lost:
            lost, self._lost = self._lost, []
            return lost
        while True:
            engines = [host.engine for host in self._hosts.values() if host.engine is not None]
            left_s = max(0.0, until_s - time.monotonic())
            gone = [process for engine in engines for process in engine.poll(left_s / 2 if len(engines) == 1 else 0.0)]
            left_s = until_s - time.monotonic()
            if gone or left_s <= 0:
                return gone
            if len(engines) != 1:
                time.sleep(min(left_s, _LOOK_S))

    def stop(self, process: EngineProcess | None = None) -> None:
        """End one process for certain; None: all, politely first."""
        if process is not None:
            self._owners[process].stop(process)
            return
        for host in self._hosts.values():
            if host.engine is not None:
                host.engine.stop()

    def _launch(self, host: _Host, slots: int) -> Launch:
        return Launch(
            work=lambda role: perform_command(self._run, **host.told),
            spec=None,
            setting=lambda: host.told,
            workers=slots,
            most=self._most,
        )

    def _open_remote(self, host: _Host, slots: int) -> None:
        settings = self._settings
        network = settings.network_interface
        paths = {name: value for name, value in self._run.environment.items() if name in ("PATH", "PYTHONPATH")}
        named = {} if network is None else {"POLYTEMPO_GLOO_SOCKET_IFNAME": network}
        try:
            ssh = Ssh((host.name,), settings.python, settings.ssh_command(), environment=paths | named)
            host.starter = ssh.starter()
            run = TravellingRun(self._run.to_json(), Topology.collective(slots))
            host.engine = host.stack.enter_context(
                opened_remote(
                    self._launch(host, slots),
                    host.starter,
                    1,
                    address=self.address,
                    wait_s=settings.start_timeout_s,
                    run=run,
                )
            )
        except Exception as error:  # of a thread: the launcher's own says it
            host.problem = error

    def _own_address(self, remote: list[str]) -> str:
        settings = self._settings
        if settings.address is not None:
            return settings.address
        if settings.network_interface is not None:
            return address_of(settings.network_interface)
        return common_address(name.rpartition("@")[2] for name in remote) if remote else "127.0.0.1"

    def _network(self) -> dict[str, str]:
        """The variables that gloo of this host's ranks needs if there are other hosts."""
        interface = self._settings.network_interface or interface_of(self.address)
        return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
