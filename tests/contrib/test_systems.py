"""SPRINTER, TriSpec and VIA-SD by name for the embedded family: trusted tokens, and refused systems."""

import numpy as np
import pytest

import mars_jax as mj
from mars_jax import assets, specs
from mars_jax.contrib.drafters.system_files import System, save_system
from mars_jax.core.errors import MarsError

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
    assert result.metrics.accepted_trusted > 10 and specs.DRAFTERS[kind].trusts
    assert loaded.drafter.max_depth == specs.DRAFTERS[kind].length


def test_a_system_of_another_target_or_model_is_refused(target, tmp_path):
    short = save_system(tmp_path / "short", System(name="via_sd", draft="ngram", layers=((True, False),) * 2))
    with pytest.raises(MarsError, match="does not fit 'tiny/target': the mask has 2 layers and the model 6"):
        mj.drafters.load(f"via_sd:{short}", target)
    deaf = save_system(tmp_path / "deaf", System(name="via_sd", draft="ngram", layers=((False, True),) * 6))
    with pytest.raises(MarsError, match="does not fit 'tiny/target': the mask leaves no attention"):
        mj.drafters.load(f"via_sd:{deaf}", target)
    arrays = {"weight": np.ones(7, np.float32), "bias": np.zeros(1, np.float32)}
    other = save_system(tmp_path / "other", System(name="sprinter", draft=assets.DRAFT), arrays)
    with pytest.raises(MarsError, match="is for a model of hidden size 7 and 'tiny/draft' has 128"):
        mj.drafters.load(f"sprinter:{other}", target)
    with pytest.raises(MarsError, match="tree does not apply to the drafter 'trispec'"):
        mj.drafters.load("trispec:tiny/trispec", target, tree=(2, 2))
    with pytest.raises(MarsError, match="num_draft_tokens is 3: a round"):
        mj.drafters.load("trispec:tiny/trispec", target, num_draft_tokens=3)
