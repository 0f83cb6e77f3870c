"""A small engine with continuous batching for transformers' causal models: requests take slots of a static KV cache, each
step gives every one of them a token, and whoever is finished leaves its slot to the next. Each token has its log-prob and
the version of the weights that made it. On a GPU a step of decoding is a CUDA graph."""
import contextlib
import inspect
from dataclasses import dataclass, field
from typing import Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GRAPH = 128  # positions: caches are read up to a multiple of this, so that there are few graphs


@dataclass
class Request:
    """most: tokens of the response. stop: that it has when it leaves the engine for now. temperature 0: greedy.
    forced: exactly `most` tokens, whatever they are. at_least, exactly: the versions of the weights that may make it.
    tokens, log_probs, versions: of the response so far; it goes on behind what is there."""
    prompt: list
    most: int
    temperature: float = 1.0
    stop: Optional[int] = None
    forced: bool = False
    at_least: Optional[int] = None
    exactly: Optional[int] = None
    tokens: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    ended: bool = False  # by its last token

    @property
    def done(self):
        return self.ended or len(self.tokens) >= self.most

    def check(self, version):
        if self.exactly is not None and version != self.exactly or version < (self.at_least or 0):
            wanted = f"{self.exactly}" if self.exactly is not None else f"{self.at_least} or a newer one"
            raise ValueError(f"request: version {wanted} expected, the engine has {version}")


def attend(module, query, key, value, mask, scaling=None, **more):
    """Attention of one new token a row, to keys and values that are not repeated for each query head of their group: transformers'
    own copies them, which takes longer than all else of a step. Anything else is transformers' own."""
    rows, heads, new, size = query.shape
    if new != 1 or more.get("dropout") or more.get("softcap") or more.get("s_aux") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **more)
    grouped = query.reshape(rows, key.shape[1], -1, size)
    scores = (grouped @ key.transpose(2, 3)).float() * (size ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores + mask
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.reshape(rows, 1, heads, size), None


AttentionInterface.register("grouped", attend)
AttentionMaskInterface.register("grouped", sdpa_mask)


class SlotCache:
    """Keys and values, (slots, heads, positions, size) a layer, as transformers' attention asks for them. The position
    behind the last one takes what padding writes."""

    def __init__(self, model, slots, room):
        config, parameter = model.config.get_text_config(), next(model.parameters())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots, heads, room + 1, size)
        self.held = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        self.rows = self.at = self.read = None

    def within(self, rows, at, read):
        """Of the next forward: its rows are these slots, its tokens are at these positions, and the attention reads so
        many positions (None: what the forward itself brings)."""
        self.rows, self.at, self.read = rows, at, read
        return self

    def update(self, keys, values, layer, *_, **__):
        made = []
        for held, new in zip(self.held[layer], (keys, values)):
            held[self.rows, :, self.at] = new.transpose(1, 2)
            made.append(new if self.read is None else held[:new.shape[0], :, :self.read])
        return made

    def get_seq_length(self, *_):
        return 0


class Engine:
    """version: of the weights, to be set by whoever changes them (changed()). room: positions of a slot."""

    def __init__(self, model, slots, room, end=None, seed=0, graphs=None, prefill=16384, memory=contextlib.nullcontext):
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("grouped")
        self.model, self.slots, self.room, self.end, self.version = model, [None] * slots, room, end, -1
        self.device = next(model.parameters()).device
        self.prefill = prefill  # tokens at once
        self._memory = memory   # what the caches are made within
        self._fresh = []        # slots whose cache is to be computed
        self._graphs = {} if (self.device.type == "cuda" if graphs is None else graphs) else None
        self._side = self._pool = None  # what graphs are captured with: a stream, and memory that all of them use
        self._random = torch.Generator(self.device).manual_seed(seed)
        self._name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._tokens = torch.zeros(slots, 1, dtype=torch.long, device=self.device)
        self._at = torch.zeros(slots, 1, dtype=torch.long, device=self.device)
        self._cache = None

    # ---- requests

    @property
    def under_way(self):
        return [request for request in self.slots if request]

    @property
    def free(self):
        return self.slots.count(None)

    def add(self, request):
        request.check(self.version)
        if len(request.prompt) + request.most > self.room:
            raise ValueError(f"request: at most {self.room} tokens expected, found {len(request.prompt)} of the prompt and "
                             f"{request.most} of the response")
        slot = self.slots.index(None)
        self.slots[slot] = request
        self._fresh.append(slot)

    def changed(self, version, keep=False):
        """The weights are another version's, between two steps. keep: requests go on with the caches that they have; else
        those are computed anew, of the prompt and what there is of the response."""
        self.version = version
        for request in self.under_way:
            request.check(version)
        if not keep:
            self._fresh = [i for i, request in enumerate(self.slots) if request]

    def cut(self):
        """Those under way leave, as far as they are."""
        found, self.slots, self._fresh = self.under_way, [None] * len(self.slots), []
        return found

    def forget(self):
        """The caches' memory was given back meanwhile: all is computed anew."""
        if self._cache is not None:
            self._cache.held.zero_()
        self._fresh = [i for i, request in enumerate(self.slots) if request]

    # ---- steps

    @torch.no_grad()
    def step(self):
        """A token for each request; those that are through with it leave, and are returned."""
        if self._cache is None:
            with self._memory():
                self._cache = SlotCache(self.model, len(self.slots), self.room)
        old = [i for i, request in enumerate(self.slots) if request and i not in self._fresh]
        while self._fresh:
            self._take(*self._begin())
        if old:
            self._take(old, self._go_on(old))
        left = [(i, request) for i, request in enumerate(self.slots)
                if request and (request.done or len(request.tokens) >= (request.stop or request.most))]
        for i, _ in left:
            self.slots[i] = None
        return [request for _, request in left]

    def _forward(self, tokens, at, mask, cache):
        mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
            ~mask, torch.finfo(self.model.dtype).min)
        return self.model(input_ids=tokens, position_ids=at, attention_mask=mask, use_cache=True, logits_to_keep=1,
                          **{self._name: cache}).logits[:, -1]

    def _begin(self):
        """The slots whose caches are computed at once, and the logits behind them."""
        slots, longest = [], 0
        while self._fresh:
            request = self.slots[self._fresh[0]]
            size = max(longest, len(request.prompt) + len(request.tokens))
            if slots and size * (len(slots) + 1) > self.prefill:
                break
            slots.append(self._fresh.pop(0))
            longest = size
        rows = [list(self.slots[i].prompt) + list(self.slots[i].tokens) for i in slots]
        pads = torch.tensor([longest - len(row) for row in rows], device=self.device)[:, None]
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.device)
        columns = torch.arange(longest, device=self.device)
        at = columns - pads
        mask = (columns[:, None] >= columns) & (columns >= pads)[:, None, :]
        where = torch.tensor(slots, device=self.device)[:, None]
        cache = self._cache.within(where, at.where(at >= 0, self.room), None)
        return slots, self._forward(tokens, at.clamp(min=0), mask[:, None], cache)

    def _go_on(self, slots):
        """Logits of the slots behind their last tokens."""
        rows, at = slots[-1] + 1, [0] * (slots[-1] + 1)
        tokens = list(at)
        for i in slots:
            request = self.slots[i]
            tokens[i], at[i] = request.tokens[-1], len(request.prompt) + len(request.tokens) - 1
        idle = set(range(rows)) - set(slots)
        at = [self.room if i in idle else place for i, place in enumerate(at)]  # what they write is read by nobody
        read = max(at[i] for i in slots) + 1
        if self._graphs is not None:
            rows, read = min(1 << (rows - 1).bit_length(), len(self.slots)), -(-read // GRAPH) * GRAPH
        read = min(read, self.room)
        at += [self.room] * (rows - len(at))
        self._tokens[:len(tokens), 0] = torch.tensor(tokens, device=self.device)
        self._at[:rows, 0] = torch.tensor(at, device=self.device)
        found = self._decode(rows, read) if self._graphs is None else self._replay(rows, read)
        return found[torch.tensor(slots, device=self.device)]

    def _decode(self, rows, read):
        at, where = self._at[:rows], torch.arange(rows, device=self.device)[:, None]
        mask = torch.arange(read, device=self.device) <= at
        return self._forward(self._tokens[:rows], at.clamp(max=self.room - 1), mask[:, None, None],
                             self._cache.within(where, at, read))

    def _replay(self, rows, read):
        if self._pool is None:  # torch caches memory by stream, so each graph would keep what its own stream used
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        if (rows, read) not in self._graphs:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._decode(rows, read)
            torch.cuda.current_stream().wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # Graphs run one after the other. A prefetch may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = self._decode(rows, read)
            self._graphs[rows, read] = graph, found
        graph, found = self._graphs[rows, read]
        graph.replay()
        return found

    def _take(self, slots, logits):
        """Draws a token for each slot: the one whose log-prob plus Gumbel noise is largest."""
        heat = torch.tensor([[self.slots[i].temperature] for i in slots], device=self.device)
        scores = (logits.float() / heat.where(heat > 0, 1.0)).log_softmax(-1)
        noise = torch.empty_like(scores).exponential_(generator=self._random).log_()
        chosen = (scores - noise.masked_fill_(heat == 0, 0)).argmax(-1, keepdim=True)
        both = torch.cat([chosen.double(), scores.gather(1, chosen).double()], 1).tolist()
        for i, (token, log_prob) in zip(slots, both):
            request = self.slots[i]
            request.tokens.append(int(token))
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            request.ended = not request.forced and int(token) == self.end
