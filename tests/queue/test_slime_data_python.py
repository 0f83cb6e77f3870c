"""slime's DataSource over a queue, against what slime 624b824 declares of it; with the repository in $DRAY_UPSTREAM/slime, with
slime's own Sample and DataSource: groups and their numbers, groups that are given back, checkpoints, and processes that die with prompts."""
import abc
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
import unittest.mock
from dataclasses import asdict, dataclass, field

try:
    import numpy  # noqa: F401
    import torch  # noqa: F401  (slime has it)
except ImportError as missing:
    print(missing)
    sys.exit(77)

UPSTREAM = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), "slime")
if UPSTREAM.is_dir():
    sys.path.insert(0, str(UPSTREAM))
    for package in ("sglang_router", "ray"):
        try:
            __import__(package)
        except ImportError:
            sys.modules[package] = types.ModuleType(package)
else:
    sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))

    @dataclass
    class Sample:
        prompt: object = ""
        label: object = None
        metadata: dict = field(default_factory=dict)
        group_index: object = None
        index: object = None
        response: str = ""

        def to_dict(self):
            return copy.deepcopy(asdict(self))

        @staticmethod
        def from_dict(data):
            return Sample(**data)

    class DataSource(abc.ABC):
        @abc.abstractmethod
        def get_samples(self, num_samples): ...
        @abc.abstractmethod
        def add_samples(self, samples): ...
        @abc.abstractmethod
        def save(self, rollout_id): ...
        @abc.abstractmethod
        def load(self, rollout_id=None): ...
        @abc.abstractmethod
        def __len__(self): ...

    for name, names in (("slime", {}), ("slime.rollout", {}), ("slime.utils", {}), ("slime.rollout.data_source", {"DataSource": DataSource}),
                        ("slime.utils.types", {"Sample": Sample})):
        sys.modules[name] = made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(names)

import dray  # noqa: E402
from dray.integrations import slime  # noqa: E402


def args(**more):
    return types.SimpleNamespace(n_samples_per_prompt=3, **more)


def prompts(groups):
    return [group[0].prompt for group in groups]


def refused(kind, words, what):
    try:
        what()
    except kind as failure:
        assert all(word in str(failure) for word in words), failure
        return
    raise AssertionError(f"not refused: {words}")


def dies(folder):
    """Takes two prompts, and dies with them."""
    print(prompts(slime.DataSource(args(save=folder)).get_samples(2)), flush=True)
    os.kill(os.getpid(), 9)


def wait(queue, count):
    """Until so many prompts may be claimed."""
    end = time.monotonic() + 60
    while (ready := queue.status()["partitions"][0]["tasks"]["rollout"]["ready"]) < count:
        assert time.monotonic() < end, f"{ready} prompts may be claimed, {count} expected"
        time.sleep(0.01)


def durable(folder):
    """What save() stores is on the disk, file and folders, before a prompt is done with; where the disk fails, none is."""
    os.environ["DRAY_QUEUE"], os.environ["DRAY_TASK"] = "durable", "rollout"
    with dray.Queue("durable", tasks={"rollout": (["prompt"], [])}) as queue:
        queue.insert({"prompt": ["p0", "p1"]}, "0")
        source = slime.DataSource(args(save=folder))
        source.add_samples(source.get_samples(2)[:1])
        made = pathlib.Path(folder, "rollout", "dray_data_source_11").resolve()
        with unittest.mock.patch("os.fsync", side_effect=OSError(5, "the disk failed")):
            refused(OSError, ["the disk failed"], lambda: source.save(11))
        assert not made.exists() and len(source._held) == 1

        synced, sync = [], os.fsync

        def noted(fd):
            synced.append((os.readlink(f"/proc/self/fd/{fd}"), made.exists()))
            sync(fd)

        def unanswered():
            assert synced == [(str(path), path != made.with_suffix(".new"))
                              for path in (made.with_suffix(".new"), made.parent, made.parents[1])], synced
            raise dray.DrayTimeout(-13, "no answer")

        with unittest.mock.patch("os.fsync", side_effect=noted), \
                unittest.mock.patch.object(source._held[0], "commit", side_effect=unanswered):
            refused(dray.DrayTimeout, ["no answer"], lambda: source.save(11))
        source._queue.close()


def failing(folder):
    """A commit or a claim that fails loses none of the others' prompts, and has none handed out twice."""
    os.environ["DRAY_QUEUE"], os.environ["DRAY_TASK"] = "failing", "rollout"
    with dray.Queue("failing", tasks={"rollout": (["prompt"], [])}) as queue:
        queue.insert({"prompt": ["p0", "p1", "p2"]}, "0")
        source = slime.DataSource(args(save=folder))
        handed = source.get_samples(1) + source.get_samples(1)
        with unittest.mock.patch.object(source._held[0], "commit", side_effect=dray.DrayTimeout(-13, "no answer")):
            refused(dray.DrayTimeout, ["no answer"], lambda: source.save(9))
        source.save(9)
        source.add_samples(handed[:1])
        with unittest.mock.patch.object(source._queue, "claim", side_effect=dray.DrayError(-16, "it is gone")):
            refused(dray.DrayError, ["it is gone"], lambda: source.get_samples(2))
        assert source.get_samples(1) == handed[:1]
        source._queue.close()
        wait(queue, 1)
        assert sorted(prompts(slime.DataSource(args()).get_samples(9)) + prompts(handed)) == ["p0", "p1", "p2"]
        assert queue.status()["partitions"][0]["tasks"]["rollout"]["ready"] == 0


def main(folder):
    queue = dray.Queue("samples", tasks={"rollout": (["prompt", "label", "metadata"], []), "other": (["label"], []),
                                         "chat": (["messages"], [])})
    queue.insert({"prompt": [f"p{i}" for i in range(8)], "label": [str(i) if i % 2 else "" for i in range(8)],
                  "metadata": [json.dumps({"i": i}) for i in range(8)]}, "0")

    # A process that dies gives its prompts back.
    died = subprocess.run([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True, timeout=120)
    assert died.returncode == -9 and died.stdout.strip() == "['p0', 'p1']", died

    wait(queue, 8)
    source = slime.DataSource(args(save=folder, load=folder))
    source.load(0)  # before the first checkpoint
    assert len(source) == 8
    groups = source.get_samples(3)
    handed = prompts(groups)
    assert len(set(handed)) == 3 and [len(group) for group in groups] == [3, 3, 3]
    assert [[s.group_index for s in g] for g in groups] == [[0] * 3, [1] * 3, [2] * 3]
    assert [s.index for g in groups for s in g] == list(range(9))
    for (first, *rest), i in zip(groups, (int(prompt[1:]) for prompt in handed)):
        assert first.label == (str(i) if i % 2 else None) and first.metadata == rest[1].metadata == {"i": i}
        first.metadata["x"] = 1
        assert rest[0].metadata == {"i": i}  # each has its own

    # What slime gives back comes first, is stored by save(), and what was handed out until then is done with.
    groups[1][0].response = "half"
    refused(ValueError, ["groups of 3", "one of 1"], lambda: source.add_samples([groups[0][:1]]))
    source.add_samples([groups[1], groups[2]])
    source.save(7)
    later = source.get_samples(3)
    assert prompts(later)[:2] == handed[1:] and later[0][0].response == "half" and later[2][0].group_index == 3
    source._queue.close()  # this one ends behind its checkpoint: the last is the queue's again, the first is not
    wait(queue, 5)

    again = slime.DataSource(args(save=folder, load=folder))
    again.load(7)
    found = again.get_samples(4)
    assert prompts(found)[:2] == handed[1:] and found[0][0].response == "half"
    assert [g[0].group_index for g in found] == [1, 2, 3, 4]
    rest = again.get_samples(9)  # as many as there are
    assert len(rest) == 3
    assert sorted(handed[:1] + prompts(found) + prompts(rest)) == [f"p{i}" for i in range(8)]
    pathlib.Path(folder, "rollout", "dray_data_source_8").write_bytes(b"x")
    refused(ValueError, ["dray.objects"], lambda: again.load(8))
    again._queue.close()

    # Without --save a prompt is done with when it is handed out. Chats are JSON. The queue's end is said.
    os.environ["DRAY_TASK"] = "chat"
    queue.insert({"messages": [json.dumps([{"role": "user", "content": "2+2="}])]}, "1", seal=True)
    chat = slime.DataSource(args())
    assert chat.get_samples(1)[0][0].prompt == [{"role": "user", "content": "2+2="}]
    with dray.Queue("numbers", tasks={"chat": (["prompt", "label"], [])}) as labels:
        labels.insert({"prompt": ["1-1=", "1+1="], "label": [0, 2]}, "0")
        os.environ["DRAY_QUEUE"] = "numbers"
        assert [group[0].label for group in slime.DataSource(args()).get_samples(2)] == [0, 2]
    with dray.Queue("over", tasks={"chat": (["messages"], [])}) as over:
        over.end()
        os.environ["DRAY_QUEUE"] = "over"
        refused(dray.DrayError, ["over"], lambda: slime.DataSource(args()).get_samples(1))
    failing(folder)
    durable(folder)
    os.environ["DRAY_QUEUE"] = "samples"
    os.environ["DRAY_TASK"] = "other"
    refused(ValueError, ["prompt or messages expected", "label"], lambda: slime.DataSource(args()).get_samples(1))
    os.environ["DRAY_TASK"] = "none"
    refused(ValueError, ["a task none expected", "rollout"], lambda: slime.DataSource(args()))


if len(sys.argv) > 1:
    dies(sys.argv[1])
with dray.serve(), tempfile.TemporaryDirectory() as folder:
    main(folder)
