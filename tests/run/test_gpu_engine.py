"""The engine of examples/gpu: greedy tokens are those of transformers' generate, and log-probs those of one forward pass,
whoever shares the batch; also of responses that are cut and go on, and whose caches are computed anew or kept."""
import copy
import os
import sys

from begin import needs, rng

with needs:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, os.environ["DRAY_SOURCE_DIR"] + "/examples/gpu")
from engine import Engine, Request

torch.set_num_threads(1)
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5)
END = 5


def requests(count):
    return [Request([rng.randrange(97) for _ in range(rng.randrange(1, 12))], rng.randrange(1, 30),
                    temperature=0.7 if i % 2 else 0.0) for i in range(count)]


def run(engine, todo):
    """All of them through the engine, which is disturbed now and then. The same weights have many versions here."""
    done, step = [], 0
    while todo or engine.under_way:
        while todo and engine.free:
            engine.add(todo.pop(0))
        done += engine.step()
        step += 1
        if step % 7 == 0:
            engine.changed(step, keep=step % 2 == 0)
        if step == 20:
            engine.forget()
        if step in (25, 26, 40):
            todo = engine.cut() + todo
    return done


@torch.no_grad()
def check(model, request):
    behind = len(request.prompt)
    if request.temperature == 0:
        prompt = torch.tensor([request.prompt])
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.most, do_sample=False,
                              eos_token_id=END, pad_token_id=0)[0, behind:].tolist()
        assert made == request.tokens, f"{made} expected, found {request.tokens}"
    logits = model(torch.tensor([request.prompt + request.tokens])).logits[0, behind - 1:-1]
    wanted = (logits / (request.temperature or 1)).log_softmax(-1)
    gap = max(abs(float(wanted[i, token]) - said) for i, (token, said) in enumerate(zip(request.tokens, request.log_probs)))
    assert gap < 1e-4, f"log-probs differ by {gap}"
    assert len(request.versions) == len(request.tokens) and request.versions == sorted(request.versions)
    assert request.ended == (request.tokens[-1] == END) and (request.ended or len(request.tokens) == request.most)


def refused(words, what):
    try:
        what()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"{words}: nothing was refused")


torch.manual_seed(rng.randrange(1 << 30))
for attention in ("eager", "sdpa"):
    for configuration, kind in ((Qwen2Config, Qwen2ForCausalLM), (LlamaConfig, LlamaForCausalLM)):
        config = configuration(**SIZES)
        config._attn_implementation = attention
        model = kind(config).eval()
        engine = Engine(copy.deepcopy(model), 4, 60, end=END, seed=rng.randrange(1 << 30), prefill=60)
        engine.changed(0)
        done = run(engine, requests(20))
        assert len(done) == 20
        for request in done:
            check(model, request)

# Lengths that are forced, pieces, and versions that are asked for.
engine.changed(3)
forced, piece = Request([1], 9, forced=True), Request([2], 9, forced=True, stop=4)
engine.add(forced)
engine.add(piece)
left = [request for _ in range(9) for request in engine.step()]
assert left == [piece, forced] and len(piece.tokens) == 4 and not piece.done and len(forced.tokens) == 9
refused(["version 2 expected", "has 3"], lambda: engine.add(Request([1], 1, exactly=2)))
refused(["version 4 or a newer one", "has 3"], lambda: engine.add(Request([1], 1, at_least=4)))
refused(["at most 60 tokens", "1 of the prompt and 60"], lambda: engine.add(Request([1], 60)))
engine.add(Request([1], 3, exactly=3, forced=True))
refused(["version 3 expected", "has 4"], lambda: engine.changed(4))
