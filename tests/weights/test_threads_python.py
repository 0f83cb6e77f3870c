"""One thread at a time is in the calls of an object: another one's call is refused (EBUSY), and so is its close, which
frees nothing under a call. A close that was refused has changed nothing, and succeeds later."""
import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time

from begin import coordinator

import numpy as np

import dray
from dray.weights import Context, Engines, Publisher, Subscriber
from served import refused

ELSEWHERE = "another thread"


@contextlib.contextmanager
def beside(function, *arguments, **options):
    """A thread makes the call while the block runs. Gives the list that its result comes into, or its error."""
    said = []

    def run():
        try:
            said.append(function(*arguments, **options))
        except BaseException as error:
            said.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield said
    finally:
        thread.join(60)
        assert not thread.is_alive() and len(said) == 1, said


def busy(function, *arguments, **options):
    assert refused(dray.DrayError, ELSEWHERE, function, *arguments, **options).name == "EBUSY"


def wait_until_busy(function, *arguments):
    """Until another thread is in the object, as a call without effects sees it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            function(*arguments)
        except dray.DrayError as error:
            assert error.name == "EBUSY", error
            return
        time.sleep(0.002)
    raise AssertionError("nobody came into the object")


def test_publisher(context, value):
    memory = np.zeros(4, np.float32)
    with Publisher({"a": value}, "publisher", context=context) as publisher:
        publisher.publish(1)
        with beside(publisher.deliver, timeout=60) as said:
            wait_until_busy(publisher.moved)
            for call in (publisher.wait, publisher.release, publisher.close, context.close):
                busy(call)
            busy(publisher.publish, 2)
            assert Subscriber({"a": memory}, "publisher", context=context).update()["version"] == 1
        assert said == [None], said
        assert publisher.wait() == 0
    assert np.array_equal(memory, value)
    assert refused(dray.DrayError, "publisher publisher is closed", publisher.wait).name == "ECLOSED"
    publisher.close()


def test_subscriber(context, value):
    memory, given = np.zeros(4, np.float32), value.copy()
    subscriber = Subscriber({"a": memory}, "subscriber", context=context)
    with Publisher({"a": given}, "subscriber", context=context) as publisher:
        with beside(subscriber.update, min_version=2, timeout=60) as said:
            wait_until_busy(lambda: subscriber.version)
            for call in (subscriber.close, subscriber.verify, subscriber.start, subscriber.poll, subscriber.finish,
                         subscriber.drop_prefetched, subscriber.leave, context.close):
                busy(call)
            subscriber.note_step(0.01)  # any thread may
            assert subscriber.fileno() >= 0
            publisher.publish(2)
        assert said[0]["version"] == 2 and np.array_equal(memory, value), said
        subscriber.close()
        for call in (subscriber.update, subscriber.poll, subscriber.fileno):
            assert refused(dray.DrayError, "is closed", call).name == "ECLOSED"
        refused(dray.DrayError, "is closed", subscriber.note_step, 0.01)


def test_signal(context, value):
    """What a signal's handler calls of the object whose call it came into is refused, too."""
    refusals, seen = [], threading.Event()

    def refusal(call):
        """"": it was not refused, or came before the call was under way."""
        try:
            call()
        except dray.DrayError as error:
            return error.name if "by what this call came into" in str(error) else ""
        return ""

    def handler(*_):
        nonlocal refusals
        if not seen.is_set() and refusal(publisher.moved):
            refusals = [refusal(call) for call in (publisher.close, context.close)]
            seen.set()

    def takes():
        seen.wait(60)
        return Subscriber({"a": np.zeros(4, np.float32)}, "signalled", context=context).update()["version"]
    with Publisher({"a": value}, "signalled", context=context) as publisher:
        publisher.publish(1)
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            with beside(takes) as said:
                publisher.deliver(timeout=60)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert said == [1] and refusals == ["EBUSY"] * 2, (said, refusals)


def test_cancelled(context, value):
    """The thread of a cancelled coroutine is still in the publisher."""
    async def main():
        with Publisher({"a": value}, "cancelled", context=context) as publisher:
            publisher.publish(1)
            waits = asyncio.ensure_future(publisher.deliver_async(timeout=60))
            while not waits.done():
                try:
                    publisher.moved()
                except dray.DrayError as error:
                    assert error.name == "EBUSY", error
                    break
                await asyncio.sleep(0.002)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            busy(publisher.wait)
            busy(publisher.close)
            Subscriber({"a": np.zeros(4, np.float32)}, "cancelled", context=context).update()
            while True:
                try:
                    return publisher.wait()
                except dray.DrayError as error:
                    assert error.name == "EBUSY", error
                await asyncio.sleep(0.002)
    assert asyncio.run(main()) == 0


def test_session(value):
    """The session is for all threads at once, but ends only when none is in a call."""
    context, other = Context(role="engine", timeout=60), Context(role="trainer", timeout=60)
    with beside(context.barrier, "both", 2):
        deadline = time.monotonic() + 30
        while not status(other)["barriers"]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert context.member > 0
        busy(context.close)
        other.barrier("both", 2)
    engines = Engines(context)

    def joined():
        while True:
            with contextlib.suppress(dray.DrayError):
                for event, engine in engines.wait(60):
                    return event, engine["group"]
    publisher = Publisher({"a": value}, "session", context=other)
    subscriber = Subscriber({"a": np.zeros(4, np.float32)}, "session", context=context)
    with beside(joined) as said:
        wait_until_busy(lambda: len(engines))
        assert engines.fileno() >= 0
        publisher.publish(1)
        subscriber.update()
    assert said == [("joined", "engine")], said
    lease = dray.Lease(context, "turn")
    with beside(dray.Lease, other, "turn", 60) as said:
        while not lease.check():
            time.sleep(0.002)
        busy(other.close)
        context.close()  # gives the lease back
    assert said[0].check() == 0
    for call in (lease.check, engines.poll, engines.fileno, subscriber.update, lambda: context.member):
        assert refused(dray.DrayError, "is closed", call).name == "ECLOSED"
    lease.release()
    said[0].release()
    other.close()


def status(context):
    out = ctypes.c_void_p()
    dray._library.call("dray_context_status", context.pointer, ctypes.byref(out))
    return json.loads(dray._library.take(out))


def test_storm(seed, value):
    """Threads that call and close whatever they like: they are refused, or it is done."""
    draw = random.Random(seed)
    for _ in range(3):
        context = Context(role="trainer", timeout=20)
        publisher = Publisher({"a": value}, "storm", context=context)
        subscriber = Subscriber({"a": np.zeros(4, np.float32)}, "storm", context=context)
        version = iter(range(1, 1 << 20))
        calls = [lambda: publisher.publish(next(version)), lambda: publisher.wait(timeout=0), publisher.moved,
                 lambda: publisher.deliver(timeout=0), lambda: subscriber.update(timeout=0.05),
                 lambda: subscriber.note_step(0.01), subscriber.fileno, subscriber.poll, lambda: subscriber.version,
                 lambda: context.member]
        ends = [publisher.close, subscriber.close, context.close]
        plans = [[draw.choice(calls) for _ in range(12)] for _ in range(3)]
        plans.append([draw.choice(calls + ends) for _ in range(8)] + [context.close])
        wrong = []

        def run(plan):
            for call in plan:
                try:
                    call()
                except (dray.DrayError, ValueError):  # ValueError: deliver before anything was published
                    pass
                except BaseException as error:
                    wrong.append(error)
        threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong, wrong
        context.close()
        refused(dray.DrayError, "is closed", publisher.moved)
        refused(dray.DrayError, "is closed", subscriber.verify)


def main():
    seed = int(os.environ.get("DRAY_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}", flush=True)
    value = np.arange(4, dtype=np.float32) + 1
    with coordinator():
        test_session(value)
        with Context(role="trainer", timeout=60) as context:
            for test in (test_publisher, test_subscriber, test_signal, test_cancelled):
                test(context, value)
        test_storm(seed, value)


main()
assert "torch" not in sys.modules
