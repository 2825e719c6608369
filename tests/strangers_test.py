"""Another user of the host against jobs: strangers_test.py LOCKSTEP SERVERS, beside which the program of elastic_fit_test is. Needs root, to become another user."""
import contextlib
import encodings.idna  # which another user may not be able to read
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest

LOCKSTEP, SERVERS = sys.argv[1:3]
WORKERS = str(pathlib.Path(SERVERS).with_name("elastic_fit_program"))
STRANGER = 54321  # a user's number that nobody has
LIMIT_S = 120
STEPS_AN_EPOCH = 50
OPENING, ANSWER = 96 + 18 + 32, 96 + 32  # bytes of the handshake before the answering end is known, and of its answer


def listening(of_user=0):
    """The inodes and ports of this user's sockets that listen on TCP."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[7]) == of_user:
                found[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    return found


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


def wait_for(what, seconds=60, between_s=0.01):
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end:
            raise RuntimeError("it did not come")
        time.sleep(between_s)
    return found


@contextlib.contextmanager
def another_user(act):
    """Calls act(say) in a process of another user until the block ends; say(text) appends to the list that is yielded."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.close(reading)
            act(lambda text: os.write(writing, (text + "\n").encode()))
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    said = []

    def read():
        with os.fdopen(reading) as lines:
            for line in lines:
                said.append(line)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield said
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reader.join()


def take(port):
    """Listens at the port as soon as it is free."""
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
            return listener
        listener.close()
        time.sleep(0.001)


def received(connection, seconds):
    """What comes until the other end closes or the time is over."""
    connection.settimeout(seconds)
    came = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            came += piece
    return came


class Stranger:
    """Another user's process, which relays between the callers of its ports and the job, changes the addresses that pass, and says what it heard to others."""
    ELSEWHERE = 45998  # to which it changes them

    def __init__(self):
        reading, self.orders = os.pipe()
        self.user = another_user(lambda say: self.obey(os.fdopen(reading), say))
        self.said = self.user.__enter__()
        os.close(reading)

    def end(self):
        os.close(self.orders)
        self.user.__exit__(None, None, None)

    def order(self, *words):
        """Returns what it said until it had done that."""
        before = len(self.said)
        os.write(self.orders, (" ".join(map(str, words)) + "\n").encode())
        wait_for(lambda: "done\n" in self.said[before:])
        return self.said[before:]

    # --- In the other process.

    def obey(self, orders, say):
        self.heard, self.open, self.ports = [], [], []
        self.say = say
        threading.Thread(target=self.be_called, args=(take(self.ELSEWHERE),), daemon=True).start()
        for line in orders:
            what, *ports = line.split()
            {"take": self.listen, "try": self.attack, "tell": self.tell}[what]([int(port) for port in ports])
            say("done")

    def be_called(self, listener):
        listener.accept()
        self.say("a process of the job has called the stranger")

    def listen(self, ports):
        for port in ports:
            threading.Thread(target=self.relay, args=(take(port),), daemon=True).start()

    def relay(self, listener):
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=self.serve, args=(caller,), daemon=True).start()

    def serve(self, caller):
        """Where it knows no port of the job yet it only hears."""
        first = True
        for there in list(self.ports) or [None]:
            with contextlib.suppress(OSError):
                real = socket.create_connection(("127.0.0.1", there)) if there else None
                ends = {caller: real, real: caller} if real else {caller: None}
                while ready := select.select(list(ends), [], [], 5)[0]:
                    for one in ready:
                        piece = one.recv(65536)
                        if one is caller and piece and first:
                            first = False
                            self.heard.append(piece)
                            self.say(f"heard {len(piece)}")
                        if changed := re.findall(rb"127\.0\.0\.1:\d{5}", piece):
                            self.say(f"saw {changed}")
                        if not piece or not ends[one]:
                            raise OSError
                        ends[one].sendall(re.sub(rb"(127\.0\.0\.1:)\d{5}", rb"\g<1>%d" % self.ELSEWHERE, piece))
        caller.close()

    def attack(self, ports):
        """The job's ports: tries to take them, to be answered for what it heard, and for what a client of gRPC says. The connections stay."""
        self.ports = ports
        for port in ports:
            for host in ("127.0.0.1", "0.0.0.0"):
                with contextlib.suppress(OSError), socket.socket() as thief:
                    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    thief.bind((host, port))
                    thief.listen()
                    self.say(f"took port {port} at {host}")
            for words in [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 200, *(heard + heard for heard in self.heard[-3:])]:
                with contextlib.suppress(OSError):
                    real = socket.create_connection(("127.0.0.1", port), 1)
                    self.open.append(real)
                    real.sendall(words)

    def tell(self, _):
        """What was answered meanwhile."""
        for real in self.open:
            answer = received(real, 0.01)
            self.say(f"answer {len(answer)} {answer[:4]}")
        self.open = []


class Jobs(unittest.TestCase):
    """What the tests of both tiers use."""

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
        """Its process, and the port at which its only server answers, once it trains."""
        job = self.start(LOCKSTEP, "run", "--workers", "1", "--ps", "1", *options, SERVERS, str(epochs), str(work_ms), *program)
        wait_for(lambda: "trains" in job.output() or job.poll() is not None)
        server = int(re.search(r"ps 0 at (\d+)", job.output())[1])
        return job, server, port_of(server)

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

    def stop_in_each_phase(self, program, run, saves, trains, **variables):
        """The ranks of a job under torchrun, stopped before the store is held, while ranks join, in training, and while they save, with a stranger at the job's first port."""
        start = lambda rank: self.by_torchrun(program, rank, TORCHELASTIC_RUN_ID=run, **variables)
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
        """While a file that they write has no name yet."""
        writing = lambda: folder.exists() and any(".tmp." in name for name in os.listdir(folder))
        ended = lambda: any(process.poll() is not None for process in processes)
        while not ended():
            wait_for(lambda: ended() or writing(), between_s=0)
            if ended():
                break
            with contextlib.ExitStack() as all_stopped:
                for process in processes:
                    all_stopped.enter_context(self.stopped(process))
                if writing():
                    return act()
        self.fail("no save could be met")


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

    def ranks_by_slurm(self, number, count=3):
        for rank in range(count):
            yield self.start(SERVERS, "6", "1", environment={
                "NUM_PS": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "here",
                "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0"})

    def test_a_relay_at_the_first_port_of_a_job_is_not_used(self):
        """The port follows from Slurm's numbers. The stranger takes it first, relays to the store and changes the addresses that it tells."""
        number = os.getpid()
        alone, = self.ranks_by_slurm(number, count=1)
        port = wait_for(lambda: port_of(alone.pid))
        alone.kill()
        alone.wait()

        def relay(say):
            listener, evil = take(port), take(45998)
            say("listens")

            def serve(caller):
                for there in sorted(set(listening().values()) - {port}):
                    if not 10_000 <= there < 30_000:
                        continue
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", there)) as real:
                        ends = {caller: real, real: caller}
                        while True:
                            for one in select.select(list(ends), [], [])[0]:
                                if not (piece := one.recv(65536)):
                                    return
                                if changed := re.findall(rb"127\.0\.0\.1:\d{5}", piece):
                                    say(f"saw {changed}")
                                ends[one].sendall(re.sub(rb"(127\.0\.0\.1:)\d{5}", rb"\g<1>45998", piece))

            def be_called():
                evil.accept()
                say("a process of the job has called the stranger")
            threading.Thread(target=be_called, daemon=True).start()
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        with another_user(relay) as said:
            wait_for(lambda: port in listening(STRANGER).values())
            ranks = list(self.ranks_by_slurm(number))
            for rank in ranks:
                self.assertEqual(rank.wait(LIMIT_S), 0, rank.output())
        self.assertIn(f"steps {STEPS_AN_EPOCH * 6}, updates by a batch 6 to 6,", ranks[0].output())
        self.assertEqual(said, ["listens\n"])

    def test_workers_by_torchrun_that_are_stopped(self):
        """They train what one process does, whatever the stranger tries meanwhile."""
        backup = self.folder / "backup"
        variables = {"EPOCHS": 8, "STEP_MS": 20, "VICTIM": 1, "STEP": 5, "PLACE": "print"}
        ranks = self.stop_in_each_phase([WORKERS], f"workers {os.getpid()}", backup, "step 5\n", FOLDER=self.folder, **variables)
        alone = self.start(WORKERS, environment={"EPOCHS": "8"})
        self.assertEqual(alone.wait(LIMIT_S), 0, alone.output())
        weights = lambda process: [float(word) for word in re.search(r"steps 160, weights (.*)", process.output())[1].split()]
        for rank in ranks.values():
            for got, expected in zip(weights(rank), weights(alone), strict=True):
                self.assertAlmostEqual(got, expected, delta=1e-9)


class MoreStrangers(Jobs):
    def test_servers_by_torchrun_that_are_stopped(self):
        """Each batch is applied once an epoch, whatever the stranger tries meanwhile."""
        backup = self.folder / "backup"
        ranks = self.stop_in_each_phase([SERVERS, "20", "5"], f"servers {os.getpid()}", backup, "trains", NUM_PS=1, BACKUP=backup)
        self.assertIn(f"steps {STEPS_AN_EPOCH * 20}, updates by a batch 20 to 20,", ranks[0].output())

    def test_a_port_that_is_told_and_taken(self):
        """Without torchrun's number of the run rank 0 listens at MASTER_PORT itself: it says that the port is taken, and the others speak to nobody."""
        stranger, port = self.stranger(), 45_000 + os.getpid() % 900
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
        port = 45_900 + os.getpid() % 90
        ranks = [self.by_torchrun([WORKERS], rank, port=port, EPOCHS=50, STEP_MS=20, VICTIM=1, STEP=5, PLACE="print") for rank in range(3)]
        wait_for(lambda: "step 5\n" in ranks[1].output())
        stranger = self.stranger()
        ranks[0].kill()
        stranger.order("take", port)
        for rank in ranks[1:]:
            self.assertNotEqual(rank.wait(LIMIT_S), 0, rank.output())
        self.assert_learned_nothing(stranger.said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
