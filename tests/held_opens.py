"""Opens of files in a folder that wait until they are allowed: by Linux's fanotify, which is root's."""
import ctypes
import os
import select
import struct

CONTENT, OPEN_PERMISSION, OF_CHILDREN, ADD, ALLOW, HERE = 4, 0x10000, 0x08000000, 1, 1, -100
EVENT = struct.Struct("=IBBHQii")


def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


class Held:
    """An open, and the name of its file; empty where there was none."""

    def __init__(self, opens=None, file=None):
        self.opens, self.file = opens, file
        self.name = os.readlink(f"/proc/self/fd/{file}") if opens else ""

    def is_of(self, part):
        return part in os.path.basename(self.name)

    def allow(self):
        os.write(self.opens, struct.pack("=iI", self.file, ALLOW))
        os.close(self.file)


class HeldOpens:
    """While the block runs, each open of a file in the folder, which must be there."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        self.opens = call("fanotify_init", CONTENT, os.O_RDONLY)
        call("fanotify_mark", self.opens, ADD, ctypes.c_uint64(OPEN_PERMISSION | OF_CHILDREN), HERE, os.fsencode(self.folder))
        self.waiting = []
        return self

    def __exit__(self, *_):
        os.close(self.opens)  # which allows those that wait
        for held in self.waiting:
            os.close(held.file)

    def wait(self, until):
        """The next one that waits, or none where until() says so first."""
        while not self.waiting:
            if select.select([self.opens], [], [], 0.05)[0]:
                events = os.read(self.opens, 4096)
                for at in range(0, len(events), EVENT.size):
                    self.waiting.append(Held(self.opens, EVENT.unpack_from(events, at)[5]))
            elif until():
                return Held()
        return self.waiting.pop(0)
