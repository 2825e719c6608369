"""Measures a link: plain sockets send and receive at once, SIZE bytes each way. The first prints one line of JSON.

    raw_stream.py listen ADDRESS PORT SIZE...
    raw_stream.py connect ADDRESS PORT SIZE...
"""
import json
import socket
import sys
import threading
import time

ROUNDS = 3
role, address, port, *sizes = sys.argv[1:]
if role == "listen":
    listener = socket.create_server((address, int(port)))
    link, _ = listener.accept()
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            link = socket.create_connection((address, int(port)), timeout=20)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(size):
    buffer = memoryview(bytearray(1 << 20))
    while size > 0:
        count = link.recv_into(buffer, min(size, len(buffer)))
        if count == 0:
            raise ConnectionError("the other side has gone")
        size -= count


def both_ways(data):
    sender = threading.Thread(target=link.sendall, args=(data,))
    sender.start()
    receive(len(data))
    sender.join()


microseconds = {}
for size in map(int, sizes):
    data = bytes(size)
    both_ways(b"x")
    both_ways(data)
    start = time.perf_counter()
    for _ in range(ROUNDS):
        both_ways(data)
    microseconds[size] = 1e6 * (time.perf_counter() - start) / ROUNDS
if role == "listen":
    print(json.dumps({"us": microseconds}))
