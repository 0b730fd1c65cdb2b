"""EAGLE heads: one or a few transformer layers that predict the target's next feature from its previous features.

In a head with several layers, only the first layer reads embeddings and features. The others are plain transformer
layers.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858; the same heads with a different tree) and EAGLE-3 (arXiv
2503.01840). Tested against a PyTorch transcription that uses transformers' Llama layers (tests/models/test_eagle.py).

Dimensions: B batch, N tokens, E hidden size of the head, F hidden size of the target, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.axes import hold_whole
from mars_jax.core.pick import pick
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, Params, PyTree, Visible
from mars_jax.models.attention import attending
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import FeatureHead, layers_like
from mars_jax.models.heads import init_params as init_params
from mars_jax.models.layers import dense, gated_mlp, rms_norm
from mars_jax.models.rope import rotation_at
from mars_jax.models.transformer import attention
from mars_jax.models.weights import Weight, layer_rows
from mars_jax.utils.errors import MarsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(FeatureHead):
    """Static configuration of an EAGLE head.

    Raises:
      MarsError: fields contradict each other.
    """

    kind = "eagle"
    title = "EAGLE head"
    version: int  # 1: EAGLE or EAGLE-2, which read the target's last hidden state; 3: EAGLE-3
    fc_bias: bool = False  # `fc` has a bias
    fc_norm: bool = False  # normalise each feature before concatenation (EAGLE-3.1)
    input_norm: bool = False  # normalise the concatenated features (`norm_before_fc` of speculators)
    norm_before_residual: bool = False  # the residual stream starts with the normalised feature
    norm_output: bool = False  # apply `norm` to the output before it is used as the next feature (EAGLE-3.1)
    own_unembed: bool = True  # the head has an unembedding; False: it uses the target's

    def __post_init__(self):
        if self.version not in (1, 3):
            raise MarsError(
                f"EAGLE version {self.version} is not known: expected 3, or 1 (also for EAGLE-2: its heads are equal)."
            )
        if self.version == 3 and not self.feature_layers:
            raise MarsError(
                "an EAGLE-3 head needs the layers of the target that it reads: give feature_layers."
            )
        if self.layer.delta is not None or (self.version == 3 and self.layer.latent is not None):
            raise MarsError(
                "an EAGLE head with recurrent layers, or an EAGLE-3 head with latent attention, is not supported: use "
                "a head with plain attention."
            )
        if self.version == 1 and self.layer.hidden_size != self.target_hidden_size:
            raise MarsError(
                f"the EAGLE head is {self.layer.hidden_size} wide and the target {self.target_hidden_size}: only an "
                "EAGLE-3 head may differ from its target."
            )
        super().__post_init__()

    @classmethod
    def outline(cls, target: ModelConfig) -> Self:
        """Return a typical EAGLE-3 config: one Llama layer as wide as the target, and a draft vocabulary of 32,000.

        >>> target = ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=32, num_heads=1)
        >>> EagleConfig.outline(target).feature_layers
        (1, 15, 28)
        """
        count = target.num_layers
        return cls(
            version=3,
            layer=layers_like(target),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(32000, target.vocab_size),
            # As in SafeAILab's heads: layers near the start, in the middle and near the end of the target.
            feature_layers=tuple(sorted({min(1, count - 1), max(count // 2 - 1, 0), max(count - 4, 0)})),
        )

    @property
    def read_once(self) -> tuple[str, ...]:
        """Names of the weights that combine the target's features in EAGLE-3; only one pass per step reads them."""
        return ("fc", "fc_bias", "fc_norm") if self.version == 3 else ()

    def weights(self) -> tuple[Weight, ...]:
        c, layer, e = self, self.layer, self.layer.hidden_size
        first, width, features = "layers.0", e, c.target_hidden_size + e
        if c.version == 3:
            width, features = 2 * e, len(c.feature_layers) * c.target_hidden_size
            if layer.num_layers == 1:
                first = "midlayer"
        rows = [Weight(("fc",), "fc.weight", (e, features), "normal")]
        if c.own_embed:
            rows.insert(0, Weight(("embed",), "embed_tokens.weight", (layer.vocab_size, e), "normal"))
        if c.fc_bias:
            rows.append(Weight(("fc_bias",), "fc.bias", (e,), "zeros"))
        if c.fc_norm:
            for i in range(len(c.feature_layers)):
                rows.append(Weight(("fc_norm", i), f"fc_norm.{i}.weight", (c.target_hidden_size,), "ones"))
        if c.input_norm:
            rows.append(Weight(("input_norm",), "input_norm.weight", (features,), "ones"))
        plain_layer = dataclasses.replace(layer, num_experts=0, post_norms=False, norm_plus_one=False)
        # The first layer reads an embedding and a feature. Version 3 normalises them separately and concatenates them.
        # Version 1 combines them with `fc`.
        norm, *layer_weights = layer_rows(plain_layer, width=width)
        norm_weights = []
        if c.version == 3:
            norm_weights = [
                norm._replace(path=("embed_norm",)),
                norm._replace(path=("hidden_norm",), name="hidden_norm.weight"),
            ]
        rows += [row.below(("layer",), first) for row in (*norm_weights, *layer_weights)]
        for i in range(1, layer.num_layers):
            rows += [row.below(("more", i - 1), f"layers.{i}") for row in layer_rows(plain_layer)]
        if c.version == 3:
            rows.append(Weight(("norm",), "norm.weight", (e,), "ones"))
        if c.own_unembed:
            rows.append(Weight(("unembed",), "lm_head.weight", (c.draft_vocab_size, e), "normal"))
        return tuple(rows)

    @jax.named_scope("fuse")
    def fuse(self, head: PyTree, output: ForwardOutput) -> Array:
        if self.version == 1:
            return output.hidden
        features = output.features
        if self.fc_norm:
            features = [
                rms_norm(x, scale, self.layer.norm_eps)
                for x, scale in zip(features, head["fc_norm"], strict=True)
            ]
        joined = hold_whole(jnp.concatenate(list(features), axis=-1)).astype(head["fc"].dtype)
        if self.input_norm:
            joined = rms_norm(joined, head["input_norm"], self.layer.norm_eps)
        return dense(joined, head["fc"], head.get("fc_bias"))

    def forward(
        self,
        target: LanguageModel,
        params: Params,
        feature: Array,
        tokens: Array,
        visible: Visible,
        cache: KVCache,
        needed: Array | None = None,
    ) -> tuple[Array, KVCache]:
        head, c = params.draft, self.layer
        layer = head["layer"]
        with jax.named_scope("embed"):
            token_embedding = self.embed(target, params, tokens).astype(feature.dtype)
        # x is the input of the first layer's attention, and h is the residual stream.
        if self.version == 3:
            normed = rms_norm(feature, layer["hidden_norm"], c.norm_eps)
            h = normed if self.norm_before_residual else feature
            x = jnp.concatenate([rms_norm(token_embedding, layer["embed_norm"], c.norm_eps), normed], axis=-1)
        else:
            joined = hold_whole(jnp.concatenate([token_embedding, feature], axis=-1))
            h = x = dense(joined, head["fc"], head.get("fc_bias"))
        # The rotation angles are computed, not looked up in a table, so positions may exceed the head's max_positions.
        rotation = rotation_at(visible.positions, c.rope, c.rotary_dim)
        with jax.named_scope("mask"):
            attend = attending("xla", visible, cache.slots, None)
        ks, vs = [], []
        for i, part in enumerate((layer, *head.get("more", ()))):
            with jax.named_scope("attention"):
                x = rms_norm(h, part["attention_norm"], c.norm_eps) if i else x
                mixed, k, v = attention(c, part, x, rotation, attend, cache.k[i], cache.v[i])
                h = h + mixed
            if needed is not None and i == c.num_layers - 1:
                h = pick(h, needed)
            with jax.named_scope("mlp"):
                h = h + gated_mlp(part, rms_norm(h, part["mlp_norm"], c.norm_eps), c.activation)
            ks.append(k)
            vs.append(v)
        if self.norm_output:
            h = rms_norm(h, head["norm"], c.norm_eps)
        return h, KVCache(k=tuple(ks), v=tuple(vs))

    @jax.named_scope("unembed")
    def logits(self, target: LanguageModel, params: Params, feature: Array) -> Array:
        if self.version == 3 and not self.norm_output:
            feature = rms_norm(feature, params.draft["norm"], self.layer.norm_eps)
        return self.unembed(target, params, feature)
