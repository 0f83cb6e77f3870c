"""Two hosts (network namespaces): a coordinator that others reach over TLS, tokens of roles from
files, and a link that goes away for a while, or for good: noticed within the lease of 10 s, by both
sides. Needs root and ip(8)."""
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

PROGRAM, LIBRARY = os.environ["DRAY_PROGRAM"], os.environ["DRAY_LIBRARY"]
LEASE, ROOM = 10, 10  # seconds: what is stated, and what a loaded machine may add
EPERM, ECLOSED = -22, -15


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("address", ctypes.c_char_p), ("name", ctypes.c_char_p),
                ("role", ctypes.c_char_p), ("host", ctypes.c_char_p), ("rank", ctypes.c_uint32),
                ("timeout_ns", ctypes.c_int64), ("trusted_networks", ctypes.c_char_p)]


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("origin", ctypes.c_int32), ("raw", ctypes.c_int64),
                ("message", ctypes.c_char * 496)]


def client(address, role, seconds):
    """Opens a session; told to, waits at a barrier that nobody else enters; prints what became of it."""
    dray, context, error = ctypes.CDLL(LIBRARY), ctypes.c_void_p(), Error()
    options = Options(ctypes.sizeof(Options), address.encode(), b"far", role.encode() or None, None, 0,
                      20 * 10**9, None)
    code = dray.dray_open(ctypes.byref(options), ctypes.byref(context), ctypes.byref(error))
    print(json.dumps({"open": code, "message": error.message.decode()}), flush=True)
    if code == 0:
        sys.stdin.readline()
        begin = time.monotonic()
        dray.dray_barrier.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32,
                                      ctypes.c_int64, ctypes.c_void_p]
        code = dray.dray_barrier(context, b"never", 2, int(seconds) * 10**9, ctypes.byref(error))
        print(json.dumps({"barrier": code, "after": time.monotonic() - begin,
                          "message": error.message.decode()}), flush=True)


def run(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def sessions(folder):
    text = subprocess.run([PROGRAM, "status", "--json", "--connect", f"unix:{folder}/s"],
                          check=True, stdout=subprocess.PIPE).stdout
    return {s["name"]: s for s in json.loads(text)["sessions"]}


def start_client(space, token, role, seconds, address):
    environment = dict(os.environ, DRAY_TOKEN_FILE=token)
    return subprocess.Popen(["ip", "netns", "exec", space, sys.executable, __file__, "client", address,
                             role, str(seconds)], env=environment, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def check(folder, near, far):
    for space in (near, far):
        run("ip", "netns", "add", space)
        run("ip", "-n", space, "link", "set", "lo", "up")
    run("ip", "link", "add", near, "netns", near, "type", "veth", "peer", "name", far, "netns", far)
    for space, at in ((near, "10.97.0.1/24"), (far, "10.97.0.2/24")):
        run("ip", "-n", space, "addr", "add", at, "dev", space)
        run("ip", "-n", space, "link", "set", space, "up")
    master, engine = f"{folder}/master.token", f"{folder}/engine.token"
    server = subprocess.Popen(["ip", "netns", "exec", near, PROGRAM, "serve", "--json", "--listen",
                               f"unix:{folder}/s", "--listen", "tcp:0.0.0.0:7411", "--master", master],
                              stdout=subprocess.PIPE, text=True)
    children = [server]
    try:
        assert json.loads(server.stdout.readline())["event"] == "listening"
        run(PROGRAM, "token", "--role", "engine", "--master", master, "--out", engine)
        assert os.stat(engine).st_mode & 0o777 == 0o600
        address = "tcp:10.97.0.1:7411"

        thief = start_client(far, engine, "trainer", 1, address)
        children.append(thief)
        told = json.loads(thief.stdout.readline())
        assert told["open"] == EPERM, told
        thief.communicate()

        held = start_client(far, engine, "", 100, address)
        children.append(held)
        assert json.loads(held.stdout.readline())["open"] == 0
        assert sessions(folder)["far"]["role"] == "engine"
        run("ip", "-n", far, "link", "set", far, "down")  # for a while: nobody notices,
        print(file=held.stdin, flush=True)  # not a call either that needs a connection of its own now
        time.sleep(5)
        run("ip", "-n", far, "link", "set", far, "up")
        time.sleep(LEASE - 3)
        assert "far" in sessions(folder), f"5 s without a link ended a session: {held.stdout.readline()}"

        run("ip", "-n", far, "link", "set", far, "down")  # for good
        begin = time.monotonic()
        while "far" in sessions(folder):
            assert time.monotonic() - begin < LEASE + ROOM, "a dead link was not noticed"
            time.sleep(0.25)
        noticed = time.monotonic() - begin
        told = json.loads(held.stdout.readline())
        assert told["barrier"] == ECLOSED, told
        print(f"the coordinator noticed after {noticed:.1f} s, the client in the same time")
        server.terminate()
        assert server.wait(20) == 0
        assert os.path.exists(master)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def main():
    if os.geteuid() != 0 or not shutil.which("ip"):
        print("root and ip are needed")
        sys.exit(77)
    near, far = f"dray-n{os.getpid()}"[:15], f"dray-f{os.getpid()}"[:15]
    if subprocess.run(["ip", "netns", "add", near], stderr=subprocess.DEVNULL).returncode:
        print("no network namespaces here")
        sys.exit(77)
    run("ip", "netns", "del", near)
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(folder, near, far)
        finally:
            for space in (near, far):
                subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "client":
        client(*sys.argv[2:])
    else:
        main()
