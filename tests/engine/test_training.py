"""The trainer's gradients and steps are those of PyTorch's autograd and torch.optim.AdamW on the same
transformers model, for any number of ranks and any cutting into micro-batches; those of a value model
as well."""

import copy
import tempfile

from engine import *

# With a huge epsilon, AdamW's first step is -learning_rate · gradient / epsilon, so that parameters
# show the gradient; times 1e4, so that what they were before takes no digits of it.
SHOW = {"epsilon": 1e10}
SHOWN = 1e4
SHOW_RATE = SHOWN * SHOW["epsilon"]


def parameters(folder):
    return {name: value for name, value in load_dir(folder).items()}


def load_dir(folder):
    return load_file(f"{folder}/model.safetensors")


def policy_batch(model, rows, **changes):
    prompts, responses = random_rows(rows, response=(1, 7))
    responses[rng.randrange(rows)] = []
    with torch.no_grad():
        logprobs, _ = response_logprobs(model, prompts, responses, 0.9)
    return random_policy(prompts, responses, logprobs, **{"temperature": 0.9, **changes})


def value_batch(model, rows, **changes):
    prompts, responses = random_rows(rows, response=(1, 7))
    responses[rng.randrange(rows)] = []
    with torch.no_grad():
        values = response_values(model, prompts, responses)
    return random_values(prompts, responses, values, **changes)


def loss_of(model, batch):
    """The loss, and what the statistics should say."""
    if batch["loss"] == "value":
        loss, divisor, clipped = value_loss(
            batch, response_values(model, batch["prompts"], batch["responses"]))
        counts = aggregated({**batch, "aggregate": 0}, torch.zeros(len(batch["values"])))[1]
        return loss / max(divisor, 1), {"clip_fraction": clipped / max(counts, 1)}
    logprobs, entropies = response_logprobs(model, batch["prompts"], batch["responses"],
                                            batch.get("temperature", 1.0))
    if batch["loss"] == "sft":
        made = torch.tensor(batch["mask"]).bool()
        return -logprobs[made].mean(), {"entropy": entropies[made].mean().item()}
    loss, divisor, stats = policy_loss(batch, logprobs, entropies)
    return loss / max(divisor, 1), stats


def gradients_of(model, batch):
    model.zero_grad()
    loss, stats = loss_of(model, batch)
    loss.backward()
    return loss.item(), stats, {n: p.grad.clone() for n, p in model.named_parameters()}


def step_request(folder, batches, world, **step):
    return {"do": "train", "model": f"{folder}/start", "ranks": world, "options": SHOW,
            "steps": [{"lr": SHOW_RATE, "batches": batches, **step}], "out": f"{folder}/out"}


def shown_gradients(folder, batches, world, **step):
    answer = call(step_request(folder, batches, world, **step))["steps"][0]
    before, after = parameters(f"{folder}/start"), parameters(f"{folder}/out")
    return answer, {n: (before[n].double() - after[n].double()) / SHOWN for n in before}


def expect_gradients(what, found, expected, tolerance):
    """The largest difference of any element; relative where the largest element is more than 1."""
    most = lambda gradients: max(g.abs().max().item() for g in gradients)
    assert found.keys() == expected.keys(), what
    off = most(found[n] - expected[n] for n in expected) / max(1, most(expected.values()))
    assert off < tolerance, f"seed {SEED}: {what}: {off} of the gradient, allowed {tolerance}"


def compare_gradients(what, model, folder, batch):
    exact = copy.deepcopy(model).double()
    loss, stats, expected = gradients_of(exact, batch)
    norm = sum((g ** 2).sum() for g in expected.values()).sqrt().item()
    for world in (0, 2):
        answer, found = shown_gradients(folder, [batch], world)
        what = f"{what} {batch['loss']} {world} ranks"
        assert abs(answer["loss"] - loss) < 1e-6 * (1 + abs(loss)), (what, answer, loss)
        for key, value in stats.items():
            assert abs(answer[key] - value) < 1e-5 * (1 + abs(value)), (what, key)
        assert abs(answer["norm"] - norm) < 5e-6 * norm, (what, answer["norm"], norm)
        # float32 through the network: PyTorch's own is as far from its float64
        expect_gradients(what, found, expected, 1e-5)


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
                *(policy_batch(model, 12, aggregate=how) for how in range(3)),
                {key: sft[key] for key in ("prompts", "responses")} |
                {"loss": "policy", "token_advantages": True, "advantages": token_advantages},
            ]
            for batch in batches:
                compare_gradients(f"{family} {changes}", model, folder, batch)


def value_gradients_are_autograds():
    for family, changes in (("llama", {}), ("qwen2", dict(tie_word_embeddings=True)), ("qwen3", {})):
        with tempfile.TemporaryDirectory() as folder:
            model = save(make_model(family, value=True, **changes), f"{folder}/start")
            for how, clip in ((0, 0), (1, 0.2), (2, 0.1)):
                batch = value_batch(model, 12, aggregate=how, clip=clip)
                compare_gradients(f"{family} {changes}", model, folder, batch)
            for world in (0, 2):
                found = call({"do": "values", "model": f"{folder}/start", "ranks": world,
                              "prompts": batch["prompts"], "responses": batch["responses"]})
                with torch.no_grad():
                    expect_close(f"{family} values", found["values"],
                                 response_values(model, batch["prompts"], batch["responses"]), 1e-5)


def a_value_model_begins_with_the_trunk():
    """Its head is zero, and so are its values; what it becomes, transformers loads."""
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen2", tie_word_embeddings=True), f"{folder}/start")
        prompts, responses = random_rows(6, response=(1, 7))
        rows = {"prompts": prompts, "responses": responses}
        count = sum(map(len, responses))
        found = call({"do": "values", "trunk": f"{folder}/start", "ranks": 2, **rows})
        assert found["values"] == [0.0] * count, found
        batch = {"loss": "value", **rows, "returns": [1.0] * count, "clip": 0}
        request = {"do": "train", "trunk": f"{folder}/start", "out": f"{folder}/out"}
        for world, steps in ((2, 0), (2, 3), (3, 3)):
            call({**request, "ranks": world, "steps": [{"lr": 1e-2, "batches": [batch]}] * steps})
            after = load(f"{folder}/out")
            trunk = all(torch.equal(value, dict(after.named_parameters())[name])
                        for name, value in model.named_parameters())
            assert trunk == (steps == 0), f"seed {SEED}: {steps}"
            with torch.no_grad():
                theirs = response_values(after, prompts, responses)
            found = call({"do": "values", "model": f"{folder}/out", "ranks": 2, **rows})
            expect_close("values of what was saved", found["values"], theirs, 1e-5)
            assert (theirs.mean().item() > 0.01) == (steps > 0), f"seed {SEED}: {theirs}"


def a_head_of_the_other_kind_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        policy = save(make_model("llama"), f"{folder}/policy")
        value = save(make_model("llama", value=True), f"{folder}/start")
        for request, word in (
                (step_request(folder, [policy_batch(policy, 4)], 2), "expected a language model"),
                ({**step_request(folder, [value_batch(value, 4)], 2), "model": f"{folder}/policy"},
                 "expected a value model"),
                (step_request(folder, [value_batch(value, 4, returns=None)], 0), "no returns"),
                (step_request(folder, [value_batch(value, 4, clip=-1.0)], 0), "clip"),
                ({"do": "next", "model": f"{folder}/start", "tokens": [1], "vocabulary": 2}, "value model")):
            found = call(request, fails=True)
            assert word in found["message"], (word, found)


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
            gradients_of(model, batch)
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
        for key in ("prompts", "responses", "advantages", "masked"):
            piece[key] = batch[key][row:row + size]
        for key in ("old", "ref", "behaviour", "mask"):
            piece[key] = batch[key][first:first + count]
        yield piece
        row += size


def neither_ranks_nor_micro_batches_matter():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen3"), f"{folder}/start")
        for how in range(3):
            batch = policy_batch(model, 120, aggregate=how)
            _, whole = shown_gradients(folder, [batch], 0)
            for sizes, world in (([120], 2), ([120], 3), ([30] * 4, 0), ([1, 60, 2, 57], 2),
                                 ([1] * 120, 0), ([1] * 120, 3)):
                answer, found = shown_gradients(folder, list(cut(batch, sizes)), world)
                what = f"{AGGREGATES[how]}, {sizes[:4]}, {world} ranks"
                expect_gradients(what, found, whole, 1e-6)


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
        every_token = {"masked": [False] * 4, "mask": [1] * len(batch["old"]), # none is clipped
                       "old": None, "decoupled": False, "truncate": 0}
        for change, word in (({"prompts": [[]] * 4}, "empty"),
                             ({"prompts": [[259]] * 4}, "vocabulary"),
                             ({"prompts": [[1] * 128] * 4}, "positions"),
                             ({"advantages": None}, "advantages"),
                             ({"temperature": -1.0}, "temperature"),
                             ({"dual_clip": 1.0}, "dual clip"), ({"truncate": -1.0}, "truncated"),
                             ({"behaviour": None, "decoupled": True}, "behaviour"),
                             ({"behaviour": None, "truncate": 2.0, "decoupled": False}, "behaviour"),
                             ({"aggregate": 2, "length": 0}, "constant length"),
                             (every_token | {"advantages": [1e39] * 4}, "gradient norm")):
            found = call(step_request(folder, [dict(batch, **change)], 2), fails=True)
            assert found["error"] == "EINVALID" and word in found["message"], (change, found)
        found = call(step_request(folder, [], 0), fails=True)
        assert "no response token" in found["message"], found


main([gradients_are_autograds, value_gradients_are_autograds, a_value_model_begins_with_the_trunk,
      a_head_of_the_other_kind_is_refused, steps_are_those_of_adamw, neither_ranks_nor_micro_batches_matter,
      a_resumed_run_is_bit_identical, bad_steps_are_refused_and_change_nothing])
