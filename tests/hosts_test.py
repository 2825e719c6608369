"""Training over hosts that are network namespaces, started over ssh: hosts_test.py MNIST LOCKSTEP RESUME_PROGRAM SOURCE_DIR SERVERS (empty: built without gRPC)."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

MNIST, LOCKSTEP, RESUME, SOURCE, SERVERS = sys.argv[1:6]
sys.path.insert(0, str(pathlib.Path(SOURCE) / "tests"))
from ssh_hosts import SshHosts  # noqa: E402

TRAIN = [MNIST, "--strategy", "multi_worker", "--replicas", "1"]
LIMIT_S = 300
LIMIT_OF_END_S = 15  # a start over ssh, 8 steps, a deadline of 2 s and a grace of 1 s; far below what a hang takes
GRADIENTS = 4 * 347_146  # bytes a step


class OverHosts(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.work = self.folder / "work"
        self.work.mkdir()

    def hosts(self, count):
        return self.enterContext(SshHosts(count, self.folder, LOCKSTEP))

    def end(self, *commands, environments=None):
        """The exit statuses, and what was printed."""
        environments = environments or [{}] * len(commands)
        started = [subprocess.Popen(command, cwd=self.work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment})
                   for command, environment in zip(commands, environments)]
        try:
            outputs = [process.communicate(timeout=LIMIT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        return [process.returncode for process in started], "".join(outputs)

    def expect_nothing_left(self, program):
        """Expects the end of all processes that this test started: they work in its folder."""
        end = time.monotonic() + 10
        while left := [entry for entry in pathlib.Path("/proc").glob("[0-9]*") if self.is_left(entry, program)]:
            self.assertLess(time.monotonic(), end, left)
            time.sleep(0.01)

    def is_left(self, process, program):
        try:
            return os.readlink(process / "exe") == os.path.realpath(program) and str(self.folder) in os.readlink(process / "cwd")
        except OSError:
            return False

    def accuracy_in(self, output):
        accuracies = re.findall(r"Eval accuracy: ([0-9.]+)", output)
        self.assertEqual(len(accuracies), 1, output)
        return float(accuracies[0])

    def lose_worker_1(self, act, *, status, message, deadline_s=60.0, restored=lambda hosts: None):
        """At step 8 worker 1 acts; the job ends soon after, and resumes to the bits of one that was not disturbed."""
        hosts = self.hosts(2)
        folder, undisturbed = self.folder / "disturbed", self.folder / "undisturbed"

        def job(folder, step):
            return hosts.run(RESUME, str(folder), str(step), act, "1", str(deadline_s), options=("--grace", "1"))

        folder.mkdir()
        undisturbed.mkdir()
        statuses, output = self.end(job(undisturbed, -1))
        self.assertEqual(statuses, [0], output)
        start = time.monotonic()
        statuses, output = self.end(job(folder, 8))
        self.assertLess(time.monotonic() - start, LIMIT_OF_END_S, output)
        self.assertEqual(statuses, [status], output)
        self.assertRegex(output.splitlines()[-1], message)
        restored(hosts)
        self.expect_nothing_left(RESUME)
        self.assertTrue((folder / "backup" / "backup.safetensors").exists())
        statuses, output = self.end(job(folder, -1))
        self.assertEqual(statuses, [0], output)
        self.assertEqual((folder / "final.safetensors").read_bytes(), (undisturbed / "final.safetensors").read_bytes())


class Hosts(OverHosts):
    def test_two_hosts_train_over_their_link(self):
        hosts = self.hosts(2)
        status, output = self.end(hosts.run(*TRAIN, "--epochs", "1"))
        self.assertEqual(status, [0], output)
        self.assertGreaterEqual(self.accuracy_in(output), 0.75)
        steps = -(-60_000 // 128)
        for host in range(2):
            self.assertGreater(hosts.sent_bytes(host), 0.95 * steps * GRADIENTS)
        self.expect_nothing_left(MNIST)

    def test_tf_config_needs_a_token_that_all_have(self):
        hosts = self.hosts(2)
        token, other = self.folder / "token", self.folder / "other"
        for file, digits in ((token, "0f" * 32), (other, "1e" * 32)):
            file.write_text(digits)
            file.chmod(0o600)
        workers = [f"{hosts.address(h)}:12345" for h in range(2)]
        commands = [hosts.command(h, *TRAIN, "--epochs", "1") for h in range(2)]

        def environments(*tokens):
            return [{"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": h}}),
                     **({"LOCKSTEP_TOKEN_FILE": str(file)} if file else {})} for h, file in enumerate(tokens)]

        status, output = self.end(*commands, environments=environments(token, token))
        self.assertEqual(status, [0, 0], output)
        status, output = self.end(commands[0], environments=environments(None))
        self.assertEqual(status, [1], output)
        self.assertIn("mnist: listening at 10.77.0.1:12345 needs a token, so that only processes of this job get in", output)
        chief = subprocess.Popen(commands[0], cwd=self.work, env={**os.environ, **environments(token)[0]}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            status, output = self.end(commands[1], environments=environments(None, other)[1:])
        finally:
            chief.kill()
            chief.wait()
        self.assertEqual(status, [1], output)
        self.assertIn("mnist: the store at 10.77.0.1:12345: it cannot prove that it belongs to this job", output)

    def test_a_killed_worker_is_named_and_the_job_resumes(self):
        self.lose_worker_1(str(int(signal.SIGKILL)), status=137, message=r"^lockstep run: rank 1 on 10\.77\.0\.2 was ended by signal 9 \(Killed\)$")

    def test_what_ssh_cannot_reach_is_named(self):
        hosts = self.hosts(1)
        status, output = self.end(hosts.command(0, LOCKSTEP, "run", "-H", "10.77.0.1,10.77.0.9", "--ssh", " ".join(hosts.ssh()) + " -o ConnectTimeout=1", *TRAIN))
        self.assertEqual(status, [255], output)
        self.assertRegex(output.splitlines()[-1], r"^lockstep run: host 10\.77\.0\.9 ended with status 255: ssh: connect to host 10\.77\.0\.9 port 2222: ")
        self.expect_nothing_left(MNIST)


class MoreHosts(OverHosts):
    def test_four_hosts_of_two_ranks(self):
        hosts = self.hosts(4)
        status, output = self.end(hosts.run(*TRAIN, "--epochs", "1", "--batch", "128", per_host=2))
        self.assertEqual(status, [0], output)
        self.assertGreaterEqual(self.accuracy_in(output), 0.70)
        # Two ranks of a host share memory: once over the link, to three other hosts in slices and back.
        self.assertGreater(hosts.sent_bytes(3), 0.95 * (60_000 // 1024) * GRADIENTS * 2 * 3 / 4)

    def test_a_stopped_worker_is_named_at_the_deadline_and_the_job_resumes(self):
        self.lose_worker_1(str(int(signal.SIGSTOP)), deadline_s=2, status=1,
                           message=r"^lockstep run: rank 0 on 10\.77\.0\.1 ended with status 1: .*gave up after 2.*rank 1 has not come")

    def test_a_host_that_is_cut_off_is_named_at_the_deadline_and_the_job_resumes(self):
        def mend(hosts):
            subprocess.run(["ip", "-n", hosts.namespace(1), "link", "set", "eth0", "up"], check=True)

        self.lose_worker_1("ip link set eth0 down", deadline_s=2, status=1,
                           message=r"^lockstep run: rank 0 on 10\.77\.0\.1 ended with status 1: .*gave up after 2.*rank 1 has not come", restored=mend)

    @unittest.skipUnless(SERVERS, "built without gRPC")
    def test_parameter_servers_go_on_after_their_link_was_cut_for_ten_seconds(self):
        self.cut_off_for_ten_seconds("--trusted-network")

    def test_parameter_servers_with_tls_go_on_after_their_link_was_cut_for_ten_seconds(self):
        certs = self.folder / "certs"
        subprocess.run([LOCKSTEP, "certs", certs], check=True)
        self.cut_off_for_ten_seconds("--certs", str(certs))

    def cut_off_for_ten_seconds(self, *access):
        hosts = self.hosts(2)
        program = [SERVERS, "20", "20"]  # 1000 steps of 20 ms: a chief and a worker on host 0, a worker and a server on host 1
        command = hosts.run(*program, per_host=2, options=["--workers", "2", "--ps", "1", *access])
        job = subprocess.Popen(command, cwd=self.work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output = ""
            while "[chief] trains" not in output:
                line = job.stdout.readline()
                self.assertNotEqual(line, "", output)
                output += line
            hosts.cut_off(1)
            time.sleep(10)  # how long the cut lasts
            hosts.join(1)
            output += job.communicate(timeout=120)[0]
        finally:
            job.kill()
        self.assertEqual(job.returncode, 0, output)
        # On each shard, each of the 50 batches has made one update in each of 20 epochs.
        self.assertIn("[chief] steps 1000, updates by a batch 20 to 20, of a shard 1000 1000\n", output)
        self.expect_nothing_left(SERVERS)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[6:]], verbosity=2)
