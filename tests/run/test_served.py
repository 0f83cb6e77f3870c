"""examples/gpu/served.py against a server that speaks as vLLM's does and makes a token when the test says so: responses that an
update cuts go on from their prefix, those that are kept in the server do not, each token has the version that made it; requests
that reach the server behind its pause, and a server that dies and comes again, hang nobody."""
import http.server
import json
import os
import sys
import threading

from begin import needs

sys.path.insert(0, os.environ["DRAY_SOURCE_DIR"] + "/examples/gpu")
with needs:
    from engine import Request  # imports torch
from served import Engine, Gone, Vllm

END, PATIENCE = 99, 60


class Server:
    """Tokens are the length of what is before them. Nothing happens but what the test orders."""

    def __init__(self, port=0):
        self.lock = threading.Condition()
        self.version, self.paused, self.dead, self.held, self.silent, self.free = "default", False, False, 0, False, False
        self.made, self.aborts, self.asked, self.log = 0, 0, [], []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def log_message(self, *_):
                pass

            def answer(self, what):
                body = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.answer({})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    found = server.generate(body) if self.path == "/inference/v1/generate" else server.other(self.path, body)
                if found is not None:
                    self.answer(found)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def wait(self, until):
        assert self.lock.wait_for(until, PATIENCE), "the server waits for ever"

    def generate(self, body):
        if self.held:  # it is on its way until somebody pauses
            self.held -= 1
            self.wait(lambda: self.paused)
        aborts, tokens, spans, made = self.aborts, [], [], self.made
        self.asked.append(body)
        self.lock.notify_all()
        most = body["sampling_params"]["max_tokens"]
        while len(tokens) < most and not self.dead:
            self.wait(lambda: self.dead or self.aborts > aborts or ((self.free or self.made > made) and not self.paused))
            if self.dead or self.aborts > aborts:
                break
            made += 1
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(tokens), "end": len(tokens)})
            tokens.append(len(body["token_ids"]) + len(tokens))
            spans[-1]["end"] += 1
            self.log.append((tokens[-1], self.version, body["cache_salt"]))
            self.lock.notify_all()
        if self.dead:
            return None
        return {"choices": [{"token_ids": tokens, "weight_versions": [] if self.silent else spans, "finish_reason":
                             "abort" if self.aborts > aborts else "length",
                             "logprobs": {"content": [{"logprob": -float(token)} for token in tokens]}}]}

    def other(self, path, body):
        self.log.append(path)
        if path.startswith("/pause"):
            self.paused = True
            self.aborts += "abort" in path
        elif path == "/abort_requests":
            self.aborts += 1
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weights":
            self.newest = body["update_info"]["version"]
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
        self.lock.notify_all()
        return {"results": [{"version": self.newest}]} if path == "/collective_rpc" else {}

    def make(self, tokens, requests):
        """So many more tokens of each of the requests that there are."""
        with self.lock:
            self.wait(lambda: len(self.asked) >= requests)
            before = len(self.log)
            self.made += tokens
            self.lock.notify_all()
            self.wait(lambda: len(self.log) >= before + tokens)

    def die(self):
        with self.lock:
            self.dead = True
            self.lock.notify_all()
        self.http.shutdown()
        self.http.server_close()


def engine_of(server, keep=False, version=1):
    engine = Engine(Vllm(f"http://127.0.0.1:{server.port}", PATIENCE), 4, 64, END, keep)
    update(engine, version, keep)
    return engine


def update(engine, version, keep=False):
    assert engine.take(version, newer=True)["version"] == version
    engine.changed(version, keep)


def finished(engine):
    found = []
    while not found:
        found = engine.step()
    return found


def expect(request, versions):
    at = len(request.prompt)
    assert request.tokens == list(range(at, at + request.most)), request.tokens
    assert request.log_probs == [-float(token) for token in request.tokens]
    assert request.versions == versions, request.versions


# ---- cut by an update, and gone on with from the prefix
server = Server()
engine = engine_of(server)
request = Request([7, 7, 7], 6)
engine.add(request)
server.make(2, 1)
update(engine, 2)
assert request.tokens == [3, 4] and engine.under_way == [request] and engine.free == 3
server.make(4, 2)
assert finished(engine) == [request]
expect(request, [1, 1, 2, 2, 2, 2])
assert [body["token_ids"] for body in server.asked] == [[7, 7, 7], [7, 7, 7, 3, 4]]
assert [body["cache_salt"] for body in server.asked] == ["1", "2"] and engine.free == 4

# ---- one that reaches the server behind its pause is cut without a token, or begins behind it
server.held = 1
late = Request([7, 7], 3)
engine.add(late)
update(engine, 3)
with server.lock:
    server.free = True
    server.lock.notify_all()
assert finished(engine) == [late]
expect(late, [3, 3, 3])
server.free = False

# ---- asks for a version
for wrong in (Request([7], 1, exactly=2), Request([7], 1, at_least=4)):
    try:
        engine.add(wrong)
    except ValueError as failure:
        assert "the engine has 3" in str(failure)
    else:
        raise AssertionError("a version that the engine has not was promised")

# ---- SIGTERM: what there is
cut = Request([7], 5)
count = len(server.asked)
engine.add(cut)
server.make(1, count + 1)
assert engine.cut() == [cut] and cut.tokens == [1] and cut.versions == [3] and engine.free == 4

# ---- dies, and another one comes
count, gone = len(server.asked), Request([7, 7], 4)
engine.add(gone)
server.make(1, count + 1)
update(engine, 4)
server.make(1, count + 2)
server.die()
try:
    while True:
        engine.step()
except Gone:
    pass
looks = []
assert not engine.lost(lambda: looks.append(1) or len(looks) > 2) and len(looks) == 3
server = Server(server.port)
assert engine.lost(lambda: False)
engine.handshake({"tensors": []})
update(engine, 5)
server.make(3, 1)
assert finished(engine) == [gone]
expect(gone, [3, 5, 5, 5])  # the token of version 4 went with the server
assert server.log[0] == "/init_weight_transfer_engine"

# ---- a server that does not say whose tokens they are
server.silent = True
engine.add(Request([7], 1))
server.make(1, 2)
try:
    finished(engine)
except RuntimeError as failure:
    assert "found 1 tokens, 1 log-probs, 0 versions" in str(failure)
else:
    raise AssertionError("tokens of no version were taken")

# ---- kept in the server
server = Server()
engine = engine_of(server, keep=True)
request = Request([7, 7], 4)
engine.add(request)
server.make(1, 1)
update(engine, 2, keep=True)
server.make(3, 1)
assert finished(engine) == [request] and len(server.asked) == 1 and server.aborts == 0
expect(request, [1, 2, 2, 2])
print("ok")
os._exit(0)  # threads wait for the server that is gone
