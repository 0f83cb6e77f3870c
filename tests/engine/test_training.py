"""The trainer's gradients and steps are those of PyTorch's autograd and torch.optim.AdamW on the same
transformers model, for any number of ranks and any cutting into micro-batches."""

import tempfile

from engine import *

# With a huge epsilon, AdamW's first step is -learning_rate · gradient / epsilon: shows the gradient.
SHOW = {"epsilon": 1e10}
SHOW_RATE = 1e10


def parameters(folder):
    return {name: value for name, value in load_dir(folder).items()}


def load_dir(folder):
    return load_file(f"{folder}/model.safetensors")


def policy_batch(model, rows, **changes):
    """A batch off policy enough that the clipping works, with every term switched on."""
    prompts, responses = random_rows(rows, response=(1, 7))
    responses[rng.randrange(rows)] = []
    with torch.no_grad():
        logprobs, _ = response_logprobs(model, prompts, responses, 0.9)
    count = len(logprobs)
    noise = lambda size: size * torch.randn(count)
    batch = {"loss": "policy", "prompts": prompts, "responses": responses, "temperature": 0.9,
             "advantages": torch.randn(rows).tolist(),
             "old": (logprobs + noise(0.3)).tolist(), "ref": (logprobs + noise(0.5)).tolist(),
             "weights": torch.rand(count).tolist(), "clip_low": 0.15, "clip_high": 0.25,
             "kl": 0.3, "entropy": 0.2}
    batch.update(changes)
    return batch


def loss_of(model, batch):
    """The sum over response tokens that trainer.h states, and what the statistics should say."""
    logprobs, entropies = response_logprobs(model, batch["prompts"], batch["responses"],
                                            batch.get("temperature", 1.0))
    if batch["loss"] == "sft":
        return -logprobs.sum(), {"entropy": entropies.mean().item()}
    tensor = lambda key: torch.tensor(batch[key]) if key in batch else None
    lengths = torch.tensor([len(r) for r in batch["responses"]])
    advantages = tensor("advantages")
    if not batch.get("token_advantages"):
        advantages = advantages.repeat_interleave(lengths)
    old = tensor("old") if "old" in batch else logprobs.detach()
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - batch.get("clip_low", 0.2), 1 + batch.get("clip_high", 0.2))
    term = torch.minimum(ratio * advantages, bounded * advantages)
    loss = -(term * tensor("weights") if "weights" in batch else term).sum()
    stats = {"entropy": entropies.mean(), "ratio_mean": ratio.mean(), "ratio_max": ratio.max(),
             "clip_fraction": (bounded * advantages < ratio * advantages).float().mean()}
    if "ref" in batch:
        difference = tensor("ref") - logprobs
        k3 = difference.exp() - difference - 1
        loss = loss + batch["kl"] * k3.sum()
        stats["kl"] = k3.mean()
    loss = loss - batch.get("entropy", 0) * entropies.sum()
    return loss, {key: value.item() for key, value in stats.items()}


def gradients_of(model, batches):
    model.zero_grad()
    tokens = sum(len(r) for b in batches for r in b["responses"])
    loss, stats = loss_of(model, batches[0])
    (loss / tokens).backward()
    return loss.item() / tokens, stats, {n: p.grad.clone() for n, p in model.named_parameters()}


def step_request(folder, batches, world, **step):
    return {"do": "train", "model": f"{folder}/start", "ranks": world, "options": SHOW,
            "steps": [{"lr": SHOW_RATE, "batches": batches, **step}], "out": f"{folder}/out"}


def shown_gradients(folder, batches, world, **step):
    answer = call(step_request(folder, batches, world, **step))["steps"][0]
    before, after = parameters(f"{folder}/start"), parameters(f"{folder}/out")
    # zeros to start from would be exact; parameters of size 1 lose 6e-8 of a gradient
    return answer, {name: before[name] - after[name] for name in before}


def gradients_are_autograds():
    cases = [("llama", {}), ("qwen2", dict(tie_word_embeddings=True)), ("qwen3", {}),
             ("qwen3", dict(tie_word_embeddings=True, num_key_value_heads=6))]
    for family, changes in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = save(make_model(family, **changes), f"{folder}/start")
            sft = policy_batch(model, 12, loss="sft", temperature=1.0)
            token_advantages = torch.randn(sum(len(r) for r in sft["responses"])).tolist()
            batches = [
                sft,
                policy_batch(model, 12),
                {key: sft[key] for key in ("prompts", "responses")} |
                {"loss": "policy", "token_advantages": True, "advantages": token_advantages},
            ]
            for batch in batches:
                loss, stats, expected = gradients_of(model, [batch])
                size = max(g.abs().max().item() for g in expected.values())
                for world in (0, 2):
                    answer, found = shown_gradients(folder, [batch], world)
                    what = f"{family} {changes} {batch['loss']} {world} ranks"
                    assert abs(answer["loss"] - loss) < 1e-5 * (1 + abs(loss)), (what, answer, loss)
                    for key, value in stats.items():
                        assert abs(answer[key] - value) < 1e-4 * (1 + abs(value)), (what, key)
                    norm = sum((g ** 2).sum() for g in expected.values()).sqrt().item()
                    assert abs(answer["norm"] - norm) < 1e-4 * norm, (what, answer["norm"], norm)
                    for name, gradient in expected.items():
                        expect_close(f"{what} {name}", found[name], gradient, 2e-5 * (1 + size))


def steps_are_those_of_adamw():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen2", tie_word_embeddings=True), f"{folder}/start")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.8, 0.99), eps=1e-3,
                                      weight_decay=0.1)
        steps = []
        for i in range(4):
            batch = policy_batch(model, 16)
            rate = 1e-3 * (i + 1)
            steps.append({"lr": rate, "norm": 0.05, "batches": [batch]})
            gradients_of(model, [batch])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        for world in (0, 2, 3):
            call({"do": "train", "model": f"{folder}/start", "ranks": world, "steps": steps,
                  "options": {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-3, "weight_decay": 0.1},
                  "out": f"{folder}/out"})
            found = parameters(f"{folder}/out")
            for name, value in model.named_parameters():
                expect_close(f"{world} ranks {name}", found[name], value.detach(), 2e-6)


def cut(batch, sizes):
    """The batch as micro-batches of these numbers of rows."""
    lengths = [len(r) for r in batch["responses"]]
    row = 0
    for size in sizes:
        first, count = sum(lengths[:row]), sum(lengths[row:row + size])
        piece = dict(batch)
        for key in ("prompts", "responses", "advantages"):
            piece[key] = batch[key][row:row + size]
        for key in ("old", "ref", "weights"):
            piece[key] = batch[key][first:first + count]
        yield piece
        row += size


def neither_ranks_nor_micro_batches_matter():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen3"), f"{folder}/start")
        batch = policy_batch(model, 120)
        _, whole = shown_gradients(folder, [batch], 0)
        for sizes in ([120], [30] * 4, [1, 60, 2, 57], [1] * 120):
            for world in (0, 2, 3):
                answer, found = shown_gradients(folder, list(cut(batch, sizes)), world)
                for name, gradient in whole.items():
                    expect_close(f"{sizes[:4]}, {world} ranks, {name}", found[name], gradient, 1e-6)


def a_resumed_run_is_bit_identical():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen2", tie_word_embeddings=True), f"{folder}/start")
        steps = [{"lr": 1e-3, "norm": 1, "batches": [policy_batch(model, 10)]} for _ in range(4)]
        for world in (0, 2, 3):
            stopped = [steps[0], dict(steps[1], save=f"{folder}/state")]
            call({"do": "train", "model": f"{folder}/start", "ranks": world, "steps": steps,
                  "out": f"{folder}/whole"})
            call({"do": "train", "model": f"{folder}/start", "ranks": world, "steps": stopped})
            for again, tolerance in ((world, 0), (2 if world != 2 else 0, 1e-5)):
                answer = call({"do": "train", "model": f"{folder}/state", "restore": True,
                               "ranks": again, "steps": steps[2:], "out": f"{folder}/resumed"})
                assert [s["step"] for s in answer["steps"]] == [3, 4]
                whole, resumed = parameters(f"{folder}/whole"), parameters(f"{folder}/resumed")
                for name, value in whole.items():
                    if tolerance == 0:
                        assert torch.equal(value, resumed[name]), f"seed {SEED}: {world}: {name}"
                    else:
                        expect_close(name, resumed[name], value, tolerance)


def bad_steps_are_refused_and_change_nothing():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("llama"), f"{folder}/start")
        batch = policy_batch(model, 4)
        for change, word in (({"prompts": [[]] * 4}, "empty"),
                             ({"prompts": [[259]] * 4}, "vocabulary"),
                             ({"prompts": [[1] * 128] * 4}, "positions"),
                             ({"advantages": []}, "advantages"),
                             ({"temperature": -1.0}, "temperature"),
                             ({"advantages": [1e39] * 4}, "gradient norm")):
            found = call(step_request(folder, [dict(batch, **change)], 2), fails=True)
            assert found["error"] == "EINVALID" and word in found["message"], (change, found)
        found = call(step_request(folder, [], 0), fails=True)
        assert "no response token" in found["message"], found


main([gradients_are_autograds, steps_are_those_of_adamw, neither_ranks_nor_micro_batches_matter,
      a_resumed_run_is_bit_identical, bad_steps_are_refused_and_change_nothing])
