"""A checkpoint's tokenizer with the method names of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speculant.errors import RequestError
from speculant.text.chat import check_roles, read_messages
from speculant.text.tokenizer import Tokenizer


class UserTokenizer:
    """The result of `LLM.get_tokenizer`: texts to ids and back, chat templates, special tokens.

    Arguments have the names of transformers' tokenizers and the defaults of its version 5. Results are lists.
    """

    def __init__(self, tokenizer: Tokenizer, name_or_path: str) -> None:
        self._tokenizer, self.name_or_path = tokenizer, name_or_path

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of a text, or of several."""
        ids: Any = (
            self.encode(text, add_special_tokens)
            if isinstance(text, str)
            else [self.encode(each, add_special_tokens) for each in text]
        )
        ones = [1] * len(ids) if isinstance(text, str) else [[1] * len(each) for each in ids]
        return {"input_ids": ids, "attention_mask": ones}

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError for one that can't be encoded."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one or more token ids. Raises RequestError for ids that can't be decoded."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(each) for each in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary has them."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, add_special_tokens))
        return tokens

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the vocabulary's token of an id, or of each; None for an id without one."""
        if isinstance(ids, int):
            return self._tokenizer.backend.id_to_token(ids)
        return [self._tokenizer.backend.id_to_token(int(each)) for each in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or of each; None for one that the vocabulary does not have."""
        if isinstance(tokens, str):
            return self._tokenizer.backend.token_to_id(tokens)
        return [self._tokenizer.backend.token_to_id(each) for each in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Return every token's id."""
        return self._tokenizer.vocab()

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> str | list[int] | dict[str, Any]:
        """Return a conversation in the model's format: token ids with their mask, ids alone, or text.

        chat_template: the source of a template to use instead of the checkpoint's. Raises RequestError for messages
        that the template can't render, ModelError for a checkpoint without a template.
        """
        if continue_final_message:
            raise RequestError("continue_final_message is an argument of LLM.chat only", "give it to LLM.chat.")
        given = {**variables, "tools": list(tools) if tools else None}
        source = chat_template or self._tokenizer.template_for(bool(given["tools"]))
        messages = read_messages(conversation, source)
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt, given, source)
        check_roles(messages, source or "", text)
        if not tokenize:
            return text
        return self(text, add_special_tokens=False) if return_dict else self.encode(text, add_special_tokens=False)

    @property
    def chat_template(self) -> str | None:
        """The source of the checkpoint's template; None if it has none."""
        return self._tokenizer.chat_template

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones."""
        size: int = self._tokenizer.backend.get_vocab_size(with_added_tokens=False)
        return size

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of special tokens, ascending."""
        return sorted(self._tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, in the order of their ids."""
        tokens: list[str] = self.convert_ids_to_tokens(self.all_special_ids)
        return tokens

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text; None if the checkpoint names none."""
        return self._tokenizer.special_token("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text."""
        return self._tokenizer.special_token("bos_token")

    @property
    def pad_token(self) -> str | None:
        """The padding token of other engines; nothing is padded here."""
        return self._tokenizer.special_token("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The token for text that has no other token."""
        return self._tokenizer.special_token("unk_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        return self._id_of(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return self._id_of(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return self._id_of(self.pad_token)

    @property
    def unk_token_id(self) -> int | None:
        """The id of `unk_token`."""
        return self._id_of(self.unk_token)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.convert_tokens_to_ids(token)
