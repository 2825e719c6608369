"""Hosts on one machine: network namespaces on a switch, each with a link that may have a bounded rate. Needs root, and iproute2."""
import os
import subprocess


class Hosts:
    """A context: namespaces 0 to count - 1 with addresses 10.77.0.1, 10.77.0.2, ..., which end with it. `rate` is tc's; None: no bound."""

    def __init__(self, count, rate="1gbit"):
        self.prefix, self.count, self.rate = f"lockstep{os.getpid()}", count, rate

    def namespace(self, host):
        return f"{self.prefix}h{host}"

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def command(self, host, *command):
        return ("ip", "netns", "exec", self.namespace(host), *command)

    @staticmethod
    def _do(line):
        return subprocess.run(line.split(), check=True, capture_output=True, text=True).stdout

    def sent_bytes(self, host):
        """Returns the bytes that the host has sent over its link."""
        return int(self._do(f"ip netns exec {self.namespace(host)} cat /sys/class/net/eth0/statistics/tx_bytes"))

    def cut_off(self, host):
        """Loses all that the host and the others send each other, until `join` is called."""
        self._do(f"ip -n {self.prefix}s link set port{host} nomaster")

    def join(self, host):
        self._do(f"ip -n {self.prefix}s link set port{host} master bridge")

    def divide(self, hosts):
        """These hosts reach each other, and not the others any more."""
        self._do(f"ip -n {self.prefix}s link add island type bridge")
        self._do(f"ip -n {self.prefix}s link set island up")
        for host in hosts:
            self._do(f"ip -n {self.prefix}s link set port{host} master island")

    def lose_what_it_sends(self, host):
        """Loses all that the host sends; it still receives."""
        self._do(f"ip netns exec {self.namespace(host)} tc qdisc add dev eth0 root tbf rate 8bit burst 1b limit 1b")

    def processes(self, host):
        return [int(word) for word in self._do(f"ip netns pids {self.namespace(host)}").split()]

    def _shape(self, namespace, device):
        if self.rate is None:
            return
        self._do(f"ip netns exec {namespace} tc qdisc add dev {device} root tbf rate {self.rate} burst 256kb latency 50ms")

    def __enter__(self):
        switch = f"{self.prefix}s"
        self._do(f"ip netns add {switch}")
        self._do(f"ip -n {switch} link add bridge type bridge")
        self._do(f"ip -n {switch} link set bridge up")
        for host in range(self.count):
            name = self.namespace(host)
            self._do(f"ip netns add {name}")
            self._do(f"ip -n {name} link set lo up")
            self._do(f"ip -n {switch} link add port{host} type veth peer name eth0 netns {name}")
            self._do(f"ip -n {switch} link set port{host} master bridge up")
            self._do(f"ip -n {name} addr add {self.address(host)}/24 dev eth0")
            self._do(f"ip -n {name} link set eth0 up")
            self._shape(name, "eth0")
            self._shape(switch, f"port{host}")
        return self

    def __exit__(self, *_):
        for name in [*map(self.namespace, range(self.count)), f"{self.prefix}s"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
