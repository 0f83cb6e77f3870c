"""An engine as a trainer that SGLang's protocol reaches: what its server does with a message, in this process, on a model that
fuses what SGLang fuses."""
import base64
import io
import pickle
import re
import types
from concurrent.futures import ThreadPoolExecutor

import torch
from dray.integrations import sglang


class Model(torch.nn.Module):
    """named: {name: tensor} of the checkpoint."""

    def __init__(self, named):
        super().__init__()
        self._places, sizes = {}, {}
        for name, tensor in named.items():
            fused = re.sub(r"[qkv]_proj", "qkv_proj", name)
            fused = re.sub(r"(gate|up)_proj", "gate_up_proj", fused)
            at = sizes.get(fused, 0)
            sizes[fused] = at + tensor.shape[0]
            self._places[name] = fused, at, tensor.shape
        for fused, rows in sizes.items():
            shape = next(s for f, _, s in self._places.values() if f == fused)
            self.register_parameter(fused.replace(".", "/"), torch.nn.Parameter(torch.full((rows, *shape[1:]), 7.0), False))

    def load_weights(self, named):
        for name, tensor in named:
            fused, at, shape = self._places[name]
            getattr(self, fused.replace(".", "/")).data[at:at + shape[0]].copy_(tensor)

    def differs(self, named):
        """The names that are not equal."""
        return [name for name, tensor in named.items() for fused, at, shape in [self._places[name]]
                if not torch.equal(getattr(self, fused.replace(".", "/"))[at:at + shape[0]], tensor)]


class Engine:
    """Its methods as an actor's of Ray (engine.flush_cache.remote() gives a future), or called by themselves. calls: their
    names. fails: what an update is answered with instead."""

    def __init__(self, named):
        self.model, self.calls, self.fails, self._pool = Model(named), [], None, ThreadPoolExecutor(1)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(**given):
            self.calls.append(name)
            return self._update(**given) if name == "update_weights_from_tensor" else {"success": True}
        call.remote = lambda **given: self._pool.submit(call, **given)
        return types.SimpleNamespace(remote=call.remote, here=call)

    def _update(self, serialized_named_tensors, load_format, **_):
        if self.fails:
            return {"success": False, "message": self.fails}
        assert load_format == "dray.integrations.sglang.load"
        named = pickle.load(io.BytesIO(base64.b64decode(serialized_named_tensors[0])))
        try:
            sglang.load(self.model, named)
        except Exception as failure:
            return {"success": False, "message": f"{type(failure).__name__}: {failure}"}
        return {"success": True, "message": ""}
