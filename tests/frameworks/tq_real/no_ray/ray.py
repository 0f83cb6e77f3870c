"""What TransferQueue's tests ask of Ray, without Ray: the controller that they look into is made of what dray.Queue says,
and a remote function runs in a process of its own."""
import marshal
import pickle
import subprocess
import sys
import types

import dray

_started = False


def init(*_, **__):
    global _started
    _started = True


def is_initialized():
    return _started


def shutdown():
    global _started
    _started = False


def get(what, timeout=None):
    return what()


class _Partition:
    """As the tests look at it."""

    def __init__(self, partition):
        from dray.compat.transfer_queue.client import tag_of
        with dray.Queue("transfer_queue") as queue, queue.get(partition, partial=True) as batch:
            self.global_indexes = batch.at["id"].tolist()
            self.keys_mapping = {key: index for key, index in zip(batch.row_keys, self.global_indexes) if key}
            self.custom_meta = {index: tag_of(tag) for index, tag in zip(self.global_indexes, batch.tags)}
            self.field_name_mapping = {name: number for number, name in enumerate(batch.columns)}
            self.production_status = {(index, number): int(batch.cell(name, row) is not None)
                                      for name, number in self.field_name_mapping.items()
                                      for row, index in enumerate(self.global_indexes)}


class _Method:
    def __init__(self, call):
        self._call = call

    def remote(self, *arguments):
        return lambda: self._call(*arguments)


class _Controller:
    @staticmethod
    def _client():
        import transfer_queue
        return transfer_queue.get_client()

    list_partitions = _Method(lambda: _Controller._client().get_partition_list())
    clear_partition = _Method(lambda partition: _Controller._client().clear_partition(partition))
    get_partition_snapshot = _Method(_Partition)


def get_actor(name, namespace=None):
    if name != "TransferQueueController":
        raise ValueError(f"no actor {name}")
    return _Controller


_CHILD = """
import marshal, pickle, sys, types
import dray.compat.transfer_queue as shim
shim.install()
code, arguments = pickle.load(sys.stdin.buffer)
found = types.FunctionType(marshal.loads(code), {"__builtins__": __builtins__})(**arguments)
sys.stdout.buffer.write(pickle.dumps(found))
"""


def remote(function):
    def start(**arguments):
        def wait():
            done = subprocess.run([sys.executable, "-c", _CHILD], input=pickle.dumps((marshal.dumps(function.__code__), arguments)),
                                  stdout=subprocess.PIPE, timeout=120, check=True)
            return pickle.loads(done.stdout)
        return wait
    return types.SimpleNamespace(remote=start)
