"""Another user of the host against jobs: strangers_test.py LOCKSTEP SERVERS, beside which the program of elastic_fit_test is. Needs root, to become another user."""
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from free_ports import free_ports
from held_opens import HeldOpens
from stranger import Stranger, another_user, listening, received, take, wait_for

LOCKSTEP, SERVERS = sys.argv[1:3]
WORKERS = str(pathlib.Path(SERVERS).with_name("elastic_fit_program"))
LIMIT_S = 120
STEPS_AN_EPOCH = 50
OPENING, ANSWER = 96 + 18 + 32, 96 + 32  # bytes of the handshake before the answering end is known, and of its answer


def ports_of(pid):
    ports, found = listening(), []
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            if inode and inode[1] in ports:
                found.append(ports[inode[1]])
    return found


def port_of(pid):
    return next(iter(ports_of(pid)), None)


class Process:
    """A process that another process has started."""

    def __init__(self, pid):
        self.pid = pid

    def send_signal(self, number):
        os.kill(self.pid, number)

    def poll(self):
        return None if pathlib.Path(f"/proc/{self.pid}").exists() else 0


class Jobs(unittest.TestCase):
    """The processes that the tests of both tiers use."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def start(self, *command, environment=None):
        """A process whose output goes to a file."""
        name = f"out{len(list(self.folder.glob('out*')))}"
        with open(self.folder / name, "w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder, env={**os.environ, **(environment or {})})
        self.addCleanup(lambda: process.poll() is None and (process.kill(), process.wait()))
        process.output = lambda: (self.folder / name).read_text()
        return process

    def start_training(self, *options, epochs=6, work_ms=10, program=()):
        """Starts a job; returns its process, and the port at which its only server answers, once it trains."""
        job = self.start(LOCKSTEP, "run", "--workers", "1", "--ps", "1", *options, SERVERS, str(epochs), str(work_ms), *program)
        wait_for(lambda: "trains" in job.output() or job.poll() is not None)
        server = int(re.search(r"ps 0 at (\d+)", job.output())[1])
        return job, server, port_of(server)

    def wait_for_step(self, process, step):
        wait_for(lambda: f"step {step}\n" in process.output() or process.poll() is not None)
        self.assertIn(f"step {step}\n", process.output())

    def assert_trained(self, job, epochs=6):
        self.assertEqual(job.wait(LIMIT_S), 0, job.output())
        self.assertIn(f"steps {STEPS_AN_EPOCH * epochs}, updates by a batch", job.output())

    def assert_learned_nothing(self, said):
        """The opening of a handshake is heard, and answered by no more than a true one without a proof would be."""
        for line in said:
            self.assertRegex(line, r"^(done|heard \d+|answer \d+ b'(LCKS)?')$")
            words = line.split()
            if words[0] != "done":
                self.assertLessEqual(int(words[1]), OPENING if words[0] == "heard" else ANSWER, line)

    VARIABLES = {"EPOCHS": 8, "STEP_MS": 20, "VICTIM": 1, "STEP": 5, "PLACE": "print"}  # of WORKERS

    def assert_trained_as_alone(self, outputs):
        alone = self.start(WORKERS, environment={"EPOCHS": str(self.VARIABLES["EPOCHS"])})
        self.assertEqual(alone.wait(LIMIT_S), 0, alone.output())
        weights = lambda output: [float(word) for word in re.search(r"steps 160, weights (.*)", output)[1].split()]
        for output in outputs:
            for got, expected in zip(weights(output), weights(alone.output()), strict=True):
                self.assertAlmostEqual(got, expected, delta=1e-9)

    def by_torchrun(self, program, rank, count=3, port=29500, **variables):
        """A rank as torchrun starts it, one on each of `count` nodes, which reach each other over TCP."""
        token = self.folder / "token"
        if not token.exists():
            token.touch(0o600)
            token.write_text("5a" * 32)
        given = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 "LOCKSTEP_TOKEN_FILE": token, **variables}
        return self.start(*program, environment={name: str(value) for name, value in given.items()})

    def stranger(self):
        stranger = Stranger()
        self.addCleanup(stranger.end)
        return stranger

    @contextlib.contextmanager
    def stopped(self, process):
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: " T " in pathlib.Path(f"/proc/{process.pid}/stat").read_text())
        yield
        process.send_signal(signal.SIGCONT)

    def by_slurm(self, program, rank, number, count=3, **variables):
        """A rank as Slurm starts it on this host."""
        given = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NODELIST": "here",
                 "SLURM_STEP_TASKS_PER_NODE": count, "SLURM_JOB_ID": number, "SLURM_STEP_ID": 0, **variables}
        return self.start(*program, environment={name: str(value) for name, value in given.items()})

    def stop_in_each_phase(self, start, saves, trains):
        """Stops a job's ranks before the store is held, while ranks join, in training and in saving. A stranger is at the job's first port, which follows from the launcher's variables."""
        alone = start(0)
        first_port = wait_for(lambda: port_of(alone.pid))
        alone.kill()
        alone.wait()
        stranger = self.stranger()
        stranger.order("take", first_port)
        ranks = {rank: start(rank) for rank in (1, 2)}
        attack = lambda: stranger.order("try", *sorted({port for rank in ranks.values() for port in ports_of(rank.pid)} - {first_port}))
        wait_for(lambda: len([line for line in stranger.said if line.startswith("heard")]) >= 2)
        with self.stopped(ranks[1]):
            attack()
            ranks[0] = start(0)
            wait_for(lambda: port_of(ranks[0].pid))
            with self.stopped(ranks[0]):
                attack()
            attack()
        with self.stopped(ranks[0]):
            attack()
        wait_for(lambda: trains in "".join(rank.output() for rank in ranks.values()))
        for rank in ranks.values():
            with self.stopped(rank):
                attack()
        if saves:
            self.stop_in_a_save(ranks.values(), saves, attack)
        for rank in ranks.values():
            self.assertEqual(rank.wait(LIMIT_S), 0, rank.output())
        stranger.order("tell")
        self.assert_learned_nothing(stranger.said)
        return ranks

    def stop_in_a_save(self, processes, folder, act):
        """Calls act with processes stopped while the file that they write has no name yet: its open waits until all are stopped."""
        ended = lambda: any(process.poll() is not None for process in processes)
        with HeldOpens(folder) as opens:
            held = opens.wait(until=ended)
            while held.name and not held.is_of(".tmp."):
                held.allow()
                held = opens.wait(until=ended)
            self.assertTrue(held.name, "one ended without a save")
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            held.allow()
        with contextlib.ExitStack() as all_stopped:
            for process in processes:
                all_stopped.enter_context(self.stopped(process))
            self.assertIn(".tmp.", "".join(os.listdir(folder)))
            act()


class Strangers(Jobs):
    def test_idle_connections_stop_nobody(self):
        """A worker that is started again reaches its server beside them, and what a client of gRPC says is not answered."""
        job, _, port = self.start_training("--restarts", "1", program=("0", "100"))

        def idle(say):
            connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(900)]
            talks = socket.create_connection(("127.0.0.1", port))
            talks.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 200)
            say(f"answered by {len(received(talks, 20))} bytes, with {len(connections)} open")
            time.sleep(LIMIT_S)
        with another_user(idle) as said:
            self.assert_trained(job)
        self.assertIn("worker 0 was ended by signal 9", job.output())
        self.assertEqual(said, ["answered by 0 bytes, with 900 open\n"])

    def test_what_is_heard_at_a_freed_port_is_worth_nothing(self):
        """A stranger takes the port of a server that was killed, hears its callers, and says the same to all processes of the job."""
        job, server, port = self.start_training("--restarts", "1", "-x", f"BACKUP={self.folder / 'backup'}")

        def listen(say):
            listener = take(port)
            for _ in range(3):
                caller, _ = listener.accept()
                heard = received(caller, 0.3)
                say(f"heard {len(heard)}")
                caller.close()
                for there in set(listening().values()) - {port}:
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", there)) as real:
                        real.sendall(heard + heard)
                        answer = received(real, 0.3)
                        say(f"answer {len(answer)} {answer[:4]}")
            time.sleep(LIMIT_S)
        with another_user(listen) as said:
            time.sleep(0.2)  # so that the stranger is the first
            os.kill(server, signal.SIGKILL)
            self.assert_trained(job)
        self.assertTrue([line for line in said if line.startswith("heard") and int(line.split()[1]) > 0], said)
        for line in said:
            what, count, *begins = line.split()
            self.assertLessEqual(int(count), OPENING if what == "heard" else ANSWER, line)
            self.assertIn(begins, ([], ["b''"], ["b'LCKS'"]), line)

    def test_a_relay_at_the_first_port_of_a_job_is_not_used(self):
        """The port follows from Slurm's numbers. The stranger takes it first, relays to the store and changes the addresses that it tells."""
        start = lambda rank: self.by_slurm([SERVERS, "6", "1"], rank, os.getpid(), NUM_PS=1)
        alone = start(0)
        port = wait_for(lambda: port_of(alone.pid))
        alone.kill()
        alone.wait()

        stranger = self.stranger()
        stranger.order("take", port)
        first = start(0)
        stranger.order("try", wait_for(lambda: port_of(first.pid)))  # to which it relays from now on
        ranks = [first, start(1), start(2)]
        for rank in ranks:
            self.assertEqual(rank.wait(LIMIT_S), 0, rank.output())
        self.assertIn(f"steps {STEPS_AN_EPOCH * 6}, updates by a batch 6 to 6,", ranks[0].output())
        stranger.order("tell")
        self.assertTrue([line for line in stranger.said if line.startswith("heard")], stranger.said)
        self.assert_learned_nothing(stranger.said)

    def test_workers_by_torchrun_that_are_stopped(self):
        """They train what one process does, whatever the stranger tries meanwhile."""
        backup = self.folder / "backup"
        backup.mkdir()
        start = lambda rank: self.by_torchrun([WORKERS], rank, TORCHELASTIC_RUN_ID=f"workers {os.getpid()}", FOLDER=self.folder, **self.VARIABLES)
        ranks = self.stop_in_each_phase(start, backup, "step 5\n")
        self.assert_trained_as_alone([rank.output() for rank in ranks.values()])


class MoreStrangers(Jobs):
    def train_servers_that_are_stopped(self, start):
        """Each batch is applied once an epoch, whatever the stranger tries meanwhile."""
        backup = self.folder / "backup"
        backup.mkdir()
        ranks = self.stop_in_each_phase(lambda rank: start([SERVERS, "20", "5"], rank, NUM_PS=1, BACKUP=backup), backup, "trains")
        self.assertIn(f"steps {STEPS_AN_EPOCH * 20}, updates by a batch 20 to 20,", ranks[0].output())

    def test_servers_by_torchrun_that_are_stopped(self):
        self.train_servers_that_are_stopped(lambda *rank, **variables: self.by_torchrun(*rank, TORCHELASTIC_RUN_ID=f"servers {os.getpid()}", **variables))

    def test_servers_by_slurm_that_are_stopped(self):
        self.train_servers_that_are_stopped(lambda *rank, **variables: self.by_slurm(*rank, os.getpid(), **variables))

    def test_workers_by_lockstep_run_that_are_stopped(self):
        """The launcher holds the store. It and its ranks are stopped while they start, train and save. The stranger dials them all: nothing is dialled that it could take and replay."""
        backup, logs = self.folder / "backup", self.folder / "logs"
        backup.mkdir()
        variables = {name: str(value) for name, value in {**self.VARIABLES, "FOLDER": self.folder}.items()}
        launcher = self.start(LOCKSTEP, "run", "-n", "3", "--min-n", "3", "--log-dir", str(logs), WORKERS, environment=variables)
        stranger = self.stranger()
        log = lambda rank: (logs / f"rank-{rank}.log").read_text() if (logs / f"rank-{rank}.log").exists() else ""
        attack = lambda *processes: stranger.order("try", *sorted({port for process in processes for port in ports_of(process.pid)}))
        wait_for(lambda: ports_of(launcher.pid))
        with self.stopped(launcher):
            attack(launcher)
        ranks = [Process(int(wait_for(lambda: re.search(r"worker at (\d+)", log(rank)))[1])) for rank in range(3)]
        everybody = [launcher, *ranks]
        for trains in (False, True):
            if trains:
                wait_for(lambda: "step 5\n" in log(1))
            for process in everybody:
                with self.stopped(process):
                    attack(*everybody)
        self.stop_in_a_save(ranks, backup, lambda: attack(*everybody))
        self.assertEqual(launcher.wait(LIMIT_S), 0, launcher.output())
        self.assert_trained_as_alone([log(rank) for rank in range(3)])
        stranger.order("tell")
        self.assert_learned_nothing(stranger.said)

    def test_a_port_that_is_told_and_taken(self):
        """Without torchrun's number of the run rank 0 listens at MASTER_PORT itself: it says that the port is taken, and the others speak to nobody."""
        stranger, port = self.stranger(), free_ports(1)[0]
        stranger.order("take", port)
        ranks = [self.by_torchrun([WORKERS], rank, port=port) for rank in range(3)]
        self.assertNotEqual(ranks[0].wait(LIMIT_S), 0)
        self.assertIn(f"cannot listen at 127.0.0.1:{port}: Address already in use", ranks[0].output())
        wait_for(lambda: len([line for line in stranger.said if line.startswith("heard")]) >= 4)
        for rank in ranks[1:]:
            self.assertNotIn("worker at", rank.output())
        self.assert_learned_nothing(stranger.said)

    def test_a_port_that_the_lost_holder_of_the_store_frees(self):
        """The others end, and tell the stranger at its port nothing."""
        port = free_ports(1)[0]
        ranks = [self.by_torchrun([WORKERS], rank, port=port, EPOCHS=50, STEP_MS=20, VICTIM=1, STEP=5, PLACE="print") for rank in range(3)]
        self.wait_for_step(ranks[1], 5)
        stranger = self.stranger()
        ranks[0].kill()
        stranger.order("take", port)
        for rank in ranks[1:]:
            self.assertNotEqual(rank.wait(LIMIT_S), 0, rank.output())
        self.assert_learned_nothing(stranger.said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
