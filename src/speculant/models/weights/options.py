"""The options of a quantised checkpoint in its config.json."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from speculant.errors import ModelError
from speculant.models.entries import is_whole, show

logger = logging.getLogger(__name__)

BELONGS = "use the config.json that belongs to these weights, or download the checkpoint again."
OTHER = "use another checkpoint of the model, such as a GGUF file."
MOST_SIZE = 2**24  # of a group
HARMLESS = (  # entries of AutoGPTQ and GPTQModel without an effect on the numbers that files stand for
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama", "dynamic", "exllama_config",
    "gptaq", "hessian", "hyb_act", "lm_head", "max_input_length", "meta", "method",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "offload_to_disk", "pack_impl", "pad_token_id", "quantizer",
    "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The entries of a quantization_config. Entries that are null count as absent."""

    method: str
    entries: Mapping[str, Any]
    _seen: set[str] = field(default_factory=lambda: {"quant_method"})

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry."""
        self._seen.add(key)
        found = self.entries.get(key)
        return default if found is None else found

    def one_of(self, key: str, known: Collection[Any], default: Any = None) -> Any:
        """Return an entry that must have one of these values. Raises ModelError for others."""
        found = self.get(key, default)
        if not any(type(found) is type(each) and found == each for each in known):
            listed = " or ".join(map(str, sorted(known)))
            raise self.error(key, found, f"can't be read: only {listed} can")
        return found

    def is_set(self, key: str) -> bool:
        """Return an entry that is true or false; an absent one is false. Raises ModelError for others."""
        return bool(self.one_of(key, (False, True), False))

    def group_size(self, key: str = "group_size") -> int:
        """Return the size of groups; -1 = one group. Raises ModelError."""
        found = self.get(key, -1)
        if not is_whole(found) or not (found == -1 or 0 < found <= MOST_SIZE):
            raise self.error(key, found, "is not the size of a group")
        return int(found)

    def refuse(self, *keys: str) -> None:
        """Raise ModelError for an entry that changes numbers in a way that is not implemented."""
        for key in keys:
            if self.get(key):
                raise self.error(key, self.get(key), "changes the numbers in a way that is not implemented")

    def warn_of_others(self, harmless: Collection[str]) -> None:
        """Warn of unknown entries, other than harmless ones."""
        others = {key: value for key, value in self.entries.items() if key not in self._seen and value}
        unknown = [f"{key} = {show(value)}" for key, value in sorted(others.items()) if key not in harmless]
        if unknown:
            logger.warning(
                "the quantization_config (%s) has options that are unknown and have no effect: %s",
                self.method, ", ".join(unknown),
            )  # fmt: skip

    def error(self, key: str, value: Any, problem: str) -> ModelError:
        """Return the error of an entry."""
        return ModelError(f"the quantization_config ({self.method}) has {key} = {show(value)}, which {problem}", OTHER)
