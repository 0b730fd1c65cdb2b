"""Upper limits on values from users and files. Each limit is checked once, when the value is read.

Every limit is higher than any published model or real prompt needs, and low enough that rejecting a larger value takes
at most 5 seconds of processor time and 1.5 GB of memory. SECURITY.md lists the limits. Tests: tests/test_limits.py.
"""

from __future__ import annotations

NAME_BYTES = 255
"""Length of one name in a path, the NAME_MAX of common file systems."""
PATH_BYTES = 4095
"""Length of a path, the PATH_MAX of Linux without the terminating NUL."""
FILE_BYTES = 1 << 34
"""Size of a file of training text or prompts: 16 GiB. Sparse or damaged files may appear to be larger."""
DATASET_FILES = 10_000
"""Number of files and folders in a dataset's folder. All of them are listed when the dataset is read."""
JSON_BYTES = 16 << 20
"""Size of a JSON file, or of the header of a safetensors file. Parsed nested lists take 30 times the memory of their
text."""
INDEX_BYTES = 24 << 20
"""Size of the index of a checkpoint's shards. The index of Qwen3-235B in 4 bits is about 14 MB."""
SHARDS = 10_000
"""Number of files listed in the index of a checkpoint."""
TOKENIZER_BYTES = 48 << 20
"""Size of a tokenizer file. Gemma's tokenizer.json is 33 MB."""
GGUF_HEADER_BYTES = 32 << 20
"""Size of the metadata and tensor table of a GGUF file. In Gemma's files they take up 19 MB."""
TOKEN_BYTES = 1024
"""Length of a token in a GGUF vocabulary. The tokenizer splits each token in every possible way. Published tokens are
at most 256 bytes long."""
LAYERS = 1024
"""Number of layers in a model. Llama 3.1 405B has 126."""
EXPERTS = 65_536
"""Number of experts in all layers of a model. Kimi K2 has 23,424."""
DIMENSION = 1 << 24
"""Any dimension of a model, such as a width, a vocabulary size or a number of heads. The largest published vocabulary
has 262,208 tokens."""
POSITIONS = 2**31 - 1
"""Number of positions in a context, because positions are int32."""
LINE_BYTES = 16 << 20
"""Length of a line in a prompts file: enough for a prompt of `PROMPT_BYTES` with JSON escapes."""
PROMPT_BYTES = 8 << 20
"""Length of a prompt or a rendered conversation before tokenization: about two million tokens of English text."""
PREFIXES = (1 << 19, 1 << 21)
"""Lengths of the prefixes of a long prompt that are tokenized first. A prompt with far too many tokens is then rejected
before all of it is tokenized. Tokenization takes 400 bytes of memory per token."""
TEMPLATE_BYTES = 96 << 10
"""Length of a chat template. The longest published templates are about 30 KB."""
TEMPLATE_SECONDS = 4
"""Processor time in seconds for rendering a chat template. A conversation of 8 MiB takes less than 1 second."""
TEMPLATE_SIZE = 1 << 27
"""Total number of characters in all values created while a chat template is rendered. A list item counts as 64
characters."""
DRAFT_TOKENS = 128
"""Number of tokens in a drafted chain. Each token is a node in the target's forward pass, which becomes more expensive
beyond this limit."""
TREE_NODES = 1024
"""Number of nodes in a draft tree. All of them are part of the target's forward pass."""
BATCH_ROWS = 1 << 16
"""Number of prompts that are decoded in one batch."""
TOP_LOG_PROBS = 100
"""Number of most probable tokens that are reported for each new token. Each reported token takes space in memory and in
the output file."""
SAMPLES = 1 << 16
"""Number of completions of one prompt. Each completion is a separate request."""
NGRAM_TOKENS = 64
"""Length in tokens of the longest suffix that an n-gram drafter searches for. Each token of the suffix costs one pass
over the row."""
