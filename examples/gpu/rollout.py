"""Rollout with continuous batching: rows are claimed one by one as slots become free, and committed as they are finished.
`dray run examples/gpu/job.yaml` starts it; each instance is an engine of its own.

An update, between two tokens: the engine pauses; what was prefetched beside decoding is committed; the caches of the requests
under way are computed anew (--pause abort: they go on from the prefix that they have) or kept (--pause keep); it goes on.
When, the job says: `update: boundary` waits until all requests are finished, `in_flight` does not, `anew` begins them again."""
import argparse
import collections
import contextlib
import time

import numpy as np
import torch

import dray
from engine import Engine, Request
from lm import arena, arguments, config_json, described, make, turn
from served import Gone
from text import END

LOOK = 0.02   # seconds between two looks for a newer version
BUNCHES = 8    # requests are begun when an eighth of the slots is free: a prefill makes all others wait for one forward
AGAIN = 0.005  # seconds after which samples are asked for again beside decoding, when there were none


def so_far(batch, column):
    """What a row has that was cut before."""
    try:
        return batch.list(column)[0].tolist()
    except dray.DrayError as error:
        if error.name != "ENOENT":
            raise
        return []


class Work:
    """A claim, and its requests: one sample, or the prompts of an evaluation."""

    def __init__(self, batch, requests):
        self.batch, self.requests = batch, requests
        self.begun = [len(request.tokens) for request in requests]
        self.left = len(requests)


class Rollout:
    def __init__(self, role, engine, weights, options):
        self.role, self.engine, self.weights, self.job = role, engine, weights, role.config
        self.options = options
        self.exact, self.keep = role.rules.exact, options.pause == "keep"
        self.ahead = role.rules.kept > 1  # the next version is made while this one's samples are
        self.device, self.lengths = options.device, None
        if options.lengths:
            self.lengths = np.loadtxt(options.lengths, dtype=int, ndmin=1)
        self.backlog, self.works = collections.deque(), {}  # requests without a slot; {id of a request: its work}
        self.heads, self.waiting = collections.deque(), []  # claims that are to be begun; that ask for a version to come
        self.target = None                                  # the version that is to be taken
        self.looked = self.asked = 0.0  # when, for a version and for samples
        self.mine = None                # its turn on the device

    # ---- claims

    def claim(self):
        """Rows for the free slots; False: there will be none."""
        if self.engine.under_way and not self.heads and (
                time.monotonic() < self.asked + AGAIN or self.engine.free < self.options.slots // BUNCHES):
            return True
        while self.target is None and len(self.backlog) < self.engine.free:
            batch = self.heads.popleft() if self.heads else self.look()
            if batch is None:
                self.asked = time.monotonic()
                return bool(self.works or self.waiting) or not (self.role.ended or self.role.stopping)
            self.place(batch)
        return True

    def look(self):
        """A claim, or None: there is nothing now."""
        tasks = self.role.tasks if self.exact else sorted(self.role.tasks)  # eval before rollout
        count = {"rollout": 1, "eval": self.job["eval"]["prompts"]}
        batch = self.role.claim(tasks, count, wait=False)
        if batch is None and not self.engine.under_way and not self.backlog and not self.role.ended:
            self.rest()
            if self.waiting:
                time.sleep(LOOK)
            else:
                batch = self.role.claim(tasks, count)
        return batch

    def asks(self, batch):
        """The oldest version that the row asks for, and the one that it asks for exactly (None: none): its tags."""
        least, exactly = (float(batch.tag(name, -1)[0]) for name in ("at_least", "exactly"))
        return int(max(least, exactly, 0)), int(exactly) if exactly >= 0 else None

    def place(self, batch):
        """Begins the claim, if the engine has its version."""
        wanted, has = self.weights.wanted(batch), self.weights.version
        least, exactly = self.asks(batch) if batch.task == "rollout" else (0, None)
        if wanted is None:  # what it wants may wait for others that were lost
            batch.free()
            time.sleep(LOOK)
        elif exactly is not None and exactly < wanted and (self.exact or exactly != has) or self.exact and least > wanted:
            batch.fail(f"version {least}{'' if exactly is not None else ' or a newer one'} expected, engines take {wanted}")
            batch.free()
        elif least > wanted:
            self.waiting.append(batch)
        elif has in (wanted, exactly):
            self.begin(batch)
        else:
            self.heads.appendleft(batch)
            self.target = wanted

    def begin(self, batch):
        evaluates, rollout = batch.task == "eval", self.job["rollout"]
        requests, asked = [], self.weights.version if evaluates else self.asks(batch)[1]
        for i, prompt in enumerate(batch.list("eval_prompt" if evaluates else "prompt")):
            request = Request(prompt.tolist(), rollout["max_new_tokens"], 0.0 if evaluates else rollout["temperature"],
                              at_least=None if evaluates else self.weights.version,
                              exactly=asked)
            if evaluates and self.lengths is not None:
                request.most = 1
            if not evaluates:
                request.tokens, request.log_probs, request.versions = (
                    so_far(batch, name) for name in ("response", "rollout_log_prob", "response_version"))
                self.bound(request, batch, i)
            requests.append(request)
        work = Work(batch, requests)
        self.works.update((id(request), work) for request in requests)
        self.backlog.extend(requests)

    def bound(self, request, batch, i):
        """How long it becomes: --lengths says so for each sample of each step, whoever makes it."""
        if self.lengths is not None:
            at = (int(batch.tag("step")[i]) - 1) * self.role.rules.rows + int(batch.slots[i])
            request.most, request.forced = min(int(self.lengths[at % len(self.lengths)]), request.most), True
        if self.job["rollout"]["partial_tokens"]:
            request.stop = len(request.tokens) + self.job["rollout"]["partial_tokens"]

    # ---- versions

    def follow(self):
        """Whether there is a newer version to be taken, and may be taken now; takes it."""
        if not self.exact and self.target is None and time.monotonic() > self.looked + LOOK:
            self.looked, newest = time.monotonic(), self.weights.newest()
            self.target = newest if newest > self.weights.version >= 0 else None
        if self.target is None:
            return
        busy = bool(self.engine.under_way or self.backlog)
        if not self.exact and self.weights.version >= 0:
            self.weights.prefetch(self.target)
            busy = busy and (self.weights.ready < self.target or self.job["update"] == "boundary" or
                             any(request.exactly is not None for request in self.engine.under_way))
        if not busy:
            self.update()

    def update(self):
        if not self.engine.under_way:
            self.rest()
        self.weights.update(self.target)
        self.target = None
        if self.job["update"] == "anew":
            for request in self.engine.under_way:  # behind what was committed of it
                begun = self.works[id(request)].begun[0]
                del request.tokens[begun:], request.log_probs[begun:], request.versions[begun:]
        self.engine.changed(self.weights.version, self.keep and self.job["update"] != "anew")
        if self.ahead and self.weights.version + 1 < self.job["steps"]:
            self.weights.prefetch(self.weights.version + 1)
        self.heads.extend(self.waiting)
        self.waiting = []

    # ---- tokens

    def rest(self):
        """Who waits for samples, or for a version, has no turn."""
        mine, self.mine = self.mine, None
        if mine:
            mine.close()

    def again(self):
        """The engine's server is gone: another one takes the newest weights, and goes on with what there is of the samples.
        Evaluations are given back, as each is of one version."""
        self.rest()
        while not self.role.stopping:
            with contextlib.suppress(Gone):
                if not self.engine.lost(lambda: self.role.stopping):
                    return
                self.give_back("eval")
                self.weights.again()
                self.target = self.weights.version if self.exact else self.weights.newest()
                if self.target >= 0:
                    self.update()
                return

    def give_back(self, task):
        for work in {id(work): work for work in self.works.values() if work.batch.task == task}.values():
            for request in work.requests:
                if self.works.pop(id(request), None):
                    self.engine.give_up(request)
            work.batch.free()
        self.backlog = collections.deque(request for request in self.backlog if id(request) in self.works)

    def step(self):
        now = dray.trace.now()
        while self.backlog and self.engine.free:
            request = self.backlog.popleft()
            self.works[id(request)].batch.began = now
            self.engine.add(request)
        if self.engine.under_way:
            if self.mine is None:
                self.mine = contextlib.ExitStack()
                self.mine.enter_context(turn(self.role, self.device, "kv_cache", drop=True))
                self.engine.forget()
            with dray.trace.span("rollout"):
                for request in self.engine.step():
                    self.finish(request)

    def finish(self, request):
        work = self.works.pop(id(request))
        work.left -= 1
        if not work.left:
            self.commit(work)

    def commit(self, work):
        batch, requests = work.batch, work.requests
        oldest = [min(request.versions) for request in requests]
        batch.set_tag("version", oldest)
        if batch.task == "eval":
            batch.set("eval_response", [np.array(request.tokens, np.int32) for request in requests])
        else:
            for name, of, dtype in (("response", "tokens", np.int32), ("rollout_log_prob", "log_probs", np.float32),
                                    ("response_version", "versions", np.int32)):
                batch.set(name, [np.array(getattr(request, of)[begun:], dtype)
                                 for request, begun in zip(requests, work.begun)])
            batch.set_tag("tokens", [len(request.prompt) + len(request.tokens) for request in requests])
            if not all(request.done for request in requests):
                batch.leave_open()
        try:
            batch.commit()
        except dray.DrayError as error:
            if error.name not in ("ESTALE", "EGONE"):  # taken back, or too old, meanwhile
                raise
            self.role.lost += batch.rows
        batch.free()

    def leave(self):
        """SIGTERM: samples are cut, for others to go on with; evaluations are given back."""
        self.engine.cut()
        for work in {id(work): work for work in self.works.values()}.values():
            if work.batch.task == "rollout" and len(work.requests[0].tokens) > work.begun[0]:
                self.commit(work)
            else:
                work.batch.free()
        for batch in (*self.heads, *self.waiting):
            batch.free()

    def run(self):
        while self.claim() and not self.role.stopping:
            try:
                self.follow()
                self.step()
            except Gone:
                self.again()
        self.leave()
        self.rest()


def own(role, options, seed):
    """The engine of engine.py, and its weights."""
    model = make(role.config, options, options.dtype).eval()
    engine = Engine(model, options.slots, role.config["model"]["max_positions"], END, seed,
                    memory=lambda: arena(options.device, "kv_cache"))
    return engine, role.weights(model)


def vllm(role, options, seed):
    """vLLM, and its worker's weights."""
    import plugged
    import vllm_engine
    with torch.device("meta"):
        model = make(role.config, argparse.Namespace(model=options.model, device=torch.device("meta")), options.dtype)
    folder = role.folder / "vllm"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config_json(model))
    engine = vllm_engine.Engine(folder, options.slots, role.config["model"]["max_positions"], END, seed,
                                str(options.dtype).rpartition(".")[2])
    return engine, plugged.Weights(role, engine, model.named_parameters())


def served(role, options, seed):
    """A server's engine, and what its ranks take."""
    import plugged
    import served as behind
    if options.engine == "own":
        raise ValueError("--server: --engine vllm or sglang expected")
    server = {"vllm": behind.Vllm, "sglang": behind.Sglang}[options.engine](options.server, role.timeout)
    engine = behind.Engine(server, options.slots, role.config["model"]["max_positions"], END,
                           options.pause == "keep" and role.config["update"] != "anew")
    while not server.alive():  # it is being started anew
        if role.stopping:
            raise SystemExit
        time.sleep(behind.AGAIN)
    return engine, plugged.Weights(role, engine, described(role.config, options).named_parameters())


options = arguments(__doc__, slots=(0, "requests at a time (0: the job's rollout.micro_batch)"), lengths=("", "a file of numbers: tokens of each sample"),
                    pause=(("abort", "keep"), "what an update does to the caches of requests under way"),
                    engine=(("own", "vllm", "sglang"), "who generates: engine.py, vLLM, or SGLang (a server alone)"),
                    server=("", "where a server of this engine is, http://HOST:PORT: it generates"))
with dray.Role() as role:
    options.slots = options.slots or role.config["rollout"]["micro_batch"]
    engine, weights = (served if options.server or options.engine == "sglang" else {"own": own, "vllm": vllm}[options.engine])(
        role, options, role.config["seed"] + 1000 * role.instance + role.epoch)
    with contextlib.closing(weights):
        Rollout(role, engine, weights, options).run()
