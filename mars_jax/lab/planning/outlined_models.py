"""Configs, without weights, of the models in published results, keyed by name.

The fields come from the config.json files of lmsys/vicuna-13b-v1.3, meta-llama/Llama-3.1-8B-Instruct,
meta-llama/Llama-3.2-1B-Instruct, meta-llama/Llama-3.3-70B-Instruct, Qwen/Qwen3-8B, Qwen/Qwen3-32B,
Qwen/Qwen3-235B-A22B, Qwen/Qwen3.5-9B, Qwen/Qwen3.5-35B-A3B, openai/gpt-oss-20b and openai/gpt-oss-120b. All other
fields have the defaults of the model family.
"""

from __future__ import annotations

import json
from pathlib import Path

from mars_jax.hub.config_json import from_json, is_mxfp4

_FIELDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CONFIGS = {name: from_json(fields) for name, fields in _FIELDS.items()}
PACKED_EXPERTS = tuple(name for name, fields in _FIELDS.items() if is_mxfp4(fields))
"""Models whose experts are published in MXFP4."""
