"""Batch generation with `ray.data`, which distributes the rows of a dataset over many machines.

Tested against `generate` over all rows in one process (tests/integrations/test_ray_data.py).
"""

from __future__ import annotations

from typing import Any

import mars_jax as mj
from mars_jax.serve.prepare import AnyRule
from mars_jax.utils.errors import MarsError

try:
    import pyarrow
except ImportError:
    raise MarsError("the package ray is not installed: pip install 'ray[data]'.") from None


RESULTS = ("text", "tokens", "finish_reason", "tau", "log_probs")
"""Columns that `Generate` adds."""


class Generate:
    """A callable class for `ray.data.Dataset.map_batches` that continues the prompts in a batch of rows.

    Every actor loads the target and the draft once. A row is sampled with its own `seed`, or with the base seed plus
    its `id`. Its tokens therefore do not depend on the batch, the number of actors, or restarts.

    Args:
      target: name or path of the target, as for `mars_jax.load`.
      draft: spec of the drafter, as for `mars_jax.drafters.load`.
      verify: the rule, such as `verify.mars(theta=0.9)`, or its name; default `verify.exact()`.
      prompt: name of the column with the prompts: strings, token ids, or conversations, as for `mars_jax.generate`.
      seed: base seed, for rows without a `seed`.
      load_options: other arguments of `mars_jax.load`, such as `{"dtype": "int8"}`.
      draft_options: other arguments of `mars_jax.drafters.load`, such as `{"num_draft_tokens": 5}`.
      **settings: other arguments of `mars_jax.generate`, one value for all rows, such as `max_new_tokens`.

    Raises:
      MarsError: the rows have no integer `id`, or a column name clashes with an added column; see also `load` and
        `generate`.

    >>> import ray  # doctest: +SKIP
    >>> rows = ray.data.read_json("in.jsonl")  # doctest: +SKIP
    >>> rows.map_batches(  # doctest: +SKIP
    ...     Generate, fn_constructor_kwargs={"target": "tiny/target", "draft": "ngram"}, concurrency=4, batch_size=64
    ... ).write_json("out")
    """

    def __init__(
        self,
        target: str,
        draft: str = "none",
        verify: AnyRule | str | None = None,
        *,
        prompt: str = "prompt",
        seed: int = 0,
        load_options: dict[str, Any] | None = None,
        draft_options: dict[str, Any] | None = None,
        **settings: Any,
    ):
        self.target = mj.load(target, **(load_options or {}))
        self.rule = mj.verify.load(verify, self.target) if isinstance(verify, str) else verify
        self.drafter = mj.drafters.load(draft, self.target, **(draft_options or {}))
        self.prompt, self.seed, self.settings = prompt, seed, settings

    def __call__(self, batch: Any) -> pyarrow.Table:
        """Continue the prompts of a batch, and return the batch with additional columns.

        Args:
          batch: `pyarrow.Table`, or columns by name.

        Returns:
          All columns of `batch`, and `text`, `tokens` (new token ids), `finish_reason`, and `tau` (tokens per step);
          with `log_probs=True` also `log_probs`, the natural log-probabilities of the new tokens under the target.
        """
        # By default Ray passes a dict of numpy arrays; with batch_format="pyarrow" it passes a table.
        if not isinstance(batch, pyarrow.Table):
            batch = pyarrow.Table.from_pydict({name: list(column) for name, column in batch.items()})
        if clashes := [name for name in RESULTS if name in batch.column_names]:
            raise MarsError(f"the rows have a column '{clashes[0]}', which is a name of a result: rename it.")
        completions = mj.generate(
            self.target,
            self.drafter,
            self._column(batch, self.prompt),
            verify=self.rule,
            seed=self._seeds(batch),
            **self.settings,
        ).completions
        new_columns: dict[str, list[Any]] = {
            name: [getattr(completion, name) for completion in completions]
            for name in ("text", "tokens", "finish_reason")
        }
        new_columns["tau"] = [completion.metrics.tau for completion in completions]
        if self.settings.get("log_probs"):
            log_probs = (completion.log_probs for completion in completions)
            # With log_probs=True, every completion has log-probabilities, so all columns have the same length.
            new_columns["log_probs"] = [list(scores.log_prob) for scores in log_probs if scores is not None]
        for name, values in new_columns.items():
            batch = batch.append_column(name, pyarrow.array(values))
        return batch

    def _column(self, batch: pyarrow.Table, name: str) -> list[Any]:
        if name not in batch.column_names:
            raise MarsError(
                f"the rows have no column '{name}', only {', '.join(batch.column_names)}: add it."
            )
        return batch[name].to_pylist()

    def _seeds(self, batch: pyarrow.Table) -> list[int]:
        column = "seed" if "seed" in batch.column_names else "id"
        seeds_or_ids = self._column(batch, column)
        if not all(isinstance(number, int) for number in seeds_or_ids):
            raise MarsError(
                f"the column '{column}' holds values other than integers: number the rows, or add a column 'seed'."
            )
        return seeds_or_ids if column == "seed" else [(self.seed + number) % 2**32 for number in seeds_or_ids]
