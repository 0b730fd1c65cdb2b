"""Multi-token prediction (MTP) module: an additional decoder layer that is trained with the target.

The module predicts the token after the next token. To draft more tokens, it reads its own output.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2; here with a single module), MiMo (arXiv 2505.07608), and the files
`qwen3_next_mtp.py` and `qwen3_5_mtp.py` of vLLM and SGLang. Tested against `MtpModel` of transformers, and against
PyTorch versions of the modules of MiMo and Qwen (tests/models/test_mtp.py).

Dimensions: B batch, N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.axes import hold_whole
from mars_jax.core.pick import pick
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, Params, PyTree, Visible
from mars_jax.models.attention import attending
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import FeatureHead
from mars_jax.models.layers import dense, rms_norm
from mars_jax.models.rope import rotation_at
from mars_jax.models.transformer import run_layer
from mars_jax.models.weights import Weight, layer_rows, stacked


class Layout(NamedTuple):
    """Checkpoint names of a module's tensors, and variations of its forward pass."""

    prefix: str  # prefix of all names; may contain a placeholder for the number of the target's layers
    embed_norm: str
    hidden_norm: str
    fc: str
    norm: str
    layer: str = ""  # prefix of the names of the decoder layer's tensors
    # MiMo: the feature is the residual stream before the target's last norm, and comes before the embedding in the
    # input of `fc`. The embedding at position 0 is zero (as in `MiMoMultiTokenPredictorLayer` of vLLM and SGLang).
    mimo: bool = False


DEEPSEEK = Layout("model.layers.{}", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = Layout("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.")
LAYOUTS = {
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mimo": Layout(
        "model.mtp_layers.0",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        mimo=True,
    ),
}
"""Layouts of modules, by the model family of the target. Other families use `DEEPSEEK`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig(FeatureHead):
    """Static configuration of an MTP module, which uses its target's embedding and unembedding.

    Raises:
      MarsError: fields contradict each other.
    """

    kind = "mtp"
    title = "MTP module"
    target_layers: int  # number of layers in the target

    @classmethod
    def outline(cls, target: ModelConfig) -> Self:
        """Return the config of a target's module: one layer like the target's last layer, but always with attention.

        >>> target = ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=4, num_heads=1)
        >>> MtpConfig.outline(target).weights()[2].name
        'model.layers.4.eh_proj.weight'
        """
        layer = dataclasses.replace(
            target, num_layers=1, windows=target.windows[-1:], nope_layers=(), dense_layers=(), delta=None
        )
        config = cls(
            layer=layer,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=target.vocab_size,
            target_layers=target.num_layers,
        )
        if config.layout.mimo:
            config = dataclasses.replace(config, feature_layers=(target.num_layers - 1,))
        return config

    @property
    def layout(self) -> Layout:
        """Layout of the module's checkpoint."""
        return LAYOUTS.get(self.layer.family, DEEPSEEK)

    @property
    def prefix(self) -> str:
        """Prefix of the names of the module's tensors, without the trailing dot."""
        return self.layout.prefix.format(self.target_layers)

    def weights(self) -> tuple[Weight, ...]:
        e, names = self.layer.hidden_size, self.layout
        unit = "zeros" if self.layer.norm_plus_one else "ones"
        rows = [
            Weight(("embed_norm",), f"{names.embed_norm}.weight", (e,), unit),
            Weight(("hidden_norm",), f"{names.hidden_norm}.weight", (e,), unit),
            Weight(("fc",), f"{names.fc}.weight", (e, 2 * e), "normal"),
            *(
                row._replace(path=("layer", *row.path), name=names.layer + row.name)
                for row in layer_rows(self.layer)
            ),
            Weight(("norm",), f"{names.norm}.weight", (e,), unit),
        ]
        return tuple(row._replace(name=f"{self.prefix}.{row.name}") for row in rows)

    def leaves(self) -> dict[Weight, tuple[Weight, ...]]:
        return stacked(self.weights())

    def fuse(self, head: PyTree, output: ForwardOutput) -> Array:
        if self.feature_layers:
            return output.features[0]
        return output.hidden

    def _norm(self, x: Array, scale: Array) -> Array:
        return rms_norm(x, scale, self.layer.norm_eps, plus_one=self.layer.norm_plus_one)

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
        with jax.named_scope("embed"):
            token_embedding = self.embed(target, params, tokens).astype(feature.dtype)
            if self.layout.mimo:
                token_embedding = jnp.where(visible.positions[..., None] == 0, 0, token_embedding)
            # `enorm`, `hnorm` and `eh_proj` in DeepSeek's checkpoints, where the embedding precedes the feature.
            parts = [
                self._norm(token_embedding, head["embed_norm"]),
                self._norm(feature, head["hidden_norm"]),
            ]
            if self.layout.mimo:
                parts.reverse()
            x = dense(hold_whole(jnp.concatenate(parts, axis=-1)), head["fc"])
        rotation = rotation_at(visible.positions, c.rope, c.rotary_dim)
        with jax.named_scope("mask"):
            attend = attending("xla", visible, cache.slots, c.windows[0])
        rows = cache.k[0], cache.v[0]
        x, (k, v) = run_layer(c, (True, False), head["layer"], x, rotation, attend, rows)
        if needed is not None:
            x = pick(x, needed)
        x, _ = run_layer(c, (False, True), head["layer"], x, rotation, attend, None)
        # Both the next pass and the logits use the normalised output (`shared_head.norm`).
        return self._norm(x, head["norm"]), KVCache(k=(k,), v=(v,))

    def logits(self, target: LanguageModel, params: Params, feature: Array) -> Array:
        return self.unembed(target, params, feature)
