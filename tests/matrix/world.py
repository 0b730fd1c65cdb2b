"""Random checkpoints of every kind that a command opens. They are so small that compilation dominates the time."""

import dataclasses
import functools
import json
import shutil
import string
import tempfile
from pathlib import Path

import jax
import numpy as np
from transformers import AutoTokenizer

import mars_jax as mj
from mars_jax import contrib, hub
from mars_jax.contrib.drafters.dflash_files import save_dflash
from mars_jax.contrib.drafters.medusa_files import save_medusa
from mars_jax.contrib.drafters.system_files import System, save_system
from mars_jax.contrib.models import dflash_head, indicator, medusa_layers, mixer
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core.axes import parse_mesh
from mars_jax.drafters.registry import definitions
from mars_jax.hub.heads.mtp_files import save_mtp
from mars_jax.models import ModelConfig, eagle_head, init_params
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import init_params as init_head
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.verify import rules
from tests.cli.conftest import write_tokenizer

CORPUS = "a story of the sea and the sun, and of a man of the sea"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}a: "


@dataclasses.dataclass(frozen=True)
class World:
    target: str
    drafters: dict[str, str]  # name in `drafters.definitions()` -> name and path
    rules: dict[str, str]  # name in `rules()` -> name and path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Return a folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="mars-jax-matrix-")


@functools.cache
def world() -> World:
    """Write the checkpoints, once per process."""
    folder = Path(_folder().name)
    vocab = write_tokenizer(folder / "target", CORPUS, 20)
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    config = ModelConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, max_positions=128,
        eos_token_ids=(0,),
    )  # fmt: skip
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))

    def normal(x):
        return draw.normal(size=x.shape)

    def random_weights(shapes, scale):
        """Draw weights with numpy, which needs no compilation. Norms stay near 1."""
        return jax.tree.map(lambda x: (normal(x) * scale + (x.ndim == 1)).astype(np.float32), shapes)

    def add_noise(params, share):
        return jax.tree.map(lambda x: x + share * np.std(x) * normal(x).astype(np.float32), params)

    def heads(init, *arguments):
        arrays = random_weights(jax.eval_shape(lambda key: init(*arguments, key), jax.random.key(0)), 0.2)
        return arrays | {"ids": draft_ids.astype(np.int32)} if "ids" in arrays else arrays

    # Heads draft from all tokens of the target except 8.
    draft_ids = np.setdiff1d(np.arange(vocab), np.random.default_rng(1).choice(vocab, 8, replace=False))

    params = random_weights(shapes, 0.5)
    # The target prefers letters and spaces, so that stop strings, spans and constraints occur in its output.
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    letters = {i for i in range(vocab) if set(tokenizer.decode([i])) <= set(string.ascii_lowercase + " ,")}
    params["unembed"] = params["unembed"] * np.isin(np.arange(vocab), [*letters])[:, None].astype(np.float32)
    hub.save(folder / "target", config, params, overwrite=True)
    for name, share in (("draft", 0.03), ("proxy", 0.02)):
        shutil.copytree(folder / "target", folder / name)
        hub.save(folder / name, config, add_noise(params, share), overwrite=True)
    head = EagleConfig(
        version=3, layer=config, target_hidden_size=32, draft_vocab_size=len(draft_ids), feature_layers=(0,)
    )
    hub.save_eagle(folder / "eagle", head, heads(eagle_head.init_params, head))
    module = MtpConfig.outline(config)
    save_mtp(folder / "mtp", module, heads(init_head, module))
    medusa = MedusaConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=vocab)
    save_medusa(folder / "medusa", medusa, heads(medusa_layers.init_params, medusa))
    layer = dataclasses.replace(config, family="qwen3", qk_norm=True)
    block = DFlashConfig(
        layer=layer, target_hidden_size=32, feature_layers=(0,), block_size=5, mask_token=1,
        draft_vocab_size=len(draft_ids), own_unembed=True,
    )  # fmt: skip
    save_dflash(folder / "dflash", block, heads(dflash_head.init_params, block))
    arrays = {"weight": draw.normal(size=32).astype(np.float32), "bias": np.ones(1, np.float32)}
    mask = ((True, False),)
    for system, tensors in (
        (System(name="sprinter", draft="draft"), arrays),
        (System(name="trispec", draft="draft", proxy="proxy", draft_tokens=3), None),
        (System(name="via_sd", draft="draft", layers=mask, draft_tokens=3), None),
    ):
        save_system(folder / system.name, system, tensors)
        for part in ("draft", "proxy"):
            shutil.copytree(folder / part, folder / system.name / part)
    rows = [{"tokens": draw.integers(1, vocab, 9).tolist() * 3}]
    (folder / "replay.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    contrib.save(folder / "learned", heads(indicator.init_params, 32))
    contrib.save(folder / "diversed", heads(mixer.init_params, 32), "diversed")
    files = {"model": "draft", "replay": "replay.jsonl"}
    weights = {"equivalent": "case,space"}
    drafts, verified = {}, {}
    for name, row in definitions().items():
        drafts[name] = f"{name}:{folder / files.get(name, name)}" if row.path else name
    for name, row in rules().items():
        verified[name] = f"{name}:{weights.get(name, folder / name)}" if "weights" in row.needs else name
    return World(target=str(folder / "target"), drafters=drafts, rules=verified)


@functools.cache
def target(dtype: str, cache_dtype: str | None, mesh: str | None):
    """Load the target, once for each combination of arguments."""
    options = {} if mesh is None else {"mesh": parse_mesh(mesh)}
    return mj.load(world().target, dtype=dtype, cache_dtype=cache_dtype, **options)
