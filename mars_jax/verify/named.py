"""A rule by its name: of the table, of a checkpoint, or of the user's own file.

E hidden size, W width. Oracle: the factories themselves, in tests/verify/test_named.py.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import assets, specs
from mars_jax.contrib.models import indicator, mixer
from mars_jax.contrib.rules.equivalent import read_groups
from mars_jax.core.errors import MarsError
from mars_jax.core.reading import read_text
from mars_jax.core.types import LoadedRule, PyTree

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADS = {
    "learned": ("mars_jax_indicator", indicator.init_params),
    "diversed": ("mars_jax_mixer", mixer.init_params),
}
"""By rule, the `model_type` of its weights, and random ones."""


def load(spec: str, target: Any = None, **settings: Any) -> LoadedRule:
    """The rule that `spec` names, with its weights where it has some.

    Args:
      spec: a name of `specs.RULES`; `learned:PATH`, a directory that `save` wrote; `equivalent:case,space` or
        `equivalent:FILE.json`, see `contrib.equivalent.read_groups`; or FILE.py:NAME or
        package.module:NAME, where NAME takes settings as keywords and returns a rule or a `LoadedRule`. The file is
        run.
      target: from `mars_jax.load`; a head on its features must be of its size, and is put on its mesh.
      **settings: by name, as `specs` lists them; numbers are one value for all prompts or one for each. `base` is the
        name of a strict rule, or such a rule, and its settings are taken too (`block`).

    Raises:
      MarsError: an unknown name or setting, a value out of range, weights that are missing or do not fit.

    >>> load("mars", margin="gap", theta=1.5).rule.margin
    'gap'
    """
    row = specs.find(spec)
    if specs.is_own(spec):
        return _own(spec, row, settings)
    takes_base = "base" in row.settings and callable(settings.get("base"))  # a rule, and not the name of one
    base = settings.pop("base") if takes_base else None
    settled = row.settle(settings)
    keywords = {name: settled[name] for name in row.settings}
    if base is not None:
        keywords["base"] = base
    elif "base" in keywords:
        rest = {name: value for name, value in settled.items() if name not in row.settings}
        keywords["base"] = load(keywords["base"], **rest).rule
    rule = specs.factory(row.factory)(**keywords)
    if "weights" not in row.needs:
        return LoadedRule(rule)
    _, path = specs.split(spec)
    if not path:
        raise MarsError(f"the rule {row.name} needs weights: name them, as {row.name}:PATH.")
    if row.name == "equivalent":
        return LoadedRule(rule, read_groups(path, target))
    return LoadedRule(rule, read_weights(path, target, row.name))


def _own(spec: str, row: specs.Rule, settings: dict[str, Any]) -> LoadedRule:
    factory = specs.factory(spec)
    takes = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for name, value in settings.items():
        # What no text can say, such as a base, may be given in Python.
        if name in row.settings or not (open_ended or name in takes):
            row.check(name, value)
    missing = [
        n for n, s in row.settings.items() if s.default is None and not s.optional and n not in settings
    ]
    if missing:
        raise MarsError(
            f"the rule {row.name} needs a {missing[0]}: give {row.settings[missing[0]].expected()}."
        )
    made = factory(**settings)
    loaded = made if isinstance(made, LoadedRule) else LoadedRule(made)
    if not callable(loaded.rule):
        raise MarsError(
            f"the rule is {spec}: it returned {made!r}; return a rule, as docs/rules.md describes, or a LoadedRule."
        )
    return loaded


def needs_q(rule: Any) -> bool:
    """Whether a rule, or the rule that it is over, verifies with the true q of a sampled draft.

    >>> needs_q(load("mars", base="rejection").rule), needs_q(load("mars").rule)
    (True, False)
    """
    while rule is not None:
        if "q" in getattr(rule, "needs", ()):
            return True
        rule = getattr(rule, "base", None)
    return False


def save(directory: str | os.PathLike[str], params: PyTree, rule: str = "learned") -> Path:
    """Write the weights of a rule into a new directory; returns it.

    Args:
      directory: is made; it must hold no weights yet.
      params: of `learned` as `models.indicator.init_params` makes them, of `diversed` as `models.mixer.init_params`.
      rule: "learned" or "diversed".

    Raises:
      MarsError: there are weights already, or the directory cannot be written.

    >>> import tempfile
    >>> params = indicator.init_params(8, jax.random.key(0))
    >>> read_weights(save(tempfile.mkdtemp(), params))["inner"].shape
    (64, 8)
    """
    from safetensors.numpy import save_file

    directory = Path(directory)
    width, hidden_size = params["inner"].shape
    sizes = {"hidden_size": hidden_size, "width": width}
    if "drafted" in params:
        sizes["draft_hidden_size"] = params["drafted"].shape[1]
    if (directory / WEIGHTS).exists():
        raise MarsError(f"'{directory}' holds weights already: name a new directory.")
    config = {"model_type": HEADS[rule][0], **sizes}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: np.asarray(leaf) for name, leaf in params.items()}, directory / WEIGHTS)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MarsError(
            f"'{directory}' cannot be written ({error.strerror}): name another directory."
        ) from None
    return directory


def read_weights(directory: str | os.PathLike[str], target: Any = None, rule: str = "learned") -> PyTree:
    """What `save` wrote for a rule; "tiny/diversed" is the embedded family's.

    Raises:
      MarsError: something else is there, weights that are not finite, or that are for a target of another size.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    model_type, init = HEADS[rule]
    directory = assets.path(os.fspath(directory)) or Path(directory)
    try:
        config = json.loads(read_text(directory / CONFIG))
        if config["model_type"] != model_type:
            raise ValueError(f"its model_type is {config['model_type']}")
        found = load_file(directory / WEIGHTS)
        sizes = {name: size for name, size in config.items() if name not in ("model_type", "hidden_size")}
        wanted = jax.eval_shape(lambda key: init(config["hidden_size"], key, **sizes), jax.random.key(0))
        shapes = {name: leaf.shape for name, leaf in wanted.items()}
        if {name: leaf.shape for name, leaf in found.items()} != shapes:
            raise ValueError("its tensors do not have the shapes that config.json says")
    except OSError as error:
        raise MarsError(
            f"the weights of a rule '{directory}' cannot be read ({error.strerror or error}): name a directory that "
            "mars_jax.verify.save wrote."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise MarsError(
            f"'{directory}' holds no weights of a rule ({error}): name a directory that mars_jax.verify.save wrote."
        ) from None
    if not all(np.all(np.isfinite(leaf)) for leaf in found.values()):
        raise MarsError(f"the weights of the rule '{directory}' are not finite: load intact ones.")
    if target is not None and config["hidden_size"] != target.config.hidden_size:
        raise MarsError(
            f"the weights of the rule '{directory}' are for a hidden size of {config['hidden_size']}, and "
            f"'{target.name}' has {target.config.hidden_size}: train them for this target."
        )
    mesh = getattr(target, "mesh", None)
    whole = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return {name: jax.device_put(jnp.asarray(leaf, jnp.float32), whole) for name, leaf in found.items()}
