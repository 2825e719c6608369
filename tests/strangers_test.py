"""Another user of the host against jobs with parameter servers: strangers_test.py LOCKSTEP SERVERS. Needs root, to become another user."""
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


def port_of(pid):
    ports = listening()
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            if inode and inode[1] in ports:
                return ports[inode[1]]
    return None


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end:
            raise RuntimeError("it did not come")
        time.sleep(0.01)
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


class Strangers(unittest.TestCase):
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


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
