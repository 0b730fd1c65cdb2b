"""A step as a program: what `jax.export` makes of it runs without the code of the models, the drafter and the rule.

Oracle: the decoder's own step (tests/core/test_portable.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, export

from mars_jax.core.decoder import Decoder
from mars_jax.core.errors import MarsError
from mars_jax.core.types import KEY_IMPL, DecodeState, Params, StepInfo, Verdict

Step = Callable[[Params, DecodeState], tuple[DecodeState, StepInfo]]


def export_step(
    decoder: Decoder, params: Params, state: DecodeState, *, platform: str | None = None
) -> export.Exported:
    """`decoder.step` as a StableHLO program, which `load_step` makes a function again.

    Its `serialize()` gives bytes to store, for which JAX wants the package flatbuffers.

    Args:
      decoder: from `speculative_decoder`.
      params, state: arrays or `jax.ShapeDtypeStruct`s; the program is for their shapes and dtypes, and takes others'
        values.
      platform: what it is lowered for, "cpu", "tpu", "cuda" or "rocm", of which this process needs none; default: its
        own. A program is for one: a kernel of a TPU has no form for a CPU.

    Raises:
      MarsError: the rule's verdicts have fields of their own, which no other program would know how to read.

    >>> from mars_jax.core import fake
    >>> from mars_jax import drafters, verify
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.decode import speculative_decoder
    >>> from mars_jax.core.types import keys_from_seeds
    >>> rule = verify.exact()
    >>> decoder = speculative_decoder(fake.hash_model(vocab_size=7), drafters.none(), rule)
    >>> state = decoder.init(Params(()), jnp.ones((1, 8), jnp.int32), jnp.array([2]), make_controls(1, limit=8), rule,
    ...                      keys_from_seeds(jnp.arange(1)))
    >>> step = load_step(export_step(decoder, Params(()), state))
    >>> int(step(Params(()), state)[0].length[0])
    3
    """
    leaves, structure = jax.tree.flatten((params, state))

    def step(given: list[Array]) -> tuple[list[Array], tuple[Array, ...]]:
        params, state = jax.tree.unflatten(structure, _with_keys(given, leaves))
        state, info = decoder.step(params, state)
        if type(info.verdict) is not Verdict:
            raise MarsError(
                f"the rule's verdicts are of type {type(info.verdict).__name__}: a step is exported with plain "
                "Verdicts only."
            )
        return _without_keys(jax.tree.leaves(state)), tuple(jax.tree.leaves(info))

    shapes = jax.eval_shape(_without_keys, leaves)
    return export.export(jax.jit(step), platforms=None if platform is None else [platform])(shapes)


def load_step(exported: export.Exported | bytes | bytearray) -> Step:
    """The function that was exported, or its bytes: `(params, state) -> (state, StepInfo)`, to be jitted like others.

    The containers that it is given have the structure of those it was made with. Their classes are all that the caller
    needs: weights in the same tree, and a state such as `decoder.init` makes, or one that was restored.

    Raises (when the function is called):
      MarsError: arrays of other shapes or dtypes, or more or fewer of them, than the program is for.
    """
    program = exported if isinstance(exported, export.Exported) else export.deserialize(bytearray(exported))
    wanted = [(tuple(x.shape), jnp.dtype(x.dtype)) for x in program.in_avals]

    def step(params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        leaves = jax.tree.leaves((params, state))
        given = _without_keys(leaves)
        found = [(tuple(x.shape), jnp.dtype(x.dtype)) for x in given]
        if found != wanted:
            differs = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
            what = (
                f"{len(found)} arrays and the program takes {len(wanted)}"
                if differs is None
                else f"an array {found[differs]} where the program takes {wanted[differs]}"
            )
            raise MarsError(f"params and state hold {what}: give what the step was exported with.")
        made, info = program.call(given)
        old, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, _with_keys(made, old)), _info(info)

    return step


def _info(leaves: Sequence[Array]) -> StepInfo:
    given: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StepInfo)}
    given["verdict"] = Verdict(**{field.name: given["kind"] for field in dataclasses.fields(Verdict)})
    return jax.tree.unflatten(jax.tree.structure(StepInfo(**given)), leaves)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(leaves: Sequence[Any]) -> list[Any]:
    """Keys as the words they are made of, which every program can be given."""
    return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def _with_keys(leaves: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Words as keys, where `like` has keys. A state's are all of one generator."""
    return [
        jax.random.wrap_key_data(x, impl=KEY_IMPL) if _is_key(old) else x
        for x, old in zip(leaves, like, strict=True)
    ]
