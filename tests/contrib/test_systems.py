"""SPRINTER, TriSpec and VIA-SD by name for the embedded family: trusted tokens, and refused systems."""

import numpy as np
import pytest

import mars_jax as mj
from mars_jax.contrib.drafters.system_files import System, save_system
from mars_jax.drafters.registry import definition
from mars_jax.utils import assets
from tests.helpers.checkpoint_files import message

PROMPTS = ["Once upon a time", "User: What is 3 plus 4?\nAssistant:"]
NAMES = {"sprinter": assets.SPRINTER, "trispec": assets.TRISPEC, "via_sd": assets.VIA_SD}


@pytest.fixture(scope="module")
def target():
    return mj.load(assets.TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_it_loads_by_name_and_trusts_tokens(target, kind):
    loaded = mj.drafters.load(f"{kind}:{NAMES[kind]}", target)
    result = mj.generate(target, loaded, PROMPTS, max_new_tokens=24, log_probs=True)
    assert result.metrics.accepted_trusted > 10 and definition(kind).trusts
    assert loaded.drafter.max_depth == definition(kind).length


def test_a_system_of_another_target_or_model_is_refused(target, tmp_path):
    def save(name, system, arrays=None):
        return f"{system.name}:{save_system(tmp_path / name, system, arrays)}"

    short = save("short", System(name="via_sd", draft="ngram", layers=((True, False),) * 2))
    deaf = save("deaf", System(name="via_sd", draft="ngram", layers=((False, True),) * 6))
    arrays = {"weight": np.ones(7, np.float32), "bias": np.zeros(1, np.float32)}
    unfit_classifier = save("other", System(name="sprinter", draft=assets.DRAFT), arrays)
    for spec, options, sentence in (
        (short, {}, "does not fit 'tiny/target': the mask has 2 layers and the model 6"),
        (deaf, {}, "does not fit 'tiny/target': the mask leaves no attention"),
        (unfit_classifier, {}, "is for a model of hidden size 7 and 'tiny/draft' has 128"),
        ("trispec:tiny/trispec", {"tree": (2, 2)}, "tree does not apply to the drafter 'trispec'"),
        ("trispec:tiny/trispec", {"num_draft_tokens": 3}, "num_draft_tokens is 3: a round"),
    ):
        assert sentence in message(mj.drafters.load, spec, target, **options)
