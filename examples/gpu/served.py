"""An engine behind HTTP, a server role of the job, in the place of engine.py: the same requests, and weights by dray's plug-in,
whose ranks in the server subscribe to what the trainer publishes. `rollout.py --server URL`; of schedules that keep one version.
It belongs to one rollout alone, which orders its updates."""
import collections
import concurrent.futures
import contextlib
import http.client
import json
import time
import urllib.parse

LOOK = 0.02   # seconds for which a step waits for an answer
AGAIN = 0.2   # seconds between two looks whether a server is there again


class Gone(Exception):
    """The server does not answer."""


class Http:
    """A server's routes."""

    def __init__(self, url, timeout):
        at = urllib.parse.urlsplit(url)
        if at.scheme != "http" or not at.port:
            raise ValueError(f"--server: http://HOST:PORT expected, found {url}")
        self.url, self._host, self._port, self._timeout = url, at.hostname, at.port, timeout

    def ask(self, path, body=None):
        """The answer of a route; body makes it a POST."""
        link = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            link.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body),
                         {"Content-Type": "application/json"})
            answer = link.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Gone(f"server {self.url}: {path}: {error!r}") from error
        finally:
            link.close()
        if answer.status != 200:
            if answer.status >= 500 and path != "/health" and not self.alive():
                raise Gone(f"server {self.url}: {path}: its engine is dead")
            raise RuntimeError(f"server {self.url}: {path}: status 200 expected, found {answer.status}: "
                               f"{said[:500].decode(errors='replace')}")
        try:
            return json.loads(said)
        except ValueError:  # a word, or nothing
            return None

    def alive(self):
        try:
            self.ask("/health")
        except (Gone, RuntimeError):
            return False
        return True

    @staticmethod
    def of_tokens(spans):
        """The version of each token, as both servers say them: [{version, start, end}]."""
        return [int(span["version"]) for span in spans or () for _ in range(span["start"], span["end"])]


class Vllm(Http):
    """vLLM's server, with its routes for tokens (--enable-scale-out) and for updates (VLLM_SERVER_DEV_MODE=1)."""

    def generate(self, tokens, most, temperature, end, salt):
        """(tokens, log-probs, the version of each, whether it was aborted). end: the token that ends it; None: none.
        salt: caches are those of requests with the same one."""
        made = self.ask("/inference/v1/generate", {"token_ids": tokens, "cache_salt": salt, "sampling_params": {
            "temperature": temperature, "max_tokens": most, "logprobs": 0, "detokenize": False, "ignore_eos": True,
            **({} if end is None else {"stop_token_ids": [end]})}})["choices"][0]
        return (made["token_ids"] or [], [each["logprob"] for each in (made["logprobs"] or {}).get("content") or ()],
                self.of_tokens(made["weight_versions"]), made["finish_reason"] == "abort")

    def pause(self, abort):
        self.ask("/pause?mode=" + ("abort&clear_cache=true" if abort else "keep"), {})

    def abort(self):
        self.ask("/abort_requests", {})

    def go_on(self):
        self.ask("/resume", {})

    def handshake(self, told):
        self.ask("/init_weight_transfer_engine", {"init_info": told})

    def take(self, version, newer):
        self.ask("/start_weight_update", {})
        self.ask("/update_weights", {"update_info": {"version": version, "newer": newer}})
        report = self.ask("/collective_rpc", {"method": "dray_report"})["results"][0]
        self.ask("/finish_weight_update", {"weight_version": str(report["version"])})
        return report


class Sglang(Http):
    """SGLang's server, as it is started (docs/sglang.md); its updates are sessions."""
    _ranks, _flushes = None, False

    def generate(self, tokens, most, temperature, end, salt):
        """As Vllm.generate."""
        about = self.ask("/generate", {"input_ids": tokens, "return_logprob": True, "extra_key": salt, "sampling_params": {
            "temperature": temperature, "max_new_tokens": most, "ignore_eos": True,
            **({} if end is None else {"stop_token_ids": [end]})}})["meta_info"]
        made = about.get("output_token_logprobs") or []
        return ([each[1] for each in made], [each[0] for each in made], self.of_tokens(about.get("weight_versions"))[:len(made)],
                (about.get("finish_reason") or {}).get("type") == "abort")

    def pause(self, abort):
        self.ask("/pause_generation", {"mode": "abort" if abort else "in_place"})
        self._flushes = abort

    def abort(self):
        """What comes while it pauses is not begun."""

    def go_on(self):
        self.ask("/continue_generation", {})

    def _update(self, **told):
        """Within a session of updates; what the loader says of it."""
        from dray.integrations.sglang import LOADER, message, packed
        if self._ranks is None:
            self._ranks = self.ask("/server_info")["tp_size"]
        self.ask("/begin_weight_update", {"selector": "target"})
        try:
            said = self.ask("/update_weights_from_tensor", {
                "serialized_named_tensors": [packed(message(**told))] * self._ranks, "load_format": LOADER,
                "flush_cache": self._flushes, "selector": "target"})
        finally:
            self.ask("/end_weight_update", {})
        return said["message"]

    def handshake(self, told):
        self.pause(abort=True)
        self._update(handshake=told)
        self.go_on()

    def take(self, version, newer):
        report = json.loads(self._update(version=version, newer=newer).partition(" | ")[0])  # of each rank
        self.ask("/update_weight_version", {"new_version": str(report["version"]), "abort_all_requests": False})
        return report


class Engine:
    """As engine.Engine. Requests are threads that wait for answers. keep: an update leaves those under way in the server, with
    the caches that they have, which others do not read: each request names the version that it began with. Else they are
    aborted, all caches are dropped, and they go on from the prefix that there is."""

    def __init__(self, server, slots, room, end, keep):
        self.server, self.room, self.end, self.version, self._keep = server, room, end, -1, keep
        self._most, self._pool = slots, concurrent.futures.ThreadPoolExecutor(slots)
        self._sent, self._held, self._left = {}, [], []  # {future: request}; to be sent again; through
        self._salts = collections.defaultdict(lambda: str(self.version))  # of requests, by id

    @property
    def under_way(self):
        return [*self._sent.values(), *self._held]

    @property
    def free(self):
        return self._most - len(self._sent) - len(self._held)

    def add(self, request):
        request.check(self.version)
        if len(request.prompt) + request.most > self.room:
            raise ValueError(f"request: at most {self.room} tokens expected, found {len(request.prompt)} of the prompt and "
                             f"{request.most} of the response")
        stop = min(request.stop or request.most, request.most)
        asked = self._pool.submit(self.server.generate, [*request.prompt, *request.tokens], stop - len(request.tokens),
                                  request.temperature, None if request.forced else self.end, self._salts[id(request)])
        self._sent[asked] = request

    def _settle(self, asked):
        """What was answered."""
        request = self._sent.pop(asked)
        try:
            tokens, log_probs, versions, aborted = asked.result()
        except Gone:
            self._held.append(request)
            raise
        if not len(tokens) == len(log_probs) == len(versions):
            raise RuntimeError(f"server {self.server.url}: a log-prob and a version of each token expected, found {len(tokens)} "
                               f"tokens, {len(log_probs)} log-probs, {len(versions)} versions")
        for version in set(versions):
            request.check(version)
        request.tokens += tokens
        request.log_probs += log_probs
        request.versions += versions
        request.ended = bool(tokens) and not request.forced and tokens[-1] == self.end
        if aborted and not request.done and len(request.tokens) < (request.stop or request.most):
            self._held.append(request)
        else:
            self._salts.pop(id(request))
            self._left.append(request)

    def _abort(self):
        """Pauses, and settles what is aborted. A request that comes only then is aborted, too, or begins behind the pause."""
        self.server.pause(abort=True)
        for _ in range(10):
            done, late = concurrent.futures.wait(self._sent, LOOK)
            for asked in done:
                self._settle(asked)
            if not late:
                break
            self.server.abort()

    def step(self):
        done, _ = concurrent.futures.wait(self._sent, LOOK, concurrent.futures.FIRST_COMPLETED)
        for asked in done:
            self._settle(asked)
        left, self._left = self._left, []
        return left

    # ---- updates

    def handshake(self, told):
        self.server.handshake(told)

    def take(self, version, newer):
        """Pauses, and takes the version; changed() goes on."""
        if self._keep:
            self.server.pause(abort=False)
        else:
            self._abort()
        return self.server.take(version, newer)

    def changed(self, version, keep=False):
        self.version = version
        self.server.go_on()
        again, self._held = self._held, []
        for request in again:
            if not keep:
                self._salts.pop(id(request), None)
            self.add(request)

    def cut(self):
        """Those under way leave, as far as they are."""
        with contextlib.suppress(Gone):
            self._abort()
            self.server.go_on()
        found, self._sent, self._held = self.under_way, {}, []
        return found

    def forget(self):
        """The server keeps its caches."""

    # ---- a server that dies

    def lost(self, given_up):
        """Behind Gone: all requests wait, and so does this, until another server is there. False: given_up() came first."""
        for asked in list(self._sent):
            with contextlib.suppress(Gone):
                self._settle(asked)
        self.version = -1
        self._salts.clear()
        while not self.server.alive():
            if given_up():
                return False
            time.sleep(AGAIN)
        return True

    def give_up(self, request):
        """It is not to be made any more."""
        self._held = [other for other in self._held if other is not request]
        self._salts.pop(id(request), None)
