"""Trainings over hosts that are network namespaces. The program that imports it has the arguments PROGRAM LOCKSTEP SOURCE_DIR."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from ssh_hosts import SshHosts

PROGRAM, LOCKSTEP = sys.argv[1:3]
LIMIT_S = 120
STEPS_OF_AN_EPOCH = 20


class Trainings(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.logs = self.folder / "logs"
        self.job = None

    def begin_anew(self):
        self.doCleanups()
        self.setUp()

    def name_hosts(self, hosts):
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{self.hosts.address(host)}:1\n" for host in hosts))
        new.rename(self.folder / "hosts")

    def start(self, count, options=(), discovered=None, min_n=1, **variables):
        """A training on so many hosts, or on those of them that a script names, one worker each, whose steps take 50 ms."""
        self.hosts = self.enterContext(SshHosts(count, self.folder, LOCKSTEP))
        self.variables = {"STEP_MS": 50, "EPOCHS": 3, "VICTIM": 1, "STEP": 10, "PLACE": "print", **variables}
        words = [word for name, value in self.variables.items() for word in ("-x", f"{name}={value}")]
        options = ("--min-n", str(min_n), "--grace", "1", "--log-dir", str(self.logs), *words, *options)
        if discovered is None:
            command = self.hosts.run(PROGRAM, options=options)
        else:
            self.name_hosts(discovered)
            discovery = ("--host-discovery", f"cat {self.folder}/hosts", "--ssh", " ".join(self.hosts.ssh()))
            command = self.hosts.command(0, LOCKSTEP, "run", *discovery, *options, PROGRAM)
        self.job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder)
        self.addCleanup(self.end_all)

    def end_all(self):
        self.job.kill()
        self.job.stdout.close()
        self.job.wait()
        for host in range(self.hosts.count):
            for process in self.hosts.processes(host):
                if process not in [server.pid for server in self.hosts.servers]:
                    self.kill(process)

    @staticmethod
    def kill(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def log(self, rank):
        path = self.logs / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, rank, text, limit_s=LIMIT_S):
        end = time.monotonic() + limit_s
        while text not in self.log(rank):
            self.assertLess(time.monotonic(), end, f"{text} in {self.log(rank)[-3000:]}")
            self.expect_goes_on(rank, text)
            time.sleep(0.01)

    def expect_goes_on(self, rank, text):
        """A job that failed says why. One whose launcher a test killed may go on."""
        if self.job is not None and (self.job.poll() or 0) > 0 and text not in self.log(rank):
            self.fail(f"the job ended with status {self.job.returncode} before rank {rank} wrote {text!r}:\n{self.job.communicate()[0]}")

    def begin(self, count, **variables):
        self.start(count, **variables)
        self.wait_for(self.variables["VICTIM"], f"step {self.variables['STEP']}")

    def lose(self, host, at_once):
        """Takes the host's power (at_once), so that nobody hears of it, or ends its processes alone, whose ends the others hear."""
        if at_once:
            self.hosts.cut_off(host)
        for process in self.hosts.processes(host):
            self.kill(process)

    @staticmethod
    def alone(epochs):
        output = subprocess.run([PROGRAM], env={**os.environ, "EPOCHS": str(epochs)}, capture_output=True, text=True, check=True).stdout
        return [float(word) for word in re.search(r"weights (.*)", output)[1].split()]

    def expect_trained(self, ranks, longest_s):
        """Expects that these workers have trained what one process trains, without a pause of more than longest_s."""
        epochs = self.variables["EPOCHS"]
        steps = epochs * STEPS_OF_AN_EPOCH
        expected = self.alone(epochs)
        for rank in ranks:
            self.wait_for(rank, "longest")
            got = [float(word) for word in re.search(rf"steps {steps}, weights (.*)", self.log(rank))[1].split()]
            for one, other in zip(expected, got, strict=True):
                self.assertLessEqual(abs(one - other), 1e-9)
            longest = float(re.search(r"longest ([0-9.]+)", self.log(rank))[1])
            print(f"{self.id()}: rank {rank} paused for {longest:.2f} s", file=sys.stderr)
            self.assertLess(longest, longest_s + 0.05)

    def expect_end(self, status):
        output = self.job.communicate(timeout=LIMIT_S)[0]
        self.assertEqual(self.job.returncode, status, output)
        return output

    def expect_one_view(self):
        """All end; those that trained to the end have trained the same, and the others say why they did not."""
        everybody = range(self.hosts.count)
        for rank in everybody:
            end = time.monotonic() + LIMIT_S
            while "longest" not in self.log(rank) and "failed: " not in self.log(rank):
                self.assertLess(time.monotonic(), end, self.log(rank))
                time.sleep(0.01)
        self.expect_trained([rank for rank in everybody if "longest" in self.log(rank)], LIMIT_S)
        for rank in everybody:
            if "longest" not in self.log(rank):
                self.assertRegex(self.log(rank), "the others took rank|cannot reach most", self.log(rank))
        return [rank for rank in everybody if "longest" in self.log(rank)]
