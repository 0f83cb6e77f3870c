"""The steps of a run's trainer (Role.steps), and the versions that an engine of the run takes (Role.weights). What a
schedule asks of both is the library's to know (include/dray/steps.h): the rules in the run's config.json are its."""
from __future__ import annotations

import ctypes as c
import json
import os
import pathlib
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Optional

import numpy as np

from . import _library as _l
from . import parameters as _p
from . import trace as _t
from ._library import DrayError, DrayTimeout, call, library
from .checkpoint import load as load_checkpoint
from .lease import Lease

_ROWS = "metrics.jsonl", ".metrics.pending"  # as in src/run/supervisor/folder.h
_SLICE = 0.5      # seconds of a wait in a thread, which may be asked to end
_PATIENCE = 0.02  # seconds for which an engine has rows that wait for a version
CURSOR, CARD = "queue.cursor", "dray.json"  # files of a checkpoint: the queue's cursor and the checkpoint's description


class RunEnded(SystemExit):
    """The run ended, or this process was asked to end, in the middle of a step: what was claimed of it is
    given back. `with Role()` swallows it; elsewhere it ends the process, with status 0."""

    def __init__(self, message: str):
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Rules(_l.StepsRules):
    """dray_steps_rules."""

    def __init__(self, **values):
        super().__init__(**dict({"oldest": 1, "newest": 1, "open": 1, "kept": 1, "group": 1}, **values))


# ---- trainers ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Plan:
    """How Role.steps was called."""
    rules: Rules
    micro: int
    part: int
    every: int
    save: Optional[Callable]
    task: str
    columns: list
    policy: str
    how: Any
    claim: dict


class Trainer:
    """A trainer's way through its steps, on each rank."""

    def __init__(self, role, publisher, plan: Plan, ready: Mapping[str, float]):
        self.role, self.plan = role, plan
        self._publisher, self._ready = publisher, ready
        self.taken = c.c_void_p()
        folder = os.environ.get("DRAY_RUN")
        if folder and role.rank == 0 and role._has_config:
            self._check_host()
        call("dray_steps_open", c.byref(plan.rules), folder and os.fsencode(folder), role.step, c.byref(self.taken))

    def _check_host(self):
        """On a host that joined the run, its folder must be reached by `dray join --shared`: a checkpoint waits for the
        step's row there, and a step of any prompts needs to know what was trained before, and that the run was asked
        to end. Samples are saved on the run's host alone."""
        role, plan = self.role, self.plan
        if not os.environ.get("DRAY_ADDRESS", "").startswith("tcp:") or not (plan.save or plan.rules.first_complete):
            return
        if not (role.folder / _ROWS[0]).exists():
            raise DrayError(_l.EUNSUPPORTED, f"{role.group}: rank 0 is not on the run's host, and does not reach the "
                            f"run's folder: no {role.folder / _ROWS[0]} is there; join with --shared DIR, or have "
                            "rank 0 on the run's host (`local`)")
        if plan.save and role._durability == "checkpoint":
            raise DrayError(_l.EUNSUPPORTED, f"{role.group}: rank 0 is not on the run's host, and queue.durability is "
                            "checkpoint: samples are saved with a checkpoint there alone; have rank 0 there (`local`), "
                            "or another durability")

    def run(self) -> Iterator[Step]:
        try:
            yield from self._run()
        finally:
            taken, self.taken = self.taken, None
            library().dray_steps_close(taken)

    def _run(self):
        role, plan = self.role, self.plan
        role._drop()
        role._does("loop")
        admits = role.rank == 0 and role.queue.status().get("admission") is not None
        saved = number = role.step
        if number == 0 and not role._agree(self._begins_again()):
            self._save(0)
        role.report("ready", step=number, **self._ready)
        if isinstance(self._publisher, Kept):
            self._publisher.restore(role.folder / "checkpoints", number)
        self._publisher.publish(number)
        while number < plan.rules.last and not self._is_over():
            step = Step(self, number + 1)
            if not step._take():
                break
            yield step
            role._does("loop")
            step._check()
            number = step.number
            self._publisher.publish(number)
            if admits:
                role.queue.version(number)
            role.report("step", **step._numbers())
            role._settle()
            if plan.save and (number % plan.every == 0 or number == plan.rules.last):
                saved = number
                self._save(number)
            elif role.rank == 0 and role._durability != "journal":
                role.queue.covered(role.queue.cursor(number))
            library().dray_steps_next(self.taken)
            role._flush()
        if saved != number:
            self._save(number)
        if self._must_end():
            if role.rank == 0:
                role.queue.end()
        elif number >= plan.rules.last:
            self._wait_for_end()

    def _wait_for_end(self):
        """A run's queue ends when its last evaluation is made, too, and a role ends with the queue."""
        role, plan = self.role, self.plan
        if not role._has_config:
            return
        role._does("wait for the end")
        batch = role._claim(role._options(plan.task, 1, "fifo", True, {}), plan.how)
        if batch is not None:
            batch.free()

    def _begins_again(self):
        """The run goes on from its first checkpoint, which is not written again: a second one of that number would have
        another name, and the run's other processes look for the first one's."""
        folder = os.environ.get("DRAY_RUN")
        return bool(folder and (pathlib.Path(folder) / "checkpoints" / "latest").exists())

    def _must_end(self):
        """The run was asked to end. Where a step takes samples of any prompts, those of the next one are under
        way: they are left. Elsewhere the driver knows what is left to do, and ends the queue."""
        folder = os.environ.get("DRAY_RUN")
        return bool(self.plan.rules.first_complete and folder and (pathlib.Path(folder) / "stop").exists())

    def _is_over(self):
        role = self.role
        return role._agree(role._stopping or self._must_end())

    # ---- checkpoints

    def _card(self, number):
        """As src/run/trainer/checkpoint.c has it."""
        role, config, text = self.role, {}, c.c_void_p()
        if os.environ.get("DRAY_CONFIG"):
            config = role.config
        card = {"format": 1, "job": config.get("name"), "seed": config.get("seed"), "step": number,
                "weight_version": number, "samples_trained": number * self.plan.rules.rows}
        call("dray_steps_feed", self.taken, c.byref(text))
        if text:
            card["feed"] = json.loads(_l.take(text))
        return json.dumps(card, indent=2).encode()

    def _save(self, number):
        plan, role = self.plan, self.role
        if plan.save is None:
            return
        files = {}
        if role.rank == 0:
            self._wait_for_row(number)
            files[CURSOR], files[CARD] = role.queue.cursor(number), self._card(number)
        with _t.span("checkpoint", number, "transfer"):
            plan.save(number, files)
        if role.rank == 0:
            role.queue.covered(files[CURSOR])
            self._save_queue(number)
            role.report("checkpoint", step=number)

    def _save_queue(self, number):
        """What the queue holds once the checkpoint is there, for a run that goes on from it; those of checkpoints
        that are there no more go. As src/run/trainer/checkpoint.c does it."""
        role = self.role
        if role._durability != "checkpoint":
            return
        folder, saved = role.folder / "queue", "step-%d.checkpoint"
        role.queue.checkpoint(folder / (saved % number))
        there = {saved % int(one.name[5:]) for one in (role.folder / "checkpoints").glob("step-*")}
        for old in folder.glob("step-*.checkpoint"):
            if old.name not in there:
                old.unlink()

    def _wait_for_row(self, number):
        """A run goes on from its newest checkpoint: the row of the step must be in metrics.jsonl by then, or
        beside it, where it waits for its evaluation."""
        timeout = self.role.timeout
        end, rows = time.monotonic() + timeout, pathlib.Path(os.environ.get("DRAY_RUN", ""), _ROWS[0])
        with _t.span("wait for metrics.jsonl", number, "wait", "controller"):
            while number > 0 and os.environ.get("DRAY_RUN") and rows.exists() and self._last_row() < number:
                if time.monotonic() > end:
                    raise DrayError(_l.ETIMEDOUT, f"{rows}: no row of step {number} after "
                                    f"{timeout:.0f} s: is `dray run` alive?")
                time.sleep(0.01)

    def _last_row(self):
        last = -1
        for name in _ROWS:
            try:
                with open(self.role.folder / name, "rb") as file:
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


class Step:
    """A step of a trainer: iterating gives its batches, this rank's part of each. number: which, and the
    version of the weights that it makes; rows: taken so far, by all ranks; due: an optimiser step's samples
    are whole with the batch that was given last."""

    def __init__(self, trainer: Trainer, number: int):
        self._trainer, self._role, self._plan = trainer, trainer.role, trainer.plan
        self.number, self.rows, self.due, self._parts = number, 0, False, 0
        self._next, self._told, self._versions = None, {}, []

    def _options(self):
        """What the step takes next: nothing of two optimiser steps at once."""
        role, plan = self._role, self._plan
        most = min(plan.micro * role.world, plan.part - self.rows % plan.part)
        claim = _l.ClaimOptions.from_buffer_copy(role._options(plan.task, most, plan.policy, False, {})[0])
        library().dray_steps_claim(self._trainer.taken, most, c.byref(claim))
        for key, value in plan.claim.items():
            setattr(claim, key, _l.text(value) if value is None or isinstance(value, str) else value)
        return [claim]

    def _take(self) -> bool:
        """Claims the next batch; False: there is none."""
        role, plan = self._role, self._plan
        batch = self._next = role._claim_whole(self._options(), plan.how, plan.columns, not self.rows)
        if batch is None:
            return False
        role._hand.append(batch)
        call("dray_steps_take", self._trainer.taken, batch._batch)
        self.rows += batch.whole
        versions = np.full(batch.whole, np.nan)
        role.queue._pins.call("dray_batch_tags", batch._batch, b"version", 0, batch.whole, versions.ctypes.data)
        self._versions += versions[~np.isnan(versions)].astype(int).tolist()
        return True

    def __iter__(self) -> Iterator:
        rows_of = self._plan.rules.rows
        while self._next is not None or self.rows < rows_of:
            if self._next is None and not self._take():
                raise RunEnded(f"the run ended in step {self.number}, of which {self.rows} of "
                               f"{rows_of} rows were there")
            batch, self._next = self._next, None
            rows = batch.rows
            parts, self._parts = self._parts, self.rows // self._plan.part
            self.due = self._parts > parts or self.rows == rows_of
            self._role._does(self._plan.task, self.number)
            yield batch
            self._role._does("loop", rows=rows)
        self._role._does("step", self.number)

    def _check(self):
        if self._next is not None or self.rows < self._plan.rules.rows:
            raise RuntimeError(f"step {self.number}: {self.rows} of {self._plan.rules.rows} rows were asked for "
                               "before the next step was: iterate over the step to its end")

    def report(self, **numbers: Any) -> None:
        """Numbers for the step's report, and metrics.jsonl; of several ranks rank 0's count."""
        self._told.update(numbers)

    def _numbers(self):
        versions = self._versions or [self.number - 1]
        behind = [self.number - 1 - version for version in versions]
        return dict({"step": self.number, "samples": self.rows, "weight_version": max(versions),
                     "weight_version_min": min(versions), "staleness_mean": sum(behind) / len(behind),
                     "staleness_max": max(behind)}, **self._told)


# ---- versions ------------------------------------------------------------------------------------

class Kept:
    """What Role.publisher gives where engines may ask for one of several versions: each is published from a copy
    of its own, so that the optimizer waits for nobody."""

    def __init__(self, make: Callable, parameters: Any, model: str, count: int):
        self._given = _p.given(parameters, False)
        self._copies = [{name: parameter.detach().clone() for name, parameter in self._given.pairs()}
                        for _ in range(count)]
        self._publishers = [make(copies, f"{model}-{i}") for i, copies in enumerate(self._copies)]
        self._versions = [None] * count

    def _copy(self, version):
        at = version % len(self._copies)
        if self._versions[at] is not None:
            self._publishers[at].wait()
        return self._copies[at]

    def _announce(self, version):
        at = version % len(self._copies)
        self._publishers[at].publish(version)
        self._versions[at] = version

    def publish(self, version: int) -> None:
        copies = self._copy(_l.number("version", version))
        for name, parameter in self._given.pairs():
            copies[name].copy_(parameter.detach())
        self._announce(version)

    def previous(self, number: int) -> dict:
        """For a checkpoint: {"previous": tensors} of the version before, which engines may still want when a run
        goes on from it."""
        return {"previous": self._copies[(number - 1) % len(self._copies)]} if number else {}

    def restore(self, folder: pathlib.Path, number: int) -> None:
        """Publishes what previous() gave when the checkpoint was saved."""
        if number:
            load_checkpoint(folder / f"step-{number:06d}" / "previous", self._copy(number - 1))
            self._announce(number - 1)

    def wait(self) -> None:
        """Nobody reads what the optimizer changes."""

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


class Weights:
    """What Role.weights gives: the versions that the run's schedule wants of this engine. version: that it has; -1:
    none yet. report: of the last update. One thread at a time; close() before the role ends, where prefetch() was called."""

    def __init__(self, role, blocks: Any, model: str, **options: Any):
        self._role, self._rules, self.version, self.report = role, role.rules or Rules(rows=1), -1, None
        kept = self._rules.kept
        self._subscribers = [role.subscriber(blocks, model if kept == 1 else f"{model}-{i}", **options)
                             for i in range(kept)]
        self._ahead = None

    def take(self, batch: Any) -> Optional[int]:
        """Takes the weights that the batch, rows of one step, is to be made by, and returns their version: exactly
        the one that the schedule wants, or the newest one, at this boundary. None: what the rows want may wait
        for others that were lost; they are given back, to be claimed again."""
        role = self._role
        wanted = role._agree(self._choose(batch) if role.rank == 0 else None)
        if wanted is None:
            time.sleep(_PATIENCE)
            batch.free()
        elif wanted != self.version:
            self.update(wanted)
        return None if wanted is None else self.version

    def wanted(self, batch: Any) -> Optional[int]:
        """The version that take() would take for the batch, or None, for an engine whose boundary comes later."""
        return self._choose(batch)

    def newest(self) -> int:
        """That engines may take at any time, as the queue was told: in `rolling` and `async`; elsewhere version."""
        reached = (self._role.queue.status().get("admission") or {}).get("version", 0)
        return self.version if self._rules.exact else max(reached, self.version)

    def _choose(self, batch):
        oldest, newest = c.c_uint64(), c.c_uint64()
        call("dray_steps_versions", c.byref(self._rules), batch._batch, c.byref(oldest), c.byref(newest))
        evaluates = batch.partition.startswith("eval-")
        if evaluates:
            oldest.value = newest.value = int(batch.tag("step")[0])
        if self._rules.exact:
            return newest.value
        found = self.newest()
        # Where steps take any prompts, the version that is wanted may wait for these very rows.
        return found if found >= oldest.value or self._rules.first_complete else None

    def _turn(self):
        """As src/run/engine/engine_turns.c names it, for one engine at a time."""
        role = self._role
        with _t.span("wait for a turn", kind="wait", cause="weights"):
            return Lease(role.context("engine"), f"{role.name}/weights-0", timeout=_l.FOR_EVER)

    def prefetch(self, version: int) -> None:
        """Begins to bring the version, which may be still to come, into spare memory while the engine serves the one that it has;
        update() swaps. Of several ranks all call it. Nothing where that version is on its way, or there."""
        _l.number("version", version)
        if self._ahead is None or self._ahead.wanted < version or self._ahead.failed:
            self._forget()
            self._ahead = _Ahead(self._subscribers[version % self._rules.kept], version, self._rules.kept == 1)

    @property
    def ready(self) -> int:
        """The version that prefetch() has brought; -1: none, or not yet."""
        return self._ahead.version if self._ahead else -1

    def _forget(self):
        ahead, self._ahead = self._ahead, None
        if ahead:
            ahead.stop()

    def update(self, wanted: int) -> dict:
        """Takes the version: what was prefetched, or from the trainer, which is waited for. Nothing may use the weights
        meanwhile."""
        role, kept = self._role, self._rules.kept
        ahead, self._ahead = self._ahead, None
        brought = ahead.wait(wanted, lambda: role.stopping) if ahead else -1
        held = self._turn() if self._rules.in_turns and role.rank == 0 else None
        subscriber = self._subscribers[wanted % kept]
        try:
            report = None
            while report is None:
                try:
                    report = subscriber.commit(timeout=role.timeout) if brought >= wanted else subscriber.update(
                        min_version=wanted, peers=kept == 1, timeout=role.timeout)
                except DrayTimeout:  # whether the run stands still is for the run to say
                    if role.stopping:
                        raise
        finally:
            if held:
                held.release()
        if self._rules.exact and report["version"] != wanted:
            raise DrayError(_l.ENOENT, f"weights: version {wanted} expected, found {report['version']}")
        self.version, self.report = report["version"], report
        pause = report["pause_seconds"] if brought >= wanted else report["total_seconds"] - report["wait_seconds"]
        moved = ahead.report["bytes"] if brought >= wanted else report["bytes"]
        role.report("engine_update", role=role.group, version=self.version, bytes=moved,
                    seconds=report["total_seconds"], wait_seconds=report["wait_seconds"], pause_seconds=pause)
        return report

    def close(self) -> None:
        self._forget()
        for subscriber in self._subscribers:
            subscriber.close()


class _Ahead:
    """A prefetch, in a thread of its own. version: that it has brought, -1 before; report: of it."""

    def __init__(self, subscriber, wanted, peers):
        self.wanted, self.version, self.report = wanted, -1, None
        self._subscriber, self._peers, self._stopped = subscriber, peers, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while self.report is None and not self._stopped:
            try:
                self.report = self._subscriber.prefetch(min_version=self.wanted, peers=self._peers, timeout=_SLICE)
                self.version = self.report["version"]
            except DrayTimeout:  # it is still to come
                continue
            except DrayError:  # the update will say why
                return

    @property
    def failed(self):
        return self.report is None and not self._thread.is_alive()

    def stop(self):
        self._stopped = True
        self._thread.join()

    def wait(self, wanted, given_up):
        """Until it is there, which is not before its trainer is; what was brought, if that is what is wanted."""
        if self.wanted > wanted:
            self.stop()
        with _t.span("wait for weights", wanted, "wait", "weights"):
            while self._thread.is_alive() and not given_up():
                self._thread.join(_SLICE)
        self.stop()
        return self.version
