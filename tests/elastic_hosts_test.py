"""Trainings over hosts that are network namespaces, which go on when hosts are lost or cut off from each other: elastic_hosts_test.py PROGRAM LOCKSTEP SOURCE_DIR [what unittest takes]."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import unittest

SOURCE = sys.argv[3]
sys.path.insert(0, str(pathlib.Path(SOURCE) / "tests"))
from trainings_over_hosts import LIMIT_S, LOCKSTEP, PROGRAM, STEPS_OF_AN_EPOCH, SshHosts, Trainings  # noqa: E402


class ElasticHosts(Trainings):
    def test_a_divided_job_goes_on_in_one_part(self):
        self.begin(5)
        self.hosts.divide([0, 1])  # also the launcher
        self.expect_trained([2, 3, 4], 8)
        for rank in (0, 1):
            self.wait_for(rank, "this process cannot reach most of the job's 5 hosts")
            self.assertNotIn("weights", self.log(rank))

    def test_hosts_come_and_leave(self):
        self.start(3, discovered=[0, 1], options=("--max-n", "3"), EPOCHS=12)
        self.wait_for(1, "step 10")
        self.name_hosts([0, 1, 2])
        self.wait_for(2, "joined at step")
        self.name_hosts([1, 2])
        self.wait_for(0, "left")
        self.expect_trained([1, 2], 1)
        output = self.expect_end(0)
        self.assertIn(f"host {self.hosts.address(2)} joins with 1 rank(s)", output)
        self.assertIn(f"host {self.hosts.address(0)} is not named any more: its ranks leave", output)
        self.assertIn(f"host {self.hosts.address(0)} has left", output)
        self.assertNotIn("is left out", output)


class MoreElasticHosts(Trainings):
    def test_a_worker_is_lost(self):
        self.start(3, PLACE="forward")
        self.expect_trained([0, 2], 2)
        self.assertIn("the job goes on without it", self.expect_end(0))

    def test_the_host_of_rank_0_and_of_the_launcher_is_lost(self):
        for at_once in (False, True):
            with self.subTest(at_once=at_once):
                self.begin_anew()
                self.begin(3)
                self.lose(0, at_once)
                self.expect_trained([1, 2], 5)

    def test_without_lockstep_run(self):
        """Rank 0 holds the store, and knows it by another address than the others."""
        self.hosts = self.enterContext(SshHosts(3, self.folder, LOCKSTEP))
        self.variables = {"STEP_MS": 50, "EPOCHS": 3, "VICTIM": 1, "STEP": 10, "PLACE": "forward"}
        token = self.folder / "token"
        token.touch(0o600)
        token.write_text("ab" * 32)
        self.logs.mkdir()
        common = {"WORLD_SIZE": 3, "MASTER_ADDR": self.hosts.address(0), "MASTER_PORT": 29500, "LOCKSTEP_TOKEN_FILE": token, **self.variables}
        for rank in range(3):
            environment = {**os.environ, "RANK": str(rank), **{name: str(value) for name, value in common.items()}}
            with (self.logs / f"rank-{rank}.log").open("w") as log:
                process = subprocess.Popen(self.hosts.command(rank, PROGRAM), env=environment, stdout=log, stderr=subprocess.STDOUT)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
        self.expect_trained([0, 2], 2)

    def test_one_of_two_workers_is_lost(self):
        """Agreeing on the loss needs the vote of the lost worker's host."""
        for victim in (0, 1):
            with self.subTest(victim=victim):
                self.begin_anew()
                self.start(2, VICTIM=victim, PLACE="forward")
                self.expect_trained([1 - victim], 2)
                self.expect_end(0)

    def test_a_worker_is_lost_in_the_second_fit(self):
        """The end of the first fit tells the launchers nothing about the second."""
        self.start(3, FITS=2, VICTIM=2, STEP=150, PLACE="forward", MORE_S=8)
        for rank in (0, 1):
            self.wait_for(rank, "longest")
            self.assertIn(f"steps {2 * STEPS_OF_AN_EPOCH * self.variables['EPOCHS']}, weights", self.log(rank))
        self.expect_end(0)

    def test_a_worker_that_is_started_again_joins(self):
        for victim in (0, 1):
            with self.subTest(victim=victim):
                self.begin_anew()
                self.start(3, options=("--restarts", "1"), VICTIM=victim, PLACE="forward")
                self.expect_trained([0, 1, 2], 2)
                self.assertIn("joined at step", self.log(victim))
                self.expect_end(0)

    def test_all_workers_are_lost(self):
        """New workers find nobody whom they could join, on any host: the job starts again from its backup."""
        self.start(3, options=("--restarts", "1"), min_n=2, FOLDER=self.folder)
        self.wait_for(1, "step 10")
        for rank in range(3):
            self.kill(int(re.search(r"worker at (\d+)", self.log(rank))[1]))
        self.wait_for(1, "starts again at step")
        self.assertGreater(int(re.search(r"starts again at step (\d+)", self.log(1))[1]), 8)
        self.expect_trained([0, 1, 2], 30)
        output = self.expect_end(0)
        self.assertIn("no worker is left that could take in others", output)
        self.assertIn("the whole job starts again, from its last backup if it has one: restart 1 of 1", output)

    def test_shards_of_a_lost_host_are_on_another(self):
        for at_once in (False, True):
            with self.subTest(at_once=at_once):
                self.begin_anew()
                self.begin(3, SHARD=1)
                self.lose(0, at_once)
                self.expect_trained([1, 2], 5)


class MoreFaults(Trainings):
    """`make faults` runs these alone."""

    def test_all_hosts_are_exchanged(self):
        for sharded in (0, 1):
            with self.subTest(sharded=sharded):
                self.begin_anew()
                self.start(4, discovered=[0, 1], min_n=2, options=("--max-n", "2"), EPOCHS=12, SHARD=sharded)
                self.wait_for(1, "step 10")
                self.name_hosts([2, 3])
                for rank in (0, 1):
                    self.wait_for(rank, "left")
                self.expect_trained([2, 3], 1)
                self.expect_end(0)

    def test_the_connection_to_a_host_breaks(self):
        """The host's worker leaves: the launcher would not reach it any more."""
        self.begin(3, EPOCHS=6)
        client = b"ssh\0", b"\0" + self.hosts.address(2).encode() + b"\0"
        [client] = [p for p in self.hosts.processes(0) if self.command_line(p).startswith(client[0]) and client[1] in self.command_line(p)]
        self.kill(client)
        self.wait_for(2, "left")
        self.expect_trained([0, 1], 1)
        self.expect_end(0)

    @staticmethod
    def command_line(process):
        with contextlib.suppress(OSError):
            return pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
        return b""

    def test_a_launcher_ends_before_the_job_has_begun(self):
        self.start(3)
        self.job.send_signal(signal.SIGKILL)
        self.job.wait()
        end = time.monotonic() + 30
        while any(b"elastic_fit_program" in self.command_line(process) for host in range(3) for process in self.hosts.processes(host)):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_the_launchers_host_is_lost_while_workers_print_much(self):
        """Nobody reads that any more."""
        self.start(3, EPOCHS=6, KILOBYTES=500)
        reader = threading.Thread(target=self.job.stdout.read)
        reader.start()
        self.addCleanup(reader.join)
        self.wait_for(1, "step 10")
        self.lose(0, at_once=True)
        self.expect_trained([1, 2], 6)

    def test_a_discovery_script_that_hangs_or_fails(self):
        def end(script):
            command = [LOCKSTEP, "run", "--host-discovery", script, "--min-n", "1", "true"]
            return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stderr

        self.assertIn("did not end within 10 s", end("exec sleep 1000"))
        self.start(3, discovered=[0, 1])
        self.wait_for(1, "step 10")
        (self.folder / "hosts").unlink()
        self.expect_trained([0, 1], 1)
        self.assertIn("ended with status 1; the hosts stay as they are", self.expect_end(0))

    def test_hosts_are_lost_one_right_after_the_other(self):
        """The second is lost while the others make a group at its store."""
        for pause in (0, 0.01, 0.03, 0.1, 0.3):
            with self.subTest(pause=pause):
                self.begin_anew()
                self.begin(5)
                self.lose(0, False)
                time.sleep(pause)
                self.lose(1, pause > 0.02)
                self.expect_trained([2, 3, 4], 15)  # where they wait at its store, for each other, until regroup_seconds

    def test_two_of_five_are_lost_at_once(self):
        self.begin(5)
        self.hosts.cut_off(3)
        self.hosts.cut_off(4)
        self.expect_trained([0, 1, 2], 8)

    def test_a_link_is_down_for_ten_seconds(self):
        self.begin(3, EPOCHS=12)
        self.hosts.cut_off(2)
        time.sleep(10)
        self.hosts.join(2)
        self.assertEqual(self.expect_one_view(), [0, 1])
        self.expect_end(0)

    def test_a_link_that_comes_and_goes(self):
        self.begin(3, EPOCHS=12)
        for pause in (0.2, 0.5, 1, 2, 4):
            self.hosts.cut_off(2)
            time.sleep(pause)
            self.hosts.join(2)
            time.sleep(pause)
        self.assertEqual(self.expect_one_view()[:2], [0, 1])
        self.expect_end(0)

    def test_what_a_host_sends_is_lost(self):
        self.begin(3, EPOCHS=12)
        self.hosts.lose_what_it_sends(2)
        self.assertEqual(self.expect_one_view(), [0, 1])

    def test_a_worker_is_stopped(self):
        self.begin(3, EPOCHS=10, VICTIM=2, TIMEOUT=3)
        stopped = int(re.search(r"worker at (\d+)", self.log(2))[1])
        os.kill(stopped, signal.SIGSTOP)
        self.expect_trained([0, 1], 3 + 5)
        os.kill(stopped, signal.SIGCONT)
        self.wait_for(2, "the others took rank 2 for lost, and go on without it")
        self.assertIn("rank 2 has not come", self.expect_end(0))

    def test_a_host_that_fails_again_and_again_is_left_out_for_longer_each_time(self):
        self.start(3, discovered=[0, 1, 2], options=("--blacklist-cooldown", "0.5"), EPOCHS=20, VICTIM=0)
        ended = []
        for life in range(4):  # ranks are numbered on
            rank = 2 + life
            self.wait_for(rank, "joined at step" if life > 0 else "worker at")
            self.wait_for(0, "step 10")
            os.kill(int(re.search(r"worker at (\d+)", self.log(rank))[1]), signal.SIGKILL)
            ended.append(time.monotonic())
            self.wait_for(rank + 1, "worker at")
            self.assertGreater(time.monotonic() - ended[-1], 0.5 * 2**life)
        self.wait_for(6, "joined at step")
        self.expect_trained([0, 1, 6], 2)
        self.assertIn("is left out for 4 s", self.expect_end(0))


unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
