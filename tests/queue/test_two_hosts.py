"""A queue over two hosts (network namespaces): rows are put on the far host, into its own keeper, and
read on the near one through TLS, or without on a network that is named as trusted; nothing of a row
passes in the clear through TLS; the far host is cut off, and what lay there is lost and dropped.
Needs root and ip(8)."""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

PROGRAM = os.environ["DRAY_PROGRAM"]
LEASE, ROOM = 15, 15  # seconds: what is stated, and what a loaded machine may add


def run(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


class Host:
    def __init__(self, space, folder, **environment):
        self.space, self.folder = space, f"{folder}/{space}"
        os.mkdir(self.folder, 0o700)
        self.environment = dict(os.environ, DRAY_HOST=space, XDG_RUNTIME_DIR=self.folder,
                                **environment)

    def start(self, *words, **more):
        return subprocess.Popen(["ip", "netns", "exec", self.space, PROGRAM, *words],
                                env=dict(self.environment, **more), stdout=subprocess.PIPE, text=True)

    def queue(self, *words, **more):
        done = subprocess.run(["ip", "netns", "exec", self.space, PROGRAM, "queue", *words],
                              env=dict(self.environment, **more), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=90)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


class Listener(threading.Thread):
    """All that crosses the link, as tcpdump would see it."""

    def __init__(self, space):
        super().__init__(daemon=True)
        self.seen, self.stop = bytearray(), False
        self.space = space
        self.ready = threading.Event()

    def run(self):
        with open(f"/run/netns/{self.space}") as name:
            import ctypes
            if ctypes.CDLL(None, use_errno=True).setns(name.fileno(), 0x40000000):
                return  # of this thread alone
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        packets.settimeout(0.1)
        self.ready.set()
        while not self.stop:
            try:
                self.seen += packets.recv(1 << 17)
            except TimeoutError:
                pass


def pass_rows(near, far, partition, secret):
    """Puts rows there, reads them here, answers, reads the answers there."""
    rows = [{"prompts": f"{secret} {i} " * (1 + i % 50)} for i in range(200)]
    listener = Listener(near.space)
    listener.start()
    assert listener.ready.wait(10)
    far.queue("insert", "-p", partition, *[json.dumps(r) for r in rows[:50]])
    with open(f"{far.folder}/rows.jsonl", "w") as file:
        file.write("".join(json.dumps(r) + "\n" for r in rows[50:]))
    far.queue("load", f"{far.folder}/rows.jsonl", "-p", partition, "--seal")
    claim = near.queue("claim", "-t", "answer", "-p", partition, "-n", "200").split()[0]
    assert rows_of(near.queue("read", claim, "-l", "prompts")) == rows
    answers = [{"answers": secret + r["prompts"].upper()} for r in rows]
    with open(f"{near.folder}/answers.jsonl", "w") as file:
        file.write("".join(json.dumps(r) + "\n" for r in answers))
    near.queue("commit", claim, f"{near.folder}/answers.jsonl")
    claim = far.queue("claim", "-t", "train", "-p", partition, "-n", "200").split()[0]
    read = rows_of(far.queue("read", claim))
    assert [r["answers"] for r in read] == [a["answers"] for a in answers]
    far.queue("commit", claim)
    listener.stop = True
    listener.join()
    assert len(listener.seen) > 100000
    return secret.encode() in listener.seen


def cut_off(near, far):
    far.queue("insert", "-p", "cut", *[json.dumps({"prompts": f"cut {i}"}) for i in range(8)])
    near.queue("insert", "-p", "cut", json.dumps({"prompts": "near"}))
    near.queue("seal", "-p", "cut")
    run("ip", "-n", far.space, "link", "set", "eth0", "down")
    begin = time.monotonic()
    while True:
        status = json.loads(near.queue("stat", "--json"))
        cut = next(p for p in status["partitions"] if p["name"] == "cut")
        if cut["vacant"] == 8:
            break
        assert time.monotonic() - begin < LEASE + ROOM, cut
        time.sleep(0.2)
    assert cut["lost"]["bytes_lost"] == 8, cut
    claim = near.queue("claim", "-t", "answer", "-p", "cut", "-u", "-n", "9").split()[0]
    assert rows_of(near.queue("read", claim)) == [{"prompts": "near"}]
    near.queue("release", claim)


def check(folder, names, phase, environment):
    near, far = (Host(n, folder, **environment) for n in names)
    master, token = f"{folder}/master.token", f"{folder}/task.token"
    server = near.start("serve", "--json", "--listen", f"unix:{near.folder}/s", "--listen",
                        "tcp:0.0.0.0:7412", "--master", master)
    children = [server]
    try:
        assert json.loads(server.stdout.readline())["event"] == "listening"
        run(PROGRAM, "token", "--role", "task", "--master", master, "--out", token)
        near.environment["DRAY_ADDRESS"] = f"unix:{near.folder}/s"
        far.environment.update(DRAY_ADDRESS="tcp:10.98.0.1:7412", DRAY_TOKEN_FILE=token)
        near.queue("open", "--task", "answer:prompts>answers", "--task", "train:answers")
        refused = subprocess.run(["ip", "netns", "exec", far.space, PROGRAM, "queue", "insert", "-p",
                                  "x", '{"prompts": "?"}'], env=far.environment, text=True,
                                 stderr=subprocess.PIPE)
        assert refused.returncode == 1 and "dray keeper" in refused.stderr, refused.stderr
        keeper = far.start("keeper", "--json")
        children.append(keeper)
        event = json.loads(keeper.stdout.readline())
        assert event["endpoint"].startswith("tcp:10.98.0.2:"), event
        assert pass_rows(near, far, phase, f"secret-{phase}-") == (phase == "trusted")
        if phase == "trusted":
            cut_off(near, far)
        else:
            for child in reversed(children):
                child.terminate()
                assert child.wait(20) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()


def main():
    if os.geteuid() or not shutil.which("ip"):
        print("needs root and ip(8)")
        return 77
    names = [f"drayq{os.getpid()}{x}" for x in "ab"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                if subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL).returncode:
                    print("no network namespaces here")
                    return 77
            run("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0",
                "netns", names[1])
            for name, at in zip(names, ("10.98.0.1/24", "10.98.0.2/24")):
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "addr", "add", at, "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
            for phase, environment in (("tls", {}),
                                       ("trusted", {"DRAY_TRUSTED_NETWORKS": "10.98.0.0/24"})):
                os.mkdir(f"{folder}/{phase}")
                check(f"{folder}/{phase}", names, phase, environment)
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
    return 0


sys.exit(main())
