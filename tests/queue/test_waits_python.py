"""Signals end every call that waits, long before its deadline, and nothing is lost by it: what a
call was about to get stays in the queue, and the object can be used again."""
import math
import os
import signal
import threading
import time

from begin import needs

with needs:
    import numpy as np
    import torch

from python_fixture import coordinator, dray, refused, wrong

TASKS = {"read": (["x"], []), "write": (["x"], ["y"])}


class Stop(BaseException):
    pass


def stop(*_):
    raise Stop


def ended(function, *arguments, **more):
    """The call waits until a signal comes, and ends with what the signal's handler raises."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    begin = time.monotonic()
    try:
        result = function(*arguments, **more)
    except Stop:
        waited = time.monotonic() - begin
        assert 0.1 < waited < 15, f"ended after {waited:.1f} s"
        return
    finally:
        timer.join()
    raise AssertionError(f"{function} gave {result!r}")


def handled(function, *arguments, **more):
    """A handler that raises nothing lets the call go on."""
    seen = []
    signal.signal(signal.SIGUSR2, lambda *_: seen.append(time.monotonic()))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    begin = time.monotonic()
    refused("ETIMEDOUT", function, *arguments, timeout=1.2, **more)
    timer.join()
    assert seen and time.monotonic() - begin >= 1.2 and time.monotonic() - seen[0] > 0.5, seen


def check_queue(queue):
    for timeout in (60, math.inf, 1e30):
        ended(queue.claim, "read", timeout=timeout)
    handled(queue.claim, "read")
    ended(queue.refill, timeout=60)
    ended(queue.wait, "never", timeout=math.inf)
    for bad in (-1, math.nan):
        wrong(ValueError, "at least 0", queue.claim, "read", timeout=bad)
    # What is waited for no more gets nothing.
    queue.insert({"x": np.arange(4)}, "p")
    ended(queue.insert, {"x": np.arange(5)}, "q", timeout=60)  # capacity_rows are 8
    with queue.claim("read", 4, timeout=20) as batch:
        assert batch["x"][0].tolist() == [0, 1, 2, 3]
    queue.clear("p")
    queue.insert({"x": np.arange(4)}, "p", timeout=20)
    assert [p["name"] for p in queue.status()["partitions"]] == ["p"]
    ended(dray.Queue, "nowhere", timeout=60)
    with queue.claim("read", 4, timeout=20):
        pass


def check_loader():
    loader = dray.StreamDataLoader("write", ["x"], 8, timeout=math.inf)
    ended(next, loader)
    ended(loader.num_microbatches)
    loader.close()


def check_weights():
    tensor = torch.ones(8)
    with dray.weights.Context(role="trainer") as context:
        ended(context.barrier, "b", 2, timeout=60)
        publisher = dray.weights.Publisher([("t", tensor)], "m", context=context, timeout=60)
        with dray.weights.Context(role="engine") as engine:
            subscriber = dray.weights.Subscriber([("t", torch.zeros(8))], "m", context=engine, group="e")
            ended(subscriber.update, min_version=1, timeout=60)
            subscriber.close()
            publisher.publish(1)
            again = torch.zeros(8)
            subscriber = dray.weights.Subscriber([("t", again)], "m", context=engine, group="f")
            assert subscriber.update(min_version=1, timeout=20)["version"] == 1 and again.sum() == 8
            ended(publisher.deliver, groups=["nobody"], timeout=60)


def check_handler(queue):
    """A handler may use the library, but not the object that waits."""
    said = []

    def handler(*_):
        with dray.Queue(timeout=20) as other:
            said.append(other.status()["name"])
        raise Stop
    signal.signal(signal.SIGUSR1, handler)
    ended(queue.claim, "read", timeout=60)
    assert said == ["samples"], said
    signal.signal(signal.SIGUSR1, stop)
    ended(queue.claim, "read", timeout=60)


signal.signal(signal.SIGUSR1, stop)
with coordinator():
    with dray.Queue(tasks=TASKS, timeout=20, capacity_rows=8) as queue:
        check_queue(queue)
        check_loader()
        check_handler(queue)
    check_weights()
address = os.environ["DRAY_ADDRESS"] = "unix:" + os.environ["XDG_RUNTIME_DIR"] + "/nobody"
ended(dray.Queue, timeout=60)
