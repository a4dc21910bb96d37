"""Hosts for tests: network namespaces of this machine on one bridge, which the machine is on too.

Each host has an address of its own, a link that can be cut or slowed down, and optionally a
firewall. Hosts share only the file system and the process table. Needs root, and `ip` and `tc` of
iproute2. Everything is removed when the `with` ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_PASS, _DROP = 0, 2  # TC_ACT_OK and TC_ACT_SHOT, results of a direct-action classifier


class Admitted(NamedTuple):
    """TCP connections that a firewall lets in: their source and their range of ports."""

    source: str
    low: int
    high: int


class Hosts:
    """`with Hosts("a", "b") as hosts:`; all methods take a host's name."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._network = ""
        self._subnet = 0
        self._undo = ExitStack()

    def __enter__(self) -> Hosts:
        for program, package in _PACKAGES.items():
            if shutil.which(program) is None:
                raise RuntimeError(f"`{program}` is missing: install the package {package}")
        if os.geteuid() != 0:
            raise RuntimeError("hosts are network namespaces, which only root can create")
        with ExitStack() as undo:
            self._make_bridge(undo)
            for number, name in enumerate(self._names, start=1):
                self._make_host(number, name, undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._undo.close()

    @property
    def our_address(self) -> str:
        """The address of this machine on the hosts' network."""
        return f"10.77.{self._subnet}.254"

    def address(self, host: str) -> str:
        return f"10.77.{self._subnet}.{self._names.index(host) + 1}"

    def run(self, host: str, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program on a host; `options` are those of `Popen`."""
        # Not `ip netns exec`: that hides /sys/fs/cgroup, from which memory limits are read.
        return subprocess.Popen(["nsenter", f"--net={self.network(host)}", "--", *words], **options)

    def network(self, host: str) -> Path:
        """The file of the host's network namespace."""
        return Path("/run/netns", self._namespace(host))

    def host_of(self, pid: int) -> str | None:
        """The host that a process runs on, or None if it runs on none of them or has ended."""
        try:
            namespace = os.stat(f"/proc/{pid}/ns/net").st_ino
        except OSError:
            return None
        for host in self._names:
            if self.network(host).stat().st_ino == namespace:
                return host
        return None

    @contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """Silently drop everything on the host's link while the context lasts."""
        self.lose(host)
        try:
            yield
        finally:
            _do(f"ip link set {self._port(host)} up")

    def lose(self, host: str) -> None:
        """Cut the host's link for good."""
        _do(f"ip link set {self._port(host)} down")

    @contextmanager
    def slow(self, host: str, megabits: int) -> Iterator[None]:
        """Limit what the host sends to `megabits` per second while the context lasts."""
        shape = f"tbf rate {megabits}mbit burst 128k latency 50ms"
        self._tc(host, f"qdisc add dev eth0 root {shape}")
        try:
            yield
        finally:
            self._tc(host, "qdisc del dev eth0 root")

    def sent(self, host: str) -> int:
        """Bytes that the host has sent since it was created."""
        # The bridge's end of the link receives what the host's end sends.
        return int(Path(f"/sys/class/net/{self._port(host)}/statistics/rx_bytes").read_text())

    def admit_only(self, host: str, admitted: Sequence[Admitted]) -> None:
        """Give the host a firewall that lets in only these new connections from outside.

        It relies on TCP's flags: packets that do not open a connection pass. Of other protocols,
        only ARP passes.
        """
        code = ",".join(" ".join(map(str, line)) for line in _firewall(admitted))
        self._tc(host, "qdisc add dev eth0 clsact")
        length = code.count(",") + 1
        _do(
            f"tc -n {self._namespace(host)} filter add dev eth0 ingress bpf da bytecode",
            f"{length},{code}",
        )

    # Creating them

    def _make_bridge(self, undo: ExitStack) -> None:
        """Take the first free network, so that two runs on one machine do not collide."""
        for subnet in range(1, 255):
            name = f"xvt{subnet}"
            making = ["ip", "link", "add", name, "type", "bridge"]
            if subprocess.run(making, capture_output=True).returncode == 0:
                break
        else:
            raise RuntimeError("all bridges xvt1 to xvt254 exist: remove those left over")
        undo.callback(_do, f"ip link del {name}")
        self._network, self._subnet = name, subnet
        _do(f"ip addr add {self.our_address}/24 dev {name}")
        _do(f"ip link set {name} up")

    def _make_host(self, number: int, name: str, undo: ExitStack) -> None:
        namespace, port = self._namespace(name), self._port(name)
        _do(f"ip netns add {namespace}")
        undo.callback(_do, f"ip netns del {namespace}")
        _do(f"ip link add {port} type veth peer name eth0 netns {namespace}")
        # A namespace lives until its last process ends; the link must go now.
        undo.callback(_do, f"ip link del {port}")
        _do(f"ip link set {port} master {self._network} up")
        _do(f"ip -n {namespace} addr add {self.address(name)}/24 dev eth0")
        for device in ("lo", "eth0"):
            _do(f"ip -n {namespace} link set {device} up")
        # vLLM finds its own address by the default route, although this one leads nowhere.
        _do(f"ip -n {namespace} route add default via {self.our_address}")

    def _namespace(self, host: str) -> str:
        return f"{self._network}-{host}"

    def _port(self, host: str) -> str:
        return f"{self._network}-{self._names.index(host) + 1}"

    def _tc(self, host: str, words: str) -> None:
        _do(f"tc -n {self._namespace(host)} {words}")


def _firewall(admitted: Sequence[Admitted]) -> list[tuple[int, int, int, int]]:
    """A classic BPF program (linux/filter.h: code, jump if true, jump if false, value)."""
    load_half, load_byte, load_word = 0x28, 0x30, 0x20
    load_header_length, load_byte_in_tcp, load_half_in_tcp = 0xB1, 0x50, 0x48
    equal, greater, not_less, mask, end = 0x15, 0x25, 0x35, 0x54, 0x06
    program = [
        (load_half, 0, 0, 12),
        (equal, 0, 1, 0x0806),  # ARP
        (end, 0, 0, _PASS),
        (equal, 1, 0, 0x0800),  # IPv4
        (end, 0, 0, _DROP),
        (load_byte, 0, 0, 23),
        (equal, 1, 0, 6),  # TCP
        (end, 0, 0, _DROP),
        (load_header_length, 0, 0, 14),
        (load_byte_in_tcp, 0, 0, 14 + 13),
        (mask, 0, 0, 0x12),  # SYN and ACK
        (equal, 1, 0, 0x02),  # SYN alone: the first packet
        (end, 0, 0, _PASS),
    ]
    for source, low, high in admitted:
        program += [
            (load_word, 0, 0, 26),
            (equal, 0, 4, int.from_bytes(bytes(map(int, source.split("."))), "big")),
            (load_half_in_tcp, 0, 0, 14 + 2),
            (not_less, 0, 2, low),
            (greater, 1, 0, high),
            (end, 0, 0, _PASS),
        ]
    return [*program, (end, 0, 0, _DROP)]


def _do(command: str, *more: str) -> None:
    done = subprocess.run([*command.split(), *more], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
