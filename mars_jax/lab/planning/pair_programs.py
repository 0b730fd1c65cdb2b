"""The decode loop of a pair of models, compiled from abstract weights and state for devices that need not be present.

Tested against the byte counts in tests/lab/planning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections import Counter
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
from mars_jax.utils import activity
from mars_jax.utils.settings import BITS
from mars_jax.utils.types import JsonObject


def wide_dtype(dtype: str) -> str:
    """Return the dtype of the unquantised weights for a requested `dtype`, which is one of `settings.DTYPES`.

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
        # By default, a block drafter drafts a tree as deep as its block.
        if drafter_definition.block and config.drafts and tree is None and length is None and not chain:
            tree = Dynamic(depth=config.drafts)
        cache_options = {"cache_dtype": dtype} if config.cached else {}
        make_head = functools.partial(drafter_definition.cls, config, tree=tree, **cache_options)
        return PlannedDraft(kind, lambda target: make_head(target, length), config)
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


def default_mesh(config: ModelConfig, count: int, batch: int) -> str:
    """Return the default axes of a mesh of `count` devices, in the format of --mesh.

    The size of `model` is the largest divisor of `count` that also divides the number of key-value heads. With latent
    attention, whose heads share one cache row per token, it divides the number of attention heads instead. The
    remaining devices go to `data` if they divide the batch evenly, and otherwise also to `model`.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=8)
    >>> default_mesh(config, 16, 2), default_mesh(config, 16, 1)
    ('data=2,model=8', 'model=16')
    """
    heads = config.num_kv_heads if config.latent is None else config.num_heads
    model_size = math.gcd(heads, count)
    if count > model_size and batch % (count // model_size) == 0:
        return f"data={count // model_size},model={model_size}"
    return f"model={count}"


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
        return abstract_state(self._decoder, self.params, self.verify, self.mesh, self.batch, self.context)

    def lower(self) -> jax.stages.Lowered:
        """Lower the decode loop."""
        with jax.set_mesh(self.mesh):
            return run.lower(self._decoder, self.params, self.state)

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


def abstract_state(
    decoder: Decoder, params: Params, rule: Rule, mesh: Mesh, batch: int, context: int
) -> DecodeState:
    """Return the abstract state of `batch` rows of `context` tokens, with shardings on a mesh."""

    def start(params: Params) -> DecodeState:
        row_keys = keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32))
        # Only shapes matter here, so use the shortest prompt that prefills a token.
        tokens, lengths = jnp.zeros((batch, context), jnp.int32), jnp.full((batch,), 2, jnp.int32)
        prompts = Prompts(tokens, lengths, make_controls(batch, limit=context), rule, row_keys)
        return decoder.init(params, prompts)

    with jax.set_mesh(mesh):
        state = jax.eval_shape(start, params)
        placement = shardings.state_shardings(state, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placement)


def local_bytes(tree: PyTree) -> int:
    """Return how many bytes of a tree of abstract arrays one device stores."""
    shapes = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(num_bytes(jax.ShapeDtypeStruct(shape, dtype)) for shape, dtype in shapes)


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class OutOfMemory(Exception):
    """Error for a program that does not fit on its devices. `used`: bytes per device, or 0 if unknown."""

    def __init__(self, used: int):
        super().__init__(f"{used} bytes")
        self.used = used


@activity.doing("compiling")
def compile_program(lowered: jax.stages.Lowered, *, read: Callable[[str], Any] | None = None) -> JsonObject:
    """Compile a program and report the compile time, the byte counts, the kernels and the collectives.

    Args:
      lowered: program lowered with abstract arguments, which are sharded over the devices to compile for.
      read: called with the text of the compiled program; its result becomes the entry "read" of the report.

    Raises:
      OutOfMemory: the program does not fit.
    """
    start_time = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _out_of_memory(str(error)) from None
    compile_seconds = time.perf_counter() - start_time
    memory, program_text, costs = compiled.memory_analysis(), compiled.as_text(), compiled.cost_analysis()
    # XLA's TPU compiler returns all three.
    assert memory is not None and program_text is not None and costs is not None
    return {
        "read": None if read is None else read(program_text),
        "seconds": round(compile_seconds, 2),
        "bytes_accessed": int(costs["bytes accessed"]),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "mosaic_kernels": program_text.count('custom_call_target="tpu_custom_call"'),
        "collectives": collectives(program_text),
    }


def _out_of_memory(text: str) -> OutOfMemory:
    """Parse a message such as "... Used 20.95G of 15.75G hbm ..."."""
    unit_bytes = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", text)
    if match is None:
        return OutOfMemory(0)
    return OutOfMemory(int(float(match[1]) * unit_bytes[match[2]]))


def collectives(program: str) -> dict[str, int]:
    """Count the collectives of an HLO program, keyed by kind and result shape."""
    # An asynchronous collective has a -start and a -done instruction; the pattern matches only the first. The return
    # statement removes the layouts, which are in braces, from the shapes.
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    matches = (pattern.search(line) for line in program.splitlines())
    return dict(Counter(f"{hit[2]} {re.sub(r'{[^}]*}', '', hit[1])}" for hit in matches if hit))


def held_bytes(report: JsonObject) -> int:
    """Return a program's peak bytes on a device: arguments, results that alias no argument, and temporaries."""
    return (
        report["argument_bytes"]
        + report["output_bytes"]
        - report["aliased_bytes"]
        + report["temporary_bytes"]
    )
