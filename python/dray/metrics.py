"""The rows of a run's metrics.jsonl in TensorBoard and in Weights & Biases.

    python3 -m dray.metrics runs/first --tensorboard --wandb        # of a run that is over, or that goes on

In a role's process beside its work, as rows come:

    with dray.Role() as role, role.metrics(tensorboard=True, wandb=True):
        ...

Every number of a row is a scalar under its key; those within others have slashes: time/engine/wait/samples. Both
packages are looked for when they are asked for: `tensorboard`, `wandb`. Weights & Biases writes to the run's folder
(mode "offline", whatever the environment says; `wandb sync` uploads it) unless `mode` says otherwise."""
from __future__ import annotations

import argparse
import fcntl
import json
import pathlib
import sys
import threading
from typing import Any, Callable, Iterator, Mapping, Optional, Union

_LOOK = 1.0  # seconds between two looks at the file


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple]:
    """(key, number) of a row; lists and what is not a number are left out."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and prefix + key != "step":
            yield prefix + key, value


class TensorBoard:
    """Event files in `folder`."""

    def __init__(self, folder: Union[str, pathlib.Path]):
        from tensorboard.summary import Writer
        self._writer = Writer(str(folder))

    def row(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases with the job's settings; what else wandb.init takes in `options`."""

    def __init__(self, folder: Union[str, pathlib.Path], config: Mapping[str, Any], **options: Any):
        import wandb
        self._run = wandb.init(**{"dir": str(folder), "mode": "offline", "config": dict(config), **options})

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Follower:
    """Gives each row of `run`/metrics.jsonl to the sinks, once and in order: look() those that are there. A line that is
    not whole yet waits; rows of steps that a resumed run makes again are left out."""

    def __init__(self, run: Union[str, pathlib.Path], sinks: list):
        self.path, self.sinks = pathlib.Path(run) / "metrics.jsonl", sinks
        self._at, self._last, self._step = 0, b"", -1  # _last is the line that ends at _at

    def look(self) -> int:
        """How many rows were new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at - len(self._last))
                if file.read(len(self._last)) != self._last:  # a resumed run has cut it, and may have written more
                    self._at, self._last = file.seek(0), b""
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        new = 0
        for line in lines:
            self._at, self._last = self._at + len(line) + 1, line + b"\n"
            row = json.loads(line)
            if row["step"] <= self._step:
                continue
            self._step, new = row["step"], new + 1
            values = dict(scalars(row))
            for sink in self.sinks:
                sink.row(self._step, values)
        for sink in self.sinks if new else ():
            sink.flush()
        return new

    def close(self) -> None:
        self.look()
        for sink in self.sinks:
            sink.close()


def sinks(run: Union[str, pathlib.Path], tensorboard: Any = False, wandb: Any = False) -> list:
    """Those that are asked for. tensorboard: True (`run`/tensorboard), or a folder; wandb: True, or a dict of what
    wandb.init takes."""
    run = pathlib.Path(run)
    made = []
    if tensorboard:
        made.append(TensorBoard(run / "tensorboard" if tensorboard is True else tensorboard))
    if wandb:
        config = json.loads((run / "config.json").read_text())
        made.append(WandB(run, config, **({"name": run.name} if wandb is True else wandb)))
    return made


class Following:
    """A thread that looks as the run goes on; a context. What a sink raises ends it, and is told on stderr: the role's
    work goes on."""

    def __init__(self, run: Union[str, pathlib.Path], make: Callable[[], list]):
        self._over = threading.Event()
        self._thread: Optional[threading.Thread] = threading.Thread(target=self._main, args=(run, make), daemon=True)

    def _main(self, run, make):
        try:
            follower = Follower(run, make())
            while not self._over.wait(_LOOK):
                follower.look()
            follower.close()
        except Exception as error:
            print(f"dray.metrics: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Following":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()


def _goes_on(run: pathlib.Path) -> bool:
    """`dray run` holds the folder's lock for as long as it runs."""
    try:
        with (run / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m dray.metrics", description="The rows of a run's metrics.jsonl in "
                                     "TensorBoard and in Weights & Biases. Follows a run that goes on to its end.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--tensorboard", nargs="?", const=True, metavar="DIR", help="write event files; default: in the run's folder")
    parser.add_argument("--wandb", action="store_true", help="write a run of Weights & Biases, offline")
    parser.add_argument("--project", help="of Weights & Biases")
    parser.add_argument("--mode", default="offline", choices=("offline", "online"), help="of Weights & Biases")
    a = parser.parse_args()
    run = pathlib.Path(a.run)
    if not (a.tensorboard or a.wandb):
        parser.error("expected --tensorboard, --wandb, or both")
    if not (run / "config.json").is_file():
        parser.error(f"{run}: expected a run's folder, with config.json")
    options = {"name": run.name, "mode": a.mode, **({"project": a.project} if a.project else {})}
    follower = Follower(run, sinks(run, a.tensorboard, a.wandb and options))
    wait = threading.Event()
    while _goes_on(run):
        follower.look()
        wait.wait(_LOOK)
    follower.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
