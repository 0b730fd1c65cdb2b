"""A relaxed rule that accepts a drafted token if it is in the same class of equivalent tokens as the target's token.

B batch, N nodes, V vocabulary. Tested against the same decisions, made node by node in Python, in
tests/contrib/test_phrases.py.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.constraints.vocabulary import vocabulary
from mars_jax.contrib.rules.head_files import on_mesh
from mars_jax.contrib.rules.phrase import regrets
from mars_jax.core import struct
from mars_jax.core.types import PyTree
from mars_jax.hub.pretrained import Pretrained
from mars_jax.utils.errors import MarsError
from mars_jax.utils.limits import JSON_BYTES
from mars_jax.utils.paths import read_text
from mars_jax.verify import Evidence, Exact, Range, Relaxed, at_parent, register
from mars_jax.verify.exact import target_tokens

ALIKE = ("case", "space", "numbers")
"""Differences between tokens that can be ignored: upper and lower case, a leading space, and numbers as words or
digits."""
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"


@register("equivalent", paper="after 2601.15498")
@struct.dataclass(kw_only=True)
class Equivalent(Relaxed):
    """Also accept a token that a user's table lists as equivalent to the target's token.

    Two tokens are equivalent if they are in the same class of the user's table, `Params.verify`; see `token_groups`.
    The drafted token's regret must be below `gap` nats. All other decisions are those of `exact()`. The rule is lossy.
    With gap = 0, it equals `exact()` bit for bit.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 2.0, 1.0], [0.0, 0.0, 9.0]]])
    >>> groups = jnp.asarray([0, 1, 1], jnp.int32)
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 2]], jnp.int32)), z, params=groups)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(evidence)[0].num_accepted[0])
    >>> [int(accepted(Equivalent(gap=g))) for g in (2.0, 0.5)]
    [1, 0]
    """

    # f32[] or [B]; nats; inf: no limit
    gap: Any = struct.setting(
        default=2.0,
        ranges=Range("a number of at least 0, or inf (0 is strict)", 0, grid=(0.5, 1.0, 2.0, 4.0)),
        help="bound on the regret of an equivalent token, in nats; 0 never relaxes",
    )
    base: ClassVar[Exact] = Exact()
    needs: ClassVar[tuple[str, ...]] = ("draft", "weights")

    def relaxable(self, evidence: Evidence) -> Array:
        tree, groups = evidence.tree, evidence.params
        if not isinstance(groups, Array) or groups.ndim != 1:
            raise MarsError(
                "the rule equivalent needs classes of tokens: pass LoadedRule(rule, token_groups(...))."
            )
        drafted_group = groups.at[jnp.maximum(tree.tokens, 0)].get(mode="clip")
        target_group = at_parent(tree, groups.at[target_tokens(evidence)].get(mode="clip"))
        # Class 0 means no class: such tokens are not equivalent to any other token.
        return (drafted_group == target_group) & (drafted_group > 0) & (regrets(evidence) < self.gap[:, None])


def token_groups(
    target: Pretrained, alike: Iterable[str] = (), groups: Sequence[Sequence[str]] = ()
) -> Array:
    """Return the class of each token of a target, i32[V]. Tokens in no class get 0.

    Args:
      target: the target, from `mars_jax.load`.
      alike: differences to ignore, from `ALIKE`.
      groups: lists of equivalent strings. Each string must be exactly one token of the target, including any leading
        space.

    Raises:
      MarsError: a name is unknown, or a string is not a single token.
    """
    differences = tuple(alike)
    for name in differences:
        if name not in ALIKE:
            raise MarsError(f"alike has {name!r}: expected names of {', '.join(ALIKE)}.")
    tokens = vocabulary(target.tokenizer, target.config.vocab_size).tokens
    # {token id: text} of all tokens that have a text.
    texts = {i: token.decode("utf-8", errors="surrogateescape") for i, token in enumerate(tokens) if token}
    known_texts = set(texts.values())
    # Disjoint sets of equivalent keys: `parent_key` maps a key to an equivalent one, and repeated look-ups end at the
    # root.
    parent_key: dict[str, str] = {}

    def root(key: str) -> str:
        while key in parent_key:
            key = parent_key[key]
        return key

    for group in groups:
        for text in group:
            if text not in known_texts:
                raise MarsError(
                    f"the group {list(group)} has {text!r}, which is not one token: leave it out."
                )
        first_root = root(_key(group[0], differences))
        for text in group[1:]:
            text_root = root(_key(text, differences))
            if text_root != first_root:
                parent_key[text_root] = first_root
    roots = {i: root(_key(text, differences)) for i, text in texts.items()}
    shared_roots = (key for key, count in collections.Counter(roots.values()).items() if count > 1)
    class_numbers = {key: number for number, key in enumerate(shared_roots, start=1)}
    class_table = np.zeros(len(tokens), np.int32)
    for i, key in roots.items():
        class_table[i] = class_numbers.get(key, 0)
    return on_mesh(jnp.asarray(class_table), target)


def _key(text: str, alike: tuple[str, ...]) -> str:
    """Normalize a string, so that strings that differ only in the ways listed in `alike` become equal.

    >>> _key(" Two", ("case", "space", "numbers")), _key("2", ("numbers",))
    ('2', '2')
    """
    if "space" in alike and text.strip(" "):
        text = text.removeprefix(" ")
    if "case" in alike:
        text = text.lower()
    if "numbers" in alike:
        leading_space = " " * text.startswith(" ")
        bare_text = text.removeprefix(" ")
        digits_of_word = {word: str(number) for number, word in enumerate(_WORDS.split())}
        text = leading_space + digits_of_word.get(bare_text, bare_text)
    return text


def read(path: str, target: Pretrained | None) -> PyTree:
    """Return the table for `equivalent:PATH`, where `path` is a JSON file or names from `ALIKE`, such as `case,space`.

    The file must contain an object with `alike`, a list of names, and `groups`, a list of lists of strings.

    Raises:
      MarsError: there is no target, or the file is missing or invalid; see also `token_groups`.
    """
    if target is None:
        raise MarsError("the rule equivalent needs a target, whose tokens it compares: give one.")
    if all(name in ALIKE for name in path.split(",")):
        return token_groups(target, path.split(","))
    try:
        data = json.loads(read_text(path, JSON_BYTES))
        alike, groups = data.get("alike", []), data.get("groups", [])
        if not all(isinstance(text, str) for group in groups for text in group):
            raise ValueError("a group is no list of texts")
    except OSError as error:
        raise MarsError(
            f"the table of equivalents '{path}' cannot be read ({error.strerror}): name a JSON file, or some of "
            f"{', '.join(ALIKE)}."
        ) from None
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise MarsError(
            f"'{path}' holds no table of equivalents ({error}): write an object with alike and groups."
        ) from None
    return token_groups(target, alike, groups)
