"""Functions that load the systems SPRINTER, TriSpec and VIA-SD, which accept some draft tokens without verification.

Tested against the same drafters built without files, in tests/contrib/test_systems.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mars_jax import hub
from mars_jax.contrib.drafters.cascade import Cascade, CascadeParams, cascade
from mars_jax.contrib.drafters.sprinter import Sprinter, SprinterParams, sprinter
from mars_jax.contrib.drafters.system_files import (
    NGRAM,
    System,
    load_classifier,
    load_system,
    resolve_system_model,
)
from mars_jax.core.drafter import Drafter
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.drafters import LoadedDrafter, language_model, ngram, register
from mars_jax.drafters.asked import Asked
from mars_jax.hub.pretrained import Pretrained, check_same_vocabulary
from mars_jax.utils.errors import MarsError, prefixed


def load_sprinter(asked: Asked) -> LoadedDrafter:
    """Load a `sprinter` drafter from the directory of a SPRINTER system.

    Raises:
      MarsError: the classifier was trained for a different model; see also `hub.load` and `load_system`.
    """
    system = load_system(asked.path, "sprinter")
    draft = _model(asked, system, system.draft)
    weight, bias = load_classifier(system)
    if weight.shape != (draft.config.hidden_size,):
        raise MarsError(
            f"the classifier in '{system.directory}' is for a model of hidden size {weight.size} and '{system.draft}' "
            f"has {draft.config.hidden_size}: use the model that it was trained on."
        )
    params = SprinterParams(
        model=draft.params,
        weight=jnp.asarray(weight),
        bias=jnp.asarray(bias),
        threshold=np.float32(system.numbers["threshold"]),
    )
    drafter = sprinter(draft.model, asked.chain, sample=asked.sample)
    return LoadedDrafter(drafter, params, max_positions=draft.config.max_positions)


def load_trispec(asked: Asked) -> LoadedDrafter:
    """Load a TriSpec system from its directory. The system is a `cascade` with a small model as proxy.

    Raises:
      MarsError: the vocabularies of the models differ; see also `hub.load`, `load_system` and `cascade`.
    """
    system = load_system(asked.path, "trispec")
    proxy = _model(asked, system, system.proxy)
    return _cascade(asked, system, proxy.model, proxy.params, "margin", proxy.config.max_positions)


def load_via_sd(asked: Asked) -> LoadedDrafter:
    """Load a VIA-SD system from its directory. The system is a `cascade` whose proxy is the target without some layers.

    The proxy uses the target's weights, not a copy.

    Raises:
      MarsError: the layer mask is for a different target; see also `load_system` and `cascade`.
    """
    system, model = load_system(asked.path, "via_sd"), asked.target.model
    if model.with_layers is None:
        raise MarsError(
            f"'{asked.target.name}' cannot leave out layers as via_sd requires (it has no LanguageModel.with_layers): "
            "use another drafter."
        )
    with prefixed(f"'{system.directory}' does not fit '{asked.target.name}'"):
        slim_model = model.with_layers(system.layers)
    return _cascade(
        asked, system, slim_model, asked.target.params, "ratio", asked.target.config.max_positions
    )


def _cascade(
    asked: Asked, system: System, proxy: LanguageModel, weights: PyTree, gate: str, longest: int
) -> LoadedDrafter:
    """Load the inner drafter and combine it with `proxy`, which was trained for contexts of up to `longest` tokens."""
    inner: Drafter
    inner_params: PyTree
    if system.draft == NGRAM:
        inner, inner_params = ngram(system.draft_tokens), ()
    else:
        draft = _model(asked, system, system.draft)
        vocab = asked.target.config.vocab_size
        inner, inner_params = language_model(draft.model, system.draft_tokens, vocab_size=vocab), draft.params
        longest = min(longest, draft.config.max_positions)
    # The values are in the order of `NUMBERS`: (accept, escalate) for the gate "ratio", or a single margin.
    thresholds = tuple(map(np.float32, system.numbers.values()))
    drafter = cascade(inner, proxy, asked.chain, gate=gate)
    cascade_params = CascadeParams(inner_params, weights, thresholds if gate == "ratio" else thresholds[0])
    return LoadedDrafter(drafter, cascade_params, max_positions=longest)


def _model(asked: Asked, system: System, name: str) -> Pretrained:
    """Load one of the system's models onto the target's mesh, and check that it has the target's vocabulary."""
    model = hub.load(
        resolve_system_model(system, name),
        dtype=asked.dtype,
        mesh=asked.target.mesh,
        prefill_chunk=asked.target.model.prefill_chunk,
    )
    check_same_vocabulary(asked.target, model)
    return model


register("sprinter", Sprinter, load_sprinter, path="PATH", paper="2502.04557")
register(
    "trispec",
    Cascade,
    load_trispec,
    help="A small model whose drafts are verified by a proxy model, and by the target if the proxy is unsure",
    path="PATH",
    paper="2601.23180",
)
register(
    "via_sd",
    Cascade,
    load_via_sd,
    help="A small model whose drafts are verified by the target without some layers, and by the full target if unsure",
    path="PATH",
    paper="2606.12243",
)
