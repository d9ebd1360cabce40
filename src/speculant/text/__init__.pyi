from .chat import (
    TOOL_USE as TOOL_USE,
    ChatTemplate as ChatTemplate,
    answer_in as answer_in,
    find_template as find_template,
    read_template as read_template,
)
from .gguf_splits import SPLITS as SPLITS, WordSplit as WordSplit
from .gguf_tokenizer import ROLE_KEYS as ROLE_KEYS, read_gguf_tokenizer as read_gguf_tokenizer
from .length_bounds import MOST_TIMES as MOST_TIMES, check_length_bounds as check_length_bounds
from .messages import (
    check_roles as check_roles,
    check_variables as check_variables,
    read_messages as read_messages,
    up_to_mark as up_to_mark,
    with_mark as with_mark,
)
from .prompt_files import FilePrompt as FilePrompt, read_prompts as read_prompts
from .reasoning import (
    TAGS as TAGS,
    ExpectedReasoning as ExpectedReasoning,
    expect_reasoning as expect_reasoning,
    find_tags as find_tags,
)
from .sentencepiece import find_sentencepiece as find_sentencepiece
from .stop import (
    Released as Released,
    StopSearch as StopSearch,
    StopStrings as StopStrings,
    compile_stops as compile_stops,
)
from .stream import (
    IncrementalDetokenizer as IncrementalDetokenizer,
    TextStream as TextStream,
    TokenOffsets as TokenOffsets,
)
from .token_bounds import characters_per_token as characters_per_token
from .token_bytes import byte_table as byte_table, fallback_byte as fallback_byte
from .token_files import read_lines as read_lines, read_sequences as read_sequences
from .tokenizer import (
    Tokenizer as Tokenizer,
    compare_vocabularies as compare_vocabularies,
    substitute_token as substitute_token,
)
from .unigram import BYTES as BYTES, TokenType as TokenType
from .user_tokenizer import UserTokenizer as UserTokenizer
