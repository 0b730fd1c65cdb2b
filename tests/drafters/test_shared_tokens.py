"""Draft models with another tokenizer: tables compared with the tokenizers, drafts with the model run in Python."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import mars_jax as mj
from mars_jax import constraints, drafters, hub, verify
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.core import decode, fake
from mars_jax.core.types import Params
from mars_jax.drafters.shared_tokens import Shared, shared_tokens, tables
from mars_jax.hub.pretrained import check_same_vocabulary
from tests.cli.conftest import write_checkpoint
from tests.helpers import begin, draft_input, logits_after, ragged, slow_but
from tests.helpers.drafted import check_best_children
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB

# The draft model has as many tokens as the target, with other meanings.
IDS = np.asarray([3, -1, 2, 1, 0, 7, -1, 5, 8, 11, -1, 9, 12], np.int32)
FED = np.asarray([4, 3, 2, 0, 9, 7, 1, 5, 8, 11, 6, 9, 12], np.int32)
PARAMS = Params(target=(), draft=Shared((), jnp.asarray(IDS), jnp.asarray(FED)))
PROMPTS = ["a story of the sea", "the sun and"]


def scores(tokens):
    """Return the draft model's logits f32[V] after tokens of the target, indexed by the target's ids."""
    logits = np.full(VOCAB, -np.inf)
    logits[IDS[IDS >= 0]] = logits_after(SMALL, FED[tokens].tolist(), width=48)[IDS >= 0]
    return logits


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("shared") / "target", seed=0, merges=15)


@pytest.fixture(scope="module")
def shuffled(target, tmp_path_factory):
    """Return the path of a copy of the target with permuted token ids."""
    path = shutil.copytree(target, tmp_path_factory.mktemp("shared") / "shuffled")
    loaded, file = hub.load(target), path / "tokenizer.json"
    new_ids = np.random.default_rng(0).permutation(loaded.config.vocab_size)
    data = json.loads(file.read_text())
    data["model"]["vocab"] = {token: int(new_ids[i]) for token, i in data["model"]["vocab"].items()}
    for added in data["added_tokens"]:
        added["id"] = int(new_ids[added["id"]])
    file.write_text(json.dumps(data))
    config = dataclasses.replace(loaded.config, eos_token_ids=(int(new_ids[0]),))
    rows = {name: np.asarray(loaded.params[name])[np.argsort(new_ids)] for name in ("embed", "unembed")}
    hub.save(path, config, {**loaded.params, **rows}, overwrite=True)
    return path


def test_tables_are_those_of_the_tokenizers(target, tmp_path):
    """Two tokenizers share letters and some words: equal strings pair up; others map to their longest shared ending."""
    draft = write_checkpoint(
        tmp_path / "other", seed=0, corpus="the sea is a star, the land is a stone", merges=30
    )
    target_tokenizer, draft_tokenizer = (AutoTokenizer.from_pretrained(path) for path in (target, draft))
    shared = shared_tokens(hub.outline(target), hub.outline(draft))
    assert shared is not None
    pairs = {int(token_id): number for number, token_id in enumerate(shared.ids) if token_id >= 0}
    target_ids, draft_ids = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    assert pairs == {target_ids[token]: draft_ids[token] for token in target_ids.keys() & draft_ids.keys()}
    assert 256 < len(pairs) < len(target_ids)
    for token, number in target_ids.items():
        endings = [token[i:] for i in range(len(token)) if token[i:] in draft_ids]
        assert shared.fed[number] == draft_ids[endings[0]]
    assert shared_tokens(hub.outline(target), hub.outline(target)) is None


def test_one_token_of_a_text_is_shared_where_a_vocabulary_has_several():
    maps = tables(Vocabulary((b"a", b"b", b"a", None), marks=((3, b"</s>"),)), Vocabulary((b"c", b"a", b"a")))
    assert maps.ids.tolist() == [-1, 0, -1] and maps.fed.tolist() == [1, 0, 1, 0]


def test_vocabularies_that_share_next_to_nothing_are_refused(target):
    words = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "\u4eba": 2}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    small = mj.Pretrained.from_parts(fake.hash_model(vocab_size=3), (), tokenizer, max_positions=64)
    with pytest.raises(mj.MarsError, match="share 2 tokens, and drafting needs 100: pair models"):
        shared_tokens(small, hub.outline(target))


def test_models_with_different_tokenizers_are_refused(target, shuffled):
    with pytest.raises(mj.MarsError, match=r"different vocabularies \(\d+ tokens differ, such as "):
        check_same_vocabulary(hub.outline(target), hub.outline(shuffled))


def test_drafts_are_the_best_shared_tokens_of_a_model_that_reads_token_by_token():
    drafter = drafters.language_model(SMALL, tree=(3, 2, 1), own_tokens=True)
    batch = ragged([1, 2, 9], 40, VOCAB)
    decoder, state = begin(TARGET, drafter, verify.exact(), *batch, params=PARAMS)
    propose = jax.jit(drafter.propose)
    for _ in range(4):
        tree, _ = propose(PARAMS, state.draft, draft_input(state))
        check_best_children(tree, state, scores)
        state, _ = decode.jitted_step(decoder, PARAMS, state)


@pytest.mark.slow
def test_a_sampled_draft_has_its_true_q_and_rejection_the_targets_law():
    drafter, rows = drafters.language_model(SMALL, 2, sample=True, own_tokens=True), 4000
    prompts, lengths = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in ragged([4], 12, VOCAB))
    batch = (TARGET, drafter, verify.rejection(), prompts, lengths)
    decoder, state = begin(*batch, params=PARAMS, temperature=0.7)
    tree, _ = jax.jit(drafter.propose)(PARAMS, state.draft, draft_input(state))
    past = prompts[0, :4].tolist()
    q, p = (jax.nn.softmax(z / 0.7) for z in (scores(past), logits_after(TARGET, past, width=48)))
    np.testing.assert_allclose(jax.nn.softmax(tree.draft_logits[0, 0]), q, atol=1e-6)
    _, info = decode.jitted_step(decoder, PARAMS, state)
    # Five standard deviations of a share estimated from 4000 draws.
    for tokens, law in ((tree.tokens[:, 1], q), (info.emitted[:, 0], p)):
        shares = np.bincount(tokens, minlength=VOCAB) / rows
        np.testing.assert_allclose(shares, law, atol=5 * 0.5 / rows**0.5)


LETTERS = constraints.regex("[a-z ]{20,40}")
CHAIN, TREE = {"num_draft_tokens": 3}, {"tree": (2, 1, 1)}
# The shape of the draft, and options of the request.
FORMS = {
    "chain": (CHAIN, {}),
    "tree": (TREE, {}),
    "dynamic tree": ({"tree": drafters.Dynamic(top_k=2, depth=3, nodes=6)}, {}),
    "sampled tree": (TREE | {"sample": True}, {}),
    "constrained tree on a mesh": (TREE, {"constraint": LETTERS, "mesh": "data=2"}),
    "rows divided": (CHAIN, {"mesh": "data=2"}),
    "vocabulary divided": (CHAIN | {"sample": True}, {"mesh": "model=2", "verify": verify.rejection()}),
    "adaptive length": (CHAIN, {"costs": [1.0, 1.02]}),  # for no draft and three tokens
    "stopped": (CHAIN, {"draft_stop": 1.8}),
    "constrained": (CHAIN, {"constraint": LETTERS}),
    "sampled and constrained": (CHAIN | {"sample": True}, {"constraint": LETTERS}),
}


@pytest.mark.parametrize("form", slow_but(FORMS, "chain"))
def test_a_target_with_other_numbers_for_its_tokens_is_a_perfect_draft(target, shuffled, form):
    shape, options = FORMS[form]
    options = {"max_new_tokens": 24, "constraint": None} | options
    loaded = hub.load(target, mesh=options.pop("mesh", None))
    draft = drafters.load(f"model:{shuffled}", loaded, **shape)
    if "costs" in options:
        draft = drafters.sized(draft, costs=options.pop("costs"))
    baseline = mj.generate(loaded, "none", PROMPTS, max_new_tokens=24, constraint=options["constraint"])
    drafted = mj.generate(loaded, draft, PROMPTS, **options)
    assert drafted.tokens == baseline.tokens
    # The draft's entropy is above 1.8 squared everywhere, and a dynamic tree of six nodes seldom reaches depth 3.
    tau = drafted.metrics.tau
    assert {"stopped": tau == 1, "dynamic tree": 1.5 < tau < 3.5}.get(form, tau > 3.5)
