"""A pair of models on a mesh of absent devices: abstract weights and state, and the lowered decode loop.

Oracle: the byte counts of tests/lab/planning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mars_jax import drafters
from mars_jax.core.controls import make_controls
from mars_jax.core.decode import run, speculative_decoder
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.rule import Rule
from mars_jax.core.types import DecodeState, LanguageModel, Params, Prompts, PyTree, keys_from_seeds
from mars_jax.drafters.registry import definition
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.models import shardings, transformer
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import HeadConfig
from mars_jax.models.quantize import num_bytes
from mars_jax.models.shardings import AnyConfig
from mars_jax.utils.settings import BITS


def wide_dtype(dtype: str) -> str:
    """Return the dtype of all weights that are not quantised, for one of `settings.DTYPES`.

    >>> wide_dtype("int4"), wide_dtype("float32")
    ('bfloat16', 'float32')
    """
    return "bfloat16" if dtype in BITS else dtype


class PlannedDraft(NamedTuple):
    """A drafter without weights."""

    # Name of the drafter, such as `eagle`.
    kind: str
    # (target's LanguageModel) -> drafter
    make: Callable[[LanguageModel], Drafter]
    config: AnyConfig | None = None


def draft_of(
    config: AnyConfig | str,
    *,
    num_draft_tokens: int | None = None,
    tree: Sequence[int] | Dynamic | None = None,
    dtype: str = "bfloat16",
    mixture: bool = False,
    chain: bool = False,
) -> PlannedDraft:
    """Return the drafter for a config, "none" or "ngram", with the defaults of `drafters.load`.

    Args:
      config: config of a small model or of a head, "none" or "ngram".
      num_draft_tokens: length of a chain.
      tree: children per node at each depth, or `drafters.Dynamic(...)`.
      dtype: dtype of the weights and the cache.
      mixture: whether the target is a mixture of experts, for which the default is a short chain.
      chain: whether the target has recurrent layers, for which the default is a chain.
    """
    dtype = wide_dtype(dtype)
    kind = kind_of(config)
    if config == "none":
        return PlannedDraft(kind, lambda _: drafters.none())
    drafter_definition = definition(kind)
    length, usual_tree = drafter_definition.usual(mixture=mixture, chain=chain)
    if num_draft_tokens is not None:
        length = num_draft_tokens
    elif tree is None:
        tree = usual_tree
    if isinstance(config, HeadConfig):
        make_head: Any = drafter_definition.cls
        # The usual tree of a block drafter is as deep as its block.
        if drafter_definition.block and config.drafts and tree is None and length is None and not chain:
            tree = Dynamic(depth=config.drafts)
        head_options: dict[str, Any] = {"tree": tree}
        if config.cached:
            head_options["cache_dtype"] = dtype
        return PlannedDraft(kind, lambda target: make_head(config, target, length, **head_options), config)
    # All other kinds have a default length.
    assert length is not None
    if config == "ngram":
        return PlannedDraft(kind, lambda _: drafters.ngram(length))
    assert isinstance(config, ModelConfig)
    small_model = transformer.language_model(config, dtype=dtype)

    def make_small(target: LanguageModel) -> Drafter:
        return drafters.language_model(small_model, length, tree=tree, vocab_size=target.vocab_size)

    return PlannedDraft(kind, make_small, config)


def kind_of(config: AnyConfig | str) -> str:
    """Return the name of the drafter that `draft_of` returns for a config.

    >>> kind_of("ngram")
    'ngram'
    """
    if isinstance(config, str):
        return config
    return getattr(config, "kind", "model")


def default_mesh(config: ModelConfig, count: int, batch: int) -> dict[str, int]:
    """Return the axes of a mesh of `count` devices.

    `model` gets the largest divisor of `count` that also divides the number of key-value heads. With latent
    attention, whose heads share one cache row per token, it is the number of attention heads instead. The remaining
    devices go to `data` if they divide the batch evenly, and otherwise also to `model`.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=8)
    >>> default_mesh(config, 16, 2), default_mesh(config, 16, 1)
    ({'data': 2, 'model': 8}, {'model': 16})
    """
    heads = config.num_kv_heads
    if config.latent is not None:
        heads = config.num_heads
    model_size = math.gcd(heads, count)
    if count > model_size and batch % (count // model_size) == 0:
        return {"data": count // model_size, "model": model_size}
    return {"model": count}


@dataclasses.dataclass(frozen=True)
class Programs:
    """The decode loop of a pair of models on a mesh, for `batch` rows of `context` tokens, ready to be lowered.

    `dtype` is the dtype of the weights, one of `settings.DTYPES`. int8 and int4 apply only to the target's matrices;
    everything else is bfloat16. `packed_experts` keeps experts in MXFP4.
    """

    target: ModelConfig
    draft: PlannedDraft
    mesh: Mesh
    verify: Rule
    _: dataclasses.KW_ONLY
    batch: int
    context: int
    dtype: str
    packed_experts: bool = False

    @functools.cached_property
    def drafter(self) -> Drafter:
        """The drafter of the target."""
        return self.draft.make(self._model)

    @functools.cached_property
    def params(self) -> Params:
        """Abstract weights of both models, with shardings."""
        params = Params(target=self._weights(self.target, BITS.get(self.dtype)))
        if self.draft.config is not None:
            params = params._replace(draft=self._weights(self.draft.config, None))
        return params

    @functools.cached_property
    def state(self) -> DecodeState:
        """The abstract state of the batch, with shardings."""
        return _abstract_state(
            self._decoder, self.params, self.verify, self.mesh, batch=self.batch, context=self.context
        )

    def lower(self) -> jax.stages.Lowered:
        """Lower the decode loop."""
        return lower_loop(
            self._decoder, self.params, self.verify, self.mesh, batch=self.batch, context=self.context
        )

    @functools.cached_property
    def _model(self) -> LanguageModel:
        return transformer.language_model(self.target, dtype=wide_dtype(self.dtype))

    @property
    def _decoder(self) -> Decoder:
        return speculative_decoder(self._model, self.drafter, self.verify)

    def _weights(self, config: AnyConfig, bits: int | None) -> PyTree:
        dtype, packed = wide_dtype(self.dtype), self.packed_experts and config == self.target
        placement = shardings.params_shardings(config, self.mesh)
        return shardings.abstract_params(config, dtype, bits=bits, packed_experts=packed, shardings=placement)


def lower_loop(
    decoder: Decoder, params: Params, rule: Rule, mesh: Mesh, *, batch: int, context: int
) -> jax.stages.Lowered:
    """Lower `decode.run` for the abstract state of a batch on a mesh."""
    state = _abstract_state(decoder, params, rule, mesh, batch=batch, context=context)
    with jax.set_mesh(mesh):
        return run.lower(decoder, params, state)


def _abstract_state(
    decoder: Decoder, params: Params, rule: Rule, mesh: Mesh, *, batch: int, context: int
) -> DecodeState:
    def start(params: Params) -> DecodeState:
        row_keys = keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32))
        # Only shapes matter here, so use the shortest prompt that prefills a token.
        tokens, lengths = jnp.zeros((batch, context), jnp.int32), jnp.full((batch,), 2, jnp.int32)
        return decoder.init(
            params, Prompts(tokens, lengths, make_controls(batch, limit=context), rule, row_keys)
        )

    with jax.set_mesh(mesh):
        state = jax.eval_shape(start, params)
        placement = shardings.state_shardings(state, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placement)


def local_bytes(tree: PyTree) -> int:
    """Return the bytes of one device's shards of abstract arrays."""
    shard_shapes = (
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(tree)
    )
    return sum(map(num_bytes, shard_shapes))
