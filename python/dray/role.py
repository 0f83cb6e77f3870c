"""A program of its own as a role of a run: `command: python3 grade.py` in the job file. Where the run is, and
which part of it this process has, comes from the environment that `dray run` gives (docs/roles.md).

    with dray.Role() as role:
        for batch in role.batches(columns=["answer", "response"]):
            batch.set("reward", grade(batch))          # committed when the next batch is asked for

What the loop has in its hands when an exception ends it is given back as a failed attempt. The queue's end
ends the loop, and so does SIGTERM, which lets the batch that is being worked on end first.

Of a role with several ranks rank 0 claims; the others get the same batches through torch.distributed, which
the program initialises (`torch.distributed.init_process_group("gloo")` finds what it needs in the
environment), and only what rank 0 sets counts."""
from __future__ import annotations

import ctypes as c
import datetime
import json
import math
import operator
import os
import pathlib
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence, Union

import numpy as np

from . import _library as _l
from . import trace as _t
from ._library import DrayError, DrayTimeout, call, library
from .checkpoint import latest, load_optimizer, optimizer_tensors
from .checkpoint import load as load_checkpoint
from .checkpoint import save as save_checkpoint
from .columns import ROW
from .lease import Lease
from .queue import Claim, Queue, claim_options
from .steps import Kept, Plan, Rules, RunEnded, Step, Trainer, Weights
from .weights import MODEL, Context, Publisher, Subscriber

_MICRO = 32         # rows a claim, where neither the call nor the job says
_FLUSH = 1.0        # seconds between writes of the timeline
_WORDS = {
    "DRAY_ADDRESS": "where the coordinator is", "DRAY_RUN": "the folder of the run",
    "DRAY_CONFIG": "the job as resolved, a JSON file", "DRAY_TASK": "for which tasks this program claims",
}


class _Stop(BaseException):
    """SIGTERM came while samples were waited for."""


@dataclass(frozen=True)
class _How:
    """In which form a loop wants its batches."""
    framework: str
    copy: Optional[bool]
    split: bool
    groups: bool

    def __post_init__(self):
        _l.check_word("framework", self.framework, ("numpy", "torch"))


class Batch(Claim):
    """Rows of a task: see columns.Rows. `task` says of which; set() its outputs before the next batch is
    asked for. Of several ranks what rank 0 sets counts; a `split` batch has this rank's part of the rows.
    began: when its work began (dray.trace.now()), which `dray simulate` reads of rollouts: the claim, unless the role sets it."""

    def __init__(self, owner: Queue, batch: int, framework: str, copy: Optional[bool], task: str,
                 leads: bool = True, part: Optional[tuple] = None):
        self.leads, self.task, self.whole = leads, task, library().dray_batch_rows(batch)
        first, rows, padding = part or (0, self.whole, False)
        super().__init__(owner, batch, framework, copy, True, not leads, first, rows)
        if padding:
            self.weights = np.zeros(rows)
        self.began = _t.now()
        self._tokens, self._pieces = None, set()  # of each row's prompt and response; rows that are left open

    def set(self, name: str, values: Any, offsets: Any = None) -> None:
        if self.leads:
            if self.rows != self.whole:
                raise ValueError(f"column {name}: a part of a batch's rows cannot be set")
            super().set(name, values, offsets)

    def set_tag(self, key: str, values: Sequence[float]) -> None:
        if self.leads:
            super().set_tag(key, values)
            if key == "tokens":
                self._tokens = np.array(values, np.int64)

    def leave_open(self, rows: Sequence[int] = ()) -> None:
        if self.leads:
            super().leave_open(rows)
            self._pieces.update(rows if len(rows) else range(self.rows))

    def commit(self) -> None:
        made = self._responses() if self.task == "rollout" and self._tokens is not None and _t.is_on() else []
        super().commit()
        for one in made:
            _t.response(*one, self.began, _t.now())

    def _responses(self):
        """(step, slot, tokens of the prompt, of the response) of each finished row; none where the job's prompts are not
        lists of tokens."""
        step = self.partition.rpartition("-")[2]
        try:
            prompts = [len(prompt) if hasattr(prompt, "dtype") else np.inf for prompt in self.list("prompt")]
        except DrayError:
            return []
        rows = zip(self.slots.tolist(), prompts, self._tokens.tolist())
        return [(int(step), slot, prompt, tokens - prompt) for i, (slot, prompt, tokens) in enumerate(rows)
                if i not in self._pieces and tokens > prompt and step.isdecimal()]


def _number(name: str, fallback: int) -> int:
    text = os.environ.get(name) or str(fallback)
    if not text.isdecimal():
        raise DrayError(_l.EINVALID, f"${name}: a number expected, found {text!r}")
    return int(text)


def _plain(value):
    """As JSON has it: what is not finite has no word there."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Role:
    """This process as a role of a run. Sessions, the queue and the rest are opened when they are first used.

    name, instance, rank, world, epoch: which process of the role this is, from the environment (docs/roles.md).
    step: the step that the run goes on from; 0 in a new run.
    tasks: the names in $DRAY_TASK. config: the resolved job, a dict. folder: the run's folder.
    timeout: seconds that single calls may take; None: the job's limits.wait_seconds, or 60. Samples are waited for as
    long as the run goes on.
    lost: the number of rows that were finished here, but had been taken back or cleared meanwhile.
    ended: whether claim() found the queue's end."""

    def __init__(self, timeout: Optional[float] = None):
        self._get("DRAY_ADDRESS")
        self.tasks = [name for name in os.environ.get("DRAY_TASK", "").split(",") if name]
        self.name = os.environ.get("DRAY_ROLE") or (self.tasks or ["role"])[0]
        self.instance, self.epoch = _number("DRAY_INSTANCE", 0), _number("DRAY_EPOCH", 1)
        self.rank = _number("DRAY_RANK", _number("RANK", 0))
        self.world, self.step = _number("WORLD_SIZE", 1), _number("DRAY_STEP", 0)
        self._config = self._queue = self._group = self._kept = None
        self._hand, self._contexts, self.lost, self.ended = [], {}, 0, False
        self._flushed, self._traced = time.monotonic(), False
        self._stopping = self._waiting = False
        if timeout is None:
            limits = self.config.get("limits", {}) if self._has_config else {}
            timeout = float(limits.get("wait_seconds", 60.0))
        self.timeout = timeout
        self._catch()
        self._open_trace()

    def _open_trace(self):
        folder = os.environ.get("DRAY_RUN")
        if folder and os.path.isdir(os.path.join(folder, "trace")):
            name = f"{self.group}-{self.rank}".replace("/", "-")
            _t.open(os.path.join(folder, "trace", f"{name}-{self.epoch}.spans"), f"{self.group} {self.rank}")
            _t.enter("open")
            self._traced = True

    def _does(self, name, step=-1, rows=-1):
        """What this process does from here on, for the timeline: there is one span around all others, so
        that no time is without one. rows: of what it has done until now."""
        if self._traced:
            _t.worked(rows)
            _t.leave()
            _t.enter(name, step)

    # ---- the environment

    def _get(self, name: str) -> str:
        value = os.environ.get(name)
        if not value:
            raise DrayError(_l.EINVALID, f"${name} is not set: {_WORDS[name]}. `dray run` sets it for the "
                            "commands of its roles (`command:` in the job file); to start one by hand, export "
                            "what the run's other processes have")
        return value

    @property
    def config(self) -> dict:
        if self._config is None:
            path = self._get("DRAY_CONFIG")
            try:
                with open(path, encoding="utf-8") as file:
                    self._config = json.load(file)
            except (OSError, ValueError) as error:
                raise DrayError(_l.EINVALID, f"$DRAY_CONFIG: {path}: the job as JSON expected: {error}") from None
        return self._config

    @property
    def _has_config(self) -> bool:
        return bool(os.environ.get("DRAY_CONFIG"))

    @property
    def rules(self) -> Optional[Rules]:
        """What the run's schedule says to trainers and engines (include/dray/steps.h); None: there is no run."""
        told = self.config.get("rules") if self._has_config else None
        return Rules(**told) if told else None

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self._get("DRAY_RUN"))

    @property
    def group(self) -> str:
        """What this instance is called: the role's name, and which it is where there are several."""
        roles = self.config.get("roles", []) if self._has_config else []
        several = any(role.get("name") == self.name and role.get("instances", 1) > 1 for role in roles)
        return f"{self.name}.{self.instance}" if several or self.instance else self.name

    def _member(self) -> str:
        return f"{self.group}/{self.rank}"

    def _task(self, task: Union[None, str, Sequence[str]]) -> list:
        if task is None:
            self._get("DRAY_TASK")
            return self.tasks
        return [task] if isinstance(task, str) else list(task)

    # ---- its end

    def _catch(self):
        """SIGTERM ends the loop at its next boundary; who has a handler of his own keeps it."""
        if threading.current_thread() is threading.main_thread() and \
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: self.stop())
        before = sys.excepthook

        def failed(kind, error, trace):
            self._fail(error)
            before(kind, error, trace)
        sys.excepthook = failed

    def stop(self) -> None:
        """Ends the loop when the batch that it works on is done (a trainer's: the step)."""
        self._stopping = True
        if self._waiting:
            _l.interrupt(_Stop())

    @property
    def stopping(self) -> bool:
        return self._stopping

    def _fail(self, error: BaseException):
        """An exception makes the loop's batch a failed attempt; a signal gives it back."""
        for batch in self._hand if isinstance(error, Exception) else []:
            try:
                if batch.leads and batch._live and not batch._settled:
                    batch.fail(f"{type(error).__name__}: {error}"[:200])
            except DrayError:
                pass  # the error that it came of is the one to tell
        self._drop()

    def close(self) -> None:
        """Gives back what is claimed, and ends the sessions."""
        self._does("close")
        self._drop()
        if self._queue is not None:
            self._queue.close()
        for context in self._contexts.values():
            context.close()
        self._contexts = {}
        if self._traced:
            _t.leave()
            self._traced = False
        if _t.is_on():
            _t.flush()

    def __enter__(self) -> Role:
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            self._fail(error)
        self.close()
        return kind is RunEnded

    # ---- sessions

    def context(self, role: Optional[str] = None) -> Context:
        """A session with the coordinator: None: of the token's role."""
        if role not in self._contexts:
            self._contexts[role] = Context(self._get("DRAY_ADDRESS"), role, self.rank, self._member(),
                                           self.timeout)
        return self._contexts[role]

    @property
    def queue(self) -> Queue:
        if self._queue is None:
            self._queue = Queue(os.environ.get("DRAY_QUEUE") or "samples", self._get("DRAY_ADDRESS"), None,
                                self.rank, self.timeout, session=self._member())
        return self._queue

    def publisher(self, parameters: Any, optimizer: Any = None, model: str = MODEL,
                  **options: Any) -> Union[Publisher, Kept]:
        """For a trainer: the dray.Publisher of this rank. optimizer: its steps wait for readers (Publisher.attach).
        Options are those of Publisher. Where the schedule keeps two versions for engines (one_step_async), each version
        is published from a copy of its own; snapshot and delta are ignored then."""
        kept = self.rules.kept if model == MODEL and self.rules else 1
        if kept > 1:
            for name in ("snapshot", "delta", "delta_dtype"):
                options.pop(name, None)
            self._kept = Kept(lambda of, name: self._publisher(of, name, options), parameters, model, kept)
            return self._kept
        publisher = self._publisher(parameters, model, options)
        if optimizer is not None:
            publisher.attach(optimizer)
        return publisher

    def _publisher(self, parameters, model, options):
        return Publisher(parameters, model, self.rank, self.world, context=self.context("trainer"),
                         timeout=self.timeout, **options)

    def subscriber(self, blocks: Any = (), model: str = MODEL, **options: Any) -> Subscriber:
        """For an engine: the dray.Subscriber of this rank, whose group are the ranks of this instance."""
        return Subscriber(blocks, model, self.group, self.rank, self.world, context=self.context("engine"),
                          timeout=self.timeout, **options)

    def weights(self, blocks: Any = (), model: str = MODEL, **options: Any) -> Weights:
        """For an engine: takes the versions that the run's schedule wants into this rank's memory, together with the
        other ranks of this instance. blocks: as Subscriber takes them.

            weights = role.weights(model)
            for batch in role.batches():
                if weights.take(batch) is None:        # given back
                    continue
                ...
                batch.set_tag("version", [weights.version] * batch.rows)"""
        return Weights(self, blocks, model, **options)

    def engines(self, model: str = MODEL) -> list:
        """The engines that take the model's weights: for each a dict with name, version (0: none yet), ranks, state,
        serving and what else `dray status --json` has of it."""
        out = c.c_void_p()
        self._any()._beside("dray_context_status", c.byref(out))
        groups = json.loads(_l.take(out)).get("groups", [])
        return [group for group in groups if group["model"] == model]

    def _any(self):
        return next(iter(self._contexts.values()), None) or self.context()

    def report(self, kind: str, **numbers: Any) -> None:
        """Posts a report to the run's view and to metrics.jsonl: "step" with the numbers of a step, or a kind of your
        own. Reports of other ranks than rank 0 are left out."""
        if self.rank == 0:
            self._any()._beside("dray_report_post", _l.text(kind), json.dumps(_plain(numbers)).encode())

    def metrics(self, tensorboard: Any = False, wandb: Any = False) -> Any:
        """A context in which a thread gives the rows of metrics.jsonl, as they come, to TensorBoard (True: in the run's
        folder; or a folder) and Weights & Biases (True: offline; or a dict of what wandb.init takes): see dray.metrics.
        Of several ranks rank 0's does."""
        from .metrics import Following, sinks
        wanted = self.rank == 0
        return Following(self.folder, lambda: sinks(self.folder, wanted and tensorboard, wanted and wandb))

    # ---- shared devices

    @contextmanager
    def lease(self) -> Iterator[Optional[Lease]]:
        """The turn on the devices that other roles have, too ($DRAY_LEASES), while the block runs; on all
        ranks, for which rank 0 holds it. Waits for it as long as the run goes on. None: no device is shared;
        and on the other ranks. Hold it while you compute, over many batches; not while you wait for
        samples or for a version of the weights, which others may have to compute."""
        names = [name for name in os.environ.get("DRAY_LEASES", "").split(",") if name]
        if not names:
            yield None
            return
        with _t.span("wait for lease", kind="wait", cause="lease"):
            held = self._wait_for_lease(names)
        try:
            yield held
            if self.world > 1:
                self._meet()
        finally:
            if held:
                held.__exit__(*sys.exc_info())

    def _wait_for_lease(self, names: list) -> Optional[Lease]:
        held = None
        again = True
        while again:
            if self.rank == 0:
                try:
                    held = Lease(self._any(), names)
                except DrayTimeout:
                    pass
                again = held is None
            if self.world > 1:
                again = self._tell(again)
        return held

    # ---- the ranks

    def _gloo(self):
        """The ranks of the role, for what is in host memory."""
        if self._group is None:
            import torch.distributed as dist
            if not dist.is_initialized():
                raise RuntimeError(f"this role has {self.world} ranks: call torch.distributed."
                                   "init_process_group() before its first batch is asked for")
            # Rank 0 says at least every `timeout` seconds that it is there.
            self._group = dist.new_group(backend="gloo",
                                         timeout=datetime.timedelta(seconds=2 * self.timeout + 30))
        return self._group

    def _tell(self, told: Any) -> Any:
        """Rank 0's, on all ranks."""
        import torch.distributed as dist
        box, group = [told], self._gloo()
        with _t.span("wait for ranks", kind="wait", cause="ranks"):
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def _meet(self) -> None:
        import torch.distributed as dist
        group = self._gloo()
        with _t.span("wait for ranks", kind="wait", cause="ranks"):
            dist.barrier(group)

    # ---- batches

    def _wait(self, options: list, at_once: bool) -> Optional[tuple]:
        """Rank 0's: (batch, which of the options); None: nothing more comes. Whether the run stands still
        is for the run to say: rank 0 waits as long as it goes on, and tells the others that it does.
        at_once: who was asked to stop looks no more; else for what is there."""
        queue = self.queue
        while True:
            self._waiting = True
            try:
                if self._stopping and at_once:
                    return None
                with _t.span("wait for samples", kind="wait", cause="samples"):
                    return queue._claim_any(options, 0 if self._stopping else None)
            except _Stop:
                continue
            except DrayTimeout:
                if self._stopping:
                    return None
            except DrayError as error:
                if error.code != _l.EEND:
                    raise
                return None
            finally:
                self._waiting = False
                _l.forget(_Stop)
            if self.world > 1:
                self._tell(("idle",))

    def _claim(self, options: list, how: _How, at_once: bool = True) -> Optional[Batch]:
        """The next batch, on all ranks; None: there is none."""
        return self._follow(how) if self.rank else self._lead(options, how, at_once)

    def _claim_whole(self, options: list, how: _How, columns: Sequence[str], at_once: bool = True) -> Optional[Batch]:
        """The next batch whose columns are read, on all ranks. One whose bytes went with another host's keeper is
        left out: its rows are made again."""
        while (batch := self._claim(options, how, at_once)) is not None:
            if self._read(batch, columns):
                return batch
            self.lost += batch.rows
            batch.free()
        return None

    def _read(self, batch, columns):
        there = 1
        try:
            for name in columns:
                batch[name]
        except DrayError as error:
            if error.code != _l.EGONE:
                raise
            there = 0
        if self.world > 1 and self._has_config and self.config.get("listen"):
            import torch
            import torch.distributed as dist
            all_there = torch.tensor([there])
            dist.all_reduce(all_there, dist.ReduceOp.MIN, group=self._gloo())
            there = int(all_there)
        return there == 1

    def _lead(self, options, how, at_once):
        found = self._wait(options, at_once)
        if self.world == 1:
            return found and self._made(found[0], options[found[1]].task.decode(), how)
        if found is None:
            self._tell(("end",))
            return None
        batch, task = found[0], options[found[1]].task.decode()
        made, out, size = self._made(batch, task, how), c.c_void_p(), c.c_size_t()
        self.queue._pins.call("dray_batch_export", batch, c.byref(out), c.byref(size))
        self._tell(("batch", _l.take(out, size.value), task))
        return made

    def _follow(self, how):
        told = ("idle",)
        while told[0] == "idle":
            told = self._tell(None)
        if told[0] == "end":
            return None
        return self._made(self.queue._import(told[1]), told[2], how)

    def _made(self, batch, task, how):
        part = self._part(batch, how.groups) if how.split and self.world > 1 else None
        return Batch(self.queue, batch, how.framework, how.copy, task, self.rank == 0, part)

    def _part(self, batch, groups):
        """(first, rows, padding) of this rank: in even parts, of whole groups where they are wanted. Who
        gets none has the first row as padding, with weight 0: all ranks then have as many batches."""
        rows = library().dray_batch_rows(batch)
        found = np.frombuffer(c.string_at(library().dray_batch_row(batch, 0), rows * ROW.itemsize), ROW)
        ends = [i for i in range(rows)
                if i == 0 or not groups or found["group"][i] != found["group"][i - 1]] + [rows]
        first, end = (ends[(len(ends) - 1) * (self.rank + i) // self.world] for i in (0, 1))
        return (first, end - first, False) if end > first else (0, 1, True)

    def _options(self, task, count, policy, up_to, claim):
        made = []
        for name in self._task(task):
            rows = count.get(name) if isinstance(count, Mapping) else count
            rows = self._micro(name) if rows is None else operator.index(rows)
            made.append(claim_options(name, rows, None, policy, self.timeout, 0.0, up_to=int(up_to), **claim))
        return made

    def _micro(self, task):
        section = self.config.get(task, {}) if self._has_config else {}
        return int(section.get("micro_batch", _MICRO)) if isinstance(section, dict) else _MICRO

    def batches(self, task: Union[None, str, Sequence[str]] = None, columns: Iterable[str] = (),
                count: Union[None, int, Mapping[str, int]] = None, *, up_to: bool = True, policy: str = "fifo",
                framework: str = "numpy", copy: Optional[bool] = None, split: bool = False,
                **claim: Any) -> Iterator[Batch]:
        """Iterates over batches that are claimed for the task, until the queue ends or SIGTERM comes. When the loop
        asks for the next batch, the last one is committed with the columns that were set.

        task: its name, or several, of which the first that has rows is taken; None: those of $DRAY_TASK.
        columns: those that are read before the loop gets the batch; it may read the task's others at any time.
        count: the most rows of a batch, a number or {task: number}; None: the job's micro_batch for the task, or 32.
        up_to=False: exactly so many rows, but for the last batch of a partition.
        split: of a role with several ranks, each rank gets its part of the rows. framework, copy: see columns.Rows.
        Further keywords are those of Queue.claim, such as policy="group".
        A batch whose rows were taken back or cleared meanwhile is not committed, and its rows are counted in `lost`."""
        if isinstance(columns, str):
            raise ValueError(f"columns: a list of names expected, found {columns!r}")
        options = self._options(task, count, policy, up_to, claim)
        return self._batches(options, list(columns), _How(framework, copy, split, policy == "group"))

    def _batches(self, options, columns, how):
        self._drop()
        self._does("loop")
        while (batch := self._claim_whole(options, how, columns)) is not None:
            self._hand.append(batch)
            rows = batch.rows
            self._does(batch.task)
            yield batch
            self._does("loop", rows=rows)
            try:
                self._settle()
            except DrayError as error:
                if error.code not in (_l.ESTALE, _l.EGONE):
                    raise
                self.lost += batch.rows
            self._flush()

    def claim(self, task: Union[None, str, Sequence[str]] = None, count: Union[int, Mapping[str, int]] = 1, *,
              wait: bool = True, policy: str = "fifo", framework: str = "numpy", copy: Optional[bool] = None,
              **claim: Any) -> Optional[Batch]:
        """Claims at most `count` rows, for a loop that has several batches in hand, as continuous batching has; the
        loop calls commit() and free() of each. task: as batches() takes it. Returns None when there are no rows now
        (wait=False), when the queue has ended (`ended` is True then), and when SIGTERM came. For roles of one rank."""
        if self.world > 1:
            raise DrayError(_l.EUNSUPPORTED, f"role {self.name}: one rank expected, found {self.world} (use batches())")
        options, how = self._options(task, count, policy, True, claim), _How(framework, copy, False, False)
        self._flush()
        if wait:
            found = self._wait(options, True)
            self.ended = found is None and not self._stopping
        else:
            found = self._there(options)
        return found and self._made(found[0], options[found[1]].task.decode(), how)

    def _there(self, options):
        try:
            return None if self._stopping else self.queue._claim_any(options, 0)
        except DrayTimeout:
            return None
        except DrayError as error:
            if error.code != _l.EEND:
                raise
            self.ended = True
            return None

    def _settle(self):
        """Commits the loop's batch, when all ranks are through with it."""
        if self.world > 1:
            self._meet()
        hand, self._hand = self._hand, []
        try:
            for batch in hand:
                if batch.leads and batch._live and not batch._settled:
                    batch.commit()
        finally:
            for batch in hand:
                batch.free()

    def _drop(self):
        """A loop was left by `break`: its batch is given back."""
        hand, self._hand = self._hand, []
        for batch in hand:
            batch.free()

    def _flush(self):
        now = time.monotonic()
        if _t.is_on() and now > self._flushed + _FLUSH:
            _t.flush()
            self._flushed = now

    # ---- steps

    def steps(self, publisher: Union[Publisher, Kept], columns: Iterable[str] = (), *, rows: Optional[int] = None,
              micro: Optional[int] = None, part: Optional[int] = None, task: Optional[str] = None,
              last: Optional[int] = None, policy: str = "ordered", framework: str = "torch",
              copy: Optional[bool] = None, save: Optional[Callable] = None, every: Optional[int] = None,
              ready: Optional[Mapping[str, float]] = None, **claim: Any) -> Iterator[Step]:
        """A trainer's steps, from the one that the run goes on from; on all ranks.

            for step in role.steps(publisher, ["response", "reward"], save=save):
                for batch in step:                     # this rank's part of each micro-batch
                    loss(batch).backward()
                    if step.due:                       # the samples of an optimiser step are whole
                        optimizer.step()
                step.report(loss=...)

        A step takes the `rows` rows that the run's schedule gives it, whenever each is claimed: those of its own
        prompts, or (async) those that are complete first, in whole groups; `micro` for each rank at once, and none of
        two parts of `part` rows, which are an optimiser step's, in one batch. When the next step is asked for: the
        weights are published, as version `step.number`; more may be rolled out; the step is reported; its rows are
        committed; and where a checkpoint is due, the queue's cursor is taken and save(number, files) called on all
        ranks: files, {name: bytes}, belong to the checkpoint: the cursor, and dray.json, which says what was trained.
        Only when it returned does the queue free what it covers. In a new run the version that comes first is saved
        and published before the first step; in one that goes on where engines may ask for the version before
        (one_step_async), that, too.
        Ends behind step `last`, at the queue's end, or by SIGTERM, with a checkpoint. Where the queue ends in
        the middle of a step, RunEnded.

        Not said, rows, micro, part, last and every come from the job: rollout.prompts x samples,
        actor.micro_batch, rows / actor.optimiser_steps, steps, checkpoint.every. ready: numbers of the report
        "ready". claim: as Queue.claim's, in the place of what the schedule says, such as staleness=: of a step k the
        samples must be of a version from k - 1 - staleness on."""
        if save is not None and not callable(save):
            raise TypeError("save: a function of the step's number and of files expected")
        rules = self.rules or Rules(oldest=1 + claim.get("staleness", 0))
        rules.rows = rows or rules.rows or self._setting("rollout.prompts") * self._setting("rollout.samples")
        rules.last = last or rules.last or self._setting("steps")
        if rows and rows % rules.group:
            rules.group = 1
        if part is None:
            actor = self.config.get("actor", {}) if self._has_config else {}
            part = rules.rows // actor.get("optimiser_steps", 1)
        plan = Plan(rules=rules, micro=micro or self._setting("actor.micro_batch"), part=part,
                    every=every or (self._setting("checkpoint.every") if save else 0), save=save,
                    task=self._task(task)[0], columns=list(columns), policy=policy,
                    how=_How(framework, copy, True, policy == "group"), claim=claim)
        self._options(plan.task, 1, policy, False, claim)  # what is misspelt is said now
        return Trainer(self, publisher, plan, dict(ready or {})).run()

    def _setting(self, path: str) -> Any:
        value = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise DrayError(_l.EINVALID, f"$DRAY_CONFIG: the job has no {path}")
            value = value[key]
        return value

    # ---- checkpoints

    @property
    def _durability(self) -> str:
        """The queue's, as the job has it. With "journal" a run that goes on from a checkpoint gets back what was
        trained behind it. Else it makes those samples anew, and the queue need not keep them."""
        queue = self.config.get("queue", {}) if self._has_config else {}
        return queue.get("durability", "journal")

    def saver(self, model: Any, optimizer: Any = None, config: Optional[str] = None) -> Callable:
        """For steps(save=): the model's parameters, torch's optimizer's state (whole or
        DTensors, each rank its part) and the files, as a checkpoint that `dray run --resume` goes on from.
        config: the text of the model's config.json."""
        def save(number, files):
            parts = {}
            if optimizer is not None:
                parts["optimizer"], files["optimizer.json"] = optimizer_tensors(model, optimizer)
            if self._kept is not None:
                parts.update(self._kept.previous(number))
            save_checkpoint(self.folder / "checkpoints", number, model, context=self.context("trainer"),
                            rank=self.rank, world=self.world, parts=parts, files=files, config=config,
                            keep=self._setting("checkpoint.keep"), stay=[0], timeout=self.timeout)
        return save

    def restore(self, model: Any, optimizer: Any = None) -> bool:
        """Reads the checkpoint of the step that the run goes on from, which the function of saver() wrote, into the
        model and the optimizer; each rank reads its part. Returns False in a new run, which has none."""
        if self.step == 0 and not (self.folder / "checkpoints" / "latest").exists():
            return False
        version, path = latest(self.folder / "checkpoints")
        if version != self.step:
            raise DrayError(_l.EINVALID, f"{path}: the run goes on from step {self.step} ($DRAY_STEP), the newest "
                            f"checkpoint is of step {version}")
        load_checkpoint(path, model)
        if optimizer is not None:
            load_optimizer(path, model, optimizer)
        return True

    def _agree(self, said: bool) -> bool:
        return said if self.world == 1 else self._tell(said)
