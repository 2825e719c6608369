"""Another user of the host, who wants to take part in jobs. Needs root, to become that user."""
import contextlib
import encodings.idna  # which another user may not be able to read
import os
import pathlib
import re
import select
import signal
import socket
import threading
import time
import traceback

STRANGER = 54321  # a user's number that nobody has


def listening(of_user=0):
    """The inodes and ports of this user's sockets that listen on TCP."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[7]) == of_user:
                found[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    return found


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
    """Returns the bytes that come until the other end closes or the time is over."""
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
        """Gives an order, and returns what the stranger said until it had obeyed."""
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
            listener = take(port)
            threading.Thread(target=self.relay, args=(listener,), daemon=True).start()

    def relay(self, listener):
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=self.serve, args=(caller,), daemon=True).start()

    def serve(self, caller):
        """Relays a caller; only hears where no port of the job is known yet."""
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
        """Tries to take the job's ports, and says there what it heard, and what a client of gRPC says. The connections stay."""
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
        """Says what was answered meanwhile."""
        for real in self.open:
            answer = received(real, 0.01)
            self.say(f"answer {len(answer)} {answer[:4]}")
        self.open = []
