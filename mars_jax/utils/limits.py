"""Upper bounds on values from users and files, each checked once, on input.

Every bound is above the sizes of published models and real prompts, and low enough that rejecting a larger value takes
less than 1.5 GB and 5 seconds. SECURITY.md lists them; oracle: tests/test_limits.py.
"""

from __future__ import annotations

NAME_BYTES = 255
"""One name in a path: NAME_MAX of common file systems."""
PATH_BYTES = 4095
"""A path: PATH_MAX of Linux, minus the terminating NUL."""
FILE_BYTES = 1 << 34
"""A file of training text or prompts: 16 GiB, below the apparent size of some sparse or damaged files."""
DATASET_FILES = 10_000
"""Files and folders in a dataset's folder; the whole folder is listed."""
JSON_BYTES = 16 << 20
"""A JSON file, or the header of a safetensors file. Parsed nested lists take 30 times the memory of their text."""
INDEX_BYTES = 24 << 20
"""The index of a checkpoint's shards: about 14 MB for Qwen3-235B in 4 bits."""
SHARDS = 10_000
"""Files listed in the index of a checkpoint."""
TOKENIZER_BYTES = 48 << 20
"""A file of a tokenizer: Gemma's tokenizer.json takes 33 MB."""
GGUF_HEADER_BYTES = 32 << 20
"""The metadata and tensor table of a GGUF file: Gemma's take 19 MB."""
TOKEN_BYTES = 1024
"""One token of a GGUF vocabulary. The tokenizer tries every split of it. Published tokens are up to 256 bytes long."""
LAYERS = 1024
"""Layers of a model: Llama 3.1 405B has 126."""
EXPERTS = 65_536
"""Experts of a model, over all layers: Kimi K2 has 23,424."""
DIMENSION = 1 << 24
"""A width, vocabulary size, or number of heads: the largest vocabulary has 262,208 tokens."""
POSITIONS = 2**31 - 1
"""Positions of a context, which are int32."""
LINE_BYTES = 16 << 20
"""A line of a prompts file: a prompt of `PROMPT_BYTES`, escaped."""
PROMPT_BYTES = 8 << 20
"""A prompt, or a rendered conversation, before it is encoded: two million English tokens."""
PREFIXES = (1 << 19, 1 << 21)
"""Lengths of prefixes of a long prompt to encode first, so that a prompt far above the limit is rejected before all of
it is encoded (a tokenizer uses 400 bytes per token)."""
TEMPLATE_BYTES = 96 << 10
"""A chat template: the longest published ones take about 30 KB."""
TEMPLATE_SECONDS = 4
"""Processor time to render a chat template once: a conversation of 8 MiB takes less than 1 s."""
TEMPLATE_SIZE = 1 << 27
"""Characters of all values that a chat template creates in one rendering; a list item counts as 64."""
DRAFT_TOKENS = 128
"""Tokens of a drafted chain. Each one is a node of the target's forward pass, whose cost grows beyond this."""
TREE_NODES = 1024
"""Nodes of a draft tree, for the same reason."""
BATCH_ROWS = 1 << 16
"""Prompts decoded at once."""
TOP_LOG_PROBS = 100
"""Most probable tokens reported for each new token. Each is an entry in memory and in a row of the output."""
SAMPLES = 1 << 16
"""Completions of one prompt. Each is a separate request."""
NGRAM_TOKENS = 64
"""Tokens of the longest suffix that an n-gram drafter searches for; each token costs one pass over the row."""
