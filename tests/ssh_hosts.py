"""Hosts that are network namespaces, and are reached over ssh."""
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tools"))
from hosts import Hosts  # noqa: E402


class SshHosts(Hosts):
    """Hosts with a server of ssh each, and keys for this test alone."""

    def __init__(self, count, folder, lockstep):
        super().__init__(count, rate=None)
        self.folder, self.lockstep, self.servers = folder, lockstep, []

    def __enter__(self):
        super().__enter__()
        for name in ("user", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized_keys")
        host_key = (self.folder / "host.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"[{self.address(h)}]:2222 {host_key}" for h in range(self.count)))
        (self.folder / "sshd.conf").write_text(f"""
HostKey {self.folder}/host
AuthorizedKeysFile {self.folder}/authorized_keys
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
""")
        (self.folder / "ssh.conf").write_text(f"""
Host *
    Port 2222
    IdentityFile {self.folder}/user
    UserKnownHostsFile {self.folder}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
""")
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        for host in range(self.count):
            server = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd.conf"), "-p", "2222", "-o", f"ListenAddress={self.address(host)}"]
            self.servers.append(subprocess.Popen(self.command(host, *server), stderr=subprocess.DEVNULL))
            self.wait_for_server(host)
        return self

    def wait_for_server(self, host):
        end = time.monotonic() + 20
        while subprocess.run(self.command(host, *self.ssh(), self.address(host), "true"), capture_output=True).returncode != 0:
            if time.monotonic() > end:
                raise RuntimeError(f"host {host} does not answer by ssh")
            time.sleep(0.05)

    def ssh(self):
        return "ssh", "-F", str(self.folder / "ssh.conf")

    def run(self, *command, per_host=1, options=()):
        """`lockstep run` on host 0 over all hosts."""
        names = ",".join(f"{self.address(h)}:{per_host}" for h in range(self.count))
        return self.command(0, self.lockstep, "run", "-H", names, "--ssh", " ".join(self.ssh()), *options, *command)

    def __exit__(self, *_):
        for server in self.servers:
            server.kill()
            server.wait()
        super().__exit__()
