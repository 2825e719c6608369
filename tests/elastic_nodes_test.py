"""Trainings whose processes meet in etcd, or whose launchers are started host by host, over network namespaces: elastic_nodes_test.py PROGRAM LOCKSTEP SOURCE_DIR [what unittest takes]."""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = sys.argv[3]
sys.path.insert(0, str(pathlib.Path(SOURCE) / "tests"))
from trainings_over_hosts import LIMIT_S, LOCKSTEP, PROGRAM, SshHosts, Trainings  # noqa: E402

PORT = 29500


class OverNodes(Trainings):
    def setUp(self):
        super().setUp()
        self.nodes = {}

    def make_hosts(self, count, **variables):
        self.hosts = self.enterContext(SshHosts(count, self.folder, LOCKSTEP))
        self.variables = {"STEP_MS": 50, "EPOCHS": 3, "VICTIM": 1, "STEP": 10, "PLACE": "print", **variables}
        self.token = self.write_token("token", "ab" * 32)

    def write_token(self, name, digits):
        token = self.folder / name
        token.touch(0o600)
        token.write_text(digits)
        return token

    def start_etcd(self, hosts):
        """A cluster with a member on each of these hosts; returns the job's store there."""
        self.etcd = {}
        # In memory: members wait for the disk at each write, for seconds where it is busy.
        data = self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm"))
        cluster = ",".join(f"m{host}=http://{self.hosts.address(host)}:2380" for host in hosts)
        for host in hosts:
            client, peer = (f"http://{self.hosts.address(host)}:{port}" for port in (2379, 2380))
            command = ["etcd", "--name", f"m{host}", "--data-dir", f"{data}/{host}", "--logger", "zap", "--log-level", "error",
                       "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                       "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster]
            with (self.folder / f"etcd-{host}.log").open("w") as log:
                self.etcd[host] = subprocess.Popen(self.hosts.command(host, *map(str, command)), stdout=log, stderr=log)
            self.addCleanup(self.etcd[host].wait)
            self.addCleanup(self.etcd[host].kill)
        return "etcd://" + ",".join(f"{self.hosts.address(host)}:2379" for host in hosts) + "/job"

    def start_node(self, host, store, nodes, token=None, awaited=" node", options=(), **variables):
        environment = {**os.environ, "LOCKSTEP_TOKEN_FILE": str(token or self.token), **{name: str(value) for name, value in {**self.variables, **variables}.items()}}
        command = self.hosts.command(host, LOCKSTEP, "run", "--nnodes", nodes, "--last-call", "1", "--store", store, "--log-dir", str(self.logs), *options, PROGRAM)
        log = self.folder / f"node-{host}.log"
        with log.open("w") as out:
            node = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)
        self.nodes[host] = node, log
        self.addCleanup(node.wait)
        self.addCleanup(node.kill)
        self.wait_for_node(host, awaited)

    def wait_for_node(self, host, text):
        end = time.monotonic() + LIMIT_S
        log = self.nodes[host][1]
        while text not in log.read_text():
            self.assertLess(time.monotonic(), end, f"{text} in {log.read_text()}")
            time.sleep(0.01)

    def expect_node_ends(self, host, status):
        node, log = self.nodes[host]
        self.assertEqual(node.wait(LIMIT_S), status, log.read_text())
        return log.read_text()

    def start_on_hosts(self, options):
        words = [word for name, value in self.variables.items() for word in ("-x", f"{name}={value}")]
        command = self.hosts.run(PROGRAM, options=("--grace", "1", "--log-dir", str(self.logs), *words, *options))
        self.job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder)
        self.addCleanup(self.end_all)


class Nodes(OverNodes):
    def test_all_hosts_but_one_are_lost_with_a_member_of_etcd(self):
        """etcd's cluster is on hosts 0, 3 and 4; the job on 0, 1 and 2, of which the last one has no majority of anything."""
        self.make_hosts(5)
        store = self.start_etcd([0, 3, 4])
        for host in (0, 1, 2):
            self.start_node(host, store, "3")
        self.wait_for(1, "step 10")
        self.hosts.cut_off(0)
        self.hosts.cut_off(1)
        self.etcd[0].kill()
        for host in (0, 1):
            for process in self.hosts.processes(host):
                self.kill(process)
        self.expect_trained([2], 15)
        self.expect_node_ends(2, 0)

    def test_a_node_joins_through_another_ones_store(self):
        """The store at which the nodes found each other is lost before."""
        self.make_hosts(4)
        store = f"{self.hosts.address(0)}:{PORT}"
        for host in (0, 1, 2):
            self.start_node(host, store, "3:4")
        self.wait_for(1, "step 10")
        self.wait_for_node(1, "others may join the job with --store ")
        others = self.nodes[1][1].read_text().split("with --store ")[1].split()[0]
        self.hosts.cut_off(0)
        for process in self.hosts.processes(0):
            self.kill(process)
        self.wait_for(1, "goes on with 2 workers (3 before)")
        self.start_node(3, others, "3:4")
        self.wait_for_node(3, "joined at step")
        self.expect_trained([1, 2], 5)
        weights = {self.expect_node_ends(host, 0).split("weights")[1].split("\n")[0] for host in (1, 2, 3)}
        self.assertEqual(len(weights), 1, weights)

    def test_what_cannot_be_is_named(self):
        self.make_hosts(2, EPOCHS=20)
        store = f"{self.hosts.address(0)}:{PORT}"
        self.start_node(0, store, "1")
        self.wait_for_node(0, "worker at")
        self.start_node(1, store, "1:2", token=self.write_token("another", "cd" * 32), awaited="lockstep")
        self.assertIn("token", self.expect_node_ends(1, 1))
        self.start_node(1, f"{self.hosts.address(1)}:1/job", "1", awaited="lockstep")
        self.assertIn("it must be host:port", self.expect_node_ends(1, 1))
        self.start_node(1, "etcd://nowhere", "1", awaited="lockstep")
        self.assertIn('"nowhere" is no host and port', self.expect_node_ends(1, 1))
        self.start_node(1, store, "3:2", awaited="lockstep")
        self.assertIn('--nnodes is "3:2"; it must be', self.expect_node_ends(1, 1))
        self.start_node(1, f"etcd://{self.hosts.address(1)}:2379/job", "1", awaited="lockstep")
        self.wait_for_node(1, "waiting for the store: ")
        self.nodes[1][0].send_signal(signal.SIGINT)
        self.expect_node_ends(1, 128 + signal.SIGINT)


class MoreNodes(OverNodes):
    def test_a_node_is_lost_before_the_job_has_begun(self):
        """The other nodes do not wait for the lost one's ranks."""
        self.make_hosts(3)
        store = f"{self.hosts.address(0)}:{PORT}"
        for host in (0, 1):
            self.start_node(host, store, "3", awaited="waiting for more")
        self.start_node(2, store, "3", awaited="lockstep: this is node", START_S=1)
        for process in self.hosts.processes(2):
            self.kill(process)
        for host in (0, 1):
            self.assertIn("rank 2 has ended, and others wait for it", self.expect_node_ends(host, 1))

    def test_a_host_is_lost_with_a_member_of_etcd(self):
        """The host may be the launcher's; or the launcher hears that a host is gone while etcd may have no leader."""
        for lost, at_once in ((0, False), (0, True), (1, False), (1, True)):
            with self.subTest(lost=lost, at_once=at_once):
                self.begin_anew()
                self.make_hosts(3)
                store = self.start_etcd([0, 1, 2])
                self.start_on_hosts(("--min-n", "1", "--store", store))
                self.wait_for(1, "step 10")
                self.lose(lost, at_once)
                self.expect_trained([rank for rank in range(3) if rank != lost], 15)

    def kill_workers(self, ranks):
        for rank in ranks:
            self.kill(int(re.search(r"worker at (\d+)", self.log(rank))[1]))

    def test_all_workers_of_nodes_are_lost(self):
        """Nobody starts the whole job again, so each launcher ends, and says why."""
        self.make_hosts(2)
        for host in (0, 1):
            self.start_node(host, f"{self.hosts.address(0)}:{PORT}", "2", options=("--restarts", "3"))
        self.wait_for(1, "step 10")
        self.kill_workers((0, 1))
        for host in (0, 1):
            output = self.expect_node_ends(host, 1)
            self.assertIn("no worker is left that could take in others: start the job again on all nodes", output)
            self.assertNotIn("restart 2 of 3", output)

    def test_all_workers_of_a_job_in_etcd_are_lost(self):
        """The job starts again, with entries of its own."""
        self.make_hosts(2, FOLDER=self.folder)
        store = self.start_etcd([0])
        self.start_on_hosts(("--min-n", "1", "--store", store, "--restarts", "1"))
        self.wait_for(1, "step 10")
        self.kill_workers((0, 1))
        self.wait_for(1, "starts again at step")
        self.expect_trained([0, 1], 30)
        self.assertIn("from its last backup if it has one: restart 1 of 1", self.expect_end(0))

    def test_a_node_leaves_on_notice(self):
        self.make_hosts(2)
        store = f"{self.hosts.address(0)}:{PORT}"
        for host in (0, 1):
            self.start_node(host, store, "1:2")
        self.wait_for(1, "step 10")
        self.nodes[0][0].send_signal(signal.SIGTERM)  # to `ip netns exec`, which is the launcher then
        self.wait_for(0, "left")
        self.expect_trained([1], 2)
        self.expect_node_ends(1, 0)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]], verbosity=2)
