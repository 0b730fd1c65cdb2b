"""Steps that are forecast from a text are those of decodes: by enumeration, and by the command on real pairs."""

from __future__ import annotations

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.errors import MarsError
from mars_jax.core.types import Params, keys_from_seeds
from mars_jax.lab.commands.benchmark import FORECAST, main, parse
from mars_jax.lab.evaluate import answers, forecast
from mars_jax.lab.evaluate.benchmark import forced, foretold, rehearsal
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from tests.cli.conftest import write_checkpoint
from tests.lab.evaluate.conftest import PROMPTS, dying_after

VOCAB, LENGTH = 3, 4
DTYPE = "float32"
"""In bfloat16 a draft's two best tokens are often equal but for rounding, which differs from program to program."""
LAW = np.random.default_rng(0)
P = {
    t: LAW.dirichlet(np.ones(VOCAB)) for n in range(LENGTH) for t in itertools.product(range(VOCAB), repeat=n)
}
Q = {
    t: LAW.dirichlet(np.ones(VOCAB)) for n in range(LENGTH) for t in itertools.product(range(VOCAB), repeat=n)
}


def by_token(text, depth):
    """Laws of a step: {tokens emitted: chance}, from the definition of speculative sampling (2211.17192)."""
    if depth == 0 or len(text) == LENGTH:
        return {(y,): p for y, p in enumerate(P[text])} if len(text) < LENGTH else {(): 1.0}
    p, q = P[text], Q[text]
    accept = np.minimum(1, p / q)
    rest = np.maximum(p - q, 0)
    found = {}
    for x in range(VOCAB):
        for more, chance in by_token((*text, x), depth - 1).items():
            found[(x, *more)] = found.get((x, *more), 0) + q[x] * accept[x] * chance
    refused = float(np.sum(q * (1 - accept)))
    # A token that is refused ends the step with one of the residual, marked so that it is no accepted one.
    for y in range(VOCAB):
        if rest[y] > 0:
            found[(y, "refused")] = refused * rest[y] / rest.sum()
    return found


def joint(step, depth, text=(), steps=0):
    """{(text, steps): chance} of texts of LENGTH tokens, which the limit cuts."""
    if len(text) == LENGTH:
        return {(text, steps): 1.0}
    found = {}
    for said, chance in step(text, depth).items():
        said = tuple(token for token in said if token != "refused")
        for end, more in joint(step, depth, (*text, *said)[:LENGTH], steps + 1).items():
            found[end] = found.get(end, 0) + chance * more
    return found


def by_block(text, depth):
    """The same of block verification (2403.10444), over all drafts."""
    depth = min(depth, LENGTH - len(text))
    found = {}
    for draft in itertools.product(range(VOCAB), repeat=depth):
        weights, chance = [1.0], 1.0
        for n, x in enumerate(draft):
            p, q = P[(*text, *draft[:n])][x], Q[(*text, *draft[:n])][x]
            weights.append(min(1.0, weights[-1] * p / q))
            chance *= q
        # tau is the last i whose uniform is below h_i, from the longest down.
        left = 1.0
        for n in range(depth, -1, -1):
            here = (*text, *draft[:n])
            if n == depth:
                h, after = weights[n], P.get(here)
            else:
                residual = np.maximum(weights[n] * P[here] - Q[here], 0)
                total = residual.sum()
                h = total / (total + 1 - weights[n]) if total > 0 else 0.0
                after = residual / total if total > 0 else None
            h = 1.0 if n == 0 else h
            if chance * left * h > 0:
                for y in [None] if after is None else range(VOCAB):
                    end = (*draft[:n], *([] if y is None else [y]), *(["refused"] if n < depth else []))
                    share = 1.0 if after is None or y is None else after[y]
                    found[end] = found.get(end, 0) + chance * left * h * share
            left *= 1 - h
    return found


def ratio_of(text, depth):
    """q / p of the text's tokens, f64[LENGTH, depth]; 0 after its end."""
    flat = [Q[text[:t]][text[t]] / P[text[:t]][text[t]] for t in range(LENGTH)] + [0.0] * depth
    return np.asarray([flat[t : t + depth] for t in range(LENGTH)])


@pytest.mark.parametrize(
    ("step", "accepts"),
    [(by_token, forecast.by_token), (by_block, forecast.by_block)],
    ids=["token", "block"],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_steps_given_a_text_are_those_of_the_joint_law(step, accepts, depth):
    law = joint(step, depth)
    assert sum(law.values()) == pytest.approx(1)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        given = {steps: chance for (said, steps), chance in law.items() if said == text}
        # The decode is lossless, so that the texts have the target's law.
        assert sum(given.values()) == pytest.approx(np.prod([P[text[:t]][text[t]] for t in range(LENGTH)]))
        expected = sum(steps * chance for steps, chance in given.items()) / sum(given.values())
        found = forecast.begun(accepts(ratio_of(text, 3)), [depth]).sum()
        assert found == pytest.approx(expected)


def test_a_walk_is_counted_by_hand():
    # Drafts agree at places 0, 1 and 3; a step takes them up to its length and one token more.
    agrees = [1.0, 1.0, 0.0, 1.0, 0.0]
    accept = np.asarray([(agrees + [0.0] * 3)[t : t + 3] for t in range(5)])
    begin = forecast.begun(accept, [0, 1, 2, 3])
    assert begin.T.tolist() == [[1] * 5, [1, 0, 1, 1, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 0]]
    everywhere = np.ones((5, 3), bool)
    # With one token the draft at place 2 is refused, and the one at place 4 only if a step begins there.
    assert forecast.refused(accept, begin, [0, 1, 2, 3], everywhere).tolist() == [0, 1, 1, 2]
    third = np.add.outer(np.arange(5), np.arange(3)) == 2
    assert forecast.refused(accept, begin, [0, 1, 2, 3], third).tolist() == [0, 1, 0, 1]


def test_ratios_have_intervals_over_problems():
    ratio, interval = forecast.ratio_of_sums(np.asarray([[8.0], [2.0]]), np.asarray([[4.0], [2.0]]))
    assert interval is not None
    assert ratio.tolist() == [10 / 6] and interval.tolist() == [[1.0, 2.0]]
    ratio, interval = forecast.ratio_of_sums(np.asarray([[8.0]]), np.asarray([[0.0]]))
    assert interval is None and not np.isfinite(ratio[0])


# Along the texts of real pairs.


def decoded(target, draft, prompts, temperature, new, *, rule=None, **shape):
    """Completions by a draft, or by the target alone; prompt i draws with seed i."""
    requests = make_requests(
        target, prompts, temperature=temperature, seed=list(range(len(prompts))), max_new_tokens=new
    )
    drafter = mj.drafters.load(draft, target, dtype=DTYPE, **shape)
    return Session.of(target, drafter, rule or mj.verify.exact(), batch_size=len(prompts)).run(requests)


def counted(target, draft, prompts, temperature, new, tree=()):
    """The forecast of every prompt, from the target's own texts."""
    alone = decoded(target, "none", prompts, temperature, new)
    texts = [
        forced.Text((*ids, *c.tokens), len(ids))
        for ids, c in zip(map(target.encode, prompts), alone, strict=True)
    ]
    read = forced.reader(draft, target, foretold.LENGTHS[-1], dtype=DTYPE)
    return foretold.count(read, target, [[text] for text in texts], temperature, tree)


def steps_of(found, rule, length):
    return [one.steps[rule][foretold.LENGTHS.index(length)] for one in found]


def test_steps_under_exact_are_those_of_a_decode(target):
    """A model that drafts for itself disagrees with what its target draws."""
    model, draft = mj.load(str(target)), f"model:{target}"
    found = counted(model, draft, PROMPTS, 0.7, 12)
    done = decoded(model, draft, PROMPTS, 0.7, 12, num_draft_tokens=3)
    assert steps_of(found, "exact", 3) == [c.metrics.steps for c in done]
    assert [one.tokens for one in found] == [c.metrics.emitted for c in done]
    # It is the distribution that its drafts are verified with, so that none of them is refused.
    whole = [-(-c.metrics.emitted // 4) for c in done]
    assert sum(steps_of(found, "exact", 3)) > sum(whole)
    assert steps_of(found, "rejection", 3) == pytest.approx(whole) == steps_of(found, "block", 3)


@pytest.mark.parametrize("draft", ["model", pytest.param("eagle:tiny/eagle3", marks=pytest.mark.slow)])
def test_steps_with_a_tree_are_those_of_a_decode(target, draft):
    target = "tiny/target" if ":" in draft else target
    draft = draft if ":" in draft else f"model:{target}"
    target = mj.load(str(target), dtype=DTYPE)
    found = counted(target, draft, PROMPTS, 0.7, 12, tree=(3, 2))
    done = decoded(target, draft, PROMPTS, 0.7, 12, tree=(3, 2))
    assert [one.tree.item() for one in found] == [c.metrics.steps for c in done]
    assert sum(one.tree.item() for one in found) < sum(steps_of(found, "exact", 2))


@pytest.mark.parametrize("draft", ["ngram", pytest.param("replay", marks=pytest.mark.slow)])
def test_steps_of_copies_are_those_of_a_decode(target, tmp_path, draft):
    model, corpus = mj.load(str(target)), tmp_path / "corpus.txt"
    if draft == "replay":
        corpus.write_text("".join(f"{c.text}\n" for c in decoded(model, "none", PROMPTS[:2], 0.7, 40)))
        draft = f"replay:{corpus}"
    found = counted(model, draft, PROMPTS, 0.7, 40)
    done = decoded(model, draft, PROMPTS, 0.7, 40, num_draft_tokens=3)
    assert steps_of(found, "exact", 3) == [c.metrics.steps for c in done]
    assert sum(steps_of(found, "exact", 3)) < sum(one.tokens for one in found)


def test_a_draft_of_another_tokenizer_is_read_as_it_drafts(target, tmp_path):
    path = write_checkpoint(tmp_path / "foreign", seed=1, corpus="numbers 0123456789", merges=9)
    model, draft = mj.load(str(target)), f"model:{path}"
    tokens = model.encode("a story of the sea and the sun, and the number 1234")
    text = forced.Text(tuple(tokens), 2)
    [read_along] = forced.reader(draft, model, 2)([text], 0.0)
    drafter, weights = mj.drafters.load(draft, model, num_draft_tokens=1)[:2]
    params, lengths = Params(target=(), draft=weights), jnp.arange(2, len(tokens), dtype=jnp.int32)
    rows = jnp.tile(jnp.asarray(tokens, jnp.int32), (text.new, 1))
    given = DraftInput(
        keys=keys_from_seeds(jnp.arange(text.new)),
        tokens=rows,
        length=lengths,
        controls=make_controls(text.new, limit=len(tokens)),
    )
    tree, _ = drafter.propose(params, drafter.init(params, rows, lengths), given)
    assert read_along.tokens[:, 0].tolist() == tree.tokens[:, 1].tolist()
    assert len({*tree.tokens[:, 1].tolist()}) > 5


@pytest.mark.slow
def test_refusals_are_those_that_the_rule_meets(target, monkeypatch):
    """`mars` itself says at every place how far it walks, strict and at theta = 0.9."""
    model, draft, length = mj.load(str(target)), f"model:{target}", 3
    found = counted(model, draft, PROMPTS, 0.7, 12)
    session = Session.of(
        model,
        mj.drafters.load(draft, model, num_draft_tokens=length),
        mj.verify.mars(theta=0.9),
        batch_size=4,
    )
    requests = make_requests(model, PROMPTS, temperature=0.7, seed=[0, 1, 2, 3], max_new_tokens=12)
    monkeypatch.setattr(rehearsal, "counts", lambda accepted: accepted)
    at, seen = foretold.LENGTHS.index(length), np.zeros(3)
    for one, request, completion, walked in zip(
        found,
        requests,
        decoded(model, "none", PROMPTS, 0.7, 12),
        rehearsal.walks(session, requests, [np.inf, 0.9], lambda count: None),
        strict=True,
    ):
        [scored] = mj.score(model, [[*request.prompt_tokens, *completion.tokens]])
        ratio = (scored.z2 / scored.z1)[len(request.prompt_tokens) - 1 :]
        met, place = np.zeros(3), 0
        while place < len(walked):
            strict, relaxed = walked[place]
            if strict < length and place + strict < len(walked):
                met += 1, ratio[place + strict] > 0.9, relaxed > strict
            place += strict + 1
        assert [one.refused[at], one.low[at], one.taken[at]] == met.tolist()
        seen += met
    assert seen[0] > seen[1] >= seen[2] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["model:tiny/draft", "eagle:tiny/eagle3"])
@pytest.mark.slow
def test_thirty_prompts_of_the_embedded_pair(draft, temperature):
    target = mj.load("tiny/target", dtype=DTYPE)
    prompts = [problem.turns[0] for problem in read("arithmetic", chat=False, limit=30)]
    found = counted(target, draft, prompts, temperature, 64)
    for length in (2, 8):
        done = decoded(target, draft, prompts, temperature, 64, num_draft_tokens=length)
        assert steps_of(found, "exact", length) == [c.metrics.steps for c in done]
    if not temperature:
        return
    tables = foretold.figures(found)
    for name, rule in (("rejection", mj.verify.rejection()), ("block", mj.verify.rejection(block=True))):
        at = foretold.LENGTHS.index(4)
        done = decoded(target, draft, prompts, temperature, 64, rule=rule, num_draft_tokens=4, sample=True)
        tau = sum(c.metrics.emitted for c in done) / sum(c.metrics.steps for c in done)
        low, high = tables[name]["interval"][at]
        # Other texts of the same prompts: the difference has twice the variance of either, and four deviations.
        assert abs(tau - tables[name]["tau"][at]) < 4 * np.sqrt(2) * (high - low) / (2 * 1.96)


def test_the_command_forecasts_from_texts_that_it_keeps(target, prompts, tmp_path, capsys):
    out = tmp_path / "out"
    flags = [
        *("--forecast", "--target", target, "--draft", f"model:{target}", "--task", f"jsonl={prompts}"),
        *("--max-new-tokens", 12, "--temperatures", 0.7, "--tree", "3-2", "--draft-cost", 0.2),
        *("--output", out),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(answers, "_decoded", dying_after(2))
        assert main([str(flag) for flag in flags]) == 130
    kept = (out / "rows.jsonl").read_bytes()
    capsys.readouterr()
    assert main([str(flag) for flag in flags]) == 0
    shown = capsys.readouterr().out
    [file] = out.glob("forecast_*.json")
    made = json.loads(file.read_text())
    assert shown == file.with_suffix(".md").read_text() == foretold.markdown(made)
    assert kept.count(b"\n") == 2 and (out / "rows.jsonl").read_bytes().startswith(kept)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    alone = decoded(mj.load(str(target)), "none", PROMPTS, 0.7, 12)
    assert [row["tokens"] for row in rows] == [[list(c.tokens)] for c in alone]
    [table] = made["tables"]
    assert table["tokens"] == sum(len(c.tokens) for c in alone) and len(table["exact"]["tau"]) == 12
    tokens = [tau / (1 + 0.2 * length) for length, tau in enumerate(table["exact"]["tau"], start=1)]
    assert table["best"]["exact"]["tokens"] == max(1.0, *tokens)
    # Its texts are read again and not decoded.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(answers, "_decoded", None)
        assert main([str(flag) for flag in flags]) == 0
    again = json.loads(file.read_text())
    assert again | {"date": made["date"]} == made and "commit" in made
    assert tuple(forced.READERS) == FORECAST


def test_a_cost_without_a_forecast_is_refused():
    with pytest.raises(MarsError, match="--draft-cost does not apply without --forecast"):
        parse(["--draft-cost", "0.1", "--task", "arithmetic", "--output", "x"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--verify", "exact"], "--verify does not apply with --forecast"),
        (["--thetas", "0.8"], "--thetas does not apply with --forecast"),
        (["--controls", "all"], "--controls does not apply with --forecast"),
        (["--base", "rejection"], "--base does not apply with --forecast"),
        (["--num-draft-tokens", "3"], "--num-draft-tokens does not apply with --forecast"),
        (["--tree", "dynamic"], "--forecast does not apply to --tree dynamic"),
        (["--draft-cost", "-1"], "--draft-cost is -1: expected a number of at least 0"),
        (["--draft", "self"], "--forecast does not apply to --draft self"),
    ],
)
def test_what_a_forecast_does_not_heed_is_refused(flags, said):
    with pytest.raises(MarsError, match=said):
        parse(["--forecast", "--draft", "model:tiny/draft", "--task", "arithmetic", "--output", "x", *flags])
