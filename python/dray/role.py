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
from .weights import Context, Publisher, Subscriber

_INVALID, _END, _STALE, _GONE, _TIMED_OUT = (-1 - _l.CODES.index(name) for name in (
    "INVALID", "END", "STALE", "GONE", "TIMEDOUT"))
_MODEL = "policy"   # under which trainers of a run publish, and engines subscribe
_MICRO = 32         # rows a claim, where neither the call nor the job says
_FLUSH = 1.0        # seconds between writes of the timeline
_WORDS = {
    "DRAY_ADDRESS": "where the coordinator is", "DRAY_RUN": "the folder of the run",
    "DRAY_CONFIG": "the job as resolved, a JSON file", "DRAY_TASK": "for which tasks this program claims",
}


class RunEnded(SystemExit):
    """The run ended, or this process was asked to end, in the middle of a step: what was claimed of it is
    given back. `with Role()` swallows it; elsewhere it ends the process, with status 0."""

    def __init__(self, message: str):
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


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
    asked for. Of several ranks what rank 0 sets counts; a `split` batch has this rank's part of the rows."""

    def __init__(self, owner: Queue, batch: int, framework: str, copy: Optional[bool], task: str,
                 leads: bool = True, part: Optional[tuple] = None):
        self.leads, self.task, self.whole = leads, task, library().dray_batch_rows(batch)
        first, rows, padding = part or (0, self.whole, False)
        super().__init__(owner, batch, framework, copy, True, not leads, first, rows)
        if padding:
            self.weights = np.zeros(rows)

    def set(self, name: str, values: Any, offsets: Any = None) -> None:
        if self.leads:
            if self.rows != self.whole:
                raise ValueError(f"column {name}: a part of a batch's rows cannot be set")
            super().set(name, values, offsets)

    def set_tag(self, key: str, values: Sequence[float]) -> None:
        if self.leads:
            super().set_tag(key, values)

    def leave_open(self, rows: Sequence[int] = ()) -> None:
        if self.leads:
            super().leave_open(rows)


def _number(name: str, fallback: int) -> int:
    text = os.environ.get(name) or str(fallback)
    if not text.isdecimal():
        raise DrayError(_INVALID, f"${name}: a number expected, found {text!r}")
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
    """This process, as a role of a run. What it is asked for is opened when it is asked for.

    name, instance, rank, world, epoch, step: of the role, from the environment; step: the one that the run
    goes on from, 0 in a new run. tasks: the names in $DRAY_TASK. config: the job as resolved, a dict.
    folder: the run's. timeout: seconds that single calls may take (None: the job's limits.wait_seconds, or
    60); samples are waited for as long as the run goes on. lost: rows that were finished, but had been taken
    back or cleared meanwhile."""

    def __init__(self, timeout: Optional[float] = None):
        self._get("DRAY_ADDRESS")
        self.tasks = [name for name in os.environ.get("DRAY_TASK", "").split(",") if name]
        self.name = os.environ.get("DRAY_ROLE") or (self.tasks or ["role"])[0]
        self.instance, self.epoch = _number("DRAY_INSTANCE", 0), _number("DRAY_EPOCH", 1)
        self.rank = _number("DRAY_RANK", _number("RANK", 0))
        self.world, self.step = _number("WORLD_SIZE", 1), _number("DRAY_STEP", 0)
        self._config = self._queue = self._group = None
        self._hand, self._contexts, self.lost = [], {}, 0
        self._flushed, self._traced = time.monotonic(), False
        self._stopping = self._waiting = False
        if timeout is None:
            limits = self.config.get("limits", {}) if os.environ.get("DRAY_CONFIG") else {}
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
            raise DrayError(_INVALID, f"${name} is not set: {_WORDS[name]}. `dray run` sets it for the "
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
                raise DrayError(_INVALID, f"$DRAY_CONFIG: {path}: the job as JSON expected: {error}") from None
        return self._config

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self._get("DRAY_RUN"))

    @property
    def group(self) -> str:
        """What this instance is called: the role's name, and which it is where there are several."""
        roles = self.config.get("roles", []) if os.environ.get("DRAY_CONFIG") else []
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
            raise _Stop

    @property
    def stopping(self) -> bool:
        return self._stopping

    def _fail(self, error: BaseException):
        """What an exception leaves in the loop's hands is a failed attempt; a signal's is given back."""
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

    def publisher(self, parameters: Any, optimizer: Any = None, model: str = _MODEL,
                  **options: Any) -> Publisher:
        """A trainer's: weights.Publisher of this rank. optimizer: waits before its steps for readers."""
        publisher = Publisher(self.context("trainer"), model, parameters, self.rank, self.world,
                              timeout=self.timeout, **options)
        if optimizer is not None:
            publisher.attach(optimizer)
        return publisher

    def subscriber(self, blocks: Any = (), model: str = _MODEL, **options: Any) -> Subscriber:
        """An engine's: weights.Subscriber of this rank; the ranks of this instance are its group."""
        return Subscriber(self.context("engine"), model, blocks, self.group, self.rank, self.world,
                          self.timeout, **options)

    def engines(self, model: str = _MODEL) -> list:
        """The engines that take the model's weights, a dict each: name, version (0: none yet), ranks,
        state, serving, ..., as `dray status --json` has them."""
        out = c.c_void_p()
        call("dray_context_status", self._any().pointer, c.byref(out))
        groups = json.loads(_l.take(out)).get("groups", [])
        return [group for group in groups if group["model"] == model]

    def _any(self):
        return next(iter(self._contexts.values()), None) or self.context()

    def report(self, kind: str, **numbers: Any) -> None:
        """Tells the run's view and metrics.jsonl: "step" with a step's numbers, or a kind of one's own. Of
        several ranks rank 0's."""
        if self.rank == 0:
            call("dray_report_post", self._any().pointer, _l.text(kind),
                 json.dumps(_plain(numbers)).encode())

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
        """The ranks of the role, for what lies in host memory."""
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
                if error.code != _END:
                    raise
                return None
            finally:
                self._waiting = False
            if self.world > 1:
                self._tell(("idle",))

    def _claim(self, options: list, how: _How, at_once: bool = True) -> Optional[Batch]:
        """The next batch, on all ranks; None: there is none."""
        return self._follow(how) if self.rank else self._lead(options, how, at_once)

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
        section = self.config.get(task, {}) if os.environ.get("DRAY_CONFIG") else {}
        return int(section.get("micro_batch", _MICRO)) if isinstance(section, dict) else _MICRO

    def batches(self, task: Union[None, str, Sequence[str]] = None, columns: Iterable[str] = (),
                count: Union[None, int, Mapping[str, int]] = None, *, up_to: bool = True, policy: str = "fifo",
                framework: str = "numpy", copy: Optional[bool] = None, split: bool = False,
                **claim: Any) -> Iterator[Batch]:
        """Claimed batches of the task (None: those of $DRAY_TASK; of several, the first that has rows), until
        the queue ends, or SIGTERM. Asking for the next one commits the last, with what was set.

        columns: read before the body gets the batch; others of the task are read when it asks for them.
        count: rows at most, for all tasks or {task: rows} (not said: the job's micro_batch for the task, or
        32); up_to=False: exactly so many, but at the end of a partition.
        split: of several ranks each gets its part of the rows. framework, copy: see columns.Rows. Further
        keywords are those of Queue.claim: policy="group", ...
        A batch whose rows were taken back, or cleared, meanwhile is left out, and counted in `lost`."""
        if isinstance(columns, str):
            raise ValueError(f"columns: a list of names expected, found {columns!r}")
        options = self._options(task, count, policy, up_to, claim)
        return self._batches(options, list(columns), _How(framework, copy, split, policy == "group"))

    def _batches(self, options, columns, how):
        self._drop()
        self._does("loop")
        while (batch := self._claim(options, how)) is not None:
            self._hand.append(batch)
            for name in columns:
                batch[name]
            rows = batch.rows
            self._does(batch.task)
            yield batch
            self._does("loop", rows=rows)
            try:
                self._settle()
            except DrayError as error:
                if error.code not in (_STALE, _GONE):
                    raise
                self.lost += batch.rows
            self._flush()

    def _settle(self):
        """Commits what is in the loop's hands, when all ranks are through with it."""
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

    def steps(self, publisher: Publisher, columns: Iterable[str] = (), *, rows: Optional[int] = None,
              micro: Optional[int] = None, task: Optional[str] = None, last: Optional[int] = None,
              policy: str = "ordered", framework: str = "torch", copy: Optional[bool] = None,
              save: Optional[Callable] = None, every: Optional[int] = None,
              ready: Optional[Mapping[str, float]] = None, **claim: Any) -> Iterator[Step]:
        """A trainer's steps, from the one that the run goes on from; on all ranks.

            for step in role.steps(publisher, ["response", "reward"], save=save):
                for batch in step:                     # this rank's part of each micro-batch
                    loss(batch).backward()
                optimizer.step()
                step.report(loss=...)

        A step takes the first `rows` rows that are there, whenever each is claimed, `micro` for each rank at
        once. When the next step is asked for: the weights are published, as version `step.number`; more
        may be rolled out; the step is reported; its rows are committed; and where a checkpoint is due, the
        queue's cursor is taken and save(number, files) called on all ranks: files, {name: bytes}, belong to
        the checkpoint, among them the cursor. Only when it returned does the queue free what it covers. In a
        new run the version that comes first is saved and published before the first step.
        Ends behind step `last`, at the queue's end, or by SIGTERM, with a checkpoint. Where the queue ends in
        the middle of a step, RunEnded.

        Not said, rows, micro, last and every come from the job: rollout.prompts x samples,
        actor.micro_batch, steps, checkpoint.every. ready: numbers of the report "ready". claim: as
        Queue.claim's, such as staleness=; of a step k the samples must be of a version from
        k - 1 - staleness on."""
        if save is not None and not callable(save):
            raise TypeError("save: a function of the step's number and of files expected")
        plan = _Plan(rows=rows or self._setting("rollout.prompts") * self._setting("rollout.samples"),
                     micro=micro or self._setting("actor.micro_batch"),
                     last=last or self._setting("steps"),
                     every=every or (self._setting("checkpoint.every") if save else 0), save=save,
                     task=self._task(task)[0], columns=list(columns), policy=policy,
                     how=_How(framework, copy, True, policy == "group"), claim=claim)
        return self._steps(publisher, plan, dict(ready or {}))

    def _setting(self, path: str) -> Any:
        value = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise DrayError(_INVALID, f"$DRAY_CONFIG: the job has no {path}")
            value = value[key]
        return value

    def _steps(self, publisher, plan, ready):
        self._drop()
        self._does("loop")
        admits = self.rank == 0 and self.queue.status().get("admission") is not None
        saved = number = self.step
        if number == 0:
            self._save(plan, 0)
        self.report("ready", step=number, **ready)
        publisher.publish(number)
        while number < plan.last and not self._agree(self._stopping):
            step = Step(self, number + 1, plan)
            if not step._take():
                break
            yield step
            self._does("loop")
            step._check()
            number = step.number
            publisher.publish(number)
            if admits:
                self.queue.version(number)
            self.report("step", **step._numbers())
            self._settle()
            if plan.save and (number % plan.every == 0 or number == plan.last):
                saved = number
                self._save(plan, number)
            elif self.rank == 0 and not self._keeps:
                self.queue.covered(self.queue.cursor(number))
            self._flush()
        if saved != number:
            self._save(plan, number)

    # ---- checkpoints

    @property
    def _keeps(self) -> bool:
        """Whether a run that goes on from a checkpoint gets back what was trained behind it. Else it makes
        those samples anew, and the queue need not keep them."""
        queue = self.config.get("queue", {}) if os.environ.get("DRAY_CONFIG") else {}
        return queue.get("durability", "journal") == "journal"

    def saver(self, model: Any, optimizer: Any = None, config: Optional[str] = None) -> Callable:
        """For steps(save=): the model's parameters, torch's optimizer's state (of the host, whole or
        DTensors, each rank its part) and the files, as a checkpoint that `dray run --resume` goes on from.
        config: the model's config.json."""
        def save(number, files):
            parts = {}
            if optimizer is not None:
                parts["optimizer"], files["optimizer.json"] = optimizer_tensors(model, optimizer)
            files["dray.json"] = json.dumps({
                "format": 1, "job": self.config.get("name"), "seed": self.config.get("seed"), "step": number,
                "weight_version": number}, indent=2).encode()
            save_checkpoint(self.folder / "checkpoints", number, model, context=self.context("trainer"),
                            rank=self.rank, world=self.world, parts=parts, files=files, config=config,
                            keep=self._setting("checkpoint.keep"), stay=[0], timeout=self.timeout)
        return save

    def restore(self, model: Any, optimizer: Any = None) -> bool:
        """Reads what saver's function wrote of the step that the run goes on from, each rank its part; False:
        a new run."""
        if self.step == 0 and not (self.folder / "checkpoints" / "latest").exists():
            return False
        version, path = latest(self.folder / "checkpoints")
        if version != self.step:
            raise DrayError(_INVALID, f"{path}: the run goes on from step {self.step} ($DRAY_STEP), the newest "
                            f"checkpoint is of step {version}")
        load_checkpoint(path, model)
        if optimizer is not None:
            load_optimizer(path, model, optimizer)
        return True

    def _agree(self, said: bool) -> bool:
        return said if self.world == 1 else self._tell(said)

    def _save(self, plan, number):
        if plan.save is None:
            return
        files = {}
        if self.rank == 0:
            self._wait_for_row(number)
            files[CURSOR] = self.queue.cursor(number)
        with _t.span("checkpoint", number, "transfer"):
            plan.save(number, files)
        if self.rank == 0:
            self.queue.covered(files[CURSOR])
            self.report("checkpoint", step=number)


    def _wait_for_row(self, number):
        """A run goes on from its newest checkpoint: the row of the step must be in metrics.jsonl by then, or
        beside it, where it waits for its evaluation."""
        end, rows = time.monotonic() + self.timeout, pathlib.Path(os.environ.get("DRAY_RUN", ""), _ROWS[0])
        while number > 0 and os.environ.get("DRAY_RUN") and rows.exists() and self._last_row() < number:
            if time.monotonic() > end:
                raise DrayError(_TIMED_OUT, f"{rows}: no row of step {number} after "
                                f"{self.timeout:.0f} s: is `dray run` alive?")
            time.sleep(0.01)

    def _last_row(self):
        last = -1
        for name in _ROWS:
            try:
                with open(self.folder / name, "rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
                    lines = file.read().splitlines()[-2:]
            except FileNotFoundError:  # nothing waits
                continue
            for line in lines:
                try:
                    last = max(last, json.loads(line)["step"])
                except (ValueError, KeyError, TypeError):  # the end, or the beginning, of a line
                    continue
        return last


_ROWS = "metrics.jsonl", ".metrics.pending"  # as in src/run/folder.h
CURSOR = "queue.cursor"  # the file of a checkpoint that has it


@dataclass(frozen=True)
class _Plan:
    rows: int
    micro: int
    last: int
    every: int
    save: Optional[Callable]
    task: str
    columns: list
    policy: str
    how: _How
    claim: dict


class Step:
    """A step of a trainer: iterating gives its batches, this rank's part of each. number: which, and the
    version of the weights that it makes; rows: taken so far, by all ranks."""

    def __init__(self, role: Role, number: int, plan: _Plan):
        self._role, self._plan, self.number, self.rows = role, plan, number, 0
        self._next, self._told, self._behind = None, {}, []

    def _take(self) -> bool:
        """Claims the next batch; False: there is none."""
        role, plan = self._role, self._plan
        count = min(plan.micro * role.world, plan.rows - self.rows)
        options = role._options(plan.task, count, plan.policy, False,
                                dict({"fresh": 1, "version": self.number - 1}, **plan.claim))
        batch = self._next = role._claim(options, plan.how, not self.rows)
        if batch is None:
            return False
        role._hand.append(batch)
        self.rows += batch.whole
        versions = np.full(batch.whole, np.nan)
        role.queue._pins.call("dray_batch_tags", batch._batch, b"version", 0, batch.whole,
                               versions.ctypes.data)
        self._behind += (self.number - 1 - versions[~np.isnan(versions)]).tolist()
        for name in plan.columns:
            batch[name]
        return True

    def __iter__(self) -> Iterator[Batch]:
        while self._next is not None or self.rows < self._plan.rows:
            if self._next is None and not self._take():
                raise RunEnded(f"the run ended in step {self.number}, of which {self.rows} of "
                               f"{self._plan.rows} rows were there")
            batch, self._next = self._next, None
            rows = batch.rows
            self._role._does(self._plan.task, self.number)
            yield batch
            self._role._does("loop", rows=rows)
        self._role._does("step", self.number)

    def _check(self):
        if self._next is not None or self.rows < self._plan.rows:
            raise RuntimeError(f"step {self.number}: {self.rows} of {self._plan.rows} rows were asked for "
                               "before the next step was: iterate over the step to its end")

    def report(self, **numbers: Any) -> None:
        """Numbers for the step's report, and metrics.jsonl; of several ranks rank 0's count."""
        self._told.update(numbers)

    def _numbers(self):
        behind = self._behind or [0]
        return dict({"step": self.number, "samples": self.rows, "weight_version": self.number - 1,
                     "staleness_mean": sum(behind) / len(behind), "staleness_max": max(behind)}, **self._told)
