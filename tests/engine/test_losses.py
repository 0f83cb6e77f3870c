"""The losses on log-probs alone: their values and their derivatives by log-prob and entropy are those of
PyTorch's autograd in float64, for random batches of mixed versions under every combination of options.
And so is the value model's loss, by value."""

import itertools

from engine import *

TOLERANCE = 1e-6  # relative


def off(found, expected):
    """The largest difference, relative to the largest value."""
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def as_read(values):
    """What a float32 column keeps of these numbers."""
    return torch.tensor(values, dtype=torch.float32).double().tolist()


def compare(batches):
    """batches: with the log-probs and entropies that their responses have."""
    cases, expected = [], []
    for batch, logprobs, entropies in batches:
        for key in ("advantages", "old", "ref", "behaviour"):
            if key in batch:
                batch[key] = as_read(batch[key])
        logprobs.requires_grad_(), entropies.requires_grad_()
        loss, divisor, _ = policy_loss(batch, logprobs, entropies)
        expected.append((loss.item(), divisor, *torch.autograd.grad(loss, (logprobs, entropies))))
        cases.append({"batch": batch, "logprobs": logprobs.tolist(),
                      "entropies": entropies.tolist()})
    for case, found, (loss, divisor, by_logprob, by_entropy) in zip(
            cases, call({"do": "loss", "cases": cases})["answers"], expected):
        options = {k: v for k, v in case["batch"].items() if not isinstance(v, list)}
        what = f"seed {SEED}: {options}"
        assert found["divisor"] == divisor, (what, found["divisor"], divisor)
        assert abs(found["loss"] - loss) <= TOLERANCE * abs(loss), (what, found["loss"], loss)
        assert off(found["by_logprob"], by_logprob) < TOLERANCE, what
        assert off(found["by_entropy"], by_entropy) < TOLERANCE, what


def random_case(rows, **changes):
    prompts, responses = random_rows(rows, response=(0, 9))
    responses[0] = random_tokens(3)
    count = sum(map(len, responses))
    logprobs = -3 * torch.rand(count, dtype=torch.float64)
    batch = random_policy(prompts, responses, logprobs, **changes)
    batch["masked"][0], batch["mask"][:3] = False, [1, 0, 1]
    if batch.get("token_advantages"):
        batch["advantages"] = torch.randn(count).tolist()
    return batch, logprobs, 5 * torch.rand(count, dtype=torch.float64)


def every_combination_is_autograds():
    choices = itertools.product((False, True), (0, 0.8, 1.5), range(3), (0, 1.2), (False, True))
    compare([random_case(rng.randint(2, 12), decoupled=decoupled, truncate=truncate,
                         aggregate=aggregate, dual_clip=dual_clip, token_advantages=per_token)
             for decoupled, truncate, aggregate, dual_clip, per_token in choices
             for _ in range(4 * SCALE)])


def absent_columns_are_the_present_policy():
    cases = []
    for absent in (["old"], ["ref"], ["behaviour"], ["old", "ref", "behaviour"]):
        case = random_case(6, truncate=0, decoupled="behaviour" not in absent)
        for key in absent:
            del case[0][key]
        cases.append(case)
    compare(cases)


def masked_rows_alone_are_nothing():
    batch, logprobs, entropies = random_case(4)
    batch["masked"] = [True] * 4
    cases = [{"batch": dict(batch, aggregate=how), "logprobs": logprobs.tolist(),
              "entropies": entropies.tolist()} for how in range(3)]
    for found, divisor in zip(call({"do": "loss", "cases": cases})["answers"], (0, 0, 44)):
        assert found["loss"] == 0 and found["tokens"] == 0 and found["divisor"] == divisor, found
        assert not any(found["by_logprob"]) and not any(found["by_entropy"]), found


def value_losses_are_autograds():
    cases, expected = [], []
    for clip, aggregate in itertools.product((0, 0.1, 0.4), range(3)):
        for _ in range(8 * SCALE):
            prompts, responses = random_rows(rng.randint(2, 12), response=(0, 9))
            responses[0] = random_tokens(3)
            values = torch.randn(sum(map(len, responses)), dtype=torch.float64).requires_grad_()
            batch = random_values(prompts, responses, values.detach(), clip=clip,
                                  aggregate=aggregate)
            batch["masked"][0], batch["mask"][:3] = False, [1, 0, 1]
            for key in ("values", "returns"):
                batch[key] = as_read(batch[key])
            loss, divisor, clipped = value_loss(batch, values)
            expected.append((loss.item(), divisor, clipped, *torch.autograd.grad(loss, values)))
            cases.append({"batch": batch, "now": values.tolist()})
    answers = call({"do": "value_loss", "cases": cases})["answers"]
    assert any(clipped for _, _, clipped, _ in expected)
    for case, found, (loss, divisor, clipped, slopes) in zip(cases, answers, expected):
        what = f"seed {SEED}: {case['batch']['clip']} {case['batch']['aggregate']}"
        assert found["divisor"] == divisor and found["clipped"] == clipped, (what, found)
        assert abs(found["loss"] - loss) <= TOLERANCE * abs(loss), (what, found["loss"], loss)
        assert off(found["slopes"], slopes) < TOLERANCE, what


main([every_combination_is_autograds, absent_columns_are_the_present_policy,
      masked_rows_alone_are_nothing, value_losses_are_autograds])
