"""Coroutines: claims that wait while the event loop goes on, in turn; one that is cancelled loses no row; one whose
connection is replaced; updates and deliveries beside them. Tensors of batches: jagged, moved, pinned, as a TensorDict's."""
import asyncio
import os
import re
import socket
import tempfile
import time

from begin import needs

with needs:
    import numpy as np
    import torch
    from tensordict import TensorDict

from python_fixture import coordinator, dray, wrong


async def ticks(until):
    """How often the loop came round meanwhile."""
    count = 0
    while not until.done():
        count += 1
        await asyncio.sleep(0.01)
    return count


async def claims(queue):
    """Two coroutines wait, and the loop goes on; what the first is given is not what the second is."""
    waiting = [asyncio.ensure_future(queue.claim_async("read", 2, timeout=20)) for _ in range(2)]
    both = asyncio.gather(*waiting)
    turning = asyncio.ensure_future(ticks(both))
    await asyncio.sleep(0.3)
    assert not any(w.done() for w in waiting)
    queue.insert({"x": np.arange(4)}, "a", seal=True)  # another call between a claim's start and its answer
    first, second = await both
    assert await turning >= 10
    with first, second:
        assert sorted([*first["x"][0], *second["x"][0]]) == [0, 1, 2, 3]
    try:
        await queue.claim_async("read", 1, "nowhere", timeout=0.2)
        raise AssertionError("no such rows")
    except dray.DrayTimeout:
        pass


async def cancelled(queue):
    """Rows that a cancelled claim is given later come to the next one. It was no attempt, of which there is one."""
    waiting = asyncio.ensure_future(queue.claim_async("read", 2, timeout=20))
    await asyncio.sleep(0.1)
    waiting.cancel()
    try:
        await waiting
        raise AssertionError("was cancelled")
    except asyncio.CancelledError:
        pass
    queue.insert({"x": np.arange(2)}, "b", seal=True)
    with await queue.claim_async("read", 2, timeout=20) as batch:
        assert batch["x"][0].tolist() == [0, 1]


async def beside_another_thread(queue):
    """A claim that cannot look for its answer, as another thread is in a call, looks again; and the next claim can start."""
    def call():
        try:
            queue.wait("nowhere", timeout=1.5)
        except dray.DrayTimeout:
            pass

    waiting = asyncio.ensure_future(queue.claim_async("read", 2, timeout=20))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(call)  # longer than a claim waits before it looks by itself
    queue.insert({"x": np.arange(4)}, "c", seal=True)
    for first in (0, 2):
        with await waiting as batch:
            assert batch["x"][0].tolist() == [first, first + 1]
        waiting = queue.claim_async("read", 2, "c", timeout=20)
    waiting.close()


def cut(queue):
    """Ends the queue's connection. Returns the number of the descriptor that a claim waits at."""
    number = queue.fileno()
    with open(f"/proc/self/fdinfo/{number}") as watched:
        for fd in re.findall(r"tfd: +([0-9]+)", watched.read()):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
    return number


async def replaced(queue):
    """While a claim waits, another call replaces the connection, whose number a socket of somebody else gets: the loop
    tells that one of its bytes, also when the claim has ended."""
    waiting = asyncio.ensure_future(queue.claim_async("read", 2, timeout=20))
    await asyncio.sleep(0.1)
    number, pairs = cut(queue), []
    queue.status()
    while not pairs or number not in (pairs[-1][0].fileno(), pairs[-1][1].fileno()):
        assert len(pairs) < 64, number
        pairs.append(socket.socketpair())
    reader, writer = sorted(pairs[-1], key=lambda end: end.fileno() != number)
    reader.setblocking(False)
    for byte in b"a", b"b":
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(reader, 1))
        await asyncio.sleep(0.1)
        if byte == b"b":
            try:
                await waiting
                raise AssertionError("the claim's connection has ended")
            except dray.DrayError as error:
                assert error.name == "ECLOSED", error
        writer.send(byte)
        assert await asyncio.wait_for(reading, 10) == byte
    for end in (end for pair in pairs for end in pair):
        end.close()


async def weights():
    """An update that waits for its version, and a delivery that waits for the update, in one loop."""
    source, taken = torch.randn(64, 8), torch.zeros(64, 8)
    with dray.Publisher({"w": source}) as publisher, dray.Subscriber({"w": taken}) as subscriber:
        update = asyncio.ensure_future(subscriber.update_async(min_version=1))
        turning = asyncio.ensure_future(ticks(update))
        await asyncio.sleep(0.3)
        assert not update.done()
        publisher.publish(1)
        await publisher.deliver_async(1, "engine")
        report = await update
        assert report["version"] == 1 and torch.equal(source, taken) and await turning >= 10


def defaults():
    """Sessions of the process are shared, and come again when they were closed; ranks come in twos."""
    with dray.Publisher({"w": torch.ones(2)}, "other") as first, dray.Publisher({"w": torch.ones(2)}, "third") as second:
        assert first._context is second._context
        session = first._context
    session.close()
    with dray.Publisher({"w": torch.ones(2)}, "other") as again:
        assert again._context is not session
    wrong(TypeError, "context=", dray.Publisher, session)
    wrong(TypeError, "both", dray.Publisher, {"w": torch.ones(2)}, "m", 0)


def tensors(queue):
    """What torch's users expect of a batch, against the rows that were put."""
    seed = int(os.environ.get("DRAY_TEST_SEED", time.time_ns() % 2**32))
    print(f"DRAY_TEST_SEED={seed}", flush=True)
    torch.manual_seed(seed)
    rows = [torch.randn(n, 3).to(torch.bfloat16) for n in (2, 0, 5, 1)]
    score = torch.rand(4)
    queue.insert({"tokens": rows, "score": score, "text": ["a", "", "bcd", "e"]}, "c", seal=True)
    batch = queue.claim("look", 4, "c", framework="torch")
    assert torch.equal(batch["score"], score)
    jagged = batch["tokens"]
    assert jagged.is_nested and jagged.layout is torch.jagged and jagged.dtype is torch.bfloat16
    assert all(torch.equal(found, row) for found, row in zip(jagged.unbind(), rows))
    values, offsets = batch.ragged("tokens")
    assert torch.equal(values, torch.cat(rows)) and offsets.tolist() == [0, 2, 2, 7, 8]
    padded, lengths = batch.padded("tokens", value=-1)
    assert torch.equal(padded, jagged.to_padded_tensor(-1)) and lengths.tolist() == [2, 0, 5, 1]
    assert batch.list("text") == ["a", "", "bcd", "e"]
    moved = batch.to(torch.float64, columns=["tokens", "score", "text"])
    assert moved["tokens"].dtype is torch.float64 and moved["score"].dtype is torch.float64
    assert moved.list("text") == ["a", "", "bcd", "e"] and moved.slots.tolist() == batch.slots.tolist()
    dictionary = batch.to_tensordict(["tokens", "score", "text"])
    assert isinstance(dictionary, TensorDict) and dictionary.batch_size == (4,)
    assert sorted(dictionary.keys()) == ["score", "tokens"] and torch.equal(dictionary["score"], score)
    queue.insert({"tokens": dictionary["tokens"], "score": dictionary["score"], "text": ["f"] * 4}, "d", seal=True)
    with queue.claim("look", 4, "d", framework="torch") as back:
        assert all(torch.equal(found, row) for found, row in zip(back["tokens"].unbind(), rows))
    batch.commit()
    batch.free()
    assert torch.equal(moved["score"], score.double())  # stays, although the rows were let go of
    with queue.claim("again", 4, "c") as plain:
        wrong(ValueError, "torch", plain.to, "cpu")
        wrong(ValueError, "torch", plain.to_tensordict)


with tempfile.TemporaryDirectory() as journals, coordinator("--journal", journals):
    with dray.Queue("async", tasks={"read": (["x"], [])}, max_attempts=1) as one:
        asyncio.run(claims(one))
        asyncio.run(cancelled(one))
        asyncio.run(beside_another_thread(one))
    with dray.Queue("kept", tasks={"read": (["x"], [])}, durability="journal") as kept:
        asyncio.run(replaced(kept))
    asyncio.run(weights())
    defaults()
    with dray.Queue("tensors", tasks={"look": (["tokens", "score", "text"], []), "again": (["score"], [])}) as two:
        tensors(two)
print("ok")
